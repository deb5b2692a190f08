"""Running a benchmark: every method and retention on every sample, from one prefill each, written as they come."""

import hashlib
import json
import math
import random
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

import lkv
from lkv.errors import CacheError, DataError, PromptError
from lkv.evaluation.comparison import Fidelity, MethodComparison, MethodGrid, RowPrediction, generate_greedily
from lkv.evaluation.example import Example, Prompt, make_prompt
from lkv.evaluation.metrics import score
from lkv.evaluation.processes import Process
from lkv.evaluation.sample_journal import SampleJournal
from lkv.integrations.transformers.attention import evaluation_mode, input_device, patch_attention
from lkv.integrations.transformers.prefill import LayerKV, PromptKV, read_prompt
from lkv.integrations.transformers.spec import hub_commit
from lkv.methods.registry import FULL
from lkv.policy.policy import Policy
from lkv.utils import devices
from lkv.utils.journal import FIDELITY_METRICS, JOURNAL_FORMAT
from lkv.utils.prompts import encode
from lkv.utils.results import collect_provenance

_PACKAGES = ("tokenizers", "wonderwords", "rouge")  # what texts and scores depend on, beside the model's


def evaluate(
    model: Any,
    tokenizer: Any,
    examples: Iterable[Example],
    methods: Sequence[str],
    retentions: Sequence[float],
    out: Path,
    protocol: str = "kvpress",
    policy: Policy | None = None,
    *,
    pattern: list[list[float]] | None = None,
    pattern_from: str | None = None,
    policies: Mapping[str, Policy] | None = None,
    model_name: str | None = None,
    seed: int = 0,
    timed: int = 2,
    rows_at_once: int = 64,
    make_prompt: Callable[..., Prompt] = make_prompt,
    score: Callable[[Example, str], float] = score,
) -> None:
    """Measure `methods` at all `retentions`, and the full cache, on every example that `out` does not hold yet.

    `out` is a file of JSON lines: a header with the settings, then one line a sample when all its methods are done. An
    interrupted run goes on where it was, and one that asks for more methods or retentions measures those alone; under
    Accelerate each process takes its share of the samples. `policy` and `pattern` as for RaggedCache, `pattern_from`
    tells people where the pattern is from ("estimated on ..."); `policies` by
    name for methods named "METHOD@NAME", `seed` the one that made the examples. `timed`: on how many samples of each
    task and length the full cache is timed alone. `rows_at_once`: how many methods times retentions are held beside
    each other. `make_prompt` and `score` may be others, for another kind of examples.

    Raises DataError for no examples, two of one name, examples of several suites, or a file of other settings or texts,
    and LkvError where a method misses what it needs or the policy is another model's. A sample whose prompt cannot be
    made is written without rows, with the reason.
    """
    process = Process.current()
    grid = MethodGrid(model, tokenizer, methods, retentions, policy, pattern, policies)
    named = _by_key(examples)
    header = {
        "format": JOURNAL_FORMAT,
        "suite": next(iter(named.values())).suite,
        "protocol": protocol,
        "model": model_name or model.name_or_path or type(model).__name__,
        "methods": grid.methods,
        "retentions": grid.retentions,
        # Commits on the hub, where it is from there that model and policy come.
        "revision": hub_commit(model),
        "fingerprint": patch_attention(model).spec.digest(),
        "policy": policy.digest() if policy is not None else None,
        "policy_revision": policy.commit if policy is not None else None,
        "pattern": None if pattern is None else _digest(pattern),
        "pattern_from": None if pattern is None else pattern_from,
        **({"policies": {name: learned.digest() for name, learned in policies.items()}} if policies else {}),
        "seed": seed,
        "planned": len(named),
        "dtype": str(model.dtype).removeprefix("torch."),
        "lkv": lkv.__version__,
        **collect_provenance(_PACKAGES),
    }
    if devices.is_gpu(model.device):
        header["machine"] += f", {devices.runtime(model.device).get_device_name(model.device)}"
    journal = SampleJournal(out, header, process)
    for key, row in journal.done.items():
        if key in named and row.get("text_sha256") != _digest(_text_of(named[key])):
            raise DataError(
                f"{out} holds the sample {key!r} of another text; give the data that it was made with, or another file."
            )
    with_full = _first_of_each(named, timed)
    missing = {key: more for key in named if (more := _missing(grid, journal.done.get(key))) is not None}
    left = _share(list(missing), process)
    prompt_of = partial(
        make_prompt, tokenizer=tokenizer, protocol=protocol, max_positions=patch_attention(model).spec.max_positions
    )
    run = _Run(model, tokenizer, grid, prompt_of, score, rows_at_once)
    with evaluation_mode(model):
        for key in tqdm(left, desc=str(header["suite"]), unit="sample", disable=process.rank > 0):
            journal.add({"key": key} | run.more(named[key], key in with_full, missing[key], journal.done.get(key)))
    journal.finish(list(named))


class _Run:
    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        grid: MethodGrid,
        prompt_of: Callable[[Example], Prompt],
        score: Callable[[Example, str], float],
        rows_at_once: int,
    ):
        self._model, self._tokenizer, self._grid = model, tokenizer, grid
        self._prompt_of, self._score, self._at_once = prompt_of, score, rows_at_once
        self._device = input_device(model)
        self._newline = encode(tokenizer, "\n")[-1:]

    def more(
        self, example: Example, with_full: bool, grid: MethodGrid, before: dict[str, Any] | None
    ) -> dict[str, Any]:
        """One line of the file: the rows of `grid`, behind those of the line `before` where there is one."""
        self._grid = grid
        line = self.sample(example, with_full and before is None)
        if before is None:
            return line
        new = [row for row in line["rows"] if row["method"] != FULL]
        return before | {"rows": before["rows"] + new, "skipped": before["skipped"] + line["skipped"]}

    @torch.no_grad()
    def sample(self, example: Example, with_full: bool) -> dict[str, Any]:
        """One line of the file."""
        about = {
            "task": example.task,
            "length": example.length,
            "number": example.number,
            "text_sha256": _digest(_text_of(example)),
        }
        try:
            given = self._prompt_of(example)
        except PromptError as error:
            return about | {"unusable": str(error), "rows": [], "skipped": []}
        stops = self._newline if example.stop_at_newline else []
        at_once = min(self._at_once, self._grid.size)
        while (measured := self._measured(example, given, stops, at_once)) is None:
            at_once = (at_once + 1) // 2
            devices.release(self._device)
        if with_full:
            measured["seconds"]["full"] = self._time_full(given.context + given.question, example, stops)
        return about | measured

    def _measured(self, example: Example, given: Prompt, stops: Sequence[int], at_once: int) -> dict[str, Any] | None:
        """All rows of a sample, `at_once` beside each other; None where memory ran out, and fewer could do."""
        try:
            return self._rows(example, given, stops, at_once)
        except (MemoryError, RuntimeError, CacheError) as error:
            if at_once == 1 or not devices.is_out_of_memory(error):
                raise
            return None

    def _rows(self, example: Example, given: Prompt, stops: Sequence[int], at_once: int) -> dict[str, Any]:
        clock = self._clock()
        prompt = read_prompt(
            self._model, torch.tensor([given.context], device=self._device), queries=self._grid.required_queries
        )
        read = self._clock()
        rows, skipped = self._grid.bind(given.context, prompt)
        full_entries = sum(layer.key.shape[:3].numel() for layer in prompt)
        entry = _entry_bytes(prompt[0])
        reference = self._reference(example, given.question)
        measured: list[dict[str, Any]] = []
        full: RowPrediction | None = None
        for start in range(0, len(rows), at_once):
            part = rows[start : start + at_once]
            run = MethodComparison(self._model, given.context, prompt, [row.method for row in part])
            if start + at_once >= len(rows):
                prompt = PromptKV()  # the full cache's row has its own copy
            run.append(given.question[:-1])
            close: list[Fidelity] | None = None
            if reference:
                predicted = run.predict(given.question[-1:] + reference, 1)
                full = predicted.row(0) if full is None else full
                close = [predicted.row(index).fidelity_to(full) for index in range(len(part))]
                del predicted
            kept = run.kept_entries()
            answers = run.generate(given.question[-1:], example.max_new_tokens, stops, last=True)
            del run  # its memory goes before the next part, or the full cache alone, takes its own
            for index, (row, held, answer) in enumerate(zip(part, kept, answers, strict=True)):
                text = self._tokenizer.decode(answer, skip_special_tokens=True)
                measured.append(
                    {
                        "method": row.name,
                        "retention": row.retention,
                        "realised": round(held / full_entries, 6),
                        "nbytes": held * entry,
                        "full_nbytes": full_entries * entry,
                        "answer": text,
                        "score": float(self._score(example, text)),
                    }
                    | _fidelity(close[index] if close is not None else None)
                )
        compared = self._clock()
        return {
            "prompt_tokens": len(given.context),
            "truncated": given.truncated,
            "answer_lost": given.answer_lost,
            "seconds": {
                "prefill": round(read - clock, 4),
                "methods": round(compared - read, 4),
                "full": None,
            },
            "rows": measured,
            "skipped": [{"method": s.name, "retention": s.retention, "reason": s.reason} for s in skipped],
        }

    def _reference(self, example: Example, question: list[int]) -> list[int]:
        """Ids of the right answer as the model would go on with it, no longer than an answer may be."""
        # All answers where all are asked for; elsewhere they are other wordings of one.
        text = ", ".join(example.answers if example.metric == "string_match_all" else example.answers[:1])
        if not text:
            return []
        before = self._tokenizer.decode(question[-1:], skip_special_tokens=True)
        space = " " if before and not before[-1].isspace() else ""
        return encode(self._tokenizer, space + text)[: example.max_new_tokens]

    def _time_full(self, ids: list[int], example: Example, stops: Sequence[int]) -> float | None:
        """Seconds that the full cache alone takes to read the same text and answer, in transformers' own cache; None
        where memory runs out: what was measured before is not lost."""
        started = self._clock()
        try:
            generate_greedily(self._model, [ids], example.max_new_tokens, stops)
        except (MemoryError, RuntimeError) as error:
            if not devices.is_out_of_memory(error):
                raise
            return None
        return round(self._clock() - started, 4)

    def _clock(self) -> float:
        if devices.is_gpu(self._device):
            devices.runtime(self._device).synchronize(self._device)
        return time.perf_counter()


def _missing(grid: MethodGrid, line: dict[str, Any] | None) -> MethodGrid | None:
    """What of the grid a sample's line has not, None where it has all."""
    if line is None:
        return grid
    measured = {(row["method"], row["retention"]) for row in (*line.get("rows", ()), *line.get("skipped", ()))}
    left = grid.pairs - measured
    return grid.select(left) if left and not line.get("unusable") else None


def _by_key(examples: Iterable[Example]) -> dict[str, Example]:
    named: dict[str, Example] = {}
    for example in examples:
        parts = (example.task, example.length, example.number)
        key = "-".join(str(part) for part in parts if part is not None)
        if key in named:
            raise DataError(f"there are two samples {key!r}; give each number of a task and length once.")
        named[key] = example
    if not named:
        raise DataError("there are no samples to measure; give at least one task, and samples of it.")
    if len(suites := {example.suite for example in named.values()}) > 1:
        raise DataError(f"the samples belong to {', '.join(sorted(suites))}; measure one suite at a time.")
    return named


def _share(keys: Sequence[str], process: Process) -> list[str]:
    """One of each `size` successive keys: by lot, so that no process gets the same tasks (the long ones) every time."""
    dealt = []
    for start in range(0, len(keys), process.size):
        hand = keys[start : start + process.size]
        dealt += random.Random(start).sample(hand, len(hand))[process.rank : process.rank + 1]
    return dealt


def _first_of_each(named: dict[str, Example], count: int) -> set[str]:
    """The keys of the first `count` samples of each task and length: the same in every run, however it is resumed."""
    seen: dict[tuple[str, int | None], list[str]] = {}
    for key, example in named.items():
        seen.setdefault((example.task, example.length), []).append(key)
    return {key for keys in seen.values() for key in keys[:count]}


def _text_of(example: Example) -> list[Any]:
    parts = (example.context, example.question, example.answer_prefix, example.answers, example.max_new_tokens)
    return list(parts)


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()[:16]


def _entry_bytes(layer: LayerKV) -> int:
    """Bytes of k and v of one token in one head."""
    return (layer.key.shape[-1] + layer.value.shape[-1]) * layer.key.element_size()


def _fidelity(fidelity: Fidelity | None) -> dict[str, float | None]:
    numbers = {name: getattr(fidelity, name, None) for name in FIDELITY_METRICS}
    return {
        name: None if number is None or not math.isfinite(number) else round(number, 6)
        for name, number in numbers.items()
    }
