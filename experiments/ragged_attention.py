"""Decode attention over the ragged cache on a GPU: correctness, then time against the full cache's flash attention.

python -m experiments.ragged_attention    (needs CUDA; writes ragged_attention.json)
TRITON_INTERPRET=1 python -m experiments.ragged_attention --device cpu --tokens 600 --layers 1 --batches 1 2 --heads 4 \
    --kv-heads 2 --dim 16 --dtype float32 --repeats 2 --out trial.json    (the same path, without a GPU)

--device cpu runs in Triton's interpreter. There are --layers divided by the batch.
"""

import argparse
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import Tensor

from experiments.common import interleaved, paired_ratio, parse_options, save_rows, wall_clock
from experiments.decode import full_attention
from lkv.kernels.ragged_attention import RaggedKV, append_and_attend, ragged_attention
from lkv.utils import devices

_ROOM = 256
_COPIED = {"cuda": 2**30, "cpu": 2**20}


@dataclass
class Layer:
    """One layer's compressed and full cache, and the newest token's query."""

    query: Tensor
    kv: RaggedKV
    key: Tensor
    value: Tensor

    def ragged(self, scale: float, backend: str) -> Tensor:
        return ragged_attention(self.query, self.kv, scale, backend)


def layer_of(options: argparse.Namespace, batch: int, dtype: torch.dtype) -> Layer:
    """Random k, v; the heads' shares of the tokens spread as learned ones do, from almost nothing to almost all."""
    shares = torch.rand(batch, options.kv_heads) ** 4
    shares = (shares * (options.retention / shares.mean())).clamp(max=1)
    lens = (shares * options.tokens).int() + 1
    ends = (lens.flatten() + _ROOM).cumsum(0)
    starts = (ends - lens.flatten() - _ROOM).view_as(lens).int()
    draw = partial(torch.randn, dtype=dtype, device=options.device)
    k_pool, v_pool = (draw(int(ends[-1]), options.dim) for _ in range(2))
    return Layer(
        draw(batch, options.heads, 1, options.dim),
        RaggedKV(k_pool, v_pool, starts.to(options.device), lens.to(options.device)),
        draw(batch, options.kv_heads, options.tokens, options.dim),
        draw(batch, options.kv_heads, options.tokens, options.dim),
    )


def error_of(layer: Layer, scale: float) -> float:
    """The kernels' largest error over the largest output; SystemExit where it or what they append is wrong."""
    output = layer.ragged(scale, "triton")
    exact = layer.ragged(scale, "reference")
    error = float((output - exact).abs().max() / exact.abs().max())
    limit = 4 * torch.finfo(output.dtype).eps
    if not error <= limit:
        sys.exit(f"the kernels are off by {error:.2e} of the largest output, more than {limit:.2e}: nothing was timed.")
    for rows in (1, 3):
        new = [torch.randn_like(x[:, :, :rows]) for x in (layer.key, layer.value)]
        query = layer.query.expand(-1, -1, rows, -1)
        kv = layer.kv
        copies = [RaggedKV(kv.k_pool.clone(), kv.v_pool.clone(), kv.starts, kv.lens.clone()) for _ in range(2)]
        for kv, backend in zip(copies, ("triton", "loop"), strict=True):
            append_and_attend(query, new[0], new[1], kv, scale, backend)
        if not all(torch.equal(*pair) for pair in zip(*(kv[:4] for kv in copies), strict=True)):
            sys.exit("the kernels appended something else than index assignment does: nothing was timed.")
    return error


def seconds_of(run: Callable[[], Any], device: str) -> float:
    if device == "cpu":
        return wall_clock(run)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    run()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3


def copy_bandwidth(device: str) -> float:
    """Bytes read and written a second by a plain copy."""
    source = torch.zeros(_COPIED[device], dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    run = partial(target.copy_, source)
    return 2 * len(source) / median(interleaved({"copy": run}, 10, partial(seconds_of, device=device))["copy"])


def rows_of(options: argparse.Namespace, batch: int, copied: float) -> list[dict[str, Any]]:
    """Times of one decode step's attention in all layers."""
    torch.manual_seed(batch)
    dtype, scale = getattr(torch, options.dtype), options.dim**-0.5
    # The full cache of a large batch leaves room for fewer layers.
    layers = [layer_of(options, batch, dtype) for _ in range(max(1, options.layers // batch))]
    error = max(error_of(layer, scale) for layer in layers)

    def over(step: Callable[[Layer], Any]) -> Callable[[], Any]:
        return lambda: [step(layer) for layer in layers]

    def full(layer: Layer, form: str) -> Tensor:
        return full_attention(layer.query, layer.key, layer.value, form)

    forms = ("grouped", "rows")
    fast = {"triton": over(lambda layer: layer.ragged(scale, "triton"))}
    fast |= {form: over(partial(full, form=form)) for form in forms}
    runs = dict(fast)
    if options.device != "cpu":  # the kernels without the time that Python takes to launch them
        runs = {name: devices.capture(run, torch.device(options.device))[0] for name, run in fast.items()}
    runs |= {"triton, launched": fast["triton"], "loop": over(lambda layer: layer.ragged(scale, "loop"))}
    seconds = interleaved(runs, options.repeats, partial(seconds_of, device=options.device))

    best = min(forms, key=lambda form: median(seconds[form]))
    entries = sum(int(layer.kv.lens.sum()) for layer in layers)
    realised = entries / (len(layers) * batch * options.kv_heads * options.tokens)
    read = entries * 2 * options.dim * dtype.itemsize
    rows = []
    for name in (best, "triton", "triton, launched", "loop"):
        ratio, is_full = paired_ratio(seconds[name], seconds[best]), name == best
        through = (read / realised if is_full else read) / ratio["seconds"]
        print(
            f"batch {batch:2} {'full, ' + best if is_full else name:18} {1e3 * ratio['seconds']:9.3f} ms, "
            f"{1 / ratio['value']:6.2f} times as fast as the full cache, {through / copied:.2f} of copy bandwidth"
        )
        row = {
            "method": "full" if is_full else "lkv", "backend": name, "baseline": "full", "batch": batch,
            "tokens": options.tokens, "retention": 1.0 if is_full else options.retention,
            "realised": 1.0 if is_full else realised, "layers": len(layers),
            "microseconds_a_layer": 1e6 * ratio["seconds"] / len(layers),
            "unit": "time by that of the full cache's fastest attention, mean of pairs", **ratio,
            "bytes_a_second": through, "of_copy_bandwidth": through / copied,
        }  # fmt: skip
        rows.append(row if is_full else row | {"error": error})
    return rows


@torch.no_grad()
def main(arguments: list[str] | None = None) -> None:
    options = parse_options(
        __doc__, "ragged_attention", "", arguments, device="cuda", tokens=200_000, retention=0.15,
        batches=[1, 8], layers=8, heads=32, kv_heads=8, dim=128, dtype="bfloat16", repeats=50,
    )  # fmt: skip
    copied = copy_bandwidth(options.device)
    device = torch.cuda.get_device_name() if options.device == "cuda" else "cpu, interpreter"
    shape = {key: getattr(options, key) for key in ("heads", "kv_heads", "dim", "dtype")}
    rows = [row for batch in options.batches for row in rows_of(options, batch, copied)]
    shared = shape | {"device": device, "copy_bytes_a_second": copied}
    save_rows(options, "ragged_attention", [row | shared for row in rows])


if __name__ == "__main__":
    main()
