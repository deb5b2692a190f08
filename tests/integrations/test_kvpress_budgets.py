"""Parity with kvpress: AdaKV and PyramidKV keep what its presses keep, and LKV in its pipeline answers as ours does."""

import re
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import DynamicCache, PreTrainedTokenizerFast

with warnings.catch_warnings():
    # A package that kvpress imports uses a module of the standard library that goes away.
    warnings.filterwarnings("ignore", "'pipes' is deprecated", DeprecationWarning)
    kvpress = pytest.importorskip("kvpress")

from kvpress.attention_patch import attention_patch
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from lkv.cache.ragged_cache import RaggedCache
from lkv.errors import DataError, IntegrationError, PolicyMismatchError, UnsupportedModelError
from lkv.evaluation.example import make_prompt
from lkv.hf.attention import patch_attention
from lkv.hf.prompt_kv import read_prompt
from lkv.integrations.kvpress import LKVHeadBudgetPress, LKVScorerPress
from lkv.methods.budgets import Ada, Pyramid, PyramidOfKvpress, Uniform, estimate_mean_pattern
from lkv.methods.budgets.lkv_h import raise_to_least
from lkv.methods.method import Method, resolve_method
from lkv.methods.selectors import SnapKV
from tests.conftest import tiny_llama
from tests.evaluation.test_example import CHAT, byte_tokenizer, example
from tests.families import build

TOKENS = 200
# kvpress masks by a key on the other side of all queries: it finds none for many queries of few dimensions.
QUESTION = 3
BASE = byte_tokenizer(None, bos=True)
# kvpress finds the place of the context by a run of this character.
TEXTS = st.text(st.characters(exclude_characters="#", exclude_categories=["Cs"]), min_size=1, max_size=30)


def text(seed: int, tokens: int = TOKENS) -> torch.Tensor:
    return torch.randint(3, 67, (1, tokens), generator=torch.Generator().manual_seed(seed))


def places(some: torch.Tensor, every: torch.Tensor) -> set[int]:
    """Where the rows of `some` [n, d] are in `every` [T, d]."""
    near = (some[:, None] - every[None]).abs().amax(-1) < 1e-9
    assert bool((near.sum(1) == 1).all())
    return set(near.long().argmax(1).tolist())


def kept_by_ours(model, ids: torch.Tensor, method: Method) -> list[list[set[int]]]:
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
def test_ada_keeps_what_kvpress_keeps(retention, seed):
    model, ids = tiny_llama(seed), text(seed)
    press = kvpress.AdaKVPress(kvpress.SnapKVPress(1 - retention, window_size=8, kernel_size=5))
    read_under(model, press, ids)
    theirs = unmasked(model, TOKENS)
    ours = kept_by_ours(tiny_llama(seed), ids, Method("ada", Ada(retention), SnapKV(8, 5)))
    assert ours == theirs
    assert any(len(first) != len(second) for first, second in ours)


def pyramid_of_kvpress(retention: float, layers: int, tokens: int) -> list[int]:
    press, config = kvpress.PyramidKVPress(1 - retention), SimpleNamespace(num_hidden_layers=layers)
    return [press.get_layer_budget(SimpleNamespace(config=config, layer_idx=i), tokens) for i in range(layers)]


@pytest.mark.parametrize("layers", [2, 16, 31, 32, 80])
@pytest.mark.parametrize("tokens", [8999, 10_000, 32_000, 100_001])
@pytest.mark.parametrize("retention", [0.15, 0.2, 0.35, 0.5])
def test_pyramid_has_kvpress_line_where_that_has_one(layers, tokens, retention):
    """kvpress rounds each layer to the nearest, so that its sum may stray; ours is exact: one token apart at most.

    Elsewhere they differ: kvpress gives every layer the same where the last would keep less than the window (below
    window * beta / R tokens), and lets the first keep at most T - window rather than T.
    """
    theirs = pyramid_of_kvpress(retention, layers, tokens)
    ours = [Pyramid(retention, layers).limits(i, 1, tokens)[0] for i in range(layers)]
    assert sum(ours) == int(retention * layers * tokens + 1e-6)
    assert all(abs(mine - other) <= 1 for mine, other in zip(ours, theirs, strict=True))
    assert theirs[0] > theirs[-1]


@pytest.mark.parametrize("layers", [1, 2, 31, 32])
@pytest.mark.parametrize("tokens", [40, 64, 500, 4096, 8533, 8534, 16_384, 100_001])
@pytest.mark.parametrize("retention", [0.1, 0.15, 0.5, 0.9])
def test_pyramid_of_kvpress_is_kvpress_s_at_every_length(layers, tokens, retention):
    theirs = pyramid_of_kvpress(retention, layers, tokens)
    assert [PyramidOfKvpress(retention, layers).limits(i, 1, tokens)[0] for i in range(layers)] == theirs
    if retention == 0.15 and layers == 32:
        assert (theirs[0] > theirs[-1]) == (tokens >= 8534)


@pytest.mark.parametrize("tokens", [300, 500, 900])
@pytest.mark.parametrize("retention", [0.15, 0.5, 0.85])
def test_duo_of_heads_keeps_what_kvpress_keeps(retention, tokens):
    model, ids = tiny_llama(max_position_embeddings=1024), text(4, tokens)
    pattern = torch.rand(3, 2, generator=torch.Generator().manual_seed(1)).tolist()
    press = kvpress.DuoAttentionPress(head_compression_ratio=1 - retention)
    press.load_attention_pattern = lambda model: (128, 256, np.array(pattern))
    model.set_attn_implementation("sdpa")
    read_under(model, press, ids)
    theirs = unmasked(model, tokens)
    method = resolve_method("duo-kvpress", retention=retention, pattern=pattern)
    assert kept_by_ours(tiny_llama(max_position_embeddings=1024), ids, method) == theirs


@pytest.mark.parametrize("family", ["Llama", "Qwen3"])
def test_the_quick_pattern_is_kvpress_s(family, monkeypatch):
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


def tokenizer() -> PreTrainedTokenizerFast:
    """One token a word, and every id a word of its own."""
    words = WordLevel({"<pad>": 0, "<s>": 1, "</s>": 2} | {f"w{i}": i for i in range(3, 67)}, unk_token="<pad>")
    inner = Tokenizer(words)
    inner.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=inner, bos_token="<s>", eos_token="</s>", pad_token="<pad>")


def words(ids: torch.Tensor) -> str:
    return " ".join(f"w{i}" for i in ids.flatten().tolist())


def check_answers(model, press, method: Method, decoder, context: str, question: str, length: int) -> str:
    """kvpress's pipeline and our cache give the same answer to `question`; it is returned."""
    pipe = kvpress.KVPressTextGenerationPipeline(model=model, tokenizer=decoder)
    theirs = pipe(context, question=question, press=press, max_new_tokens=length)["answer"]
    inputs = pipe.preprocess(context, [question], "", 10**9)
    ids, asked = inputs["context_ids"], inputs["questions_ids"][0]
    cache = RaggedCache(model, method=method)
    with torch.no_grad():
        model(ids, past_key_values=cache, use_cache=True)
        out = model.generate(
            torch.cat([ids, asked], 1), past_key_values=cache, max_new_tokens=length, do_sample=False,
            eos_token_id=model.generation_config.eos_token_id,
        )  # fmt: skip
    assert decoder.decode(out[0, ids.shape[1] + asked.shape[1] :], skip_special_tokens=True) == theirs
    return theirs


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("name", ["lkv", "lkv-t", "lkv-h+snapkv"])
def test_kvpress_pipeline_answers_as_the_ragged_cache_does(name, seed, policy):
    model = tiny_llama()
    model.generation_config.eos_token_id = None
    press = LKVScorerPress(policy, 0.75)
    method = resolve_method(name, retention=0.25, policy=policy)
    if name == "lkv":
        press = LKVHeadBudgetPress(policy, press)
    elif name == "lkv-h+snapkv":
        # No longer than what every head keeps: kvpress ranks the tokens of the window alike.
        press = LKVHeadBudgetPress(policy, kvpress.SnapKVPress(0.75, window_size=5))
        method = Method(name, method.budget, SnapKV(window=5))
    # The pipeline puts <s> before the context.
    context, question = words(text(seed, TOKENS - 1)), words(text(seed + 50, QUESTION))
    answer = check_answers(model, press, method, tokenizer(), context, question, 12)
    plain = kvpress.KVPressTextGenerationPipeline(model=model, tokenizer=tokenizer())
    assert answer != plain(context, question=question, max_new_tokens=12)["answer"]


@pytest.mark.parametrize("wrapped", [True, False])
def test_a_model_in_use_by_lkv_can_be_pressed(wrapped, policy, monkeypatch):
    """kvpress wraps every attention function that is registered when it is imported, LKV's own among them."""
    patch_attention(model := tiny_llama())
    if wrapped:
        inner = ALL_ATTENTION_FUNCTIONS["lkv_sdpa"]
        monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS, "lkv_sdpa", attention_patch(inner))
    model.generation_config.eos_token_id = None
    press = LKVHeadBudgetPress(policy, LKVScorerPress(policy, 0.75))
    method = resolve_method("lkv", retention=0.25, policy=policy)
    check_answers(model, press, method, tokenizer(), words(text(1, TOKENS - 1)), words(text(9, QUESTION)), 8)


def test_head_budgets_are_the_policys(policy):
    model, ids = tiny_llama(), text(0)
    press = LKVHeadBudgetPress(policy, LKVScorerPress(policy))
    press.compression_ratio = 0.6
    assert press.press.compression_ratio == press.compression_ratio == 0.6
    read_under(model, press, ids)
    ratios = raise_to_least(policy.inference_ratios(0.4), 5 / TOKENS).tolist()
    for layer, module in enumerate(model.model.layers):
        _, heads, _ = module.self_attn.masked_key_indices
        masked = torch.bincount(heads, minlength=2).tolist()
        assert masked == [TOKENS - int(ratio * TOKENS + 1e-6) for ratio in ratios[layer]]
    # Nothing is masked or pruned at ratio 0, and kvpress's own AdaKV takes our scorer.
    press.compression_ratio = 0.0
    assert read_under(model, press, ids).get_seq_length() == TOKENS
    assert model.model.layers[0].self_attn.masked_key_indices is None
    read_under(model, kvpress.AdaKVPress(LKVScorerPress(policy, 0.5)), ids)
    assert len(model.model.layers[0].self_attn.masked_key_indices[0]) == TOKENS
    cache = read_under(model, LKVScorerPress(policy, 0.5), ids)
    assert cache.get_seq_length() == Uniform(0.5).limits(0, 1, TOKENS)[0]


def test_presses_name_what_they_cannot_work_with(policy):
    with (
        pytest.raises(PolicyMismatchError, match="other weights of the same architecture"),
        LKVScorerPress(policy)(tiny_llama(seed=3)),
    ):
        pass
    eager = tiny_llama(attn_implementation="eager")
    press = LKVHeadBudgetPress(policy, LKVScorerPress(policy, 0.5))
    with pytest.raises(UnsupportedModelError, match="cannot mask single heads in eager"), press(eager):
        pass
    with pytest.raises(IntegrationError, match="AdaKVPress does not score tokens"):
        LKVHeadBudgetPress(policy, kvpress.AdaKVPress(LKVScorerPress(policy)))
    module = tiny_llama().model.layers[0].self_attn
    with pytest.raises(UnsupportedModelError, match="outside `with press"):
        LKVScorerPress(policy, 0.5).score(module, *[torch.zeros(1, 2, 4, 8)] * 3, None, {})


@given(TEXTS, TEXTS, TEXTS, st.booleans())
def test_the_ids_are_those_of_kvpress(context, question, prefix, chat):
    tokenizer = CHAT if chat else BASE
    preprocess = kvpress.KVPressTextGenerationPipeline.preprocess
    theirs = preprocess(SimpleNamespace(tokenizer=tokenizer), context, [question], prefix, 10**9)
    ours = make_prompt(example(context, question=question, prefix=prefix), tokenizer, "kvpress", 10**6)
    assert ours.context == theirs["context_ids"][0].tolist()
    assert ours.question == theirs["questions_ids"][0][0].tolist()


@pytest.mark.slow
def test_the_guide_shows_what_its_example_prints(monkeypatch, capsys):
    root = Path(__file__).parents[2]
    page = (root / "docs" / "guides" / "evaluating.md").read_text(encoding="utf-8")
    code, shown = re.search(r"```python\n(import kvpress.*?)```\n\n```text\n(.*?)```", page, re.DOTALL).groups()
    monkeypatch.chdir(root)
    exec(code, {})
    assert capsys.readouterr().out == shown
