"""DuoAttention (Xiao et al. 2024)."""

from lkv.errors import BudgetError, PromptError
from lkv.methods.budgets.base import ROUNDING, FixedBudget, RetentionTarget, as_target
from lkv.methods.budgets.tables import check_table

SINKS, RECENT = 128, 256


class Duo(FixedBudget):
    """DuoAttention (Xiao et al. 2024): retrieval heads keep every token, streaming heads sinks and recent ones alone.

    The heads with the largest alphas are retrieval heads: as many as R L H T entries allow beside the windows of all
    others (the share that is left is less than one more head would cost). Equal alphas: lower layers and heads first.
    It says how many a streaming head keeps; a selector must rank the sinks and the recent tokens first.
    """

    def __init__(
        self,
        retention: float | RetentionTarget,
        pattern: list[list[float]],
        sinks: int = SINKS,
        recent: int = RECENT,
        heads: slice = slice(None),
        strict: bool = True,
    ):
        """`pattern`: the alphas [L][H] of the whole model, see `read_pattern` and `estimate_pattern`; `sinks` and
        `recent`: the tokens that a streaming head keeps; `heads`: the KV heads that this process computes.
        Where the windows alone are more than the share, `strict` raises PromptError; without it no head keeps more than
        its window, which is the least this rule can keep.

        Raises BudgetError for an unusable pattern or window, and RetentionError.
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
        places = [(layer, head) for layer in range(len(alphas)) for head in range(width)]
        order = sorted(places, key=lambda where: -alphas[where[0]][where[1]])
        self._rank = [[0] * width for _ in alphas]
        for rank, (layer, head) in enumerate(order):
            self._rank[layer][head] = rank

    def retrieval_heads(self, tokens: int) -> int:
        """How many heads of the model keep all of `tokens` tokens.

        Raises PromptError where the streaming heads' windows alone are more than the share, unless not `strict`.
        """
        heads = len(self._rank) * len(self._rank[0])
        window = min(self._window, tokens)
        room = int(self._target.share(tokens) * heads * tokens + ROUNDING) - heads * window
        if room < 0 and not self._strict:
            return 0
        if room < 0:
            # Rounded up, so that the number stated is one that works.
            least = -(-window * 10_000 // tokens) / 10_000
            raise PromptError(
                f"the prompt has {tokens} tokens, of which every streaming head keeps {window} (sinks and recent "
                f"ones): the smallest retention that DuoAttention can reach at this length is {least}, but it was "
                f"given {self._target}. Ask for more, give a longer prompt, or fewer sinks and recent tokens."
            )
        return min(heads, room // (tokens - window)) if tokens > window else heads

    def ratios(self, layer: int, heads: int, tokens: int) -> list[float]:
        whole = self.retrieval_heads(tokens)
        streaming = min(1.0, self._window / max(1, tokens))
        return [1.0 if rank < whole else streaming for rank in self._rank[layer][self._heads]]


class DuoOfHeads(Duo):
    """DuoAttention with as many retrieval heads at every length as kvpress's evaluator gives it: the share R of all
    heads, to the nearest.

    What it keeps is more than R by the windows of the streaming heads: 0.23 of 4,096 tokens at R = 0.15, and 0.17 of
    16,384. Texts within the window are kept whole.
    """

    def retrieval_heads(self, tokens: int) -> int:
        heads = len(self._rank) * len(self._rank[0])
        return heads - round(heads * (1 - self._target.share(tokens)))
