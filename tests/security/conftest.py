"""The server of the serving tests, and services without one."""

import pytest

from lkv.serving.service import Service
from lkv.serving.settings import ServiceSettings
from tests.serving.conftest import parts, server
from tests.serving.server import KNORM

__all__ = ["make", "parts", "server"]


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
