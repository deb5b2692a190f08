"""Requests as clients send them: those of openai 3.57, langchain-openai 1.7, litellm 1.110 recorded."""

import openai
import pytest

WHO, SURE = {"role": "user", "content": "Who?"}, {"role": "user", "content": "Sure?"}
CALL = {"id": "call_1", "type": "function", "function": {"name": "search", "arguments": '{"q": "x"}'}}
RESULT = {"content": "41", "role": "tool", "tool_call_id": "call_1"}
TOOL = {"type": "function", "function": {"name": "f", "description": "d", "parameters": {"type": "object"}}}
USAGE = {"include_usage": True}
# A chat template that renders calls and results, beside the one of the server's tokenizer, which does not.
TOOLS_TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% for c in m.tool_calls or [] %}"
    "<{{ c.function.name }} {{ c.function.arguments.q }}>{% endfor %}</s>{% endfor %}[assistant]"
)


@pytest.mark.parametrize(
    "body",
    [
        {"messages": [WHO]},  # openai, litellm
        {"stream": False, "messages": [WHO]},  # LangChain
        {"stream": True, "messages": [WHO]},  # LangChain
        {"messages": [WHO], "temperature": 0, "max_tokens": 5, "stream": True},  # litellm
        {"stream": True, "messages": [WHO], "stream_options": USAGE, "temperature": 0.8, "top_p": 0.9},  # a chat page
        {"messages": [WHO], "stream": False, "max_completion_tokens": 1000},  # a chat page, for a title
        {"messages": [{**WHO, "name": "me"}], "user": "me", "n": 1, "tools": None, "response_format": {"type": "text"}},
    ],
)
def test_what_clients_send_by_default_is_answered(server, body):
    status, content = server.ask("/v1/chat/completions", {"model": "tiny", **body})
    assert status == 200 and ("data: [DONE]" in content if body.get("stream") else content["choices"])


@pytest.mark.parametrize("missing", [{"content": None}, {}])  # LangChain, litellm
def test_calls_of_tools_in_a_history_are_rendered_or_refused_by_name(server, monkeypatch, missing):
    messages = [WHO, {"role": "assistant", "tool_calls": [CALL], **missing}, RESULT, SURE]
    status, said = server.problem("/v1/chat/completions", {"messages": messages})
    assert status == 400 and "chat template leaves tool_calls out" in said
    tokenizer = server.service.tokenizer
    monkeypatch.setattr(tokenizer, "chat_template", TOOLS_TEMPLATE)
    plain = server.answer(
        "", messages=[{"role": "user", "content": "Who?</s>[assistant]<search x></s>[tool]41</s>[user]Sure?"}]
    )
    assert server.answer("", messages=messages) == plain


@pytest.mark.parametrize(
    ("field", "value"), [("tools", [TOOL]), ("response_format", {"type": "json_object"}), ("logprobs", True)]
)
def test_what_is_not_offered_is_refused_by_name(server, field, value):
    status, said = server.problem("/v1/chat/completions", {"messages": [WHO], field: value})
    assert status == 400 and said == f"{field} is not offered by this server; leave it out."


def test_models_are_retrieved_by_name(server, monkeypatch):
    monkeypatch.setattr(server.service, "name", "owner/a:b")
    context = server.compressed("The harbour of Lisse holds 41 boats.")
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    listed = {model.id: model for model in client.models.list()}
    for name in ("owner/a:b", f"owner/a:b:{context}"):
        assert client.models.retrieve(name) == client.models.retrieve(name) == listed[name]
    for name in ("owner/a", "owner/a:b:none"):
        with pytest.raises(openai.NotFoundError):
            client.models.retrieve(name)
