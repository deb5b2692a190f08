"""All bytes held while a very long prompt is read in streaming mode, against the full cache that it never builds.

python -m experiments.streaming    (writes streaming.json; SmolLM2's shape with random weights and 32k positions)
"""

import torch
from transformers import LlamaConfig

from experiments.common import parse_options, save_rows
from experiments.profile.__main__ import Profile
from experiments.profile.measure import Profiler
from experiments.profile.random_models import random_model, random_policy
from lkv.hf.attention import patch_attention
from lkv.methods.targets import KVShape


def main() -> None:
    options = parse_options(__doc__, "streaming", tokens=32_768, chunk=1024, layers=30, retention=0.15)
    config = LlamaConfig(
        hidden_size=576, intermediate_size=1536, num_hidden_layers=options.layers, num_attention_heads=9,
        num_key_value_heads=3, vocab_size=1024, max_position_embeddings=options.tokens + 64,
    )  # fmt: skip
    model = random_model(config, torch.bfloat16, torch.device("cpu"))
    policy = random_policy(patch_attention(model).spec)
    # What a layer computes on the way (queries, masks, scores, the MLP) counts as well; the weights do not.
    settings = Profile(retention=options.retention, chunk=options.chunk, streaming=True, new_tokens=1)
    run = Profiler(model, "random", policy, settings).try_run("lkv", options.tokens, with_peak=True)
    assert not isinstance(run, str), run
    full = KVShape(options.layers * 3, 64, 2).reference_nbytes(options.tokens)
    ratios = policy.inference_ratios(options.retention)
    row = {"method": "lkv", "tokens": options.tokens, "chunk": options.chunk, "retention": options.retention}
    row |= {"realised": run.realised, "n": 1, "value": run.peak_bytes / full, "baseline": "full"}
    row |= {"unit": "ratio of bytes: all tensors held at once, by k and v of the full cache", "bytes": run.peak_bytes}
    row |= {"held_after": run.kv_bytes, "full_bytes": full}
    row |= {"least_ratio": float(ratios.min()), "greatest_ratio": float(ratios.max())}
    print(row)
    save_rows(options, "streaming", [row])


if __name__ == "__main__":
    main()
