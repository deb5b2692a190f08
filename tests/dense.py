"""A reference that shares no code with the package: a dense transformer of few lines with a visible set a head.

It computes whole texts anew for every step, from the weights alone: no cache, no transformers code either. What a head
may see of the past is a set of positions; eviction removes positions from it for good, and storage in few bits changes
what it sees at those that are left.
"""

import math
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

Sets = list[list[set[int]]]  # [L][H] positions
# Storage in few bits, as the file format has it: code c stands for u (a + b u^2), u = c - (2^bits - 1) / 2.
LEVELS = {8: (0.015859471, 1.0520814e-06), 4: (0.24050725, 0.0020975307), 3: (0.47145524, 0.011584845)}
FP8 = -8


@dataclass
class Stored:
    """The entries of one head that eviction left: their positions, bits of k and v (16: as they are), and values."""

    places: list[int]
    bits: list[tuple[int, int]]
    key: Tensor
    value: Tensor
    basis: tuple[Tensor, Tensor]


@dataclass
class Row:
    """One text: its ids, and for each moment of eviction (layer, head) -> positions hidden from then on."""

    ids: list[int] = field(default_factory=list)
    # (first position that no longer sees them, hidden positions)
    hidden: list[tuple[int, Sets]] = field(default_factory=list)
    # (first position that sees them so, layer -> of each head), where entries are stored in few bits
    stored: list[tuple[int, dict[int, list[Stored]]]] = field(default_factory=list)

    def copy(self) -> "Row":
        return replace(self, ids=list(self.ids), hidden=list(self.hidden), stored=list(self.stored))

    def latest(self, layer: int) -> list[Stored] | None:
        """What each head of `layer` stores in few bits now."""
        return next((table[layer] for _, table in reversed(self.stored) if layer in table), None)

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
        self.full_layers = [index for index, window in enumerate(self.windows) if window is None]

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
        tables = [(start, table[layer][own]) for start, table in row.stored if layer in table]
        ends = [start for start, _ in tables] + [tokens]
        values = [(0, ends[0], value)]
        for (start, stored), end in zip(tables, ends[1:], strict=True):
            late_key, late = key.clone(), value.clone()
            late_key[stored.places], late[stored.places] = stored.key.to(key), stored.value.to(value)
            scores[start:end] = query[start:end] @ late_key.T
            values.append((start, end, late))
        shares = torch.softmax((scores * key.shape[-1] ** -0.5).masked_fill(~seen, -torch.inf), -1)
        return torch.cat([shares[start:end] @ part for start, end, part in values])


def kept_of(scores: Tensor, alive: set[int], count: int) -> tuple[set[int], float]:
    """The `count` best of the positions `alive` by `scores` [T], and how much better the last of them is than the first
    that goes: where that is no more than rounding, either may be kept."""
    ranked = sorted(alive, key=lambda place: -float(scores[place]))
    margin = float(scores[ranked[count - 1]] - scores[ranked[count]]) if 0 < count < len(ranked) else torch.inf
    return set(ranked[:count]), margin


def rotation(width: int) -> Tensor:
    """The matrix [d, d] that mixes channels before they are rounded, one number after another."""
    twos = width & -width
    odd = width // twos

    def number(i: int, j: int) -> float:
        angle = math.pi / odd * (i // twos) * (j // twos + 0.5)
        cosine = math.cos(angle) * math.sqrt((1 if i < twos else 2) / odd)
        return cosine * (-1) ** ((i % twos) & (j % twos)).bit_count() / math.sqrt(twos)

    return torch.tensor([[number(i, j) for j in range(width)] for i in range(width)], dtype=torch.float64)


def levels_of(bits: int) -> Tensor:
    """The numbers for which the codes of `bits` stand, beside the norm; in FP8 a sixteenth of those of e4m3."""
    codes = torch.arange(2 ** abs(bits), dtype=torch.float64)
    if bits == FP8:
        exponent, mantissa = (codes % 128 / 8).floor(), codes % 8
        numbers = torch.where(exponent > 0, (1 + mantissa / 8) * 2 ** (exponent - 7), mantissa / 8 * 2**-6)
        return numbers * (1 - 2 * (codes >= 128).double()) / 16
    steps, (slope, cubic) = codes - (2**bits - 1) / 2, LEVELS[bits]
    return steps * (slope + cubic * steps**2)


def in_bits(values: Tensor, bits: int) -> tuple[Tensor, Tensor, Tensor, float]:
    """Rotated `values` [n, d] at the nearest levels times one norm an entry, whose error is orthogonal to the entry.

    Returns them in float64, the codes, the norms, and how near any value came to the middle between two levels, in
    root mean squares of its entry (in FP8, by its own size).
    """
    levels, values, is_fp8 = levels_of(bits), values.double(), bits == FP8
    scaled = values / values.square().mean(-1, keepdim=True).sqrt().clamp(min=1e-300)
    levels = levels[:127] if is_fp8 else levels  # those of positive numbers
    distances = ((scaled.abs() if is_fp8 else scaled)[..., None] - levels).abs()
    codes = distances.argmin(-1)
    near = levels[codes]
    if is_fp8:
        near, codes = near * scaled.sign(), codes + 128 * (scaled < 0)
        distances = distances / scaled.abs().clamp(min=1e-3)[..., None]
    norms = (values.square().sum(-1) / (values * near).sum(-1).clamp(min=1e-300)).bfloat16()
    closest = distances.topk(2, largest=False).values
    gap = float((closest[..., 1] - closest[..., 0]).amin()) / 2 if values.numel() else math.inf
    return near * norms.double()[:, None], codes, norms, gap


def basis_of(key: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Mean and scale [d] of the entries `key` [n, d] of one head, as they are stored for a cache of `dtype`."""
    key, half = key.double(), torch.float16 if dtype == torch.float16 else torch.bfloat16
    if not len(key):
        return torch.zeros(key.shape[1]).double(), torch.ones(key.shape[1]).double()
    spread = (key - key.mean(0)).square().mean(0).sqrt()
    scale = spread.clamp(min=1e-3 * float(spread.mean())).sqrt() if spread.mean() > 1e-12 else torch.ones_like(spread)
    return key.mean(0).to(half).double(), scale.to(half).double()


def stored_in_bits(
    key: Tensor, value: Tensor, bits: list[tuple[int, int]], basis: tuple[Tensor, Tensor]
) -> tuple[Tensor, Tensor, float]:
    """Entries `key`, `value` [n, d] of one head as they come back from storage, each in its own `bits`.

    `bits` of 16 leave an entry as it is. Also returns how near any value came to the middle between two levels, but for
    8 bits, which move it by little.
    """
    (mean, scale), wide = basis, torch.float64
    key_matrix, value_matrix = rotation(key.shape[-1]), rotation(value.shape[-1])
    parts = (key.to(wide) - mean) / scale @ key_matrix, value.to(wide) @ value_matrix
    found, nearest = [key.to(wide).clone(), value.to(wide).clone()], math.inf
    for number, own in enumerate(bits):
        for side, count in enumerate(own):
            if count == 16:
                continue
            rounded, _, _, gap = in_bits(parts[side][number : number + 1], count)
            nearest = min(nearest, gap) if count < 8 else nearest
            back = rounded @ (key_matrix, value_matrix)[side].T
            found[side][number] = (back * scale + mean if side == 0 else back)[0]
    largest = torch.finfo(key.dtype).max
    return *(x.clamp(-largest, largest).to(key.dtype) for x in found), nearest


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
