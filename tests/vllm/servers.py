"""`lkv serve --engine vllm` in a process of its own."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx
import openai

from experiments.vllm import SECOND_RUNNER_PATH
from tests.ports import free_port
from tests.serving.server import until

KEY = "sesame"
SECOND_RUNNER = "takes the second model runner"  # what startup/sitecustomize.py prints


@contextmanager
def serving(arguments: Sequence[str], log: Path, **variables: str) -> Iterator[tuple[str, subprocess.Popen]]:
    """Start a server by `lkv` with `arguments`, wait until it is ready, and end it; yields its address and process.

    The port is a free one: the server of a test run that was killed would answer at a fixed one.
    """
    port = free_port()
    environment = {**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "1", "OMP_NUM_THREADS": "1", **variables}
    has_second_runner = os.environ.get("VLLM_USE_V2_MODEL_RUNNER") == "1"
    if has_second_runner:
        environment["PYTHONPATH"] = os.pathsep.join([SECOND_RUNNER_PATH, environment.get("PYTHONPATH", "")])
    command = [sys.executable, "-m", "lkv", *arguments, "--port", str(port)]
    with open(log, "w") as file:
        # A group of its own: also what outlives the server is ended.
        process = subprocess.Popen(command, env=environment, stdout=file, stderr=file, start_new_session=True)
    url, deadline = f"http://127.0.0.1:{port}", time.monotonic() + 400
    try:
        while True:
            assert process.poll() is None and time.monotonic() < deadline, log.read_text()
            try:
                if httpx.get(f"{url}/health").status_code == 200:
                    break
            except httpx.TransportError:
                time.sleep(0.5)
        assert has_second_runner == (SECOND_RUNNER in log.read_text())
        yield url, process
    finally:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(30)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def squash(text: str) -> str:
    """Without white space: this tokenizer's pieces are joined by some, and not at the edges of a stream."""
    return "".join(text.split())


class Server:
    """A running server."""

    def __init__(self, url: str, process: subprocess.Popen):
        self.process = process
        self.http = httpx.Client(base_url=url, headers={"Authorization": f"Bearer {KEY}"}, timeout=120)
        self.client = openai.OpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0)

    def create(self, text: str, **fields) -> str:
        """Create a context, and wait until it is ready."""
        made = self.http.post("/v1/contexts", json={"text": text, **fields})
        assert made.status_code in (200, 202), made.text
        name = made.json()["id"]

        def finished():
            state = self.http.get(f"/v1/contexts/{name}").json()
            return state["status"] != "compressing" and state

        state = until(finished, 60)
        assert state["status"] == "ready", state
        return name

    def metrics(self) -> dict[str, float]:
        """The plugin's part of /metrics."""
        lines = self.http.get("/metrics").text.splitlines()
        return {line.rsplit(" ", 1)[0]: float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith("lkv_")}

    def memory(self) -> tuple[float, float]:
        """Contexts in the workers' memory, and their bytes, as /metrics gives them."""
        values = self.metrics()
        return values["lkv_contexts_resident"], values["lkv_context_bytes"]

    def ask(self, question: str, model: str = "tiny", **options) -> str:
        """One greedy answer."""
        options = {"max_tokens": 12, "temperature": 0, **options}
        messages = [{"role": "user", "content": question}]
        answer = self.client.chat.completions.create(model=model, messages=messages, **options)
        return squash(answer.choices[0].message.content)


@contextmanager
def serving_lab(lab, *options: str, length: int = 1024):
    """The lab's model behind a server."""
    arguments = [
        *("serve", "--engine", "vllm", "--model", str(lab.folder), "--name", "tiny", "--store", str(lab.store)),
        *("--policy", lab.settings["policy"], "--retention", str(lab.settings["retention"]), "--contexts-memory", "64"),
        *("--max-upload", "1", "--max-tokens", "16"),
        *("--dtype", "float32", "--max-requests", "8", "--vllm-args", f"--enforce-eager --max-model-len {length}"),
        *options,
    ]
    with serving(arguments, lab.store.parent / "server.log", LKV_API_KEY=KEY) as (url, process):
        yield Server(url, process)
