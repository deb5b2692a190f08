"""Read vLLM's KV cache: k and v of the tokens in a request's blocks, and the log-sum-exp of attention over them."""

import functools

import torch
from torch import Tensor

from lkv.errors import IntegrationError
from lkv.integrations.vllm.passes import Batch, Row
from lkv.utils.devices import copy_to_device

_MAX_SCORES = 2**23  # of one product


class PageLayout:
    """Where vLLM's CPU kernel stores k and v in a block: k [d, size], v [size, d]."""

    @staticmethod
    def keys(block: Tensor, size: int, dim: int) -> Tensor:
        """k [..., size, d] of blocks [..., size * d]."""
        return block.unflatten(-1, (dim, size)).mT

    @staticmethod
    def values(block: Tensor, size: int, dim: int) -> Tensor:
        """v [..., size, d] of blocks [..., size * d]."""
        return block.unflatten(-1, (size, dim))


class AmxLayout(PageLayout):
    """The kernel for AMX: k [size / 16, d / 2, 16 tokens, 2 channels], v [d / 16, size / 2, 16 channels, 2 tokens]."""

    @staticmethod
    def keys(block: Tensor, size: int, dim: int) -> Tensor:
        """As in `PageLayout`."""
        return block.unflatten(-1, (size // 16, dim // 2, 16, 2)).transpose(-3, -2).flatten(-2).flatten(-3, -2)

    @staticmethod
    def values(block: Tensor, size: int, dim: int) -> Tensor:
        """As in `PageLayout`."""
        tiles = block.unflatten(-1, (dim // 16, size // 2, 16, 2))
        return tiles.movedim((-3, -1), (-4, -3)).flatten(-2).flatten(-3, -2)


class CPUPages:
    """vLLM's KV cache of one layer on a CPU, [blocks, H, block size, 2 d]: in each block all k, then all v."""

    def __init__(self, kv_cache: Tensor, dim: int):
        _, self._heads, self.size, _ = kv_cache.shape
        self._dim, self._layout = dim, page_layout(kv_cache.dtype, self.size, dim)
        self._rows = kv_cache.view(-1, self.size * dim)

    def read(self, table: Tensor, length: int) -> tuple[Tensor, Tensor]:
        """Return k and v [H, T, d] of the first `length` tokens in the blocks `table`."""
        blocks, shape = table[: -(-length // self.size)].long(), (self.size, self._dim)
        # A copy of whole rows, and one that turns k: half the time of indexing views.
        first = 2 * (self._heads * blocks + torch.arange(self._heads)[:, None])
        key, value = (self._rows.index_select(0, rows.flatten()).view(*rows.shape, -1) for rows in (first, first + 1))
        key, value = self._layout.keys(key, *shape), self._layout.values(value, *shape)
        return key.flatten(1, 2)[:, :length], value.flatten(1, 2)[:, :length]

    def log_sum_exp(self, batch: Batch, query: Tensor, block_table: Tensor, scale: float) -> Tensor:
        """Return the log-sum-exp [Hq, n] of attention over the pages, for all tokens of `batch`.

        Args:
            batch: The part of LKV in the pass.
            query: The queries [N, Hq, d] of all tokens of the pass.
            block_table: The blocks [R, n] of each request of the pass.
            scale: The scale of attention scores.
        """
        out = query.new_empty(query.shape[1], len(batch.tokens), dtype=torch.float32)
        # Requests with equally many new tokens (all that decode) are computed together.
        if "tables" not in batch.work:
            groups: dict[int, list[Row]] = {}
            for row in batch.rows:
                groups.setdefault(row.tokens, []).append(row)
            batch.work["tables"] = [self._tables(rows, block_table) for rows in groups.values()]
        for columns, tables, visible in batch.work["tables"]:
            tokens = batch.tokens[columns]  # [R, T]
            queries = query[tokens].unflatten(2, (self._heads, -1)).permute(0, 2, 3, 1, 4)  # [R, H, g, T, d]
            blocks = self._rows.view(-1, self._heads, 2, self.size * self._dim)[tables, :, 0]
            keys = self._layout.keys(blocks, self.size, self._dim).mT  # [R, blocks, H, d, size]
            step = max(1, _MAX_SCORES // max(1, queries[..., :1, 0].numel() * tables.shape[1] * self.size))
            parts = [
                self._part(queries[:, :, :, part], keys, visible[:, part], scale)
                for part in (slice(start, start + step) for start in range(0, tokens.shape[1], step))
            ]
            out[:, columns.flatten()] = torch.cat(parts, -1).flatten(1, 2).transpose(0, 1).flatten(1)
        return out

    def _tables(self, rows: list[Row], block_table: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Columns [R, T], blocks [R, n] and which keys each new token sees [R, T, n * size]."""
        new = torch.arange(rows[0].tokens)
        index, lengths, first = torch.tensor([[row.index, row.length, row.column] for row in rows]).unbind(1)
        blocks = -(-int(lengths.max()) // self.size)
        last = lengths[:, None] - len(new) + new  # the last key that each sees
        visible = torch.arange(blocks * self.size) <= last[..., None]
        return first[:, None] + new, block_table[index, :blocks].long(), visible

    def _part(self, queries: Tensor, keys: Tensor, visible: Tensor, scale: float) -> Tensor:
        """Return the log-sum-exp [R, H, g, T] of some new tokens."""
        rows, heads, group, tokens, dim = queries.shape
        flat = queries.reshape(rows, 1, heads, group * tokens, dim).float()
        scores = torch.matmul(flat, keys.float()).mul_(scale)  # [R, blocks, H, g T, size]
        scores = scores.permute(0, 2, 3, 1, 4).reshape(rows, heads, group, tokens, -1)
        return scores.masked_fill_(~visible[:, None, None], -torch.inf).logsumexp(-1)


class FlashPages:
    """vLLM's KV cache of one layer for FlashAttention, [blocks, H, block size, 2 d]: each token's k, then its v."""

    def __init__(self, kv_cache: Tensor, dim: int, version: int):
        """`version`: of FlashAttention."""
        self.size, self._version = kv_cache.shape[2], version
        self._keys, self._values = kv_cache.split(dim, -1)

    def read(self, table: Tensor, length: int) -> tuple[Tensor, Tensor]:
        """As `CPUPages.read`."""
        blocks = table[: -(-length // self.size)].long()
        key, value = (x[blocks].transpose(0, 1).flatten(1, 2)[:, :length] for x in (self._keys, self._values))
        return key, value

    def log_sum_exp(self, batch: Batch, query: Tensor, block_table: Tensor, scale: float) -> Tensor:
        """As `CPUPages.log_sum_exp`."""
        from vllm.v1.attention.backends.fa_utils import flash_attn_varlen_func

        if "rows" not in batch.work:
            numbers = [[row.index, row.length, row.column + row.tokens] for row in batch.rows]
            table = copy_to_device(torch.tensor(numbers, dtype=torch.int32, device="cpu"), query.device)
            ends = torch.nn.functional.pad(table[:, 2], (1, 0))
            longest = max(row.tokens for row in batch.rows), max(row.length for row in batch.rows)
            batch.work["rows"] = block_table[table[:, 0].long()], table[:, 1].contiguous(), ends, longest
        tables, lengths, ends, (most_new, most) = batch.work["rows"]
        _, lse = flash_attn_varlen_func(
            q=query[batch.tokens],
            k=self._keys.transpose(1, 2),
            v=self._values.transpose(1, 2),
            cu_seqlens_q=ends,
            max_seqlen_q=most_new,
            seqused_k=lengths,
            max_seqlen_k=most,
            softmax_scale=scale,
            causal=True,
            block_table=tables,
            return_softmax_lse=True,
            fa_version=self._version,
        )
        return lse


@functools.cache
def page_layout(dtype: torch.dtype, block_size: int, dim: int) -> type[PageLayout]:
    """Return the layout of k and v in vLLM's kernel on this processor. Raises IntegrationError if it is unknown."""
    from vllm import _custom_ops as ops
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    isa = _get_attn_isa(dtype, block_size, dim)
    key, value = torch.randn(2, block_size, 1, dim).to(dtype).unbind()
    cache = torch.zeros(2, block_size * dim, dtype=dtype)
    k_cache, v_cache = cache.view(1, 1, 2 * block_size, dim).chunk(2, 2)
    ops.cpu_attn_reshape_and_cache(key, value, k_cache, v_cache, torch.arange(block_size), isa)
    for layout in (PageLayout, AmxLayout) if block_size % 16 == dim % 16 == 0 else (PageLayout,):
        read_key, read_value = layout.keys(cache[0], block_size, dim), layout.values(cache[1], block_size, dim)
        if torch.equal(read_key, key[:, 0]) and torch.equal(read_value, value[:, 0]):
            return layout
    raise IntegrationError(
        f"vLLM's CPU kernel {isa!r} stores {dtype} keys in a layout that LKV cannot read; use --dtype float32."
    )
