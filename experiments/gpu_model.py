"""Estimate a decode step of Llama-3.1-8B's shape on an H200 from instructions, bytes and launches.

python -m experiments.gpu_model    (prints the table of docs/gpu.md, and how far the model is off what was measured)

Attention of a layer takes the time of its launches, and then the longer of two: of its entries' bytes, and of their
warp instructions. The rest of a step (weights, other kernels) is a constant and a part for each row.
"""

import json
from collections.abc import Iterator

from experiments.common import RESULTS

Bits = tuple[int, int]  # of k and v
LAYERS, KV_HEADS, DIM, MEMORY = 32, 8, 128, 0.15
_FULL = (16, 16)
# Warp instructions of an entry in compiled code for sm_90: now, and at ed21b5b5, which was measured.
INSTRUCTIONS = {_FULL: 20.0, (8, 8): 43.2, (8, 4): 33.9, (4, 4): 30.0, (4, 3): 31.2, (3, 3): 31.8}
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
    print(table())
    for description, measured, modelled in measurements():
        print(f"{description}: measured {1e6 * measured:,.0f} us, model {modelled / measured:.2f} of it")
