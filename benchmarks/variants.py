"""What streaming and quantised storage cost: KL from the full cache on the held-out continuations, against exact LKV.

python -m benchmarks.variants --data FOLDER --tokens 2000 7800 --contexts 4 1    (writes variants.json)
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from benchmarks.common import RESULTS, command_of, per_length, settings_of
from benchmarks.heldout import HeldOut
from benchmarks.length import TASKS
from lkv.cache.ragged_cache import RaggedCache
from lkv.models.loading import load_default
from lkv.policy.lookup import default_policy
from lkv.policy.policy import Policy
from lkv.utils.fidelity import is_top1_equal, kl_divergence
from lkv.utils.journal import open_journal
from lkv.utils.results import write_results
from lkv.utils.statistics import bootstrap

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
    cache = RaggedCache(model, policy, retention, **how)
    for part in ids.split(chunk or ids.shape[1], 1):
        model.base_model(input_ids=part, past_key_values=cache, use_cache=True)
    return cache


def log_probs(model: Any, cache: RaggedCache, ids: list[int], skip: int) -> Tensor:
    """Log-probabilities of the tokens from `skip` on, after which the cache is as it was."""
    logits = model(input_ids=torch.tensor([ids]), past_key_values=cache, use_cache=True).logits
    cache.rewind()
    return torch.log_softmax(logits[0, max(0, skip - 1) : -1].float(), -1)


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--tokens", type=int, nargs="+", default=[2000, 7800])
    parser.add_argument("--contexts", type=int, nargs="+", default=[4, 2], help="a task, for each length or all")
    parser.add_argument("--retention", type=float, default=0.15)
    parser.add_argument("--dtype", default="bfloat16", choices=["float32", "bfloat16"])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=RESULTS / "variants.json")
    options = parser.parse_args()
    contexts = per_length(options.tokens, options.contexts)
    model, tokenizer = load_default(getattr(torch, options.dtype))
    policy = default_policy()
    of = {"policy": policy.digest()}
    heldout = HeldOut(options.data, tokenizer, options.seed)
    settings = settings_of(options, growing=("contexts", "tokens")) | of
    with open_journal(options.out.with_suffix(".jsonl"), settings) as done:
        cases = [(n, t, task) for t in contexts for n in range(contexts[t]) for task in TASKS]
        for number, tokens, task in tqdm(cases, desc="variants"):
            key = f"{task}-{tokens}-{number}"
            if key in done:
                continue
            ids, asked = heldout.case(task, number, tokens)
            context = torch.tensor([ids])
            caches = [read(model, policy, options.retention, context, **how) for how in VARIANTS.values()]
            full = read(model, policy, 1.0, context)
            measured = []
            for continuation, skip in asked:
                target = log_probs(model, full, continuation, skip)
                row = []
                for cache in caches:
                    compressed = log_probs(model, cache, continuation, skip)
                    agreed = is_top1_equal(target, compressed)
                    row.append([float(kl_divergence(target, compressed).mean()), float(agreed.float().mean())])
                measured.append(row)
            shares = [cache.nbytes() / full.full_nbytes() for cache in caches]
            done.add(key, {"tokens": len(ids), "measured": measured, "bytes": shares})
        rows = []
        for tokens in contexts:
            samples = [done[f"{task}-{t}-{number}"] for number, t, task in cases if t == tokens]
            rows += summarise(samples, {"tokens": tokens, "retention": options.retention, "dtype": options.dtype})
        write_results(options.out, "variants", rows, options.seed, command_of("benchmarks.variants", options), of)


def summarise(samples: Sequence[dict], setting: dict[str, Any]) -> list[dict]:
    """A row for each variant, over the contexts of one length."""
    rows = []
    for i, name in enumerate(VARIANTS):
        mean, agreement = (bootstrap([[c[i][k] for c in sample["measured"]] for sample in samples]) for k in (0, 1))
        size = bootstrap([[sample["bytes"][i]] for sample in samples])
        rows.append(
            {"method": "lkv", "variant": name, **setting, "contexts": len(samples)}
            | mean._asdict()
            | {"unit": "nats a token, KL(full || compressed)", "kl": mean.value, "agreement": agreement.value}
            | {"agreement_low": agreement.low, "agreement_high": agreement.high, "bytes": size.value}
        )
        measured = f"kl {mean.value:.3f} agreement {agreement.value:.3f} bytes {size.value:.3f} of full"
        print(f"{setting['tokens']} {name:26} {measured}")
    return rows


if __name__ == "__main__":
    main()
