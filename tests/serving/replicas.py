"""Two replicas of a tiny model behind Ray Serve, one of which is killed while they are asked.

python -m tests.serving.replicas [--out FILE]    (`make test-serve` installs Ray and runs it)

Every answer is compared with `Context.ask`; fails unless all are right, every context is still there, and no more
requests had to be sent again than were in flight.
"""

import argparse
import json
import os
import random
import signal
import socket
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import ray
from ray import serve

from lkv.context.context import compress
from lkv.serving.ray import application
from lkv.utils.results import write_results
from tests.serving.server import tiny

CLIENTS = 8
QUESTIONS = ["Who?", "How many?", "And then?"]


def options_of(model: Path, store: Path) -> dict:
    """What `lkv serve --ray` would be given."""
    return {
        "model": str(model), "policy": None, "strict": True, "name": "tiny", "method": "knorm", "retention": 0.4,
        "host": "127.0.0.1", "store": str(store), "memory": 64.0, "pages": 256, "max_requests": 64, "max_texts": 32,
        "revision": None, "dtype": None, "device": None,
        "max_upload": 1, "max_store": 1024, "max_tokens": 64, "timeout": 60.0, "replicas": 2,
    }  # fmt: skip


class Client:
    """Asks the gate, again where a replica died, and counts that."""

    def __init__(self, url: str):
        self._url, self.retried, self._lock = url, 0, threading.Lock()

    def ask(self, path: str, body: dict | None = None) -> dict:
        data = None if body is None else json.dumps(body).encode()
        for _ in range(20):
            request = urllib.request.Request(self._url + path, data, {"Content-Type": "application/json"})
            try:
                with urllib.request.urlopen(request, timeout=120) as answer:
                    return json.load(answer)
            except urllib.error.HTTPError as error:
                if error.code < 500:
                    return json.load(error)
            except OSError:
                pass
            with self._lock:
                self.retried += 1
            time.sleep(0.5)
        raise SystemExit(f"no answer from {path}")


def kill_one_replica() -> None:
    """SIGKILL to the process of one of our replicas."""
    pid = serve.get_deployment_handle("Replica", "lkv").process.remote().result(timeout_s=60)
    os.kill(pid, signal.SIGKILL)


def run(folder: Path, requests: int, contexts: int) -> dict[str, int]:
    """Counts of what was asked, wrong, lost and sent again."""
    model, tokenizer = tiny(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    texts = [f"The harbour number {number} holds {41 + number} boats. " * 3 for number in range(contexts)]
    right = {}
    for text in texts:
        own = compress(model, tokenizer, text, method="knorm", retention=0.4)
        right |= {(text, question): own.ask(question, 8) for question in QUESTIONS}
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ray.init(include_dashboard=False, num_cpus=4, log_to_driver=False)
    serve.start(http_options={"host": "127.0.0.1", "port": port})
    serve.run(application(options_of(folder / "model", folder / "store"), None), name="lkv", route_prefix="/")
    client = Client(f"http://127.0.0.1:{port}")
    names = {text: client.ask("/v1/contexts", {"text": text})["id"] for text in texts}
    before, draw = client.retried, random.Random(0)
    jobs = [(draw.choice(texts), draw.choice(QUESTIONS)) for _ in range(requests)]
    asked = threading.Semaphore(0)

    def answer(job: tuple[str, str]) -> bool:
        asked.release()
        turn = [{"role": "user", "content": job[1]}]
        found = client.ask(
            "/v1/chat/completions", {"model": f"tiny:{names[job[0]]}", "messages": turn, "max_tokens": 8}
        )
        return found.get("choices", [{}])[0].get("message", {}).get("content") == right[job]

    with ThreadPoolExecutor(CLIENTS) as pool:
        futures = [pool.submit(answer, job) for job in jobs]
        for _ in range(requests // 2):
            asked.acquire()
        kill_one_replica()
        wrong = [future.result() for future in futures].count(False)
    held = {one["id"] for one in client.ask("/v1/contexts")["data"] if one["status"] == "ready"}
    return {
        "requests": requests, "contexts": contexts, "wrong": wrong, "lost": len(set(names.values()) - held),
        "retried": client.retried - before, "in_flight": CLIENTS,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--contexts", type=int, default=20)
    parser.add_argument("--out", type=Path, default=None)
    options = parser.parse_args()
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    with tempfile.TemporaryDirectory() as folder:
        try:
            counts = run(Path(folder), options.requests, options.contexts)
        finally:
            serve.shutdown()
            ray.shutdown()
    print(counts)
    if options.out is not None:
        rows = [{"what": name, "value": value, "unit": "count"} for name, value in counts.items()]
        write_results(options.out, "serving_ray", rows, 0, "make test-serve")
    if counts["wrong"] or counts["lost"] or counts["retried"] > counts["in_flight"]:
        sys.exit("an answer was wrong, a context was lost, or too many requests were sent again.")


if __name__ == "__main__":
    main()
