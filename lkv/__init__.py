"""LKV: learned KV cache eviction for transformers models."""

from lkv.cache.ragged import RaggedCache
from lkv.context import Context, compress
from lkv.errors import LkvError
from lkv.models import default_policy, load_default, load_model
from lkv.policy import Policy

__version__ = "0.1.0"
__all__ = [
    "Context",
    "LkvError",
    "Policy",
    "RaggedCache",
    "compress",
    "default_policy",
    "load_default",
    "load_model",
]
