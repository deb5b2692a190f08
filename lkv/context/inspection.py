"""Which tokens every head of a method keeps of a text, at every retention of a ladder, from one reading."""

import base64
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib import resources
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lkv.errors import LkvError, PromptError
from lkv.integrations.transformers.attention import input_device, patch_attention
from lkv.integrations.transformers.prefill import LayerKV, read_prompt
from lkv.methods.method import Method, resolve_method
from lkv.methods.registry import parse_method
from lkv.policy.policy import Policy
from lkv.utils.prompts import bos_ids, chat_template_parts, encode, encode_context

RETENTIONS = (0.02, 0.03, 0.05, 0.07, 0.1, 0.15, 0.2, 0.25, 0.3, 0.4, 0.5, 0.65, 0.8, 1.0)

_DATA = "/* DATA */"  # where the page template takes its data


@dataclass(frozen=True)
class InspectionResult:
    """A text as a method sees it: `pieces` [T], the text of each token; `ranks` [T, L * H], the place of each token in
    each head, 0 the best (uint16, or uint32 for long texts); `counts` [R, L * H], how many tokens each head keeps at
    each of `retentions`; `entry_bytes` of k and v of one token in one head."""

    method: str
    pieces: list[str]
    ranks: np.ndarray
    counts: np.ndarray
    retentions: tuple[float, ...]
    layers: int
    heads: int
    entry_bytes: int


@torch.no_grad()
def inspect_text(
    model: Any,
    tokenizer: Any,
    text: str,
    method: str = "lkv",
    policy: Policy | None = None,
    retentions: Sequence[float] = RETENTIONS,
) -> InspectionResult:
    """Read `text` once and rank its tokens in every head; heads of all layers, layer by layer.

    Raises what RaggedCache raises, PromptError for a text beyond the model's positions, and LkvError for a method that
    reads the text twice or needs a pattern.
    """
    spec = patch_attention(model).spec
    ids = encode_context(tokenizer, text)
    if len(ids) >= spec.max_positions:
        raise PromptError(f"the text has {len(ids)} tokens, but the model reads {spec.max_positions}; shorten it.")
    if parse_method(method).needs_pattern:
        raise LkvError(f"{method!r} needs a pattern of retrieval heads, which inspecting takes none of; use another.")
    methods = [
        resolve_method(method, model, retention=retention, policy=policy, tokenizer=tokenizer)
        for retention in retentions
    ]
    if methods[0].needs_whole_prompt:
        raise LkvError(f"{method!r} sees all layers before it keeps anything; look at a method that goes by layers.")
    prompt = read_prompt(model, torch.tensor([ids], device=input_device(model)), methods[0].selector.reads_queries)
    ranks, counts = _ranked(methods, prompt)
    first = prompt[0]
    return InspectionResult(
        method,
        pieces_of(tokenizer, text, ids),
        ranks,
        counts,
        tuple(retentions),
        len(prompt),
        first.key.shape[1],
        (first.key.shape[-1] + first.value.shape[-1]) * first.key.element_size(),
    )


def _ranked(methods: Sequence[Method], prompt: list[LayerKV]) -> tuple[np.ndarray, np.ndarray]:
    """`ranks` and `counts` of a InspectionResult; all methods share the selector of the first."""
    ranks, counts = [], []
    for layer, read in enumerate(prompt):
        scores = methods[0].selector.scores(layer, read)
        ranks.append(_places(scores[0]))
        counts.append([method.budget.counts(layer, scores)[0] for method in methods])
    kind = np.uint16 if ranks[0].shape[-1] <= 1 << 16 else np.uint32
    return np.concatenate(ranks).T.astype(kind), np.asarray(counts).transpose(1, 0, 2).reshape(len(methods), -1)


def _places(scores: Tensor) -> np.ndarray:
    """The place of each token among those of its head [H, T], 0 for the highest score."""
    order = scores.argsort(dim=-1, descending=True, stable=True)
    return order.argsort(-1).cpu().numpy()


def pieces_of(tokenizer: Any, text: str, ids: list[int]) -> list[str]:
    """The text of each token of the context, so that all pieces put together are the text as the model reads it."""
    whole = chat_template_parts(tokenizer)[0] + text
    extra = len(ids) - len(encode(tokenizer, whole))
    if not getattr(tokenizer, "is_fast", False):
        return [tokenizer.decode([token]) for token in ids]
    spans = tokenizer(whole, add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"]
    pieces, start = [], 0
    # A character of several tokens goes to the first of them; what lies between two tokens, to the second.
    for _, end in spans:
        pieces.append(whole[start : max(start, end)])
        start = max(start, end)
    return [tokenizer.decode([token]) for token in bos_ids(tokenizer)[:extra]] + pieces


@dataclass(frozen=True)
class MethodAnswer:
    """What one method answered: its `label` in print, entries kept of all, bytes held, and the text."""

    label: str
    realised: float
    nbytes: int
    full_nbytes: int
    text: str


def render_page(
    result: InspectionResult, title: str, model: str, retention: float, answers: dict[str, list[MethodAnswer]]
) -> str:
    """The HTML of the page; `answers` by question, all at `retention`, where the slider starts."""
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
        "answers": {question: [asdict(answer) for answer in given] for question, given in answers.items()},
    }
    # "<" could end the script that holds the data.
    text = json.dumps(data, ensure_ascii=False).replace("<", "\\u003c").replace("\u2028", "\\u2028")
    template = resources.files(__package__).joinpath("inspection_page.html").read_text(encoding="utf-8")
    return template.replace(_DATA, text)
