"""A tiny model and a server of it."""

import pytest

from tests.serving.server import serving, tiny


@pytest.fixture(scope="module")
def parts(tmp_path_factory):
    """(model, tokenizer)."""
    return tiny(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def server(parts, tmp_path_factory):
    """A server with an empty store."""
    with serving(*parts, tmp_path_factory.mktemp("store")) as server:
        yield server
