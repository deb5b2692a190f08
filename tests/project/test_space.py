"""The app of examples/space: its answers, and its page over HTTP where gradio is installed (`make test-space`)."""

import json
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request

import pytest

import lkv
from examples.space import app
from lkv.hf.loading import load_model
from tests.conftest import save_model
from tests.ports import free_port

NUMBER = "The telephone number of the harbour office is 5308."


def test_a_long_text_is_refused():
    for text, question in (("a" * 20_000, "?"), ("a", "?" * 20_000)):
        with pytest.raises(lkv.LkvError, match="have 20,001 characters; give at most 20,000"):
            app.compare(text, question, 10)


@pytest.mark.parametrize("end", ["", "\n"])
def test_names_of_files_are_texts(tmp_path, monkeypatch, end):
    monkeypatch.setattr(app, "load", lambda: load_model(str(save_model(tmp_path / "model"))))
    monkeypatch.setattr(app, "METHODS", {"Knorm": "knorm"})
    answers = [app.compare(f"{name}{end}", "Who?", 50)[0] for name in (__file__, __file__.replace("space", "spice"))]
    assert [size for _, size, _ in answers] == ["0.0", "0.0"]


@pytest.mark.slow
def test_lkv_answers_as_the_full_cache_from_a_tenth_of_its_bytes():
    full, learned, snapkv = app.compare(app.example_text(), app.QUESTION, 10)
    assert full == ["Full cache", "78.5", NUMBER]
    assert learned == ["LKV", "3.9", NUMBER]
    assert snapkv[:2] == ["SnapKV", "3.9"] and "5308" not in snapkv[2]


@pytest.mark.slow
def test_the_page_answers_over_http(tmp_path):
    pytest.importorskip("gradio", reason="gradio is not installed")
    port = str(free_port())
    env = os.environ | {"GRADIO_SERVER_NAME": "127.0.0.1", "GRADIO_SERVER_PORT": port, "GRADIO_ANALYTICS_ENABLED": "0"}
    url = f"http://127.0.0.1:{port}/gradio_api/call/answer"
    with (tmp_path / "log").open("w") as log:
        process = subprocess.Popen([sys.executable, app.__file__], env=env, stdout=log, stderr=log)
    try:
        body = json.dumps({"data": [app.example_text(), app.QUESTION, 10]}).encode()
        request = urllib.request.Request(url, body, {"Content-Type": "application/json"})
        with answer_when_ready(request) as reply:
            event = json.load(reply)["event_id"]
        with urllib.request.urlopen(f"{url}/{event}", timeout=600) as reply:
            data = [line.removeprefix("data: ") for line in reply.read().decode().splitlines() if "data: " in line]
    finally:
        process.terminate()
        try:
            process.wait(30)
        finally:
            process.kill()
    (table,) = json.loads(data[-1])
    assert table["headers"] == app.COLUMNS
    assert table["data"][:2] == [["Full cache", "78.5", NUMBER], ["LKV", "3.9", NUMBER]]


def answer_when_ready(request):
    """The reply of a server that is starting, within two minutes."""
    for _ in range(120):
        try:
            return urllib.request.urlopen(request, timeout=60)
        except urllib.error.URLError:
            time.sleep(1)
    raise TimeoutError("the app did not start")
