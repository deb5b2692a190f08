"""A tiny model and a server of it."""

import pytest

from lkv.context.compression import compress
from tests.serving.server import KNORM, QUESTIONS, TEXT, serving, tiny


@pytest.fixture(scope="module")
def parts(tmp_path_factory):
    """(model, tokenizer)."""
    return tiny(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def server(parts, tmp_path_factory):
    """A server with an empty store."""
    with serving(*parts, tmp_path_factory.mktemp("store")) as server:
        yield server


@pytest.fixture(scope="module")
def context(server):
    return server.compressed(TEXT, name="harbour")


@pytest.fixture(scope="module")
def expected(parts):
    own = compress(*parts, TEXT, **KNORM)
    return {question: own.ask(question, 8) for question in QUESTIONS}
