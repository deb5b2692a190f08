"""`lkv fit`: a policy for any model in minutes, without settings.

It has three stages: statistics of k, v and queries; regression of budgets and scores on eviction errors, with forward
passes only; distillation for the remaining time. Each stage is saved, so that an interrupted run resumes. The run ends
with a comparison.
"""

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from shutil import rmtree
from typing import TYPE_CHECKING

import torch

from lkv.errors import LkvError, TrainingError
from lkv.hf.attention import input_device, patch_attention
from lkv.hf.prompt_kv import query_rotations
from lkv.hf.spec import evaluation_mode
from lkv.policy.policy import Policy, check_policy_folder
from lkv.policy.shipped import fitted_folder
from lkv.training.checkpoint import CHECKPOINT, check_no_policy, lock_folder, read_checkpoint
from lkv.training.cost import seconds_per_token
from lkv.training.data.mixture import Mixture
from lkv.training.datasets import open_texts
from lkv.training.fit_plan import config_for, longest_context, shorter_contexts
from lkv.training.fit_run import RUN, FitJob, FitRun, Progress, log
from lkv.utils.devices import is_out_of_memory, release
from lkv.utils.files import as_path, check_is_not_data, check_writable_folder
from lkv.utils.progress import ProgressBar

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

_SHORTEST = 256  # tokens of a context, below which memory is too small
_PROBE_TOKENS = 256  # length of the timed text
_PROBE_SHARE, _PROBE_SECONDS = 0.01, 2.0  # the most time for the timing

clock = time.perf_counter  # the clock of the run


def fit(
    model: "PreTrainedModel",
    tokenizer: "PreTrainedTokenizerBase",
    texts: Sequence[str] | None = None,
    minutes: float = 10.0,
    *,
    data: str | Path | None = None,
    out: str | Path | None = None,
    name: str | None = None,
    against: Sequence[str | Path] = (),
) -> Policy:
    """Make a policy for a model.

    Stages, durations and the held-out KL are printed to stderr. Repeat the call to resume an interrupted run.

    Args:
        model: the model, on the device to use and in the dtype to read with.
        tokenizer: its tokenizer.
        texts: documents to fit the policy to. At least half of the samples come from `texts` and `data` (fewer if these
            have fewer than 100,000 characters), the others from texts that come with Python and LKV and from invented
            facts; without either, all do.
        minutes: how long it may take.
        data: a folder of documents (.txt, .md, code, .jsonl; HTML and PDF with the extra `documents`).
        out: the policy's folder, which has none yet; by default a folder in LKV's cache, where `RaggedCache(model)`
            finds it.
        name: the model's name for the policy's card (default: the one it was loaded from).
        against: files of evaluated texts (JSON, JSON lines, CSV, Parquet, text): rows of which a text shares a tenth
            of its 13-grams with them, or has 6 to 12 words and stands in them, are left out, and pieces of 12,000
            characters of other documents.

    Returns:
        The policy, which is also saved.

    Raises:
        DataError: If the texts are too few.
        TrainingError: If the time or the memory is too short, or the folder holds a policy.
        UnsupportedModelError: If LKV does not support the model.
    """
    if not isinstance(minutes, int | float) or not minutes > 0 or not math.isfinite(minutes):
        raise TrainingError(f"minutes is {minutes!r}, but must be a number above 0; give 10 for ten minutes.")
    started = clock()
    query_rotations(model, "`lkv fit`")  # reject unsupported models before reading texts
    return fit_to(open_texts(texts or (), data, against), model, tokenizer, minutes, out, name, started)


def fit_to(
    texts: Mixture,
    model: "PreTrainedModel",
    tokenizer: "PreTrainedTokenizerBase",
    minutes: float,
    out: str | Path | None,
    name: str | None,
    started: float,
) -> Policy:
    """Make a policy as `fit` does.

    Args:
        texts: What `open_texts` returned.
        model: As for `fit`, like all but the last.
        tokenizer: Its tokenizer.
        minutes: How long it may take.
        out: The policy's folder.
        name: The model's name for the policy's card.
        started: When the time began, by `clock`.
    """
    query_rotations(model, "`lkv fit`")
    spec = patch_attention(model).spec
    model_name = name or str(getattr(model.config, "_name_or_path", "") or spec.architecture)
    folder = fitted_folder(model_name, spec) if out is None else as_path(out, TrainingError, "the policy's folder")
    if out is not None:
        check_no_policy(folder, folder / RUN / "state" / CHECKPOINT)
    _check_folder(folder, texts)
    is_new = not folder.exists()
    check_writable_folder(folder / RUN, TrainingError, "the policy")
    job = FitJob(model, tokenizer, texts, minutes * 60, folder, model_name, keeps_earlier=out is None)
    with (
        lock_folder(folder / RUN),
        _removed_if_unused(folder / RUN, is_new),
        evaluation_mode(model),
        _frozen(model),
        torch.enable_grad(),
    ):
        return _run(job, started)


def _run(job: FitJob, started: float) -> Policy:
    """Run all stages; shorten contexts if memory runs out."""
    log("measuring how fast the model reads here")
    positions = patch_attention(job.model).spec.max_positions
    probe_seconds = min(_PROBE_SECONDS, _PROBE_SHARE * job.seconds)
    per_token = seconds_per_token(job.model, min(_PROBE_TOKENS, positions), probe_seconds, clock)
    interrupted, earlier = _interrupted_run(job)
    longest = interrupted or longest_context(job.seconds / per_token)

    def elapsed() -> float:
        return earlier + clock() - started

    while True:
        config = config_for(positions, longest)
        try:
            with ProgressBar(
                total=int(job.seconds),
                initial=int(elapsed()),
                desc="fitting",
                position_now=elapsed,
                bar_format="{desc}: {percentage:3.0f}% |{bar:20}| {remaining} left",
                leave=False,
            ):
                return FitRun(job, config, per_token, elapsed).run()
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            longest = shorter_contexts(config)
            if longest < _SHORTEST:
                raise TrainingError(
                    "there is not enough memory to fit a policy, even with the shortest contexts that make sense; "
                    "close other programs, or load the model in a smaller dtype."
                ) from error
            log("out of memory: going on with contexts half as long")
        release(input_device(job.model))


def _check_folder(folder: Path, texts: Mixture) -> None:
    """Raise TrainingError if a policy in `folder` would replace another file, or later be read as a document."""
    check_policy_folder(folder, TrainingError, "give an --out of its own")
    if texts.index.used:
        check_is_not_data(folder, texts.index.folder, TrainingError)


@contextmanager
def _removed_if_unused(run: Path, is_new: bool) -> Iterator[None]:
    """Remove `run` if the block fails before saving anything in it, and its parent folder if new and empty."""
    try:
        yield
    except BaseException as error:
        if (run / "state" / CHECKPOINT).exists():
            if isinstance(error, KeyboardInterrupt):
                log(f"the stages that were finished are saved in {run}; run the same command to continue")
        else:
            rmtree(run, ignore_errors=True)
            with suppress(OSError):
                if is_new:
                    run.parent.rmdir()
        raise


def _interrupted_run(job: FitJob) -> tuple[int | None, float]:
    """Return the maximum context length and the seconds of the saved run; (None, 0) without one that can be read."""
    if not (job.state / CHECKPOINT).exists():
        return None, 0.0
    try:
        checkpoint = read_checkpoint(job.state)
        return int(checkpoint.config["max_tokens"]), Progress(**checkpoint.card["progress"]).seconds
    except (LkvError, KeyError, TypeError, ValueError) as error:
        kept = job.folder / f"{RUN}-unreadable"
        log(f"the interrupted run cannot be read ({error}): starting anew; it was moved to {kept}")
        rmtree(kept, ignore_errors=True)
        job.state.rename(kept)
        return None, 0.0


@contextmanager
def _frozen(model: "PreTrainedModel") -> Iterator[None]:
    """Compute no gradients of the model's weights in the block."""
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    model.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in trainable:
            parameter.requires_grad_(True)
