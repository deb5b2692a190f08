"""The server's log: a line for each request and each text, and the metrics of requests."""

import json
import logging
import re
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import redirect_stderr

import pytest
from tqdm import tqdm

import lkv
from lkv.context.document_reader import parse_document
from lkv.serving.middleware import Facts, JsonFormatter, LineLogger
from lkv.serving.service import Service
from tests.conftest import save_model
from tests.ports import free_port
from tests.serving.server import OTHER, TEXT, field, form, serving, slow_answers, until

FORM = {"Content-Type": "multipart/form-data; boundary=b"}


@pytest.fixture
def lines(caplog):
    """The facts of the requests logged so far, which are added when responses have ended."""
    caplog.set_level(logging.INFO, "lkv")

    def lines(path):
        messages = [record.getMessage() for record in caplog.records if record.name.endswith("middleware")]
        found = [re.findall(r'(\w+)=("(?:[^"\\]|\\.)*"|\S+)', message) for message in messages]
        facts = [{name: json.loads(value) if value[0] == '"' else value for name, value in line} for line in found]
        return [each for each in facts if each["path"] == path]

    return lines


def test_a_question_is_logged_with_its_context_tokens_time_and_status(server, lines):
    name = server.compressed(TEXT)
    status, answer = server.chat("Who?", name)
    (line,) = until(lambda: lines("/v1/chat/completions"))
    usage = answer["usage"]
    assert float(line.pop("seconds")) > 0
    assert line == {
        "method": "POST", "path": "/v1/chat/completions", "status": str(status), "id": answer["id"], "context": name,
        "prompt_tokens": str(usage["prompt_tokens"]), "completion_tokens": str(usage["completion_tokens"]),
        "finish": answer["choices"][0]["finish_reason"],
    }  # fmt: skip
    assert until(lambda: lines("/v1/contexts"))[0]["context"] == name
    server.chat("Who?", model=f"tiny:{name}", stream=True)
    streamed = until(lambda: lines("/v1/chat/completions")[1:])[0]
    assert (streamed["context"], streamed["completion_tokens"]) == (name, line["completion_tokens"])
    assert "Who?" not in str(lines("/v1/chat/completions"))  # texts are not logged


def test_refused_requests_and_clients_that_have_gone_are_logged(server, lines, monkeypatch):
    server.problem("/v1/chat/completions", {"messages": []})
    assert until(lambda: lines("/v1/chat/completions"))[0]["status"] == "400"
    server.ask("/v1/no%0Athing%22x", Host="elsewhere")
    assert until(lambda: lines('/v1/no\nthing"x'))[0]["status"] == "421"
    slow_answers(monkeypatch)
    body = json.dumps({"messages": [{"role": "user", "content": "Who?"}], "max_tokens": 900}).encode()
    with socket.create_connection(("127.0.0.1", server.port)) as client:
        client.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\n"
                       b"Content-Length: %d\r\n\r\n" % len(body) + body)  # fmt: skip
        until(lambda: server.service.answers.open)
    gone = until(lambda: lines("/v1/chat/completions")[1:])[0]
    assert gone["finish"] == "cancelled" and int(gone["completion_tokens"]) < 900


def test_metrics_count_requests_by_route_and_status_and_their_seconds(parts, tmp_path):
    with serving(*parts, tmp_path) as server:
        name = server.compressed(TEXT)
        for _ in range(3):
            server.chat("Who?", name)
        server.ask("/v1/chat/completions", {"messages": []})
        for path in ("/no", "/path", "/v1/contexts/none", "/v1/contexts/no"):
            server.ask(path)
        page = server.ask("/metrics")[1]
        for line in (
            'lkv_requests_total{route="/v1/chat/completions",status="200"} 3.0',
            'lkv_requests_total{route="/v1/chat/completions",status="400"} 1.0',
            'lkv_requests_total{route="/v1/contexts/{name}",status="404"} 2.0',
            'lkv_requests_total{route="other",status="404"} 2.0',
            'lkv_request_seconds_count{route="/v1/chat/completions"} 4.0',
            'lkv_request_seconds_bucket{le="+Inf",route="/v1/chat/completions"} 4.0',
        ):
            assert f"\n{line}\n" in page, page


def test_texts_that_a_stop_leaves_uncompressed_are_named(parts, tmp_path, monkeypatch, caplog):
    release, plain = threading.Event(), Service._make_context

    def slow(self, job):
        assert release.wait(30)
        return plain(self, job)

    monkeypatch.setattr(Service, "_make_context", slow)
    with serving(*parts, tmp_path, grace=0) as server:
        ids = [server.ask("/v1/contexts", {"text": text, "name": "a b"})[1]["id"] for text in (TEXT, OTHER)]
        until(lambda: sum(job.is_started for job in server.service.registry.jobs()) == 1)
        stopping = threading.Thread(target=server.stop)
        stopping.start()
        until(lambda: server.service.registry.is_closed)
        release.set()
        stopping.join()
    messages = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    for name in ids:
        assert f'send it again: context={name} name="a b" progress=0.0' in " ".join(messages)
    with serving(*parts, tmp_path) as server:
        assert server.ask("/v1/contexts")[1]["data"] == []


def test_texts_are_logged_when_compressed_and_when_not(server, caplog, monkeypatch):
    caplog.set_level(logging.INFO, "lkv")
    name = server.compressed(OTHER)
    line = next(
        record.getMessage() for record in caplog.records if f"compressed context={name} " in record.getMessage()
    )
    assert re.search(r" seconds=\d+\.\d+ tokens=\d+ bytes=\d+$", line)
    status, made = server.ask("/v1/contexts", {"text": OTHER, "memory": "1B"})
    assert status == 202 and server.finished(made)["status"] == "failed"
    assert f"not compressed context={made['id']} " in caplog.text


def test_a_context_says_what_its_file_held_beside_its_text_and_keeps_its_time(parts, tmp_path):
    page = b"<!doctype html><title>Lisse</title><script>1</script><p>The harbour of Lisse holds 41 boats.</p>"
    document = parse_document(page, "a.txt")
    with serving(*parts, tmp_path) as server:
        status, made = server.ask("/v1/contexts", field("retention", "1") + form(page), **FORM)
        ready = server.finished(made)
        assert (status, ready["status"]) == (202, "ready")
        assert made["skipped"] == ready["skipped"] == document.skipped != []
        assert server.compressed(document.text, retention=1.0) == made["id"]
        assert made["created"] == ready["created"]
        plain = server.ask(f"/v1/contexts/{server.compressed(TEXT)}")[1]
        assert plain["skipped"] is None
    with serving(*parts, tmp_path) as server:
        assert server.ask(f"/v1/contexts/{made['id']}")[1] == ready


def test_facts_of_clients_stay_one_line():
    assert str(Facts(a=1, b="x y\n=", c="é\u2028", d="")) == 'a=1 b="x y\\n=" c="\\u00e9\\u2028" d=""'


def test_lines_in_json_have_facts_as_fields(server, caplog):
    caplog.set_level(logging.INFO, "lkv")
    name = server.compressed(TEXT + "In JSON.")
    answer = server.chat("Who?", name)[1]

    def lines():
        lines = [json.loads(JsonFormatter().format(record)) for record in caplog.records]
        return {line["path"] if "path" in line else line["message"]: line for line in lines}

    asked = until(lambda: lines().get("/v1/chat/completions"))
    assert (asked["message"], asked["id"], asked["context"]) == ("request", answer["id"], name)
    assert (asked["status"], asked["completion_tokens"]) == (200, answer["usage"]["completion_tokens"])
    assert asked["time"].endswith("+00:00") and asked["seconds"] > 0
    assert lines()["compressed"]["context"] == name and lines()["compressed"]["bytes"] > 0
    try:
        raise ValueError("of \n two lines")
    except ValueError:
        logging.getLogger("lkv.test").exception("failed %d", 1)
    assert "ValueError: of \n two lines" in lines()["failed 1"]["exception"]


def ask_raw(server, body):
    """An open connection on which a question was sent."""
    data = json.dumps({"messages": [{"role": "user", "content": "Who?"}], "max_tokens": 900, **body}).encode()
    client = socket.create_connection(("127.0.0.1", server.port))
    client.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\n"
                   b"Content-Length: %d\r\n\r\n" % len(data) + data)  # fmt: skip
    return client


def test_clients_that_go_are_counted_as_499(parts, tmp_path, lines, monkeypatch):
    slow_answers(monkeypatch)
    with serving(*parts, tmp_path) as server:
        with ask_raw(server, {}):
            until(lambda: server.service.answers.open)
        (gone,) = until(lambda: lines("/v1/chat/completions"))
        assert (gone["status"], gone["finish"]) == ("499", "cancelled")
        with socket.create_connection(("127.0.0.1", server.port)) as client:  # a body without its end
            client.sendall(b"POST /v1/contexts HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 100\r\n\r\n{")
            time.sleep(0.2)
        assert until(lambda: lines("/v1/contexts"))[0]["status"] == "499"
        page = server.ask("/metrics")[1]
    assert 'lkv_requests_total{route="/v1/chat/completions",status="499"} 1.0' in page
    assert "_created" not in page


def test_refusals_are_logged_with_their_reason_and_context(parts, tmp_path, lines, caplog, monkeypatch):
    with serving(*parts, tmp_path) as server:
        server.problem("/v1/chat/completions", {"messages": [{"role": "user", "content": "?"}], "context": "none"})
        (missing,) = until(lambda: lines("/v1/chat/completions"))
        assert (missing["status"], missing["code"], missing["context"]) == ("404", "not_found_error", "none")
        assert missing["error"].startswith("there is no context")
        name = server.compressed(TEXT)
    (file,) = tmp_path.glob("*.kv")
    file.write_bytes(file.read_bytes()[:-100])
    with serving(*parts, tmp_path) as server:
        status, said = server.problem("/v1/chat/completions", {"messages": [{"role": "user", "content": "?"}],
                                                               "context": name})  # fmt: skip
        damaged = until(lambda: lines("/v1/chat/completions")[1:])[0]
        assert (status, damaged["code"], damaged["context"]) == (409, "unreadable_context", name)
        assert damaged["error"] == said
        monkeypatch.setattr(Service, "ask", lambda *_: 1 / 0)
        assert server.chat("Who?")[0] == 500
        assert until(lambda: lines("/v1/chat/completions")[2:])[0]["status"] == "500"
    levels = [record.levelname for record in caplog.records if "/v1/chat/completions" in record.getMessage()]
    assert levels == ["INFO", "WARNING", "WARNING"]


def test_an_answer_longer_than_the_grace_is_cut_off_with_a_warning(parts, tmp_path, monkeypatch, caplog):
    slow_answers(monkeypatch)
    caplog.set_level(logging.INFO)
    with ThreadPoolExecutor() as pool:
        with serving(*parts, tmp_path, grace=0.5) as server:
            streamed = ask_raw(server, {"stream": True})
            whole = pool.submit(server.chat, "Who?", max_tokens=900)
            late = socket.create_connection(("127.0.0.1", server.port))  # a body whose end comes after the stop
            late.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 51\r\n\r\n")
            until(lambda: [answer for answer in server.service.answers._open if len(answer.ids) > 9][1:])
            stopping = threading.Thread(target=server.stop)
            stopping.start()
            until(lambda: server.service.registry.is_closed)
            late.sendall(b'{"messages": [{"role": "user", "content": "Who?"}]}')
            stopping.join()
            with late:
                assert late.recv(100).startswith(b"HTTP/1.1 429 ")
        status, answer = whole.result()
    with streamed:
        data = b"".join(iter(lambda: streamed.recv(2**16), b"")).decode()
    events = [json.loads(event) for event in re.findall(r"^data: (\{.*\})\r?$", data, re.MULTILINE)]
    assert "data: [DONE]" in data and events[-1]["choices"][0]["finish_reason"] == "length"
    assert "was stopped before this answer was complete" in events[-1]["warning"]
    assert status == 200 and answer["choices"][0]["finish_reason"] == "length" and "was stopped" in answer["warning"]
    assert not [record for record in caplog.records if record.exc_info]
    assert {"started", "stopped"} <= {record.getMessage().split(":")[0] for record in caplog.records}
    with pytest.raises(OSError, match="refused"):
        socket.create_connection(("127.0.0.1", server.port))


@pytest.mark.parametrize(
    ("timeout", "says"), [(0.02, "took more than 0.02 seconds"), (60, "server was stopped before")]
)
def test_an_answer_that_is_cut_off_before_its_text_gets_504(parts, tmp_path, lines, monkeypatch, timeout, says):
    slow_answers(monkeypatch, 0.6)
    with ThreadPoolExecutor() as pool:
        with serving(*parts, tmp_path, grace=0, timeout=timeout) as server:
            asked = pool.submit(server.chat, "Who?")
            until(lambda: server.service.answers.open or asked.done())
        status, content = asked.result()
    assert status == 504 and says in content["error"]["message"]
    (line,) = until(lambda: lines("/v1/chat/completions"))
    assert (line["status"], line["finish"]) == ("504", "length") and says in line["error"]


def test_a_second_interrupt_ends_answers_at_once(parts, tmp_path, monkeypatch, caplog):
    slow_answers(monkeypatch)
    with serving(*parts, tmp_path, grace=600) as server, ask_raw(server, {"stream": True}) as client:
        until(lambda: server.service.answers.open)
        server._uvicorn.force_exit = True
        server.stop()  # which waits for a minute at most
        assert b"was stopped before this answer was complete" in b"".join(iter(lambda: client.recv(2**16), b""))
    assert not [record for record in caplog.records if record.exc_info]


def test_what_is_printed_on_stderr_becomes_lines_in_json(capsys):
    handler = logging.StreamHandler()
    handler.setFormatter(JsonFormatter())
    with redirect_stderr(LineLogger(handler)):
        print("downloading a model", file=sys.stderr)
        for _ in tqdm(range(3), desc="bar"):
            pass
        print("\n\ntwo\nlines", file=sys.stderr)
    found = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    messages = [line["message"] for line in found]
    assert messages[::2] == ["downloading a model", "two"] and messages[3:] == ["lines"]
    assert messages[1].startswith("bar: 100%") and {line["level"] for line in found} == {"INFO"}


@pytest.mark.slow
def test_a_server_in_json_writes_only_json_and_ends_with_status_0(tmp_path):
    save_model(tmp_path / "model")
    port = free_port()
    words = ["--model", tmp_path / "model", "--method", "knorm", "--log-format", "json", "--port", str(port)]
    command = [sys.executable, "-m", "lkv", "serve", *words, "--store", tmp_path / "store"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        errors = []
        for line in process.stderr:
            errors.append(json.loads(line))
            if errors[-1]["message"] == "started":
                break
        process.terminate()
        out, rest = process.communicate(timeout=60)
    errors += [json.loads(line) for line in rest.splitlines()]
    assert (process.returncode, out) == (0, "")
    started = next(line for line in errors if line["message"] == "started")
    assert (started["model"], started["version"]) == ("model", lkv.__version__)
    assert started["address"] == f"http://127.0.0.1:{port}" and errors[-1]["message"] == "stopped"
