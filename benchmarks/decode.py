"""Decoding on a CPU over the compressed cache against the full one: attention alone, and whole tokens.

python -m benchmarks.decode    (writes decode.json)

Rows of the method "lkv" are of the backend that "auto" takes, which they name; where that is "cpp", rows of
"lkv, loop" stand beside them.
"""

import argparse
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import DynamicCache

from benchmarks.common import RESULTS
from lkv.cache.ragged_cache import RaggedCache
from lkv.cache.store import RaggedStore
from lkv.integrations.transformers.attention import patch_attention
from lkv.integrations.transformers.prefill import LayerKV
from lkv.kernels.ragged_attention import api, ragged_attention
from lkv.models.loading import load_default
from lkv.policy.lookup import default_policy
from lkv.policy.policy import Policy
from lkv.utils.results import collect_provenance, write_results
from lkv.utils.statistics import bootstrap


def random_prompt(model: Any, tokens: int) -> list[LayerKV]:
    """k and v of the model's shape without reading a prompt: decoding takes the same time whatever they hold."""
    attached = patch_attention(model)
    spec, generator = attached.spec, torch.Generator().manual_seed(tokens)
    shape = (1, spec.kv_heads, tokens, spec.head_dim)

    def draw() -> Tensor:
        return torch.randn(shape, generator=generator).to(model.device, model.dtype)

    return [LayerKV(draw(), draw(), spec.head_dim**-0.5, rotation=rotation) for rotation in attached.rotations]


def full_attention(query: Tensor, prompt: list[LayerKV], form: str) -> None:
    """One step of attention in every layer over the full cache, in one of the forms that PyTorch offers."""
    groups = query.shape[1] // prompt[0].key.shape[1]
    for layer in prompt:
        key, value = layer.key, layer.value
        if form == "grouped":
            scaled_dot_product_attention(query, key, value, enable_gqa=True)
        elif form == "repeated":
            key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
            scaled_dot_product_attention(query, key, value)
        else:
            # The query heads of a group as rows of one head: nothing is masked for a single token.
            rows = query.view(1, key.shape[1], groups, -1)
            scaled_dot_product_attention(rows, key, value)


def ragged(query: Tensor, cache: RaggedCache, scale: float, backend: str) -> None:
    for layer in cache.ragged_layers:
        assert isinstance(layer.store, RaggedStore)
        ragged_attention(query, *layer.store.attention_view(), scale, backend)


def one_token(model: Any, cache: Any) -> None:
    model(torch.tensor([[5]]), past_key_values=cache, use_cache=True)


def _loop(*_: Any) -> str:
    return "loop"


def one_token_by_loop(model: Any, cache: Any) -> None:
    with mock.patch.object(api, "_chosen", _loop):
        one_token(model, cache)


def backends(query: Tensor, cache: RaggedCache) -> dict[str, str]:
    """The methods to measure, and the backend of each."""
    spans = cache.ragged_layers[0].store
    assert isinstance(spans, RaggedStore)
    automatic = api._choose("auto", query, *spans.attention_view())
    return {"lkv": automatic} | ({"lkv, loop": "loop"} if automatic != "loop" else {})


def interleaved(runs: dict[str, Callable[[], Any]], repeats: int) -> dict[str, list[float]]:
    """Seconds of each run in turn, so that a noisy moment falls on all of them alike; two rounds warm up."""
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for repeat in range(repeats + 2):
        for name, run in runs.items():
            started = time.perf_counter()
            run()
            if repeat > 1:
                seconds[name].append(time.perf_counter() - started)
    return seconds


def row_of(what: str, method: str, tokens: int, retention: float, seconds: list[float], full: list[float], **more: Any):
    ratio = bootstrap([[mine / theirs] for mine, theirs in zip(seconds, full, strict=True)])
    middle = sorted(seconds)[len(seconds) // 2]
    print(f"{what:10} {tokens:5} {method:12} {1e3 * middle:8.2f} ms, {1 / ratio.value:.2f} times as fast")
    unit = "time by that of the full cache, mean of pairs"
    return (
        {"what": what, "method": method, "tokens": tokens, "retention": retention, "unit": unit, "baseline": "full"}
        | ratio._asdict()
        | {"seconds": middle}
        | more
    )


@torch.no_grad()
def rows_at(
    tokens: int, model: Any, policy: Policy, retention: float, repeats: int, about: dict[str, Any]
) -> list[dict[str, Any]]:
    """Attention by itself and whole tokens, over a prompt of `tokens`."""
    cache, prompt = RaggedCache(model, policy=policy, retention=retention), random_prompt(model, tokens)
    cache.fill(prompt)
    query = torch.randn(1, cache.spec.heads, 1, cache.spec.head_dim).to(model.dtype)
    forms: dict[str, Callable[[], Any]] = {
        form: partial(full_attention, query, prompt, form) for form in ("grouped", "repeated", "rows")
    }
    methods = backends(query, cache)
    ours: dict[str, Callable[[], Any]] = {
        method: partial(ragged, query, cache, prompt[0].scale, backend) for method, backend in methods.items()
    }
    seconds = interleaved(forms | ours, repeats)
    best = min(forms, key=lambda form: sorted(seconds[form])[repeats // 2])
    of_full, of_lkv = about | {"realised": 1.0}, about | {"realised": cache.realised_retention()}
    rows = [row_of("attention", "full", tokens, 1.0, seconds[best], seconds[best], **of_full, full_form=best)]
    for method, backend in methods.items():
        more = of_lkv | {"full_form": best, "backend": backend}
        rows.append(row_of("attention", method, tokens, retention, seconds[method], seconds[best], **more))
    stock = DynamicCache()
    for index, layer in enumerate(prompt):
        stock.update(layer.key, layer.value, index)
    steps: dict[str, Callable[[], Any]] = {"full": partial(one_token, model, stock)}
    steps |= {
        method: partial(one_token if method == "lkv" else one_token_by_loop, model, cache.fork()) for method in methods
    }
    seconds = interleaved(steps, repeats)
    rows.append(row_of("token", "full", tokens, 1.0, seconds["full"], seconds["full"], **of_full))
    for method, backend in methods.items():
        more = of_lkv | {"backend": backend}
        rows.append(row_of("token", method, tokens, retention, seconds[method], seconds["full"], **more))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, nargs="+", default=[512, 1024, 2048, 4096, 8000])
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--retention", type=float, default=0.15)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, torch.get_num_threads()])
    parser.add_argument("--out", type=Path, default=RESULTS / "decode.json")
    options = parser.parse_args()
    rows = []
    for threads in dict.fromkeys(options.threads):
        torch.set_num_threads(threads)
        for dtype in (torch.float32, torch.bfloat16):
            model, _ = load_default(dtype)
            about = {"dtype": str(dtype).removeprefix("torch."), "threads": threads}
            for tokens in options.tokens:
                rows += rows_at(tokens, model, default_policy(), options.retention, options.repeats, about)
    write_results(options.out, "decode", rows, 0, "python -m benchmarks.decode", measured=collect_provenance())


if __name__ == "__main__":
    main()
