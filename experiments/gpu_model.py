"""Estimate a decode step and eviction of Llama-3.1-8B's shape on an H200 from instructions, bytes and launches.

python -m experiments.gpu_model    (prints the tables of docs/gpu.md, and how far the model is off what was measured)

Attention of a layer takes the time of its launches, and then the longer of two: of its entries' bytes, and of their
warp instructions. The rest of a step (weights, other kernels) is a constant and a part for each row.

Eviction from a prompt takes its kernels' time in each layer. The host hides behind the model's products, except for
what it does once a prompt, and for its part of a layer wherever it has waited for the device.
"""

import json
from collections.abc import Iterator

from experiments.common import RESULTS

Bits = tuple[int, int]  # of k and v
LAYERS, KV_HEADS, DIM, MEMORY = 32, 8, 128, 0.15
_FULL = (16, 16)
# Warp instructions of an entry in compiled code for sm_90: now, and at ed21b5b5, which was measured.
INSTRUCTIONS = {_FULL: 20.0, (8, 8): 31.0, (8, 4): 30.3, (4, 4): 28.1, (4, 3): 29.7, (3, 3): 29.8}
INSTRUCTIONS_BEFORE = {_FULL: 20.0, (8, 8): 87.0, (8, 4): 97.0, (4, 4): 112.0, (4, 3): 149.0, (3, 3): 156.0}
# The tiers of memory=0.15 and their shares of the bytes.
TIERS = {(8, 8): 0.3, (4, 4): 0.7}
# Fitted to the files in `results/gpu`: bytes a second, warp instructions a second (132 multiprocessors with 4
# schedulers at 1.98 GHz, which issue in 0.455 of all cycles), and seconds.
_BANDWIDTH, _FULL_BANDWIDTH = 3.9e12, 4.35e12  # the latter of flash attention over the full cache
_ISSUED = 0.455 * 132 * 4 * 1.98e9
_FIRST_LAUNCH, _FURTHER_LAUNCH = 22e-6, 19e-6
# Not fitted: queries and outputs are rotated one after the other, each in 7 exchanges between threads behind loads that
# wait for each other, about 3,000 cycles each.
ROTATIONS = 3e-6
_REST, _REST_OF_A_ROW = 6.27e-3, 0.09e-3
# Eviction. Fitted to dev/LOG.md of 2026-11-26 and to eviction alone from 4,096 tokens: scores a token, ranks a block of
# 4,096 and a launch, and the host's part of a layer and of a prompt (13 ms for 16 layers, 22.9 for 32).
_SCORES_OF_A_TOKEN, _RANKS_OF_A_BLOCK, _SMALL_LAUNCH = 5.8e-9, 13.2e-6, 3e-6
_HOST_LAYER, _HOST_PROMPT = 0.62e-3, 3.1e-3
# Not fitted: a bit of a threshold waits for three barriers (300 cycles), 26 bits tell random scores apart; a round of
# moves is a load behind another one. Warp instructions of a bit and warps, by the scores in registers (sm_90).
_BITS, _BIT_CYCLES, _ROUND, _CLOCK = 26, 300, 2e-6, 1.98e9
BIT_INSTRUCTIONS = {4096: (88, 8), 32_768: (142, 32)}
# Quantising into tiers: warp instructions of an entry, k and v (sm_90), and launches: three kernels, three tables of
# pools and a flag. k is measured 1,024 entries at a time.
QUANTISING = {(8, 8): 390, (4, 4): 526}
_QUANTISING_LAUNCHES, _MEASURED = 7, 1024
# A cache and budgets that are known take 1.15 ms on a CPU; they took 2.03.
_HOST_PROMPT_SAVED = 0.9e-3


def entry_bytes(bits: Bits) -> float:
    """Return the bytes of an entry, with the norms of quantised k and v."""
    return DIM * sum(bits) / 8 + (0 if bits == _FULL else 4)


def entries(tokens: int, rows: int, memory: float, tiers: dict[Bits, float]) -> dict[Bits, float]:
    """Return the entries of a layer by their bits, in `memory` of the full cache's bytes."""
    whole = memory * tokens * rows * KV_HEADS * entry_bytes(_FULL)
    return {bits: whole * share / entry_bytes(bits) for bits, share in tiers.items()}


def attention_seconds(kept: dict[Bits, float], launches: int, instructions: dict[Bits, float]) -> float:
    """Estimate attention of a layer over entries `kept` by bits, which take so many warp `instructions` each."""
    by_bytes = sum(count * entry_bytes(bits) for bits, count in kept.items()) / _BANDWIDTH
    by_instructions = sum(count * instructions[bits] for bits, count in kept.items()) / _ISSUED
    return _FIRST_LAUNCH + (launches - 1) * _FURTHER_LAUNCH + max(by_bytes, by_instructions)


def full_seconds(tokens: int, rows: int) -> float:
    """Estimate flash attention over the full cache of a layer."""
    return _FIRST_LAUNCH + tokens * rows * KV_HEADS * entry_bytes(_FULL) / _FULL_BANDWIDTH


def estimates(tokens: int, rows: int) -> dict[str, float]:
    """Estimate the seconds of a step over the full cache, 16 bits at 15%, and tiers in as many bytes."""
    tiers = entries(tokens, rows, MEMORY, TIERS)
    layers = {
        "full": full_seconds(tokens, rows),
        "16 bits": attention_seconds(entries(tokens, rows, MEMORY, {_FULL: 1.0}), 1, INSTRUCTIONS),
        "tiers before": attention_seconds(tiers, 3, INSTRUCTIONS_BEFORE),
        "tiers": attention_seconds(tiers, 1, INSTRUCTIONS) + ROTATIONS,
    }
    return {name: LAYERS * seconds + _REST + rows * _REST_OF_A_ROW for name, seconds in layers.items()}


def selection_seconds(tokens: int) -> float:
    """Estimate how long a layer's best entries are found and moved, for a length in `BIT_INSTRUCTIONS`."""
    instructions, warps = BIT_INSTRUCTIONS[tokens]
    issued = instructions * warps / 4 / 0.455  # in cycles, as in attention
    cycles = max(_BIT_CYCLES + issued, 16 // warps * issued)  # up to 16 warps share a multiprocessor
    rounds = 1 if warps < 32 else tokens // 16 // 256  # of a span's 16 programs
    return _SMALL_LAUNCH + _BITS * cycles / _CLOCK + rounds * _ROUND


def quantising_seconds(kept: dict[Bits, float]) -> float:
    """Estimate how long the entries `kept` of a layer, by bits, take from 16 bits into tiers."""
    rounds = -(-sum(kept.values()) // (KV_HEADS * _MEASURED))
    issued = sum(count * QUANTISING[bits] for bits, count in kept.items()) / _ISSUED
    return _QUANTISING_LAUNCHES * _SMALL_LAUNCH + rounds * _ROUND + issued


def eviction_seconds(tokens: int, is_before: bool = False, is_tiered: bool = False) -> float:
    """Estimate what eviction adds to reading a prompt, into 16 bits or tiers.

    `is_before`: at ed21b5b5, which was measured.
    """
    kept = entries(tokens, 1, MEMORY, TIERS if is_tiered else {_FULL: 1.0})
    moved = (tokens * KV_HEADS * 4 + 2 * sum(kept.values()) * entry_bytes(_FULL)) / _BANDWIDTH
    layer = quantising_seconds(kept) if is_tiered else 0.0
    layer += tokens * _SCORES_OF_A_TOKEN + moved + _SMALL_LAUNCH  # the last for the table of the pools
    if is_before:
        layer += tokens / 4096 * _RANKS_OF_A_BLOCK + 2 * _SMALL_LAUNCH
        return LAYERS * layer + _HOST_PROMPT + 2 * _HOST_LAYER  # waits in the first layer and in the last
    return LAYERS * (layer + selection_seconds(tokens)) + _HOST_PROMPT - _HOST_PROMPT_SAVED + _HOST_LAYER


def prefill_seconds(tokens: int) -> dict[str, float]:
    """Return the measured seconds of reading a prompt on an H200, by method."""
    rows = json.loads((RESULTS / "gpu" / "gpu_steps-nvidia-h200.json").read_text())["rows"]
    return {row["method"]: row["seconds"] for row in rows if row["what"] == "prefill" and row["tokens"] == tokens}


def eviction_table() -> str:
    """Return eviction's estimated milliseconds as Markdown, and its share of plain prefill in brackets."""
    names = "tokens | plain prefill, measured | eviction, measured | model of it | model now | model now, into tiers"
    lines = [f"| {names} |", "|" + "---|" * 6]
    for tokens in BIT_INSTRUCTIONS:
        seconds = prefill_seconds(tokens)
        measured = seconds["lkv"] - seconds["full"]
        now = eviction_seconds(tokens), eviction_seconds(tokens, is_tiered=True)
        parts = (measured, eviction_seconds(tokens, is_before=True), *now)
        cells = (f"{1e3 * part:.1f} ({part / seconds['full']:.3f})" for part in parts)
        lines.append(f"| {tokens:,} | {1e3 * seconds['full']:.0f} | {' | '.join(cells)} |")
    return "\n".join(lines)


def measurements() -> Iterator[tuple[str, float, float]]:
    """Yield each measurement on an H200 with its seconds and the model's."""
    names = {"sdpa": "full", "ragged": "16 bits", "tiers": "tiers before"}
    for row in json.loads((RESULTS / "gpu" / "gpu_steps-nvidia-h200.json").read_text())["rows"]:
        if row["what"] == "decode" and row["launch"] == "graphed" and "seconds" in row:
            tokens, rows, name = row["tokens"], row["batch"], names[row["attention"]]
            yield f"a step over {tokens:,} x {rows}, {name}", row["seconds"], estimates(tokens, rows)[name]
    for row in json.loads((RESULTS / "gpu" / "ragged_attention-nvidia-h200.json").read_text())["rows"]:
        if row["backend"] in ("grouped", "triton"):
            tokens, rows, is_full = row["tokens"], row["batch"], row["method"] == "full"
            kept = entries(tokens, rows, row["realised"], {_FULL: 1.0})
            modelled = full_seconds(tokens, rows) if is_full else attention_seconds(kept, 1, INSTRUCTIONS)
            yield f"attention over {tokens:,} x {rows}, {row['method']}", row["microseconds_a_layer"] / 1e6, modelled
    for tokens in BIT_INSTRUCTIONS:
        seconds = prefill_seconds(tokens)
        yield f"prefill of {tokens:,}", seconds["lkv"], seconds["full"] + eviction_seconds(tokens, is_before=True)
    seconds = prefill_seconds(4096)
    yield "eviction of 4,096", seconds["lkv"] - seconds["full"], eviction_seconds(4096, is_before=True)


def table() -> str:
    """Return the estimates in milliseconds as Markdown, relative to the full cache in brackets."""
    by_shape = {f"{t:,}, {rows}": estimates(t, rows) for t in (4096, 32_768, 131_072) for rows in (1, 8)}
    names = list(next(iter(by_shape.values())))
    lines = [f"| tokens, rows | {' | '.join(names)} |", "|" + "---|" * (len(names) + 1)]
    for shape, steps in by_shape.items():
        cells = (f"{1e3 * steps[name]:.1f} ({steps[name] / steps['full']:.2f})" for name in names)
        lines.append(f"| {shape} | {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table(), eviction_table(), sep="\n\n")
    for description, measured, modelled in measurements():
        print(f"{description}: measured {1e6 * measured:,.0f} us, model {modelled / measured:.2f} of it")
