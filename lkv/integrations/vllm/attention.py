"""vLLM's attention backends with contexts: the CPU's, and FlashAttention on CUDA, which has not been run yet.

Attention over the pages is vLLM's own. For tokens that follow a context its log-sum-exp is needed as well:
FlashAttention returns it, for the CPU it is computed here from the keys in the pages. `Batch` then adds the contexts.
"""

from typing import Any

from torch import Tensor

from lkv.integrations.vllm.batch import BATCH_KEY, Batch, gather_heads
from lkv.integrations.vllm.pages import CPUPages, FlashPages
from lkv.integrations.vllm.worker import install_in_worker

try:
    from vllm.forward_context import get_forward_context
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend, CPUAttentionBackendImpl
    from vllm.v1.attention.backends.flash_attn import FlashAttentionBackend, FlashAttentionImpl
except ImportError:  # this module is then only read, by documentation and checks
    CPUAttentionBackend = CPUAttentionBackendImpl = FlashAttentionBackend = FlashAttentionImpl = object


def current_batch() -> Batch | None:
    """The part of LKV in the forward pass that is running."""
    return get_forward_context().additional_kwargs.get(BATCH_KEY)


def layer_index(name: str) -> int:
    """The number of a layer, from vLLM's name of it."""
    return next(int(part) for part in name.split(".") if part.isdigit())


def serve_batch(
    impl: Any,
    layer: Any,
    query: Tensor,
    output: Tensor,
    kv_cache: Tensor,
    attn_metadata: Any,
    pages_type: Any,
    *options: Any,
) -> None:
    """After vLLM's attention over the pages: add that over contexts to `output`, and evict from texts that end here.

    `pages_type`: CPUPages or FlashPages; `options` are those of its `log_sum_exp`.
    """
    batch = current_batch() if attn_metadata is not None else None
    if batch is None:
        return
    index, block_table = layer_index(layer.layer_name), attn_metadata.block_table
    pages = pages_type(kv_cache, impl.head_size)
    if batch.rows:
        query, rows = (x.view(len(x), impl.num_heads, impl.head_size) for x in (query, output))
        lse = pages.log_sum_exp(batch, query, block_table, impl.scale, *options)
        batch.add_contexts(index, query, rows, lse, impl.scale)
    compress_texts(batch, index, pages, block_table, impl.scale)


class LkvCPUAttentionImpl(CPUAttentionBackendImpl):
    """vLLM's attention on a CPU, and over contexts."""

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
        """As vLLM's."""
        out = super().forward(layer, query, key, value, kv_cache, attn_metadata, output, *args, **kwargs)
        serve_batch(self, layer, query, output, kv_cache, attn_metadata, CPUPages)
        return out


class LkvCPUAttentionBackend(CPUAttentionBackend):
    """Registered in place of vLLM's CPU backend."""

    @staticmethod
    def get_impl_cls() -> type:
        """The implementation; it is asked for in workers alone, where the rest of the plugin is then installed."""
        install_in_worker()
        return LkvCPUAttentionImpl


def compress_texts(batch: Batch, layer: int, pages: Any, block_table: Tensor, scale: float) -> None:
    """Evict from the texts that end in this pass: their k and v of one layer are all in the pages."""
    for row, work, _ in batch.compressions:
        key, value = pages.read(block_table[row.index], row.length)
        key, value = (gather_heads(x, batch.total_heads) for x in (key, value))
        if work.compression is not None:
            work.compression.add_layer(layer, key[None], value[None], scale)


class LkvFlashAttentionImpl(FlashAttentionImpl):
    """FlashAttention, and attention over contexts; not run on CUDA yet."""

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
        """As vLLM's."""
        out = super().forward(layer, query, key, value, kv_cache, attn_metadata, output, *args, **kwargs)
        serve_batch(self, layer, query, output, kv_cache, attn_metadata, FlashPages, self.vllm_flash_attn_version)
        return out


class LkvFlashAttentionBackend(FlashAttentionBackend):
    """Registered in place of vLLM's FlashAttention backend."""

    @staticmethod
    def get_impl_cls() -> type:
        """As `LkvCPUAttentionBackend.get_impl_cls`."""
        install_in_worker()
        return LkvFlashAttentionImpl

    @staticmethod
    def get_builder_cls() -> type:
        """The builder, without CUDA graphs of attention: what it attends to changes from pass to pass."""
        from vllm.v1.attention.backend import AttentionCGSupport

        class Builder(FlashAttentionBackend.get_builder_cls()):  # type: ignore[misc]
            @classmethod
            def get_cudagraph_support(cls, *_: Any) -> Any:
                return AttentionCGSupport.NEVER

        return Builder
