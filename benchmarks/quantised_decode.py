"""Decoding over a compressed cache in 8 and 4 bits a value against the same cache in the model's own precision.

python -m benchmarks.quantised_decode    (writes quantised_decode.json; needs torchao)
"""

import argparse
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import RESULTS, command_of
from benchmarks.decode import interleaved, one_token, random_prompt, row_of
from lkv.cache.quantization import BITS
from lkv.cache.ragged import RaggedCache
from lkv.models import default_policy, load_default
from lkv.results import write_results


@torch.no_grad()
def rows_at(
    tokens: int, model: Any, retention: float, repeats: int, about: dict[str, Any], bits: tuple[int, ...] = BITS
) -> list[dict[str, Any]]:
    """Whole tokens over a prompt of `tokens`, a row a width."""
    policy = default_policy()
    caches: dict[int | None, RaggedCache] = {None: RaggedCache(model, policy, retention)}
    caches |= {width: RaggedCache(model, policy, retention, bits=width) for width in bits}
    prompt = random_prompt(caches[None].spec, tokens, model.dtype)
    steps: dict[str, Callable[[], Any]] = {}
    for width, cache in caches.items():
        cache.fill(prompt)
        steps[str(width)] = partial(one_token, model, cache)
    seconds = interleaved(steps, repeats)
    return [
        row_of("token", "lkv", tokens, retention, seconds[str(width)], seconds["None"], **about)
        | {"bits": width, "realised": cache.realised_retention(), "nbytes": cache.nbytes(), "baseline": "lkv"}
        | {"unit": "time by that of the same cache unquantised, mean of pairs"}
        for width, cache in caches.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, nargs="+", default=[1024, 4096, 8000])
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--retention", type=float, default=0.15)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, torch.get_num_threads()])
    parser.add_argument("--out", type=Path, default=RESULTS / "quantised_decode.json")
    options = parser.parse_args()
    rows = []
    for threads in dict.fromkeys(options.threads):
        torch.set_num_threads(threads)
        for dtype in (torch.float32, torch.bfloat16):
            model, _ = load_default(dtype)
            about = {"dtype": str(dtype).removeprefix("torch."), "threads": threads}
            for tokens in options.tokens:
                rows += rows_at(tokens, model, options.retention, options.repeats, about)
    write_results(options.out, "quantised_decode", rows, 0, command_of("benchmarks.quantised_decode", options))


if __name__ == "__main__":
    main()
