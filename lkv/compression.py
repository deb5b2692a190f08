"""Compress once, ask many times."""

from typing import Any

import torch
from torch import Tensor
from transformers import Cache, DynamicCache, TextStreamer

from lkv.cache import RaggedCache
from lkv.errors import PromptError
from lkv.methods import FULL, Method
from lkv.modeling import attach, kv_nbytes
from lkv.policy import Policy
from lkv.prompts import context_ids, encode, question_ids


class Context:
    """A text read once into a compressed cache. Every question starts from the same cache."""

    def __init__(self, model: Any, tokenizer: Any, ids: list[int], cache: Cache):
        self._model, self._tokenizer, self._ids = model, tokenizer, ids
        self.cache = cache
        self.answered_tokens = 0  # length of the last answer

    @property
    def tokens(self) -> int:
        """Tokens of the context, those of the chat template included."""
        return len(self._ids)

    def nbytes(self) -> int:
        """Bytes of k and v really held, slack included."""
        return self.cache.nbytes() if isinstance(self.cache, RaggedCache) else kv_nbytes(self.cache)

    def rewind(self) -> None:
        """Forget what was asked and answered; `ask` does so by itself."""
        # Layer by layer: an interrupted forward pass leaves them unequal.
        layers: Any = self.cache.layers
        for layer in layers:
            layer.crop(self.tokens - layer.get_seq_length())

    @torch.no_grad()
    def predict(self, question: str, answer: str) -> tuple[Tensor, Tensor]:
        """Logits [n, V] for the n tokens of `answer` given after `question`, and the ids [n] of those tokens."""
        prefix, target = question_ids(self._tokenizer, question), encode(self._tokenizer, answer)
        device = self._model.get_input_embeddings().weight.device
        ids = torch.tensor([prefix + target], device=device)
        try:
            logits = self._model(input_ids=ids, past_key_values=self.cache, use_cache=True).logits[0]
        finally:
            self.rewind()
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
        settings = {"do_sample": False, "max_new_tokens": max_new_tokens} | generation
        streamer = TextStreamer(self._tokenizer, skip_prompt=True, skip_special_tokens=True) if stream else None
        try:
            out = self._model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                past_key_values=self.cache,
                streamer=streamer,
                pad_token_id=self._tokenizer.pad_token_id,
                **settings,
            )
        finally:
            self.rewind()
        self.answered_tokens = out.shape[1] - ids.shape[1]
        return self._tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True).strip()


@torch.no_grad()
def compress(
    model: Any,
    tokenizer: Any,
    text: str,
    method: str | Method = "lkv",
    retention: float = 0.15,
    policy: Policy | None = None,
) -> Context:
    """Read `text` as the context of a chat and keep `retention` of its k and v; no question is known yet.

    `method` is a name of `methods.NAMES`, a `Method` of your own, or "full" for the uncompressed cache.

    Raises PromptError for a text that is empty, too short to keep anything of, or beyond the model's positions.
    """
    if not text.strip():
        raise PromptError("the text is empty; give some text to compress.")
    cache = DynamicCache() if method == FULL else RaggedCache(model, policy, retention, method)
    limit = attach(model).max_positions
    ids = context_ids(tokenizer, text)
    if len(ids) >= limit:
        raise PromptError(f"the text has {len(ids)} tokens, but the model reads at most {limit}; shorten it.")
    device = model.get_input_embeddings().weight.device
    model.base_model(input_ids=torch.tensor([ids], device=device), past_key_values=cache, use_cache=True)
    return Context(model, tokenizer, ids, cache)
