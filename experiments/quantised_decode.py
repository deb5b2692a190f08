"""Decoding over a compressed cache in 8, 4 and 3 bits a value and in FP8, against the same cache in the model's dtype.

python -m experiments.quantised_decode    (writes quantised_decode.json)
python -m experiments.quantised_decode --device cuda --config llama-3.2-1b --tokens 16384 65536 --dtype bfloat16

--config: random weights of a published shape, as in `python -m experiments.profile`.
"""

import argparse
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from experiments.common import interleaved, parse_options, save_rows, wall_clock
from experiments.decode import random_prompt, row_of, sweep
from experiments.profile.random_models import extend_positions, random_model, random_policy, read_config
from lkv.cache.ragged_cache import RaggedCache
from lkv.hf.attention import patch_attention
from lkv.hf.loading import load_default
from lkv.kernels import BITS_BY_NAME as BITS
from lkv.policy.lookup import default_policy
from lkv.policy.policy import Policy
from lkv.utils import devices


@torch.no_grad()
def rows_at(
    tokens: int, model: Any, policy: Policy, retention: float, repeats: int, about: dict[str, Any]
) -> list[dict[str, Any]]:
    """Whole tokens over a prompt of `tokens`, a row a width; None is the model's own."""
    prompt = random_prompt(model, tokens)
    token = torch.tensor([[5]], device=model.device)
    caches = {width: RaggedCache(model, policy=policy, retention=retention, bits=width) for width in (None, *BITS)}
    steps: dict[str, Callable[[], Any]] = {}
    for width, cache in caches.items():
        cache.fill(prompt)
        steps[str(width)] = partial(model, token, past_key_values=cache, use_cache=True)
    seconds = interleaved(steps, repeats, partial(wall_clock, device=token.device))
    return [
        row_of("token", "lkv", tokens, retention, seconds[str(width)], seconds["None"], **about)
        | {"bits": width, "realised": cache.realised_retention(), "nbytes": cache.nbytes(), "baseline": "lkv"}
        | {"unit": "time by that of the same cache unquantised, mean of pairs"}
        for width, cache in caches.items()
    ]


def model_of(options: argparse.Namespace, dtype: torch.dtype) -> tuple[Any, Policy]:
    """The demo model with its policy, or a shape with random weights and a random one."""
    if options.config is None:
        return load_default(dtype)[0].to(options.device), default_policy()
    model = random_model(read_config(options.config), dtype, torch.device(options.device))
    extend_positions(model, max(options.tokens) + options.repeats + 99)
    return model, random_policy(patch_attention(model).spec)


def main(arguments: list[str] | None = None) -> None:
    options = parse_options(
        __doc__, "quantised_decode", "", arguments, device="cpu", config=str, dtype=["float32", "bfloat16"],
        tokens=[1024, 4096, 8000], repeats=30, retention=0.15, threads=[1, torch.get_num_threads()],
    )  # fmt: skip
    device = torch.device(options.device)
    about = {"model": options.config or "smollm2-135m-instruct", "device": options.device}
    if devices.is_gpu(device):
        options.threads, about["device"] = [0], devices.runtime(device).get_device_name(device)
    save_rows(options, "quantised_decode", sweep(options, partial(model_of, options), rows_at, **about))


if __name__ == "__main__":
    main()
