"""A server over loopback, with a tiny random model, for the tests that ask it as clients do."""

import json
import threading
import time
import urllib.error
import urllib.request
from contextlib import contextmanager

from transformers import AutoModelForCausalLM, AutoTokenizer

from lkv.serving.answer import Answer
from lkv.serving.app import HttpServer
from lkv.serving.service import Service
from lkv.serving.settings import ServiceSettings
from tests.conftest import save_model
from tests.context.test_chat import TEMPLATE

KNORM = {"method": "knorm", "retention": 0.4}
TEXT = "The harbour of Lisse holds 41 boats. " * 6
OTHER = "Professor Brandt teaches botany in Ghent. " * 5
QUESTIONS = ["Who?", "How many boats are there?", "And then?"]
WHO, SURE = {"role": "user", "content": "Who?"}, {"role": "user", "content": "Sure?"}
CALL = {"id": "call_1", "type": "function", "function": {"name": "search", "arguments": '{"q": "x"}'}}
TOOLS = [{"type": "function", "function": {"name": "search", "parameters": {"type": "object"}}}]
RESULT = {"content": "41", "role": "tool", "tool_call_id": "call_1"}
# A chat template that renders calls and results, beside the one of the server's tokenizer, which does not.
TOOLS_TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% for c in m.tool_calls or [] %}"
    "<{{ c.function.name }} {{ c.function.arguments.q }}>{% endfor %}</s>{% endfor %}[assistant]"
)


def form(data):
    """A form with a file, of the type multipart/form-data; boundary=b."""
    return b'--b\r\nContent-Disposition: form-data; name="file"; filename="a.txt"\r\n\r\n' + data + b"\r\n--b--\r\n"


def field(name, text):
    """A part of such a form."""
    return f'--b\r\nContent-Disposition: form-data; name="{name}"\r\n\r\n{text}\r\n'.encode()


def tiny(folder):
    """(model, tokenizer): random weights, a token a byte, a chat template."""
    save_model(folder, max_position_embeddings=2048)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = TEMPLATE
    return AutoModelForCausalLM.from_pretrained(folder).eval(), tokenizer


def until(condition, seconds=30):
    """Wait for a condition; its last value."""
    deadline = time.monotonic() + seconds
    while not (value := condition()) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert value
    return value


@contextmanager
def unused_is_expired(store, monkeypatch):
    """At the end of the block, delete what was used before it alone."""
    time.sleep(0.05)  # longer than the clocks of file systems take
    began = time.time()
    time.sleep(0.05)
    yield
    now = time.time()
    with monkeypatch.context() as patch:
        patch.setattr(time, "time", lambda: now)
        store.expire(now - began)


def slow_answers(monkeypatch, seconds=0.01):
    """Let each token of an answer take `seconds` longer."""
    push = Answer.push
    monkeypatch.setattr(Answer, "push", lambda self, *token: time.sleep(seconds) or push(self, *token))


class Server:
    """One service, served; ask it with `get`, `post`, `delete`, which give (status, content)."""

    def __init__(self, service: Service, key: str | None = None):
        self.service, self.key = service, key
        self._uvicorn = HttpServer(service, key)
        self._uvicorn.config.host, self._uvicorn.config.port = "127.0.0.1", 0
        self._thread = threading.Thread(target=self._uvicorn.run, daemon=True)
        self._thread.start()
        while not self._uvicorn.started:
            assert self._thread.is_alive()
            time.sleep(0.01)
        self.port = self._uvicorn.servers[0].sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"

    def stop(self) -> None:
        self._uvicorn.should_exit = True
        self._thread.join(60)
        assert not self._thread.is_alive()

    def open(self, path, body=None, method=None, **headers):
        """The open answer to a request; `body` as JSON unless it is bytes."""
        if body is not None and not isinstance(body, bytes):
            body, headers = json.dumps(body).encode(), {"Content-Type": "application/json", **headers}
        if self.key:
            headers.setdefault("Authorization", f"Bearer {self.key}")
        request = urllib.request.Request(self.url + path, body, headers, method=method)
        return urllib.request.urlopen(request, timeout=60)

    def ask(self, path, body=None, method=None, **headers):
        try:
            with self.open(path, body, method, **headers) as answer:
                status, data = answer.status, answer.read()
        except urllib.error.HTTPError as error:
            status, data = error.code, error.read()
        try:
            return status, json.loads(data)
        except ValueError:
            return status, data.decode()

    def problem(self, path, body=None, method=None, **headers):
        """(status, sentence) of an error in OpenAI's form."""
        status, content = self.ask(path, body, method, **headers)
        assert status >= 400 and set(content["error"]) == {"message", "type", "param", "code"}, content
        return status, content["error"]["message"]

    def compressed(self, text, **fields):
        """The id of a context of `text`, once it is there."""
        status, made = self.ask("/v1/contexts", {"text": text, **fields})
        assert status in (200, 202), made
        made = self.finished(made)
        assert made["status"] == "ready", made
        return made["id"]

    def finished(self, made):
        """A context that is ready or failed."""

        def finished():
            found = self.ask(f"/v1/contexts/{made['id']}")[1]
            return found["status"] != "compressing" and found

        return until(finished, 60)

    def chat(self, question, context=None, **fields):
        body = {"messages": [{"role": "user", "content": question}], "max_tokens": 8, "context": context, **fields}
        return self.ask("/v1/chat/completions", body)

    def answer(self, question, context=None, **fields):
        status, content = self.chat(question, context, **fields)
        assert status == 200, content
        return content["choices"][0]["message"]["content"]


def stock_answer(model, tokenizer, ids):
    out = model.generate(ids, max_new_tokens=6, do_sample=False)[0, ids.shape[1] :]
    return tokenizer.decode(out, skip_special_tokens=True).strip()


@contextmanager
def serving(model, tokenizer, store, key=None, **options):
    """A server of a service with these `options`."""
    settings = ServiceSettings(store=str(store), **{**KNORM, "grace": 5.0, **options})
    server = Server(Service(model, tokenizer, "tiny", settings), key)
    try:
        yield server
    finally:
        server.stop()
