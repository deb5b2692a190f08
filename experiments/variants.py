"""What streaming and quantised storage cost: KL from the full cache on the held-out continuations, against exact LKV.

python -m experiments.variants --data FOLDER --tokens 2000 7800 --contexts 4 1    (writes variants.json)

--contexts are those of a task, one number for each length or one for all.
"""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from experiments.bootstrap import bootstrap
from experiments.common import SUBJECT, Subject, parse_options, subject_of
from experiments.fidelity import Sample, Samples, fidelity_row, kl_and_agreement, run_by_length
from experiments.heldout import Continuations
from experiments.length import TASKS
from lkv.cache.ragged_cache import RaggedCache

VARIANTS: dict[str, dict[str, Any]] = {
    "exact": {},
    "streaming, chunks of 256": {"streaming": True, "chunk": 256},
    "streaming, chunks of 1024": {"streaming": True, "chunk": 1024},
    "8 bits": {"bits": 8},
    "4 bits": {"bits": 4},
}


def read(subject: Subject, retention: float, ids: Tensor, chunk: int | None = None, **how: Any) -> RaggedCache:
    """The prompt [1, T] in a cache of this kind."""
    if chunk:
        how["prompt_tokens"] = ids.shape[1]
    cache = RaggedCache(subject.model, policy=subject.policy, retention=retention, **how)
    for part in ids.split(chunk or ids.shape[1], 1):
        subject.model.base_model(input_ids=part, past_key_values=cache, use_cache=True)
    return cache


def log_probs(model: Any, cache: RaggedCache, ids: list[int], skip: int) -> Tensor:
    """Log-probabilities of the tokens from `skip` on, after which the cache is as it was."""
    logits = model(input_ids=torch.tensor([ids]), past_key_values=cache, use_cache=True).logits
    cache.rewind()
    return torch.log_softmax(logits[0, max(0, skip - 1) : -1].float(), -1)


def main() -> None:
    options = parse_options(
        __doc__, "variants", "of evaluation files", **(SUBJECT | {"dtype": "bfloat16"}), tokens=[2000, 7800],
        contexts=[4, 2], tasks=TASKS, retention=0.15, seed=0, out=Path,
    )  # fmt: skip
    subject = subject_of(options, "variants")

    @torch.no_grad()
    def measure(ids: list[int], continuations: Continuations) -> Sample:
        context = torch.tensor([ids])
        caches = [read(subject, options.retention, context, **variant) for variant in VARIANTS.values()]
        full = read(subject, 1.0, context)
        measured = []
        for continuation in continuations:
            target = log_probs(subject.model, full, *continuation)
            measured.append([kl_and_agreement(target, log_probs(subject.model, own, *continuation)) for own in caches])
        return {
            "tokens": len(ids),
            "measured": measured,
            "bytes": [cache.nbytes() / full.full_nbytes() for cache in caches],
        }

    def summarise(samples: Samples) -> list[dict]:
        rows, samples = [], list(samples)
        for tokens in options.tokens:
            members = [sample for _, length, sample in samples if length == tokens]
            for i, variant in enumerate(VARIANTS):
                row = {"method": "lkv", "variant": variant, "tokens": tokens}
                row |= {"retention": options.retention, "dtype": options.dtype}
                row |= fidelity_row([(sample, i) for sample in members])
                rows.append(row | {"bytes": bootstrap([[sample["bytes"][i]] for sample in members]).value})
                print({name: rows[-1][name] for name in ("tokens", "variant", "kl", "agreement", "bytes")})
        return rows

    run_by_length("experiments.variants", options, "variants", subject, measure, summarise)


if __name__ == "__main__":
    main()
