"""LKV in lm-evaluation-harness: a model type `lkv`, which compresses the context of a prompt before the question.

    python -m lkv.integrations.lm_eval run --model lkv --tasks longbench_qasper \\
        --model_args pretrained=owner/name,retention=0.15

This is the harness's own command line, with `lkv` registered; in Python, importing this module registers it.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from lkv.cache.ragged_cache import RaggedCache, chosen_method
from lkv.context.context import Context, compress_ids
from lkv.errors import IntegrationError
from lkv.integrations.splitting import Split, shared_prefix
from lkv.integrations.transformers.attention import patch_attention
from lkv.methods.registry import FULL

try:
    from lm_eval.__main__ import cli_evaluate
    from lm_eval.api.registry import register_model
    from lm_eval.models.huggingface import HFLM
except ImportError as error:
    raise IntegrationError(
        f"lkv.integrations.lm_eval needs lm-evaluation-harness ({error}); run `pip install 'lkv-cache[lm-eval]'`."
    ) from error


@dataclass
class Tally:
    """What was held of the contexts of one task."""

    requests: int = 0
    whole: int = 0  # contexts shorter than the least that is compressed
    tokens: int = 0
    kept_tokens: float = 0.0  # as many as a head keeps on average
    bytes_held: int = 0
    bytes_full: int = 0
    split_by: dict[str, int] = field(default_factory=dict)

    def add(self, tokens: int, context: Context | None) -> None:
        """Count a context of `tokens` tokens; None for one that is left whole."""
        self.requests += 1
        self.tokens += tokens
        self.whole += context is None
        self.kept_tokens += tokens if context is None else context.realised_retention() * tokens
        self.bytes_held += 0 if context is None else context.nbytes()
        self.bytes_full += 0 if context is None else context.full_nbytes()

    def summary(self) -> dict[str, Any]:
        """For the results; the bytes are those of the contexts that were compressed."""
        return {
            "requests": self.requests,
            "contexts_left_whole": self.whole,
            "context_tokens": self.tokens,
            "realised_retention": self.kept_tokens / self.tokens if self.tokens else 1.0,
            "bytes_held": self.bytes_held,
            "bytes_full": self.bytes_full,
            "context_told_by": self.split_by,
        }


@register_model("lkv")
class LKVLM(HFLM):
    """The harness's model of transformers, each of its prompts read in two parts: the context, of which `method` keeps
    the share `retention`, and then, after eviction, the question. Prompts are read one at a time."""

    def __init__(
        self,
        pretrained: Any,
        method: str = "lkv",
        retention: float = 0.15,
        policy: Any = None,
        bits: int | None = None,
        context_field: str | None = None,
        question_marker: str | None = None,
        window: int = 64,
        min_context: int = 64,
        tolerance: float = 0.0,
        batch_size: Any = 1,
        **options: Any,
    ):
        """`pretrained` and `options` as of the harness's `hf`; `method`, `retention`, `policy`, `bits` as of
        `lkv.compress`, "full" for the uncompressed cache.

        `context_field`, `question_marker`, `window`: where the context ends, see `Split`. A context of fewer than
        `min_context` tokens is left whole, and counted so in the results. One of which a method holds more than
        `retention` + `tolerance` ends the evaluation, as does one that holds more bytes than its entries need.
        `batch_size` is taken, and is always 1.

        Raises IntegrationError for what cannot be, and what RaggedCache raises.
        """
        if options.get("mixed_precision_dtype") or options.get("backend", "causal") not in ("default", "causal"):
            raise IntegrationError(
                "--model lkv is for decoders whose weights have the dtype that is computed in: leave out backend and "
                "mixed_precision_dtype, and give dtype=bfloat16, for example."
            )
        if type(min_context) is not int or min_context < 1:
            raise IntegrationError(f"min_context is {min_context!r}, but it is a number of tokens: give 1 or more.")
        self._split = Split(context_field, question_marker, window)
        loading = {"use_safetensors": True} if isinstance(pretrained, str) else {}
        super().__init__(pretrained, batch_size=1, **loading | options)
        patch_attention(self.model)
        self._method: Any = FULL
        if method != FULL:
            self._method = chosen_method(self.model, policy, retention, method, tokenizer=self.tokenizer)
        self._most = 1.0 if method == FULL else retention + tolerance
        self._bits: dict[str, Any] = {} if bits is None else {"bits": bits}
        self._min_context = min_context
        self._asked = {"method": method, "retention": None if method == FULL else retention, "bits": bits}
        self._tallies: dict[str, Tally] = {}
        self._question: list[int] | None = None  # ids that follow the context of the request at hand
        self._task = ""
        self._last: Context | None = None

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        """The harness's, with a compressed context."""

        def encode(text: str) -> list[int]:
            return self.tok_batch_encode([text])[0][0].tolist()

        answers = []
        for request in self._each(requests, disable_tqdm):
            ids = encode(request.args[0])
            with self._asking(request, ids, len(ids), encode):
                answers += super().generate_until([request], disable_tqdm=True)
        return answers

    def loglikelihood(self, requests: list[Any], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """The harness's, with a compressed context."""
        scores = []
        for request in self._each(requests, disable_tqdm):
            if not request.args[0]:  # nothing to compress
                scores += super().loglikelihood([request], disable_tqdm=True)
                continue
            before, continuation = self._encode_pair(*request.args)
            # The last token predicts nothing, and is not read.
            with self._asking(request, (before + continuation)[:-1], len(before), self.tok_encode):
                scores += super().loglikelihood([request], disable_tqdm=True)
        return scores

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        """Raises IntegrationError."""
        raise IntegrationError(
            "tasks that score a whole text (loglikelihood_rolling) have no context before a question, so there is "
            "nothing to compress; evaluate them with --model hf."
        )

    def get_model_info(self) -> dict[str, Any]:
        """The harness's, and under "lkv" what was asked for and what was really held, for each task."""
        held = {task: tally.summary() for task, tally in self._tallies.items()}
        return {**super().get_model_info(), "lkv": {**self._asked, "tasks": held}}

    def _each(self, requests: list[Any], quiet: bool) -> Iterator[Any]:
        return iter(tqdm(requests, disable=quiet or self.rank != 0, desc="Running requests on compressed contexts"))

    @contextmanager
    def _asking(self, request: Any, ids: list[int], prompt: int, encode: Callable[[str], list[int]]) -> Iterator[None]:
        """Let what the harness reads next be split: of `ids`, whose first `prompt` are the prompt's."""
        self._task = request.task_name or ""
        told_by, end = self._split.end(self._task, request.args[0], request.doc)
        tally = self._tallies.setdefault(self._task, Tally())
        tally.split_by[told_by] = tally.split_by.get(told_by, 0) + 1
        if end is None:
            context = max(0, prompt - self._split.window)
        else:
            # Of the prompt at least one token is read after the context, to predict what follows.
            context = min(shared_prefix(ids, encode(request.args[0][:end])), prompt - 1)
        self._question = ids[context:]
        try:
            yield
        finally:
            self._question = None

    def _model_generate(self, context: Tensor, max_length: int, stop: list[str], **options: Any) -> Tensor:
        with self._cache_for(context) as given:
            return super()._model_generate(context, max_length, stop, **given, **options)

    def _model_call(self, inps: Tensor, attn_mask: Tensor | None = None, labels: Tensor | None = None) -> Tensor:
        """Logits [1, n, V] of the ids [1, T] that follow the compressed context; of all where there is none."""
        with self._cache_for(inps) as given, torch.no_grad():
            if not given:
                return super()._model_call(inps, attn_mask, labels)
            held = given["past_key_values"].get_seq_length()
            return self.model(input_ids=inps[:, held:], use_cache=True, **given).logits

    @contextmanager
    def _cache_for(self, ids: Tensor) -> Iterator[dict[str, Any]]:
        """What holds the context of the `ids` [1, T] at hand, as an argument of the model; nothing for one left whole.

        The harness has cut a prompt that is too long at its beginning, so the question is told from the end.
        """
        if self._question is None:
            yield {}
            return
        held = ids.shape[1] - len(self._question)
        if held >= 0 and ids[0, held:].tolist() != self._question:
            raise IntegrationError(f"{self._task}: the harness cut the question off; leave truncation=True out.")
        tally = self._tallies[self._task]
        if held < self._min_context:
            tally.add(max(0, held), None)
            yield {}
            return
        context = self._compressed(ids[0, :held].tolist())
        tally.add(held, context)
        with context.working_cache() as cache:
            yield {"past_key_values": cache}

    def _compressed(self, ids: list[int]) -> Context:
        """The compressed context of `ids`; the last one serves as long as questions about it follow each other."""
        if self._last is None or self._last.ids != ids:
            self._last = None  # freed before the next one is read
            context = compress_ids(self.model, self.tokenizer, ids, method=self._method, **self._bits)
            check_held(context, self._most, self._task)
            self._last = context
        return self._last


def check_held(context: Context, most: float, task: str) -> None:
    """Raise IntegrationError where `context` holds more than the share `most` of its entries, or more bytes than the
    entries it counts and the room for what is appended."""
    realised, cache = context.realised_retention(), context.cache
    if realised > most + 1e-9:
        raise IntegrationError(
            f"{task}: of a context of {context.tokens} tokens {realised:.4f} of the entries are held, but {most:.4f} "
            "is what may be: give the method more tolerance=..., or leave short contexts whole with min_context=..."
        )
    if not isinstance(cache, RaggedCache):
        return
    entry = 2 * cache.spec.head_dim * context.model.dtype.itemsize
    allowed = 0
    for layer in cache.ragged_layers:
        kept = int(layer.kept_counts.sum())
        heads = layer.kept_counts.numel()
        allowed += (kept + heads * cache.plan.slack_for(-(-kept // heads), context.model.device)) * entry
    held = sum(layer.nbytes() for layer in cache.ragged_layers)
    if held > allowed:
        raise IntegrationError(f"{task}: {held:,} bytes are held where the entries kept take {allowed:,} at most.")


if __name__ == "__main__":
    cli_evaluate()
