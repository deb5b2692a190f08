"""Ranks of tensor parallelism: which KV heads each has, and what all of them must agree on."""

from typing import Any

import torch
from torch import Tensor

from lkv.context.context import Context


def is_writer() -> bool:
    """Return whether this rank compresses texts and writes files; the others only send it their heads."""
    from vllm.distributed import get_tensor_model_parallel_rank

    return get_tensor_model_parallel_rank() == 0


def any_rank(value: bool) -> bool:
    """Return whether `value` is true in any rank; all ranks must call this."""
    from vllm.distributed import get_tp_group

    group = get_tp_group()
    if group.world_size == 1:
        return value
    flag = torch.tensor([value], dtype=torch.int32, device="cpu")
    torch.distributed.all_reduce(flag, torch.distributed.ReduceOp.MAX, group=group.cpu_group)
    return bool(flag.item())


def local_heads(vllm_config: Any) -> slice:
    """Return the KV heads that this rank computes."""
    from vllm.distributed import get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size

    config = vllm_config.model_config
    first = get_tensor_model_parallel_rank() * config.get_total_num_kv_heads() // get_tensor_model_parallel_world_size()
    return slice(first, first + config.get_num_kv_heads(vllm_config.parallel_config))


def keep_heads(context: Context, heads: slice) -> None:
    """Drop the entries of all other KV heads, which other ranks have, unless they were dropped before."""
    cache: Any = context.cache
    for layer in cache.ragged_layers:
        if layer.store.lens.shape[1] > heads.stop - heads.start:
            layer.store = layer.store.select_heads(heads)


def gather_heads(x: Tensor, total: int) -> Tensor:
    """Return k or v [H, T, d] of all `total` KV heads, from the heads of each rank."""
    from vllm.distributed import get_tensor_model_parallel_world_size, tensor_model_parallel_all_gather

    size = get_tensor_model_parallel_world_size()
    if size == 1:
        return x
    gathered = tensor_model_parallel_all_gather(x.contiguous(), dim=0)
    return gathered[:: len(gathered) // total]  # fewer heads than ranks: some ranks have the same one
