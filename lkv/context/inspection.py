"""Which tokens of a text every head of a method keeps, at several retentions, from one reading; and the page of it."""

import base64
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib import resources
from typing import Any

import numpy as np
import torch

from lkv.errors import LkvError, PromptError
from lkv.integrations.transformers.attention import input_device, patch_attention
from lkv.integrations.transformers.prefill import LayerKV, read_prompt
from lkv.methods.method import Method, resolve_method
from lkv.methods.registry import parse_method
from lkv.policy.policy import Policy
from lkv.utils.prompts import bos_ids, chat_template_parts, encode, encode_context

RETENTIONS = (0.02, 0.03, 0.05, 0.07, 0.1, 0.15, 0.2, 0.25, 0.3, 0.4, 0.5, 0.65, 0.8, 1.0)


@dataclass(frozen=True)
class InspectionResult:
    """The selection of one method in a text of T tokens, for L layers of H KV heads and R retentions."""

    method: str
    pieces: list[str]  # the text of each token, [T]
    ranks: np.ndarray  # of each token in each head, 0 for the highest score: uint16 or uint32 [T, L * H]
    counts: np.ndarray  # how many tokens each head keeps at each retention, [R, L * H]
    retentions: tuple[float, ...]  # [R]
    layers: int  # L
    heads: int  # H
    entry_bytes: int  # of k and v of one token in one head


@torch.no_grad()
def inspect_text(
    model: Any,
    tokenizer: Any,
    text: str,
    method: str = "lkv",
    policy: Policy | None = None,
    retentions: Sequence[float] = RETENTIONS,
) -> InspectionResult:
    """Read a text once and rank its tokens in every head.

    Raises PromptError for a text longer than the model reads; LkvError for a method that reads the text twice or needs
    a pattern, and as RaggedCache raises.
    """
    spec = patch_attention(model).spec
    ids = encode_context(tokenizer, text)
    if len(ids) >= spec.max_positions:
        raise PromptError(f"the text has {len(ids)} tokens, but the model reads {spec.max_positions}; shorten it.")
    if parse_method(method).needs_pattern:
        raise LkvError(
            f"{method!r} needs a pattern of retrieval heads, which an inspection has not; use another method."
        )
    methods = [
        resolve_method(method, model, retention=retention, policy=policy, tokenizer=tokenizer)
        for retention in retentions
    ]
    if methods[0].needs_whole_prompt:
        raise LkvError(
            f"{method!r} needs all layers before it keeps anything; inspect a method that evicts layer by layer."
        )
    prompt = read_prompt(model, torch.tensor([ids], device=input_device(model)), methods[0].selector.reads_queries)
    ranks, counts = _ranked(methods, prompt)
    first = prompt[0]
    return InspectionResult(
        method=method, pieces=token_texts(tokenizer, text, ids), ranks=ranks, counts=counts,
        retentions=tuple(retentions), layers=len(prompt), heads=first.key.shape[1],
        entry_bytes=(first.key.shape[-1] + first.value.shape[-1]) * first.key.element_size(),
    )  # fmt: skip


def _ranked(methods: Sequence[Method], prompt: list[LayerKV]) -> tuple[np.ndarray, np.ndarray]:
    """`ranks` and `counts` of a result; all methods share the selector of the first."""
    ranks, counts = [], []
    for layer, read in enumerate(prompt):
        selector = methods[0].selector
        scores = selector.scores(layer, read)
        layer_counts = [method.budget.counts(layer, scores) for method in methods]
        order = scores[0].argsort(dim=-1, descending=True, stable=True)
        if selector.refines:
            # A larger budget keeps all that a smaller one does: tokens that more of the budgets keep come first.
            kept = torch.zeros_like(order)
            for own in layer_counts:
                best = selector.refine(layer, read, scores, own)[0].argsort(dim=-1, descending=True, stable=True)
                for head, count in enumerate(own[0]):
                    kept[head, best[head, :count]] += 1
            order = order.gather(-1, kept.gather(-1, order).argsort(dim=-1, descending=True, stable=True))
        ranks.append(order.argsort(-1).cpu().numpy())
        counts.append([own[0] for own in layer_counts])
    kind = np.uint16 if ranks[0].shape[-1] <= 1 << 16 else np.uint32
    return np.concatenate(ranks).T.astype(kind), np.asarray(counts).transpose(1, 0, 2).reshape(len(methods), -1)


def token_texts(tokenizer: Any, text: str, ids: list[int]) -> list[str]:
    """The text of each token of the context; joined, they are the text as the model reads it."""
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
    """The answer of one method: its printed name, realised retention, bytes of its cache and of a full one, text."""

    label: str
    realised: float
    nbytes: int
    full_nbytes: int
    text: str


def render_page(
    result: InspectionResult, title: str, model: str, retention: float, answers: dict[str, list[MethodAnswer]]
) -> str:
    """Render the page, one HTML file that needs no server; slider and answers (by question) are at `retention`."""
    start = min(range(len(result.retentions)), key=lambda i: abs(result.retentions[i] - retention))
    data: dict[str, Any] = {
        "title": title,
        "model": model,
        "method": result.method,
        "layers": result.layers,
        "heads": result.heads,
        "entryBytes": result.entry_bytes,
        "retentions": result.retentions,
        "start": start,
        "pieces": result.pieces,
        "counts": result.counts.tolist(),
        "rankBytes": result.ranks.dtype.itemsize,
        "ranks": base64.b64encode(result.ranks.astype(result.ranks.dtype.newbyteorder("<")).tobytes()).decode(),
        "answersAt": retention,
        "answers": {question: [asdict(answer) for answer in row] for question, row in answers.items()},
    }
    # "<" could end the script that holds the data.
    text = json.dumps(data, ensure_ascii=False).replace("<", "\\u003c").replace("\u2028", "\\u2028")
    template = resources.files(__package__).joinpath("inspection_page.html").read_text(encoding="utf-8")
    return template.replace("/* DATA */", text)
