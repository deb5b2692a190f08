"""Arguments of attention over the ragged cache, and their checks; names of shapes as in `api`."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from lkv.errors import BackendError
from lkv.kernels import QUANTIZED_BITS
from lkv.kernels.checks import check_storages, check_tensor

MAX_QUANTIZED = 2  # sets of quantised entries a layer
# Code c stands for u (a + b u^2) with u = c - (2^bits - 1) / 2: the best such levels for a standard normal variable.
# Their mean squared error is 5.1e-5 (8 bits), 0.00969 and 0.0346; that of any levels at least 4.1e-5, 0.00950, 0.0345.
LEVELS = {8: (0.015859471, 1.0520814e-06), 4: (0.24050725, 0.0020975307), 3: (0.47145524, 0.011584845)}
# An FP8 code stands for its number in e4m3 times this. The largest, 448, is 28 norms: what no channel of an entry with
# up to 784 channels exceeds. Codes 127 and 255, which are NaN in e4m3, are not written; they would stand for +-480.
FP8_UNIT = 1 / 16
_INTEGERS = (torch.int32, torch.int64)
_BASIS_DTYPES = (torch.float32, torch.bfloat16, torch.float16)  # of its mean and scale
_QUANTIZED_DTYPES = (torch.uint8, torch.bfloat16, torch.uint8, torch.bfloat16, torch.int32)


class Basis(NamedTuple):
    """The coordinates of stored entries: k' = (k - mean) / scale @ key_rotation and v' = v @ value_rotation.

    With q' = q scale @ key_rotation, q' k' equals q k up to q mean, which is the same for all entries of a span and
    does not change attention. All tensors are contiguous; rotations are float32.

    Attributes:
        mean: [B, Hkv, d], float32 or, as a cache stores it, in 16 bits.
        scale: [B, Hkv, d], positive, in the dtype of `mean`.
        key_rotation: The matrix of `lkv.cache.tiers.rotation`, [d, d].
        value_rotation: The same for v, [dv, dv].
    """

    mean: Tensor
    scale: Tensor
    key_rotation: Tensor
    value_rotation: Tensor

    def enter_queries(self, q: Tensor) -> Tensor:
        """Return q' of queries [B, Hq, Tq, d], in their dtype."""
        scaled = _widen(q).unflatten(1, (self.scale.shape[1], -1)) * self.scale[:, :, None, None]
        return (scaled.flatten(1, 2) @ _match(q, self.key_rotation)).to(q.dtype)

    def enter_entries(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Return k' and v' of entries [B, Hkv, T, .], in their dtype."""
        centred = (_widen(key) - self.mean[:, :, None]) / self.scale[:, :, None]
        new_key, new_value = centred @ _match(key, self.key_rotation), _widen(value) @ _match(key, self.value_rotation)
        return new_key.to(key.dtype), new_value.to(value.dtype)

    def leave_outputs(self, out: Tensor) -> Tensor:
        """Transform outputs [B, Hq, Tq, dv] over v' to the model's coordinates."""
        return (_widen(out) @ _match(out, self.value_rotation).mT).to(out.dtype)

    def leave_lse(self, lse: Tensor, q: Tensor, scale: float) -> Tensor:
        """Convert the log-sum-exp [B, Hq, Tq] of q' k' to that of q k; `q` is in the model's coordinates."""
        grouped = _widen(q).unflatten(1, (self.mean.shape[1], -1))
        return lse + scale * (grouped * self.mean[:, :, None, None]).sum(-1).flatten(1, 2).to(lse.dtype)


class QuantizedKV(NamedTuple):
    """Quantised entries of all spans, packed: value = level(code) * norm of the entry.

    N entries in all. Codes are laid out as `lkv.cache.tiers.quantize` returns them; the pools are in the
    same rotated coordinates.

    Attributes:
        key_codes: uint8 [N, d * |key_bits| / 8].
        key_norms: bfloat16 [N].
        value_codes: uint8 [N, dv * |value_bits| / 8].
        value_norms: bfloat16 [N].
        tables: int32 [2, B, Hkv]: the number of quantised entries of each span, and the first one's index.
        key_bits: 8, 4 or 3, or `FP8`.
        value_bits: Likewise.
    """

    key_codes: Tensor
    key_norms: Tensor
    value_codes: Tensor
    value_norms: Tensor
    tables: Tensor
    key_bits: int
    value_bits: int


class RaggedKV(NamedTuple):
    """The KV entries of a layer: P of them in two pools, one span for each batch row and KV head.

    Attributes:
        k_pool: Keys [P, d] of all spans.
        v_pool: Values [P, dv], in the dtype of `k_pool`.
        starts: int32 [B, Hkv], the first entry of each span.
        lens: int32 [B, Hkv], the entries of each span.
        quantized: The first entries of each span, which are not in the pools: first those of the first item, then those
            of the second. Unquantised entry i of a span is at index starts + i of the pools, so `starts` may be
            negative.
        basis: The coordinates of pools and codes; all other tensors are in the model's coordinates.
    """

    k_pool: Tensor
    v_pool: Tensor
    starts: Tensor
    lens: Tensor
    quantized: Sequence[QuantizedKV] = ()
    basis: Basis | None = None

    def of_row(self, row: int) -> "RaggedKV":
        """Return the pools of one batch row, without its codes."""
        rows, basis = slice(row, row + 1), self.basis
        if basis is not None:
            basis = basis._replace(mean=basis.mean[rows], scale=basis.scale[rows])
        return RaggedKV(self.k_pool, self.v_pool, self.starts[rows], self.lens[rows], basis=basis)

    def tensors(self) -> dict[str, Tensor]:
        """Pools, starts and lens by name."""
        return dict(zip(self._fields[:4], self[:4], strict=True))


def _widen(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _match(like: Tensor, rotation: Tensor) -> Tensor:
    """`rotation` in the dtype of computations with `like`; unlike elementwise operators, `@` promotes no dtypes."""
    return rotation.to(torch.promote_types(like.dtype, torch.float32))


def check_arguments(q: Tensor | None, kv: RaggedKV, key: Tensor | None = None, value: Tensor | None = None) -> None:
    """Raise ValueError unless all tensors are consistent, without reading the values of starts and lens.

    This runs in every decode step of every layer, so it makes few calls.
    """
    k_pool, v_pool, starts, lens, quantized, basis = kv
    check_tensor("k_pool", k_pool, 2)
    check_tensor("v_pool", v_pool, 2)
    check_tensor("starts", starts, 2)
    check_tensor("lens", lens, 2)
    (batch, kv_heads), dtype, device = starts.shape, k_pool.dtype, k_pool.get_device()
    (entries, dim), (value_entries, value_dim) = k_pool.shape, v_pool.shape
    if lens.shape != (batch, kv_heads) or starts.dtype not in _INTEGERS or lens.dtype not in _INTEGERS:
        raise ValueError(
            f"Expected starts and lens as int32 of one shape [B, Hkv] but got {list(starts.shape)} {starts.dtype} and "
            f"{list(lens.shape)} {lens.dtype}: they do not fit each other."
        )
    if value_entries != entries or v_pool.dtype != dtype or not dtype.is_floating_point or not dim or not value_dim:
        raise ValueError(
            f"k_pool {list(k_pool.shape)} {dtype} and v_pool {list(v_pool.shape)} {v_pool.dtype} do not fit each other:"
            " expected [P, d] and [P, dv] of one floating-point dtype."
        )
    same = v_pool.get_device() == starts.get_device() == lens.get_device() == device
    tokens = None
    if q is not None:
        check_tensor("q", q, 4)
        rows, heads, tokens, q_dim = q.shape
        if rows != batch or not 0 < kv_heads <= heads or heads % kv_heads or q_dim != dim or q.dtype != dtype:
            raise ValueError(
                f"q {list(q.shape)} {q.dtype} does not fit starts {list(starts.shape)} and k_pool "
                f"{list(k_pool.shape)} {dtype}: expected [{batch}, multiple of {kv_heads}, Tq, {dim}] {dtype}."
            )
        same = same and q.get_device() == device
    if key is not None and value is not None:
        check_tensor("key", key, 4)
        check_tensor("value", value, 4)
        tokens = key.shape[2] if tokens is None else tokens
        shape, value_shape = (batch, kv_heads, tokens, dim), (batch, kv_heads, tokens, value_dim)
        if key.shape != shape or value.shape != value_shape or not key.dtype == value.dtype == dtype:
            raise ValueError(
                f"key {list(key.shape)} {key.dtype} and value {list(value.shape)} {value.dtype} do not fit the pools, "
                f"starts and q: expected {list(shape)} and {list(value_shape)} {dtype}."
            )
        same = same and key.get_device() == value.get_device() == device
    if len(quantized) > MAX_QUANTIZED:
        raise ValueError(f"Expected at most {MAX_QUANTIZED} sets of quantised entries, but got {len(quantized)}.")
    for part in quantized:
        _check_quantized(part, starts, dim, value_dim)
        same = same and all(x.get_device() == device for x in part[:5])
    if basis is not None:
        _check_basis(basis, starts, dim, value_dim)
        same = same and all(x.get_device() == device for x in basis)
    if not same:
        raise ValueError(f"All tensors must be on one device, {k_pool.device} as k_pool is.")


def _check_quantized(part: QuantizedKV, starts: Tensor, dim: int, value_dim: int) -> None:
    bits = part.key_bits, part.value_bits
    if not all(number in QUANTIZED_BITS for number in bits) or dim % 8 or value_dim % 8:
        raise ValueError(
            f"Expected {QUANTIZED_BITS} bits and multiples of 8 channels, but got bits {bits} and channels "
            f"{(dim, value_dim)}."
        )
    entries = part.key_codes.shape[0] if part.key_codes.ndim else -1
    shapes = (
        (entries, dim * abs(bits[0]) // 8),
        (entries,),
        (entries, value_dim * abs(bits[1]) // 8),
        (entries,),
        (2, *starts.shape),
    )
    names = part._fields[:5]
    _check_fields(f"quantised entries of {bits} bits", names, part[:5], shapes, _QUANTIZED_DTYPES)


def _check_basis(basis: Basis, starts: Tensor, dim: int, value_dim: int) -> None:
    by_head = (*starts.shape, dim)
    shapes = by_head, by_head, (dim, dim), (value_dim, value_dim)
    by_channel = basis.mean.dtype if basis.mean.dtype in _BASIS_DTYPES else torch.float32
    dtypes = by_channel, by_channel, torch.float32, torch.float32
    _check_fields("tensors of the basis", basis._fields, basis, shapes, dtypes)
    if not all(x.is_contiguous() for x in basis):
        raise ValueError("The tensors of the basis must be contiguous: call .contiguous() on each.")


def check_entering(basis: Basis, **tensors: Tensor) -> None:
    """Raise ValueError if PyTorch's operators would read beyond a storage; on a CPU only, as `check_spans`."""
    if basis.mean.device.type == "cpu":
        check_storages(**tensors, **basis._asdict())


def _check_fields(
    what: str,
    names: Sequence[str],
    tensors: Sequence[Tensor],
    shapes: Sequence[tuple[int, ...]],
    dtypes: Sequence[torch.dtype],
) -> None:
    """Raise ValueError unless the tensors of a record have these shapes and dtypes."""
    for x, shape, dtype in zip(tensors, shapes, dtypes, strict=True):
        if x.shape != shape or x.dtype is not dtype or x.layout is not torch.strided or x.is_neg() or not x.data_ptr():
            break
    else:
        return
    for name, x, shape in zip(names, tensors, shapes, strict=True):
        check_tensor(name, x, len(shape))
    actual, expected = [(tuple(x.shape), x.dtype) for x in tensors], list(zip(shapes, dtypes, strict=True))
    if actual != expected:
        right, wrong = (
            ", ".join(f"{name} {list(shape)} {dtype}" for name, (shape, dtype) in zip(names, pairs, strict=True))
            for pairs in (expected, actual)
        )
        raise ValueError(f"The {what} do not fit starts and the pools: expected {right}, but got {wrong}.")


def check_none_quantized(backend: str, kv: RaggedKV) -> None:
    """Raise BackendError if there are quantised entries, for a backend that does not support them."""
    if kv.quantized:
        raise BackendError(backend, "it reads no codes, as 'triton' and 'cpp' do: restore the entries.")


def check_spans(kv: RaggedKV, added: int | None = None) -> None:
    """Raise ValueError if a span, or the slots of the `added` new entries after it, lie outside of the pools.

    Only on a CPU, because on other devices this would synchronise.
    """
    if kv.starts.device.type != "cpu":
        return
    for start, length in zip(kv.starts.flatten().tolist(), kv.lens.flatten().tolist(), strict=True):
        first, count = (start, length) if added is None else (start + length, added)
        if first < 0 or length < 0 or first + count > len(kv.k_pool):
            raise ValueError(
                f"The {count} entries from {first} on, of a span of {length}, reach beyond the pools of "
                f"{len(kv.k_pool)}."
            )
