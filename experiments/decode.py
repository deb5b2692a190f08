"""Decoding on a CPU over the compressed cache against the full one: attention alone, and whole tokens.

python -m experiments.decode    (writes decode.json)

Rows of the method "lkv" are of the backend that "auto" takes, which they name; where that is "cpp", rows of
"lkv, loop" stand beside them. Whole tokens of "lkv, tiers" are over that share of a 16-bit cache's bytes, in tiers:
as many bytes as the entries of "lkv" in bfloat16, and half as many as these in float32.
"""

import argparse
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from statistics import median
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import DynamicCache

from experiments.common import interleaved, paired_ratio, parse_options, save_rows
from lkv.cache.ragged_cache import RaggedCache
from lkv.hf.attention import patch_attention
from lkv.hf.loading import load_default
from lkv.hf.prompt_kv import LayerKV
from lkv.kernels.ragged_attention import api, ragged_attention
from lkv.policy.lookup import default_policy
from lkv.policy.policy import Policy

FORMS = ("grouped", "repeated", "rows")
RowsAt = Callable[[int, Any, Policy, float, int, dict[str, Any]], list[dict[str, Any]]]  # as `rows_at`


def random_prompt(model: Any, tokens: int) -> list[LayerKV]:
    """k and v of the model's shape without reading a prompt: decoding takes the same time whatever they hold."""
    attached = patch_attention(model)
    spec, generator = attached.spec, torch.Generator().manual_seed(tokens)
    shape = (1, spec.kv_heads, tokens, spec.head_dim)

    def draw() -> Tensor:
        return torch.randn(shape, generator=generator).to(model.device, model.dtype)

    return [LayerKV(draw(), draw(), spec.head_dim**-0.5, rotation=rotation) for rotation in attached.rotations]


def full_attention(query: Tensor, key: Tensor, value: Tensor, form: str) -> Tensor:
    """One step of attention over the full cache, in one of the forms that PyTorch offers."""
    if form == "grouped":
        return scaled_dot_product_attention(query, key, value, enable_gqa=True)
    groups = query.shape[1] // key.shape[1]
    if form == "repeated":
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
        return scaled_dot_product_attention(query, key, value)
    # The query heads of a group as rows of one head: nothing is masked for a single token.
    return scaled_dot_product_attention(query.view(*key.shape[:2], groups, -1), key, value)


def ragged(query: Tensor, cache: RaggedCache, scale: float, backend: str) -> None:
    for layer in cache.ragged_layers:
        assert layer.store is not None
        ragged_attention(query, layer.store.attention_view(), scale, backend)


def one_token(model: Any, cache: Any, backend: str = "auto") -> None:
    """A whole step of the model; with `backend` instead of the one that the cache would take."""

    def choose(*_: Any) -> str:  # a plain function: a Mock would be part of the time
        return backend

    with mock.patch.object(api, "_available_backend", choose) if backend != "auto" else nullcontext():
        model(torch.tensor([[5]]), past_key_values=cache, use_cache=True)


def row_of(what: str, method: str, tokens: int, retention: float, seconds: list[float], full: list[float], **more: Any):
    ratio, unit = paired_ratio(seconds, full), "time by that of the full cache, mean of pairs"
    print(f"{what:10} {tokens:5} {method:12} {1e3 * ratio['seconds']:8.2f} ms, {1 / ratio['value']:.2f} times as fast")
    row = {"what": what, "method": method, "tokens": tokens, "retention": retention, "unit": unit, "baseline": "full"}
    return row | ratio | more


@torch.no_grad()
def rows_at(
    tokens: int, model: Any, policy: Policy, retention: float, repeats: int, about: dict[str, Any]
) -> list[dict[str, Any]]:
    """Attention by itself and whole tokens, over a prompt of `tokens`."""
    cache, prompt = RaggedCache(model, policy=policy, retention=retention), random_prompt(model, tokens)
    cache.fill(prompt)
    query = torch.randn(1, cache.spec.heads, 1, cache.spec.head_dim).to(model.dtype)
    assert cache.ragged_layers[0].store is not None
    automatic = api._select_backend("auto", query, cache.ragged_layers[0].store.attention_view())
    methods = {"lkv": automatic} | ({"lkv, loop": "loop"} if automatic != "loop" else {})

    def full(form: str) -> None:
        for layer in prompt:
            full_attention(query, layer.key, layer.value, form)

    runs: dict[str, Callable[[], Any]] = {form: partial(full, form) for form in FORMS}
    runs |= {name: partial(ragged, query, cache, prompt[0].scale, backend) for name, backend in methods.items()}
    seconds = interleaved(runs, repeats)
    best = min(FORMS, key=lambda form: median(seconds[form]))
    attention = seconds | {"full": seconds[best]}
    stock = DynamicCache()
    for index, layer in enumerate(prompt):
        stock.update(layer.key, layer.value, index)
    runs = {"full": partial(one_token, model, stock)}
    for name in methods:
        runs[name] = partial(one_token, model, cache.fork(), "auto" if name == "lkv" else "loop")
    # Without the compiled backend a layer's entries would be restored at every step.
    tiers = RaggedCache(model, policy=policy, memory=retention)
    tiers.fill(prompt)
    nbytes, tiers_nbytes = cache.nbytes(), tiers.nbytes()  # before the steps append to them
    runs |= {"lkv, tiers": partial(one_token, model, tiers)} if automatic != "loop" else {}
    token = interleaved(runs, repeats)
    rows = []
    for what, seconds, more in (("attention", attention, about | {"full_form": best}), ("token", token, about)):
        rows.append(row_of(what, "full", tokens, 1.0, seconds["full"], seconds["full"], **more, realised=1.0))
        more = more | {"realised": cache.realised_retention(), "nbytes": nbytes}
        for name, backend in methods.items():
            rows.append(row_of(what, name, tokens, retention, seconds[name], seconds["full"], **more, backend=backend))
    if (name := "lkv, tiers") in token:
        more = about | {"realised": tiers.realised_retention(), "memory": retention, "nbytes": tiers_nbytes}
        rows.append(row_of("token", name, tokens, retention, token[name], token["full"], **more, backend=automatic))
    return rows


def sweep(
    options: argparse.Namespace, load: Callable[[torch.dtype], tuple[Any, Policy]], measure: RowsAt, **about: Any
) -> list[dict[str, Any]]:
    """The rows of every number of threads (0: of a GPU, where they do not count), precision and length."""
    rows = []
    for threads in dict.fromkeys(options.threads):
        if threads:
            torch.set_num_threads(threads)
        for dtype in options.dtype:
            model, policy = load(getattr(torch, dtype))
            run = about | {"dtype": dtype} | ({"threads": threads} if threads else {})
            for tokens in options.tokens:
                rows += measure(tokens, model, policy, options.retention, options.repeats, run)
    return rows


def main() -> None:
    options = parse_options(
        __doc__, "decode", dtype=["float32", "bfloat16"], tokens=[512, 1024, 2048, 4096, 8000], repeats=30,
        retention=0.15, threads=[1, torch.get_num_threads()],
    )  # fmt: skip
    save_rows(options, "decode", sweep(options, lambda dtype: (load_default(dtype)[0], default_policy()), rows_at))


if __name__ == "__main__":
    main()
