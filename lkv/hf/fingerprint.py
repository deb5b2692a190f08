"""A model's fingerprint: the directions of short row segments of the matrices in its first, middle and last layer.

Rows are read from plain tensors, DTensors, and the packed tensors of torchao and bitsandbytes. Matrices that follow a
norm are multiplied by its weight: AWQ and SmoothQuant move column factors from one to the other without changing the
model's outputs.
"""

import base64
import contextlib
import hashlib
import math
import re
from array import array
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding

from lkv.errors import CacheError

_ROWS = 2  # row segments per matrix
# Short and aligned: a quantisation scale shared by a block of columns does not change the direction.
_WIDTH = 64
_ADAPTER_VALUES = 64  # sampled from each matrix of an adapter
_VALUES = 4  # sampled from each matrix for the model's digest
# The matrices of a layer that follow a norm, and the possible names of this norm.
_READERS = (
    (re.compile(r"self_attn\.(q|k|v|qkv)_proj\.weight$"), ("input_layernorm",)),
    (re.compile(r"mlp\.(gate|up|gate_up)_proj\.weight$"), ("pre_feedforward_layernorm", "post_attention_layernorm")),
)


def encode_direction(position: str, values: Sequence[float]) -> str | None:
    """Encode `position` and the direction of `values`, 8 bits a value; None for all-zero or non-finite values."""
    largest = max(map(abs, values), default=0.0)
    if not 0.0 < largest < math.inf or not all(map(math.isfinite, values)):
        return None
    codes = array("b", (round(127 * value / largest) for value in values))
    return f"{position} {base64.b64encode(codes.tobytes()).decode()}"


@torch.no_grad()
def read_norms(decoder: nn.Module, layers: int) -> dict[str, Tensor]:
    """Return the factors [columns] of the sampled layers' norms, by the norm's name within the decoder."""
    norm_names = {name for _, names in _READERS for name in names}
    norms = {}
    for name, norm in decoder.named_modules():
        weight = getattr(norm, "weight", None)
        if name.rpartition(".")[2] not in norm_names or layer_index(name) not in _sampled(layers):
            continue
        if not isinstance(weight, Tensor) or weight.ndim != 1 or getattr(weight, "device_mesh", None) is not None:
            continue
        # Run the norm itself, because some multiply by 1 + weight. The probe has mean 0 and variance 1.
        probe = torch.ones_like(weight)
        probe[1::2] = -1
        norms[name] = (norm.forward(probe) - norm.forward(-probe)) / 2 * probe
    return norms


def read_directions(
    weights: Mapping[str, Tensor], layers: int, norms: Mapping[str, Tensor] | None = None
) -> tuple[str, ...]:
    """Return the fingerprint of the decoder's `weights` by name, as `lkv.policy.model_match.agreement` compares it.

    `norms` is the result of `read_norms`. Matrices with unreadable rows are left out, so the fingerprint may be empty.
    Under tensor parallelism every process of the group must call this.
    """
    norms = norms or {}
    directions = []
    for name, weight in _matrices(weights, layers):
        height, columns = _shape(weight)
        norm = _norm_before(name, norms)
        row_numbers = [height * (number + 1) // (_ROWS + 1) for number in range(_ROWS)]
        rows = _rows(weight, row_numbers)
        if rows is None:
            continue
        label = re.sub(r"^(?:.*?\.)?(?=\d+\.)", "", name)  # starting at the layer's index
        if norm is not None:
            label += f" * {norm.rpartition('.')[2]}"
        for number, row in enumerate(row_numbers):
            blocks = max(1, columns // _WIDTH)
            start = _WIDTH * min(blocks - 1, blocks * (number + 1) // (_ROWS + 1))
            part = rows[number, start : start + _WIDTH].float()
            if norm is not None:
                part = part * norms[norm][start : start + _WIDTH].to(part)
            directions.append(encode_direction(f"{label}[{row}, {start}:{start + len(part)}]", part.tolist()))
    return tuple(direction for direction in directions if direction)


def without_adapters(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the base model's weights under their original names, without PEFT's adapters and name prefixes."""
    adapted = {name.rpartition(".base_layer.")[0] for name in weights if ".base_layer." in name}
    base = {}
    for name, weight in weights.items():
        ends = [index for index, letter in enumerate(name) if letter == "."]
        layer = next((name[:end] for end in ends if name[:end] in adapted), None)
        if layer is None or name.startswith(layer + ".base_layer."):
            base[name.replace(".base_layer.", ".")] = weight
    return base


@torch.no_grad()
def read_adapters(model: nn.Module) -> str:
    """Return a digest of the active PEFT adapters (LoRA and others) of `model`; "" if there are none.

    It covers their weights, their scales and whether they are merged into the base model.
    """
    values = []
    for _, layer in sorted((name, module) for name, module in model.named_modules() if "base_layer" in module._modules):
        if getattr(layer, "disable_adapters", False) is True:
            continue
        # Merged adapters take effect even if inactive.
        active = getattr(layer, "merged_adapters", None) or getattr(layer, "active_adapters", None)
        active = active or getattr(layer, "active_adapter", None) or []
        names = {active} if isinstance(active, str) else set(active)
        scaling = getattr(layer, "scaling", None)  # some kinds of adapters have no scaling
        scales = [float(scaling[name]) for name in sorted(names & set(scaling))] if isinstance(scaling, dict) else []
        values.append(torch.tensor(scales, dtype=torch.bfloat16, device="cpu"))
        for name, weight in sorted(layer.named_parameters()):
            if not name.startswith("base_layer.") and names & set(name.split(".")):
                # A few values of each matrix, in the lowest-precision dtype that adapters are loaded in.
                flat = weight.detach().flatten()
                values.append(flat[:: max(1, len(flat) // _ADAPTER_VALUES)].to("cpu", torch.bfloat16))
    digested = torch.cat(values) if values else torch.empty(0)
    return hashlib.sha256(digested.view(torch.int16).numpy().tobytes()).hexdigest()[:32] if len(digested) else ""


def check_same_adapters(before: str, now: str) -> None:
    """Raise CacheError if the digest of `read_adapters` has changed from `before` to `now`."""
    if before != now:
        raise CacheError(
            "the text was compressed with other adapters than those active in the model; activate the same ones, or "
            "compress the text again."
        )


def read_values(weights: Mapping[str, Tensor], layers: int) -> tuple[float, ...]:
    """Return a few values of each plain matrix, for a digest of the exact weights."""
    values: list[float] = []
    for _, weight in _matrices(weights, layers, plain=True):
        height, columns = weight.shape
        places = torch.linspace(0, height * columns - 1, _VALUES + 2, dtype=torch.float64, device="cpu")[1:-1].long()
        rows = _rows(weight, (places // columns).tolist())
        if rows is not None:
            values += rows.float().cpu().gather(1, (places % columns)[:, None])[:, 0].tolist()
    return tuple(round(value, 8) for value in values)


def _matrices(weights: Mapping[str, Tensor], layers: int, plain: bool = False) -> Iterable[tuple[str, Tensor]]:
    """Yield (name, matrix) of the sampled layers, sorted by name."""
    for name, weight in sorted(weights.items()):
        if layer_index(name) not in _sampled(layers) or len(_shape(weight)) != 2:
            continue
        if weight.is_floating_point() or (not plain and type(weight).__name__ in ("Params4bit", "Int8Params")):
            yield name, weight


def _sampled(layers: int) -> set[int]:
    return {0, layers // 2, layers - 1}


def layer_index(name: str) -> int | None:
    """Return the layer index in the name of a module or parameter."""
    match = re.search(r"(?:^|\.)(\d+)\.", name)
    return int(match[1]) if match else None


def _norm_before(name: str, norms: Mapping[str, Tensor]) -> str | None:
    """Return the norm before the matrix `name`; None if it is unknown."""
    for matrix, possible in _READERS:
        if match := matrix.search(name):
            layer = name[: match.start()]
            # In layers without an input norm, each norm follows the module that it is named after.
            before = [layer + norm for norm in possible if layer + "input_layernorm" in norms and layer + norm in norms]
            return before[0] if before else None
    return None


def _shape(weight: Tensor) -> tuple[int, ...]:
    """Return the unpacked shape of the matrix `weight`: bitsandbytes packs two 4-bit values into a byte."""
    state = getattr(weight, "quant_state", None)
    return tuple(weight.shape if state is None else state.shape)


@torch.no_grad()
def _rows(weight: Tensor, rows: list[int]) -> Tensor | None:
    """Return the `rows` [n, columns] of a matrix, or None if they cannot be read."""
    if getattr(weight, "device_mesh", None) is not None:
        return _gather_rows(weight, rows)
    if type(weight) in (Tensor, nn.Parameter):
        return torch.stack([weight[row] for row in rows])
    kind, state = type(weight).__name__, getattr(weight, "quant_state", None)
    if kind == "Params4bit" and state is not None:
        with contextlib.suppress(ImportError, RuntimeError, ValueError):
            from bitsandbytes.functional import dequantize_4bit

            return dequantize_4bit(weight.data, state)[rows]
        return None
    if kind == "Int8Params":
        # A per-row scale does not change a row's direction.
        return torch.stack([weight.data[row] for row in rows])
    return _dequantize_rows(weight, rows)


def _gather_rows(weight: Any, rows: list[int]) -> Tensor | None:
    """Return rows of a matrix that is sharded over processes; an embedding lookup fetches only these rows."""
    from torch.distributed.tensor import DTensor, Replicate

    mesh = weight.device_mesh
    index = torch.tensor(rows, device=weight.device)
    try:
        gathered: Any = embedding(DTensor.from_local(index, mesh, [Replicate()] * mesh.ndim, run_check=False), weight)
    except NotImplementedError:
        return None  # packed and sharded
    return gathered.full_tensor()


def _dequantize_rows(weight: Tensor, rows: list[int]) -> Tensor | None:
    """Dequantise rows of a tensor subclass such as torchao's: only these rows if possible, else all."""
    if type(weight).dequantize is Tensor.dequantize:
        return torch.stack([weight[row] for row in rows])
    # A matrix packed in tiles does not support indexing single rows.
    for read in (
        lambda: torch.cat([weight[row : row + 1].dequantize() for row in rows]),
        lambda: weight.dequantize()[rows],
    ):
        with contextlib.suppress(NotImplementedError, RuntimeError, TypeError, ValueError, AssertionError, IndexError):
            return read()
    return None
