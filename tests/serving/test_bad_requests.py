"""Requests that are wrong: each is refused with one sentence."""

import pytest

from tests.serving.server import TEXT, field, form, serving

STOP = "Expected a text of 1 to 200 characters, or a list of up to 4 such texts; check the request."
PROTECT = 'Expected up to 100,000 characters of the text, or {"role": "..."}; check the request.'


@pytest.mark.parametrize(
    ("body", "status", "says"),
    [
        (b"{", 400, "the body: Invalid JSON"), ([1], 400, "the body"), ({}, 400, "messages: this field is missing"),
        ({"messages": []}, 400, "messages"), ({"messages": [{"role": "user"}]}, 400, "messages.0: content is missing"),
        ({"messages": [{"role": "assistant", "content": "x"}]}, 400, "last message must be one of the user"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, 400, "other than text"),
        ({"messages": [{"role": "user", "content": " "}]}, 400, "the question is empty"),
        ({"messages": [{"role": "user", "content": "\ud800"}]}, 400, "the body: Invalid JSON"),
        ({"messages": [{"role": "user", "content": "x", "tool_calls": [{}]}]}, 400, "messages.0.tool_calls.0.function"),
        ({"messages": [{"role": "user", "content": None}]}, 400, "messages.0: content is missing"),
        *(({"stop": stop}, 400, f"stop: {STOP}") for stop in (5, "", "a" * 201, [5], ["end", ""], ["a"] * 5, {"a": 1})),
        *(({"messages": [{"role": "user", "content": content}]}, 400, "messages.0.content: Expected a text, or a list")
          for content in (5, [5], ["a"], {"type": "text"}, [{"type": "text", "text": "a"}] * 1001)),
        ({"model": "gpt-9"}, 404, "no model 'gpt-9' here, only 'tiny'"),
        ({"context": "../../etc/passwd"}, 404, "there is no context"),
        ({"model": "tiny:" + "a" * 32 + "-" + "b" * 16}, 404, "there is no context"),
        ({"model": "tiny:a", "context": "b"}, 400, "different contexts"), ({"max_tokens": 0}, 400, "max_tokens"),
        ({"messages": [{"role": "user", "content": "x" * 1500}], "max_tokens": 900}, 400, "reads at most 2048"),
        ({"messages": [{"role": "user", "content": "x" * 3000}]}, 400, "the model reads at most 2048"),
        ({"temperature": 9}, 400, "temperature: Input should be less than or equal to 2"),
        ({"temperature": "hot"}, 400, "temperature"),
        ({"n": 2}, 400, "n is not offered"), ({"tools": [{}]}, 400, "tools is not offered"),
        ({"logprobs": True}, 400, "logprobs is not offered by this server; leave it out."),
        ({"response_format": {"type": "json_object"}}, 400, "response_format is not offered"),
        ({"contxt": "a"}, 400, "contxt is not offered"),
        ({"vllm_xargs": {"lkv_context": "a"}}, 400, "vllm_xargs is not offered"), ({"context": ""}, 400, "context: "),
        ({"model": "tiny:"}, 400, "names no context after the colon"),
    ],
)  # fmt: skip
def test_bad_chats_get_one_sentence(server, body, status, says):
    if isinstance(body, dict) and body and "messages" not in body:
        body = {"messages": [{"role": "user", "content": "Hello"}], **body}
    found = server.problem("/v1/chat/completions", body, **{"Content-Type": "application/json"})
    assert found[0] == status and says in found[1], found
    assert "Traceback" not in found[1] and "\n" not in found[1]


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ({"text": ""}, "the text is empty"), ({"text": " \n"}, "the text is empty"), ({}, "text: this field is"),
        *(({"text": "x", "protect": [words]}, f"protect.0: {PROTECT}") for words in (5, [], {"role": "X"}, {"a": "b"})),
        ({"text": 5}, "text: Input should be a valid string"), ({"text": "x" * 5000}, "the model reads at most 2048"),
        ({"text": "x", "memory": "2 pounds"}, "memory is '2 pounds'; give a share"),
        ({"text": "x", "memory": "10%", "retention": 0.2}, "both say how much to keep"),
        ({"text": "x", "retention": 2}, "must lie in (0, 1]"), ({"text": "x", "system": " "}, "system prompt is empty"),
        ({"text": "a b", "protect": ["c"]}, "does not contain 'c'"), ({"text": "x", "protect": [""]}, "span is empty"),
        ({"text": "x", "protect": "x"}, "protect: Input should be a valid"),
        ({"text": "x", "retain": 0.5}, "retain: there is no such field; the fields are messages, text, name, system, "),
        ({"text": "x", "file": "y"}, "file: there is no such field; the fields are messages, text, name, "),
        ({"text": "x", "memory": True}, "memory: Expected a share"), ({"text": "x", "memory": 1.5}, "memory is 1.5"),
        ({"text": "x", "memory": 0}, "memory: Expected a share"), ({"text": "x", "memory": [1]}, "memory: Expected"),
        ({"text": "x", "memory": "1" * 21}, "memory: Expected a share"),
        ({"text": "a\0b"}, "the text holds NUL characters, the first at 1"),
        (b"{", "Invalid JSON"), ({"text": "x" * 10**5}, "the text has 100,000 characters, too many"),
    ],
)  # fmt: skip
def test_bad_texts_get_one_sentence(server, body, says):
    status, said = server.problem("/v1/contexts", body, **{"Content-Type": "application/json"})
    assert status == 400 and says in said, said


FIELD = field("name", "Brücke").replace("ü".encode(), b"\xfc")


@pytest.mark.parametrize(
    ("body", "more", "says"),
    [
        (form(b"\x01\x02\0\x03" * 9), "", "a.txt cannot be read as text"),
        (form(b"%PDF-1.4 nothing"), "", "a.txt "), (field("text", "a\0b") + b"--b--\r\n", "", "holds NUL characters"),
        (form(b""), "", "a.txt has no text"), (b"nonsense", "", "the form is incomplete"),
        (FIELD * 9 + form(b"text"), "", "has more than 8 fields"), (form(b"x")[:-6], "", "the form is incomplete"),
        (form(b"text"), "; charset=punycode", "another charset than UTF-8"),
        (FIELD + form(b"text"), "", "the form's field 'name' is not UTF-8 text"),
        (form(b"text").replace(b'"file"', b'"fil"'), "", "fil: there is no such field; the fields are messages, "),
        (form(b"text").replace(b'"file"', b'"fil"'), "", "and in a form file."),
        (form(b"a.txt").replace(b'; filename="a.txt"', b""), "", "'file' is not a file; write file=@PATH"),
        (field("text", "text") + form(b"text"), "", "a file and a text; send one"),
        (form(b"text")[:-9] + b"\r\n" + form(b"text"), "", "has the field 'file' twice"),
        (field("tools", "[{]") + form(b"text"), "", "the form's field 'tools' is not JSON ("),
        (b"--b\r\nX: " + b"y" * 3000 + b"\r\n\r\ntext\r\n--b--\r\n", "", "no headers, or too long ones"),
    ],
)  # fmt: skip
def test_bad_forms_get_one_sentence(server, body, more, says):
    kind = "multipart/form-data; boundary=b" + more
    status, said = server.problem("/v1/contexts", body, **{"Content-Type": kind})
    assert status == 400 and says in said


def test_a_urlencoded_form_is_refused(server):
    """JSON of that type, which `curl -d` sends, is read."""
    kind = {"Content-Type": "application/x-www-form-urlencoded"}
    status, said = server.problem("/v1/contexts", b"text=The+keeper", **kind)
    assert status == 400 and said.startswith("a urlencoded form is not read; send JSON such as"), said
    assert server.ask("/v1/contexts", b' {"text": "The keeper lit the lamp."}', **kind)[0] in (200, 202)


def test_a_query_is_refused(server):
    status, said = server.problem("/v1/contexts?memory=10%25", {"text": TEXT})
    assert status == 400 and "the query of the URL is not read" in said


def test_unknown_paths_and_methods(server):
    assert server.problem("/v2")[1].startswith("GET /v2: Not Found; the server has /v1/chat/completions, ")
    assert server.problem("/v1/contexts", b"", "PUT")[0] == 405
    for method in ("GET", "DELETE"):
        assert server.problem("/v1/contexts/nothing", method=method)[0] == 404


def test_strangers_are_refused(server):
    assert server.problem("/healthz", Host="evil.example")[0] == 421
    assert server.problem("/v1/contexts", {"text": "x"}, Origin="http://evil.example")[0] == 403
    assert server.ask("/healthz", Origin=server.url)[0] == 200


def test_a_server_behind_a_proxy_has_the_names_that_it_is_given(parts, tmp_path):
    with serving(*parts, tmp_path, key="secret", allowed_hosts=["LKV.example.com"]) as server:
        for host in ("lkv.example.com", "127.0.0.1:80", "lkv.example.com:8443"):
            assert server.ask("/v1/models", Host=host, Origin="https://lkv.example.com")[0] == 200
        assert server.ask("/v1/models", Host="lkv.example.com", Authorization="")[0] == 401
        status, said = server.problem("/v1/models", Host="evil.example")
        assert status == 421 and said.startswith("the server accepts requests to localhost, lkv.example.com only, not")
        for origin in ("https://evil.example", "https://lkv.example.com.evil.example", "null", "http://127.0.0.1:1"):
            assert server.problem("/v1/models", Host="lkv.example.com", Origin=origin)[0] == 403


def test_health_checks_may_use_head(server):
    for path in ("/health", "/healthz"):
        assert server.ask(path) == (200, "ok\n") and server.ask(path, method="HEAD") == (200, "")
