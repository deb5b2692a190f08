"""docs/guides/vllm.md: its server is started and its blocks are run in one shell; they print what the page shows."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

from tests.vllm.servers import serving

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "guides" / "vllm.md").read_text(encoding="utf-8")
_BLOCK = re.compile(r"<!-- not run: needs that server -->\n```(sh|python)\n(.*?)```\n\n```text\n(.*?)```", re.DOTALL)
# What differs between machines and runs.
_VARYING = (re.compile(r'(?<="created": )\d+'), re.compile(r"[0-9a-f]{32}-[0-9a-f]{16}"))


def without_varying(text: str) -> str:
    for pattern in _VARYING:
        text = pattern.sub("...", text)
    return text.strip()


def test_the_page_shows_what_is_printed(tmp_path):
    command = re.search(r"^lkv (serve --engine vllm .*)$", PAGE, re.MULTILINE)[1]
    arguments = [*shlex.split(command), "--store", str(tmp_path / "store")]
    blocks = _BLOCK.findall(PAGE)
    commands = [f"python - <<'END'\n{code}END\n" if kind == "python" else code for kind, code, _ in blocks]
    script = "".join(f"{command}echo =====\n" for command in commands)
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    with serving(arguments, tmp_path / "server.log") as (url, _):
        own = script.replace("8000", url.rpartition(":")[2])
        done = subprocess.run(
            ["bash", "-euc", own], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300
        )
    assert done.returncode == 0, done.stderr
    printed = done.stdout.split("=====\n")[:-1]
    assert len(blocks) >= 3 and list(map(without_varying, printed)) == [without_varying(shown) for *_, shown in blocks]
