"""A tiny model and a server of it."""

import pytest


@pytest.fixture(scope="module")
def parts(tmp_path_factory):
    """(model, tokenizer)."""
    helpers = pytest.importorskip("tests.serving.server", reason="the extra serve is not installed")
    return helpers.tiny(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def server(parts, tmp_path_factory):
    """A server with an empty store."""
    helpers = pytest.importorskip("tests.serving.server", reason="the extra serve is not installed")
    with helpers.serving(*parts, tmp_path_factory.mktemp("store")) as server:
        yield server
