"""The server of the serving tests."""

from tests.serving.conftest import parts, server

__all__ = ["parts", "server"]
