"""The student over the continuation alone against the literal one over the whole sequence (Sec. 3.5).

python -m experiments.student --data TRAIN_FOLDER    (writes student.json)

Contexts a second: one training step's work on one context, prompt, teacher, student and the way back, with the demo
model. Fidelity for equal samples: policies trained from the same start on the same contexts with the same noise by
either student, and their KL to the full cache on contexts that neither saw.
"""

import argparse
import tempfile
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch

from experiments.bootstrap import bootstrap
from experiments.common import interleaved, paired_ratio, parse_options, save_rows
from lkv.hf.attention import patch_attention
from lkv.hf.loading import load_default
from lkv.policy.lookup import default_policy
from lkv.policy.policy import Policy
from lkv.training.config import TrainingConfig
from lkv.training.data.mixture import Mixture
from lkv.training.data.samples import TokenizedSample, tokenize_sample
from lkv.training.distillation import SampleDistillation, gumbel, hard_mask, soft_mask
from lkv.training.train_policy import Trainer

_TARGET = 120  # tokens of a continuation
_RETENTION = 0.15
STUDENTS: tuple[Literal["continuation", "full"], ...] = ("continuation", "full")


def step(model: Any, policy: Policy, sample: TokenizedSample, whole: bool) -> None:
    """Compute the gradient of one context."""
    run = SampleDistillation(model, sample, whole=whole)
    with torch.no_grad():
        teacher = run.run(None)
    scores = run.scores(policy)
    noise = gumbel((1, *scores.shape), torch.Generator(scores.device).manual_seed(0))
    student = run.run(soft_mask(policy, scores, _RETENTION, 0.1, noise))
    (run.kl(teacher, student) + 0.5 * run.hidden_distance(teacher, student, "relative")).backward()


def speed(model: Any, tokens: int, repeats: int) -> dict[str, Any]:
    """The row of one length."""
    policy = default_policy(paper=True).requires_grad_(True)
    ids = torch.randint(100, 40_000, (tokens + _TARGET,), generator=torch.Generator().manual_seed(0)).tolist()
    sample = TokenizedSample("random", ids[:tokens], [(ids[tokens:], 20)])
    runs: dict[str, Any] = {student: partial(step, model, policy, sample, student == "full") for student in STUDENTS}
    seconds = interleaved(runs, repeats, warmups=1)
    row = {"method": "continuation", "baseline": "full", "tokens": tokens, "unit": "contexts a second, ratio"}
    fastest = {"seconds": min(seconds["continuation"]), "seconds_full": min(seconds["full"])}
    return row | paired_ratio(seconds["full"], seconds["continuation"]) | fastest


def trained(model: Any, samples: Any, config: TrainingConfig) -> Policy:
    """A policy trained from the same start whatever the student."""
    torch.manual_seed(0)
    policy = Policy(patch_attention(model).spec)
    with tempfile.TemporaryDirectory() as folder:
        return Trainer(model, policy, config, samples, [], Path(folder)).run()


@torch.no_grad()
def divergences(model: Any, policy: Policy, held_out: list[TokenizedSample]) -> list[float]:
    """KL to the full cache of each sample, nats a token."""
    found = []
    for sample in held_out:
        run = SampleDistillation(model, sample)
        mask = hard_mask(policy, run.scores(policy), _RETENTION, len(sample.continuations))
        found.append(float(run.kl(run.run(None), run.run(mask))))
    return found


def fidelity(model: Any, tokenizer: Any, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Rows of both students, and of their difference over the same samples."""
    bounds = (options.context_tokens // 2, options.context_tokens)
    mixture = Mixture(options.data, bounds)
    sides = [mixture, mixture.held_out()]

    def read(side: int, number: int) -> TokenizedSample:
        return tokenize_sample(sides[side].sample(number, 1), tokenizer, options.context_tokens, _TARGET)

    held_out = [own for own in (read(1, number) for number in range(options.held_out)) if own.continuations]
    found = {}
    for student in STUDENTS:
        config = TrainingConfig(
            steps=options.steps, batch=2, lr=5e-3, lr_end=1e-3, warmup=2, tau_start=0.5, tau_end=0.1,
            retention_start=0.3, retention_end=_RETENTION, min_tokens=bounds[0], max_tokens=bounds[1],
            max_continuation=_TARGET, checkpoint_every=options.steps, dtype="float32", student=student,
        )  # fmt: skip
        found[student] = divergences(model, trained(model, lambda number: read(0, number), config), held_out)
    about = {"contexts": 2 * options.steps, "retention": _RETENTION, "unit": "KL(full || compressed), nats a token"}
    rows = [{"method": name} | about | bootstrap([[value] for value in own])._asdict() for name, own in found.items()]
    apart = [[a - b] for a, b in zip(found["continuation"], found["full"], strict=True)]
    return [*rows, {"method": "continuation", "baseline": "full"} | about | bootstrap(apart)._asdict()]


def main() -> None:
    options = parse_options(
        __doc__, "student", "of training data", tokens=[1024, 2048, 4096], repeats=3, steps=16,
        context_tokens=800, held_out=16,
    )  # fmt: skip
    model, tokenizer = load_default(torch.float32)
    patch_attention(model.requires_grad_(False))
    rows = []
    for tokens in options.tokens:
        rows.append(speed(model, tokens, options.repeats))
        print("{tokens:6} {value:.2f} times as many contexts a second [{low:.2f}, {high:.2f}]".format(**rows[-1]))
    for row in fidelity(model, tokenizer, options):
        rows.append(row)
        against = f" minus {row['baseline']}" if "baseline" in row else ""
        print(f"{row['method']}{against}: KL {row['value']:.3f} [{row['low']:.3f}, {row['high']:.3f}]", flush=True)
    save_rows(options, "student", rows, data="TRAIN_FOLDER")


if __name__ == "__main__":
    main()
