"""A model's fingerprint: directions of stretches of rows from the matrices of its first, middle and last layer.

Rows are read from whatever holds them: plain tensors, DTensors, and the packed tensors of torchao and bitsandbytes.
"""

import re
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import embedding

from lkv.fingerprint import encode

_ROWS = 2  # stretches of each matrix
# Short and aligned: within a block of columns that share a scale the direction is the same before it is applied.
_WIDTH = 64
_VALUES = 4  # single values of each matrix, for policies saved before


def read_directions(weights: Mapping[str, Tensor], layers: int) -> tuple[str, ...]:
    """The fingerprint of the decoder's `weights` by name, as `lkv.fingerprint.agreement` compares it.

    Matrices in a form that cannot be read as rows are left out: nothing is left of a model that has only such.
    Under tensor parallelism every process of the group must call this.
    """
    places: list[str] = []
    parts: list[Tensor] = []
    for name, weight in _matrices(weights, layers):
        height, columns = _shape(weight)
        wanted = [height * (number + 1) // (_ROWS + 1) for number in range(_ROWS)]
        rows = _rows(weight, wanted)
        if rows is None:
            continue
        for number, row in enumerate(wanted):
            start = _start(columns, number)
            part = rows[number, start : start + _WIDTH]
            places.append(f"{name}[{row}, {start}:{start + len(part)}]")
            parts.append(part.float().to(parts[0].device if parts else part.device))
    # One copy from the device for all of them.
    values = torch.cat(parts).tolist() if parts else []
    directions = []
    for position, part in zip(places, parts, strict=True):
        directions.append(encode(position, values[: len(part)]))
        values = values[len(part) :]
    return tuple(direction for direction in directions if direction)


def read_values(weights: Mapping[str, Tensor], layers: int) -> tuple[float, ...]:
    """A few single values of each matrix, which policies saved before know their model by."""
    values: list[float] = []
    for _, weight in _matrices(weights, layers, plain=True):
        height, columns = weight.shape
        places = torch.linspace(0, height * columns - 1, _VALUES + 2, dtype=torch.float64, device="cpu")[1:-1].long()
        rows = _rows(weight, (places // columns).tolist())
        if rows is not None:
            values += rows.float().cpu().gather(1, (places % columns)[:, None])[:, 0].tolist()
    return tuple(round(value, 8) for value in values)


def _matrices(weights: Mapping[str, Tensor], layers: int, plain: bool = False) -> Iterable[tuple[str, Tensor]]:
    """(name within the decoder, matrix) of the sampled layers, in the order of their names."""
    wanted = {0, layers // 2, layers - 1}
    for full_name, weight in sorted(weights.items()):
        name = re.search(r"(?:^|\.)((\d+)\..+)", full_name)
        if not name or int(name[2]) not in wanted or len(_shape(weight)) != 2:
            continue
        if weight.is_floating_point() or (not plain and _kind(weight) in ("Params4bit", "Int8Params")):
            yield name[1], weight


def _kind(weight: Tensor) -> str:
    return type(weight).__name__


def _shape(weight: Tensor) -> tuple[int, ...]:
    """Of the matrix that `weight` stands for: bitsandbytes packs two values of 4 bits into a byte."""
    state = getattr(weight, "quant_state", None)
    return tuple(weight.shape if state is None else state.shape)


def _start(columns: int, number: int) -> int:
    """First column of a row's stretch, a multiple of its width."""
    blocks = max(1, columns // _WIDTH)
    return _WIDTH * min(blocks - 1, blocks * (number + 1) // (_ROWS + 1))


@torch.no_grad()
def _rows(weight: Tensor, rows: list[int]) -> Tensor | None:
    """The `rows` [n, columns] of a matrix, or None where its form does not give them."""
    if getattr(weight, "device_mesh", None) is not None:
        return _gathered(weight, rows)
    if type(weight) in (Tensor, torch.nn.Parameter):
        return torch.stack([weight[row] for row in rows])
    if _kind(weight) == "Params4bit" and getattr(weight, "quant_state", None) is not None:
        return _four_bits(weight, rows)
    if _kind(weight) == "Int8Params":
        # Each row has one scale, which leaves its direction as it is.
        return torch.stack([weight.data[row] for row in rows])
    return _dequantised(weight, rows)


def _gathered(weight: Any, rows: list[int]) -> Tensor | None:
    """Of a matrix whose rows or columns lie in several processes; a lookup fetches the few rows alone."""
    from torch.distributed.tensor import DTensor, Replicate

    mesh = weight.device_mesh
    index = torch.tensor(rows, device=weight.device)
    try:
        gathered: Any = embedding(DTensor.from_local(index, mesh, [Replicate()] * mesh.ndim, run_check=False), weight)
    except NotImplementedError:
        return None  # packed as well as shared out
    return gathered.full_tensor()


def _four_bits(weight: Any, rows: list[int]) -> Tensor | None:
    try:
        from bitsandbytes.functional import dequantize_4bit

        return dequantize_4bit(weight.data, weight.quant_state)[rows]
    except (ImportError, RuntimeError, ValueError):
        return None


def _dequantised(weight: Any, rows: list[int]) -> Tensor | None:
    """Of a tensor class with a `dequantize` of its own, as torchao's have: the rows alone, or else all of it."""
    if type(weight).dequantize is Tensor.dequantize:
        return torch.stack([weight[row] for row in rows])
    try:
        return torch.cat([weight[row : row + 1].dequantize() for row in rows])
    except (NotImplementedError, RuntimeError, TypeError, ValueError, AssertionError, IndexError):
        pass  # packed in tiles: no row can be taken out by itself
    try:
        return weight.dequantize()[rows]
    except (NotImplementedError, RuntimeError, TypeError, ValueError, AssertionError, IndexError):
        return None
