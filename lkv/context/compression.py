"""Compress a text into a context."""

import hashlib
import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from lkv.cache.cache_config import CacheConfig
from lkv.cache.full_cache import FullCache
from lkv.cache.ragged_cache import RaggedCache
from lkv.context.context import Context
from lkv.context.images import encode_images, images_of, protected_in_images, text_tokenizer
from lkv.context.input_checks import check_context, check_model_and_tokenizer, check_text
from lkv.context.protection import Span, protected_tokens
from lkv.errors import PromptError
from lkv.hf.attention import input_device, patch_attention
from lkv.hf.cache_argument import pass_arguments
from lkv.hf.image_positions import ImageOffset
from lkv.hf.position_hook import has_image_positions, take_image_positions
from lkv.hf.positions import check_frequencies
from lkv.hf.progress import report_progress
from lkv.hf.prompt_kv import read_prompt
from lkv.hf.spec import check_ids, unwrap_model
from lkv.methods.method import Method
from lkv.methods.registry import FULL
from lkv.methods.request import CompressionRequest
from lkv.methods.targets import RetentionTarget, TierTarget
from lkv.policy.policy import Policy
from lkv.utils.cpu_threads import adapt_threads
from lkv.utils.prompts import ContextKind, Conversation, context_text, encode_context, strip_end

_LONGEST_PATH = 1000  # characters of a text that could be the name of a file


@torch.no_grad()
def compress(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    text: str | Conversation,
    *,
    memory: float | int | str | None = None,
    retention: float | None = None,
    method: str | Method = "lkv",
    policy: Policy | str | os.PathLike[str] | None = None,
    chunk: int | None = None,
    system: str | None = None,
    images: Sequence[Any] | None = None,
    protect: Sequence[Span | int] | str = (),
    progress: Callable[[float], None] | None = None,
    **options: object,
) -> Context:
    """Compress the KV cache of a text, before any question is known.

    Args:
        model: A decoder model of transformers.
        tokenizer: Its tokenizer, or its processor, which images need.
        text: The text itself, not a path; `lkv.read_document` reads files. Or a conversation, a list of messages with
            `role` and `content` that ends with an answer: questions continue it. The content may be a list of parts
            as processors take them, {"type": "text", "text": ...} and {"type": "image", "image": ...}; if the last
            message is the user's and in parts, questions continue that message.
        memory: The memory budget of the text's k and v in full-attention layers: a share of their full cache in
            16 bits a value (0.1 or "10%", the default), or bytes (200_000_000 or "200MB"). The best entries are stored
            in more bits, others in fewer, the rest are evicted. Sliding windows and an explicit `slack` are not
            included.
        retention: Instead of `memory`, the share of the KV entries to keep, in (0, 1], all in the model's dtype, or in
            `bits`. It is 1 - compression_ratio of kvpress.
        method: A name that `lkv methods` lists, a `Method` of your own, or "full" for the uncompressed cache.
        policy: A Policy, its folder or its hub id; by default the one shipped for the model. Only learned methods use
            it.
        chunk: The chunk size in tokens for chunked prefill.
        system: A system prompt before the text, compressed with it.
        images: Images before the text, or at the image tokens that it contains, in a format that the processor
            accepts, such as PIL images. Their tokens are compressed as those of the text.
        protect: Spans that every head keeps, within the budget and in its best precision: strings, wherever they
            occur in the text or the system prompt, or (start, end) character offsets in the text. In a conversation,
            {"role": "system"} protects all messages of a role. "images" protects all images, and a number in the list
            protects that image, counted from 0.
        progress: Called with the completed share of the prefill; an exception from it aborts the prefill.
        **options: Options of RaggedCache: budget_tokens, streaming, bits, slack, decode_eviction, pattern.

    Returns:
        The compressed context.

    Raises:
        PromptError: For a text that is empty, too short for the budget, or longer than the model supports; for
            protected spans that are absent, empty, overlapping, or larger than the budget; for images that the model
            or the processor does not read.
        LkvError: As RaggedCache raises for its arguments.
    """
    check_model_and_tokenizer(model, tokenizer)
    check_context(text, "pass the text, or read a file with lkv.read_document")
    if isinstance(text, str) and len(text) < _LONGEST_PATH and os.path.isfile(text):
        raise PromptError(
            f"expected a text but got the path {text!r}; read the file first: "
            f"lkv.compress(model, tokenizer, lkv.read_document({text!r}), ...)."
        )
    if progress is not None and not callable(progress):
        raise PromptError(f"progress is {progress!r}; give a function of the completed share, or leave it out.")
    if system is not None:
        check_text(system, "the system prompt", "give some text, or leave it out")
    inputs: dict[str, Tensor] = {}
    if not isinstance(text, str):
        if images is not None:
            raise PromptError('images come with a text; in a conversation give {"type": "image", "image": ...} parts.')
        images = images_of(text) or None
    if images is None:
        tokenizer = text_tokenizer(tokenizer)
        ids = encode_context(tokenizer, strip_end(tokenizer, text), system)
        protected = protected_tokens(tokenizer, text, cast(Any, protect), system, len(ids))
    else:
        ids, inputs = encode_images(model, tokenizer, text, images, system)
        protected = protected_in_images(model, tokenizer, ids, text, protect, system, len(images))
    request = CompressionRequest.of_text(
        options
        | {
            "memory": memory,
            "retention": retention,
            "method": method,
            "policy": policy,
            "chunk": chunk,
            "protected": tuple(protected),
        }
    )
    kind: ContextKind = "text" if isinstance(text, str) else "conversation"
    tokenizer = text_tokenizer(tokenizer)
    return compress_ids(model, tokenizer, ids, request, context_text(tokenizer, text), progress, inputs, kind)


@adapt_threads
@torch.no_grad()
def compress_ids(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    ids: list[int],
    request: CompressionRequest,
    text: str | None = None,
    progress: Callable[[float], None] | None = None,
    images: dict[str, Tensor] | None = None,
    kind: ContextKind = "text",
) -> Context:
    """Compress token ids as `compress` does a text, without adding a chat template.

    Args:
        model: A decoder model of transformers.
        tokenizer: Its tokenizer.
        ids: The token ids of the text.
        request: The compression settings.
        text: The text of `ids`, for the digest saved with the context; by default the ids are decoded.
        progress: As in `compress`.
        images: The model's other inputs for images among the ids, such as `pixel_values`.
        kind: What the ids are.

    Raises:
        PromptError: For a text that is too long, or too short for the budget.
        LkvError: As `RaggedCache` raises for its arguments.
    """
    check_fits_model(model, len(ids))
    chunk, input_ids = request.chunk, torch.tensor([ids], device=input_device(model))
    images = images or {}
    if not images:  # their tokens may need no embedding
        check_ids(model, tokenizer, ids)
    if chunk is not None:
        if images:
            raise PromptError("images are read with their whole text at once; leave chunk out.")
        check_frequencies(model.config.get_text_config(decoder=True), chunk, len(ids))
    if request.method == FULL:
        with _report_layers(model, progress, len(ids)):
            return Context(model, tokenizer, ids, _read_in_full(model, input_ids, chunk, images), {"kind": kind})
    if chunk is not None:
        request = replace(request, prompt_tokens=len(ids))
    config = CacheConfig.resolve(request, model, tokenizer)
    method = config.method
    method.check_length(len(ids))
    if method.needs_whole_prompt:
        if chunk is not None:
            raise PromptError(f"{method.name!r} needs the whole text at once; leave chunk out, or use another method.")
        # The second pass doubles the work.
        with _report_layers(model, progress, len(ids) * (1 + method.selector.has_second_pass)):
            prompt = read_prompt(model, input_ids, method.reads_queries, images)
            config = replace(config, method=method.for_prompt(ids, prompt))
        cache = RaggedCache.from_config(model, config)
        cache.fill(prompt)
        cache.set_method(method)  # drops the scores of this prompt
    else:
        cache = RaggedCache.from_config(model, config)
        _prefill(model, cache, input_ids, chunk, progress, images)
    cache.history.ids = input_ids
    digest = _digest(str(tokenizer.decode(ids)) if text is None else text, images)
    return Context(model, tokenizer, ids, cache, describe_compression(cache, digest, kind))


def _digest(text: str, images: dict[str, Tensor]) -> str:
    digest = hashlib.sha256(text.encode())
    for _, values in sorted(images.items()):
        digest.update(values.double().cpu().numpy().tobytes())
    return digest.hexdigest()


def _read_in_full(model: PreTrainedModel, input_ids: Tensor, chunk: int | None, images: dict[str, Tensor]) -> FullCache:
    """Return the uncompressed cache of `input_ids` [1, T]."""
    full, patched = FullCache(model), patch_attention(model)
    _prefill(model, full, input_ids, chunk, images=images)
    if patched.position_hook and (positions := take_image_positions(*input_ids.shape)) is not None:
        full.image_offset = ImageOffset.of_prompt(positions)
    return full


def check_fits_model(model: PreTrainedModel, tokens: int) -> None:
    """Raise PromptError if the text leaves no position in the model for a question."""
    limit = patch_attention(model).spec.max_positions
    if tokens >= limit:
        raise PromptError(
            f"the text has {tokens} tokens, but the model reads at most {limit}, question and answer included; "
            "shorten it."
        )


def describe_compression(cache: RaggedCache, text_sha256: str, kind: ContextKind) -> dict[str, Any]:
    """Return the metadata of a context: its kind, and how the text with this digest was compressed into `cache`."""
    method, target = cache.config.method, cache.target
    return {
        "method": method.name,
        "memory": str(target.memory) if isinstance(target, TierTarget) else None,
        "retention": target.retention if type(target) is RetentionTarget and target.tokens is None else None,
        "budget_tokens": None if target is None else target.tokens,
        "bits": cache.config.request.bits,
        "protected_tokens": len(method.protected) or None,
        "policy": cache.policy.digest() if cache.policy is not None else None,
        "text_sha256": text_sha256,
        "kind": kind,
    }


def _prefill(
    model: PreTrainedModel,
    cache: RaggedCache | FullCache,
    ids: Tensor,
    chunk: int | None,
    progress: Callable[[float], None] | None = None,
    images: dict[str, Tensor] | None = None,
) -> None:
    """Prefill `cache` with `ids` [1, T], in chunks of `chunk` tokens.

    `progress` is as in `compress`, `images` as in `compress_ids`.
    """
    parts = ids.split(min(chunk or ids.shape[1], ids.shape[1]), 1)
    is_explicit = not images and has_image_positions(model)
    for number, part in enumerate(parts):
        if progress is not None:
            cache.on_layer_start = lambda layer, done=number: progress((done + layer / len(cache.layers)) / len(parts))
        unwrap_model(model).base_model(input_ids=part, **pass_arguments(cache, part, is_explicit), **images or {})
    cache.on_layer_start = None


def _report_layers(
    model: PreTrainedModel, progress: Callable[[float], None] | None, tokens: int
) -> AbstractContextManager[None]:
    """Call `progress` after each decoder layer in the block; `tokens` is the total number of tokens."""
    if progress is None:
        return nullcontext()
    read = 0.0

    def on_tokens(more: float) -> None:
        nonlocal read
        read += more
        progress(min(1.0, read / tokens))

    return report_progress(model, on_tokens)
