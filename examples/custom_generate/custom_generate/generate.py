"""transformers' custom generate: `model.generate(..., custom_generate=FOLDER_OR_HUB_ID, trust_remote_code=True)`."""

from typing import Any

from lkv import RaggedCache
from lkv.hf.cache_argument import cache_argument, find_cache


def generate(
    model: Any,
    memory: Any = None,
    retention: float | None = None,
    policy: Any = None,
    method: str = "lkv",
    **kwargs: Any,
) -> Any:
    """Run model.generate with a cache within `memory`, or of `retention`; other arguments are those of generate."""
    if find_cache(kwargs) is None:
        kwargs |= cache_argument(RaggedCache(model, memory=memory, retention=retention, policy=policy, method=method))
    return model.generate(**kwargs)
