"""Compress once, ask many times."""

from typing import Any

import torch
from transformers import TextStreamer

from lkv.cache import RaggedCache
from lkv.errors import PromptError
from lkv.methods import Method
from lkv.policy import Policy
from lkv.prompts import context_ids, question_ids


class Context:
    """A text read once into a compressed cache. Every question starts from the same cache."""

    def __init__(self, model: Any, tokenizer: Any, ids: list[int], cache: RaggedCache):
        self._model, self._tokenizer, self._ids = model, tokenizer, ids
        self.cache = cache

    @property
    def tokens(self) -> int:
        """Tokens of the context, those of the chat template included."""
        return len(self._ids)

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
            self.cache.rewind()
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

    Raises PromptError for a text that is empty, too short to keep anything of, or beyond the model's positions.
    """
    if not text.strip():
        raise PromptError("the text is empty; give some text to compress.")
    cache = RaggedCache(model, policy, retention, method)
    ids = context_ids(tokenizer, text)
    if len(ids) >= cache.spec.max_positions:
        raise PromptError(
            f"the text has {len(ids)} tokens, but the model reads at most {cache.spec.max_positions}; shorten it."
        )
    if cache.retention * len(ids) < 1:
        raise PromptError(
            f"the text has {len(ids)} tokens: at retention {cache.retention} nothing would be kept. Give at least "
            f"{int(1 / cache.retention) + 1} tokens, or a higher retention."
        )
    device = model.get_input_embeddings().weight.device
    model.base_model(input_ids=torch.tensor([ids], device=device), past_key_values=cache, use_cache=True)
    return Context(model, tokenizer, ids, cache)
