"""Put a policy that was measured in the place of the shipped one for its model.

python -m experiments.ship FOLDER    (of the policy, named as the shipped one)

Its card gets the fidelity at R = 0.15 and 0.05 from the model's length file, which must be measured with it. Then
it goes from FOLDER, and the result files that are still of another policy are listed.
"""

import argparse
import json
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from experiments.common import PAPER_SCORER, RESULTS
from lkv.errors import ReportError
from lkv.hf.loading import DEFAULT
from lkv.policy.policy import Policy
from lkv.policy.shipped import shipped_policies

_RETENTIONS = (0.15, 0.05)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    ship(parser.parse_args().folder, RESULTS)


def ship(folder: Path, results: Path) -> None:
    """Replace the shipped policy that has the folder's name.

    Raises ReportError if there is none, or the length file is of another policy.
    """
    shipped = {entry.name: entry.folder for entry in shipped_policies()}
    if folder.name not in shipped:
        raise ReportError(f"no shipped policy is named {folder.name}; they are {', '.join(shipped)}.")
    checkpoint = shipped[folder.name]
    if folder.resolve() == checkpoint.resolve():
        raise ReportError(f"{folder} is the shipped policy itself; give the folder of another one.")
    policy = Policy.from_pretrained(folder)
    model = folder.name.removesuffix("-paper")
    suffix = "" if model == DEFAULT else f"-{model}"
    policy.card["fidelity"] = card_rows(policy, results / f"length{suffix}.json")
    with TemporaryDirectory() as copy:
        policy.save_pretrained(copy, half=True)
        if Policy.from_pretrained(copy).digest() != policy.digest():
            raise ReportError(f"{folder} holds parameters of 32 bits; save it with half=True and measure that.")
    policy.save_pretrained(checkpoint, half=True)
    for name in ("config.json", "policy.safetensors"):
        (folder / name).unlink()
    with suppress(OSError):  # there are other files
        folder.rmdir()
    print(f"{checkpoint}: {policy.digest()[:12]}")
    digests = {Policy.from_pretrained(entry.folder).digest() for entry in shipped_policies()}
    for path in sorted(results.glob(f"*{suffix}.json")):
        digest = json.loads(path.read_text(encoding="utf-8")).get("policy")
        if digest is not None and digest not in digests:
            print(f"{path.name} is of another policy; experiments.remeasure measures it again")


def card_rows(policy: Policy, path: Path) -> list[dict[str, Any]]:
    """The card's figures from a length file. Raises ReportError if it is of another policy or lacks a retention."""
    document = json.loads(path.read_text(encoding="utf-8"))
    method, about = "lkv", document
    if policy.inputs.is_paper:
        method, about = PAPER_SCORER, document.get(PAPER_SCORER, {})
    if about.get("policy") != policy.digest():
        raise ReportError(f"{path} was measured with another policy; run experiments.remeasure with this one first.")
    rows = [row for row in document["rows"] if row["task"] == "all" and row["method"] == method]
    if missing := [retention for retention in _RETENTIONS if all(row["retention"] != retention for row in rows)]:
        raise ReportError(f"{path} has no figures of LKV at R = {missing[0]}; measure them first.")
    return [
        {"tokens": [row["tokens"]] * 2, "retention": retention, "kl": round(row["kl"], 3),
         "agreement": round(row["agreement"], 3), "source": f"experiments/results/{path.name}"}
        for retention in _RETENTIONS for row in rows if row["retention"] == retention
    ]  # fmt: skip


if __name__ == "__main__":
    main()
