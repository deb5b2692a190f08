"""The masks that attention gets: none for full-attention layers, and the stock model's own logits all the same."""

import inspect
import itertools
from contextlib import contextmanager

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.masking_utils import create_causal_mask

from lkv.cache.ragged_cache import RaggedCache
from lkv.context.compression import compress
from lkv.errors import PromptError
from lkv.evaluation.comparison import MethodComparison
from lkv.hf.cache_argument import cache_argument
from lkv.hf.prompt_kv import read_prompt
from lkv.kernels.soft_mask_attention import cpu
from lkv.training.data.samples import TokenizedSample
from lkv.training.distillation import SampleDistillation, hard_mask
from tests.cache.helpers import ids
from tests.conftest import tiny_llama
from tests.context.test_compression import Words
from tests.families import build
from tests.requests import resolve_method

# Above all sizes of the tiny models: whatever has two dimensions as large as this has one entry a query and key.
SHORTEST = 70


class Calls(TorchFunctionMode):
    """The masks that SDPA gets, None for none."""

    def __init__(self):
        super().__init__()
        self.masks = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is torch.nn.functional.scaled_dot_product_attention:
            self.masks.append(args[3] if len(args) > 3 else kwargs.get("attn_mask"))
        return func(*args, **kwargs)


class Tensors(TorchDispatchMode):
    """Shapes of tensors with an entry for each query and key, and the masks of attention operators."""

    def __init__(self):
        super().__init__()
        self.squares, self.masks = [], []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if "scaled_dot_product" in str(func):
            self.masks.append(kwargs.get("attn_mask"))
        for x in out if isinstance(out, tuple | list) else [out]:
            if isinstance(x, torch.Tensor) and x.ndim >= 2 and min(x.shape[-2:]) >= SHORTEST:
                self.squares.append((str(func), tuple(x.shape)))
        return out


@contextmanager
def without_masks():
    """Check that no attention in the block, of which there is some, gets a mask, and that no tensor is quadratic."""
    with Calls() as calls, Tensors() as tensors:
        yield
    masks = calls.masks + tensors.masks
    assert masks and not any(mask is not None for mask in masks)
    assert not tensors.squares


def read(model, cache, rows: list[torch.Tensor], cuts: list[int]) -> list[torch.Tensor]:
    """Logits [t, V] of each of `rows` [1, t], read as one batch, padded on the left, in passes that end at `cuts`."""
    length = max(row.shape[1] for row in rows)
    mask = torch.stack([torch.arange(length) >= length - row.shape[1] for row in rows]).long()
    batch = torch.cat([torch.nn.functional.pad(row, (length - row.shape[1], 0)) for row in rows])
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    parts = [
        model(
            batch[:, start:end], attention_mask=mask[:, :end], position_ids=positions[:, start:end],
            **cache_argument(cache),
        ).logits
        for start, end in itertools.pairwise([0, *cuts, length])
    ]  # fmt: skip
    return [row[row_mask > 0] for row, row_mask in zip(torch.cat(parts, 1), mask, strict=True)]


# Tokens of the rows; where passes end; options of the cache.
PATHS = {
    "one prompt": ([150], [], {}),
    "equal rows": ([150, 150], [], {}),
    "padded rows": ([150, 90, 90, 71], [], {}),
    "chunks": ([250], [80, 160], {"prompt_tokens": 250}),
    "padded chunks, the first of nothing but padding": ([250, 160, 91], [80, 160], {"prompt_tokens": 250}),
    "a last chunk of one token": ([161, 100], [80, 160], {"prompt_tokens": 161}),
    "a streamed prompt": ([250], [80, 160], {"prompt_tokens": 250, "streaming": True}),
    "streamed rows": ([250, 250], [80, 160], {"prompt_tokens": 250, "streaming": True}),
    "a prompt and candidates in one pass": ([180], [], {"prompt_tokens": 100}),
    "a question after a prompt": ([250], [150], {}),
    "questions after padded rows": ([250, 210], [150], {}),
    "questions, answers and questions": ([330, 300], [150, 240, 241, 242], {}),
}


@pytest.mark.parametrize("path", PATHS)
@torch.no_grad()
def test_attention_is_given_no_mask(path):
    lengths, cuts, options = PATHS[path]
    model = tiny_llama(dtype=torch.float32)
    rows = [ids(1, length, seed) for seed, length in enumerate(lengths)]
    expected = [model(row).logits[0] for row in rows]
    cache = RaggedCache(model, method="knorm", retention=1.0, **options)
    with without_masks():
        logits = read(model, cache, rows, cuts)
    for row, stock in zip(logits, expected, strict=True):
        torch.testing.assert_close(row, stock, atol=1e-5, rtol=1e-4)


@torch.no_grad()
def test_questions_and_batches_of_questions_about_a_context_are_given_no_mask():
    model, text = tiny_llama(dtype=torch.float32), " ".join(f"word{number}" for number in range(100))
    question = " ".join(f"why{number}" for number in range(80))
    with Calls() as calls:
        for size in ({"retention": 0.5}, {"memory": 0.4}):
            context = compress(model, Words(), text, method="knorm", **size)
            context.ask(question, max_new_tokens=3)
            context.batch_ask([question, "and then ?"], max_new_tokens=3)
    assert calls.masks and not any(mask is not None for mask in calls.masks)


@pytest.mark.parametrize("whole", [False, True])
def test_teacher_and_student_are_given_no_mask(policy, whole, monkeypatch):
    """In the forward and the backward pass; on a CPU scores of a continuation are held in parts."""
    monkeypatch.setattr(cpu, "_MOST_SCORES", 4 * 80 * 40)
    model = tiny_llama(dtype=torch.float32).requires_grad_(False)
    sample = TokenizedSample("random", ids(1, 100)[0].tolist(), [(ids(1, 80, seed)[0].tolist(), 0) for seed in (1, 2)])
    with without_masks():
        run = SampleDistillation(model, sample, whole=whole)
        run.run(None)
        mask = hard_mask(policy, run.scores(policy), 0.5, 2).requires_grad_()
        run.run(mask).log_probs.sum().backward()
    assert bool(mask.grad.isfinite().all())


@torch.no_grad()
def test_methods_that_are_compared_are_given_no_mask(policy):
    model, text = tiny_llama(dtype=torch.float32), ids(1, 150)
    with without_masks():
        prompt = read_prompt(model, text)
        methods = [resolve_method(name, model, retention=0.3, policy=policy) for name in ("lkv", "knorm")]
        MethodComparison(model, text[0].tolist(), prompt, methods).predict(ids(1, 80, 1)[0].tolist(), 0)


@torch.no_grad()
def test_sliding_layers_are_given_a_mask_where_the_text_outgrows_their_window():
    """And the full-attention layers of the same model none."""
    model, rows = build("Gemma3", torch.float32), [ids(1, 150), ids(1, 100, 1)]
    expected = [model(row).logits[0] for row in rows]
    cache = RaggedCache(model, method="knorm", retention=1.0)
    with Calls() as calls:
        found = read(model, cache, rows, [])
    full, sliding = (
        [kind == name for kind in model.config.layer_types].count(True)
        for name in ("full_attention", "sliding_attention")
    )
    masks = [mask for mask in calls.masks if mask is not None]
    assert [mask.shape for mask in masks] == [(2, 1, 150, 150)] * sliding and len(calls.masks) == sliding + 2 * full
    for row, stock in zip(found, expected, strict=True):
        torch.testing.assert_close(row, stock, atol=1e-4, rtol=1e-4)


@torch.no_grad()
def test_a_mask_of_the_callers_own_is_used():
    """Two texts packed into one row, the second of which does not see the first."""
    model, text = tiny_llama(), ids(1, 40)
    allowed = torch.ones(40, 40, dtype=torch.bool).tril()
    allowed[25:, :25] = False
    expected = model(text, attention_mask=allowed[None, None]).logits
    for given in (allowed[None, None], torch.zeros(1, 1, 40, 40).double().masked_fill(~allowed, -torch.inf)):
        cache = RaggedCache(model, method="knorm", retention=1.0, prompt_tokens=41)
        with Calls() as calls:
            found = model(text, attention_mask=given, **cache_argument(cache)).logits
        assert all(mask is not None for mask in calls.masks)
        torch.testing.assert_close(found, expected)


@torch.no_grad()
@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_a_mask_by_which_the_last_token_does_not_see_all_of_its_text_is_refused(implementation):
    """Of what it does not see nothing would be kept, or be appended."""
    model, text = tiny_llama(), ids(1, 40)
    model.set_attn_implementation(implementation)
    allowed = torch.ones(40, 40, dtype=torch.bool).tril()
    allowed[25:, :25] = False
    masks = [torch.zeros(40, 40, dtype=torch.double).masked_fill(~x, -torch.inf)[None, None] for x in (allowed,)]
    with pytest.raises(PromptError, match="that are not padding, such as another text in the same row; a compressed"):
        model(text, attention_mask=masks[0], **cache_argument(RaggedCache(model, method="knorm", retention=0.5)))
    cache = RaggedCache(model, method="knorm", retention=0.5)
    model(text, **cache_argument(cache))
    branches = torch.zeros(1, 1, 4, 44, dtype=torch.double)
    branches[..., 40:] = torch.tensor([[0, -torch.inf] * 2, [-torch.inf, 0] * 2]).repeat(2, 1)
    with pytest.raises(PromptError, match="that are not padding"):
        model(
            ids(1, 4, 2),
            attention_mask=branches,
            position_ids=torch.tensor([[40, 40, 41, 41]]),
            **cache_argument(cache),
        )


@pytest.mark.skipif(
    "allow_is_causal_skip" not in inspect.signature(create_causal_mask).parameters,
    reason="models cannot ask this version of transformers for a whole mask",
)
def test_a_model_that_asks_for_a_whole_mask_is_given_it():
    """As one does that joins it with another mask."""
    model, embeddings = tiny_llama(), torch.zeros(1, 5, 1)
    arguments = {"attention_mask": None, **cache_argument(RaggedCache(model, method="knorm"))}
    assert create_causal_mask(model.config, embeddings, **arguments) is None
    mask = create_causal_mask(model.config, embeddings, **arguments, allow_is_causal_skip=False)
    assert torch.equal(mask, torch.ones(1, 1, 5, 5, dtype=torch.bool).tril())


@torch.no_grad()
def test_a_prompt_that_is_padded_on_the_right_or_has_a_hole_is_refused():
    model, mask = tiny_llama(), torch.ones(2, 40, dtype=torch.long)
    mask[1, 15:20] = 0
    mask[1, :2] = 0
    hole = "hides tokens between others, in row 1 from token 15 on; remove them"
    for implementation in ("sdpa", "eager"):
        model.set_attn_implementation(implementation)
        for tokens, problem in ((20, "padded on the right; pad it on the left"), (40, hole)):
            cache = RaggedCache(model, method="knorm", prompt_tokens=tokens if implementation == "eager" else 40)
            with pytest.raises(PromptError, match=problem):
                model(ids(2, tokens), attention_mask=mask[:, :tokens], **cache_argument(cache))


@torch.no_grad()
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    ("family", "implementation"), [("Llama", "flash_attention_2"), ("Gemma3", "flash_attention_3")]
)
def test_models_with_flash_attention_are_served(flash_attention, family, implementation, path):
    """transformers' own code around flash attention, over a function of ours in its place."""
    lengths, cuts, options = PATHS[path]
    model, rows = build(family, torch.float32), [ids(1, length, seed) for seed, length in enumerate(lengths)]
    expected = [model(row).logits[0] for row in rows]
    model.config._attn_implementation_internal = implementation
    cache = RaggedCache(model, method="knorm", retention=1.0, **options)
    for row, stock in zip(read(model, cache, rows, cuts), expected, strict=True):
        torch.testing.assert_close(row, stock, atol=1e-4, rtol=1e-4)
    assert set(flash_attention) == {implementation}
