"""All bytes held while a very long prompt is read in streaming mode, against the full cache that it never builds.

python -m experiments.streaming    (writes streaming.json; SmolLM2's shape with random weights and 32k positions)
"""

from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from experiments.common import parse_options, save_rows
from experiments.profile.memory import LiveBytes
from experiments.profile.random_models import random_policy
from lkv.cache.ragged_cache import RaggedCache
from lkv.hf.attention import patch_attention


@torch.no_grad()
def main() -> None:
    options = parse_options(__doc__, "streaming", tokens=32_768, chunk=1024, layers=30, retention=0.15)
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
        for part in ids.split(options.chunk, 1):
            model.base_model(input_ids=part, past_key_values=cache, use_cache=True)
    full = options.layers * options.tokens * 2 * 3 * 64 * 2
    assert cache.full_nbytes() == full
    ratios = policy.inference_ratios(options.retention)
    row = {"method": "lkv", "tokens": options.tokens, "chunk": options.chunk, "retention": options.retention}
    row |= {"realised": cache.realised_retention(), "n": 1, "value": live.peak / full, "baseline": "full"}
    row |= {"unit": "ratio of bytes: all tensors held at once, by k and v of the full cache", "bytes": live.peak}
    row |= {"held_after": cache.nbytes(), "full_bytes": full}
    row |= {"least_ratio": float(ratios.min()), "greatest_ratio": float(ratios.max())}
    print(row)
    save_rows(options, "streaming", [row])


if __name__ == "__main__":
    main()
