"""What transformers' own caches and LKV's have in common."""

from typing import Any


def kv_nbytes(cache: Any) -> int:
    """Bytes of storage behind the k and v of one of transformers' own caches."""
    return sum(x.untyped_storage().nbytes() for layer in cache.layers for x in (layer.keys, layer.values))


def commit_of(model: Any) -> str | None:
    """The commit on the hub that `model` is of, None where it comes from elsewhere."""
    return getattr(model.config, "_commit_hash", None)


def positions(model: Any) -> int:
    """How many tokens `model`, to which LKV is attached, can read."""
    return model.config.get_text_config(decoder=True).max_position_embeddings


def cut_to(cache: Any, length: int) -> None:
    """Cut every layer of `cache`, LKV's or transformers' own, back to its first `length` tokens.

    Only a number below 0 means the same to `crop` in every version: from 5.17 on 0 cuts nothing, before it cuts all.
    """
    # Layer by layer: an interrupted forward pass leaves them unequal.
    for layer in cache.layers:
        if excess := layer.get_seq_length() - length:
            layer.crop(-excess)
