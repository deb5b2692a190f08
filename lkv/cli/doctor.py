"""lkv doctor: check the installation and suggest fixes."""

import json
from dataclasses import asdict

from lkv.cli.arguments import Command, option
from lkv.errors import LkvError

_MARKS = {"ok": "ok ", "off": "-  ", "bad": "BAD"}


class Doctor(Command):
    """Check the installation and suggest fixes."""

    json_: bool = option("print one JSON object, for issue reports", False, alias="json")

    def run(self) -> None:
        """Print every finding; raises LkvError, after them, if something is wrong."""
        from lkv.cli.diagnostics import BAD, examine

        findings = examine()
        bad = [finding.name for finding in findings if finding.status == BAD]
        if self.json_:
            print(json.dumps({"ok": not bad, "findings": [asdict(finding) for finding in findings]}, indent=1))
        else:
            width = max(len(finding.name) for finding in findings)
            for finding in findings:
                fix = f"  -> {finding.fix}" if finding.fix else ""
                print(f"{_MARKS[finding.status]} {finding.name:{width}}  {finding.detail}{fix}")
            print("ok: works; -: not available, and needed only for what the line names; BAD: LKV needs it")
        if bad:
            raise LkvError(f"{', '.join(bad)} must be fixed first; the lines above say how.")


COMMAND = Doctor
