"""The server's log: a line for each request and each text, and the metrics of requests."""

import json
import logging
import re
import socket
import threading

import pytest

from lkv.context.document_reader import parse_document
from lkv.serving.middleware import Facts, JsonFormatter
from lkv.serving.service import Service
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
