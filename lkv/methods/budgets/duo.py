"""DuoAttention (Xiao et al. 2024): its budgets, and reading and estimating patterns of retrieval heads."""

import math
import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lkv.errors import BudgetError, DataError, PromptError, UnsupportedModelError
from lkv.hf.attention import input_device, patch_attention
from lkv.hf.prompt_kv import LayerKV, read_prompt, to_fp32
from lkv.hf.spec import evaluation_mode
from lkv.methods.base import RECENT, ROUNDING, SINKS, FixedBudget, attention_blocks
from lkv.methods.registry import register_budget
from lkv.methods.targets import RetentionTarget, as_target
from lkv.utils.files import as_path

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@register_budget(
    "duo",
    label="DuoAttention",
    description="retrieval heads keep all, others sinks and recent tokens (DuoAttention)",
    variant="DuoAttention with the exact budget: as many retrieval heads as R allows after the windows",
)
class Duo(FixedBudget):
    """DuoAttention (Xiao et al. 2024): retrieval heads keep every token, streaming heads only sinks and recent tokens.

    The heads with the largest alphas are retrieval heads: as many as fit into R L H T entries with the windows of all
    others. Ties go to lower layers and heads. The selector must rank sinks and recent tokens first. Within a memory
    budget these are the entries of all precisions, in the same proportions in each head.
    """

    required_inputs = ("target", "pattern", "heads", "strict")

    def __init__(
        self,
        retention: float | RetentionTarget,
        pattern: list[list[float]],
        heads: slice = slice(None),
        strict: bool = True,
        sinks: int = SINKS,
        recent: int = RECENT,
    ):
        """Create the budget from the alphas `pattern` [L][H] of the whole model, for the KV `heads` of this process.

        If the windows alone exceed the share, they are kept without `strict`; otherwise PromptError is raised. Raises
        BudgetError for an invalid pattern or window, and RetentionError.
        """
        if sinks < 0 or recent < 0 or sinks + recent < 1:
            raise BudgetError(
                f"a streaming head cannot keep {sinks} sinks and {recent} recent tokens; give numbers >= 0 that are "
                f"not both 0, such as {SINKS} and {RECENT}."
            )
        width = len(pattern[0]) if pattern else 0
        if not width:
            raise BudgetError("the pattern of retrieval heads is empty; give one alpha for each KV head, [L][H].")
        self._target, self._window, self._heads, self._strict = as_target(retention), sinks + recent, heads, strict
        alphas = check_table(pattern, len(pattern), width, "the pattern of retrieval heads")
        # The rank of each head among all heads of the model, by decreasing alpha.
        order = torch.tensor(alphas, dtype=torch.float64).flatten().argsort(descending=True, stable=True)
        self._rank = order.argsort().view(len(alphas), width).tolist()

    def retrieval_heads(self, tokens: int) -> int:
        """Return the number of heads of the model that keep all of `tokens` tokens.

        With `strict`, raises PromptError if the streaming heads' windows alone exceed the share.
        """
        heads = len(self._rank) * len(self._rank[0])
        window = min(self._window, tokens)
        surplus = int(self._target.total_share(tokens) * heads * tokens + ROUNDING) - heads * window
        if surplus < 0 and self._strict:
            # Rounded up, so that the suggested number works.
            least = -(-window * 10_000 // tokens) / 10_000
            raise PromptError(
                f"the prompt has {tokens} tokens, of which every streaming head keeps {window} (sinks and recent "
                f"ones): the smallest retention that DuoAttention can reach at this length is {least}, but it was "
                f"given {self._target}. Ask for more, give a longer prompt, or fewer sinks and recent tokens."
            )
        return min(heads, max(0, surplus) // (tokens - window)) if tokens > window else heads

    def ratios(self, layer: int, heads: int, tokens: int) -> list[float]:
        """Return 1 for retrieval heads, else the window's share, times the part in this and better precisions."""
        whole, total = self.retrieval_heads(tokens), self._target.total_share(tokens)
        part = self._target.share(tokens) / total if total else 0.0
        streaming = min(1.0, self._window / max(1, tokens))
        return [part if rank < whole else part * streaming for rank in self._rank[layer][self._heads]]


@register_budget(
    "duo-heads",
    label="DuoAttention of kvpress",
    description="the share R of heads keeps all, others sinks and recent tokens (DuoAttention of kvpress)",
    variant="DuoAttention (kvpress) as kvpress has it: the share R of heads keeps all, and so more than R is kept",
)
class DuoOfHeads(Duo):
    """DuoAttention as in kvpress's evaluation: at every length the share R of all heads are retrieval heads.

    It keeps more than R because of the streaming heads' windows: 0.23 of 4,096 tokens at R = 0.15, and 0.17 of
    16,384. Texts within the window are kept whole.
    """

    exact_name = "duo"

    def retrieval_heads(self, tokens: int) -> int:
        """Return the share R of all heads, rounded."""
        heads = len(self._rank) * len(self._rank[0])
        return heads - round(heads * (1 - self._target.total_share(tokens)))


def read_pattern(path: str | os.PathLike[str], layers: int, heads: int) -> list[list[float]]:
    """Return the alphas [L][H] of a DuoAttention pattern file (`full_attention_heads.tsv`), clipped to [0, 1].

    One line a layer, one number a KV head, separated by tabs, as published by Xiao et al. (2024). Raises BudgetError.
    """
    try:
        text = as_path(path, BudgetError, "the pattern").read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise BudgetError(f"{path} cannot be read ({error}); give a text file that is there.") from None
    try:
        cells = [[float(cell) for cell in line.split("\t")] for line in text.splitlines() if line.strip()]
    except ValueError as error:
        raise BudgetError(
            f"{path} is not a tab-separated table of numbers ({error}); give a full_attention_heads.tsv as published "
            "with DuoAttention."
        ) from None
    # NaN passes through and is rejected below.
    table = [[value if math.isnan(value) else min(1.0, max(0.0, value)) for value in row] for row in cells]
    return check_table(table, layers, heads, str(path))


def check_table(table: object, layers: int, heads: int, source: str) -> list[list[float]]:
    """Return a table [L][H] as floats.

    Args:
        table: The table.
        layers: L.
        heads: H.
        source: The name of the table in an error.

    Raises:
        BudgetError: If the shape does not match, or values are outside [0, 1].
    """
    advice = f"give {layers} rows of {heads} numbers in [0, 1]"
    if not isinstance(table, list) or not all(isinstance(row, list) for row in table):
        raise BudgetError(f"{source} is not a list of lists of numbers; {advice}.")
    widths = sorted({len(row) for row in table})
    if len(table) != layers or widths != [heads]:
        stated = " or ".join(map(str, widths)) or "no"
        raise BudgetError(
            f"{source} has {len(table)} rows of {stated} numbers, but the model has {layers} layers of {heads} KV "
            f"heads; {advice}, made for this very model."
        )
    for layer, row in enumerate(table):
        for head, value in enumerate(row):
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
                raise BudgetError(
                    f"{source} has {value!r} for layer {layer}, head {head}, but only numbers in [0, 1] are allowed; "
                    "correct it."
                )
    return [[float(value) for value in row] for row in table]


@torch.no_grad()
def estimate_pattern(
    model: "PreTrainedModel", texts: Sequence[list[int]], sinks: int = SINKS, recent: int = RECENT
) -> list[list[float]]:
    """Estimate alphas for `Duo`: the share of each KV head's attention outside sinks and recent tokens.

    It is averaged over the query heads of a group, over all tokens with earlier tokens outside their window, and over
    the texts. Queries and keys are taken after QK-norm and RoPE.

    Args:
        model: The model, whole in this process.
        texts: Token ids of each text.
        sinks: First tokens of the window.
        recent: Most recent tokens of the window.

    Returns:
        Alphas [L][H].

    Raises:
        DataError: If no text is longer than the window.
        UnsupportedModelError: If the model is split over processes.
    """
    if sinks < 0 or recent < 1:
        raise BudgetError(f"there is no window of {sinks} sinks and {recent} recent tokens; give >= 0 and >= 1.")
    long = [ids for ids in texts if len(ids) > sinks + recent]
    if not long:
        raise DataError(
            f"none of the {len(texts)} texts is longer than the {sinks} sinks and {recent} recent tokens of a streaming"
            " head, so none shows what it would miss; give longer texts, or a smaller window."
        )

    def attention_outside(prompt: LayerKV) -> Tensor:
        """Return the mean attention outside sinks and recent tokens, [H]."""
        first = sinks + recent  # the first row with a token outside its window
        mass = torch.zeros(prompt.key.shape[1], dtype=torch.float32, device=prompt.key.device)
        for start, attention in attention_blocks(prompt, first):
            positions = torch.arange(attention.shape[-1], device=mass.device)
            is_outside = (positions >= sinks) & (positions <= positions[start:, None] - recent)
            mass += (attention[0] * is_outside).sum(-1).mean(1).sum(-1)
            del attention  # before the next block takes memory
        return mass / (prompt.key.shape[2] - first)

    return _mean_over_texts(model, long, attention_outside)


@torch.no_grad()
def estimate_mean_pattern(model: "PreTrainedModel", texts: Sequence[list[int]], length: int = 500) -> list[list[float]]:
    """Estimate alphas [L][H] for `Duo` with kvpress's quick method, which the LKV paper used for Qwen3 (App. D).

    Each head's mean query and mean key over a text (before RoPE, after QK-norm) are placed at `length` positions. The
    score is the mean of the last position's cumulative attention: near 1 if old tokens receive it, near 0 if recent
    tokens do. It is averaged over the query heads of a group and over the `texts` (token ids; kvpress uses 50 chapters
    of BookSum). The model must not be split over processes. Raises DataError without texts, and UnsupportedModelError
    for a model whose rotation cannot be undone.
    """
    if not any(texts):
        raise DataError("there is no text to estimate retrieval heads on; give some.")

    def cumulative_attention(prompt: LayerKV) -> Tensor:
        """Return the area under the cumulative attention between the mean query and the mean key, [H]."""
        rotation = prompt.required_rotation
        means = (rotation.unrotate(to_fp32(x)).mean(2, keepdim=True) for x in (prompt.query, prompt.key))
        queries, keys = (rotation.rotate(mean.expand(-1, -1, length, -1)) for mean in means)
        last = queries[:, :, -1:].unflatten(1, (keys.shape[1], -1))
        logits = prompt.logits(last, keys[:, :, None])[0, :, :, 0]
        return torch.softmax(logits.float(), -1).cumsum(-1).mean(-1).mean(-1)

    return _mean_over_texts(model, [ids for ids in texts if ids], cumulative_attention)


def _mean_over_texts(
    model: "PreTrainedModel", texts: Sequence[list[int]], score: Callable[[LayerKV], Tensor]
) -> list[list[float]]:
    """Return the mean over `texts` of `score` [H] of each layer, as a table [L][H] of numbers in [0, 1]."""
    spec, device = patch_attention(model).spec, input_device(model)
    total = torch.zeros(spec.layers, spec.kv_heads, dtype=torch.float64, device="cpu")
    with evaluation_mode(model):
        for ids in texts:
            prompt = read_prompt(model, torch.tensor([ids], device=device), queries=True)
            if prompt[0].key.shape[1] != spec.kv_heads:
                raise UnsupportedModelError(
                    "this process holds only some of the model's heads; estimate the pattern with the whole model."
                )
            total += torch.stack([score(layer) for layer in prompt]).double().cpu()
    # Rounding can raise a mean of probabilities slightly above 1.
    return (total / len(texts)).clamp(0, 1).tolist()
