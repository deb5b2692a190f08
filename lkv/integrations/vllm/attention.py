"""vLLM's attention backends with contexts: the CPU's, and FlashAttention on CUDA, which has not been run yet.

Attention over the pages is vLLM's own. For tokens that follow a context its log-sum-exp is needed as well:
FlashAttention returns it, for the CPU it is computed here from the keys in the pages. `Batch` then adds the contexts.
"""

from typing import Any

from torch import Tensor

from lkv.integrations.vllm.pages import CPUPages, FlashPages
from lkv.integrations.vllm.passes import attached_batch, gather_heads
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
        *args: object,
        **kwargs: object,
    ) -> Tensor:
        """Compute attention as vLLM's own implementation does, and over contexts.

        Args:
            layer: vLLM's attention layer.
            query: The queries [N, Hq * d] or [N, Hq, d] of all tokens of the pass.
            key: Their keys.
            value: Their values.
            kv_cache: The layer's pages.
            attn_metadata: The pass, with its `Batch`.
            output: The attention [N, Hq, d], which is completed.
            args: As vLLM's own implementation.
            kwargs: As vLLM's own implementation.
        """
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
            for row, work in batch.compressions:  # their k and v of this layer are all in the pages
                key, value = pages.read(block_table[row.index], row.length)
                key, value = (gather_heads(x, batch.total_heads) for x in (key, value))
                if work.compression is not None:
                    work.compression.add_layer(index, key[None], value[None], self.scale)
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
            def get_cudagraph_support(cls, *_: object) -> Any:
                return AttentionCGSupport.NEVER

        return Builder
