# SPDX-FileCopyrightText: Copyright (c) 1993-2026 NVIDIA CORPORATION & AFFILIATES. All rights reserved.
# SPDX-License-Identifier: Apache-2.0

import json
import os
from dataclasses import dataclass, field

import torch
from huggingface_hub import snapshot_download
from kvpress.presses.base_press import BasePress
from safetensors import safe_open
from torch import nn
from torch.nn.functional import silu
from transformers import PreTrainedModel

FILE = "policy.safetensors"


@dataclass
class LKVPress(BasePress):
    """
    LKV: learned head-wise budgets (LKV-H) and learned token selection (LKV-T).

    A policy, trained once per model by distillation, scores every KV head of the model and every KV pair. The head
    scores and the compression ratio give each head its share of the KV pairs; the head keeps those with the highest
    scores of an MLP over key and value. Neither depends on queries. As with AdaKVPress, pruned pairs are masked.

    Based on LKV: End-to-End Learning of Head-wise Budgets and Token Selection for LLM KV Cache Eviction
    (Zhou et al., 2026).

    Parameters
    ----------
    policy_name : str
        Folder or Hub id of a policy with the scorer of the paper, for the model that the press is used with. The
        package lkv-cache trains them (``lkv train --preset paper``).
    compression_ratio : float, default=0.0
        Fraction of KV pairs to remove, over all heads of the model.
    """

    policy_name: str
    compression_ratio: float = 0.0

    _loaded_from: str = field(init=False, repr=False, default="")
    _policy: dict[str, torch.Tensor] = field(init=False, repr=False, default_factory=dict)

    def __post_init__(self):
        assert 0 <= self.compression_ratio < 1, "Compression ratio must be between 0 and 1"

    def post_init_from_model(self, model: PreTrainedModel):
        """
        Load the policy, and check that it fits the model
        """
        if self._loaded_from != self.policy_name:
            self._policy, self._loaded_from = self.load_policy(), self.policy_name
        self._policy = {name: tensor.to(model.device) for name, tensor in self._policy.items()}
        config = model.config.get_text_config(decoder=True)
        expected = (config.num_hidden_layers, config.num_key_value_heads)
        if (found := tuple(self._policy["heads.embeddings"].shape[:2])) != expected:
            raise ValueError(f"{self.policy_name} has (layers, KV heads) {found}, but the model has {expected}")

    def load_policy(self) -> dict[str, torch.Tensor]:
        """
        Read the tensors of the policy in float32
        """
        folder = self.policy_name
        if not os.path.isdir(folder):
            folder = snapshot_download(folder, allow_patterns=[FILE])
        with safe_open(os.path.join(folder, FILE), "pt") as file:
            inputs = json.loads(file.metadata()["lkv-policy"])["inputs"]
            if inputs != {"key": "cached", "attention": "none", "knots": 0}:
                raise ValueError(f"{self.policy_name} has not the scorer of the paper but one that reads {inputs}")
            return {name: file.get_tensor(name).float() for name in file.keys()}  # noqa: SIM118 - no dictionary

    def head_ratios(self) -> torch.Tensor:
        """
        LKV-H: the share of the KV pairs that each head keeps, with shape (num_layers, num_kv_heads)

        The mean of the shares is 1 - compression_ratio: each is the cumulative distribution function of the Laplace
        distribution at the score of the head minus a threshold, which is found by bisection.
        """
        policy = self._policy
        hidden = silu(policy["heads.embeddings"] @ policy["heads.hidden.weight"].T + policy["heads.hidden.bias"])
        scores = (hidden @ policy["heads.output.weight"].T).squeeze(-1).double()
        low, high = scores.min() - 50, scores.max() + 50
        for _ in range(80):
            threshold = (low + high) / 2
            distance = scores - threshold
            tail = torch.exp(-distance.abs()) / 2
            ratios = torch.where(distance < 0, tail, 1 - tail)
            low, high = (threshold, high) if ratios.mean() > 1 - self.compression_ratio else (low, threshold)
        return ratios.float()

    def score(self, layer_idx: int, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """
        LKV-T: the score of each KV pair with shape (batch_size, num_kv_heads, seq_len), higher is more important
        """
        names = ("mean", "std", "hidden", "bias", "output")
        mean, std, weight, bias, output = (self._policy[f"tokens.{name}"][layer_idx] for name in names)
        inputs = (torch.cat([keys, values], dim=-1).float() - mean[:, None]) / std[:, None]
        return (silu(inputs @ weight + bias[:, None]) * output[:, None]).sum(-1)

    def compress(
        self,
        module: nn.Module,
        hidden_states: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        attentions: torch.Tensor,
        kwargs: dict,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """
        Mask the KV pairs that each head does not keep
        """
        if self.compression_ratio == 0:
            return keys, values
        implementation = module.config._attn_implementation  # type: ignore[union-attr]
        assert implementation != "eager", "eager mode not supported"

        layer_idx, seq_len = int(module.layer_idx), keys.shape[2]  # type: ignore[arg-type]
        n_kept = (self.head_ratios()[layer_idx] * seq_len + 1e-6).long()
        # The rank of each KV pair in its head, 0 for the highest score
        ranks = self.score(layer_idx, keys, values).argsort(dim=-1, descending=True).argsort(dim=-1)

        # Save indices to mask during the attention mechanism. Please refer to attention_patch.py for more details
        module.masked_key_indices = torch.where(ranks >= n_kept[:, None])  # type: ignore[assignment]
        return keys, values
