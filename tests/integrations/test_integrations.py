"""What an integration says where its package is missing."""

import importlib
import sys

import pytest

from lkv.errors import MissingPackageError


def test_a_missing_harness_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    monkeypatch.delitem(sys.modules, "lkv.integrations.lm_eval", raising=False)
    with pytest.raises(MissingPackageError, match=r"lm_eval needs .*pip install .*\[lm-eval\]"):
        importlib.import_module("lkv.integrations.lm_eval")
