"""Wrong arguments of the attention functions raise one sentence and never crash the process."""

import subprocess
import sys

import pytest
import torch

from lkv.kernels.causal_attention import causal_attention
from lkv.kernels.ragged_attention import (
    Basis,
    QuantizedKV,
    RaggedKV,
    append,
    append_and_attend,
    join_sinks,
    masked_attention,
    merge_attention,
    ragged_attention,
)
from lkv.kernels.soft_mask_attention import continuation_attention, soft_mask_attention
from lkv.kernels.soft_topk import soft_topk

SENTENCE = r"\w+ .*\.$"  # one sentence that names something
BACKENDS = ("auto", "loop", "reference")


def good(dim=16, tokens=1, dtype=torch.float32):
    """Tensors for `append_and_attend` that fit, by name; see `called`."""
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


def called(operator, tensors, *options, quantized=(), basis=None, **named):
    """Call an operator with new tensors, those of a `RaggedKV`, and options."""
    tensors = list(tensors)
    return operator(*tensors[:-4], RaggedKV(*tensors[-4:], quantized, basis), *options, **named)


def tiers_of(dim=16, bits=((8, 4), (4, 3))):
    """All 50 entries of `good` in tiers of equal size, so that its pools then have free slots alone."""
    tiers = []
    for pair in bits:
        codes = [torch.zeros(50, dim * number // 8, dtype=torch.uint8) for number in pair]
        norms = [torch.ones(50, dtype=torch.bfloat16) for _ in pair]
        tables = torch.tensor([[[20 // len(bits), 30 // len(bits)]], [[0, 20]]], dtype=torch.int32)
        tiers.append(QuantizedKV(codes[0], norms[0], codes[1], norms[1], tables, *pair))
    return tiers


def basis_of(dim=16, dtype=torch.bfloat16):
    """Coordinates for the heads of `good`."""
    return Basis(
        torch.randn(1, 2, dim).to(dtype), torch.rand(1, 2, dim).to(dtype) + 0.5, torch.eye(dim), torch.eye(dim)
    )


def shrunk(x):
    x = x.clone()
    x.untyped_storage().resize_(x.untyped_storage().nbytes() // 2)
    return x


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


def test_sinks_with_a_log_sum_exp_that_would_lack_them():
    query, _, _, *pools = good().values()
    pools = RaggedKV(*pools)
    with pytest.raises(ValueError, match="no sinks together with lse=True"):
        ragged_attention(query, pools, 0.3, lse=True, sinks=torch.zeros(query.shape[1]))
    with pytest.raises(ValueError, match=r"sinks \[Hq\], but got"):
        ragged_attention(query, pools, 0.3, sinks=torch.zeros(query.shape[1] - 1))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("name", "change"), WRONG)
@torch.no_grad()
def test_tensors_that_do_not_fit(backend, name, change):
    arguments = good()
    arguments[name] = change(arguments[name])
    with pytest.raises(ValueError, match=SENTENCE):
        called(append_and_attend, arguments.values(), 0.3, backend)
    new = arguments.pop("key"), arguments.pop("value")
    query = arguments.pop("q")
    if name not in ("key", "value"):
        with pytest.raises(ValueError, match=SENTENCE):
            called(ragged_attention, [query, *arguments.values()], 0.3, backend)
    if name != "q" and not (name == "starts" and change in ALLOWED_FOR_APPEND):
        with pytest.raises(ValueError, match=SENTENCE):
            called(append, [*new, *arguments.values()])


@pytest.mark.parametrize("place", [0, 1])
@pytest.mark.parametrize(
    "change",
    [
        *({name: change} for name in QuantizedKV._fields[:5]
          for change in (freed, lambda x: x[:-1], lambda x: x[..., :-1], lambda x: x[None], lambda x: x.float())),
        *({name: lambda x: x.to("meta")} for name in QuantizedKV._fields[:5]),
        {"tables": lambda x: x.long()}, {"key_norms": torch._neg_view}, {"value_norms": lambda x: x.half()},
        {"tables": lambda x: x + 1}, {"tables": lambda x: x - 1}, {"tables": lambda x: x * 2},
        {"tables": lambda x: -x}, {"tables": lambda x: x + torch.tensor([[[0, 0]], [[0, 2**31 - 99]]]).int()},
        *({name: lambda x, bits=bits: bits} for name in ("key_bits", "value_bits") for bits in (2, 16, 0, -4)),
        {"key_bits": lambda x: 3 if x == 8 else 8}, {"value_bits": lambda x: 8},
    ],
)  # fmt: skip
@torch.no_grad()
def test_tiers_that_do_not_fit(place, change):
    arguments, tiers = good(), tiers_of()
    arguments["starts"] = torch.tensor([[-20, 10]], dtype=torch.int32)
    called(append_and_attend, (x.clone() for x in arguments.values()), 0.3, quantized=tiers)
    ((name, wrong),) = change.items()
    tiers[place] = tiers[place]._replace(**{name: wrong(getattr(tiers[place], name))})
    with pytest.raises(ValueError, match=r"\w+ "):
        called(append_and_attend, arguments.values(), 0.3, quantized=tiers)
    query, _, _, *pools = arguments.values()
    with pytest.raises(ValueError, match=r"\w+ "):
        called(ragged_attention, [query, *pools], 0.3, quantized=tiers, causal=False)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        *((name, change) for name in Basis._fields
          for change in (freed, shrunk, torch._neg_view, lambda x: x.to("meta"), lambda x: x.to_sparse(),
                         lambda x: x.as_strided(x.shape, [0] * x.ndim), lambda x: x[..., :-1], lambda x: x.double(),
                         lambda x: x[None])),
        ("mean", lambda x: x.float()), ("scale", lambda x: x.half()), ("key_rotation", lambda x: x.bfloat16()),
    ],
)  # fmt: skip
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])  # read by "cpp", and by plain PyTorch
@torch.no_grad()
def test_a_basis_that_cannot_be_read(dtype, name, change):
    arguments, basis = good(dtype=dtype), basis_of()
    called(append_and_attend, (x.clone() for x in arguments.values()), 0.3, basis=basis)
    basis = basis._replace(**{name: change(getattr(basis, name))})
    with pytest.raises(ValueError, match=r"\w+ "):
        called(append_and_attend, arguments.values(), 0.3, basis=basis)
    query, key, value, *pools = arguments.values()
    with pytest.raises(ValueError, match=r"\w+ "):
        called(ragged_attention, [query, *pools], 0.3, basis=basis, causal=False)
    with pytest.raises(ValueError, match=r"\w+ "):
        called(append, [key, value, *pools], basis=basis)


@pytest.mark.parametrize("name", ["q", "key", "value"])
@torch.no_grad()
def test_storages_are_looked_at_before_a_basis_is_entered(name):
    arguments = good(dtype=torch.float64)
    arguments[name] = shrunk(arguments[name])
    with pytest.raises(ValueError, match="freed or shrunk"):
        called(append_and_attend, arguments.values(), 0.3, basis=basis_of())
    query, key, value, *pools = arguments.values()
    if name != "q":
        with pytest.raises(ValueError, match="freed or shrunk"):
            called(append, [key, value, *pools], basis=basis_of())
    else:
        with pytest.raises(ValueError, match="freed or shrunk"):
            called(ragged_attention, [query, *pools], 0.3, basis=basis_of())


@torch.no_grad()
def test_three_tiers_and_odd_head_sizes():
    arguments = good()
    with pytest.raises(ValueError, match="at most 2 sets of quantised entries, but got 3"):
        called(append_and_attend, arguments.values(), 0.3, quantized=[*tiers_of(), *tiers_of(bits=((8, 8),))])
    with pytest.raises(ValueError, match="multiples of 8 channels"):
        called(append_and_attend, good(12).values(), 0.3, quantized=tiers_of(12))


@torch.no_grad()
def test_no_tokens_and_no_entries():
    with pytest.raises(ValueError, match="backend is 'magic'"):
        called(append_and_attend, good().values(), 0.3, "magic")
    arguments = {name: x[:, :, :0] if x.ndim == 4 else x for name, x in good().items()}
    assert called(append_and_attend, arguments.values(), 0.3).shape == (1, 4, 0, 16)
    q, _, _, *spans = good().values()
    spans[3] = torch.zeros_like(spans[3])
    out, lse = called(ragged_attention, [q, *spans], 0.3, causal=False, lse=True)
    assert (out == 0).all() and (lse == -torch.inf).all()


def normal(*shapes):
    return [torch.randn(shape) for shape in shapes]


# Tensors that fit each operator.
OPERATORS = {
    masked_attention: lambda: [*normal((1, 4, 3, 8), (1, 2, 5, 8), (1, 2, 5, 8)), torch.ones(1, 2, 3, 5) > 0, 0.3],
    merge_attention: lambda: normal((3, 4), (3,), (3, 4), (3,)),
    join_sinks: lambda: normal((1, 4, 3, 8), (1, 4, 3), (4,)),
    soft_mask_attention: lambda: [*normal((1, 4, 3, 8), (1, 2, 5, 8), (1, 2, 5, 8)), -torch.rand(1, 2, 5)],
    continuation_attention: lambda: [
        *normal(*[(2, 2, 3, 8)] * 3, *[(2, 2, 5, 8)] * 2),
        -torch.rand(2, 2, 5),
        torch.tensor([0, 1]),
    ],
    causal_attention: lambda: [*normal((1, 4, 3, 8), (1, 2, 5, 8), (1, 2, 5, 8)), 0.3, [1]],
    soft_topk: lambda: [*normal((2, 5)), torch.ones(2)],
}
UNREADABLE = (freed, lambda x: x[None], lambda x: x.to("meta"), lambda x: x.to_sparse())
UNFIT = {
    masked_attention: [
        (0, lambda x: x[0]), (0, lambda x: x[:, :3]), (1, lambda x: x[:, :, :4]), (1, lambda x: x[..., :7]),
        (2, lambda x: x[:, :, :4]), (3, lambda x: x.float()), (3, lambda x: x[..., :2]), (3, lambda x: x[0]),
        *((index, freed) for index in range(4)), *((index, torch._neg_view) for index in range(3)),
    ],
    merge_attention: [
        (0, lambda x: x[:2]), (1, lambda x: x[:2]), (2, lambda x: x[:, :3]), (3, lambda x: x[:, None]),
        (0, lambda x: x[0, 0]), *((index, freed) for index in range(4)),
    ],
    join_sinks: [(index, change) for index in range(3) for change in (shrunk, *UNREADABLE)],
    soft_mask_attention: [
        *((index, change) for index in range(4) for change in (torch._neg_view, lambda x: x[0], *UNREADABLE)),
        (0, lambda x: x[:, :3]), (2, lambda x: x[:, :, 1:]), (2, lambda x: x.double()), (3, lambda x: x[:, :1]),
        (3, lambda x: x * torch.nan), (3, lambda x: x - -torch.inf),
    ],
    continuation_attention: [
        *((index, change) for index in range(7) for change in (shrunk, *UNREADABLE)),
        *((index, lambda x: x[:1]) for index in (0, 1, 2, 5, 6)), *((index, lambda x: x[:, :1]) for index in range(6)),
        *((index, lambda x: x[:, :, 1:]) for index in range(6)), (0, lambda x: x[..., 1:]), (3, lambda x: x[..., 1:]),
        (6, lambda x: x + 1), (6, lambda x: x - 2), (6, lambda x: x.int()), (6, lambda x: None),
        (1, lambda x: x.double()), (2, lambda x: x.half()), (5, lambda x: x * torch.nan), (5, lambda x: x - -torch.inf),
    ],
    # The kernel below reads where it is told to, and divides by 0.
    causal_attention: [
        *((index, change) for index in range(3)
          for change in (lambda x: x[0], lambda x: x[:, :1].repeat(1, 3, 1, 1), lambda x: torch.cat([x, x]))),
        *((index, change) for index in (1, 2) for change in (lambda x: x[:, :0], lambda x: x[:, :, 1:])),
        (0, lambda x: x[..., :0]), (1, lambda x: x[..., :0]), (0, lambda x: torch.cat([x, x, x], 2)),
        (4, lambda x: [0, 0]), (4, lambda x: [-1]), (4, lambda x: [6]), (4, lambda x: []),
    ],
    soft_topk: [(0, lambda x: x[:1].expand(3, -1)), (0, lambda x: x.to_sparse()), (0, freed)],
}  # fmt: skip


@pytest.mark.parametrize(
    ("operator", "index", "change"),
    [pytest.param(op, *case, id=f"{op.__name__}-{at}") for op, cases in UNFIT.items() for at, case in enumerate(cases)],
)
def test_tensors_that_do_not_fit_an_operator(operator, index, change):
    arguments = OPERATORS[operator]()
    operator(*arguments)
    arguments[index] = change(arguments[index])
    backends = [{"backend": name} for name in ("auto", "sdpa", "reference")]
    for options in backends if operator in (soft_mask_attention, continuation_attention) else [{}]:
        with pytest.raises(ValueError, match=r"\w+ "):
            operator(*arguments, **options)


def test_a_backend_that_there_is_not():
    with pytest.raises(ValueError, match="backend is 'magic'"):
        soft_mask_attention(*OPERATORS[soft_mask_attention](), backend="magic")


HOSTILE = """
import random, sys, torch
from tests.kernels.test_bad_arguments import basis_of, called, freed, good, shrunk, tiers_of
from lkv.kernels.causal_attention import causal_attention
from lkv.kernels.ragged_attention import (
    append, append_and_attend, join_sinks, masked_attention, merge_attention, ragged_attention
)
from lkv.kernels.soft_mask_attention import continuation_attention, soft_mask_attention
from lkv.kernels.soft_topk import soft_topk

torch.manual_seed(0)
random.seed(0)
torch.set_grad_enabled(False)

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

def distorted(tensors, storages=True):
    tensors = list(tensors)
    for _ in range(random.choice([1, 1, 2, 3])):
        index = random.randrange(len(tensors))
        try:
            tensors[index] = random.choice(CHANGES)(tensors[index])
        except Exception:
            pass
    # Last, because no operator of PyTorch may read such a tensor.
    if storages and random.randrange(4) == 0:
        index = random.randrange(len(tensors))
        if tensors[index].layout is torch.strided and tensors[index].device.type == "cpu":
            tensors[index] = random.choice([freed, shrunk])(tensors[index])
    return tensors

refused = 0
for call in range(int(sys.argv[1])):
    torch.set_num_threads(1 + call % 2)
    arguments = list(good(random.choice([1, 7, 16, 64]), random.choice([1, 3])).values())
    dim, kind = arguments[0].shape[-1], random.randrange(10)
    try:
        if kind == 0:
            called(append_and_attend, distorted(arguments), 0.3)
        elif kind == 1:
            tensors = [arguments[0], *distorted(arguments[3:])]
            called(ragged_attention, tensors, 0.3, causal=bool(call % 2), lse=bool(call % 3))
        elif kind == 2:
            called(append, distorted(arguments[1:]))
        elif kind == 3 and dim % 8 == 0:
            arguments[5] = torch.tensor([[-20, 10]], dtype=torch.int32)
            pairs = [(random.choice([8, 4, 3]), random.choice([8, 4, 3])) for _ in range(random.choice([1, 2]))]
            tiers = tiers_of(dim, pairs)
            basis = basis_of(dim, random.choice([torch.float32, torch.bfloat16]))
            tensors = [*arguments, *(x for tier in tiers for x in tier[:5]), *basis]
            tensors = distorted(tensors) if call % 5 else tensors
            basis = type(basis)(*tensors[-4:]) if call % 3 else None
            if call % 7 == 0:
                pairs[0] = random.choice([(8, 8), (4, 3), (5, 8), (0, -1)])
            tiers = [type(tiers[0])(*tensors[7 + 5 * at : 12 + 5 * at], *pair) for at, pair in enumerate(pairs)]
            if call % 2:
                called(append_and_attend, tensors[:7], 0.3, quantized=tiers, basis=basis)
            else:
                own = [tensors[0], *tensors[3:7]]
                called(ragged_attention, own, 0.3, causal=bool(call % 2), quantized=tiers, basis=basis)
        elif kind == 4:
            q, key, value = arguments[:3]
            masked_attention(*distorted([q, key, value, torch.ones(1, 2, q.shape[2], q.shape[2]) > 0]), 0.3)
        elif kind == 5:
            soft_mask_attention(*distorted([*arguments[:3], -torch.rand(arguments[1].shape[:3])]))
        elif kind == 6:
            prompt = [torch.randn(random.choice([1, 2]), *x.shape[1:]) for x in arguments[1:3]]
            more = [-torch.rand(arguments[1].shape[:3]), torch.tensor([random.choice([0, 1, -1, 2**40])])]
            tensors = distorted([*arguments[:3], *prompt, *more])
            continuation_attention(*tensors, backend=random.choice(["auto", "reference"]))
        elif kind == 7:
            join_sinks(*distorted([arguments[0], arguments[0][..., 0], torch.randn(4)]))
        elif kind == 8:  # not an entry point: it looks at shapes alone
            q, key, value = arguments[:3]
            tensors = distorted([q, torch.cat([key] * 9, 2), torch.cat([value] * 9, 2)], storages=False)
            causal_attention(*tensors, 0.3, random.choice([None, [0], [1], [q.shape[2] * 9], [-1], [0, 0]]))
        else:
            soft_topk(*distorted([torch.randn(2, 9), torch.ones(2)]))
            merge_attention(*distorted([torch.randn(2, 9), torch.ones(2), torch.randn(2, 9), torch.ones(2)]))
    except Exception:
        refused += 1
print("refused", refused)
"""


@pytest.mark.parametrize("calls", [1500, pytest.param(100_000, marks=pytest.mark.slow)])
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
