"""Methods of requests, written short."""

from typing import Any

from lkv.methods import resolve
from lkv.methods.method import Method
from lkv.methods.request import CompressionRequest


def resolve_method(
    method: Any, model: Any = None, *, tokenizer: Any = None, tier_table: Any = None, **options: Any
) -> Method:
    """Resolve the request of `method` with these options."""
    return resolve.resolve_method(CompressionRequest(method=method, **options), model, tokenizer, tier_table)
