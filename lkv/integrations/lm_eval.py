"""LKV in lm-evaluation-harness: a model type `lkv`, which compresses a prompt's context before it reads the question.

    python -m lkv.integrations.lm_eval run --model lkv --tasks longbench_qasper --model_args '...'

with `--model_args pretrained=owner/name,retention=0.15`, for example.

This is the harness's own command line, with `lkv` registered; in Python, importing this module registers it.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from lkv.cache.ragged_cache import RaggedCache
from lkv.context.compression import compress_ids
from lkv.context.context import Context
from lkv.errors import DEFAULT_RETENTION, IntegrationError, PromptError
from lkv.hf.attention import patch_attention
from lkv.hf.cache_argument import cache_argument, find_cache
from lkv.hf.positions import check_frequencies
from lkv.integrations.splitting import ContextSplit, common_prefix_length
from lkv.methods.registry import FULL
from lkv.methods.request import CompressionRequest
from lkv.methods.resolve import resolve_method
from lkv.utils.extras import optional_import

with optional_import("lm-eval", "lkv.integrations.lm_eval"):
    from lm_eval.__main__ import cli_evaluate
    from lm_eval.api.registry import register_model
    from lm_eval.models.huggingface import HFLM


@dataclass
class TaskStatistics:
    """How the contexts of one task were compressed."""

    requests: int = 0
    uncompressed: int = 0  # contexts of fewer than `min_context` tokens, and those that the method cannot compress
    tokens: int = 0
    kept_tokens: float = 0.0  # the mean over heads
    nbytes: int = 0
    full_nbytes: int = 0
    splits: dict[str, int] = field(default_factory=dict)

    def add(self, tokens: int, context: Context | None) -> None:
        """Count a context of `tokens` tokens; None if it was not compressed."""
        self.requests += 1
        self.tokens += tokens
        if context is None:
            self.uncompressed += 1
            self.kept_tokens += tokens
        else:
            self.kept_tokens += context.realised_retention() * tokens
            self.nbytes += context.nbytes()
            self.full_nbytes += context.full_nbytes()

    def summary(self) -> dict[str, Any]:
        """Return the statistics for the results; bytes count compressed contexts only."""
        return {
            "requests": self.requests,
            "num_uncompressed": self.uncompressed,
            "context_tokens": self.tokens,
            "realised_retention": self.kept_tokens / self.tokens if self.tokens else 1.0,
            "bytes_held": self.nbytes,
            "bytes_full": self.full_nbytes,
            "split_source": self.splits,
        }


@register_model("lkv")
class LKVLM(HFLM):
    """The harness's transformers model, which compresses the context of each prompt before it reads the question.

    Prompts are read one at a time.
    """

    def __init__(
        self, pretrained: Any, batch_size: Any = 1, min_context: int = 64, tolerance: float = 0.0, **options: Any
    ):
        """Load the model.

        Args:
            pretrained: As in the harness's `hf`.
            batch_size: Accepted, and always 1.
            min_context: Contexts of fewer tokens are not compressed; the results count them, and those that the method
                cannot compress.
            tolerance: The evaluation ends with an error if a method keeps more than `retention` + `tolerance` of a
                context, or more bytes than its entries need.
            options: `method`, `retention`, `policy` and `bits` of `CompressionRequest`, the fields of `ContextSplit`,
                and options of the harness's `hf`.

        Raises:
            IntegrationError: For options that exclude each other. Also what `RaggedCache` raises.
        """
        if options.get("mixed_precision_dtype") or options.get("backend", "causal") not in ("default", "causal"):
            raise IntegrationError(
                "--model lkv takes decoders that compute in the dtype of their weights: leave out backend and "
                "mixed_precision_dtype, and give dtype=bfloat16, for example."
            )
        if type(min_context) is not int or min_context < 1:
            raise IntegrationError(f"min_context is {min_context!r}, but it is a number of tokens: give 1 or more.")
        self._split = ContextSplit(**_take(options, "context_field", "question_marker", "window"))
        is_full = options.get("method") == FULL
        if is_full:
            options.pop("retention", None)  # it keeps everything
        self._request = CompressionRequest(**_take(options, "method", "retention", "policy", "bits"))
        self._retention = self._request.retention or (1.0 if is_full else DEFAULT_RETENTION)
        self._tolerance, self._min_context = tolerance, min_context
        loading = {"use_safetensors": True} if isinstance(pretrained, str) else {}
        super().__init__(pretrained, batch_size=1, **loading | options)
        patch_attention(self.model)
        self._resolved_request = self._request
        if not is_full:  # once, not for each context
            method = resolve_method(self._request, self.model, self.tokenizer)
            self._resolved_request = CompressionRequest(method=method, bits=self._request.bits)
        self._statistics: dict[str, TaskStatistics] = {}
        self._question: list[int] | None = None  # ids after the context of the current request
        self._task = ""
        self._last: Context | None = None

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        """Generate as the harness does, with compressed contexts."""

        def encode(text: str) -> list[int]:
            return self.tok_batch_encode([text])[0][0].tolist()

        answers = []
        for request in self._progress(requests, disable_tqdm):
            ids = encode(request.args[0])
            with self._split_prompt(request, ids, len(ids), encode):
                answers += super().generate_until([request], disable_tqdm=True)
        return answers

    def loglikelihood(self, requests: list[Any], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """Score as the harness does, with compressed contexts."""
        scores = []
        for request in self._progress(requests, disable_tqdm):
            if not request.args[0]:  # there is no context
                scores += super().loglikelihood([request], disable_tqdm=True)
                continue
            prompt, continuation = self._encode_pair(*request.args)
            # The last token predicts nothing, and is not read.
            with self._split_prompt(request, (prompt + continuation)[:-1], len(prompt), self.tok_encode):
                scores += super().loglikelihood([request], disable_tqdm=True)
        return scores

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        """Refuse tasks that score a whole text, with an IntegrationError."""
        raise IntegrationError(
            "tasks that score a whole text (loglikelihood_rolling) have no context before a question, so there is "
            "nothing to compress; evaluate them with --model hf."
        )

    def get_model_info(self) -> dict[str, Any]:
        """Return the harness's model information, with settings and statistics per task under "lkv"."""
        tasks = {task: statistics.summary() for task, statistics in self._statistics.items()}
        method, bits = self._request.method, self._request.bits
        settings = {"method": method, "retention": None if method == FULL else self._retention, "bits": bits}
        return {**super().get_model_info(), "lkv": {**settings, "tasks": tasks}}

    def _progress(self, requests: list[Any], is_quiet: bool) -> Iterator[Any]:
        return iter(tqdm(requests, disable=is_quiet or self.rank != 0, desc="Running requests on compressed contexts"))

    @contextmanager
    def _split_prompt(
        self, request: Any, ids: list[int], prompt_tokens: int, encode: Callable[[str], list[int]]
    ) -> Iterator[None]:
        """Set the question of a request, which the harness reads in the block as `ids`; its prompt comes first."""
        self._task = request.task_name or ""
        split_by, end = self._split.context_end(self._task, request.args[0], request.doc)
        statistics = self._statistics.setdefault(self._task, TaskStatistics())
        statistics.splits[split_by] = statistics.splits.get(split_by, 0) + 1
        if end is None:
            context_tokens = max(0, prompt_tokens - self._split.window)
        else:
            # At least one token of the prompt is read after the context, to predict the next one.
            context_tokens = min(common_prefix_length(ids, encode(request.args[0][:end])), prompt_tokens - 1)
        self._question = ids[context_tokens:]
        try:
            yield
        finally:
            self._question = None

    def _model_generate(self, context: Tensor, max_length: int, stop: list[str], **options: Any) -> Tensor:
        with self._compressed_cache(context) as cache:
            counts = {
                name: options[name] for name in ("num_beams", "num_return_sequences") if options.get(name, 1) != 1
            }
            if cache and counts:
                raise IntegrationError(
                    f"{self._task}: --model lkv gives one answer by greedy decoding or sampling; take "
                    f"{' and '.join(counts)} out of --gen_kwargs and of the task's generation_kwargs, or evaluate with "
                    "--model hf."
                )
            return super()._model_generate(context, max_length, stop, **cache, **options)

    def _model_call(self, inps: Tensor, attn_mask: Tensor | None = None, labels: Tensor | None = None) -> Tensor:
        """Return the logits [1, n, V] of the ids [1, T] after the compressed context, or of all ids without one."""
        with self._compressed_cache(inps) as cache, torch.no_grad():
            if not cache:
                return super()._model_call(inps, attn_mask, labels)
            context_tokens = find_cache(cache).get_seq_length()
            check_frequencies(self.model.config.get_text_config(decoder=True), context_tokens, inps.shape[1])
            return self.model(input_ids=inps[:, context_tokens:], use_cache=True, **cache).logits

    @contextmanager
    def _compressed_cache(self, ids: Tensor) -> Iterator[dict[str, Any]]:
        """Make the model's argument with the cache of the context of `ids` [1, T]; none without a compressed one."""
        if self._question is None:
            yield {}
            return
        # The harness truncates a long prompt at its beginning, so the question is counted from the end.
        context_tokens = ids.shape[1] - len(self._question)
        if context_tokens >= 0 and ids[0, context_tokens:].tolist() != self._question:
            raise IntegrationError(f"{self._task}: the harness cut the question off; leave truncation=True out.")
        context = None
        if context_tokens >= self._min_context:
            context = self._compress(ids[0, :context_tokens].tolist())
        self._statistics[self._task].add(max(0, context_tokens), context)
        if context is None:
            yield {}
            return
        # A question's free slots would be counted as bytes of the next one's context.
        with context.working_cache(keeps_slots=False) as cache:
            yield cache_argument(cache)

    def _compress(self, ids: list[int]) -> Context | None:
        """Find the compressed context of `ids`, shared by successive questions; None if it cannot be compressed."""
        if self._last is None or self._last.ids != ids:
            self._last = None  # freed before the next one is read
            with suppress(PromptError):  # the method needs a longer text, or a shorter one
                context = compress_ids(self.model, self.tokenizer, ids, self._resolved_request)
                check_size(context, self._retention + self._tolerance, self._task)
                self._last = context
        return self._last


def _take(options: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: options.pop(name) for name in names if name in options}


def check_size(context: Context, max_retention: float, task: str) -> None:
    """Check the entries and the bytes of a compressed context.

    Raises IntegrationError if it keeps more than the share `max_retention` of its entries, or takes more bytes than
    these entries and their slack.
    """
    realised, cache = context.realised_retention(), context.cache
    if realised > max_retention + 1e-9:
        raise IntegrationError(
            f"{task}: {realised:.4f} of the entries of a context of {context.tokens} tokens are kept, but at most "
            f"{max_retention:.4f} may be: give the method more tolerance=..., or leave short contexts uncompressed "
            "with min_context=..."
        )
    if not isinstance(cache, RaggedCache):
        return
    entry_nbytes = 2 * cache.spec.head_dim * context.model.dtype.itemsize
    allowed_nbytes = 0
    for layer in cache.ragged_layers:
        kept_entries = int(layer.lens.sum())
        heads = layer.lens.numel()
        slack = heads * cache.config.slack_for(-(-kept_entries // heads), context.model.device)
        allowed_nbytes += (kept_entries + slack) * entry_nbytes
    nbytes = sum(layer.nbytes() for layer in cache.ragged_layers)
    if nbytes > allowed_nbytes:
        raise IntegrationError(f"{task}: the cache takes {nbytes:,} bytes, but its entries take {allowed_nbytes:,}.")


if __name__ == "__main__":
    cli_evaluate()
