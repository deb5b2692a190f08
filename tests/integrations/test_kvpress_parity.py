"""Selectors and budgets beside kvpress, the library in which these methods are usually run: same model, same prompt."""

import sys
import warnings
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from transformers import DynamicCache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from lkv.cache.ragged_cache import RaggedCache
from lkv.errors import DataError
from lkv.evaluation.example import make_prompt
from lkv.hf.attention import patch_attention
from lkv.hf.prompt_kv import read_prompt
from lkv.methods.budgets import Ada, Pyramid, PyramidOfKvpress, Uniform, estimate_mean_pattern
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
from tests.conftest import tiny_llama
from tests.evaluation.test_example import CHAT, byte_tokenizer, example
from tests.families import build
from tests.requests import resolve_method

TOKENS, LONG = 90, 200
BASE = byte_tokenizer(None, bos=True)
# kvpress finds the place of the context by a run of this character.
TEXTS = st.text(st.characters(exclude_characters="#", exclude_categories=["Cs"]), min_size=1, max_size=30)
# kvpress reads them from the arguments of attention, to which newer versions of transformers do not add them.
POSITIONS = {"cache_position": torch.arange(TOKENS)}
families = pytest.mark.parametrize("family", ["Llama", "Qwen3"])


@pytest.fixture(scope="module")
def kvpress() -> ModuleType:
    """The import wraps every attention function of the process, which only decoding with masked heads needs.

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


def places(some: torch.Tensor, every: torch.Tensor) -> set[int]:
    """Where the rows of `some` [n, d] are in `every` [T, d]."""
    near = (some[:, None] - every[None]).abs().amax(-1) < 1e-9
    assert bool((near.sum(1) == 1).all())
    return set(near.long().argmax(1).tolist())


def kept_by_ours(model, ids: torch.Tensor, method: Method) -> list[list[set[int]]]:
    """The tokens that each head keeps in our cache."""
    patch_attention(model)
    prompt, cache = read_prompt(model, ids), RaggedCache(model, method=method)
    model(ids, past_key_values=cache, use_cache=True)
    kept = []
    for whole, layer in zip(prompt, cache.ragged_layers, strict=True):
        starts, lens = layer.store.starts[0].tolist(), layer.store.lens[0].tolist()
        spans = [layer.store.k[start : start + count] for start, count in zip(starts, lens, strict=True)]
        kept.append([places(span, whole.key[0, head]) for head, span in enumerate(spans)])
    return kept


@torch.no_grad()
def read_under(model, press, ids: torch.Tensor) -> DynamicCache:
    cache = DynamicCache()
    with press(model):
        # kvpress reads the positions, which newer versions of transformers do not pass on by themselves.
        model.model(input_ids=ids, past_key_values=cache, cache_position=torch.arange(ids.shape[1]))
    return cache


def unmasked(model, tokens: int) -> list[list[set[int]]]:
    """The tokens that kvpress left to each head of the last text."""
    left = [[set(range(tokens)) for _ in range(2)] for _ in range(3)]
    for layer, module in enumerate(model.model.layers):
        _, heads, masked = module.self_attn.masked_key_indices or ((), torch.zeros(0), torch.zeros(0))
        for head, token in zip(heads.tolist(), masked.tolist(), strict=True):
            left[layer][head].remove(token)
    return left


@pytest.mark.parametrize("retention", [0.25, 0.5, 0.9])
@pytest.mark.parametrize("seed", range(3))
def test_ada_keeps_what_kvpress_keeps(kvpress, retention, seed):
    model, text = tiny_llama(seed), ids(1, LONG, seed)
    press = kvpress.AdaKVPress(kvpress.SnapKVPress(1 - retention, window_size=8, kernel_size=5))
    read_under(model, press, text)
    kept = kept_by_ours(tiny_llama(seed), text, Method("ada", Ada(retention), SnapKV(8, 5)))
    assert kept == unmasked(model, LONG)
    assert any(len(first) != len(second) for first, second in kept)


def pyramid_of_kvpress(kvpress, retention: float, layers: int, tokens: int) -> list[int]:
    press, config = kvpress.PyramidKVPress(1 - retention), SimpleNamespace(num_hidden_layers=layers)
    return [press.get_layer_budget(SimpleNamespace(config=config, layer_idx=i), tokens) for i in range(layers)]


@pytest.mark.parametrize("layers", [2, 16, 31, 32, 80])
@pytest.mark.parametrize("tokens", [8999, 10_000, 32_000, 100_001])
@pytest.mark.parametrize("retention", [0.15, 0.2, 0.35, 0.5])
def test_pyramid_has_kvpress_line_where_that_has_one(kvpress, layers, tokens, retention):
    """kvpress rounds each layer to the nearest, so that its sum may stray; ours is exact: one token apart at most.

    Elsewhere they differ: kvpress gives every layer the same where the last would keep less than the window (below
    window * beta / R tokens), and lets the first keep at most T - window rather than T.
    """
    theirs = pyramid_of_kvpress(kvpress, retention, layers, tokens)
    ours = [Pyramid(retention, layers).limits(i, 1, tokens)[0] for i in range(layers)]
    assert sum(ours) == int(retention * layers * tokens + 1e-6)
    assert all(abs(mine - other) <= 1 for mine, other in zip(ours, theirs, strict=True))
    assert theirs[0] > theirs[-1]


@pytest.mark.parametrize("layers", [1, 2, 31, 32])
@pytest.mark.parametrize("tokens", [40, 64, 500, 4096, 8533, 8534, 16_384, 100_001])
@pytest.mark.parametrize("retention", [0.1, 0.15, 0.5, 0.9])
def test_pyramid_of_kvpress_is_kvpress_s_at_every_length(kvpress, layers, tokens, retention):
    theirs = pyramid_of_kvpress(kvpress, retention, layers, tokens)
    assert [PyramidOfKvpress(retention, layers).limits(i, 1, tokens)[0] for i in range(layers)] == theirs
    if retention == 0.15 and layers == 32:
        assert (theirs[0] > theirs[-1]) == (tokens >= 8534)


@pytest.mark.parametrize("tokens", [300, 500, 900])
@pytest.mark.parametrize("retention", [0.15, 0.5, 0.85])
def test_duo_of_heads_keeps_what_kvpress_keeps(kvpress, retention, tokens):
    model, text = tiny_llama(max_position_embeddings=1024), ids(1, tokens, 4)
    pattern = torch.rand(3, 2, generator=torch.Generator().manual_seed(1)).tolist()
    press = kvpress.DuoAttentionPress(head_compression_ratio=1 - retention)
    press.load_attention_pattern = lambda model: (128, 256, np.array(pattern))
    model.set_attn_implementation("sdpa")
    read_under(model, press, text)
    method = resolve_method("duo-kvpress", retention=retention, pattern=pattern)
    kept = kept_by_ours(tiny_llama(max_position_embeddings=1024), text, method)
    assert kept == unmasked(model, tokens)


@pytest.mark.parametrize("family", ["Llama", "Qwen3"])
def test_the_quick_pattern_is_kvpress_s(kvpress, family, monkeypatch):
    model = build(family)
    some = [torch.randint(3, 60, (n,), generator=torch.Generator().manual_seed(n)).tolist() for n in (40, 90)]
    module = sys.modules["kvpress.presses.duo_attention_press"]

    class Texts:
        def to_pandas(self):
            return self

        def sample(self, count, random_state):
            return {"chapter": self}

        def tolist(self):
            return some

    class Encoded(dict):
        def to(self, device):
            return self

    chapters = Texts()
    monkeypatch.setattr(module, "load_dataset", lambda *a, **k: chapters)
    encode = lambda ids, return_tensors: Encoded(input_ids=torch.tensor([ids]))  # noqa: E731
    monkeypatch.setattr(module.AutoTokenizer, "from_pretrained", lambda name: encode)
    module.cache.clear()
    with torch.no_grad():
        theirs = module.duo_attention_on_the_fly(model, num_samples=2, q_len=50)
    torch.testing.assert_close(
        torch.tensor(estimate_mean_pattern(model, some, 50)), torch.tensor(theirs), atol=1e-5, rtol=1e-5,
        check_dtype=False,
    )  # fmt: skip
    with pytest.raises(DataError, match="there is no text"):
        estimate_mean_pattern(model, [[]])


@given(TEXTS, TEXTS, TEXTS, st.booleans())
def test_the_ids_are_those_of_kvpress(kvpress, context, question, prefix, chat):
    tokenizer = CHAT if chat else BASE
    preprocess = kvpress.KVPressTextGenerationPipeline.preprocess
    theirs = preprocess(SimpleNamespace(tokenizer=tokenizer), context, [question], prefix, 10**9)
    ours = make_prompt(example(context, question=question, prefix=prefix), tokenizer, "kvpress", 10**6)
    assert ours.context == theirs["context_ids"][0].tolist()
    assert ours.question == theirs["questions_ids"][0][0].tolist()
