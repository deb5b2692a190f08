"""LKV: learned KV cache eviction for transformers models.

What is named here is imported when it is first used: `import lkv` alone loads no torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from lkv.errors import LkvError
from lkv.version import __version__

if TYPE_CHECKING:
    from lkv.cache.ragged import RaggedCache
    from lkv.chat import Chat
    from lkv.context import Context, compress
    from lkv.hub import push_to_hub
    from lkv.methods.budget import Budget
    from lkv.methods.build import Method
    from lkv.methods.catalogue import register_method
    from lkv.methods.selection import Selector
    from lkv.models import default_policy, load_default, load_model, policy_for
    from lkv.policy import Policy

_HOMES = {
    "Budget": "lkv.methods.budget",
    "Chat": "lkv.chat",
    "Context": "lkv.context",
    "Method": "lkv.methods.build",
    "Policy": "lkv.policy",
    "RaggedCache": "lkv.cache.ragged",
    "Selector": "lkv.methods.selection",
    "compress": "lkv.context",
    "default_policy": "lkv.models",
    "load_default": "lkv.models",
    "load_model": "lkv.models",
    "policy_for": "lkv.models",
    "push_to_hub": "lkv.hub",
    "register_method": "lkv.methods.catalogue",
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
    "compress",
    "default_policy",
    "load_default",
    "load_model",
    "policy_for",
    "push_to_hub",
    "register_method",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'lkv' has no attribute {name!r}")
    value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value  # the next use finds it without coming here
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
