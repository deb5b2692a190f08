"""The student over the continuation alone against the literal one over the whole sequence: contexts a second.

python -m benchmarks.student    (writes student.json)

One training step's work on one context: prompt, teacher, student and the way back, with the embedded model.
"""

import argparse
import time
from pathlib import Path

import torch

from benchmarks.common import RESULTS, command_of
from lkv.host.attention import attach
from lkv.models import default_policy, load_default
from lkv.results import write_results
from lkv.statistics import bootstrap
from lkv.training.data.sample import TokenizedSample
from lkv.training.distillation import SampleDistillation, gumbel, soft_mask

_TARGET = 120  # tokens of a continuation


def step(model, policy, sample: TokenizedSample, whole: bool) -> float:
    """Seconds of one context."""
    started = time.perf_counter()
    run = SampleDistillation(model, sample, whole)
    with torch.no_grad():
        teacher = run.run(None)
    scores = run.scores(policy)
    noise = gumbel((1, *scores.shape), torch.Generator().manual_seed(0), scores.device)
    student = run.run(soft_mask(policy, scores, 0.15, 0.1, noise))
    (run.kl(teacher, student) + 0.5 * run.hidden_distance(teacher, student, "relative")).backward()
    return time.perf_counter() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, nargs="+", default=[1024, 2048, 4096])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path, default=RESULTS / "student.json")
    options = parser.parse_args()
    model, policy = load_default(torch.float32)[0].requires_grad_(False), default_policy(paper=True)
    attach(model)
    rows = []
    for tokens in options.tokens:
        ids = torch.randint(100, 40_000, (tokens + _TARGET,), generator=torch.Generator().manual_seed(0)).tolist()
        sample = TokenizedSample("random", ids[:tokens], [(ids[tokens:], 20)])
        seconds = [[step(model, policy, sample, whole) for whole in (True, False)] for _ in range(options.repeats)]
        ratio = bootstrap([[full / short] for full, short in seconds])
        row = {"method": "continuation", "baseline": "full", "tokens": tokens, "unit": "contexts a second, ratio"}
        rows.append(row | ratio._asdict() | {"seconds": min(short for _, short in seconds)})
        print(
            f"{tokens:6} {ratio.value:.2f} times as many contexts a second [{ratio.low:.2f}, {ratio.high:.2f}]",
            flush=True,
        )
    write_results(options.out, "student", rows, 0, command_of("benchmarks.student", options))


if __name__ == "__main__":
    main()
