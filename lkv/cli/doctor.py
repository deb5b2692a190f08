"""lkv doctor: what there is to work with, whether it works, and the mend."""

import argparse
import json
from dataclasses import asdict

from lkv.errors import LkvError

_SIGNS = {"ok": "ok ", "off": "-  ", "bad": "BAD"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    parser.add_argument("--json", action="store_true", help="print one JSON object, for programs and bug reports")


def run(options: argparse.Namespace) -> None:
    """Print every finding; raises LkvError, after them, where something is wrong."""
    from lkv.cli.installation import BAD, examine

    findings = examine()
    bad = [finding.name for finding in findings if finding.status == BAD]
    if options.json:
        print(json.dumps({"ok": not bad, "findings": [asdict(finding) for finding in findings]}, indent=1))
    else:
        width = max(len(finding.name) for finding in findings)
        for finding in findings:
            mend = f"  -> {finding.mend}" if finding.mend else ""
            print(f"{_SIGNS[finding.status]} {finding.name:{width}}  {finding.detail}{mend}")
        print("ok: works here; -: not here, and needed only for what the line names; BAD: LKV needs it")
    if bad:
        raise LkvError(f"{', '.join(bad)} must be mended first; the lines above say how.")
