"""Wrong arguments of the attention functions raise one sentence and never crash the process."""

import subprocess
import sys

import pytest
import torch

from lkv.errors import BackendError
from lkv.kernels.ragged_attention import (
    QuantizedKV,
    append,
    append_and_attend,
    masked_attention,
    merge_attention,
    ragged_attention,
)
from lkv.kernels.soft_mask_attention import soft_mask_attention
from lkv.kernels.soft_topk import soft_topk

SENTENCE = r"\w+ .*\.$"  # one sentence that names something
BACKENDS = ("auto", "loop", "reference")


def good(dim=16, tokens=1, dtype=torch.float32):
    """Arguments of `append_and_attend` that fit, by name."""
    starts, lens = (torch.tensor([row], dtype=torch.int32) for row in ([0, 40], [20, 30]))
    return {
        "q": torch.randn(1, 4, tokens, dim).to(dtype),
        "key": torch.randn(1, 2, tokens, dim).to(dtype),
        "value": torch.randn(1, 2, tokens, dim).to(dtype),
        "k_pool": torch.randn(80, dim).to(dtype),
        "v_pool": torch.randn(80, dim).to(dtype),
        "starts": starts,
        "lens": lens,
    }


def codes(dim=16, bits=8, group=32):
    """50 quantised entries for the spans of `good`, whose pools then have free slots alone."""
    width = dim if bits == 8 else dim // 2
    scales, value_scales = (torch.ones(shape, dtype=torch.bfloat16) for shape in ((2, dim), (50, -(-dim // group))))
    tables = torch.tensor([[[20, 30]], [[0, 20]], [[0, 1]]], dtype=torch.int32)
    packed = torch.zeros(50, width, dtype=torch.uint8)
    return QuantizedKV(packed, scales, scales, packed.clone(), value_scales, value_scales, tables, bits, group)


def freed(x):
    x = x.clone()
    x.untyped_storage().resize_(0)
    return x


# Entries of before may be codes, which lie elsewhere.
ALLOWED_FOR_APPEND = (lambda x: x - 1,)
WRONG = [
    *((name, change) for name in ("q", "key", "value", "k_pool", "v_pool", "starts", "lens")
      for change in (freed, lambda x: x[None], lambda x: x.flatten(), lambda x: x.to("meta"), lambda x: x.to_sparse())),
    *((name, torch._neg_view) for name in ("q", "key", "value", "k_pool", "v_pool")),
    *((name, lambda x: x[..., :-1]) for name in ("q", "key", "value", "k_pool", "starts", "lens")),
    *((name, lambda x: x.double()) for name in ("q", "key", "value", "k_pool", "v_pool", "starts", "lens")),
    *((name, lambda x: torch.cat([x, x])) for name in ("q", "key", "value", "k_pool", "starts", "lens")),
    ("v_pool", lambda x: x[1:]), ("q", lambda x: x[:, :3]), ("q", lambda x: x[:, :0]),
    ("key", lambda x: x.expand(-1, -1, 2, -1)),
    *(("starts", change) for change in ALLOWED_FOR_APPEND),
    ("starts", lambda x: x + 31), ("lens", lambda x: x - 21), ("lens", lambda x: x + 11),
]  # fmt: skip


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("name", "change"), WRONG)
@torch.no_grad()
def test_tensors_that_do_not_fit(backend, name, change):
    arguments = good()
    arguments[name] = change(arguments[name])
    with pytest.raises(ValueError, match=SENTENCE):
        append_and_attend(*arguments.values(), 0.3, backend)
    new = arguments.pop("key"), arguments.pop("value")
    query = arguments.pop("q")
    if name not in ("key", "value"):
        with pytest.raises(ValueError, match=SENTENCE):
            ragged_attention(query, *arguments.values(), 0.3, backend)
    if name != "q" and not (name == "starts" and change in ALLOWED_FOR_APPEND):
        with pytest.raises(ValueError, match=SENTENCE):
            append(*new, *arguments.values())


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize(
    "change",
    [
        *({name: lambda x: x[:-1]} for name in ("key_codes", "key_scale", "value_codes", "value_scale", "tables")),
        *({name: lambda x: x[..., :-1]} for name in QuantizedKV._fields[:7]),
        *({name: freed} for name in QuantizedKV._fields[:7]),
        *({name: lambda x: x.flatten()} for name in QuantizedKV._fields[:7]),
        {"key_codes": lambda x: x.float()}, {"tables": lambda x: x.long()}, {"key_scale": torch._neg_view},
        {"tables": lambda x: x + 1}, {"tables": lambda x: x - 1},
        {"bits": lambda x: 3}, {"group_size": lambda x: 0}, {"group_size": lambda x: 8},
    ],
)  # fmt: skip
@torch.no_grad()
def test_codes_that_do_not_fit(bits, change):
    arguments, quantized = good(), codes(bits=bits)
    arguments["starts"] = torch.tensor([[-20, 10]], dtype=torch.int32)
    append_and_attend(*arguments.values(), 0.3, quantized=quantized)
    ((name, wrong),) = change.items()
    quantized = quantized._replace(**{name: wrong(getattr(quantized, name))})
    with pytest.raises((ValueError, BackendError)):
        append_and_attend(*arguments.values(), 0.3, quantized=quantized)


@torch.no_grad()
def test_no_tokens_and_no_entries():
    with pytest.raises(ValueError, match="backend is 'magic'"):
        append_and_attend(*good().values(), 0.3, "magic")
    arguments = {name: x[:, :, :0] if x.ndim == 4 else x for name, x in good().items()}
    assert append_and_attend(*arguments.values(), 0.3).shape == (1, 4, 0, 16)
    q, _, _, *spans = good().values()
    spans[3] = torch.zeros_like(spans[3])
    out, lse = ragged_attention(q, *spans, 0.3, causal=False, lse=True)
    assert (out == 0).all() and (lse == -torch.inf).all()


def test_spans_may_lie_in_descending_order():
    q, _, _, k, v, _, _ = good().values()
    starts, lens = (torch.tensor([row], dtype=torch.int32) for row in ([40, 0], [20, 20]))
    expected = ragged_attention(q, k, v, starts, lens, 0.3, "reference")
    torch.testing.assert_close(ragged_attention(q, k, v, starts, lens, 0.3, "loop"), expected)


@pytest.mark.parametrize(
    ("index", "change"),
    [
        (0, lambda x: x[0]), (0, lambda x: x[:, :3]), (1, lambda x: x[:, :, :4]), (1, lambda x: x[..., :7]),
        (2, lambda x: x[:, :, :4]), (3, lambda x: x.float()), (3, lambda x: x[..., :2]), (3, lambda x: x[0]),
        *((index, freed) for index in range(4)), *((index, torch._neg_view) for index in range(3)),
    ],
)  # fmt: skip
def test_masked_attention_that_does_not_fit(index, change):
    tensors = [torch.randn(1, 4, 3, 8), torch.randn(1, 2, 5, 8), torch.randn(1, 2, 5, 8), torch.ones(1, 2, 3, 5) > 0]
    masked_attention(*tensors, 0.3)
    tensors[index] = change(tensors[index])
    with pytest.raises(ValueError, match=SENTENCE):
        masked_attention(*tensors, 0.3)


@pytest.mark.parametrize(("index", "shape"), [(0, (2, 4)), (1, (2,)), (2, (3, 5)), (3, (3, 1)), (0, ())])
def test_merge_of_outputs_that_do_not_fit(index, shape):
    tensors = [torch.randn(3, 4), torch.randn(3), torch.randn(3, 4), torch.randn(3)]
    merge_attention(*tensors)
    tensors[index] = torch.randn(shape)
    with pytest.raises(ValueError, match="Expected two outputs"):
        merge_attention(*tensors)


@pytest.mark.parametrize(
    ("index", "change"),
    [
        *((index, change) for index in range(4)
          for change in (freed, lambda x: x[0], torch._neg_view, lambda x: x.to("meta"))),
        (0, lambda x: x[:, :3]), (2, lambda x: x[:, :, 1:]), (2, lambda x: x.double()), (3, lambda x: x[:, :1]),
        (3, lambda x: x * torch.nan), (3, lambda x: x - -torch.inf),
    ],
)  # fmt: skip
def test_soft_mask_attention_of_tensors_that_do_not_fit(index, change):
    tensors = [torch.randn(1, 4, 3, 8), torch.randn(1, 2, 5, 8), torch.randn(1, 2, 5, 8), -torch.rand(1, 2, 5)]
    soft_mask_attention(*tensors)
    with pytest.raises(ValueError, match="backend is 'magic'"):
        soft_mask_attention(*tensors, backend="magic")
    tensors[index] = change(tensors[index])
    with pytest.raises(ValueError, match=SENTENCE):
        soft_mask_attention(*tensors)


@pytest.mark.parametrize("x", [torch.ones(3, 5), torch.ones(2, 5).to_sparse(), freed(torch.ones(2, 5))])
def test_soft_topk_of_tensors_that_do_not_fit(x):
    with pytest.raises(ValueError, match=SENTENCE):
        soft_topk(x, torch.ones(2))


HOSTILE = """
import random, sys, torch
from tests.kernels.test_bad_arguments import codes, freed, good
from lkv.kernels.ragged_attention import append, append_and_attend, masked_attention, merge_attention, ragged_attention
from lkv.kernels.soft_mask_attention import soft_mask_attention
from lkv.kernels.soft_topk import soft_topk

torch.manual_seed(0)
random.seed(0)
torch.set_grad_enabled(False)

def shrunk(x):
    x = x.clone()
    x.untyped_storage().resize_(x.untyped_storage().nbytes() // 2)
    return x

CHANGES = (
    torch._neg_view, lambda x: x[..., : random.randrange(4)], lambda x: x[: random.randrange(3)],
    lambda x: x[None], lambda x: x.flatten(), lambda x: x.mT if x.ndim > 1 else x, lambda x: x.double(),
    lambda x: x.int(), lambda x: x.long(), lambda x: x.half(),
    lambda x: torch.cat([x, x], random.randrange(max(x.ndim, 1))),
    lambda x: x.expand(3, *x.shape), lambda x: x[..., ::2], lambda x: x.to("meta"), lambda x: x.to_sparse(),
    lambda x: x + random.choice([-(2**31), -100, -1, 1, 9, 100, 2**31 - 1]), lambda x: x * 0 - 5,
    lambda x: x.new_empty(0),
    lambda x: torch.full_like(x, random.choice([0, 1, -1, 77, 127])), lambda x: x.as_strided(x.shape, [0] * x.ndim),
)

def distorted(tensors):
    tensors = list(tensors)
    for _ in range(random.choice([1, 1, 2, 3])):
        index = random.randrange(len(tensors))
        try:
            tensors[index] = random.choice(CHANGES)(tensors[index])
        except Exception:
            pass
    # Last, because no operator of PyTorch may read such a tensor.
    if random.randrange(4) == 0:
        index = random.randrange(len(tensors))
        if tensors[index].layout is torch.strided and tensors[index].device.type == "cpu":
            tensors[index] = random.choice([freed, shrunk])(tensors[index])
    return tensors

refused = 0
for call in range(int(sys.argv[1])):
    torch.set_num_threads(1 + call % 2)
    arguments = list(good(random.choice([1, 7, 16, 64]), random.choice([1, 3])).values())
    dim, kind = arguments[0].shape[-1], random.randrange(7)
    try:
        if kind == 0:
            append_and_attend(*distorted(arguments), 0.3)
        elif kind == 1:
            ragged_attention(arguments[0], *distorted(arguments[3:]), 0.3, causal=bool(call % 2), lse=bool(call % 3))
        elif kind == 2:
            append(*distorted(arguments[1:]))
        elif kind == 3 and dim % 2 == 0:
            arguments[5] = torch.tensor([[-20, 10]], dtype=torch.int32)
            quantized = codes(dim, random.choice([8, 4]), random.choice([1, 16, 32, 100]))
            wrong = distorted([*arguments, *quantized[:7]]) if call % 5 else [*arguments, *quantized[:7]]
            rest = [random.choice([quantized.bits, 8, 4]), random.choice([quantized.group_size, 16, -1])]
            append_and_attend(*wrong[:7], 0.3, quantized=type(quantized)(*wrong[7:], *rest))
        elif kind == 4:
            q, key, value = arguments[:3]
            masked_attention(*distorted([q, key, value, torch.ones(1, 2, q.shape[2], q.shape[2]) > 0]), 0.3)
        elif kind == 5:
            soft_mask_attention(*distorted([*arguments[:3], -torch.rand(arguments[1].shape[:3])]))
        else:
            soft_topk(*distorted([torch.randn(2, 9), torch.ones(2)]))
            merge_attention(*distorted([torch.randn(2, 9), torch.ones(2), torch.randn(2, 9), torch.ones(2)]))
    except Exception:
        refused += 1
print("refused", refused)
"""


@pytest.mark.parametrize("calls", [3000, pytest.param(100_000, marks=pytest.mark.slow)])
def test_hostile_calls_never_crash_the_process(calls):
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", HOSTILE, str(calls)],
        capture_output=True,
        text=True,
        timeout=1200,
        check=False,
    )
    assert done.returncode == 0, (done.returncode, done.stdout[-500:], done.stderr[-2000:])
    assert int(done.stdout.split()[-1]) > calls // 4
