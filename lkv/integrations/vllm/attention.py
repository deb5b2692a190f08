"""vLLM's attention backends with contexts: the CPU's, and FlashAttention on CUDA, which has not been run yet.

Attention over the pages is vLLM's own. For tokens that follow a context its log-sum-exp is needed as well:
FlashAttention returns it, for the CPU it is computed here from the keys in the pages. `Batch` then adds the contexts.
"""

from typing import Any

from torch import Tensor

from lkv.integrations.vllm.batch import Batch, attached_batch
from lkv.integrations.vllm.pages import CPUPages, FlashPages
from lkv.integrations.vllm.ranks import gather_heads
from lkv.integrations.vllm.worker import install_in_worker

try:
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend, CPUAttentionBackendImpl
    from vllm.v1.attention.backends.flash_attn import FlashAttentionBackend, FlashAttentionImpl
except ImportError:  # for documentation builds and static checks
    CPUAttentionBackend = CPUAttentionBackendImpl = FlashAttentionBackend = FlashAttentionImpl = object


def layer_index(name: str) -> int:
    """Return the number of a layer, from vLLM's name of it."""
    return next(int(part) for part in name.split(".") if part.isdigit())


class ContextAttention:
    """Adds attention over contexts to vLLM's attention, and evicts from texts that end in the pass."""

    num_heads: int
    head_size: int
    scale: float

    def open_pages(self, kv_cache: Tensor) -> CPUPages | FlashPages:
        """Return vLLM's KV cache of one layer."""
        raise NotImplementedError

    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: Any,
        output: Tensor,
        *args: Any,
        **kwargs: Any,
    ) -> Tensor:
        """Compute attention as vLLM's own implementation does, with its arguments; `output` [N, Hq, d] is completed."""
        attend: Any = super()
        out = attend.forward(layer, query, key, value, kv_cache, attn_metadata, output, *args, **kwargs)
        batch = attached_batch(attn_metadata)
        if batch is not None:
            index, block_table = layer_index(layer.layer_name), attn_metadata.block_table
            pages = self.open_pages(kv_cache)
            if batch.rows:
                query, rows = (x.view(len(x), self.num_heads, self.head_size) for x in (query, output))
                lse = pages.log_sum_exp(batch, query, block_table, self.scale)
                batch.add_contexts(index, query, rows, lse, self.scale)
            compress_texts(batch, index, pages, block_table, self.scale)
        return out


class LkvCPUAttentionImpl(ContextAttention, CPUAttentionBackendImpl):
    """vLLM's attention on a CPU, and over contexts."""

    def open_pages(self, kv_cache: Tensor) -> CPUPages:
        """As `ContextAttention.open_pages`."""
        return CPUPages(kv_cache, self.head_size)


class LkvCPUAttentionBackend(CPUAttentionBackend):
    """Registered in place of vLLM's CPU backend."""

    @staticmethod
    def get_impl_cls() -> type:
        """Return the implementation; only workers ask for it, where the rest of the plugin is then installed."""
        install_in_worker()
        return LkvCPUAttentionImpl


def compress_texts(batch: Batch, layer: int, pages: CPUPages | FlashPages, block_table: Tensor, scale: float) -> None:
    """Evict from the texts that end in this pass: their k and v of one layer are all in the pages.

    Args:
        batch: The part of LKV in the pass.
        layer: The layer's number.
        pages: Its KV cache.
        block_table: The blocks [R, n] of each request of the pass.
        scale: The scale of attention scores.
    """
    for row, work in batch.compressions:
        key, value = pages.read(block_table[row.index], row.length)
        key, value = (gather_heads(x, batch.total_heads) for x in (key, value))
        if work.compression is not None:
            work.compression.add_layer(layer, key[None], value[None], scale)


class LkvFlashAttentionImpl(ContextAttention, FlashAttentionImpl):
    """FlashAttention, and attention over contexts; not run on CUDA yet."""

    vllm_flash_attn_version: int

    def open_pages(self, kv_cache: Tensor) -> FlashPages:
        """As `ContextAttention.open_pages`."""
        return FlashPages(kv_cache, self.head_size, self.vllm_flash_attn_version)


class LkvFlashAttentionBackend(FlashAttentionBackend):
    """Registered in place of vLLM's FlashAttention backend."""

    @staticmethod
    def get_impl_cls() -> type:
        """As `LkvCPUAttentionBackend.get_impl_cls`."""
        install_in_worker()
        return LkvFlashAttentionImpl

    @staticmethod
    def get_builder_cls() -> type:
        """Return the builder with CUDA graphs of attention disabled, because contexts differ between passes."""
        from vllm.v1.attention.backend import AttentionCGSupport

        class Builder(FlashAttentionBackend.get_builder_cls()):  # type: ignore[misc]
            @classmethod
            def get_cudagraph_support(cls, *_: Any) -> Any:
                return AttentionCGSupport.NEVER

        return Builder
