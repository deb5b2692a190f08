"""New tokens of which some are padding, each row of the batch by itself."""

from torch import Tensor

from lkv.cache.store import KVStore
from lkv.kernels.ragged_attention import append, ragged_attention


def extended_by_row(spans: KVStore, query: Tensor, key: Tensor, value: Tensor, scale: float, padding: Tensor) -> Tensor:
    """As `KVStore.extend` without scores. New tokens that are `padding` [B, n] (on the CPU) are not appended, and
    their outputs are 0."""
    batch = [slice(row, row + 1) for row in range(len(padding))]
    tokens = [(~hidden).nonzero()[:, 0].to(query.device) for hidden in padding]
    k_pool, v_pool, starts, lens = spans.for_append()
    for row, real in zip(batch, tokens, strict=True):
        append(key[row][:, :, real], value[row][:, :, real], k_pool, v_pool, starts[row], lens[row])
    spans.count(padding.shape[1], padding)
    out = query.new_zeros(*query.shape[:3], value.shape[-1])
    k_pool, v_pool, starts, lens = spans.for_attention()
    for row, real in zip(batch, tokens, strict=True):
        attended = ragged_attention(query[row][:, :, real], k_pool, v_pool, starts[row], lens[row], scale)
        out[row] = out[row].index_copy(2, real, attended)
    return out
