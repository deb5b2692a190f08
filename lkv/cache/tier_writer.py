"""Writes packed entries to tiers of precision: by PyTorch's operators or, on a GPU, by kernels."""

import torch
from torch import Tensor

from lkv.cache.ragged_store import RaggedStore, packed_starts, slot_indices
from lkv.cache.tiers import KeyBasis, TierSplit, are_invalid, basis_dtype, code_width, dequantize, quantize, rotation
from lkv.kernels.ragged_attention import MAX_QUANTIZED
from lkv.kernels.selection import kernels_for
from lkv.utils import devices

Codes = dict[int, tuple[Tensor, Tensor]]  # codes and norms of each quantised tier, by its number


class TierWriter:
    """Writes packed entries: codes and norms of quantised tiers, and rotated entries to the pools of the other one.

    On a GPU k and v take three launches, whatever the number of tiers.
    """

    def __init__(self, split: TierSplit, lens: Tensor, rest: RaggedStore):
        """Write `lens` [B, H] entries as `split` says, those that are not quantised to `rest`."""
        self._split, self._lens, self._rest, self._device = split, lens, rest, rest.k.device
        self._kernels = kernels_for(rest.k, rest.v) if len(split.precisions) <= MAX_QUANTIZED + 1 else None
        self._invalid: list[Tensor] = []
        if self._kernels is not None:
            tables = [packed_starts(lens), lens]
            for precision, own, first in zip(split.precisions, split.lens, packed_starts(split.lens), strict=True):
                tables += [own, first, packed_starts(own) if precision.is_quantized else rest.starts]
            self._tables = devices.stack_to_device(self._device, *tables).flatten(1)
            self._invalid.append(torch.zeros(1, dtype=torch.uint8, device=self._device))

    def write_keys(self, key: Tensor, basis: KeyBasis | None, is_centred: bool) -> tuple[KeyBasis, Codes]:
        """Write k [N, d] in `basis`, by default as `KeyBasis.of` measures it; return the basis and the codes."""
        bits = [precision.key_bits for precision in self._split.precisions]
        if self._kernels is None:
            heads, wide = head_numbers(self._lens, self._device), torch.promote_types(key.dtype, torch.float32)
            basis = basis or KeyBasis.of(key, heads, self._lens.shape, is_centred)
            return basis, self._quantize(basis.enter(key.to(wide), heads), self._rest.k, bits)
        measured = None
        if basis is None:
            measured = self._kernels.measure(key, self._tables)
            basis = KeyBasis(measured.new_empty((2, *self._lens.shape, key.shape[1]), dtype=basis_dtype(key.dtype)))
        return basis, self._launch(key, self._rest.k, bits, basis.tensor, measured, is_centred)

    def write_values(self, value: Tensor) -> Codes:
        """Write v [N, dv]; return its codes."""
        bits = [precision.value_bits for precision in self._split.precisions]
        if self._kernels is not None:
            return self._launch(value, self._rest.v, bits)
        wide = torch.promote_types(value.dtype, torch.float32)
        return self._quantize(value.to(wide) @ rotation(value.shape[-1], wide, self._device), self._rest.v, bits)

    def restore_keys(self, key: Tensor, basis: KeyBasis, codes: Codes) -> Tensor:
        """Return k [N, d] with what is restored from its `codes`, in the model's coordinates."""
        heads, wide = head_numbers(self._lens, self._device), torch.promote_types(key.dtype, torch.float32)
        restored = key.to(wide, copy=True)
        for number, entries in enumerate(self._split.entries()):
            if number in codes:
                rotated = dequantize(*codes[number], self._split.precisions[number].key_bits, wide)
                restored[entries] = basis.leave(rotated, heads[entries])
        return restored

    def is_invalid(self) -> Tensor:
        """Return whether a norm that was written is not finite or too large, as bool [] on the device."""
        if self._kernels is not None:
            return self._invalid[0].view(torch.bool)[0]
        return torch.stack(self._invalid).any()

    def _quantize(self, rotated: Tensor, pool: Tensor, bits: list[int]) -> Codes:
        codes = {}
        for number, entries in enumerate(self._split.entries()):
            if self._split.precisions[number].is_quantized:
                codes[number] = quantize(rotated[entries], bits[number])
                self._invalid.append(are_invalid(codes[number][1]))
            else:
                pool[slot_indices(self._rest.starts, self._rest.lens, self._device)] = rotated[entries].to(pool)
        return codes

    def _launch(self, values: Tensor, pool: Tensor, bits: list[int], *basis: object) -> Codes:
        assert self._kernels is not None
        codes, dim, counts = {}, values.shape[1], self._split.lens.flatten(1).sum(1).tolist()
        for number, (precision, count) in enumerate(zip(self._split.precisions, counts, strict=True)):
            if precision.is_quantized:
                tier_codes = values.new_empty((count, code_width(bits[number], dim)), dtype=torch.uint8)
                codes[number] = tier_codes, values.new_empty(count, dtype=torch.bfloat16)
        outputs = [codes.get(number, (pool, None)) for number in range(len(bits))]
        matrix = rotation(dim, torch.float32, self._device)
        self._kernels.quantise(
            values, self._split.order, self._tables, matrix, outputs, tuple(bits), self._invalid[0], *basis
        )
        return codes


def head_numbers(lens: Tensor, device: torch.device) -> Tensor:
    """Return the flat row and head index of each of `lens` [B, H] entries, [sum of lens]."""
    numbers = torch.arange(lens.numel(), device="cpu")
    return devices.copy_to_device(numbers.repeat_interleave(lens.flatten()), device)
