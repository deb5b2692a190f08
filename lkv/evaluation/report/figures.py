"""Numbers to pictures; never loads a model."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lkv.errors import ReportError
from lkv.utils.files import atomic_write

_KINDS = (".png", ".pdf", ".svg")


def new_figure(width: float, height: float) -> Any:
    """An empty matplotlib figure of this size in inches. Raises ReportError without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ReportError("pictures need matplotlib; run `pip install 'lkv-cache[plots]'`.") from error
    return Figure(figsize=(width, height), layout="constrained")


def save_figure(figure: Any, path: Path) -> None:
    """Write `figure` as PNG, PDF or SVG, by the name's ending, to a temporary name first. Raises ReportError."""
    if path.suffix not in _KINDS:
        raise ReportError(f"{path} is no picture's name; end it with one of {', '.join(_KINDS)}.")
    with atomic_write(path, ReportError, "the picture") as temporary:
        figure.savefig(temporary, dpi=150, format=path.suffix[1:])


def draw_budgets(ratios: Sequence[Sequence[float]], retention: float, path: Path) -> None:
    """Heat map of the share each head keeps, layers by KV heads (Fig. 1e), written to `path`."""
    layers, heads = len(ratios), len(ratios[0])
    figure = new_figure(max(4.0, 0.28 * layers), 1.2 + 0.35 * heads)
    axes = figure.subplots()
    image = _heat_map(axes, [[row[head] for row in ratios] for head in range(heads)])
    axes.set_xlabel("layer")
    axes.set_ylabel("KV head")
    axes.set_yticks(range(heads))
    axes.set_title(f"Share of the tokens each head keeps at R = {retention:g}")
    figure.colorbar(image, ax=axes, label="ratio r")
    save_figure(figure, path)


def draw_policies(panels: Mapping[str, Sequence[Sequence[float]]], retention: float, path: Path) -> None:
    """The budget policies side by side (Fig. 1), written to `path`; see `plot_policies`."""
    save_figure(plot_policies(panels, retention), path)


def plot_policies(panels: Mapping[str, Sequence[Sequence[float]]], retention: float) -> Any:
    """One heat map a method: the share [L][H] of the tokens that each KV head keeps, all on one scale."""
    layers = max(len(ratios) for ratios in panels.values())
    figure = new_figure(1.0 + 1.7 * len(panels), min(7.0, max(3.2, 1.3 + 0.12 * layers)))
    row = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
    for axes, (name, ratios) in zip(row, panels.items(), strict=True):
        image = _heat_map(axes, ratios)
        shares = [share for layer in ratios for share in layer]
        axes.set_title(f"{name}\nkept: {sum(shares) / len(shares):.3f}", fontsize=10)
        axes.set_xticks(range(len(ratios[0])) if len(ratios[0]) <= 8 else range(0, len(ratios[0]), 4))
        axes.set_xlabel("KV head")
    row[0].set_ylabel("layer")
    figure.suptitle(f"Share of the tokens that each head keeps, R = {retention:g}")
    figure.colorbar(image, ax=list(row), label="kept / all tokens of the head")
    return figure


def _heat_map(axes: Any, rows: Sequence[Sequence[float]]) -> Any:
    return axes.imshow(rows, vmin=0, vmax=1, cmap="viridis", aspect="auto", interpolation="nearest")
