"""Requests about contexts: checked in vLLM's front end, and made for `vllm.LLM`.

context = compress(llm, text)
llm.generate(question_prompt(llm, "What is the code?", context), SamplingParams(temperature=0))

A request names its context by `extra_args` of its sampling parameters, or its prompt does by its cache salt,
"lkv_context:ID": beam search, which has sampling parameters of its own, passes that on from beam to beam.
"""

import secrets
import threading
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from lkv.context.protection import Span
from lkv.errors import IntegrationError, LkvError, PromptError, StoreError, UnknownContextError
from lkv.integrations.vllm.contexts import COMPRESS, CONTEXT, NewContext, VllmContexts
from lkv.integrations.vllm.pages import page_layout
from lkv.serving.jobs import ContextRegistry, Job
from lkv.utils.prompts import encode_question

if TYPE_CHECKING:
    from vllm import LLM
    from vllm.v1.engine import EngineCoreRequest
    from vllm.v1.engine.input_processor import InputProcessor

_CONTEXTS = "lkv_contexts"  # attribute of vLLM's input processor
_open_lock = threading.Lock()


def front_contexts(processor: "InputProcessor") -> VllmContexts:
    """Return the contexts of a front end's input processor, which are made at the first call.

    Raises LkvError if contexts cannot be used.
    """
    from vllm.platforms import current_platform

    with _open_lock:
        contexts: VllmContexts | None = getattr(processor, _CONTEXTS, None)
        if contexts is None:
            config = processor.vllm_config
            if current_platform.is_cpu():
                model = config.model_config
                page_layout(model.dtype, config.cache_config.block_size, model.get_head_size())
            contexts = VllmContexts(config, torch.device("cpu"), 0)
            setattr(processor, _CONTEXTS, contexts)
        return contexts


def split_salt(salt: object) -> tuple[str | None, str]:
    """Return the context that a cache salt names, or None, and the rest of the salt."""
    salt = salt if isinstance(salt, str) else ""
    prefix, _, rest = salt.partition(":")
    if prefix != CONTEXT:
        return None, salt
    name, _, rest = rest.partition(":")
    return name, rest


def salt_of(context: str, rest: str = "") -> str:
    """Return the cache salt that names a context."""
    return f"{CONTEXT}:{context}:{rest}"


def check_request(processor: "InputProcessor", request: "EngineCoreRequest", max_tokens: int | None) -> None:
    """Check a request that names a context, or whose prompt is to be compressed, and salt its pages.

    Args:
        processor: vLLM's input processor.
        request: What it made of the request.
        max_tokens: What the caller asked for; None for as many as fit.

    Raises:
        VLLMValidationError: If it cannot be answered; vLLM reports that to the client.
    """
    from vllm.exceptions import VLLMNotFoundError, VLLMValidationError

    try:
        _check(processor, request, max_tokens)
    except UnknownContextError as error:
        raise VLLMNotFoundError(str(error)) from error
    except LkvError as error:
        raise VLLMValidationError(str(error)) from error


def _check(processor: "InputProcessor", request: "EngineCoreRequest", max_tokens: int | None) -> None:
    params = request.sampling_params
    if params is None:
        raise PromptError("contexts are asked questions; a pooled request has none.")
    salted, salt = split_salt(request.cache_salt)
    extra = ({} if salted is None else {CONTEXT: salted}) | (params.extra_args or {})
    if unknown := {name for name in extra if name.startswith("lkv_")} - {CONTEXT, COMPRESS}:
        raise PromptError(
            f"extra_args (vllm_xargs over HTTP) has the key {min(unknown)[:80]!r}, which is not known; to ask about a "
            f"context write {CONTEXT!r}, with its id."
        )
    if CONTEXT in extra and COMPRESS in extra:
        raise PromptError(f"extra_args has {CONTEXT!r} and {COMPRESS!r}; give one of them.")
    contexts, ids = front_contexts(processor), request.prompt_token_ids
    if ids is None or request.prompt_embeds is not None or request.mm_features:
        raise PromptError("questions about contexts are text; leave embeddings, images and sound out.")
    if COMPRESS in extra:
        if params.max_tokens != 1:
            raise PromptError(f"{COMPRESS} reads a text and answers nothing; give max_tokens=1.")
        if not secrets.compare_digest(NewContext.parse(extra[COMPRESS]).secret, contexts.secret):
            raise PromptError(f"{COMPRESS} is set by POST /v1/contexts alone; create the context there.")
        return
    if CONTEXT not in extra:
        raise PromptError(
            f"cache_salt is {salt[:80]!r}; write '{CONTEXT}:ID' to ask about a context, or begin it otherwise."
        )
    name = extra[CONTEXT]
    if not isinstance(name, str):
        raise PromptError(f"{CONTEXT} is {name!r}; give the id of a context.")
    if salted not in (None, name):
        raise PromptError("the request names two contexts; give one.")
    # The last token of an answer is never read, but drafts of tokens behind it are.
    drafts = processor.vllm_config.num_speculative_tokens
    free = contexts.max_positions + 1 - contexts.recent_tokens(name) - len(ids) - drafts
    if free < (max_tokens or 1):
        advice = f"ask for at most {free} new tokens" if free > 0 else "shorten the question"
        raise PromptError(
            f"context, question and {max_tokens or 1} new tokens are more than the {contexts.max_positions} that the "
            f"model reads; {advice}."
        )
    params.max_tokens, params.extra_args = min(params.max_tokens, free), extra
    # Pages hold k and v that depend on the context: only questions about one context share them.
    request.cache_salt = salt_of(name, salt)


def compress(
    llm: "LLM",
    text: str,
    retention: float | None = None,
    name: str = "",
    system: str | None = None,
    memory: str | float | None = None,
    protect: Sequence[Span] = (),
) -> str:
    """Compress a text inside a `vllm.LLM`, unless it is stored already.

    Args:
        llm: The engine.
        text: The text itself.
        retention: The share of its KV entries to keep; by default as the plugin's settings say.
        name: A title for lists; a stored text takes it too.
        system: A system prompt before the text.
        memory: Instead of `retention`, the share of the 16-bit cache's bytes (0.1 or "10%"), or bytes ("2MB"), to keep.
        protect: Parts of the text that every head keeps, as in `lkv.compress`.

    Returns:
        The context's id, for `question_prompt` or `extra_args={"lkv_context": id}`.

    Raises:
        LkvError: If it cannot be compressed or stored.
    """
    from vllm import SamplingParams

    contexts = front_contexts(llm.llm_engine.input_processor)
    settings = contexts.compression.for_text(retention, memory, system, protect)
    new_context = contexts.encode(text, settings)
    job = Job(new_context.id, name, settings, time.time())
    if ContextRegistry(contexts.store, 1).submit(job, contexts.tokens) is not job:
        return job.id
    new_context.name = job.title
    params = SamplingParams(max_tokens=1, temperature=0, extra_args={COMPRESS: new_context.model_dump_json()})
    llm.generate({"prompt_token_ids": new_context.ids}, params, use_tqdm=False)
    while None in (outcomes := llm.collective_rpc("lkv_outcome", args=(new_context.id,))):
        time.sleep(0.001)
    if failure := "".join(outcomes):
        raise StoreError(failure)
    if contexts.store.describe(new_context.id) is None:
        raise IntegrationError("vLLM ended without compressing the text; see its log.")
    return new_context.id


def question_prompt(llm: "LLM", question: str, context: str | None = None) -> dict[str, Any]:
    """Make the prompt of a question about a context, as `Context.ask` puts it; without `context`, sampling names it."""
    prompt: dict[str, Any] = {"prompt_token_ids": encode_question(llm.get_tokenizer(), question)}
    return prompt if context is None else prompt | {"cache_salt": salt_of(context)}
