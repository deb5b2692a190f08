"""What an integration says where its package is missing."""

import importlib
import sys

import pytest

from lkv.errors import MissingPackageError


def test_a_missing_kvpress_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "kvpress", None)
    monkeypatch.delitem(sys.modules, "lkv.integrations.kvpress", raising=False)
    with pytest.raises(MissingPackageError, match=r"kvpress needs .*pip install .*\[kvpress\]"):
        importlib.import_module("lkv.integrations.kvpress")
