"""Methods of requests, written short."""

from typing import Any

from lkv.methods import request
from lkv.methods.method import Method


def resolve_method(
    method: Any, model: Any = None, *, tokenizer: Any = None, tier_table: Any = None, **options: Any
) -> Method:
    """Resolve the request of `method` with these options."""
    return request.resolve_method(request.CompressionRequest(method=method, **options), model, tokenizer, tier_table)
