"""All bytes held while a very long prompt is read in streaming mode, against the full cache that it never builds.

python -m benchmarks.streaming    (writes streaming.json; SmolLM2's shape with random weights and 32k positions)
"""

import argparse
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.common import RESULTS
from lkv.cache.ragged_cache import RaggedCache
from lkv.evaluation.profiling.memory import LiveBytes
from lkv.evaluation.profiling.random_models import random_policy
from lkv.integrations.transformers.attention import patch_attention
from lkv.utils.results import write_results


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
    policy = random_policy(patch_attention(model).spec)
    ids = torch.randint(3, 1024, (1, options.tokens))
    # What a layer computes on the way (queries, masks, scores, the MLP) counts as well; the weights do not.
    with LiveBytes() as live:
        cache = RaggedCache(
            model, policy=policy, retention=options.retention, prompt_tokens=options.tokens, streaming=True
        )
        for number, part in enumerate(ids.split(options.chunk, 1)):
            model.base_model(input_ids=part, past_key_values=cache, use_cache=True)
            if number % 8 == 0:
                print(f"{cache.get_seq_length()} tokens, {live.peak:,} bytes at most", flush=True)
    entry = 2 * 3 * 64 * 2
    full = options.layers * options.tokens * entry
    assert cache.full_nbytes() == full
    ratios = [ratio for row in policy.inference_ratios(options.retention).tolist() for ratio in row]
    row = {"method": "lkv", "tokens": options.tokens, "chunk": options.chunk, "retention": options.retention}
    row |= {"realised": cache.realised_retention(), "n": 1, "value": live.peak / full}
    row |= {
        "unit": "ratio of bytes: all tensors held at once, by k and v of the full cache",
        "baseline": "full",
        "bytes": live.peak,
    }
    row |= {"bytes": live.peak, "held_after": cache.nbytes(), "full_bytes": full}
    row |= {"least_ratio": min(ratios), "greatest_ratio": max(ratios)}
    print(row)
    write_results(options.out, "streaming", [row], 0, "python -m benchmarks.streaming")


if __name__ == "__main__":
    main()
