"""Saved contexts: the file format, and saving and loading the cache.

One safetensors file holds the tensors of every layer, as "NAME.LAYER", the token ids, and JSON in its header: the
model's fingerprint and how the text was compressed. A checksum covers all of it.
"""

from dataclasses import asdict
from pathlib import Path
from typing import Any, get_args

import torch
import transformers
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from typing_extensions import override

from lkv.cache.layer import RaggedLayer
from lkv.cache.ragged_cache import RaggedCache
from lkv.cache.saved_state import number_tensors, split_numbered
from lkv.errors import CacheError, ContextFileError
from lkv.hf.attention import input_device, patch_attention, read_weights
from lkv.hf.image_positions import ImageOffset
from lkv.hf.model_spec import ModelSpec
from lkv.hf.other_layers import STATE_NAMES
from lkv.hf.spec import decoder_layers, vocabulary_size
from lkv.hf.weight_digests import SETTING
from lkv.kernels import BITS_BY_NAME
from lkv.methods.method import Method
from lkv.methods.selectors import Selector
from lkv.policy.model_match import model_difference
from lkv.policy.policy import Policy
from lkv.utils import tensor_file
from lkv.utils.dataclass_json import from_dict
from lkv.utils.devices import is_out_of_memory
from lkv.utils.prompts import ContextKind, tokenizer_digest
from lkv.utils.tensor_file import FileKind

CONTEXT_FILE = FileKind(
    "lkv-context",
    4,
    "context",
    ContextFileError,
    "give a file that Context.save wrote, or compress again",
    mode=0o600,  # the file may reveal the text
)
_NUMBER = (int, float, type(None))
# The metadata fields of the compression, and their types.
_METADATA: dict[str, tuple[type, ...]] = {
    "method": (str,),
    "memory": (str, type(None)),
    "retention": _NUMBER,
    "budget_tokens": (int, type(None)),
    "bits": (int, str, type(None)),
    "policy": (str, type(None)),
    "text_sha256": (str,),
    "protected_tokens": (int, type(None)),
    "kind": (str,),
}


def context_tensors(cache: RaggedCache, ids: list[int]) -> dict[str, Tensor]:
    """Return the tensors to save for `cache` with the text `ids`; CacheError if it has only some of the heads."""
    if cache.ragged_layers[0].lens.shape[1] != cache.spec.kv_heads:
        raise CacheError("this process holds a part of the heads only; save the context from a model in one piece.")
    states = [layer.state() if isinstance(layer, RaggedLayer) else {} for layer in cache.layers]
    for index, other in (cache.at_prompt_end or cache.others).items():
        states[index] |= other.state()
    tensors = {"ids": torch.tensor(ids, dtype=torch.int32, device="cpu")}
    if cache.image_offset is not None:
        tensors["image_offset"] = cache.image_offset.offset
    return number_tensors(states) | tensors


def check_replaceable(path: Path) -> None:
    """Raise ContextFileError for an existing file that is not a saved context, not even a damaged one."""
    try:
        with path.open("rb") as file:
            start = file.read(2**16)
    except OSError:  # writing reports it
        return
    if start and b"lkv-context" not in start:
        raise ContextFileError(
            f"{path} is not a saved context and would be overwritten; give another file, or delete it."
        )


def save(
    path: Path,
    tensors: dict[str, Tensor],
    cache: RaggedCache,
    tokenizer: PreTrainedTokenizerBase,
    metadata: dict[str, Any],
) -> None:
    """Write a context.

    Args:
        path: The file.
        tensors: The `context_tensors` of its cache.
        cache: The cache.
        tokenizer: The model's tokenizer.
        metadata: How the text was compressed.

    Raises:
        ContextFileError: If it cannot be written, or would overwrite a file that is not a saved context.
    """
    check_replaceable(path)
    header = {"model": asdict(cache.spec), "weights": cache.weights, "adapters": cache.adapters, **metadata}
    header["tokenizer"] = tokenizer_digest(tokenizer, tensors["ids"].tolist())
    if cache.shared.has_states:
        header["states_of"] = _transformers()
    tensor_file.write(path, CONTEXT_FILE, tensors, header)


def load(
    path: Path, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, policy: Policy | None
) -> tuple[list[int], RaggedCache, dict[str, Any]]:
    """Read a saved context.

    Args:
        path: The file.
        model: The model that compressed the text.
        tokenizer: Its tokenizer.
        policy: The policy of the compression, to check that it is; None for any.

    Returns:
        The ids of the text, its cache and its metadata.

    Raises:
        ContextFileError: As `Context.load`.
    """
    if policy is not None and not isinstance(policy, Policy):
        raise ContextFileError(f"policy is {policy!r}; give the Policy of the compression, or leave it out.")
    tensors, header = tensor_file.read(path, CONTEXT_FILE)
    try:
        _check_origin(path, header, model, policy)
        metadata: dict[str, Any] = {name: header[name] for name in _METADATA}
        if metadata["kind"] not in get_args(ContextKind):
            raise ValueError(f"its kind is {str(metadata['kind'])[:80]!r}")
        for name, value in metadata.items():
            if type(value) not in _METADATA[name] or (name == "bits" and value not in (None, *BITS_BY_NAME)):
                raise ValueError(f"its {name} is {str(value)[:80]!r}")
        if "stored_id" in header:  # of a context in a server's store
            metadata["stored_id"] = str(header["stored_id"])
        ids = tensors.pop("ids")
        _check_ids(path, ids, vocabulary_size(model))
        offset = tensors.pop("image_offset", None)
        cache = _restored_cache(model, metadata, ids.tolist(), tensors)
        if offset is not None:
            if offset.shape != (1, 1) or offset.dtype != torch.long or abs(int(offset)) >= cache.spec.max_positions:
                raise ValueError("its positions after the images are not those of this model")
            cache.image_offset = ImageOffset(offset.to(input_device(model)), len(ids))
        if header.get("adapters", cache.adapters) != cache.adapters:
            raise ContextFileError(
                f"{path} was saved with other adapters than those active in the model; activate the same ones, or "
                "compress the text again."
            )
        digest = tokenizer_digest(tokenizer, ids.tolist())
        if header.get("tokenizer", digest) != digest:
            raise ContextFileError(
                f"{path} was saved with another tokenizer, with other tokens or another chat template; load it with "
                "that one, or compress the text again."
            )
        return ids.tolist(), cache, metadata
    except (KeyError, TypeError, ValueError, RuntimeError, AttributeError, CacheError, MemoryError) as error:
        if is_out_of_memory(error):
            raise ContextFileError(
                f"{path} takes more memory than is free; free some, or load it for a model on another device."
            ) from error
        raise ContextFileError(f"{path} does not hold a whole context ({error}); compress it again.") from error


def _check_ids(path: Path, ids: Tensor, vocabulary: int) -> None:
    """Raise ValueError for `ids` that are none, and ContextFileError for those beyond the model's vocabulary."""
    if ids.ndim != 1 or ids.dtype != torch.int32 or not len(ids) or ids.min() < 0:
        raise ValueError("its ids are no token ids")
    if (largest := int(ids.max())) >= vocabulary:
        raise ContextFileError(
            f"{path} has the token number {largest:,}, but the model has embeddings of {vocabulary:,} tokens; if they "
            "have changed since it was saved, as by model.resize_token_embeddings, load it with the model as it was, "
            "or compress the text again."
        )


def _check_origin(path: Path, header: dict[str, Any], model: PreTrainedModel, policy: Policy | None) -> None:
    """Raise ContextFileError for a context of another model, policy or version of transformers."""
    weights = read_weights(model)
    if difference := model_difference(from_dict(ModelSpec, header["model"]), patch_attention(model).spec):
        raise ContextFileError(f"{path} was saved by a model with {difference}; load it with that model.")
    for part, value in header.get("weights", {}).items():
        if weights.get(part, value) != value:
            what = "other weights, such as before fine-tuning"
            if part.startswith(SETTING):
                what = f"{part} {value[:80]}, but the model given has {weights[part][:80]}"
            raise ContextFileError(
                f"{path} was saved by a model with {what}; load it with that model, or compress the text again."
            )
    if (version := header.get("states_of", _transformers())) != _transformers():
        raise ContextFileError(
            f"{path} has recurrent states of transformers {version}, which {_transformers()} may lay out in "
            "another way; load it with that version, or compress the text again."
        )
    if policy is not None and policy.digest() != header["policy"]:
        raise ContextFileError(
            f"{path} was compressed under another policy; load it without a policy, or compress the text again."
        )


def _transformers() -> str:
    """Return the version of transformers, without its patch number."""
    return ".".join(transformers.__version__.split(".")[:2])


def _restored_cache(
    model: PreTrainedModel, metadata: dict[str, Any], ids: list[int], tensors: dict[str, Tensor]
) -> RaggedCache:
    """Return a cache with `tensors`, as `context_tensors` gives them."""
    compressed: Any = _AlreadyCompressed()
    cache = RaggedCache(model, method=Method(metadata["method"], compressed, compressed))
    states, likes = split_numbered(tensors, len(cache.layers)), _empty_tensors(model, len(cache.layers))
    # Without free slots the cache meets its memory budget until the first question.
    has_free_slots = metadata["memory"] is None
    for index, (layer, state, like) in enumerate(zip(cache.layers, states, likes, strict=True)):
        if index in cache.others:
            own = {name: state.pop(name) for name in [*state] if name.startswith(STATE_NAMES)}
            cache.others[index].restore(own, len(ids), cache.spec, like)
        if isinstance(layer, RaggedLayer):
            layer.restore(state, len(ids), cache.spec, like, has_free_slots)
        elif state:
            raise ValueError(f"its layer {index} has no {', '.join(sorted(state))}")
    cache.history.ids = torch.tensor([ids], device=input_device(model))
    return cache


def _empty_tensors(model: Any, layers: int) -> list[Tensor]:
    """Make a tensor in the model's dtype for each of its `layers`, on the device of that layer."""
    devices = [next(layer.parameters()).device for layer in decoder_layers(model)] or [input_device(model)] * layers
    dtype = model.get_input_embeddings().weight.dtype
    return [torch.empty(0, dtype=dtype, device=device) for device in devices]


class _AlreadyCompressed(Selector):
    """A placeholder for budget and selector of a loaded context."""

    @override
    def scores(self, *_: object) -> Any:
        raise CacheError("a loaded context cannot read another text; compress that one with lkv.compress.")

    counts = scores
