"""A reference that shares no code with the package: a dense transformer of few lines with a visible set a head.

It computes whole texts anew for every step, from the weights alone: no cache, no transformers code either. What a head
may see of the past is a set of positions; eviction removes positions from it for good, and storage in few bits changes
what it sees at those that are left.
"""

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

Sets = list[list[set[int]]]  # [L][H] positions
GROUP = 32  # values that share a step where k and v are stored in few bits


@dataclass
class Row:
    """One text: its ids, and for each moment of eviction (layer, head) -> positions hidden from then on."""

    ids: list[int] = field(default_factory=list)
    # (first position that no longer sees them, hidden positions)
    hidden: list[tuple[int, Sets]] = field(default_factory=list)
    # (first position that sees them so, [L][H] of (positions, k and v there)), where they are stored in few bits
    stored: tuple[int, list[list[tuple[list[int], Tensor, Tensor]]]] | None = None

    def copy(self) -> "Row":
        return replace(self, ids=list(self.ids), hidden=list(self.hidden))

    def gone(self, layers: int, heads: int) -> Sets:
        """What is hidden from the next token."""
        found: Sets = [[set() for _ in range(heads)] for _ in range(layers)]
        for _, table in self.hidden:
            for own, sets in zip(found, table, strict=True):
                for mine, places in zip(own, sets, strict=True):
                    mine |= places
        return found


def _norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    x32 = x.float()
    return weight * (x32 * torch.rsqrt(x32.square().mean(-1, keepdim=True) + epsilon)).to(x.dtype)


def _rotated(x: Tensor, positions: Tensor, theta: float) -> Tensor:
    """x [H, T, d] turned by its positions [T], halves against halves."""
    d = x.shape[-1]
    inverse = 1.0 / theta ** (torch.arange(0, d, 2, dtype=torch.int64).float() / d)
    angles = positions.float()[:, None] * inverse[None]
    cos, sin = (torch.cat([part, part], -1).to(x.dtype) for part in (angles.cos(), angles.sin()))
    turned = torch.cat([-x[..., d // 2 :], x[..., : d // 2]], -1)
    return x * cos + turned * sin


class Dense:
    """Logits of whole texts by plain matrix products, in float32 or float64, over the state dict of a Llama, a Qwen2 or
    a Qwen3, with sliding layers or without."""

    def __init__(self, model):
        self.config = model.config
        wide = torch.promote_types(model.dtype, torch.float32)
        self.weights = {name: w.detach().to(wide) for name, w in model.state_dict().items()}
        self.theta = model.config.rope_parameters["rope_theta"]
        self.layers, self.heads = self.config.num_hidden_layers, self.config.num_key_value_heads
        kinds = getattr(self.config, "layer_types", None) or ["full_attention"] * self.layers
        self.windows = [self.config.sliding_window if kind.startswith("sliding") else None for kind in kinds]

    @torch.no_grad()
    def read(self, row: Row) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
        """Logits [T, V] and each layer's rotated k and v [H, T, d]."""
        c, w = self.config, self.weights
        x = w["model.embed_tokens.weight"][torch.tensor(row.ids)]
        found = []
        for layer in range(self.layers):
            name = f"model.layers.{layer}."
            y = _norm(x, w[name + "input_layernorm.weight"], c.rms_norm_eps)
            q, k, v = self._projected(f"{name}self_attn.", y)
            found.append((k, v))
            out = [self._attended(row, layer, head, q, k, v) for head in range(len(q))]
            x = x + torch.cat(out, -1) @ w[name + "self_attn.o_proj.weight"].T
            y = _norm(x, w[name + "post_attention_layernorm.weight"], c.rms_norm_eps)
            gate, up = (y @ w[f"{name}mlp.{p}_proj.weight"].T for p in ("gate", "up"))
            x = x + (gate * torch.sigmoid(gate) * up) @ w[name + "mlp.down_proj.weight"].T
        x = _norm(x, w["model.norm.weight"], c.rms_norm_eps)
        head = w.get("lm_head.weight", w["model.embed_tokens.weight"])
        return x @ head.T, found

    def _projected(self, name: str, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Rotated q and k, and v, of the layer `name`: [heads, T, d] each."""
        c, w, tokens = self.config, self.weights, len(y)
        dim = getattr(c, "head_dim", None) or c.hidden_size // c.num_attention_heads
        q, k, v = (
            (y @ w[f"{name}{p}_proj.weight"].T + w.get(f"{name}{p}_proj.bias", 0)).view(tokens, n, dim).transpose(0, 1)
            for p, n in (("q", c.num_attention_heads), ("k", self.heads), ("v", self.heads))
        )
        if f"{name}q_norm.weight" in w:
            q = _norm(q, w[f"{name}q_norm.weight"], c.rms_norm_eps)
            k = _norm(k, w[f"{name}k_norm.weight"], c.rms_norm_eps)
        positions = torch.arange(tokens)
        return _rotated(q, positions, self.theta), _rotated(k, positions, self.theta), v

    def _attended(self, row: Row, layer: int, head: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """The output [T, d] of one query head."""
        own = head * self.heads // len(q)
        query, key, value, tokens = q[head], k[own], v[own], len(row.ids)
        scores = query @ key.T
        seen = torch.ones(tokens, tokens, dtype=torch.bool).tril()
        if self.windows[layer] is not None:
            seen = seen.triu(1 - self.windows[layer])
        for start, table in row.hidden:
            seen[start:, sorted(table[layer][own])] = False
        start, late = tokens, value
        if row.stored is not None and self.windows[layer] is None:
            start, (places, kept_key, kept_value) = row.stored[0], row.stored[1][layer][own]
            late_key, late = key.clone(), value.clone()
            late_key[places], late[places] = kept_key.to(key), kept_value.to(value)
            scores[start:] = query[start:] @ late_key.T
        shares = torch.softmax((scores * key.shape[-1] ** -0.5).masked_fill(~seen, -torch.inf), -1)
        return torch.cat([shares[:start] @ value, shares[start:] @ late])


def kept_of(scores: Tensor, alive: set[int], count: int) -> tuple[set[int], float]:
    """The `count` best of the positions `alive` by `scores` [T], and how much better the last of them is than the first
    that goes: where that is no more than rounding, either may be kept."""
    ranked = sorted(alive, key=lambda place: -float(scores[place]))
    margin = float(scores[ranked[count - 1]] - scores[ranked[count]]) if 0 < count < len(ranked) else torch.inf
    return set(ranked[:count]), margin


def in_bits(values: Tensor, bits: int, axis: int) -> tuple[Tensor, float]:
    """`values` [n, d] as they come back from storage in `bits` bits, with groups along `axis`; and how far the nearest
    one lay from where rounding decides: the middle between two codes or, in hundredths, a bfloat16 that a step or least
    value is rounded to.

    Of a group the least value is stored, rounded down to a bfloat16 (as it is, from 16 bits), and a step, rounded up.
    """
    half = values.dtype in (torch.float16, torch.bfloat16)
    found, nearest = values.float().clone(), torch.inf
    for start in range(0, values.shape[axis], GROUP):
        group = values.float().narrow(axis, start, min(GROUP, values.shape[axis] - start))
        least = group.amin(axis, keepdim=True)
        ties = 1.0
        if not half:
            least, ties = _bfloat16_below(least)
        steps = group - least
        step = (steps.amax(axis, keepdim=True) / (2**bits - 1)).clamp(min=torch.finfo(torch.float32).eps)
        step, more = _bfloat16_below(-step)
        step, nearest = -step, min(nearest, ties / 100, more / 100)
        codes = (steps / step).clamp(0, 2**bits - 1)
        if codes.numel():
            nearest = min(nearest, float((codes - codes.floor() - 0.5).abs().min()))
        found.narrow(axis, start, group.shape[axis]).copy_(codes.round() * step + least)
    return found.to(values.dtype), nearest


def _bfloat16_below(x: Tensor) -> tuple[Tensor, float]:
    """The greatest number of 8 significant bits that is not above each float32; and how near the nearest came to such a
    number, in distances of two of these, leaving out 0 and the least step, which no rounding moves."""
    fraction, exponent = torch.frexp(x)
    scaled = fraction * 256
    away = (scaled - scaled.round()).abs()[(x != 0) & (x.abs() != torch.finfo(torch.float32).eps)]
    return torch.ldexp(scaled.floor() / 256, exponent), float(away.min()) if away.numel() else 1.0


def beams(dense: Dense, row: Row, width: int, tokens: int) -> tuple[list[int], float]:
    """The ids that beam search with `width` beams adds, and the least margin by which anything was decided."""
    found, margin = [(0.0, row)], torch.inf
    for _ in range(tokens):
        every = []
        for total, one in found:
            for token, share in enumerate(torch.log_softmax(dense.read(one)[0][-1].double(), -1).tolist()):
                every.append((total + share, replace(one, ids=[*one.ids, token])))
        every.sort(key=lambda pair: -pair[0])
        margin = min(margin, every[width - 1][0] - every[width][0])
        found = every[:width]
    margin = min(margin, found[0][0] - found[1][0])
    return found[0][1].ids[len(row.ids) :], margin
