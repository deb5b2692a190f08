"""Inspect the tokens that each head keeps, at several budgets from one prefill, and render them as a page."""

import base64
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from lkv.cache.cache_config import CacheConfig
from lkv.context.compression import check_fits_model
from lkv.errors import LkvError
from lkv.hf.attention import input_device
from lkv.hf.prompt_kv import LayerKV, read_prompt
from lkv.hf.spec import check_ids
from lkv.methods.base import tier_counts
from lkv.methods.budgets import Budget
from lkv.methods.registry import method_label, parse_method
from lkv.methods.request import CompressionRequest
from lkv.methods.targets import UNQUANTIZED, KVShape, Precision
from lkv.policy.policy import Policy
from lkv.utils.prompts import bos_ids, chat_template_parts, encode, encode_context

SHARES = (0.02, 0.03, 0.05, 0.07, 0.1, 0.15, 0.2, 0.25, 0.3, 0.4, 0.5, 0.65, 0.8, 1.0)


@dataclass(frozen=True)
class InspectionResult:
    """The kept tokens of one method in a text of T tokens, for L layers of H KV heads, R budgets and P precisions."""

    method: str
    pieces: list[str]  # the text of each token, [T]
    ranks: np.ndarray  # of each token in each head, 0 for the highest score: uint16 or uint32 [T, L * H]
    counts: np.ndarray  # tokens that each head keeps, cumulative over precisions from the best on, [R, P, L * H]
    shares: tuple[float, ...]  # the budgets [R], of the 16-bit cache's bytes or of its entries
    by_memory: bool  # whether they are shares of the bytes
    precisions: tuple[Precision, ...]  # [P], best first
    layers: int  # L
    heads: int  # H
    shape: KVShape

    def entry_bytes(self, precision: Precision = UNQUANTIZED) -> float:
        """Return the bytes of one token in one head."""
        return self.shape.entry_bits(precision) / 8


@torch.no_grad()
def inspect_text(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    text: str,
    method: str = "lkv",
    policy: Policy | None = None,
    shares: Sequence[float] = SHARES,
    by_memory: bool = True,
) -> InspectionResult:
    """Read a text once and rank its tokens in every head.

    One ranking serves all budgets. CriticalKV's ranking depends on the budget: its kept tokens are exact, but their
    precisions under a memory budget are approximate, because tokens that smaller budgets keep are ranked first.

    Args:
        model: The model.
        tokenizer: Its tokenizer.
        text: The text.
        method: A method that evicts layer by layer and needs no pattern.
        policy: As in `lkv.compress`.
        shares: Budgets: shares of the 16-bit cache's bytes, or of its entries.
        by_memory: Whether they are shares of the bytes.

    Raises:
        PromptError: For a text longer than the model reads.
        LkvError: For another method, and as RaggedCache raises.
    """
    ids = encode_context(tokenizer, text)
    check_fits_model(model, len(ids))
    check_ids(model, tokenizer, ids)
    if parse_method(method).needs_pattern:
        raise LkvError(
            f"{method!r} needs a pattern of retrieval heads, which an inspection has not; use another method."
        )
    budgets: list[dict[str, Any]] = [{"memory" if by_memory else "retention": share} for share in shares]
    requests = [CompressionRequest(method=method, policy=policy, **budget) for budget in budgets]
    configs = [CacheConfig.resolve(request, model, tokenizer) for request in requests]
    resolved = configs[0].method
    if resolved.needs_whole_prompt:
        raise LkvError(
            f"{method!r} needs all layers before it keeps anything; inspect a method that evicts layer by layer."
        )
    prompt = read_prompt(model, torch.tensor([ids], device=input_device(model)), resolved.selector.reads_queries)
    ranks, counts = _ranked(configs, prompt)
    key = prompt[0].key
    return InspectionResult(
        method=method,
        pieces=token_texts(tokenizer, text, ids),
        ranks=ranks,
        counts=counts,
        shares=tuple(shares),
        by_memory=by_memory,
        precisions=tuple(tier.precision for tier in configs[0].tiers),
        layers=len(prompt),
        heads=key.shape[1],
        shape=KVShape(len(prompt) * key.shape[1], key.shape[-1], key.element_size()),
    )


def _ranked(configs: Sequence[CacheConfig], prompt: list[LayerKV]) -> tuple[np.ndarray, np.ndarray]:
    """Return `ranks` and `counts` of a result; all configs share the first one's selector."""
    ranks, counts, selector = [], [], configs[0].method.selector
    best_first = partial(torch.argsort, dim=-1, descending=True, stable=True)
    for layer, read in enumerate(prompt):
        scores = selector.scores(layer, read)
        _, heads, tokens = scores.shape

        def count(budget: Budget, layer: int = layer, scores: Tensor = scores) -> list[list[int]]:
            return budget.counts(layer, scores)

        layer_counts = [tier_counts(config.tiers, tokens, heads, 1, count) for config in configs]
        order = best_first(scores[0])
        if selector.uses_counts:
            # Larger budgets keep a superset, so tokens kept by more of the budgets come first.
            budgets_keeping = torch.zeros_like(order)
            for *_, head_counts in layer_counts:
                best = best_first(selector.refine(layer, read, scores, head_counts)[0])
                for head, number in enumerate(head_counts[0]):
                    budgets_keeping[head, best[head, :number]] += 1
            order = order.gather(-1, best_first(budgets_keeping.gather(-1, order)))
        ranks.append(order.argsort(-1).cpu().numpy())
        counts.append([[tier[0] for tier in tiers] for tiers in layer_counts])
    kind = np.uint16 if ranks[0].shape[-1] <= 1 << 16 else np.uint32
    table = np.asarray(counts).transpose(1, 2, 0, 3)  # from [L, R, P, H]
    return np.concatenate(ranks).T.astype(kind), table.reshape(*table.shape[:2], -1)


def token_texts(tokenizer: Any, text: str, ids: list[int]) -> list[str]:
    """Return the text of each token of the context; joined, they are the full text."""
    whole = chat_template_parts(tokenizer)[0] + text
    extra = len(ids) - len(encode(tokenizer, whole))
    if not getattr(tokenizer, "is_fast", False):
        return [tokenizer.decode([token]) for token in ids]
    spans = tokenizer(whole, add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"]
    pieces, start = [], 0
    # A character of several tokens belongs to the first of them; text between two tokens, to the second.
    for _, end in spans:
        pieces.append(whole[start : max(start, end)])
        start = max(start, end)
    return [tokenizer.decode([token]) for token in bos_ids(tokenizer)[:extra]] + pieces


@dataclass(frozen=True)
class MethodAnswer:
    """The answer of one method: its display name, realised retention, bytes of its cache and the full cache, text."""

    label: str
    realised: float
    nbytes: int
    full_nbytes: int
    text: str


def render_page(
    result: InspectionResult, title: str, model: str, share: float, answers: dict[str, list[MethodAnswer]]
) -> str:
    """Render the page, one HTML file that needs no server.

    Args:
        result: The inspection result.
        title: The page's title.
        model: The model's name.
        share: The budget at which the slider starts and the answers were given.
        answers: The answers of several methods by question.
    """
    start = min(range(len(result.shares)), key=lambda i: abs(result.shares[i] - share))
    data: dict[str, Any] = {
        "title": title,
        "model": model,
        "method": method_label(result.method),
        "layers": result.layers,
        "heads": result.heads,
        "budget": "memory" if result.by_memory else "retention",
        "shares": result.shares,
        "entryBytes": result.entry_bytes(),
        "basisBytes": result.shape.heads * result.shape.basis_bits / 8,
        "tiers": [
            {
                "name": str(each) if each.is_quantized else "full precision",
                "bytes": result.entry_bytes(each),
                "coded": each.is_quantized,
            }
            for each in result.precisions
        ],
        "start": start,
        "pieces": result.pieces,
        "counts": result.counts.tolist(),
        "rankBytes": result.ranks.dtype.itemsize,
        "ranks": base64.b64encode(result.ranks.astype(result.ranks.dtype.newbyteorder("<")).tobytes()).decode(),
        "answersAt": share,
        "answers": {question: [asdict(answer) for answer in row] for question, row in answers.items()},
    }
    # "<" could end the script that holds the data.
    text = json.dumps(data, ensure_ascii=False).replace("<", "\\u003c").replace("\u2028", "\\u2028")
    template = resources.files(__package__).joinpath("inspection_page.html").read_text(encoding="utf-8")
    return template.replace("/* DATA */", text)


def is_page(path: Path) -> bool:
    """Return whether the file at `path` is a page that `render_page` made."""
    with path.open("rb") as file:
        return b"<title>LKV: what is kept</title>" in file.read(1024)
