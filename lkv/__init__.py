"""LKV: learned KV cache eviction for transformers models."""

from lkv.cache import RaggedCache
from lkv.compression import Context, compress
from lkv.embedded import default_policy, load_default, load_model
from lkv.errors import LkvError
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
