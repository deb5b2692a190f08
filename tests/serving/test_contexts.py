"""Contexts of a server: texts and conversations, their settings, and their ids."""

import json
from urllib.parse import quote

import pytest

from lkv.context.compression import compress
from lkv.serving.schemas import parse_context
from lkv.utils.prompts import render_messages
from tests.serving.server import (
    CALL,
    KNORM,
    OTHER,
    RESULT,
    SURE,
    TEXT,
    TOOLS,
    TOOLS_TEMPLATE,
    WHO,
    field,
    form,
    stock_answer,
)  # fmt: skip


def test_a_conversation_is_folded_and_continues(server, parts):
    model, tokenizer = parts
    turns = [
        {"role": "developer", "content": "Be brief."},
        WHO,
        {"role": "assistant", "content": f"{TEXT} So: nobody."},
    ]
    protect = [{"role": "system"}, "41 boats"]
    name = server.compressed(None, messages=turns, protect=protect, memory=None)
    own = compress(model, tokenizer, [turns[0] | {"role": "system"}, *turns[1:]], protect=protect, **KNORM)
    assert server.service.store.get(name).ids == own.ids
    assert server.service.store.get(name).cache.kept_counts() == own.cache.kept_counts()
    assert server.answer("Sure?", name) == own.ask("Sure?", 8)
    fields = (
        field("messages", json.dumps(turns)) + field("protect", json.dumps(protect[0])) + field("protect", "41 boats")
    )
    kind = {"Content-Type": "multipart/form-data; boundary=b"}
    assert server.ask("/v1/contexts", fields + b"--b--\r\n", **kind)[1]["id"] == name
    # With everything kept it is the stock model that reads the whole conversation.
    whole = server.compressed(None, messages=turns, retention=1.0)
    more = [SURE, {"role": "assistant", "content": "Yes."}, WHO]
    system = turns[0] | {"role": "system"}
    ids = tokenizer(
        render_messages(tokenizer, [system, *turns[1:], *more]), return_tensors="pt", add_special_tokens=False
    )["input_ids"]
    assert server.answer("", whole, messages=more, max_tokens=6) == stock_answer(model, tokenizer, ids)
    # The same conversation as a text is another context.
    assert server.compressed(tokenizer.decode(own.ids)) != name


def test_a_conversation_with_tools_is_folded_with_them(server, monkeypatch):
    tokenizer = server.service.tokenizer
    turns = [WHO, {"role": "assistant", "tool_calls": [CALL]}, RESULT, {"role": "assistant", "content": "Nobody."}]
    status, said = server.problem("/v1/contexts", {"messages": turns[::3], "tools": TOOLS})
    assert status == 400 and "chat template leaves tools out" in said
    monkeypatch.setattr(tokenizer, "chat_template", "{% for t in tools or [] %}{{ t }}{% endfor %}" + TOOLS_TEMPLATE)
    name = server.compressed(None, messages=turns, tools=TOOLS, retention=1.0)
    assert server.ask(f"/v1/contexts/{name}")[1]["tools"] == server.service.store.describe(name).tools == TOOLS
    assert server.compressed(None, messages=turns, retention=1.0) != name
    fields = [
        field(*each) for each in (("messages", json.dumps(turns)), ("tools", json.dumps(TOOLS)), ("retention", "1"))
    ]
    kind = {"Content-Type": "multipart/form-data; boundary=b"}
    assert server.ask("/v1/contexts", b"".join(fields) + b"--b--\r\n", **kind)[1]["id"] == name
    more = [SURE, {"role": "assistant", "content": None, "tool_calls": [CALL]}, RESULT]
    ids = tokenizer(
        f"{TOOLS[0]}[user]Who?</s>[assistant]<search x></s>[tool]41</s>[assistant]Nobody.</s>[user]Sure?</s>"
        "[assistant]<search x></s>[tool]41</s>[assistant]",
        return_tensors="pt",
        add_special_tokens=False,
    )["input_ids"]
    assert server.answer("", name, messages=more, max_tokens=6) == stock_answer(server.service.model, tokenizer, ids)
    status, said = server.problem("/v1/chat/completions", {"messages": [SURE], "tools": TOOLS, "context": name})
    assert status == 400 and "tools is not offered by this server" in said


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"text": "a", "tools": [{"type": "function", "function": {"name": ""}}]}, "tools: Expected tools such as {"),
        ({"text": "a", "tools": [{"name": "f"}]}, "tools: Expected tools such as {"),
        ({"text": "a", "tools": TOOLS * 2}, "tools: Expected tools of different names"),
        ({"text": "a", "tools": [TOOLS[0] | {"x": "a" * 100_000}]}, "tools: Expected at most 100,000 characters"),
        ({"messages": [WHO]}, "the conversation must end with an answer of the assistant"),
        ({"messages": [WHO], "text": "a"}, "a context is made of a text or of messages, not of both"),
        ({"messages": []}, "messages: List should have at least 1 item"),
        ({"messages": [WHO, RESULT, {"role": "assistant", "content": [{"type": "image_url"}]}]}, "other than text"),
        ({"messages": [{"role": "assistant", "content": "a"}], "system": "b"}, "among its messages; leave system out"),
        ({"messages": [{"role": "assistant", "content": "a"}], "protect": [{"role": "tool"}]}, "the role of a message"),
    ],
)
def test_what_is_no_conversation_is_refused(server, body, message):
    status, answer = server.ask("/v1/contexts", body)
    assert status == 400 and message in answer["error"]["message"]


def test_the_same_text_is_one_file(server, context):
    status, again = server.ask("/v1/contexts", {"text": TEXT})
    assert status == 200 and again["id"] == context and again["status"] == "ready"
    assert 0 < again["bytes"] < again["full_bytes"] and again["realised_retention"] == pytest.approx(0.4, abs=0.01)
    assert [one["id"] for one in server.ask("/v1/contexts")[1]["data"]].count(context) == 1
    assert server.ask("/v1/contexts", {"text": TEXT, "name": "again"})[1]["name"] == "again"
    assert server.ask(f"/v1/contexts/{context}")[1]["name"] == "again"


@pytest.mark.parametrize(
    "name",
    [
        'a"b.txt',
        "two\r\nlines.txt",
        "50%25.txt",
        "100%.txt",
        "a%20b%2F.txt",
        r"C:\new\a.txt",
        "Br\u00fccke; a=b.txt",
        "%0a",
    ],
)
def test_a_file_has_the_name_that_its_client_encodes(name):
    """As the HTML standard and urllib3 encode it, and by RFC 5987, as older clients do for what is not ASCII."""
    encoded = name.replace("\r", "%0D").replace("\n", "%0A").replace('"', "%22")
    sent = [f'filename="{encoded}"']
    sent += [f"filename=x; filename*={charset}''{quote(name, encoding=charset)}" for charset in ("utf-8", "ISO-8859-1")]
    for parameter in sent:
        body = form(TEXT.encode()).replace(b'filename="a.txt"', parameter.encode())
        assert parse_context(body, "multipart/form-data; boundary=b")[0].name == " ".join(name.split())


def test_a_context_within_a_memory(server, parts):
    own = compress(*parts, TEXT, method="knorm", memory=0.25)
    name = server.compressed(TEXT, memory="25%")
    assert server.compressed(TEXT, memory="0.25") == name
    _, described = server.ask(f"/v1/contexts/{name}")
    assert described["memory"] == "0.25" and described["retention"] is None
    assert described["bytes"] == own.nbytes() <= 0.25 * described["full_bytes"]
    assert described["realised_retention"] > 0.4
    assert server.answer("Who?", name) == own.ask("Who?", 8)


def test_protected_words_are_kept_and_belong_to_the_settings(server, parts):
    own = compress(*parts, TEXT, **KNORM, system="Be brief.", protect=["Be brief.", "41 boats"])
    plain = server.compressed(TEXT, system="Be brief.")
    name = server.compressed(TEXT, system="Be brief.", protect=["Be brief.", "41 boats"])
    assert name != plain == server.compressed(TEXT, system="Be brief.", protect=[])
    assert server.service.store.get(name).cache.kept_counts() == own.cache.kept_counts()
    assert server.service.store.get(name).metadata["protected_tokens"] == len("Be brief.") + 6 * len("41 boats")
    assert server.answer("Who?", name) == own.ask("Who?", 8)
    fields = field("system", "Be brief.") + field("protect", "Be brief.") + field("protect", "41 boats")
    kind = {"Content-Type": "multipart/form-data; boundary=b"}
    assert server.ask("/v1/contexts", fields + form(TEXT.encode()), **kind)[1]["id"] == name


def test_a_memory_that_is_written_in_other_ways_is_the_same(server):
    """Also as a number. However small: a byte is not a share, and neither is a share too small for decimals."""
    assert server.compressed(TEXT, memory=0.57) == server.compressed(TEXT, memory="57%")
    assert server.compressed(TEXT, memory=50_000) == server.compressed(TEXT, memory="50kB")
    for least in ("1B", "0.001kb", "0.001%"):
        status, made = server.ask("/v1/contexts", {"text": TEXT, "memory": least})
        assert status == 202
        described = server.finished(made)
        assert described["status"] == "failed" and "nothing of it would be kept" in described["error"], least


def test_a_system_prompt_is_compressed_or_begins_the_question(server, parts):
    own = compress(*parts, TEXT, **KNORM, system="Be brief.")
    name = server.compressed(TEXT, system="Be brief.")
    assert server.answer("Who?", name) == own.ask("Who?", 8)
    late = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Who?"}]
    assert server.answer("", name, messages=late) == own.ask("Be kind.\n\nWho?", 8)


def test_a_text_too_short_for_its_retention_is_a_failed_job(server):
    status, made = server.ask("/v1/contexts", {"text": "x", "retention": 0.01})
    assert status == 202
    made = server.finished(made)
    assert made["status"] == "failed" and "nothing of it would be kept" in made["error"]
    status, answer = server.chat("?", made["id"])
    assert status == 409 and "could not be made" in answer["error"]["message"]
    assert server.ask(f"/v1/contexts/{made['id']}", method="DELETE")[1]["deleted"] is True


def test_a_context_deleted_while_it_is_asked_answers_to_the_end(server, parts):
    name = server.compressed(OTHER + "!")
    own = compress(*parts, OTHER + "!", **KNORM)
    body = {"messages": [{"role": "user", "content": "Who?"}], "context": name, "max_tokens": 60, "stream": True}
    with server.open("/v1/chat/completions", body) as stream:
        first = stream.readline()
        deleted = server.ask(f"/v1/contexts/{name}", method="DELETE")[1]
        assert deleted == {"object": "context", "id": name, "deleted": True}
        rest = first + stream.read()
    events = [json.loads(line[6:]) for line in rest.decode().split("\n\n") if line.startswith("data: {")]
    assert "".join(event["choices"][0]["delta"].get("content", "") for event in events) == own.ask("Who?", 60)
    assert server.chat("Who?", name)[0] == 404
