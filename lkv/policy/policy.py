"""The learned policy: LKV-H budgets (Sec. 3.3) and LKV-T token scores (Sec. 3.4), saved as safetensors and JSON."""

import copy
import hashlib
import math
import os
import warnings
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import silu

from lkv.config import ModelSpec, ScorerInputs, asdict, from_dict
from lkv.errors import PolicyFileError, PolicyMismatchError, check_retention
from lkv.integrations.transformers.prefill import LayerKV, to_fp32
from lkv.kernels.soft_topk import soft_topk
from lkv.kernels.token_scores import (
    ContentWeights,
    ExpectedAttentionWeights,
    PositionWeights,
    TokenScoreWeights,
    content_scores,
    scores_at_eviction,
    scores_in_blocks,
    scores_on_arrival,
)
from lkv.policy import policy_file
from lkv.policy.model_match import has_same_heads, model_difference

SPREAD = 16  # columns of the learned queries' covariance: measured as good as the whole of it
FUTURE = 512  # positions over which the queries to come are taken to stand, as Expected Attention has it


class HeadScores(nn.Module):
    """LKV-H: one embedding a KV head and a shared MLP d -> d/2 -> 1 score every head of the model (Sec. 3.3)."""

    def __init__(self, layers: int, kv_heads: int, head_dim: int):
        super().__init__()
        self.embeddings = nn.Parameter(torch.randn(layers, kv_heads, head_dim) * 0.1)
        self.hidden = nn.Linear(head_dim, head_dim // 2)
        self.output = nn.Linear(head_dim // 2, 1, bias=False)

    def forward(self) -> Tensor:
        """Scores s [L, H]."""
        return self.output(silu(self.hidden(self.embeddings))).squeeze(-1)


class TokenScores(nn.Module):
    """LKV-T: the weights of `ops.token_scores` for every KV head of the model (Sec. 3.4).

    Content: an MLP 2d -> d -> 1 of its own for each head over [k; v]; `mean` and `std` [L, H, 2d] normalise its input.
    `inputs` says which form of k it reads, and whether a token's score also has a term for the attention to expect and
    terms for its position. What is not learned by gradients is measured on training text (`training.calibration`).
    """

    mean: Tensor
    std: Tensor
    normaliser: Tensor

    def __init__(self, layers: int, heads: int, kv_heads: int, head_dim: int, inputs: ScorerInputs | None = None):
        super().__init__()
        self.inputs = inputs or ScorerInputs()
        shape = (layers, kv_heads)
        self.register_buffer("mean", torch.zeros(*shape, 2 * head_dim))
        self.register_buffer("std", torch.ones(*shape, 2 * head_dim))
        bound = 1 / math.sqrt(2 * head_dim)
        self.hidden = nn.Parameter(torch.empty(*shape, 2 * head_dim, head_dim).uniform_(-bound, bound))
        self.bias = nn.Parameter(torch.zeros(*shape, head_dim))
        self.output = nn.Parameter(torch.randn(*shape, head_dim) / math.sqrt(head_dim))
        if self.inputs.attention == "learned":
            group = heads // kv_heads
            self.attention_weight = nn.Parameter(torch.ones(shape))
            self.query_mean = nn.Parameter(torch.zeros(*shape, group, head_dim))
            self.query_spread = nn.Parameter(torch.zeros(*shape, head_dim, min(SPREAD, head_dim)))
            self.register_buffer("normaliser", torch.zeros(*shape, group))
        if self.inputs.knots:
            self.start = nn.Parameter(torch.zeros(*shape, self.inputs.knots))
            self.end = nn.Parameter(torch.zeros(*shape, self.inputs.knots))

    def scorer(self, layer: int, heads: slice = slice(None), device: torch.device | None = None) -> TokenScoreWeights:
        """The weights of the KV heads `heads` of one layer, in float32 or better, on `device` (where they are unless
        given)."""

        def of(*names: str) -> Iterator[Tensor]:
            return (to_fp32(getattr(self, name)[layer, heads]).to(device) for name in names)

        content = ContentWeights(*of("mean", "std", "hidden", "bias", "output"))
        attention = position = None
        if self.inputs.attention == "learned":
            attention = ExpectedAttentionWeights(*of("attention_weight", "query_mean", "query_spread", "normaliser"))
        if self.inputs.knots:
            position = PositionWeights(*of("start", "end"))
        return TokenScoreWeights(content, attention, position)

    def forward(self, prompt: LayerKV, layer: int, heads: slice = slice(None)) -> Tensor:
        """Scores u [B, H, T] in float32 of the tokens of one layer, for its KV heads `heads`.

        Raises UnsupportedModelError where the model's rotation is needed and cannot be undone.
        """
        scorer = self.scorer(layer, heads, prompt.key.device)
        key, value, places, ahead = prompt.key, prompt.value, self._places(prompt), self._ahead(prompt)
        if not torch.is_grad_enabled():
            return scores_in_blocks(
                scorer, partial(self.read_key, prompt), key, value, places, prompt.end, ahead, prompt.scale
            )
        final = scores_on_arrival(scorer, self.read_key(prompt), value, places)
        rest = scores_at_eviction(scorer, key, value, places, prompt.end, ahead, prompt.scale)
        return final if rest is None else final + rest

    def score_on_arrival(self, prompt: LayerKV, layer: int, heads: slice = slice(None)) -> Tensor:
        """The part of `forward` that does not depend on where the text ends."""
        scorer = self.scorer(layer, heads, prompt.key.device)
        return scores_on_arrival(scorer, self.read_key(prompt), prompt.value, self._places(prompt))

    def score_at_eviction(self, prompt: LayerKV, layer: int, heads: slice, positions: Tensor) -> Tensor | None:
        """The rest [n] of `forward` for entries of one head that were read at `positions` [n]; None where none is."""
        scorer = self.scorer(layer, heads, prompt.key.device)
        ahead = self._ahead(prompt)
        rest = scores_at_eviction(scorer, prompt.key, prompt.value, positions, prompt.end, ahead, prompt.scale)
        return None if rest is None else rest.flatten()

    def _places(self, prompt: LayerKV) -> Tensor:
        """The positions [T] of the tokens, where a term reads them."""
        tokens = prompt.key.shape[2] if self.inputs.knots else 0
        return torch.arange(prompt.start, prompt.start + tokens, device=prompt.key.device)

    def _ahead(self, prompt: LayerKV) -> Tensor | None:
        """The mean rotation [d, d] of the positions that the queries to come are taken to stand at."""
        if self.inputs.attention == "none":
            return None
        return prompt.required_rotation.mean_rotation(to_fp32(prompt.key[:, :1, :1]), prompt.end, prompt.end + FUTURE)

    def read_key(self, prompt: LayerKV, part: slice = slice(None)) -> Tensor:
        """k [B, H, n, d] of the tokens `part` as the content term reads it."""
        if self.inputs.key == "cached":
            return prompt.key[:, :, part]
        return prompt.required_rotation.unrotate(prompt.key, prompt.start, part)

    def content(self, prompt: LayerKV, layer: int, tokens: Tensor) -> Tensor:
        """The content term alone for the `tokens` [n] (indices) of one layer: [B, H, n]."""
        device = prompt.key.device
        content, tokens = self.scorer(layer, device=device).content, tokens.to(device)
        return content_scores(content, self.read_key(prompt)[:, :, tokens], prompt.value[:, :, tokens])


class Policy(nn.Module):
    """How much every head keeps (LKV-H) and which tokens (LKV-T), for one model."""

    def __init__(self, spec: ModelSpec, card: dict[str, Any] | None = None, inputs: ScorerInputs | None = None):
        """`spec` describes the model; `card` is free JSON about the training, stored with the policy; `inputs` is what
        LKV-T reads, the paper's unless given."""
        super().__init__()
        self.spec = spec
        self.card = card or {}
        self.strict = True
        self.commit: str | None = None  # on the hub, where it comes from there
        self.heads = HeadScores(spec.layers, spec.kv_heads, spec.head_dim)
        self.tokens = TokenScores(spec.layers, spec.heads, spec.kv_heads, spec.head_dim, inputs)

    @property
    def inputs(self) -> ScorerInputs:
        """What LKV-T reads of a token."""
        return self.tokens.inputs

    @property
    def trained_tokens(self) -> int | None:
        """Tokens of the longest texts that it was trained on, where its card tells."""
        tokens = self.card.get("trained_tokens")
        return tokens if isinstance(tokens, int) else None

    def ratios(self, retention: float | Tensor) -> Tensor:
        """r [L, H] in (0, 1): each head's share of the tokens, with mean `retention` over all heads (Sec. 3.3);
        [n, L, H] for n retentions."""
        scores = self.heads().flatten()
        shape = (self.spec.layers, self.spec.kv_heads)
        return soft_topk(scores, scores.numel() * retention).mask.unflatten(-1, shape)

    @torch.no_grad()
    def inference_ratios(self, retention: float) -> Tensor:
        """`ratios` for inference: exactly 1 everywhere at retention 1. Raises RetentionError outside (0, 1]."""
        retention = check_retention(retention)
        if retention == 1.0:
            return torch.ones(self.spec.layers, self.spec.kv_heads, device="cpu")
        return self.ratios(retention).float().cpu()

    def check_model(self, spec: ModelSpec) -> None:
        """Raise PolicyMismatchError unless `spec` describes the model this policy was trained for.

        A policy loaded with strict=False only warns, as long as the model has the same heads.
        """
        difference = model_difference(self.spec, spec)
        if difference is None:
            return
        problem = f"this policy was trained for a model with {difference}"
        if not self.strict and has_same_heads(self.spec, spec):
            warnings.warn(f"{problem}; what it keeps may not be what this model needs.", stacklevel=3)
            return
        remedy = "use the model it was trained for, or train a policy for yours with `lkv train`"
        if has_same_heads(self.spec, spec):
            remedy += ", or load it with strict=False to be warned instead"
        raise PolicyMismatchError(f"{problem}; {remedy}.")

    def on(self, device: torch.device) -> "Policy":
        """This policy where it lies on `device`, else a copy there: its owner's stays where the owner put it."""
        if all(parameter.device == device for parameter in self.parameters()):
            return self
        return copy.deepcopy(self).to(device)

    def digest(self) -> str:
        """SHA-256 of the parameters: equal for policies that decide alike."""
        digest = hashlib.sha256()
        for name, tensor in sorted(self.state_dict().items()):
            digest.update(name.encode() + tensor.detach().float().cpu().contiguous().numpy().tobytes())
        return digest.hexdigest()

    def save_pretrained(self, folder: str | os.PathLike[str], half: bool = False) -> None:
        """Write the policy into `folder`; an interrupted or failed save leaves the old one as it was.

        `half` stores the parameters in float16, half the size. Raises PolicyFileError.
        """
        learned = dict(self.named_parameters()) if half else {}
        state = {
            name: tensor.detach().to(torch.float16 if name in learned else tensor.dtype)
            for name, tensor in self.state_dict().items()
        }
        about = {"inputs": asdict(self.inputs), "model": asdict(self.spec), "card": self.card}
        policy_file.save(folder, state, about)

    @classmethod
    def from_pretrained(
        cls, name: str | os.PathLike[str], strict: bool = True, revision: str | None = None
    ) -> "Policy":
        """Load a policy from a folder or a hub id. Raises PolicyFileError for missing or damaged files.

        Without `strict` a model that the policy was not trained for is warned of, and not refused. `revision` is a
        commit, tag or branch on the hub.
        """
        folder, commit = policy_file.resolve(name, revision)
        tensors, about = policy_file.read(folder)
        try:
            inputs = from_dict(ScorerInputs, about.get("inputs", {}))
            # Without memory of its own: the file's tensors take the places, if they are the ones that belong there.
            with torch.device("meta"):
                policy = cls(from_dict(ModelSpec, about["model"]), about.get("card"), inputs)
            state = {key: value.float() for key, value in tensors.items()}
            policy.load_state_dict(state, assign=True)
        except (ValueError, KeyError, TypeError, AttributeError, RuntimeError) as error:
            reason = str(error).strip().splitlines()[-1].strip()
            raise PolicyFileError(
                f"{name} does not hold a policy that this version knows ({reason}); fetch it again, or update "
                "lkv-cache."
            ) from error
        for key, tensor in state.items():
            if not bool(tensor.isfinite().all()) or (key == "tokens.std" and not bool((tensor > 0).all())):
                raise PolicyFileError(f"{key} of {name} holds numbers that decide nothing; fetch or train it again.")
        policy.strict, policy.commit = strict, commit
        return policy.eval().requires_grad_(False)
