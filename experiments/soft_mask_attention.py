"""Soft-masked attention, forward and backward: correctness first, then time and memory against PyTorch's SDPA.

On a CPU: the augmented column against SDPA with a differentiable additive mask, SmolLM2's heads. On CUDA: Triton and
the augmented column against plain causal flash attention, which has no mask at all, Llama-3.1-8B's heads.

python -m experiments.soft_mask_attention    (writes soft_mask_attention.json)

--tokens are 2048 on a CPU by default and 8192 on CUDA.
"""

import ctypes
import functools
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from experiments.common import interleaved, paired_ratio, parse_options, save_rows, wall_clock
from experiments.profile.memory import measure_peak
from lkv.kernels.soft_mask_attention import soft_mask_attention
from lkv.utils.devices import dtype_name

Attention = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


class Shape(NamedTuple):
    """Heads and head size of a model, and the precision it is trained in."""

    heads: int
    kv_heads: int
    dim: int
    dtype: torch.dtype


SMOLLM2 = Shape(9, 3, 64, torch.float32)
LLAMA_8B = Shape(32, 8, 128, torch.bfloat16)


def main() -> None:
    options = parse_options(
        __doc__, "soft_mask_attention", device="cuda" if torch.cuda.is_available() else "cpu", tokens=int, repeats=10
    )  # fmt: skip
    on_cuda = options.device.startswith("cuda")
    shape = LLAMA_8B if on_cuda else SMOLLM2
    options.tokens = tokens = options.tokens or (8192 if on_cuda else 2048)
    names = ("triton", "sdpa") if on_cuda else ("sdpa",)
    masked: dict[str, Attention] = {name: functools.partial(soft_mask_attention, backend=name) for name in names}
    baseline = "flash without a mask" if on_cuda else "additive mask"
    for name, attend in (masked if on_cuda else masked | {baseline: additive}).items():
        print(f"{name}: error {check(attend, shape, options.device):.2f} of that of eager attention")
    attentions = masked | {baseline: flash if on_cuda else additive}
    rows = measured(attentions, baseline, inputs(shape, tokens, options.device), options.repeats)
    for row in rows:
        print(
            f"{row['method']:20} {row['value']:.3f} of the time, {row['seconds'] * 1e3:.1f} ms, {row['peak_bytes']} B"
        )
    save_rows(options, "soft_mask_attention", rows)


def inputs(shape: Shape, tokens: int, device: str) -> list[Tensor]:
    """q, k, v as a model lays them out, and a log-mask in float32; all want gradients."""
    torch.manual_seed(0)
    sizes = (shape.heads, shape.kv_heads, shape.kv_heads)
    qkv = [torch.randn(1, tokens, heads, shape.dim).to(device, shape.dtype).transpose(1, 2) for heads in sizes]
    log_mask = torch.rand(1, shape.kv_heads, tokens).log().to(device)
    return [x.requires_grad_() for x in (*qkv, log_mask)]


def additive(q: Tensor, k: Tensor, v: Tensor, log_mask: Tensor) -> Tensor:
    """What stock PyTorch offers for a learned mask: a T x T bias with a gradient."""
    rows, columns = q.shape[2], k.shape[2]
    hidden = torch.ones(rows, columns, dtype=torch.bool, device=q.device).triu(columns - rows + 1)
    bias = log_mask.repeat_interleave(q.shape[1] // k.shape[1], 1)[:, :, None].to(q.dtype)
    bias = bias.masked_fill(hidden, -torch.inf)
    return scaled_dot_product_attention(q, k, v, attn_mask=bias, enable_gqa=True)


def flash(q: Tensor, k: Tensor, v: Tensor, log_mask: Tensor) -> Tensor:
    """Causal flash attention, blind to the mask: the least that attention can cost in PyTorch."""
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        return scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


def check(attend: Attention, shape: Shape, device: str, tokens: int = 200) -> float:
    """The largest error of output and gradients as a share of that of eager attention; raises ValueError beyond 2."""
    arguments = inputs(shape, tokens, device)
    eager = functools.partial(soft_mask_attention, backend="reference")
    truth = gradients(eager, [x.detach().double().requires_grad_() for x in arguments])
    errors = [
        [float((x.double() - exact).abs().max()) for x, exact in zip(gradients(f, arguments), truth, strict=True)]
        for f in (attend, eager)
    ]
    worst = max(error / max(rough, 1e-6) for error, rough in zip(*errors, strict=True))
    if not worst <= 2.0:
        raise ValueError(f"{attend} is wrong: its error is {worst:.1f} times that of eager attention in {shape.dtype}.")
    return worst


def gradients(attend: Attention, arguments: list[Tensor]) -> list[Tensor]:
    out = attend(*arguments)
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out)
    return [out.detach(), *torch.autograd.grad(out, arguments, weights)]


def measured(
    methods: dict[str, Attention], baseline: str, arguments: list[Tensor], repeats: int
) -> list[dict[str, Any]]:
    """One row a method: its time as mean paired ratio to the baseline's, its median time and its peak memory."""
    runs = {name: functools.partial(forward_and_backward, attend, arguments) for name, attend in methods.items()}
    seconds = interleaved(runs, repeats, functools.partial(wall_clock, device=arguments[0].device), warmups=1)
    q = arguments[0]
    # Two matrix products forward and five backward, half of each under the diagonal.
    operations = 7 * q.shape[1] * q.shape[2] ** 2 * q.shape[3]
    best = matmul_tflops(q) if q.is_cuda else 0.0
    rows = []
    for name, times in seconds.items():
        row: dict[str, Any] = {"method": name, "tokens": q.shape[2], "baseline": baseline}
        row |= paired_ratio(times, seconds[baseline])
        row |= {"unit": "mean of paired ratios of the time forward and backward"}
        row |= {"peak_bytes": peak_bytes(methods[name], arguments), "heads": q.shape[1], "head_dim": q.shape[3]}
        row |= {"tflops": operations / row["seconds"] / 1e12, "dtype": dtype_name(q.dtype)}
        if q.is_cuda:
            row |= {"device": torch.cuda.get_device_name(q.device), "fraction": row["tflops"] / best}
        rows.append(row)
    return rows


def forward_and_backward(attend: Attention, arguments: list[Tensor]) -> None:
    torch.autograd.grad(attend(*arguments), arguments, torch.ones_like(arguments[0]), allow_unused=True)


def matmul_tflops(like: Tensor, size: int = 8192) -> float:
    """What a large matrix product reaches on the device in the dtype of `like`."""
    x = torch.randn(size, size, device=like.device, dtype=like.dtype)
    return 2 * size**3 / median(wall_clock(lambda: x @ x, x.device) for _ in range(10)) / 1e12


def peak_bytes(attend: Attention, arguments: list[Tensor]) -> int | None:
    """Memory that one pass takes beyond its inputs; on a CPU by the peak resident size, where Linux tells it."""
    if arguments[0].is_cuda:
        with measure_peak(arguments[0].device) as peak:
            forward_and_backward(attend, arguments)
        return peak.nbytes
    reset, status = (Path("/proc/self", name) for name in ("clear_refs", "status"))
    if not reset.exists():
        return None

    def resident(key: str) -> int:
        lines = status.read_text(encoding="ascii").splitlines()
        return next(1024 * int(line.split()[1]) for line in lines if line.startswith(key))

    # Give back what the allocator holds, so that using it again counts.
    ctypes.CDLL(None).malloc_trim(0)
    reset.write_text("5", encoding="ascii")
    before = resident("VmRSS")
    forward_and_backward(attend, arguments)
    return resident("VmHWM") - before


if __name__ == "__main__":
    main()
