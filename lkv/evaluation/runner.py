"""Run a benchmark: every method at every retention on every example, from one prefill each."""

import hashlib
import json
import math
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from lkv.errors import CacheError, DataError, PromptError
from lkv.evaluation.comparison import Fidelity, MethodComparison, MethodGrid, RowPrediction
from lkv.evaluation.example import Example, Prompt, make_prompt
from lkv.evaluation.metrics import score
from lkv.evaluation.sample_journal import SampleJournal
from lkv.hf.attention import input_device, patch_attention
from lkv.hf.prompt_kv import PromptKV, read_prompt
from lkv.hf.spec import check_ids, evaluation_mode
from lkv.methods.registry import FULL
from lkv.policy.policy import Policy
from lkv.utils import devices
from lkv.utils.cpu_threads import adapt_threads
from lkv.utils.journal import FIDELITY_METRICS, JOURNAL_FORMAT, MEMORY, Record, lock_journal
from lkv.utils.progress import ProgressBar
from lkv.utils.prompts import encode
from lkv.utils.provenance import collect_provenance
from lkv.version import __version__

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

_PACKAGES = ("tokenizers", "wonderwords", "rouge")  # examples and scores depend on their versions too


@dataclass(frozen=True)
class EvaluationConfig:
    """The settings of an evaluation.

    Args:
        methods: Names as `lkv methods` lists them, or "BUDGET+SELECTOR"; "METHOD@NAME" reads `policies[NAME]`. The full
            cache is always measured too.
        retentions: The shares of the KV entries to keep, or memory budgets if `by_memory`.
        protocol: How prompts are made: "kvpress" or "longbench" (see `lkv.evaluation.example`).
        policy: The policy of the methods without "@NAME" that read one.
        policies: Further policies by name.
        pattern: DuoAttention's score of each head, [layers][KV heads].
        by_memory: Whether `retentions` are shares of the 16-bit cache's bytes, spent on tiers of precision.
        pattern_source: Where the pattern is from, for tables ("estimated on ...").
        model_name: What the results call the model (default: its own name).
        seed: The seed that made the examples; recorded only.
        max_rows: How many methods x retentions run as one batch; less memory with fewer.
        make_prompt: Makes the prompt of an example; replace it for examples of your own.
        score: Scores the answer to an example, in 0..100.
    """

    methods: Sequence[str]
    retentions: Sequence[float]
    protocol: str = "kvpress"
    policy: Policy | None = None
    policies: Mapping[str, Policy] = field(default_factory=dict)
    pattern: list[list[float]] | None = None
    pattern_source: str | None = None
    by_memory: bool = False
    model_name: str | None = None
    seed: int = 0
    max_rows: int = 64
    make_prompt: Callable[..., Prompt] = make_prompt
    score: Callable[[Example, str], float] = score


def evaluate(
    model: "PreTrainedModel",
    tokenizer: "PreTrainedTokenizerBase",
    examples: Iterable[Example],
    config: EvaluationConfig,
    out: Path,
) -> None:
    """Measure the methods of `config` and the full cache on every example that `out` does not hold yet.

    `out` is a file of JSON lines: a header with the settings, then one line an example as soon as it is measured. An
    interrupted run resumes. A run with more examples, methods or retentions measures only what is missing and extends
    the file. Under Accelerate, each process measures its share of the examples. An example whose prompt cannot be made
    is written without rows, with the reason.

    Args:
        model: The model.
        tokenizer: Its tokenizer.
        examples: Examples of one suite.
        config: What to measure.
        out: The file.

    Raises:
        DataError: For no examples, two of the same name, examples of several suites, a file with other settings or
            texts, or a file that another evaluation is writing to.
        LkvError: If a method lacks its policy or pattern, or a policy was trained for another model.
    """
    state = devices.distributed_state("evals", "an evaluation")
    grid = MethodGrid(
        model,
        tokenizer,
        config.methods,
        config.retentions,
        config.policy,
        config.pattern,
        config.policies,
        {"": None} if config.by_memory else None,
    )
    named = _name_examples(examples)
    header = _header(model, grid, config, named)
    with lock_journal(out) if state.is_main_process else nullcontext():
        samples = {key: _digest_example(example) for key, example in named.items()}
        journal = SampleJournal(
            out, header, state.process_index, state.num_processes, state.wait_for_everyone, samples=samples
        )
        missing = {key: _missing_methods(grid, journal.done.get(key)) for key in named}
        pending = {key: methods for key, methods in missing.items() if methods is not None}
        share = _share_of(list(pending), state.process_index, state.num_processes)
        with evaluation_mode(model):
            for key in ProgressBar(share, desc=str(header["suite"]), unit="sample", disable=not state.is_main_process):
                line = journal.done.get(key)
                measured = run_example(model, tokenizer, named[key], pending[key], config)
                journal.add({"key": key} | (measured if line is None else _extend(line, measured)))
        journal.finish(list(named))


@adapt_threads
@torch.no_grad()
def run_example(
    model: "PreTrainedModel",
    tokenizer: "PreTrainedTokenizerBase",
    example: Example,
    grid: MethodGrid,
    config: EvaluationConfig,
) -> Record:
    """Measure the full cache and the methods of `grid` on one example.

    Args:
        model: The model.
        tokenizer: Its tokenizer.
        example: What to measure on.
        grid: The methods.
        config: How prompts are made and scored.

    Returns:
        The example's line of the file: `rows` (one a method and retention: answer, score, fidelity to the full cache,
        memory), `skipped` methods with the reason, and seconds. Where memory runs out, fewer methods run at a time.
    """
    line: Record = {"task": example.task, "length": example.length, "number": example.number}
    line |= _digest_example(example)
    try:
        max_positions = patch_attention(model).spec.max_positions
        max_positions = min(max_positions, example.max_tokens or max_positions)
        prompt = config.make_prompt(example, tokenizer=tokenizer, protocol=config.protocol, max_positions=max_positions)
    except PromptError as error:
        return line | {"unusable": str(error), "rows": [], "skipped": []}
    # Rows of a batch share their precision.
    max_rows = 1 if grid.is_memory else min(config.max_rows, 1 + len(grid.pairs))
    while True:
        try:
            return line | _run_methods(model, tokenizer, example, prompt, grid, config, max_rows)
        except (MemoryError, RuntimeError, CacheError) as error:
            if max_rows == 1 or not devices.is_out_of_memory(error):
                raise
        # After the exception is gone, and with it the tensors of its frames.
        max_rows = (max_rows + 1) // 2
        devices.release(input_device(model))


def _run_methods(
    model: "PreTrainedModel",
    tokenizer: "PreTrainedTokenizerBase",
    example: Example,
    prompt: Prompt,
    grid: MethodGrid,
    config: EvaluationConfig,
    max_rows: int,
) -> Record:
    """Return all rows of an example, in batches of `max_rows`."""
    reference = _reference_answer(tokenizer, example, prompt.question)
    check_ids(model, tokenizer, prompt.context + prompt.question + reference)
    device = input_device(model)
    stop_ids = encode(tokenizer, "\n")[-1:] if example.stop_at_newline else []
    started = devices.synchronised_clock(device)
    layers = read_prompt(model, torch.tensor([prompt.context], device=device), queries=grid.required_queries)
    prefilled = devices.synchronised_clock(device)
    bound, skipped = grid.bind(prompt.context, layers)
    full_entries = sum(layer.key.shape[:3].numel() for layer in layers)
    entry_nbytes = (layers[0].key.shape[-1] + layers[0].value.shape[-1]) * layers[0].key.element_size()
    rows: list[Record] = []
    full: RowPrediction | None = None
    for start in range(0, len(bound), max_rows):
        batch = bound[start : start + max_rows]
        comparison = MethodComparison(model, prompt.context, layers, [row.method for row in batch])
        if start + max_rows >= len(bound):
            layers = PromptKV()  # frees the prompt: the full cache's row has a copy of its own
        kept_entries, nbytes_of_batch = comparison.kept_entries(), comparison.nbytes()
        comparison.append(prompt.question[:-1])
        fidelities: list[Fidelity | None] = [None] * len(batch)
        if reference:
            predictions = comparison.predict(prompt.question[-1:] + reference, 1)
            full = predictions.row(0) if full is None else full
            fidelities = [predictions.row(index).fidelity_to(full) for index in range(len(batch))]
            del predictions
        answers = comparison.generate(prompt.question[-1:], example.max_new_tokens, stop_ids, last=True)
        del comparison  # frees its memory before the next batch takes its own
        for row, kept_count, answer, fidelity in zip(batch, kept_entries, answers, fidelities, strict=True):
            text = str(tokenizer.decode(answer, skip_special_tokens=True))
            nbytes = nbytes_of_batch if grid.is_memory and row.name != FULL else kept_count * entry_nbytes
            memory = {"nbytes": nbytes, "full_nbytes": full_entries * entry_nbytes}
            line = {"method": row.name, "retention": row.retention, "realised": round(kept_count / full_entries, 6)}
            line |= memory | {"answer": text, "score": float(config.score(example, text))}
            rows.append(line | {name: _rounded(getattr(fidelity, name, None)) for name in FIDELITY_METRICS})
    seconds = {"prefill": prefilled - started, "methods": devices.synchronised_clock(device) - prefilled}
    return {
        "prompt_tokens": len(prompt.context),
        "truncated": prompt.truncated,
        "answer_lost": prompt.answer_lost,
        "seconds": {name: round(value, 4) for name, value in seconds.items()},
        "rows": rows,
        "skipped": [method._asdict() for method in skipped],
    }


def _reference_answer(tokenizer: "PreTrainedTokenizerBase", example: Example, question: list[int]) -> list[int]:
    """Return the ids of the true answer as a continuation of the prompt, at most as long as an answer may be."""
    # Some tasks ask for all the answers; elsewhere they are different wordings of one.
    text = ", ".join(example.answers if example.metric == "string_match_all" else example.answers[:1])
    if not text:
        return []
    before = tokenizer.decode(question[-1:], skip_special_tokens=True)
    space = " " if before and not before[-1].isspace() else ""
    return encode(tokenizer, space + text)[: example.max_new_tokens]


def _name_examples(examples: Iterable[Example]) -> dict[str, Example]:
    """Return the examples by their key in the file: task, length and number."""
    named: dict[str, Example] = {}
    for example in examples:
        parts = (example.task, example.length, example.number)
        key = "-".join(str(part) for part in parts if part is not None)
        if key in named:
            raise DataError(f"there are two samples {key!r}; use each number of a task and length once.")
        named[key] = example
    if not named:
        raise DataError("there are no samples to measure; give at least one task, and samples of it.")
    if len(suites := {example.suite for example in named.values()}) > 1:
        raise DataError(f"the samples belong to {', '.join(sorted(suites))}; measure one suite at a time.")
    return named


def _header(model: "PreTrainedModel", grid: MethodGrid, config: EvaluationConfig, named: dict[str, Example]) -> Record:
    """Return the first line of the file: all settings that results depend on."""
    policy, pattern, policies = config.policy, config.pattern, config.policies
    tiers = {name: own.card["tiers"] for name, own in {"": policy, **policies}.items() if own and own.card.get("tiers")}
    header = {
        "format": JOURNAL_FORMAT,
        "suite": next(iter(named.values())).suite,
        "protocol": config.protocol,
        "model": config.model_name or model.name_or_path or type(model).__name__,
        "methods": grid.methods,
        "retentions": grid.retentions,
        **({"budget": MEMORY} if grid.is_memory else {}),
        "revision": getattr(model.config, "_commit_hash", None),
        "fingerprint": patch_attention(model).spec.digest(),
        "policy": policy.digest() if policy is not None else None,
        "policy_revision": policy.commit if policy is not None else None,
        "pattern": None if pattern is None else _digest(pattern),
        "pattern_from": None if pattern is None else config.pattern_source,
        **({"policies": {name: policy.digest() for name, policy in policies.items()}} if policies else {}),
        **({"tiers": tiers} if grid.is_memory and tiers else {}),
        "make_prompt": _qualified_name(config.make_prompt),
        "score": _qualified_name(config.score),
        "seed": config.seed,
        "planned": list(named),
        "dtype": devices.dtype_name(model.dtype),
        "lkv": __version__,
        **collect_provenance(_PACKAGES),
    }
    if devices.is_gpu(model.device):
        header["machine"] += f", {devices.runtime(model.device).get_device_name(model.device)}"
    return header


def _qualified_name(function: Callable[..., object]) -> str:
    """Return a function with its module, or the kind of another callable."""
    return f"{function.__module__}.{getattr(function, '__qualname__', type(function).__name__)}"


def _missing_methods(grid: MethodGrid, line: Record | None) -> MethodGrid | None:
    """Return the methods that an example's line lacks, None if it has all."""
    if line is None:
        return grid
    measured = {(row["method"], row["retention"]) for row in (*line.get("rows", ()), *line.get("skipped", ()))}
    missing = grid.pairs - measured
    return grid.select(missing) if missing and not line.get("unusable") else None


def _extend(line: Record, measured: Record) -> Record:
    """Return an example's line with the rows of more methods; the full cache is already there."""
    rows = [row for row in measured["rows"] if row["method"] != FULL]
    return line | {"rows": line["rows"] + rows, "skipped": line["skipped"] + measured["skipped"]}


def _share_of(keys: Sequence[str], rank: int, world_size: int) -> list[str]:
    """One of each `world_size` successive keys, at random: otherwise a process could get the same tasks each time."""
    share = []
    for start in range(0, len(keys), world_size):
        group = keys[start : start + world_size]
        share += random.Random(start).sample(group, len(group))[rank : rank + 1]
    return share


def _digest_example(example: Example) -> dict[str, str]:
    """Return the digests of an example that its line records."""
    text = (example.context, example.question, example.answer_prefix, example.answers, example.max_new_tokens)
    scoring = (example.metric, example.classes, example.first_line, example.stop_at_newline, example.chat)
    return {"text_sha256": _digest(text), "scoring_sha256": _digest(scoring)}


def _digest(value: object) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()[:16]


def _rounded(number: float | None) -> float | None:
    return None if number is None or not math.isfinite(number) else round(number, 6)
