"""Compress once, ask many times, today or tomorrow."""

import hashlib
import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, DynamicCache, TextStreamer

from lkv import context_file
from lkv.cache.ragged import RaggedCache
from lkv.config import ModelSpec, asdict, from_dict
from lkv.errors import CacheError, ContextFileError, PromptError
from lkv.host.attention import attach
from lkv.host.stock import cut_to, kv_nbytes
from lkv.methods.budget import Share, check_table
from lkv.methods.build import FULL, Method, needs_policy, needs_second_pass
from lkv.methods.kvzip import kvzip
from lkv.methods.selection import Selector
from lkv.models import default_policy
from lkv.policy import Policy, differs
from lkv.prefill import read_prompt
from lkv.prompts import context_ids, encode, question_ids


class Context:
    """A text read once into a compressed cache. Every question starts from the same cache."""

    def __init__(self, model: Any, tokenizer: Any, ids: list[int], cache: Cache, about: dict[str, Any] | None = None):
        """`about` tells how the text was compressed; it is saved with the context."""
        self._model, self._tokenizer, self._ids = model, tokenizer, ids
        self.cache = cache
        self.about = about or {}
        self.answered_tokens = 0  # length of the last answer

    @property
    def tokens(self) -> int:
        """Tokens of the context, those of the chat template included."""
        return len(self._ids)

    def nbytes(self) -> int:
        """Bytes of k and v really held, slack included."""
        return self.cache.nbytes() if isinstance(self.cache, RaggedCache) else kv_nbytes(self.cache)

    def full_nbytes(self) -> int:
        """Bytes that an uncompressed cache holds for the same text."""
        return self.cache.full_nbytes() if isinstance(self.cache, RaggedCache) else kv_nbytes(self.cache)

    def realised_retention(self) -> float:
        """Entries held of the context divided by all of them: what the retention asked for came to."""
        return self.cache.realised_retention() if isinstance(self.cache, RaggedCache) else 1.0

    def rewind(self) -> None:
        """Forget what was asked and answered; `ask` does so by itself."""
        cut_to(self.cache, self.tokens)

    @torch.no_grad()
    def predict(self, question: str, answer: str) -> tuple[Tensor, Tensor]:
        """Logits [n, V] for the n tokens of `answer` given after `question`, and the ids [n] of those tokens."""
        prefix, target = question_ids(self._tokenizer, question), encode(self._tokenizer, answer)
        device = self._model.get_input_embeddings().weight.device
        ids = torch.tensor([prefix + target], device=device)
        cache = self._working_cache()
        try:
            logits = self._model(input_ids=ids, past_key_values=cache, use_cache=True).logits[0]
        finally:
            self._done(cache)
        return logits[len(prefix) - 1 : -1], ids[0, len(prefix) :]

    def ask(self, question: str, max_new_tokens: int = 128, stream: bool = False, **generation: Any) -> str:
        """Answer `question` from the compressed context; greedy unless `generation` (as of model.generate) says so.

        `stream` prints the answer as it comes. Raises PromptError for an empty question.
        """
        if not question.strip():
            raise PromptError("the question is empty; ask something about the text.")
        device = self._model.get_input_embeddings().weight.device
        # generate() wants the ids of everything the cache has seen; it feeds only the new ones to the model.
        ids = torch.tensor([self._ids + question_ids(self._tokenizer, question)], device=device)
        settings = {"do_sample": False, "num_beams": 1, "max_new_tokens": max_new_tokens} | generation
        rows = max(settings.get("num_beams") or 1, settings.get("num_return_sequences") or 1)
        if rows > 1:
            raise CacheError("ask() gives one answer by greedy decoding or sampling; for beams use model.generate.")
        streamer = TextStreamer(self._tokenizer, skip_prompt=True, skip_special_tokens=True) if stream else None
        cache = self._working_cache()
        try:
            out = self._model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                past_key_values=cache,
                streamer=streamer,
                pad_token_id=self._tokenizer.pad_token_id,
                **settings,
            )
        finally:
            self._done(cache)
        self.answered_tokens = out.shape[1] - ids.shape[1]
        return self._tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True).strip()

    def _working_cache(self) -> Cache:
        """The cache itself where it can be cut back, as it is first and afterwards; else a copy."""
        if self._needs_copy():
            return self._ragged().fork()
        self.rewind()
        return self.cache

    def _done(self, cache: Cache) -> None:
        if cache is self.cache:
            self.rewind()

    def _needs_copy(self) -> bool:
        return isinstance(self.cache, RaggedCache) and not self.cache.rewindable

    def _ragged(self) -> RaggedCache:
        if not isinstance(self.cache, RaggedCache):
            raise CacheError("this context is not compressed: forking and saving work with every method but 'full'.")
        return self.cache

    def fork(self) -> "Context":
        """A copy with a cache of its own."""
        return Context(self._model, self._tokenizer, list(self._ids), self._ragged().fork(), dict(self.about))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the compressed context to one safetensors file. Raises ContextFileError if that fails; an older file
        at `path` then stays as it was."""
        cache = self._ragged()
        if len(cache.ragged) < len(cache.layers):
            raise CacheError("contexts of models with sliding layers cannot be saved yet; compress the text each time.")
        if cache.ragged[0].kept.shape[1] != cache.spec.kv_heads:
            raise CacheError(
                "this process holds a share of the heads only; save the context from a model in one piece."
            )
        states = [layer.state() for layer in cache.ragged]
        tensors = {f"{name}.{index}": tensor for index, state in enumerate(states) for name, tensor in state.items()}
        tensors["ids"] = torch.tensor(self._ids, dtype=torch.int32, device="cpu")
        context_file.write(Path(path), tensors, {"model": asdict(cache.spec), **self.about})

    @classmethod
    def load(cls, path: str | os.PathLike[str], model: Any, tokenizer: Any, policy: Policy | None = None) -> "Context":
        """A saved context, to be asked again by the same model; in the model's dtype, on its device.

        `policy` is not needed; where it is given it must be the one the text was compressed with. Raises
        ContextFileError for a missing, foreign or damaged file, another model or another policy.
        """
        tensors, about = context_file.read(Path(path))
        spec = attach(model)
        try:
            if difference := differs(from_dict(ModelSpec, about["model"]), spec):
                raise ContextFileError(f"{path} was saved by a model with {difference}; load it with that model.")
            if policy is not None and policy.digest() != about["policy"]:
                raise ContextFileError(
                    f"{path} was compressed under another policy; load it without a policy, or compress the text again."
                )
            cache = RaggedCache(model, method=Method(about["method"], _Loaded(), _Loaded()))
            weight = model.get_input_embeddings().weight
            for index, layer in enumerate(cache.ragged):
                end = f".{index}"
                state = {name.removesuffix(end): tensor for name, tensor in tensors.items() if name.endswith(end)}
                layer.restore(state, weight[:0])
            ids = tensors["ids"].tolist()
        except (KeyError, TypeError, ValueError, RuntimeError) as error:
            raise ContextFileError(f"{path} does not hold a whole context ({error}); compress it again.") from error
        kept_about = {key: about[key] for key in _ABOUT}
        return cls(model, tokenizer, ids, cache, kept_about)


_ABOUT = ("method", "retention", "budget_tokens", "bits", "policy", "text_sha256")


class _Loaded(Selector):
    """In place of budget and selector of a loaded context: its text has been compressed already."""

    def scores(self, layer: int, query: Tensor | None, key: Tensor, value: Tensor, scale: float) -> Tensor:
        raise CacheError("a loaded context cannot read another text; compress that one with lkv.compress.")

    def counts(self, layer: int, scores: Tensor) -> list[list[int]]:
        raise CacheError("a loaded context cannot read another text; compress that one with lkv.compress.")


def _amount(share: Share | None) -> dict[str, Any]:
    """How much was asked for, as it is saved with a context; nothing for a method with a budget rule of its own."""
    if share is None:
        return {"retention": None, "budget_tokens": None}
    return {"retention": share.retention if share.tokens is None else None, "budget_tokens": share.tokens}


@torch.no_grad()
def compress(
    model: Any,
    tokenizer: Any,
    text: str,
    method: str | Method = "lkv",
    retention: float | None = None,
    policy: Policy | None = None,
    *,
    chunk: int | None = None,
    **options: Any,
) -> Context:
    """Read `text` as the context of a chat and keep `retention` (0.15 unless given) of its k and v; no question is
    known yet.

    `method` is a name that `lkv methods` lists, a `Method` of your own, or "full" for the uncompressed cache. `chunk`
    reads the text in parts of that many tokens. `options` go to RaggedCache: budget_tokens, streaming, bits, ...

    Raises PromptError for a text that is empty, too short to keep anything of, or beyond the model's positions, and
    what RaggedCache raises.
    """
    if not text.strip():
        raise PromptError("the text is empty; give some text to compress.")
    if chunk is not None and chunk < 1:
        raise PromptError(f"chunk is {chunk}, but a part of the text has at least one token.")
    if options.get("streaming") and chunk is None:
        raise PromptError("streaming reads the text in parts; give their size in tokens as chunk, for example 1024.")
    if "prompt_tokens" in options:
        raise PromptError("the whole text is the prompt here: leave prompt_tokens out, or use RaggedCache itself.")
    if method == FULL and options:
        raise CacheError(f"the uncompressed cache of {FULL!r} has no options; leave {', '.join(sorted(options))} out.")
    ids = context_ids(tokenizer, text)
    spec = attach(model)
    limit = spec.max_positions
    if len(ids) >= limit:
        raise PromptError(
            f"the text has {len(ids)} tokens, but the model reads at most {limit}, question and answer included; "
            "shorten it."
        )
    cache: Cache = DynamicCache()
    about: dict[str, Any] = {}
    device = model.get_input_embeddings().weight.device
    prompt = None
    if isinstance(method, str) and method != FULL and needs_second_pass(method):
        if chunk is not None:
            raise PromptError(f"{method!r} reads the whole text twice; leave chunk out, or use another method.")
        if needs_policy(method):
            policy = policy if policy is not None else default_policy()
            policy.check_model(spec)
        amount = Share.asked(retention, options.pop("budget_tokens", None))
        about = _amount(amount) | {"policy": policy.digest() if policy is not None and needs_policy(method) else None}
        pattern = options.pop("pattern", None)
        if pattern is not None:
            check_table(pattern, spec.layers, spec.kv_heads, "the pattern of retrieval heads")
        prompt = read_prompt(model, torch.tensor([ids], device=device))
        method, retention = kvzip(model, tokenizer, ids, prompt, amount, method, policy, pattern), None
    if method != FULL:
        if chunk is not None:
            options["prompt_tokens"] = len(ids)
        cache = RaggedCache(model, policy, retention, method, **options)
        about = {
            "method": cache.plan.method.name,
            **_amount(cache.share),
            "bits": options.get("bits"),
            "policy": cache.policy.digest() if cache.policy is not None else None,
            "text_sha256": hashlib.sha256(text.encode()).hexdigest(),
            **about,
        }
    if prompt is not None:
        assert isinstance(cache, RaggedCache)
        cache.fill(prompt)
        return Context(model, tokenizer, ids, cache, about)
    for part in torch.tensor([ids], device=device).split(chunk or len(ids), 1):
        model.base_model(input_ids=part, past_key_values=cache, use_cache=True)
    return Context(model, tokenizer, ids, cache, about)
