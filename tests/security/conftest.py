"""The server of the serving tests, and services without one."""

import pytest

from lkv.serving.schemas import ContextRequest
from lkv.serving.service import Service
from lkv.serving.settings import ServiceSettings
from tests.security.vllm_fakes import client, contexts, routes, store
from tests.serving.conftest import parts, server
from tests.serving.server import KNORM, TEXT, until

__all__ = ["client", "contexts", "make", "parts", "routes", "server", "store"]


@pytest.fixture
def make(parts, tmp_path):
    """A service in a folder of `tmp_path`, stopped at the end."""
    made = []

    def make(folder="", **options):
        made.append(Service(*parts, "tiny", ServiceSettings(store=str(tmp_path / folder), **KNORM | options)))
        return made[-1]

    yield make
    for service in made:
        service.stop(0)


def ready(service, title=""):
    """The id of the context of TEXT, once it is stored."""
    name = service.add(ContextRequest(text=TEXT, name=title)).id
    until(lambda: not service.registry.jobs())
    return name
