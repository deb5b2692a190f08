"""Models that read images, against the stock model with a -inf mask on what was evicted."""

import sys
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from lkv.cache.ragged_cache import RaggedCache
from lkv.context.compress_prefill import compress_prefill
from lkv.errors import CacheError, PromptError
from lkv.hf.attention import patch_attention, unpatch_attention
from lkv.hf.prompt_kv import read_prompt
from lkv.hf.spec import decoder_kinds, full_attention_modules
from lkv.methods.method import Method
from lkv.methods.selectors import ExpectedAttention
from lkv.policy.policy import Policy
from lkv.policy.scorer_inputs import ScorerInputs
from tests.conftest import present
from tests.hf.masked_models import assert_close, hide, method_of, read, replace_attention
from tests.hf.test_families import check_training
from tests.vision import IS_NEW, PARAMS, TOKENS, VisionFamily, exact_states, picture

TEXT = "Two pictures, and what they show to those who look at them for long."
OTHER = "Another text with one picture."
OPTIONS = {"max_new_tokens": 5, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}


def ids(rows: int, tokens: int, seed: int = 0) -> Tensor:
    """Random text, without special tokens."""
    return len(TOKENS) + torch.randint(256, (rows, tokens), generator=torch.Generator().manual_seed(seed))


@pytest.fixture(params=PARAMS)
def family(request) -> VisionFamily:
    return present(request.param)


@pytest.fixture
def model(family: VisionFamily) -> Any:
    with exact_states(family):
        yield family.build()


class Masked:
    """The stock model, whose heads hide from rows beyond each of `places` all but the best floor(r t) of t tokens."""

    def __init__(self, model: Any, method: Method, places: Sequence[int], monkeypatch):
        own = sys.modules[type(model.get_decoder()).__module__]
        self._layers = {module: index for index, (module, _) in enumerate(full_attention_modules(model))}
        evicted = [kind for kind in decoder_kinds(model) if kind.is_evicted]
        for index, reader in [(index, reader) for index, kind in enumerate(evicted) for reader in kind.readers]:
            self._layers[model.get_decoder().layers[reader].self_attn] = index
        self._budget, self._places = method.budget, places
        is_eager = model.config.get_text_config()._attn_implementation.endswith("eager")
        self._stock = replace_attention(own, is_eager, self, monkeypatch)

    def __call__(
        self, module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **kwargs: Any
    ) -> Any:
        mask = attention_mask
        if module in self._layers:
            tokens, heads = key.shape[2], key.shape[1]
            if mask is None:
                visible = torch.ones(len(key), 1, tokens, tokens, dtype=torch.bool).tril()
            else:
                visible = mask if mask.dtype == torch.bool else mask == 0
            visible = visible.expand(-1, heads, -1, -1).clone()
            gone = torch.zeros(key.shape[:3], dtype=torch.bool)
            for place in self._places:
                hide(gone[:, :, :place], key, value, self._budget.ratios(self._layers[module], heads, place))
                visible[:, :, place:] &= ~gone[:, :, None]
            visible = visible.repeat_interleave(query.shape[1] // heads, 1)
            mask = torch.zeros(visible.shape, dtype=query.dtype).masked_fill(~visible, -torch.inf)
        return self._stock(module, query, key, value, mask, **kwargs)


def with_more(inputs: dict[str, Tensor], more: Tensor) -> dict[str, Tensor]:
    """The inputs of a prompt followed by text, as one prompt."""
    new = {"input_ids": more, "attention_mask": torch.ones_like(more)}
    return {
        name: torch.cat([x, new.get(name, torch.zeros_like(more)).to(x.dtype)], 1)
        if x.shape[:2] == inputs["input_ids"].shape
        else x
        for name, x in inputs.items()
    }


@torch.no_grad()
def masked(model: Any, method: Method, inputs: Any, more: Tensor, monkeypatch, places: Sequence[int] = ()) -> Tensor:
    """Logits of the tokens `more` after a prompt, from one pass of the stock model over both."""
    prompt = inputs["input_ids"].shape[1]
    with monkeypatch.context() as patch:
        Masked(model, method, places or [prompt], patch)
        return model(**with_more(inputs, more), use_cache=False).logits[:, prompt:]


@torch.no_grad()
def prefill(model: Any, cache: Any, inputs: Any) -> None:
    model(**inputs, past_key_values=cache, use_cache=True)


def test_turns_forks_and_rewinds_equal_the_masked_model(family, model, monkeypatch):
    """Two prompts with other pictures are continued in turn: positions follow those of each cache's own prompt."""
    method, more = method_of(model), ids(1, 6)
    prompts = [family.encode(TEXT, [picture(), picture(1, 48)]), family.encode(OTHER, [picture(2, 16, 48)])]
    expected = [masked(model, method, inputs, more, monkeypatch) for inputs in prompts]
    caches = [RaggedCache(model, method=method) for _ in prompts]
    for cache, inputs in zip(caches, prompts, strict=True):
        prefill(model, cache, inputs)
    forks = [cache.fork() for cache in caches]
    for group in (caches, forks):
        for cache, logits in zip(group, expected, strict=True):
            assert_close(read(model, cache, more), logits)
            cache.rewind()
            assert_close(read(model, cache, more, [6]), logits)
    assert 0 < caches[0].nbytes() < caches[0].full_nbytes()
    if not IS_NEW:
        return  # older versions of transformers shift the positions of a text alone, as for the last images
    caches[0].reset()
    prefill(model, caches[0], {"input_ids": ids(1, 40)})
    alone = masked(model, method, {"input_ids": ids(1, 40)}, more, monkeypatch)
    assert_close(read(model, caches[0], more), alone)


def test_generation_equals_the_masked_model(family, model, monkeypatch):
    method = method_of(model)
    inputs, other = family.encode(TEXT, [picture(), picture(1)]), family.encode(OTHER, [picture(2, 16, 48)])
    options = OPTIONS | {"output_logits": True, "return_dict_in_generate": True}
    cache = RaggedCache(model, method=method)
    out = model.generate(**inputs, past_key_values=cache, **options)
    prompt = inputs["input_ids"].shape[1]
    expected = masked(model, method, inputs, out.sequences[:, prompt:-1], monkeypatch)
    # generate() gives its logits in float32.
    found = torch.stack(out.logits[1:], 1)
    torch.testing.assert_close(found, expected.float(), atol=1e-6, rtol=1e-6)
    with compress_prefill(model, method=method) as compression:
        assert torch.equal(model.generate(**inputs, **OPTIONS), out.sequences)
        assert compression.cache.kept_counts() == cache.kept_counts()
        # The model now remembers the positions of another text.
        model.generate(**other, **OPTIONS)
    text = torch.cat([out.sequences, ids(1, 4)], 1)
    again = model.generate(text, past_key_values=cache, **options)
    expected = masked(model, method, inputs, again.sequences[:, prompt:-1], monkeypatch)[:, -4:]
    torch.testing.assert_close(torch.stack(again.logits[1:], 1), expected.float(), atol=1e-6, rtol=1e-6)
    beams = OPTIONS | {"num_beams": 3}
    everything = RaggedCache(model, method="knorm", retention=1.0)
    found = model.generate(**inputs, past_key_values=everything, **beams)
    assert torch.equal(found, model.generate(**inputs, **beams))


def test_a_batch_of_pictures_equals_its_rows_alone(family, model):
    texts = [(TEXT, [picture(), picture(1, 48)]), (OTHER, [picture(2, 16, 48)])]
    rows, batch = [family.encode(*text) for text in texts], family.encode_batch(texts)
    for method in (method_of(model), "expected"):
        _compare_rows(model, method, rows, batch)
    # Two texts of equal length, whose images have other shapes, are not padded.
    texts = [(TEXT, [picture(0, 64, 8)]), (TEXT, [picture(1)])]
    near = Method("near", method_of(model).budget, ExpectedAttention(model, future=1))
    _compare_rows(model, near, [family.encode(*text) for text in texts], family.encode_batch(texts))


def _compare_rows(model: Any, method: Method | str, rows: list[dict[str, Tensor]], batch: dict[str, Tensor]) -> None:
    options = OPTIONS | {"output_logits": True, "return_dict_in_generate": True}
    retention = None if isinstance(method, Method) else 0.5
    cache = RaggedCache(model, method=method, retention=retention)
    out, others = model.generate(**batch, past_key_values=cache, **options), []
    for number, inputs in enumerate(rows):
        own = RaggedCache(model, method=method, retention=retention)
        others.append(own)
        alone = model.generate(**inputs, past_key_values=own, **options)
        assert torch.equal(out.sequences[number, -5:], alone.sequences[0, -5:])
        for found, expected in zip(out.logits, alone.logits, strict=True):
            # Their padding makes sums of the vision model's and the window's blocks other than those of a row alone.
            torch.testing.assert_close(found[number : number + 1], expected, atol=1e-5, rtol=1e-5)
    if cache.others or len({inputs["input_ids"].shape[1] for inputs in rows}) > 1:
        return
    cache.batch_select_indices(torch.tensor([1, 0]))
    more = ids(1, 3)
    found = read(model, cache, more.expand(2, -1), [3])
    for number, own in enumerate(reversed(others)):
        torch.testing.assert_close(found[number : number + 1], read(model, own, more, [3]), atol=1e-5, rtol=1e-5)


def test_evicted_answers_equal_the_masked_model(family, model, monkeypatch):
    method, more, inputs = method_of(model), ids(1, 8), family.encode(TEXT, [picture(), picture(1)])
    prompt = inputs["input_ids"].shape[1]
    cache = RaggedCache(model, method=method, decode_eviction=True, slack=3)
    prefill(model, cache, inputs)
    expected = masked(model, method, inputs, more, monkeypatch, [prompt, prompt + 3, prompt + 7])
    assert_close(read(model, cache, more, [1] * 8), expected)


def test_keys_are_unrotated_exactly(family, model):
    """The keys before their rotary embedding come from the stock model, at the positions that it computes."""
    inputs = family.encode(TEXT, [picture(), picture(1, 48)])
    own = sys.modules[type(model.get_decoder()).__module__]
    stock, found = own.apply_rotary_pos_emb, []

    def apply(*args: Any, **kwargs: Any) -> Any:
        # q and k in one call; in Gemma-4 in two, with their heads after their tokens.
        turned = args[:1] if "unsqueeze_dim" in kwargs else args[:2]
        found.extend(x.transpose(1, 2) if "unsqueeze_dim" in kwargs else x for x in turned)
        return stock(*args, **kwargs)

    images = {name: x for name, x in inputs.items() if name not in ("input_ids", "attention_mask")}
    with pytest.MonkeyPatch.context() as patch:
        patch_attention(model)
        patch.setattr(own, "apply_rotary_pos_emb", apply)
        layers = read_prompt(model, inputs["input_ids"], True, images)
    kinds = [kind for kind in patch_attention(model).kinds if kind.name != "linear_attention"]
    if any(kind.readers for kind in kinds):
        pytest.skip("its layers without keys of their own are in test_shared_keys.py")
    pairs = list(zip(found[::2], found[1::2], strict=True))[-len(kinds) :]
    bare = [pair for pair, kind in zip(pairs, kinds, strict=True) if kind.is_evicted]
    for layer, (query, key) in zip(layers, bare, strict=True):
        torch.testing.assert_close(layer.rotation.unrotate(layer.key), key, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(layer.rotation.unrotate(layer.query), query, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(layer.rotation.rotate(key), layer.key, atol=1e-5, rtol=1e-5)
    selector = ExpectedAttention(model, future=8, value_norm=False)
    positions = read_positions(model, inputs).max() + 1 + torch.arange(8)
    expected = expected_scores(model, own, layers[0], *bare[0], positions)
    torch.testing.assert_close(selector.scores(0, layers[0])[..., 4:], expected, atol=1e-6, rtol=1e-4)


def read_positions(model: Any, inputs: dict[str, Tensor]) -> Tensor:
    """The positions of a prompt, from transformers."""
    ids = inputs["input_ids"]
    if not hasattr(model.model, "get_rope_index"):
        return torch.arange(ids.shape[1])
    options = {name: inputs[name] for name in ("image_grid_thw", "mm_token_type_ids") if name in inputs}
    return model.model.get_rope_index(ids, **options)[0]


def expected_scores(model: Any, own: Any, layer: Any, query: Tensor, key: Tensor, positions: Tensor) -> Tensor:
    """Expected Attention from q and k before their rotary embedding: the mean over future queries, at `positions`."""
    rotary, width = model.get_decoder().rotary_emb, query.shape[-1]
    kind = {"layer_type": "full_attention"} if type(model).__name__.startswith("Gemma") else {}
    cos, sin = rotary(query, positions[None], **kind)
    basis = torch.eye(width, dtype=torch.float64)[None, :, None].expand(1, width, len(positions), width)
    is_single = type(model).__name__.startswith("Gemma4")  # rotates q and k in two calls
    turned = own.apply_rotary_pos_emb(*[basis] * (1 if is_single else 2), cos, sin)
    mean_rotation = (turned if is_single else turned[0]).mean(2)[0]
    future = query[:, :, 4:] @ mean_rotation
    groups, scores = query.shape[1] // key.shape[1], []
    for head in range(query.shape[1]):
        samples, keys = future[0, head], layer.key[0, head // groups, 4:]
        mean, spread = samples.mean(0), torch.cov(samples.T, correction=0)
        logits = keys @ mean * layer.scale + ((keys @ spread) * keys).sum(-1) * layer.scale**2 / 2
        scores.append(torch.softmax(logits, -1))
    return torch.stack(scores).unflatten(0, (-1, groups)).mean(1)[None]


def test_policies_are_trained_on_text(family):
    model = family.build(torch.float32)
    torch.manual_seed(1)
    check_training(model, Policy(patch_attention(model).spec, inputs=ScorerInputs("unrotated", "learned", 8)))
    unpatch_attention(model)


def test_images_after_the_prompt_are_refused(family, model):
    inputs, other = family.encode(TEXT, [picture()]), family.encode(OTHER, [picture(2)])
    cache = RaggedCache(model, method=method_of(model))
    prefill(model, cache, inputs)
    more = with_more(inputs, ids(1, 4))
    with pytest.raises(CacheError, match="images must be in the first pass of a prompt: leave pixel_values out"):
        model.generate(**more, past_key_values=cache, **OPTIONS)
    # Without generate(), what the model itself passes on tells.
    if "token_type_ids" in other and IS_NEW:
        types = torch.cat([inputs["token_type_ids"], other["token_type_ids"]], 1)
        with pytest.raises(PromptError, match="lets tokens see later ones, as within an image in Gemma-3"):
            prefill(model, cache, {"input_ids": other["input_ids"], "token_type_ids": types})
        tokens = inputs["input_ids"].shape[1]
        for options in ({"streaming": True, "prompt_tokens": tokens}, {"prompt_tokens": 8}):
            with pytest.raises(PromptError, match="give all images in the first pass of the prompt, without streaming"):
                prefill(model, RaggedCache(model, method=cache.config.method, **options), inputs)
    if "image_grid_thw" in other and IS_NEW:
        positions, _ = model.model.get_rope_index(
            other["input_ids"], other["mm_token_type_ids"], image_grid_thw=other["image_grid_thw"]
        )
        with pytest.raises(CacheError, match="images must be in the first pass of a prompt: make a new"):
            prefill(model, cache, {"input_ids": other["input_ids"], "position_ids": positions})
