"""`lkv fit`: held-out KL over its minutes, and the policies it makes against KVzip and the shipped policy.

python -m experiments.fit --data EVAL_FOLDER --train TRAIN_FOLDER    (writes fit.json; fit-NAME.json with --model NAME)

fit_ten_minutes.json and fit_domains.json are of this command with other --fits and --out.

--fits names policies as KIND:MINUTES: from no data ("none"), from texts of one kind ("meetings", "code": what such
a user would have) and from all of TRAIN_FOLDER ("mixture"; "clean": without what overlaps with the evaluation
files, as for texts of one kind). They are measured on the evaluation files, which no stage reads. Minutes of one
thread are of processor time, so that other work on the machine does not count; those of more --threads are of the
clock, on a machine that does nothing else. The command resumes: each fit from its last saved state, finished policies
from --work, where each combination of settings and texts has a folder.
"""

import hashlib
import itertools
import json
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from experiments.bootstrap import bootstrap_ratio
from experiments.common import SUBJECT, digest_of_names, parse_options, subject_of
from experiments.fidelity import Sample, Samples, measure, run_by_length, summarise
from experiments.heldout import cut_targets
from experiments.length import TASKS as LENGTH_TASKS
from experiments.paired import paired_kls
from lkv.errors import DataError
from lkv.evaluation.comparison import MethodGrid
from lkv.policy.policy import Policy, is_policy
from lkv.training import fitting
from lkv.training.config import RECIPE
from lkv.training.data.documents import item_texts, read_dataset
from lkv.training.data.public_datasets import index_folder
from lkv.training.fit_plan import PROGRESS_TEXTS
from lkv.utils.provenance import describe_machine

TASKS = (*LENGTH_TASKS, "needles")
SETS = {"meetings": "qmsum", "code": "the_stack"}  # of TRAIN_FOLDER, for policies of one kind of text
SHIPPED = "shipped"
# The tasks of rows that compare two methods on the same samples, and of those of the held-out KL by minutes.
RATIO, CURVE = "ratio", "held-out texts of the fit"


def main() -> None:
    options = parse_options(
        __doc__, "fit", "of evaluation files", **(SUBJECT | {"dtype": "bfloat16"}), train=Path,
        fits=["none:10", "clean:10"], tokens=[1000, 2000, 4000], retention=[0.15, 0.05], contexts=[2], tasks=TASKS,
        work=Path("runs-local/fit"), threads=1, seed=0, out=Path,
    )  # fmt: skip
    torch.set_num_threads(options.threads)
    if options.threads == 1:
        fitting.clock = time.process_time
    subject = subject_of(options, "fit")
    policies = {fit: fitted(subject, fit, options) for fit in options.fits}
    names = [f"lkv@{name}" for name in (*policies, SHIPPED)] + ["kvzip"]
    grid = MethodGrid(
        subject.model, subject.tokenizer, names, options.retention, subject.policy,
        policies={**policies, SHIPPED: subject.policy},
    )  # fmt: skip

    def rows_of_samples(samples: Samples) -> list[dict]:
        samples = list(samples)
        rows = summarise(samples)
        rows += ratios(((tokens, sample) for _, tokens, sample in samples), names[:-2], names[-2:])
        rows += [row for fit, policy in policies.items() for row in curve(fit, policy)]
        return [row | about(policies, row["method"]) for row in rows]

    run_by_length(
        "experiments.fit", options, options.out.stem, subject,
        lambda ids, continuations: measure(subject.model, {"": grid}, ids, cut_targets(continuations)),
        rows_of_samples, {"fits": {fit: policy.digest() for fit, policy in policies.items()}},
    )  # fmt: skip


def about(policies: dict[str, Policy], method: str) -> dict[str, Any]:
    """The kind of data as the method's name, and for a policy made here its minutes, contexts, lengths and rate."""
    _, _, fit = method.partition("@")
    if fit not in policies:
        return {}
    training, (kind, minutes) = policies[fit].card["training"], fit.split(":")
    described = {"method": f"lkv@{kind}", "minutes": float(minutes)}
    described |= {"fitted_contexts": policies[fit].card["fit"]["contexts"]}
    return described | {key: training[key] for key in ("lr", "min_tokens", "max_tokens")}


def fitted(subject: Any, fit: str, options: Any) -> Policy:
    """The policy of one kind of data and time, made now unless an earlier call has made it with the same settings."""
    kind, minutes = fit.split(":")
    if kind != "none" and options.train is None:
        raise DataError(f"{fit} reads a folder of training texts; name it with --train.")
    digest = hashlib.sha256(json.dumps(fit_settings(kind, options)).encode()).hexdigest()[:8]
    folder = options.work / f"{Path(subject.name).name.lower()}-{kind}-{minutes}-{digest}"
    if is_policy(folder):
        return Policy.from_pretrained(folder)
    print(f"fitting {subject.name} for {minutes} minutes, data: {kind}")
    against = () if kind == "mixture" else [path for path in sorted(options.data.rglob("*")) if path.is_file()]
    data: dict[str, Any] = {"against": against}
    if kind in SETS:
        items = read_dataset(SETS[kind], index_folder(options.train).used[SETS[kind]], options.train)
        data |= {"texts": [item_texts(item)[0] for item in items]}
    elif kind != "none":
        data |= {"data": options.train}
    return fitting.fit(subject.model, subject.tokenizer, minutes=float(minutes), out=folder, name=subject.name, **data)


def fit_settings(kind: str, options: Any) -> dict[str, Any]:
    """What a fit of one kind of data depends on, apart from its model and minutes."""
    settings: dict[str, Any] = {"threads": options.threads, "dtype": options.dtype, "machine": describe_machine()}
    if kind != "none":
        settings["texts"] = digest_of_names(options.train)
    if kind != "mixture":
        settings["evaluated texts"] = digest_of_names(options.data)
    return settings | {"recipe": asdict(RECIPE)}


def ratios(
    samples: Iterable[tuple[int | None, Sample]], methods: Sequence[str], baselines: Sequence[str]
) -> list[dict[str, Any]]:
    """Rows by length: the mean KL of each method by that of each baseline on the samples that have both."""
    by_length: dict[int | None, list[Sample]] = {}
    for tokens, sample in samples:
        by_length.setdefault(tokens, []).append(sample)
    rows = []
    for (tokens, members), method, baseline in itertools.product(by_length.items(), methods, baselines):
        for retention, kls in paired_kls(members, method, baseline).items():
            row = {"method": method, "against": baseline, "task": RATIO, "tokens": tokens, "retention": retention}
            rows.append(row | bootstrap_ratio(*kls)._asdict() | {"unit": "KL by that of `against`"})
    return rows


def curve(fit: str, policy: Policy) -> list[dict[str, Any]]:
    """Rows of the held-out KL as it fell, on texts of the policy's own data."""
    texts = {"task": CURVE, "method": f"lkv@{fit}", "unit": "nats a token, KL(full || compressed)"}
    return [
        {**texts, "seconds": point["seconds"], "trained_contexts": point["contexts"], "retention": float(name[3:]),
         "n": PROGRESS_TEXTS, "value": value, "low": None, "high": None}
        for point in policy.card["fit"]["curve"] for name, value in point.items() if name.startswith("kl_")
    ]  # fmt: skip


if __name__ == "__main__":
    main()
