"""Limits of a server, its key, its end, and what it does not start with."""

import http.client
import socket
import threading
from concurrent.futures import ThreadPoolExecutor

import openai
import pytest

from lkv.cli.main import main, parse_arguments
from lkv.cli.serve import check_port, read_api_key
from lkv.context.compression import compress
from lkv.errors import ServerError
from lkv.serving.service import Service
from tests.conftest import save_model
from tests.ports import free_port
from tests.serving.server import KNORM, TEXT, form, serving, slow_answers, until


def test_a_key_and_limits(parts, tmp_path, monkeypatch):
    limits = {"max_upload": 3000 / 2**20, "max_requests": 1, "max_texts": 1, "max_tokens": 900, "timeout": 2}
    slow_answers(monkeypatch)
    with serving(*parts, tmp_path, key="secret", host="0.0.0.0", **limits) as server:
        assert server.ask("/healthz", Authorization="")[0] == server.ask("/", Authorization="")[0] == 200
        assert server.ask("/v1/models", Authorization="bearer secret")[0] == 200
        for wrong in ("", "Bearer wrong", "secretBearer "):
            status, said = server.problem("/v1/models", Authorization=wrong)
            assert status == 401 and "the key is missing or wrong" in said
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="wrong", max_retries=0)
        with pytest.raises(openai.AuthenticationError):
            client.models.list()
        assert server.ask("/v1/models", Host="elsewhere.example")[0] == 200
        status, said = server.problem("/v1/contexts", {"text": "x" * 4000})
        assert status == 413 and "larger than 3,000 bytes" in said
        for kind, path in (("application/json", "/v1/contexts"), ("application/json", "/v1/chat/completions"),
                           ("multipart/form-data; boundary=b", "/v1/contexts")):  # fmt: skip
            sent = http.client.HTTPConnection("127.0.0.1", server.port, timeout=30)
            headers = {"Authorization": "Bearer secret", "Content-Type": kind}
            pieces = iter([form(b"")[:70], *[b"x" * 500] * 9])  # of a length that is not told
            sent.request("POST", path, pieces, headers, encode_chunked=True)
            answer = sent.getresponse()
            assert answer.status == 413 and b"larger than 3,000 bytes" in answer.read()
            sent.close()
        name = server.compressed(TEXT)
        # Longer than the time that an answer may take, and the one request at once that is served.
        with ThreadPoolExecutor() as pool:
            long = pool.submit(server.chat, "Who?", name, max_tokens=900)
            until(lambda: server.service.answers.open)
            status, refused = server.chat("Who?", name)
            assert status == 429 and "ask again later" in refused["error"]["message"]
        status, late = long.result()  # its beginning
        assert status == 200 and "took more than 2 seconds" in late["warning"]
        assert late["choices"][0]["message"]["content"] and late["choices"][0]["finish_reason"] == "length"
        until(lambda: not server.service.answers.open)


def waiting_texts(server):
    return [job for job in server.service.registry.jobs() if not job.is_started]


def test_texts_beyond_those_that_may_wait_get_429(parts, tmp_path, monkeypatch):
    release = threading.Event()
    plain = Service._compress

    def slow(self, job):
        release.wait(30)
        plain(self, job)

    monkeypatch.setattr(Service, "_compress", slow)
    with serving(*parts, tmp_path, max_texts=1) as server:
        first = server.ask("/v1/contexts", {"text": "one " * 9})[1]
        until(lambda: not waiting_texts(server))
        second = server.ask("/v1/contexts", {"text": "two " * 9})[1]
        assert server.ask("/v1/contexts", {"text": "one " * 9})[1]["id"] == first["id"]
        assert server.problem("/v1/contexts", {"text": "three " * 9})[0] == 429
        status, answer = server.chat("?", first["id"])
        assert status == 409 and "is still being compressed; ask again" in answer["error"]["message"]
        for _ in range(3):  # a deleted text waits no longer
            assert server.ask(f"/v1/contexts/{second['id']}", method="DELETE")[0] == 200
            assert not waiting_texts(server)
            status, second = server.ask("/v1/contexts", {"text": "two " * 9})
            assert status == 202
        assert server.ask(f"/v1/contexts/{second['id']}", method="DELETE")[0] == 200
        release.set()
        assert server.finished(first)["status"] == "ready"
        assert [one["id"] for one in server.ask("/v1/contexts")[1]["data"]] == [first["id"]]


def test_a_stop_lets_answers_end(parts, tmp_path, monkeypatch):
    slow_answers(monkeypatch)
    with ThreadPoolExecutor() as pool, serving(*parts, tmp_path, grace=30) as server:
        name = server.compressed(TEXT)
        asking = pool.submit(server.answer, "Who?", name, max_tokens=40)
        until(lambda: server.service.answers.open)
    assert asking.result() == compress(*parts, TEXT, **KNORM).ask("Who?", 40) and server.service.answers.open == 0


def test_the_folder_in_which_it_starts_is_a_model_with_a_name(tmp_path, monkeypatch):
    monkeypatch.chdir(save_model(tmp_path / "tiny"))
    words = ["serve", "--model", ".", "--method", "knorm", "--store", str(tmp_path / "store")]
    service = parse_arguments(words).make_service()
    service.stop(0)
    assert service.name == "tiny"


def test_a_key_is_needed_where_others_can_reach_it(monkeypatch):
    monkeypatch.delenv("LKV_API_KEY", raising=False)
    assert read_api_key("127.0.0.1") is read_api_key("localhost") is None
    with pytest.raises(ServerError, match=r"0.0.0.0 can be reached by others: set LKV_API_KEY"):
        read_api_key("0.0.0.0")
    monkeypatch.setenv("LKV_API_KEY", "x")
    assert read_api_key("0.0.0.0") == "x"
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(ServerError, match="is already in use"):
            check_port("127.0.0.1", taken.getsockname()[1])


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--host", "0.0.0.0"], "set LKV_API_KEY"), (["--method", "full"], "cannot be stored"),
        (["--allowed-hosts", "lkv.example.com"], "lkv.example.com can be reached by others: set LKV_API_KEY"),
        (["--allowed-hosts", "https://a.b"], "but must be a host name without scheme and port, such as lkv.example"),
        (["--retention", "2"], "must lie in (0, 1]"), (["--grace", "nan"], "--grace is nan"),
        (["--grace", "inf"], "--grace is inf"), (["--contexts-memory", "inf"], "--contexts-memory is inf"),
        (["--timeout", "inf"], "--timeout is inf"),
        (["--store", "nosuch://place", "--method", "knorm", "--model", "{model}"], "Protocol not known"),
        (["--model", "{nothing}"], "could be loaded"), (["--vllm-args=--enforce-eager"], "needs --engine vllm"),
        (["--policy", "smollm2-135m-instruct", "--method", "knorm"], "takes no --policy"),
        (["--engine", "vllm", "--timeout", "300", "--device", "cpu"], "does not read --device, --timeout; leave them"),
    ],
)  # fmt: skip
def test_a_server_that_cannot_be_says_so(words, says, monkeypatch, capsys, tmp_path):
    monkeypatch.delenv("LKV_API_KEY", raising=False)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    if "{model}" in words:
        save_model(tmp_path / "model")
    (tmp_path / "nothing").mkdir()
    words = [word.format(model=tmp_path / "model", nothing=tmp_path / "nothing") for word in words]
    assert main(["serve", "--port", str(free_port()), *words]) == 2
    said = capsys.readouterr().err
    assert says in said and "Traceback" not in said
