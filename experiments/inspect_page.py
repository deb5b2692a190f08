"""How long the page of `lkv inspect` takes to follow a move of its slider, a chosen head and a scroll, in a browser.

python -m experiments.inspect_page    (writes inspect_page.json; needs Chromium)

Each time runs from the event to the next frame that has been drawn, the wait for that frame included.
"""

import json
import os
import shlex
import statistics
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from experiments.common import parse_options, save_rows
from lkv.context.inspection import SHARES, InspectionResult, render_page
from lkv.methods.memory_budget import UNQUANTIZED
from lkv.policy.lookup import default_policy

OPENED = """new Promise((done) => {
  const drawn = () => requestAnimationFrame(() => setTimeout(() => done(performance.now())));
  document.readyState === "complete" ? drawn() : addEventListener("load", drawn);
})"""
ACTIONS = """(async () => {
  const drawn = () => new Promise((done) => requestAnimationFrame(() => {
    const after = new MessageChannel();
    after.port1.onmessage = () => done(performance.now());
    after.port2.postMessage(0);
  }));
  const timed = async (act) => { await drawn(); const start = performance.now(); act(); return await drawn() - start; };
  const slider = document.getElementById("slider"), times = { slider: [], head: [], scroll: [] };
  const slide = (to) => { slider.value = to; slider.dispatchEvent(new Event("input", { bubbles: true })); };
  const last = Number(slider.max);
  const far = document.documentElement.scrollHeight - innerHeight;
  for (const place of [0, far / 2]) {
    scrollTo(0, place);
    for (let rung = 0; rung <= last; rung++) times.slider.push(await timed(() => slide(rung)));
    for (let rung = last; rung >= 0; rung -= last) times.slider.push(await timed(() => slide(rung)));
  }
  slide(5);
  for (let h = 0; h < 20; h++) times.head.push(await timed(() => document.querySelector(`[data-h="${h}"]`).click()));
  scrollTo(0, 0);
  for (let y = 0; y < far; y += 400) times.scroll.push(await timed(() => scrollTo(0, y)));
  return times;
})()"""


def text_of(tokens: int, seed: int = 0) -> InspectionResult:
    """A text as long as is asked for: words of 1 to 9 letters, ranks that heads agree on in part, real budgets."""
    draw = np.random.default_rng(seed)
    ratios = [default_policy().inference_ratios(retention).numpy() for retention in SHARES]
    layers, heads = ratios[0].shape
    shared = draw.normal(size=(tokens, 1))
    scores = shared + draw.normal(size=(tokens, layers * heads))
    ranks = (-scores).argsort(0).argsort(0).astype(np.uint16)
    letters = np.array(list("etaoinshrdlu"))
    pieces = [" " + "".join(draw.choice(letters, draw.integers(1, 10))) for _ in range(tokens)]
    counts = np.floor(np.stack([ratio.reshape(1, -1) for ratio in ratios]) * tokens).astype(int)
    return InspectionResult("lkv", pieces, ranks, counts, SHARES, False, (UNQUANTIZED,), layers, heads, (64, 64), 4)


class Browser:
    """A headless Chromium, spoken to over two pipes in its DevTools protocol."""

    def __init__(self, read: int, write: int):
        self._read, self._write = os.fdopen(read, "rb"), os.fdopen(write, "wb")
        self._number, self._rest = 0, b""

    def call(self, method: str, session: str | None = None, **params: Any) -> dict[str, Any]:
        """The result of a command. Raises RuntimeError for one that failed."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": params}
        message |= {} if session is None else {"sessionId": session}
        self._write.write(json.dumps(message).encode() + b"\0")
        self._write.flush()
        while (answer := self._next()).get("id") != self._number:
            pass
        if "error" in answer or "exceptionDetails" in answer["result"]:
            raise RuntimeError(f"{method}: {answer.get('error') or answer['result']['exceptionDetails']}")
        return answer["result"]

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            piece = os.read(self._read.fileno(), 1 << 16)
            if not piece:
                raise RuntimeError("the browser ended")
            self._rest += piece
        message, _, self._rest = self._rest.partition(b"\0")
        return json.loads(message)


@contextmanager
def chromium(program: str, size: str) -> Iterator[Browser]:
    """A browser of its own, with an empty profile; ended afterwards."""
    (their_read, write), (read, their_write) = os.pipe(), os.pipe()
    with tempfile.TemporaryDirectory() as profile:
        words = [program, "--headless=new", "--no-sandbox", "--disable-gpu", "--remote-debugging-pipe"]
        words += [f"--user-data-dir={profile}", f"--window-size={size}", "about:blank"]
        pipes = f"exec {shlex.join(words)} 3<&{their_read} 4>&{their_write} 2>/dev/null"
        with subprocess.Popen(["bash", "-c", pipes], pass_fds=(their_read, their_write)) as process:
            os.close(their_read)
            os.close(their_write)
            try:
                yield Browser(read, write)
            finally:
                process.terminate()


def measure(browser: Browser, file: Path) -> dict[str, list[float]]:
    """Milliseconds of every action on a page, and of opening it up to its first frame."""
    target = browser.call("Target.createTarget", url="about:blank")["targetId"]
    session = browser.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
    browser.call("Page.enable", session)
    browser.call("Page.navigate", session, url=file.as_uri())
    first = browser.call("Runtime.evaluate", session, expression=OPENED, awaitPromise=True, returnByValue=True)
    times = browser.call("Runtime.evaluate", session, expression=ACTIONS, awaitPromise=True, returnByValue=True)
    return {"open": [first["result"]["value"]], **times["result"]["value"]}


def main() -> None:
    options = parse_options(__doc__, "inspect_page", tokens=[2000, 8000], size="1280,900", browser="chromium")
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for tokens in options.tokens:
            file = Path(folder) / f"{tokens}.html"
            file.write_text(
                render_page(text_of(tokens), "words", "a shape of SmolLM2-135M", 0.15, {}), encoding="utf-8"
            )
            with chromium(options.browser, options.size) as browser:
                for action, times in measure(browser, file).items():
                    row = {"action": action, "tokens": tokens, "n": len(times), "unit": "ms to the drawn frame"}
                    rows.append(row | {"value": statistics.median(times), "low": min(times), "high": max(times)})
                    print(f"{tokens:6} {action:7} {rows[-1]['value']:7.1f} at most {max(times):7.1f} ms", flush=True)
    save_rows(options, "inspect_page", rows)


if __name__ == "__main__":
    main()
