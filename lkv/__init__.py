"""LKV: learned KV cache eviction for transformers models.

What is named here is imported when it is first used: `import lkv` alone loads no torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from lkv.errors import LkvError
from lkv.version import __version__

if TYPE_CHECKING:
    from lkv.cache.ragged_cache import RaggedCache
    from lkv.context.chat import Chat
    from lkv.context.compression import compress
    from lkv.context.context import Context
    from lkv.context.documents import read_document
    from lkv.context.pipeline import pipeline
    from lkv.context.prefill import compress_prefill
    from lkv.integrations.transformers.attention import attention_patched, patch_attention, unpatch_attention
    from lkv.methods.budgets import Budget
    from lkv.methods.method import Method
    from lkv.methods.registry import register_method
    from lkv.methods.selectors import Selector
    from lkv.models.loading import load_default, load_model
    from lkv.policy.hub import push_to_hub
    from lkv.policy.lookup import default_policy, policy_for
    from lkv.policy.policy import Policy
    from lkv.training.fit import fit

_HOMES = {
    "Budget": "lkv.methods.budgets",
    "Chat": "lkv.context.chat",
    "Context": "lkv.context.context",
    "Method": "lkv.methods.method",
    "Policy": "lkv.policy.policy",
    "RaggedCache": "lkv.cache.ragged_cache",
    "Selector": "lkv.methods.selectors",
    "attention_patched": "lkv.integrations.transformers.attention",
    "compress": "lkv.context.compression",
    "compress_prefill": "lkv.context.prefill",
    "default_policy": "lkv.policy.lookup",
    "fit": "lkv.training.fit",
    "load_default": "lkv.models.loading",
    "load_model": "lkv.models.loading",
    "patch_attention": "lkv.integrations.transformers.attention",
    "pipeline": "lkv.context.pipeline",
    "policy_for": "lkv.policy.lookup",
    "push_to_hub": "lkv.policy.hub",
    "read_document": "lkv.context.documents",
    "register_method": "lkv.methods.registry",
    "unpatch_attention": "lkv.integrations.transformers.attention",
}
__all__ = [
    "Budget",
    "Chat",
    "Context",
    "LkvError",
    "Method",
    "Policy",
    "RaggedCache",
    "Selector",
    "__version__",
    "attention_patched",
    "compress",
    "compress_prefill",
    "default_policy",
    "fit",
    "load_default",
    "load_model",
    "patch_attention",
    "pipeline",
    "policy_for",
    "push_to_hub",
    "read_document",
    "register_method",
    "unpatch_attention",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'lkv' has no attribute {name!r}")
    value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value  # the next use finds it without coming here
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
