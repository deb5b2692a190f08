"""A compressed context as it lies in a file, and the cache that it is taken up by."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lkv.cache.entries import check_state
from lkv.cache.ragged_cache import RaggedCache
from lkv.config import ModelSpec, from_dict
from lkv.errors import CacheError, ContextFileError
from lkv.integrations.transformers.attention import input_device, patch_attention
from lkv.integrations.transformers.prefill import LayerKV
from lkv.methods.method import Method
from lkv.methods.selectors import Selector
from lkv.policy.model_match import model_difference
from lkv.policy.policy import Policy
from lkv.utils import tensor_file
from lkv.utils.tensor_file import Kind

_KIND = Kind("lkv-context", 2, "context", ContextFileError, "give a file that Context.save wrote, or compress again")


def write_context_file(path: Path, tensors: dict[str, Tensor], about: dict[str, Any]) -> None:
    """Write `tensors` and the JSON `about`; a failed save leaves an older file at `path` as it was."""
    tensor_file.write(path, _KIND, tensors, about)


def read_context_file(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors and the JSON written with them. Raises ContextFileError for a missing, foreign or damaged file."""
    return tensor_file.read(path, _KIND)


def tensors_of(cache: RaggedCache, ids: list[int]) -> dict[str, Tensor]:
    """What is saved of `cache`, which has read the text `ids`: the tensors of each layer by their names, and the ids.

    Raises CacheError where there is no compressed text, or a share of its heads only.
    """
    if cache.ragged_layers[0].kept_counts.shape[1] != cache.spec.kv_heads:
        raise CacheError("this process holds a share of the heads only; save the context from a model in one piece.")
    states = enumerate(layer.state() for layer in cache.ragged_layers)
    tensors = {f"{name}.{index}": tensor for index, state in states for name, tensor in state.items()}
    return tensors | cache.windows.state() | {"ids": torch.tensor(ids, dtype=torch.int32, device="cpu")}


def restored(path: Path, model: Any, policy: Policy | None) -> tuple[list[int], RaggedCache, dict[str, Any]]:
    """The ids of a saved text, a cache that holds what was kept of it, and what the file tells of its making.

    Raises ContextFileError as `Context.load` says.
    """
    if policy is not None and not isinstance(policy, Policy):
        raise ContextFileError(f"policy is {policy!r}; give the Policy that the text was compressed with, or none.")
    tensors, about = read_context_file(path)
    spec = patch_attention(model).spec
    try:
        if difference := model_difference(from_dict(ModelSpec, about["model"]), spec):
            raise ContextFileError(f"{path} was saved by a model with {difference}; load it with that model.")
        if policy is not None and policy.digest() != about["policy"]:
            raise ContextFileError(
                f"{path} was compressed under another policy; load it without a policy, or compress the text again."
            )
        saved = _checked_about(about)
        ids = _checked_ids(tensors.pop("ids"), model.get_input_embeddings().weight.shape[0])
        cache = _cache(model, saved["method"], ids, tensors)
        if about.get("adapters", cache.adapters) != cache.adapters:
            raise ContextFileError(
                f"{path} was saved with other adapters than those active in the model; activate the same ones, or "
                "compress the text again."
            )
        return ids, cache, saved
    except (KeyError, TypeError, ValueError, RuntimeError, AttributeError, CacheError) as error:
        raise ContextFileError(f"{path} does not hold a whole context ({error}); compress it again.") from error


def _cache(model: Any, method: str, ids: list[int], tensors: dict[str, Tensor]) -> RaggedCache:
    """A cache that holds `tensors`, as `tensors_of` gave them."""
    cache = RaggedCache(model, method=Method(method, _Loaded(), _Loaded()))
    like = model.get_input_embeddings().weight[:0]
    sliding = {name: tensors.pop(name) for name in list(tensors) if name.startswith("sliding_")}
    for layer, state in zip(cache.ragged_layers, _by_layer(tensors, cache.spec.layers), strict=True):
        check_state(state, len(ids), cache.spec)
        layer.restore(state, like)
    cache.windows.restore(sliding, len(ids), cache.spec, like)
    cache.ids = torch.tensor([ids], device=input_device(model))
    return cache


def _checked_about(about: dict[str, Any]) -> dict[str, Any]:
    """What a saved file tells of its making. Raises KeyError for a missing field and ValueError for a wrong one."""
    saved = {key: about[key] for key in _ABOUT}
    for name, kinds in _ABOUT.items():
        if type(saved[name]) not in kinds:
            raise ValueError(f"its {name} is {saved[name]!r}")
    return saved


def _checked_ids(ids: Tensor, vocabulary: int) -> list[int]:
    """The ids of the text. Raises ValueError for what a model with `vocabulary` tokens cannot have read."""
    if ids.ndim != 1 or ids.dtype != torch.int32 or not len(ids) or int(ids.min()) < 0 or int(ids.max()) >= vocabulary:
        raise ValueError("its ids are none of this model's")
    return ids.tolist()


def _by_layer(tensors: dict[str, Tensor], layers: int) -> list[dict[str, Tensor]]:
    """The tensors of each layer under their own names. Raises ValueError for one that belongs to no layer."""
    states: list[dict[str, Tensor]] = [{} for _ in range(layers)]
    for name, tensor in tensors.items():
        field, _, index = name.rpartition(".")
        if index not in map(str, range(layers)):
            raise ValueError(f"its tensor {name!r} belongs to no layer")
        states[int(index)][field] = tensor
    return states


_NUMBER = (int, float, type(None))
# What is saved of how a text was compressed, and what each may be.
_ABOUT: dict[str, tuple[type, ...]] = {
    "method": (str,),
    "retention": _NUMBER,
    "budget_tokens": (int, type(None)),
    "bits": (int, type(None)),
    "policy": (str, type(None)),
    "text_sha256": (str,),
}


class _Loaded(Selector):
    """In place of budget and selector of a loaded context: its text has been compressed already."""

    def scores(self, layer: int, prompt: LayerKV) -> Tensor:
        raise CacheError("a loaded context cannot read another text; compress that one with lkv.compress.")

    def counts(self, layer: int, scores: Tensor) -> list[list[int]]:
        raise CacheError("a loaded context cannot read another text; compress that one with lkv.compress.")
