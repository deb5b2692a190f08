"""Extras: their packages are those of pyproject, and the command that installs them is right."""

import json
import re
import sys
from pathlib import Path

import pytest

from lkv.errors import MissingPackageError
from lkv.utils.extras import install_command, require

ROOT = Path(__file__).parents[2]


def test_one_sentence_names_all_that_is_missing(monkeypatch):
    for name in ("accelerate", "rouge", "wonderwords"):
        monkeypatch.setitem(sys.modules, name, None)
    expected = (
        "RULER needs accelerate, wonderwords and rouge, which are not installed; run `pip install -e '.[evals]'`."
    )
    with pytest.raises(MissingPackageError, match=f"^{re.escape(expected)}$"):
        require("evals", "RULER")


@pytest.mark.parametrize(
    ("origin", "requirement"),
    [
        (None, "lkv-cache[serve]"),  # from a package index
        ({"url": "{folder}/my%20lkv", "dir_info": {}}, "{path}/my lkv[serve]"),
        (
            {"url": "{folder}/lkv_cache-0-py3-none-any.whl", "archive_info": {}},
            "{path}/lkv_cache-0-py3-none-any.whl[serve]",
        ),
        ({"url": "{folder}", "dir_info": {}}, ".[serve]"),  # the working directory
        ({"url": "{folder}/removed", "dir_info": {}}, ".[serve]"),
        (
            {"url": "https://example.org/lkv", "vcs_info": {"vcs": "git", "commit_id": "0"}},
            "lkv-cache[serve] @ git+https://example.org/lkv",
        ),
        ({"url": "https://example.org/lkv.zip", "archive_info": {}}, "lkv-cache[serve] @ https://example.org/lkv.zip"),
    ],
)
def test_extras_are_installed_from_where_lkv_comes(tmp_path, monkeypatch, origin, requirement):
    info = tmp_path / "site" / "lkv_cache-0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: lkv-cache\nVersion: 0\n")
    if origin:
        url = origin["url"].format(folder=tmp_path.as_uri())
        (info / "direct_url.json").write_text(json.dumps(origin | {"url": url}))
    (tmp_path / "my lkv").mkdir()
    (tmp_path / "lkv_cache-0-py3-none-any.whl").touch()
    monkeypatch.syspath_prepend(info.parent)
    monkeypatch.setattr("lkv.utils.extras.__file__", str(info.parent / "lkv" / "utils" / "extras.py"))
    monkeypatch.chdir(tmp_path)
    assert install_command("serve") == f"pip install '{requirement.format(path=tmp_path)}'"


def test_extras_of_a_checkout_are_installed_from_it(tmp_path, monkeypatch):
    assert install_command("serve") == "pip install -e '.[serve]'"
    monkeypatch.chdir(tmp_path)
    assert install_command("serve") == f"pip install -e '{ROOT}[serve]'"
