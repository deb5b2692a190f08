"""The paper's training, whole and scaled down: its curve, and its policy beside the shipped ones on held-out rows.

python -m experiments.paper_training --data TRAIN_FOLDER --built FOLDER --runs FOLDER ...

FOLDER of --built is what `python -m experiments.data build --recipe loom` wrote, those of --runs what `lkv train
--preset paper` did, each named by its folder. Rows are those that no training reads: of the built data, and of the
mixture that the shipped policies learned from.
"""

import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from experiments.bootstrap import bootstrap, named_interval
from experiments.common import parse_options
from experiments.result_file import write_results
from lkv.hf.loading import load_default
from lkv.policy.lookup import default_policy
from lkv.policy.policy import Policy
from lkv.training.checkpoint import read_curve
from lkv.training.config import PRESETS
from lkv.training.data.mixture import Mixture
from lkv.training.data.samples import TokenizedSample, tokenize_sample
from lkv.training.datasets import BuiltDataset
from lkv.training.distillation import SampleDistillation, hard_mask

_RETENTIONS = (0.15, 0.05)
_SPREAD = 0.1  # of the mixture's lengths around the one that is asked for
_CONTINUATIONS, _LONGEST = 2, 120


def main() -> None:
    options = parse_options(
        __doc__, "paper_training", "of training files", built=..., runs=[""], tokens=[500, 1000, 2000], contexts=16
    )  # fmt: skip
    model, tokenizer = load_default(torch.bfloat16)
    policies = {"shipped": default_policy(model), "shipped, the paper's scorer": default_policy(model, paper=True)}
    runs = {Path(run).name: Path(run) for run in options.runs}
    policies |= {name: Policy.from_pretrained(run / "policy") for name, run in runs.items()}
    rows = [
        {"what": "curve", "run": name, **{key: value for key, value in row.items() if value is not None}}
        for name, run in runs.items()
        for row in read_curve(run)
    ]
    built = BuiltDataset(options.built).held_out()
    texts = {("loom", 0): list(_loom(built, tokenizer, options.contexts))}
    texts |= {("mixture", n): list(_mixture(options.data, tokenizer, n, options.contexts)) for n in options.tokens}
    for (kind, tokens), samples in texts.items():
        rows += list(_compare(model, policies, kind, tokens, samples))
    details = {name: _about(policy) for name, policy in policies.items() if name in runs}
    write_results(options.out, "paper_training", rows, 0, _command(options, details, built), {"runs": details})


def _loom(built: BuiltDataset, tokenizer: Any, count: int) -> Iterator[TokenizedSample]:
    for number in range(min(count, len(built))):
        yield tokenize_sample(built.sample(number, 1), tokenizer, built.max_tokens, built.max_tokens)


def _mixture(folder: Path, tokenizer: Any, tokens: int, count: int) -> Iterator[TokenizedSample]:
    mixture = Mixture(folder, (int(tokens * (1 - _SPREAD)), int(tokens * (1 + _SPREAD)))).held_out(7)
    for number in range(count):
        sample = tokenize_sample(mixture.sample(number, _CONTINUATIONS), tokenizer, tokens, _LONGEST)
        if sample.continuations and len(sample.context) > 0.7 * tokens:
            yield sample


@torch.no_grad()
def _compare(
    model: Any, policies: dict[str, Policy], kind: str, tokens: int, samples: list[TokenizedSample]
) -> Iterator[dict[str, Any]]:
    """A row a policy and retention: KL and agreement over the samples, those of a text drawn together."""
    found: dict[tuple[str, float], list[tuple[float, float]]] = {}
    for sample in tqdm(samples, desc=f"{kind} {tokens or ''}"):
        run = SampleDistillation(model, sample)
        teacher, rows = run.run(None)._replace(hidden=()), len(sample.continuations)
        for name, policy in policies.items():
            scores = run.scores(policy)
            for retention in _RETENTIONS:
                student = run.run(hard_mask(policy, scores, retention, rows))
                pair = float(run.kl(teacher, student)), run.agreement(teacher, student)
                found.setdefault((name, retention), []).append(pair)
    lengths = sorted(len(sample.context) for sample in samples)
    for (name, retention), pairs in found.items():
        kl, agreement = (bootstrap([[value] for value in column]) for column in zip(*pairs, strict=True))
        row = {"what": "held out", "texts": kind, "tokens": tokens or lengths[len(lengths) // 2], "method": name}
        row |= {"retention": retention, **kl._asdict(), "unit": "nats a token, KL(full || compressed)"}
        print(
            f"{kind} {row['tokens']} R {retention:g} {name}: {kl.value:.4f} [{kl.low:.4f}, {kl.high:.4f}]", flush=True
        )
        yield row | named_interval("agreement", agreement)


def _about(policy: Policy) -> dict[str, Any]:
    """What the page says of a run: its settings, digest, and what was removed from its data."""
    overlap = policy.card.get("decontamination")
    dropped = {name: own["overlapping"] for name, own in overlap["sets"].items()} if overlap else None
    return {"policy": policy.digest(), "training": policy.card["training"], "dropped": dropped}


def _command(options: Any, details: dict[str, Any], built: BuiltDataset) -> str:
    """The commands that make it again: the data, each training, the comparison."""
    requested, (least, most) = built.manifest["asked"], built.manifest["bounds"]
    words = (
        f"python -m experiments.data build --recipe loom --data TRAIN_FOLDER --samples {requested['train']} --held-out "
    )
    commands = [
        f"{words}{requested['heldout']} --min-tokens {least} --max-tokens {most} --against EVAL_FILES --out BUILT"
    ]
    base = vars(PRESETS["paper"])
    for name, about in details.items():
        changed = {key: value for key, value in about["training"].items() if base.get(key) != value}
        arguments = " ".join(f"--{key.replace('_', '-')} {value}" for key, value in changed.items())
        commands.append(f"lkv train --preset paper --data BUILT --out {name} {arguments}")
    runs = shlex.join(["--runs", *details, "--tokens", *map(str, options.tokens), "--contexts", str(options.contexts)])
    commands.append(f"python -m experiments.paper_training --data TRAIN_FOLDER --built BUILT {runs}")
    return "; ".join(commands)


if __name__ == "__main__":
    main()
