"""What streaming and quantised storage cost: KL from the full cache on the held-out continuations, against exact LKV.

python -m experiments.variants --data FOLDER --tokens 2000 7800 --contexts 4 1    (writes variants.json)

--contexts are those of a task, one number for each length or one for all.
"""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from experiments.bootstrap import bootstrap
from experiments.common import parse_options, per_length, run_cases
from experiments.fidelity import fidelity_row
from experiments.heldout import HeldOut
from experiments.length import TASKS
from lkv.cache.ragged_cache import RaggedCache
from lkv.hf.loading import load_default
from lkv.policy.lookup import default_policy
from lkv.policy.policy import Policy
from lkv.utils.fidelity import is_top1_equal, kl_divergence

VARIANTS: dict[str, dict[str, Any]] = {
    "exact": {},
    "streaming, chunks of 256": {"streaming": True, "chunk": 256},
    "streaming, chunks of 1024": {"streaming": True, "chunk": 1024},
    "8 bits": {"bits": 8},
    "4 bits": {"bits": 4},
}


def read(
    model: Any, policy: Policy, retention: float, ids: Tensor, chunk: int | None = None, **how: Any
) -> RaggedCache:
    """The prompt [1, T] in a cache of this kind."""
    if chunk:
        how["prompt_tokens"] = ids.shape[1]
    cache = RaggedCache(model, policy=policy, retention=retention, **how)
    for part in ids.split(chunk or ids.shape[1], 1):
        model.base_model(input_ids=part, past_key_values=cache, use_cache=True)
    return cache


def log_probs(model: Any, cache: RaggedCache, ids: list[int], skip: int) -> Tensor:
    """Log-probabilities of the tokens from `skip` on, after which the cache is as it was."""
    logits = model(input_ids=torch.tensor([ids]), past_key_values=cache, use_cache=True).logits
    cache.rewind()
    return torch.log_softmax(logits[0, max(0, skip - 1) : -1].float(), -1)


def main() -> None:
    options = parse_options(
        __doc__, "variants", "of evaluation files", tokens=[2000, 7800], contexts=[4, 2], retention=0.15,
        dtype="bfloat16", policy=Path, seed=0,
    )  # fmt: skip
    contexts = per_length(options.tokens, options.contexts)
    model, tokenizer = load_default(getattr(torch, options.dtype))
    policy = Policy.from_pretrained(options.policy) if options.policy else default_policy()
    heldout = HeldOut(options.data, tokenizer, options.seed)
    cases = {f"{task}-{t}-{n}": (task, n, t) for t in contexts for n in range(contexts[t]) for task in TASKS}

    @torch.no_grad()
    def measure(task: str, number: int, tokens: int) -> dict:
        ids, continuations = heldout.case(task, number, tokens)
        context = torch.tensor([ids])
        caches = [read(model, policy, options.retention, context, **variant) for variant in VARIANTS.values()]
        full = read(model, policy, 1.0, context)
        measured = []
        for continuation, skip in continuations:
            target, row = log_probs(model, full, continuation, skip), []
            for cache in caches:
                compressed = log_probs(model, cache, continuation, skip)
                agreement = is_top1_equal(target, compressed).float().mean()
                row.append([float(kl_divergence(target, compressed).mean()), float(agreement)])
            measured.append(row)
        shares = [cache.nbytes() / full.full_nbytes() for cache in caches]
        return {"tokens": len(ids), "measured": measured, "bytes": shares}

    def summarise(samples: dict[str, dict]) -> list[dict]:
        rows = []
        for tokens in contexts:
            members = [sample for key, sample in samples.items() if cases[key][2] == tokens]
            for i, variant in enumerate(VARIANTS):
                row = {"method": "lkv", "variant": variant, "tokens": tokens}
                row |= {"retention": options.retention, "dtype": options.dtype}
                row |= fidelity_row([(sample, i) for sample in members])
                rows.append(row | {"bytes": bootstrap([[sample["bytes"][i]] for sample in members]).value})
                print({name: rows[-1][name] for name in ("tokens", "variant", "kl", "agreement", "bytes")})
        return rows

    run_cases(
        "experiments.variants", options, "variants", cases, measure, summarise, policy, growing=("contexts", "tokens")
    )


if __name__ == "__main__":
    main()
