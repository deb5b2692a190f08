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

from experiments.vllm import SECOND_RUNNER_PATH
from tests.ports import free_port

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
