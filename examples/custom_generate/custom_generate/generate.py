"""transformers' custom generate: `model.generate(..., custom_generate=FOLDER_OR_HUB_ID, trust_remote_code=True)`."""

from typing import Any

from lkv import RaggedCache


def generate(model: Any, retention: float = 0.15, policy: Any = None, method: str = "lkv", **kwargs: Any) -> Any:
    """model.generate with a cache that keeps `retention` of the prompt; other arguments are those of generate."""
    if kwargs.get("past_key_values") is None:
        kwargs["past_key_values"] = RaggedCache(model, policy=policy, retention=retention, method=method)
    return model.generate(**kwargs)
