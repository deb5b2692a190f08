"""One run of `lkv fit`: statistics, regression on eviction errors, distillation, comparison; a killed run resumes."""

import copy
import itertools
import math
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from shutil import rmtree
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from tqdm import tqdm

from lkv.errors import TrainingError, TrainingStoppedError
from lkv.hf.attention import has_length_dependent_rope, input_device, patch_attention
from lkv.policy.lookup import stored_policy
from lkv.policy.policy import Policy, is_policy
from lkv.policy.shipped import describe_overlap
from lkv.training.checkpoint import CHECKPOINT, OtherRunError, initialize_from, read_checkpoint, save_checkpoint
from lkv.training.config import TrainingConfig
from lkv.training.cost import mean_length
from lkv.training.data.mixture import Mixture
from lkv.training.datasets import draw_sample, make_card
from lkv.training.fit_plan import (
    FIRST_CONTEXT,
    PROGRESS_TEXTS,
    STATISTICS_TEXTS,
    FitSamples,
    config_for_distillation,
    distillation_lengths,
    make_plan,
)
from lkv.training.heldout import (
    PROGRESS_RETENTIONS,
    better_baselines,
    compare,
    describe_better_baselines,
    format_kl,
    format_table,
    measure_policy,
    read_text,
)
from lkv.training.loop import TimeBudget, TrainingLoop
from lkv.training.warm_start import WARM_START_TOKENS, RegressionTargets, calibrate, fit_to_targets, regression_targets
from lkv.utils.devices import dtype_name, is_out_of_memory, release
from lkv.utils.durations import format_duration

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

RUN = ".fit"  # the folder of a run that is not finished
_DECISIVE_RETENTION = 0.15  # a policy worse than SnapKV at it does not become the default
# Few held-out texts are noisy, and the last weights were trained at the smallest rates: earlier weights must be better
# by this factor to replace them.
_CLEARLY_WORSE = 1.25
_REPORT_SHARE = 0.05  # of the time of the distillation that reports may take
_SHORTEST_COMPARED = 128  # tokens of a context, below which memory is too small


class FitJob(NamedTuple):
    """The model, data, time and output folder of a fit.

    With `keeps_earlier` an existing policy in `folder` is kept, and the new one is saved in a sibling folder.
    """

    model: "PreTrainedModel"
    tokenizer: "PreTrainedTokenizerBase"
    texts: Mixture
    seconds: float
    folder: Path
    model_name: str
    keeps_earlier: bool

    @property
    def state(self) -> Path:
        """The folder of the state that a later call resumes from."""
        return self.folder / RUN / "state"


@dataclass
class Progress:
    """The progress of a run: finished stages, seconds, held-out KL, start of the distillation, and the KL curve."""

    stage: int = 0
    seconds: float = 0.0
    best_kl: float = math.inf
    last_kl: float = math.inf
    distilling_since: float = 0.0
    curve: list[dict[str, float]] = field(default_factory=list)


class FitRun:
    """One run of `fit`: its plan, its stages and the state that a later call resumes from.

    Args:
        job: The job.
        config: The settings, with context lengths that fit into memory.
        per_token: Seconds of prefill per token.
        elapsed: Returns the seconds of this call and of the earlier calls of the run.
    """

    def __init__(self, job: FitJob, config: TrainingConfig, per_token: float, elapsed: Callable[[], float]):
        self._job, self._config, self._elapsed, self._progress = job, config, elapsed, Progress()
        self._model, self._state, self._seconds = job.model, job.state, job.seconds
        self._reading = mean_length(config.min_tokens, config.max_tokens) * per_token
        spec = patch_attention(job.model).spec
        self._lengths = distillation_lengths(config, spec.max_positions)
        draw = partial(draw_sample, model=job.model, tokenizer=job.tokenizer, config=config)
        self._samples = FitSamples(job.texts, draw, config, self._lengths)
        torch.manual_seed(config.seed)
        card = make_card(job.model, job.model_name, config, job.texts, self._lengths.most)
        if "/" in card["model"]:
            card["hub"] = [job.model_name]
        self.policy = Policy(spec, card, config.inputs).to(input_device(job.model))
        # Before the regression, scores consist of expected attention only.
        self._initial_output = self.policy.tokens.output.detach().clone()
        self.policy.tokens.output.detach().zero_()
        self._best = copy.deepcopy(self.policy)
        self._loop = TrainingLoop(
            job.model,
            self.policy,
            config,
            self._samples.draw_batch,
            remedy="load the model in float32 (--dtype float32).",
            contexts_at_once=1 if has_length_dependent_rope(job.model) else config.batch,
        )
        self._report_seconds = 0.0

    @property
    def _contexts(self) -> int:
        """The number of contexts used for training."""
        return self._loop.step * self._config.batch

    def run(self) -> Policy:
        """Run the remaining stages, save the policy, print the comparison and return the policy."""
        self._restore()
        self._make_plan()
        held_out = self._samples.draw_held_out(0, PROGRESS_TEXTS, self._config.max_tokens)
        self._progress_texts = [read_text(self._model, sample) for sample in held_out]
        if self._progress.stage < 1:
            texts = self._samples.draw_training(0, STATISTICS_TEXTS)
            calibrate(self._model, self.policy, [text.context[:WARM_START_TOKENS] for text in texts])
            self._finish_stage(1, "statistics")
        if self._progress.stage < 2 and self._plan.regression_texts:
            targets = self._read_targets()
            self.policy.tokens.output.detach().copy_(self._initial_output)
            error = fit_to_targets(self.policy, targets)
            explained = f"{1 - error:.0%}" if error < 1 else "none"
            self._finish_stage(2, f"regression, {explained} of the variance")
        self._distill()
        return self._finish()

    def _restore(self) -> None:
        """Restore the state of a run that was interrupted or ran out of memory.

        Raises TrainingError if it belongs to another run.
        """
        if not (self._state / CHECKPOINT).exists():
            return
        checkpoint = read_checkpoint(self._state)
        progress = Progress(**checkpoint.card["progress"])
        lengths = {name: checkpoint.config[name] for name in ("min_tokens", "max_tokens")}
        try:
            checkpoint.check_run(replace(self._config, **lengths), self.policy.card["data_digest"])
            checkpoint.load_policy(self.policy)
            initialize_from(self._best, self._state / "best")
            if self._config.max_tokens < lengths["max_tokens"]:  # position tables are shorter too
                progress.best_kl = math.inf
            else:
                checkpoint.load_optimizer(self.policy, self._loop.optimizer)
            self._progress, self._loop.step = progress, checkpoint.step
        except OtherRunError as error:
            raise TrainingError(
                f"{self._state.parent} holds an interrupted run of {progress.seconds / 60:.1f} minutes on other "
                "data, with other settings or of another model; repeat that call to continue it, give another --out, "
                "or delete that folder to start anew."
            ) from error
        log(f"continuing the run that was interrupted after {progress.seconds / 60:.1f} minutes")

    def _save(self) -> None:
        self.policy.card["progress"] = asdict(replace(self._progress, seconds=self._elapsed()))
        self._best.save_pretrained(self._state / "best")
        save_checkpoint(self._state, self._loop.step, self._config, self.policy, self._loop.optimizer)

    def _make_plan(self) -> None:
        """Divide the time and print the plan. Raises TrainingError if the time is too short."""
        self._plan = plan = make_plan(self._reading, self._seconds, self._elapsed(), self._progress.stage)
        texts = self._job.texts
        for line in texts.lines:
            log(line)
        if "decontamination" in self.policy.card:
            log(describe_overlap(self.policy.card))
        own_text = f"{texts.own_chars:,} characters of own text and " if texts.own_chars else ""
        spec = self.policy.spec
        log(
            f"a policy for {self.policy.card['model']} ({spec.layers} layers of {spec.kv_heads} KV heads, "
            f"{dtype_name(self._model.dtype)}) from {own_text}texts that come with Python and LKV"
        )
        if texts.own_chars and not self._samples.held_out.has_own_texts:
            log("there is too little own text to hold any out: KL is measured on those that come with Python and LKV")
        if self._progress.stage < 1:
            log(f"1. statistics of {STATISTICS_TEXTS} texts: {format_duration(plan.statistics)}")
        if self._progress.stage < 2:
            read = _texts(plan.regression_texts)
            log(f"2. regression on what evicting each token of {read} changes: {format_duration(plan.regression)}")
        lengths = f"{self._lengths.least:,} to {self._lengths.most:,}"
        distillation = f"distillation on contexts of {lengths} tokens: {format_duration(plan.distillation)}"
        log(f"3. {distillation if plan.distillation else 'no distillation: there is no time for it'}")
        log(f"4. comparison on {_texts(plan.table_texts, 'held-out ')}: {format_duration(plan.table)}")

    def _read_targets(self) -> list[RegressionTargets]:
        """Return the regression targets of the planned number of texts, or as many as the time allows."""
        targets: list[RegressionTargets] = []
        latest = self._seconds - self._plan.table - self._plan.distillation / 2
        for text in self._samples.draw_training(STATISTICS_TEXTS, self._plan.regression_texts):
            targets.append(regression_targets(self._model, self._job.tokenizer, self.policy, text.context))
            if self._elapsed() > latest:
                break
        return targets

    def _finish_stage(self, stage: int, title: str) -> None:
        self._progress.stage = stage
        self._report(title)
        self._save()

    def _report(self, title: str) -> None:
        """Print the held-out KL, and store the weights if they are the best so far."""
        begin = self._elapsed()
        measured = measure_policy(self.policy, self._progress_texts, PROGRESS_RETENTIONS)
        self._report_seconds = self._elapsed() - begin
        kl = math.prod(fidelity.kl for fidelity in measured.values()) ** (1 / len(measured))
        if not math.isfinite(kl):
            raise TrainingError(f"the held-out KL is {kl}; load the model in float32 (--dtype float32).")
        self._progress.last_kl = kl
        if kl <= self._progress.best_kl:
            self._progress.best_kl = kl
            self._best.load_state_dict(self.policy.state_dict())
        point = {f"kl_{retention:g}": round(fidelity.kl, 5) for retention, fidelity in measured.items()}
        self._progress.curve.append({"seconds": round(self._elapsed(), 1), "contexts": self._contexts, **point})
        text = ", ".join(f"{format_kl(fidelity.kl)} at R {retention:g}" for retention, fidelity in measured.items())
        minutes, seconds = divmod(int(self._elapsed()), 60)
        log(f"{minutes:3}:{seconds:02} {title}: held-out KL {text}")

    def _distill(self) -> None:
        """Train until the comparison must start; the schedule follows the clock."""
        end = self._seconds - self._plan.table
        begin = self._progress.distilling_since = self._progress.distilling_since or self._elapsed()
        config = config_for_distillation(self._config, self._reading, end - begin)
        self._best.card["training"] |= {"lr": config.lr, "lr_end": config.lr_end}
        self._loop.config = config
        budget = TimeBudget(
            config.steps, self._elapsed, begin, end, max((end - begin) / 12, self._report_seconds / _REPORT_SHARE)
        )
        if self._loop.run(budget, lambda means: self._report(f"{self._contexts} contexts"), self._save):
            raise TrainingStoppedError(
                f"stopped after {self._elapsed() / 60:.1f} of {self._seconds / 60:g} minutes, which are saved in "
                f"{self._state}; run the same command to continue."
            )
        if not self._contexts:
            log("3. the distillation did not run: no time was left for it; give more --minutes")

    def _finish(self) -> Policy:
        """Compare the policy with the baselines, save it, and print the comparison."""
        if self._progress.last_kl <= _CLEARLY_WORSE * self._progress.best_kl:
            self._best.load_state_dict(self.policy.state_dict())
        policy = self._best.eval().requires_grad_(False)
        default = stored_policy(policy.spec)
        rows, lengths = self._compare(policy, default)
        better, card = better_baselines(rows), policy.card
        is_worse_than_snapkv = _DECISIVE_RETENTION in better.get("snapkv", ())
        errors = {name: math.prod(row["kl"] for row in rows if row["method"] == name) for name in ("lkv", "default")}
        card["fit"] = {
            "minutes": round(self._elapsed() / 60, 1),
            "contexts": self._contexts,
            "curve": self._progress.curve,
            "comparison": rows,
            "preferred": not is_worse_than_snapkv and (default is None or errors["lkv"] < errors["default"]),
        }
        tokens = [min(lengths), max(lengths)]
        own_rows = [row for row in rows if row["method"] == "lkv"]
        names = ("retention", "kl", "agreement", "texts")
        card["fidelity"] = [{"tokens": tokens} | {name: row[name] for name in names} for row in own_rows]
        folder = _free_folder(self._job.folder) if self._job.keeps_earlier else self._job.folder
        policy.save_pretrained(folder, half=True)
        rmtree(self._job.folder / RUN, ignore_errors=True)
        tqdm.write(format_table(rows))
        tqdm.write(f"the policy is in {folder}, after {self._elapsed() / 60:.1f} minutes")
        for line in describe_better_baselines(better):
            tqdm.write(line)
        if self._job.keeps_earlier and not card["fit"]["preferred"]:
            cause = "SnapKV" if is_worse_than_snapkv else "the policy that was this model's default"
            better_one = f"{cause} is better, so the new one is not the default"
            tqdm.write(f"{better_one}; to use it, give it as the policy: {folder}")
        return policy

    def _compare(self, policy: Policy, default: Policy | None) -> tuple[list[dict[str, Any]], list[int]]:
        """Return the rows of `compare`, and the lengths of the texts, shortened if memory runs out."""
        del self._progress_texts  # whose k and v are held
        longest = self._config.max_tokens
        while True:
            samples = self._samples.draw_held_out(FIRST_CONTEXT, self._plan.table_texts, longest)
            try:
                rows = compare(self._model, self._job.tokenizer, samples, policy, default)
                return rows, [len(sample.context) for sample in samples]
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error):
                    raise
                longest //= 2
                if longest < _SHORTEST_COMPARED:
                    raise TrainingError(
                        f"there is not enough memory to compare the policy with the baselines; it is in "
                        f"{self._state / 'best'}."
                    ) from error
                log(f"out of memory in the comparison: going on with texts of at most {longest:,} tokens")
            release(input_device(self._model))


def _free_folder(folder: Path) -> Path:
    """Return `folder`, or if it holds a policy the first of FOLDER-2, FOLDER-3, ... that does not exist."""
    numbered = (folder.with_name(f"{folder.name}-{number}") for number in itertools.count(2))
    return next(path for path in numbered if not path.exists()) if is_policy(folder) else folder


def _texts(count: int, kind: str = "") -> str:
    return f"{count} {kind}text{'s' * (count != 1)}"


def log(line: str) -> None:
    """Print a progress line to stderr, above the bar if there is one."""
    tqdm.write(line, file=sys.stderr)
