"""Numbers to pictures; never loads a model."""

from collections.abc import Sequence
from pathlib import Path


def draw_budgets(ratios: Sequence[Sequence[float]], retention: float, path: Path) -> None:
    """Heat map of the share each head keeps, layers by KV heads (Fig. 1e), written to `path`."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    layers, heads = len(ratios), len(ratios[0])
    figure, axes = pyplot.subplots(figsize=(max(4.0, 0.28 * layers), 1.2 + 0.35 * heads), layout="constrained")
    columns = [[row[head] for row in ratios] for head in range(heads)]
    image = axes.imshow(columns, vmin=0, vmax=1, cmap="viridis", aspect="auto", interpolation="nearest")
    axes.set_xlabel("layer")
    axes.set_ylabel("KV head")
    axes.set_yticks(range(heads))
    axes.set_title(f"Share of the tokens each head keeps at R = {retention:g}")
    figure.colorbar(image, ax=axes, label="ratio r")
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name("." + path.name)
    figure.savefig(temporary, dpi=150, format=path.suffix.lstrip(".") or "png")
    temporary.replace(path)
    pyplot.close(figure)
