"""vLLM's second model runner on a CPU whose Triton has no backend for it: Triton's interpreter runs the kernels.

The interpreter takes 20 ms a call, so that torch computes the kernels of every step here; all others, such as those of
sampling, are vLLM's own. Call `install` before the rest of vLLM is imported. In the processes of a server
`startup/sitecustomize.py` does the same.
"""

import ctypes
import os
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import triton
from torch import Tensor
from triton.backends import Backend, backends
from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase


class _Driver(DriverBase):
    """As much of a driver as vLLM asks for; the interpreter needs none."""

    @staticmethod
    def is_active() -> bool:
        return True

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cpu", 0, 1)

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")

    def map_python_to_cpp_type(self, ty: str) -> str:
        return ty

    def get_benchmarker(self) -> Any:
        raise NotImplementedError


def install() -> None:
    """Have vLLM take the second runner."""
    add_backend()
    register_kernels()


def add_backend() -> None:
    """Have vLLM find Triton; called before vLLM is imported."""
    # Inductor would ask this backend for a compiler.
    os.environ.update(TRITON_INTERPRET="1", VLLM_USE_V2_MODEL_RUNNER="1", TORCHDYNAMO_DISABLE="1")
    backends["cpu"] = Backend(compiler=None, driver=_Driver)


def register_kernels() -> None:
    """Replace kernels; called before the second runner is imported."""
    import vllm.v1.worker.cpu.shm  # noqa: F401  (vLLM wants it first)
    from vllm.triton_utils import dispatcher

    overrides = {}
    for module, kernels in _KERNELS.items():
        module = f"vllm.v1.worker.gpu.{module}"
        for name, compute in kernels.items():
            overrides[f"{module}.{name}"] = _named(getattr(import_module(module), name), compute)
    dispatcher.register_kernels(overrides)


def _named(kernel: Any, compute: Any) -> Any:
    """Launch `compute` with the kernel's arguments by their names, and the kernel itself."""
    return lambda *args, **options: compute(
        SimpleNamespace(**dict(zip(kernel.arg_names, args, strict=False)), **options), kernel
    )


def _row(addresses: Tensor, group: int, row: int, stride: int) -> np.ndarray:
    """One row of a block table, of which the kernel gets the address."""
    return np.ctypeslib.as_array((ctypes.c_int32 * stride).from_address(int(addresses[group]) + 4 * row * stride))


def _apply_write(x, kernel):
    assert not x.MULTI_GROUP
    flat, first = x.output_ptr.view(-1), 0
    rows, starts, ends = (y.tolist() for y in (x.write_indices_ptr, x.write_starts_ptr, x.write_cu_lens_ptr))
    for row, start, last in zip(rows, starts, ends, strict=True):
        place = row * x.output_stride + start
        flat[place : place + last - first] = x.write_contents_ptr[first:last]
        first = last


def _gather_block_tables(x, kernel):
    for group, stride in enumerate(x.block_table_strides.tolist()):
        for place, row in enumerate(x.batch_idx_to_req_idx.tolist()):
            count = int(x.num_blocks_ptr[group, row])
            source = _row(x.src_block_table_ptrs, group, row, stride)
            _row(x.dst_block_table_ptrs, group, place, stride)[:count] = source[:count]


def _compute_slot_mappings(x, kernel):
    assert x.CP_SIZE == 1
    starts = x.query_start_loc.tolist()
    for group, (stride, size) in enumerate(zip(x.block_table_strides.tolist(), x.block_sizes.tolist(), strict=True)):
        slots = x.slot_mappings_ptr[group]
        slots[starts[len(x.idx_mapping)] :] = x.PAD_ID
        for number, row in enumerate(x.idx_mapping.tolist()):
            new = slice(starts[number], starts[number + 1])
            table = torch.from_numpy(_row(x.block_table_ptrs, group, row, stride)).long()
            slots[new] = table[x.pos[new] // size] * size + x.pos[new] % size


def _prepare_prefill_inputs(x, kernel):
    for number, row in enumerate(x.idx_mapping_ptr.tolist()):
        first, length = int(x.num_computed_tokens_ptr[row]), int(x.prefill_lens_ptr[row])
        start, stop = x.query_start_loc_ptr[number : number + 2].tolist()
        if first < length:
            tokens, last = x.all_token_ids_ptr[row], first + stop - start
            x.input_ids_ptr[start:stop] = tokens[first:last]
            for offset in range(x.num_lookahead):
                token = tokens[last + offset] if last + offset < length else 0
                x.next_prefill_tokens_ptr[offset, row] = token


def _prepare_pos_seq_lens(x, kernel):
    x.seq_lens_ptr[len(x.idx_mapping_ptr) :] = 0
    for number, row in enumerate(x.idx_mapping_ptr.tolist()):
        start, stop = x.query_start_loc_ptr[number : number + 2].tolist()
        first = int(x.num_computed_tokens_ptr[row])
        last = first + stop - start
        x.seq_lens_ptr[number] = last
        x.pos_ptr[start:stop] = torch.arange(first, last)


def _combine_sampled_and_draft_tokens(x, kernel):
    rows = x.idx_mapping_ptr
    last = x.query_start_loc_ptr[1 : len(rows) + 1].long() - 1  # without drafts a request has one row of logits
    x.logits_indices_ptr.copy_(last)
    answering = x.seq_lens_ptr[: len(rows)] > x.prefill_len_ptr[rows]
    x.input_ids_ptr[last[answering]] = x.last_sampled_tokens_ptr[rows[answering], 0].to(x.input_ids_ptr.dtype)


def _get_num_sampled_and_rejected(x, kernel):
    rows = x.idx_mapping_ptr
    x.num_sampled_ptr[x.seq_lens_ptr[: len(rows)] < x.prefill_len_ptr[rows]] = 0
    x.num_rejected_ptr.zero_()


def _post_update(x, kernel):
    for number, row in enumerate(x.idx_mapping_ptr.tolist()):
        total, sampled = int(x.total_len_ptr[row]), int(x.num_sampled_ptr[number])
        assert row >= 0 and sampled in (0, 1)
        if sampled:
            token = x.sampled_tokens_ptr[number, 0]
            x.last_sampled_tokens_ptr[row] = x.all_token_ids_ptr[row, total] = token
            x.total_len_ptr[row] = total + 1
            if x.output_bin_counts_ptr is not None:
                x.output_bin_counts_ptr[row, token] += 1
        start, stop = x.query_start_loc_ptr[number : number + 2].tolist()
        x.num_computed_tokens_ptr[row] += stop - start - x.num_rejected_ptr[number]


def _sample(x, kernel):
    """Greedily; random numbers are vLLM's own."""
    if x.temp_ptr[x.expanded_idx_mapping_ptr].any():
        grid = (len(x.logits_ptr), triton.cdiv(x.vocab_size, x.BLOCK_SIZE))
        kernel[grid](**vars(x))
        return
    x.local_max_ptr.fill_(-torch.inf)
    x.local_max_ptr[:, 0], x.local_argmax_ptr[:, 0] = x.logits_ptr.float().max(1)


def _finalize_n_grams(x, kernel):
    """The interpreter refuses a mask of this kernel."""
    for number, row in enumerate(x.idx_mapping_ptr.tolist()):
        score, last = int(x.scratch_ptr[number, : x.N_BLOCKS].max()), x.last_sampled_ptr[row]
        x.drafts_ptr[number] = last
        if score > 0 and x.num_sampled_ptr[number] > 0:
            start = sum(divmod(score - 1, x.L + 1))
            found = x.token_ids_ptr[row, start : int(x.total_len_ptr[row])][: x.K]
            x.drafts_ptr[number, : len(found)] = found


def _apply_grammar_bitmask(x, kernel):
    """The interpreter refuses the types of this kernel."""
    for bits, place in zip(x.bitmask_ptr, x.logits_indices_ptr.tolist(), strict=True):
        allowed = (bits[:, None] >> torch.arange(32)) & 1
        request, position = divmod(place, x.MASK_STRIDE)
        logits = x.logits_ptr[x.cu_num_logits_ptr[request] + position]
        logits[allowed.flatten()[: x.vocab_size] == 0] = -torch.inf


_KERNELS = {
    "buffer_utils": {"_apply_write_kernel": _apply_write},
    "block_table": {
        "_gather_block_tables_kernel": _gather_block_tables,
        "_compute_slot_mappings_kernel": _compute_slot_mappings,
    },
    "input_batch": {
        "_prepare_prefill_inputs_kernel": _prepare_prefill_inputs,
        "_prepare_pos_seq_lens_kernel": _prepare_pos_seq_lens,
        "_combine_sampled_and_draft_tokens_kernel": _combine_sampled_and_draft_tokens,
        "_get_num_sampled_and_rejected_kernel": _get_num_sampled_and_rejected,
        "_post_update_kernel": _post_update,
    },
    "sample.gumbel": {"_gumbel_sample_kernel": _sample},
    "spec_decode.ngram.speculator": {"_ngram_finalize_kernel": _finalize_n_grams},
    "structured_outputs": {"_apply_grammar_bitmask_kernel": _apply_grammar_bitmask},
}
