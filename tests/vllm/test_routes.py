"""The routes of contexts in vLLM's server, without a server: which fields name a context, and contexts being made."""

import asyncio
from importlib import import_module
from types import SimpleNamespace

import pytest

from lkv.errors import ContextPendingError, PromptError
from lkv.integrations.vllm.contexts import NewContext
from lkv.integrations.vllm.http import ContextRoutes
from lkv.serving.schemas import error_response
from lkv.serving.service import Job


@pytest.mark.parametrize(
    "body", [{"extra_body": {"context": "a"}}, {"vllm_xarg": {"lkv_context": "a"}}, {"extra_args": {"lkv_context": 1}}]
)
def test_a_context_in_a_field_that_vllm_ignores_is_refused(body):
    with pytest.raises(
        PromptError, match=f"'{next(iter(body))}' is no field that names a context; put 'context' beside"
    ):
        ContextRoutes().split_name({"model": "tiny", "messages": [], "metadata": {"context": "a"}, **body})
    assert ContextRoutes().split_name({"model": "tiny", "metadata": {"context": "a"}}) is None


@pytest.mark.parametrize("schema", ["chat_completion:ChatCompletionRequest", "completion:CompletionRequest"])
def test_no_field_of_vllm_resembles_the_field_of_a_context(schema):
    module, _, name = schema.partition(":")
    fields = getattr(import_module(f"vllm.entrypoints.openai.{module}.protocol"), name).model_fields
    ContextRoutes().split_name(dict.fromkeys(fields))


@pytest.mark.parametrize("is_sent_again", [False, True])
def test_a_text_sent_again_while_its_deleted_context_is_made_keeps_it(is_sent_again):
    deleted = []

    class Engine:
        async def generate(self, prompt, params, request):
            yield None

        async def collective_rpc(self, method, args):
            return [""]

    routes = ContextRoutes()
    routes._engine = Engine()
    store = SimpleNamespace(describe=lambda name: "stored", delete=deleted.append)
    text = NewContext(id="a", retention=0.5, sha256="", ids=[1, 2])
    job, second = (Job("a", "", "", None, 0.0, is_deleted=is_deleted) for is_deleted in (True, False))
    if is_sent_again:
        routes._jobs["a"] = second
    asyncio.run(routes._compress(SimpleNamespace(store=store), text, job))
    assert deleted == ([] if is_sent_again else ["a"])


def test_a_context_that_is_being_compressed_cannot_be_asked_yet():
    job, routes = Job("a", "", "", None, 0.0), ContextRoutes()
    routes._jobs["a"] = job
    routes.contexts = lambda: asyncio.sleep(0)
    for error, says in (
        (None, "is still being compressed; ask again"),
        ("too short.", "could not be made: too short."),
    ):
        job.error = error
        with pytest.raises(ContextPendingError, match=says) as raised:
            asyncio.run(routes.rewrite("/v1/chat/completions", {}, "a"))
        assert error_response(raised.value).status_code == 409
