"""Bytes of k and v while a very long prompt is read in streaming mode, against the full cache it never builds.

python -m benchmarks.streaming    (writes streaming.json; SmolLM2's shape with random weights and 32k positions)
"""

import argparse
import gc
import weakref
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.common import RESULTS
from lkv.cache import RaggedCache
from lkv.modeling import attach
from lkv.policy import Policy
from lkv.results import write_results
from lkv.spans import Spans


class Watch:
    """The most bytes that pools took at any one time, old and new ones together while spans are laid again."""

    def __init__(self) -> None:
        self.most = 0
        self._pools: weakref.WeakSet[Spans] = weakref.WeakSet()
        watch, build = self, Spans.__init__

        def built(spans: Spans, *args, **kwargs) -> None:
            build(spans, *args, **kwargs)
            watch._pools.add(spans)
            watch.most = max(watch.most, sum(pool.nbytes() for pool in watch._pools))

        Spans.__init__ = built  # type: ignore


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=32_768)
    parser.add_argument("--chunk", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=30)
    parser.add_argument("--retention", type=float, default=0.15)
    parser.add_argument("--out", type=Path, default=RESULTS / "streaming.json")
    options = parser.parse_args()
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=576, intermediate_size=1536, num_hidden_layers=options.layers, num_attention_heads=9,
        num_key_value_heads=3, vocab_size=1024, max_position_embeddings=options.tokens + 64,
    )  # fmt: skip
    model: Any = LlamaForCausalLM(config).eval().bfloat16()
    policy = Policy(attach(model)).requires_grad_(False)
    # Unequal heads, as after training.
    torch.nn.init.normal_(policy.heads.embeddings, std=3.0)
    watch = Watch()
    cache = RaggedCache(model, policy, options.retention, prompt_tokens=options.tokens, streaming=True)
    ids = torch.randint(3, 1024, (1, options.tokens))
    for number, part in enumerate(ids.split(options.chunk, 1)):
        model.base_model(input_ids=part, past_key_values=cache, use_cache=True)
        gc.collect()
        if number % 8 == 0:
            print(f"{cache.get_seq_length()} tokens, {watch.most:,} bytes at most", flush=True)
    # k and v of the part being read live in one layer at a time; the gather copies one layer's kept entries.
    entry = 2 * 3 * 64 * 2
    passing = options.chunk * entry + max(layer.nbytes() for layer in cache.ragged)
    full = options.layers * options.tokens * entry
    assert cache.full_nbytes() == full
    ratios = [ratio for row in policy.inference_ratios(options.retention).tolist() for ratio in row]
    row = {"method": "lkv", "tokens": options.tokens, "chunk": options.chunk, "retention": options.retention}
    row |= {"realised": cache.realised_retention(), "n": 1, "value": (watch.most + passing) / full}
    row |= {"unit": "ratio of bytes, the most held while reading", "baseline": "full", "bytes": watch.most + passing}
    row |= {"held_after": cache.nbytes(), "full_bytes": full, "least_ratio": min(ratios), "greatest_ratio": max(ratios)}
    print(row)
    write_results(options.out, "streaming", [row], 0, "python -m benchmarks.streaming")


if __name__ == "__main__":
    main()
