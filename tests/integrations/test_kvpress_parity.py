"""The selectors beside kvpress, the library in which these methods are usually run: same model, same prompt."""

import warnings
from types import ModuleType

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

from lkv.cache.ragged_cache import RaggedCache
from lkv.hf.attention import ALL_ATTENTION_FUNCTIONS, patch_attention
from lkv.hf.prompt_kv import read_prompt
from lkv.methods.budgets import Uniform
from lkv.methods.method import Method
from lkv.methods.selectors import (
    H2O,
    TOVA,
    CriticalKV,
    ExpectedAttention,
    KeyDiff,
    Knorm,
    Selector,
    SnapKV,
    StreamingLLM,
)
from tests.cache.helpers import ids
from tests.families import build

TOKENS = 90
# kvpress reads them from the arguments of attention, to which newer versions of transformers do not add them.
POSITIONS = {"cache_position": torch.arange(TOKENS)}
families = pytest.mark.parametrize("family", ["Llama", "Qwen3"])


@pytest.fixture(scope="module")
def kvpress() -> ModuleType:
    """The import wraps every attention function of the process; only presses that mask heads need that, none here does.

    It is undone, for the wrapped ones would hide what later tests register under the same names.
    """
    before = dict(ALL_ATTENTION_FUNCTIONS._local_mapping)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "'pipes' is deprecated", DeprecationWarning)
        module = pytest.importorskip("kvpress")
    ALL_ATTENTION_FUNCTIONS._local_mapping.clear()
    ALL_ATTENTION_FUNCTIONS._local_mapping.update(before)
    return module


def ours(family: str, make, count: int = 0) -> list[Tensor]:
    """Scores of each layer [B, H, T] for heads that keep `count` tokens; `make` gets the model."""
    model = build(family)
    selector: Selector = make(model)
    layers = read_prompt(model, ids(2, TOKENS), queries=True)
    counts = [[count] * layers[0].key.shape[1]] * 2
    return [selector.refine(i, layer, selector.scores(i, layer), counts) for i, layer in enumerate(layers)]


@torch.no_grad()
def theirs(family: str, press, implementation: str = "sdpa") -> list[Tensor]:
    """The scores that a press gives in kvpress's own hooks."""
    model, found = build(family), []
    model.set_attn_implementation(implementation)
    score = press.score

    def noted(*args, **kwargs):
        found.append(score(*args, **kwargs))
        return found[-1]

    press.score = noted
    with press(model):
        model(ids(2, TOKENS), past_key_values=DynamicCache(), use_cache=True, **POSITIONS)
    assert len(found) == 3
    return found


def equal(mine: list[Tensor], other: list[Tensor]) -> None:
    for a, b in zip(mine, other, strict=True):
        torch.testing.assert_close(a.double(), b.double(), atol=1e-5, rtol=1e-5)


def same_choice(mine: list[Tensor], other: list[Tensor], count: int) -> None:
    for a, b in zip(mine, other, strict=True):
        assert torch.equal(*(x.topk(count).indices.sort().values for x in (a, b)))


@families
@pytest.mark.parametrize(
    ("make", "press", "implementation"),
    [
        (lambda model: Knorm(), lambda kvpress: kvpress.KnormPress(0.5), "sdpa"),
        (lambda model: KeyDiff(), lambda kvpress: kvpress.KeyDiffPress(0.5), "sdpa"),
        (lambda model: H2O(average=True), lambda kvpress: kvpress.ObservedAttentionPress(0.5), "eager"),
        *(
            (
                lambda model, norm=norm, epsilon=epsilon: ExpectedAttention(model, value_norm=norm, epsilon=epsilon),
                lambda kvpress, norm=norm, epsilon=epsilon: kvpress.ExpectedAttentionPress(
                    0.5, use_vnorm=norm, epsilon=epsilon
                ),
                "sdpa",
            )
            for norm, epsilon in [(True, 0.0), (False, 0.0), (True, 0.01)]
        ),
    ],
)
def test_scores_are_those_of_kvpress(kvpress, family, make, press, implementation):
    equal(ours(family, make), theirs(family, press(kvpress), implementation))


@families
@pytest.mark.parametrize(("window", "kernel"), [(64, 5), (8, 3)])
@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_snapkv(kvpress, family, window, kernel, implementation):
    press = kvpress.SnapKVPress(0.5, window, kernel)
    mine, other = ours(family, lambda model: SnapKV(window, kernel)), theirs(family, press, implementation)
    equal([x[..., :-window] for x in mine], [x[..., :-window] for x in other])
    # kvpress gives the whole window one score above all others; ours rise with recency, which decides smaller budgets.
    for x in mine:
        assert float(x[..., -window:].min()) > float(x[..., :-window].max())
        assert bool((x[..., -window:].diff() > 0).all())


@families
@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_tova(kvpress, family, implementation):
    mine, other = ours(family, lambda model: TOVA()), theirs(family, kvpress.TOVAPress(0.5), implementation)
    # kvpress gives the last token the maximum plus 1, so that it is always kept; the paper protects nothing.
    equal([x[..., :-1] for x in mine], [x[..., :-1] for x in other])
    for x in other:
        assert float(x[..., -1].min()) == pytest.approx(float(x[..., :-1].max()) + 1)


@families
@pytest.mark.parametrize("ratio", [0.05, 0.5, 0.9])
def test_streaming_llm(kvpress, family, ratio):
    # The scores of kvpress know the budget and are 1 or 0; ours rank all tokens, whatever the budget.
    mine, other = ours(family, lambda model: StreamingLLM()), theirs(family, kvpress.StreamingLLMPress(ratio))
    same_choice(mine, other, int(TOKENS * (1 - ratio)))


@families
@pytest.mark.parametrize("ratio", [0.1, 0.5, 0.9])
@pytest.mark.parametrize("inner", ["snapkv", "expected", "observed"])
def test_criticalkv(kvpress, family, ratio, inner):
    presses = {
        "snapkv": (lambda model: SnapKV(8), lambda: kvpress.SnapKVPress(ratio, 8), "sdpa"),
        "expected": (
            lambda model: ExpectedAttention(model, value_norm=False),
            lambda: kvpress.ExpectedAttentionPress(ratio, use_vnorm=False),
            "sdpa",
        ),
        "observed": (lambda model: H2O(average=True), lambda: kvpress.ObservedAttentionPress(ratio), "eager"),
    }
    selector, press, implementation = presses[inner]
    count = int(TOKENS * (1 - ratio))
    mine = ours(family, lambda model: CriticalKV(model, selector(model)), count)
    same_choice(mine, theirs(family, kvpress.CriticalKVPress(press()), implementation), count)


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@torch.no_grad()
def test_a_cache_works_where_kvpress_has_wrapped_the_attention(kvpress, monkeypatch, implementation):
    """As it is when kvpress is imported after the first model was attached."""
    model, text = build("Llama"), ids(1, 40)
    model.set_attn_implementation(implementation)
    patch_attention(model)
    outs = []
    for wrapped in (False, True):
        if wrapped:
            for name, function in list(ALL_ATTENTION_FUNCTIONS.items()):
                monkeypatch.setitem(
                    ALL_ATTENTION_FUNCTIONS._local_mapping, name, kvpress.attention_patch.attention_patch(function)
                )
        cache = RaggedCache(model, method=Method("knorm", Uniform(0.5), Knorm()))
        outs.append(model.generate(text, past_key_values=cache, max_new_tokens=5, do_sample=False))
    assert torch.equal(*outs)
