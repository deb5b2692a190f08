"""A reference that shares no code with the package: a dense transformer of few lines with a visible set a head.

It computes whole texts anew for every step, from the weights alone: no cache, no transformers code either. What a head
may see of the past is a set of positions; eviction removes positions from it for good.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor


def _norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    x32 = x.float() if x.dtype != torch.float64 else x.to(torch.float32)
    return weight * (x32 * torch.rsqrt(x32.square().mean(-1, keepdim=True) + epsilon)).to(x.dtype)


def _rotated(x: Tensor, positions: Tensor, theta: float) -> Tensor:
    """x [H, T, d] turned by its positions [T], halves against halves."""
    d = x.shape[-1]
    inverse = 1.0 / theta ** (torch.arange(0, d, 2, dtype=torch.int64).float() / d)
    angles = positions.float()[:, None] * inverse[None]
    cos, sin = (torch.cat([part, part], -1).to(x.dtype) for part in (angles.cos(), angles.sin()))
    turned = torch.cat([-x[..., d // 2 :], x[..., : d // 2]], -1)
    return x * cos + turned * sin


@dataclass
class Row:
    """One text: its ids, and for each moment of eviction (layer, head) -> positions hidden from then on."""

    ids: list[int] = field(default_factory=list)
    # (first position that no longer sees them, [L][H] sets of hidden positions)
    hidden: list[tuple[int, list[list[set[int]]]]] = field(default_factory=list)

    def copy(self) -> "Row":
        return Row(list(self.ids), list(self.hidden))


class Dense:
    """Logits of whole texts by plain matrix products over the state dict of a Llama or a Qwen3."""

    def __init__(self, model):
        self.config, self.weights = model.config, {name: w.detach() for name, w in model.state_dict().items()}
        self.theta = model.config.rope_parameters["rope_theta"]

    @torch.no_grad()
    def read(self, row: Row) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
        """Logits [T, V] and each layer's rotated k and v [H, T, d]."""
        c, w = self.config, self.weights
        heads, kv_heads, dim = c.num_attention_heads, c.num_key_value_heads, c.head_dim
        tokens = len(row.ids)
        positions = torch.arange(tokens)
        x = w["model.embed_tokens.weight"][torch.tensor(row.ids)]
        found = []
        for layer in range(c.num_hidden_layers):
            name = f"model.layers.{layer}."
            y = _norm(x, w[name + "input_layernorm.weight"], c.rms_norm_eps)
            q, k, v = (
                (y @ w[f"{name}self_attn.{p}_proj.weight"].T).view(tokens, n, dim).transpose(0, 1)
                for p, n in (("q", heads), ("k", kv_heads), ("v", kv_heads))
            )
            if f"{name}self_attn.q_norm.weight" in w:
                q = _norm(q, w[f"{name}self_attn.q_norm.weight"], c.rms_norm_eps)
                k = _norm(k, w[f"{name}self_attn.k_norm.weight"], c.rms_norm_eps)
            q, k = _rotated(q, positions, self.theta), _rotated(k, positions, self.theta)
            found.append((k, v))
            out = []
            for head in range(heads):
                own = head * kv_heads // heads
                scores = q[head] @ k[own].T * dim**-0.5
                seen = torch.ones(tokens, tokens, dtype=torch.bool).tril()
                for start, table in row.hidden:
                    seen[start:, sorted(table[layer][own])] = False
                out.append(torch.softmax(scores.masked_fill(~seen, -torch.inf), -1) @ v[own])
            x = x + torch.cat(out, -1) @ w[name + "self_attn.o_proj.weight"].T
            y = _norm(x, w[name + "post_attention_layernorm.weight"], c.rms_norm_eps)
            gate, up = (y @ w[f"{name}mlp.{p}_proj.weight"].T for p in ("gate", "up"))
            x = x + (gate * torch.sigmoid(gate) * up) @ w[name + "mlp.down_proj.weight"].T
        x = _norm(x, w["model.norm.weight"], c.rms_norm_eps)
        head = w.get("lm_head.weight", w["model.embed_tokens.weight"])
        return x @ head.T, found


def kept_of(scores: Tensor, alive: set[int], count: int) -> tuple[set[int], float]:
    """The `count` best of the positions `alive` by `scores` [T], and how much better the last of them is than the first
    that goes: where that is no more than rounding, either may be kept."""
    ranked = sorted(alive, key=lambda place: -float(scores[place]))
    margin = float(scores[ranked[count - 1]] - scores[ranked[count]]) if 0 < count < len(ranked) else torch.inf
    return set(ranked[:count]), margin
