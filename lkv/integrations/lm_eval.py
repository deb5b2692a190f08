"""LKV in lm-evaluation-harness: a model type `lkv`, which compresses a prompt's context before it reads the question.

    python -m lkv.integrations.lm_eval run --model lkv --tasks longbench_qasper --model_args '...'

with `--model_args pretrained=owner/name,retention=0.15`, for example.

This is the harness's own command line, with `lkv` registered; in Python, importing this module registers it.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from lkv.context.compression import compress_ids
from lkv.context.context import Context
from lkv.errors import DEFAULT_RETENTION, IntegrationError, PromptError, check_count
from lkv.hf.attention import patch_attention
from lkv.hf.cache_argument import cache_argument, find_cache
from lkv.hf.positions import check_frequencies
from lkv.methods.registry import FULL
from lkv.methods.request import CompressionRequest, resolve_method
from lkv.utils.extras import optional_import

with optional_import("lm-eval", "lkv.integrations.lm_eval"):
    from lm_eval.__main__ import cli_evaluate
    from lm_eval.api.registry import register_model
    from lm_eval.models.huggingface import HFLM


# Tasks of lm-evaluation-harness: (name, the document's field that is the context, how the question begins).
TASKS: list[tuple[str, str | None, str | None]] = [
    (r"longbench2?_\w+", "context", None),
    (r"niah_\w+", None, r"\nWhat (?:is|are)(?: all)? the special magic "),
    (r"ruler_vt", None, r"\n?Question: Find all variables that are assigned the value "),
    (r"ruler_cwe", None, r"\nQuestion: What are the 10 most common words "),
    (r"ruler_fwe", None, r"\nQuestion: Do not provide any explanation\. "),
    (r"ruler_qa_\w+", None, r"\n\nAnswer the question based on the given documents\. "),
]


@dataclass(frozen=True)
class ContextSplit:
    """How to split a prompt into its context and its question.

    Args:
        context_field: The context ends where the text of this field of the task's document ends; it includes all text
            before.
        question_marker: A regular expression; the question begins at its last match.
        window: Without the two, and for tasks that are not in `TASKS`: the tokens of the question.
    """

    context_field: str | None = None
    question_marker: str | None = None
    window: int = 64

    def __post_init__(self) -> None:
        if self.context_field is not None and self.question_marker is not None:
            raise IntegrationError("context_field and question_marker both define the end of the context: give one.")
        problem = f"window is {self.window!r}, but a question has at least one token: give 1 or more."
        object.__setattr__(self, "window", check_count(self.window, IntegrationError(problem)))
        try:
            re.compile(self.question_marker or "")
        except (re.error, TypeError) as error:
            problem = f"question_marker {self.question_marker!r} is not a regular expression ({error})."
            raise IntegrationError(problem) from error

    def context_end(self, task: str, prompt: str, document: Mapping[str, Any]) -> tuple[str, int | None]:
        """Return ("field" or "marker", how many characters of `prompt` are context), or ("window", None).

        Raises IntegrationError if the document lacks the field, or the prompt lacks its text or the marker.
        """
        field, marker = self.context_field, self.question_marker
        if field is None and marker is None:
            field, marker = next(((f, m) for name, f, m in TASKS if re.fullmatch(name, task)), (None, None))
        if field is not None:
            return "field", _end_of_field(field, task, prompt, document)
        if marker is None:
            return "window", None
        starts = [match.start() for match in re.finditer(marker, prompt)]
        if not starts:
            raise IntegrationError(
                f"{task}: {marker!r}, which the question should begin with, is not in the prompt; give context_field "
                "or another question_marker."
            )
        return "marker", starts[-1]


def _end_of_field(field: str, task: str, prompt: str, document: Mapping[str, Any]) -> int:
    text = document.get(field)
    if not isinstance(text, str) or not text.strip():
        raise IntegrationError(
            f"{task}: the document has no text in a field {field!r}; its fields are {', '.join(map(str, document))}."
        )
    text = text.strip()  # as templates may strip it
    start = prompt.rfind(text)
    if start < 0:
        raise IntegrationError(
            f"{task}: the prompt does not contain the text of the field {field!r} unchanged; give question_marker, a "
            "regular expression that the question begins with."
        )
    return start + len(text)


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

    def __init__(self, pretrained: object, batch_size: object = 1, min_context: int = 64, **options: object):
        """Load the model.

        Args:
            pretrained: As in the harness's `hf`.
            batch_size: Accepted, and always 1.
            min_context: Contexts of fewer tokens are not compressed; the results count them, and those that the method
                cannot compress.
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
        problem = f"min_context is {min_context!r}, but it is a number of tokens: give 1 or more."
        self._split = ContextSplit(**_take(options, "context_field", "question_marker", "window"))
        is_full = options.get("method") == FULL
        if is_full:
            options.pop("retention", None)  # it keeps everything
        self._request = CompressionRequest(**_take(options, "method", "retention", "policy", "bits"))
        self._min_context = check_count(min_context, IntegrationError(problem))
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
        retention = None if method == FULL else self._request.retention or DEFAULT_RETENTION
        settings = {"method": method, "retention": retention, "bits": bits}
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
            pairs = zip(ids, encode(request.args[0][:end]), strict=False)
            prefix_tokens = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
            context_tokens = min(prefix_tokens, prompt_tokens - 1)
        self._question = ids[context_tokens:]
        try:
            yield
        finally:
            self._question = None

    def _model_generate(self, context: Tensor, max_length: int, stop: list[str], **options: object) -> Tensor:
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
                self._last = compress_ids(self.model, self.tokenizer, ids, self._resolved_request)
        return self._last


def _take(options: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: options.pop(name) for name in names if name in options}


if __name__ == "__main__":
    cli_evaluate()
