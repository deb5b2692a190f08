"""Hostile clients beside honest ones: `attack` counts what both saw.

The server runs in a process of its own, `python -m tests.security.hostile FOLDER`, so that its clients take none of its
time. Hostile clients send what no client should, and nothing that a server must compute: whoever has the key may ask.
"""

import http.client
import json
import random
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from tests.serving.server import KNORM, OTHER, TEXT, form

QUESTIONS = ["Who?", "How many boats are there?", "And then?", "Why?"]
CHAT, CONTEXTS = "/v1/chat/completions", "/v1/contexts"
JSON = "application/json"
TURN = {"messages": [{"role": "user", "content": "Who?"}]}


def body_of(chance: random.Random) -> tuple[str, str, bytes]:
    """(path, content type, body) that no server should do anything for."""
    number = chance.randrange(3000, 50_000)
    bodies: list[tuple[str, str, Any]] = [
        (CHAT, JSON, b'{"messages":[' + b"1," * number + b"1]}"),
        (CHAT, JSON, b"[" * number),
        (CHAT, JSON, chance.randbytes(1000)),
        (CHAT, JSON, b"\xff" * number),
        (CHAT, JSON, {**TURN, "stop": ["a" * number] * 4}),
        (CHAT, JSON, {**TURN, "context": "../" * 90}),
        (CHAT, JSON, {**TURN, "context": f"{chance.randrange(2**64):032x}-{chance.randrange(2**32):016x}"}),
        (CHAT, JSON, {**TURN, "temperature": -1e300, "max_tokens": number}),
        (CHAT, JSON, {"messages": [{"role": "user", "content": "x" * 3 * number}]}),
        (CHAT, JSON, {**{str(key): 1 for key in range(number // 2)}, **TURN, "n": 2}),
        (CONTEXTS, JSON, {"text": "x" * 4 * number, "retention": -1}),
        (CONTEXTS, JSON, {"text": " " * number}),
        (CONTEXTS, "multipart/form-data; boundary=b", b"--b\r\n\r\n" * number),
        (CONTEXTS, "multipart/form-data; boundary=b", form(b"\xff" * number)),
        (CONTEXTS, "multipart/form-data; charset=punycode; boundary=" + "b" * 2000, b"x" * number),
        (CONTEXTS, JSON, b"x" * 2**20),
    ]
    path, kind, body = chance.choice(bodies)
    return path, kind, body if isinstance(body, bytes) else json.dumps(body).encode()


def send_bad_body(port: int, chance: random.Random) -> str:
    """A bad request; its status."""
    path, kind, body = body_of(chance)
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    try:
        connection.request("POST", path, body, {"Content-Type": kind})
        answer = connection.getresponse()
        content = answer.read()
        assert answer.status in (400, 404, 413, 429), (answer.status, content[:300], path, body[:100])
        assert set(json.loads(content)["error"]) == {"message", "type", "param", "code"}
        return str(answer.status)
    except (ConnectionError, http.client.HTTPException):
        return "closed"  # while a body beyond the limit was sent
    finally:
        connection.close()


def send_bytes(port: int, chance: random.Random) -> str:
    """Half of a request, or no request at all; waited with, or left."""
    length = b"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 5000\r\n\r\n{"
    data = chance.choice([
        b"GET /healthz HTTP/1.1\r\nHost: 127.0.0.1\r\nX: ", length, b"\x16\x03\x01" + chance.randbytes(200), b"",
        b"\r\n" * 99, b"GET / HTTP/1.1\r\nHost: [\r\n\r\n", b"GET " + b"/" * 70_000,
        b"POST /v1/contexts HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\nfffffffff\r\n",
        b"GET /healthz HTTP/1.1\r\n" + b"A: b\r\n" * 5000 + b"\r\n",
    ])  # fmt: skip
    with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=5) as client:
        client.sendall(data)
        time.sleep(chance.choice([0, 0, 1]))
        client.settimeout(0.2)
        client.recv(100)
    return "bytes"


def leave_a_stream(port: int, chance: random.Random) -> str:
    """A chat that is begun and left."""
    body = json.dumps({**TURN, "max_tokens": 500, "stream": True}).encode()
    head = f"POST {CHAT} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: {len(body)}\r\n\r\n".encode()
    with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=5) as client:
        client.sendall(head + body)
        client.recv(chance.randrange(1, 300))
    return "left"


ATTACKS: list[Callable[[int, random.Random], str]] = [*[send_bad_body] * 8, *[send_bytes] * 5, leave_a_stream]


class Client:
    """An honest client of one context, which knows the right answers and asks again where the server is busy."""

    def __init__(self, port: int, context: str | None):
        self.port, self.context, self.right = port, context, dict[str, str]()

    def ask(self, path: str, body: Any = None) -> tuple[int, Any]:
        """Status and content."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=120)
        try:
            data = None if body is None else json.dumps(body)
            connection.request("GET" if body is None else "POST", path, data, {"Content-Type": JSON})
            answer = connection.getresponse()
            return answer.status, json.loads(answer.read())
        finally:
            connection.close()

    def answer(self, question: str) -> str:
        """The server's answer."""
        while True:
            messages = [{"role": "user", "content": question}]
            status, content = self.ask(CHAT, {"messages": messages, "context": self.context, "max_tokens": 8})
            if status == 200:
                return str(content["choices"][0]["message"]["content"])
            assert status == 429, content
            time.sleep(0.05)


@contextmanager
def server_process(folder: Path) -> Any:
    """The port of a server in a process of its own."""
    command = [sys.executable, "-W", "ignore", "-m", "tests.security.hostile", str(folder)]
    with (folder / "log").open("wb") as log, subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True
    ) as process:  # fmt: skip
        try:
            yield int(process.stdout.readline())
            assert process.poll() is None, "the server has ended"
        finally:
            process.stdin.close()
            try:
                process.wait(60)
            finally:
                process.kill()
    assert "Traceback" not in (folder / "log").read_text(encoding="utf-8", errors="replace")


def attack(folder: Path, seconds: float, seed: int, honest: int = 8, hostile: int = 64) -> dict[str, float]:
    """Honest clients alone, then beside hostile ones, each for half of the time; counts, and seconds of the 95th."""
    counts: Counter[str] = Counter()
    problems: list[BaseException] = []
    with server_process(folder) as port:
        contexts = []
        for text in (TEXT, OTHER):
            name = Client(port, None).ask(CONTEXTS, {"text": text})[1]["id"]
            while Client(port, None).ask(f"{CONTEXTS}/{name}")[1]["status"] != "ready":
                time.sleep(0.05)
            contexts.append(name)
        right = {(name, question): Client(port, name).answer(question) for name in contexts for question in QUESTIONS}

        def be_honest(number: int, until: float, taken: list[float]) -> None:
            chance = random.Random(f"{seed}-{number}")
            while time.monotonic() < until and not problems:
                name, question = chance.choice(list(right))
                began = time.monotonic()
                assert Client(port, name).answer(question) == right[name, question]
                taken.append(time.monotonic() - began)
                time.sleep(0.05)

        def be_hostile(number: int, until: float) -> None:
            chance = random.Random(f"{seed}-{number}")
            while time.monotonic() < until and not problems:
                counts[chance.choice(ATTACKS)(port, chance)] += 1
                time.sleep(2 * chance.random())

        def guarded(work: Callable[..., None], *arguments: Any) -> None:
            try:
                work(*arguments)
            except BaseException as error:
                problems.append(error)

        percentiles = []
        for enemies in (0, hostile):
            until, taken = time.monotonic() + seconds / 2, list[float]()
            work = [(be_honest, number, until, taken) for number in range(honest)]
            work += [(be_hostile, number, until) for number in range(enemies)]
            threads = [threading.Thread(target=guarded, args=each) for each in work]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            if problems:
                raise problems[0]
            counts["honest answers"] += len(taken)
            percentiles.append(sorted(taken)[int(0.95 * len(taken))])
        assert Client(port, contexts[0]).answer("Who?") == right[contexts[0], "Who?"]
        assert Client(port, None).ask("/v1/models")[0] == 200
    return {**counts, "quiet p95": percentiles[0], "p95": percentiles[1]}


def main() -> None:
    """Serve until the standard input ends."""
    from tests.serving.server import serving, tiny

    folder = Path(sys.argv[1])
    (folder / "model").mkdir()
    with serving(*tiny(folder / "model"), folder / "store", **KNORM) as server:
        print(server.port, flush=True)
        sys.stdin.read()


if __name__ == "__main__":
    main()
