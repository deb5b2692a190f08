"""Draw docs/pictures/method.png: what LKV-H and LKV-T do with the first sentences of the example text.

python -m dev.method_picture
"""

from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.colors import ListedColormap
from matplotlib.patches import Patch

import lkv
from lkv.context.inspection import inspect_text

ROOT = Path(__file__).parents[1]
MEMORY = 0.15
WORDS = 60
LAYERS = (3, 12, 21)
COLORS = ("white", "#fbe3d4", "#f6bb95", "#e8743b", "#b23a0e", "#7a2406")  # evicted, and precisions from the lowest


def main() -> None:
    model, tokenizer = lkv.load_default()
    text = " ".join(lkv.read_document(str(ROOT / "examples" / "lighthouse.txt")).split()[:WORDS])
    result = inspect_text(model, tokenizer, text, shares=(MEMORY,))
    rows = [layer * result.heads + head for layer in LAYERS for head in range(result.heads)]
    ranks, counts = result.ranks[:, rows], result.counts[0][:, rows]  # [T, N], [P, N]
    precisions = (ranks[None] < counts[:, None]).sum(0).T  # [N, T], 0 for evicted, more for better precisions
    names = [f"layer {layer}, head {head}" for layer in LAYERS for head in range(result.heads)]
    bits = [f"{precision.key_bits} / {precision.value_bits}" for precision in result.precisions]
    used = [level for level in range(len(COLORS)) if level in precisions or level == len(bits)]

    figure, (full, budgets, kept) = plt.subplots(
        1, 3, figsize=(13, 3.6), gridspec_kw={"width_ratios": (2, 1.3, 2)}, layout="constrained"
    )
    colors = ListedColormap(COLORS)
    for axes, values in ((full, np.full_like(precisions, len(COLORS) - 1)), (kept, precisions)):
        axes.pcolormesh(values, vmin=0, vmax=len(COLORS) - 1, cmap=colors, edgecolors="#dddddd", linewidth=0.1)
        axes.set_xlabel("tokens of the text")
    full.set_title("the full cache: every head keeps every token")
    budgets.set_title("LKV-H: how many each head keeps")
    budgets.barh(np.arange(len(rows)) + 0.5, counts[-1], color=COLORS[3])
    budgets.set_xlim(0, len(ranks))
    kept.set_title("LKV-T: which ones")
    kept.legend(
        title="bits of k / v",
        handles=[
            Patch(facecolor=COLORS[level], edgecolor="#dddddd", label=["evicted", *bits[::-1]][level]) for level in used
        ],
        loc="upper center",
        bbox_to_anchor=(0.5, -0.2),
        ncols=len(used),
        frameon=False,
    )
    for axes in (full, budgets, kept):
        axes.set_ylim(len(rows), 0)
        axes.set_yticks(np.arange(len(rows)) + 0.5, names if axes is full else [])
    figure.savefig(ROOT / "docs" / "pictures" / "method.png", dpi=110)


if __name__ == "__main__":
    main()
