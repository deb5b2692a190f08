"""What an integration says where its package is missing."""

import importlib
import sys

import pytest

from lkv.errors import MissingPackageError


def test_a_missing_harness_is_named(monkeypatch):
    for name in {"lm_eval", *(name for name in sys.modules if name.startswith("lm_eval."))}:
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.delitem(sys.modules, "lkv.integrations.lm_eval", raising=False)
    with pytest.raises(MissingPackageError, match=r"lm_eval needs .*pip install .*\[lm-eval\]"):
        importlib.import_module("lkv.integrations.lm_eval")
