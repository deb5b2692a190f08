"""The tables in docs/models.md: which families LKV serves, and which of the most downloaded models.

python -m tests.model_table    (writes the tables)
"""

import json
from dataclasses import dataclass
from pathlib import Path

from tests.families import HYBRIDS, REFUSED, SERVED, Family
from tests.vision import VISION, VisionFamily

DOCUMENT = Path(__file__).parents[1] / "docs" / "models.md"
DOWNLOADS = json.loads((Path(__file__).parent / "downloads.json").read_text(encoding="utf-8"))
_END = "<!-- end of the table -->\n"


def family_table() -> str:
    """The families, what is evicted from and how a scorer may read k; then those that are refused, with the reason."""
    lines = [
        "| family | evicted from | stays | k un-rotated for the scorer | policy can be trained | vLLM |",
        "|---|---|---|---|---|---|",
    ]
    for family in SERVED + HYBRIDS:
        name = f"{family.label} (transformers {family.since} or newer)" if family.since else family.label
        evicted, _, rest = family.layers.partition("; ")
        fits, vllm = ("yes" if is_so else "no" for is_so in (family.fits, family.is_served_in_vllm))
        lines.append(f"| {name} | {evicted} | {rest.removesuffix(' stay')} | {family.rotation} | {fits} | {vllm} |")
    lines += ["", "| refused | it has |", "|---|---|"]
    lines += [f"| {family.name} | {family.refused} |" for family in REFUSED]
    return "\n".join(lines) + "\n"


@dataclass(frozen=True)
class DownloadedModel:
    """One of the most downloaded models.

    `text` and `images`: the families of its architecture whose tiny models the tests run, if any; `refusal`: its family
    if LKV refuses it.
    """

    name: str
    downloads: int
    model_type: str

    @property
    def text(self) -> Family | None:
        """The family that is tested with text alone."""
        return next((family for family in SERVED + HYBRIDS if self._is_of(family)), None)

    @property
    def images(self) -> VisionFamily | None:
        """The family that is tested with images."""
        return next((family for family in VISION if self._is_of(family)), None)

    @property
    def refusal(self) -> Family | None:
        """The family that tests show to be refused."""
        return next((family for family in REFUSED if self._is_of(family)), None)

    @property
    def is_served(self) -> bool:
        """Whether tests run a tiny model of its architecture over a compressed cache."""
        return bool(self.text or self.images)

    def _is_of(self, family: Family | VisionFamily) -> bool:
        is_variant = not family.variant or any(part in self.name for part in family.variant.split(", "))
        return _letters(family.name) == _letters(self.model_type) and is_variant


def _letters(name: str) -> str:
    return name.lower().replace("_", "")


def downloaded_models() -> list[DownloadedModel]:
    """The most downloaded models, as tests/downloads.json lists them."""
    return [DownloadedModel(*row) for row in DOWNLOADS["models"]]


def downloads_table() -> str:
    """Each of the most downloaded models: its architecture, and what LKV serves of it, or why it is refused."""
    models = downloaded_models()
    lines = [
        f"{sum(model.is_served for model in models)} of these {len(models)} are served. Source: the "
        f"{DOWNLOADS['source']}, {DOWNLOADS['date']}; {DOWNLOADS['counted']}. Left out: {DOWNLOADS['left_out']}.",
        "",
        "| | model | millions | architecture | LKV |",
        "|---|---|---|---|---|",
    ]
    for rank, model in enumerate(models, 1):
        if model.is_served:
            status = "text and images" if model.images else "text"
        else:
            reason = model.refusal.refused if model.refusal else "not in transformers, only code of its own"
            status = f"refused: {reason}"
        lines.append(f"| {rank} | {model.name} | {model.downloads / 1e6:.1f} | {model.model_type} | {status} |")
    return "\n".join(lines) + "\n"


def document() -> str:
    """docs/models.md with the tables of now."""
    text = DOCUMENT.read_text(encoding="utf-8")
    for name, table in (("families", family_table()), ("downloads", downloads_table())):
        start = text.index(marker := f"<!-- table of {name}: python -m tests.model_table -->\n") + len(marker)
        text = text[:start] + table + text[text.index(_END, start) :]
    return text


if __name__ == "__main__":
    DOCUMENT.write_text(document(), encoding="utf-8")
