"""Sources of RULER's examples."""

import pytest

from tests.ruler import write_sources


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    return write_sources(tmp_path_factory.mktemp("ruler"))
