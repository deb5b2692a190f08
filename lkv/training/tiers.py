"""Measure how a memory budget is best spent on precisions: a table for a policy's card."""

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import log_softmax

from lkv.cache.ragged_cache import RaggedCache
from lkv.integrations.transformers.cache_argument import cache_argument
from lkv.integrations.transformers.prefill import read_prompt
from lkv.methods.memory import Precision, TierTable
from lkv.methods.method import resolve_method
from lkv.policy.policy import Policy
from lkv.training.data.samples import TokenizedSample
from lkv.utils.fidelity import kl_divergence

# Bits a value at which ways to spend them are compared: 3%, 5%, 10%, 15%, 20% and 30% of a 16-bit cache.
BITS = (0.48, 0.8, 1.6, 2.4, 3.2, 4.8)
_HIGH, _MIXED, _MIDDLE, _LOW = Precision(8, 8), Precision(8, 4), Precision(4, 4), Precision(4, 3)
CANDIDATES = (
    TierTable.single(_HIGH),
    TierTable(((0.0, ((_HIGH, 0.3), (_MIDDLE, 0.7))),)),
    TierTable(((0.0, ((_HIGH, 0.3), (_LOW, 0.7))),)),
    TierTable(((0.0, ((_MIXED, 0.3), (_LOW, 0.7))),)),
    TierTable.single(_MIXED),
    TierTable.single(_MIDDLE),
    TierTable.single(_LOW),
)


@torch.no_grad()
def measure_tiers(
    model: Any, policy: Policy, samples: Iterable[TokenizedSample], bits: Sequence[float] = BITS
) -> Iterator[dict[tuple[float, TierTable], float]]:
    """Compare the ways to spend a memory budget on texts that no result is reported on.

    Args:
        model: The model of `policy`.
        policy: What ranks the entries.
        samples: Texts with continuations.
        bits: Budgets, in bits a value of all k and v of a text.

    Yields:
        For each sample KL(full || compressed), in nats a token, of each budget and candidate.
    """
    for sample in samples:
        prompt = read_prompt(model, torch.tensor([sample.context], device=model.device))
        full = RaggedCache(model, method="lkv", policy=policy, retention=1.0)
        full.fill(prompt)
        expected = list(_predictions(model, full, sample))
        divergences = {}
        for budget in bits:
            for table in CANDIDATES:
                share = min(1.0, budget / (8 * model.dtype.itemsize))
                method = resolve_method("lkv", model, memory=share, policy=policy, tier_table=table)
                cache = RaggedCache(model, method=method)
                cache.fill(prompt)
                pairs = zip(expected, _predictions(model, cache, sample), strict=True)
                kl = [float(kl_divergence(first, second).mean()) for first, second in pairs]
                divergences[budget, table] = sum(kl) / len(kl)
        yield divergences


def best_table(measured: Sequence[dict[tuple[float, TierTable], float]]) -> TierTable:
    """The table with the way of the least KL (its mean logarithm over samples) at each budget."""
    rows: list[Any] = []
    budgets = sorted({budget for budget, _ in measured[0]})
    for budget in budgets:
        scores = {table: sum(math.log(max(1e-6, sample[budget, table])) for sample in measured) for table in CANDIDATES}
        ((_, row),) = min(scores, key=lambda table: scores[table]).rows
        if not rows or rows[-1][1] != row:
            rows.append((0.0 if not rows else budget, row))
    return TierTable(tuple(rows))


def _predictions(model: Any, cache: RaggedCache, sample: TokenizedSample) -> Iterator[Tensor]:
    """Log-probabilities [n, V] of the targets of each continuation."""
    for ids, skip in sample.continuations:
        tokens = torch.tensor([ids[:-1]], device=model.device)
        logits = model(input_ids=tokens, **cache_argument(cache.fork()), use_cache=True).logits[0]
        yield log_softmax(logits[max(0, skip - 1) :].float(), -1)
