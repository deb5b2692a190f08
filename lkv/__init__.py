"""LKV: learned KV cache eviction for transformers models.

Public names are imported on first use, so `import lkv` alone does not import torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from lkv.errors import LkvError as LkvError
from lkv.version import __version__ as __version__

if TYPE_CHECKING:
    from lkv.cache.ragged_cache import RaggedCache as RaggedCache
    from lkv.context.chat import Chat as Chat
    from lkv.context.compress_prefill import compress_prefill as compress_prefill
    from lkv.context.compression import compress as compress
    from lkv.context.context import Context as Context
    from lkv.context.document_reader import read_document as read_document
    from lkv.context.pipeline import pipeline as pipeline
    from lkv.hf.attention import attention_patched as attention_patched
    from lkv.hf.attention import patch_attention as patch_attention
    from lkv.hf.attention import unpatch_attention as unpatch_attention
    from lkv.hf.loading import load_default as load_default
    from lkv.hf.loading import load_model as load_model
    from lkv.methods.budgets import Budget as Budget
    from lkv.methods.method import Method as Method
    from lkv.methods.registry import register_method as register_method
    from lkv.methods.selectors import Selector as Selector
    from lkv.policy.hub import push_to_hub as push_to_hub
    from lkv.policy.lookup import default_policy as default_policy
    from lkv.policy.policy import Policy as Policy
    from lkv.training.fitting import fit as fit

_HOMES = {
    "Budget": "lkv.methods.budgets",
    "Chat": "lkv.context.chat",
    "Context": "lkv.context.context",
    "Method": "lkv.methods.method",
    "Policy": "lkv.policy.policy",
    "RaggedCache": "lkv.cache.ragged_cache",
    "Selector": "lkv.methods.selectors",
    "attention_patched": "lkv.hf.attention",
    "compress": "lkv.context.compression",
    "compress_prefill": "lkv.context.compress_prefill",
    "default_policy": "lkv.policy.lookup",
    "fit": "lkv.training.fitting",
    "load_default": "lkv.hf.loading",
    "load_model": "lkv.hf.loading",
    "patch_attention": "lkv.hf.attention",
    "pipeline": "lkv.context.pipeline",
    "push_to_hub": "lkv.policy.hub",
    "read_document": "lkv.context.document_reader",
    "register_method": "lkv.methods.registry",
    "unpatch_attention": "lkv.hf.attention",
}
__all__ = ["LkvError", "__version__", *_HOMES]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'lkv' has no attribute {name!r}")
    value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value  # later uses skip `__getattr__`
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
