"""The compiled CPU attention over entries in 8, 4 and 3 bits, against attention in float64 over what they stand for."""

from itertools import product

import pytest
import torch

from lkv.cache.quantization import LEVELS, dequantize, quantize, rotation
from lkv.kernels.ragged_attention import Basis, QuantizedKV, RaggedKV, append_and_attend, cpp, ragged_attention

CPU = torch.device("cpu")
if reason := cpp.refusal(CPU, torch.float32, 64, 64):
    pytest.skip(reason, allow_module_level=True)
TOLERANCES = {torch.float32: 4e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3}
DIMS = [8, 32, 64, 80, 96, 128]  # expanded in registers or restored, which depends on the bits and the processor
COUNTS = [[[90, 3], [0, 130]], [[5, 70], [66, 0]]]  # codes [part][row][head]; the last span has no codes of the first


class Spans:
    """Random codes, pools with NaN in their free slots, and the same entries in float64."""

    def __init__(self, bits, dim, value_dim, dtype, unquantized=7, slack=8):
        self.counts = torch.tensor(COUNTS[: len(bits)], dtype=torch.long).view(-1, 2, 2)
        self.parts, self.older = [], []
        for (key_bits, value_bits), lens in zip(bits, self.counts, strict=True):
            total, ends = int(lens.sum()), lens.flatten().cumsum(0)
            key = quantize(torch.randn(total, dim) * torch.linspace(0.5, 3, total)[:, None], key_bits)
            value = quantize(torch.randn(total, value_dim) * torch.linspace(3, 0.5, total)[:, None], value_bits)
            tables = torch.stack([lens, ends.view_as(lens) - lens]).int()
            self.parts.append(QuantizedKV(*key, *value, tables, key_bits, value_bits))
            restored = dequantize(*key, key_bits, torch.float64), dequantize(*value, value_bits, torch.float64)
            self.older.append([x.split(lens.flatten().tolist()) for x in restored])
        coded, size = self.counts.sum(0), unquantized + slack
        self.lens = (coded + unquantized).int()
        self.starts = (size * torch.arange(4).view(2, 2) - coded).int()  # some are negative
        self.pools = [torch.full((4, size, n), torch.nan, dtype=dtype) for n in (dim, value_dim)]
        for pool in self.pools:
            pool[:, :unquantized] = torch.randn(4, unquantized, pool.shape[2]).to(dtype)
        self.pools = [pool.flatten(0, 1) for pool in self.pools]

    @property
    def view(self):
        return RaggedKV(*self.pools, self.starts, self.lens, self.parts)

    def entries(self, row, head, basis=None):
        """k and v of a span in float64, as they are stored or, with a basis, as the model knows them."""
        coded = int(self.counts[:, row, head].sum())
        first, last = (int(self.starts[row, head]) + n for n in (coded, int(self.lens[row, head])))
        k, v = (
            torch.cat([*(part[side][2 * row + head] for part in self.older), self.pools[side][first:last].double()])
            for side in (0, 1)
        )
        if basis is None:
            return k, v
        mean, factor = (x[row, head].double() for x in basis[:2])
        return k @ basis.key_rotation.double().mT * factor + mean, v @ basis.value_rotation.double().mT

    def attend(self, q, scale, causal=True, basis=None):
        """Outputs [B, Hq, Tq, dv] and log-sum-exps in float64."""
        (batch, heads, tokens, _), outs, sums = q.shape, [], []
        for row, query_head in product(range(batch), range(heads)):
            k, v = self.entries(row, query_head // (heads // 2), basis)
            scores = q[row, query_head].double() @ k.mT * scale
            if causal:
                unseen = torch.ones(tokens, len(k), dtype=torch.bool).triu(len(k) - tokens + 1)
                scores = scores.masked_fill(unseen, -torch.inf)
            sums.append(scores.logsumexp(-1))
            outs.append(scores.softmax(-1) @ v)
        return tuple(torch.stack(x).unflatten(0, (batch, heads)) for x in (outs, sums))


def random_basis(dim, value_dim):
    rotations = (rotation(n, torch.float32, CPU) for n in (dim, value_dim))
    return Basis(torch.randn(2, 2, dim), torch.rand(2, 2, dim) * 2 + 0.3, *rotations)


def assert_close(ours, expected, dtype, factor=1):
    largest = float(expected.abs().max().clamp(min=1))
    torch.testing.assert_close(ours.double(), expected, atol=factor * TOLERANCES[dtype] * largest, rtol=0)


@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("bits", list(product(LEVELS, LEVELS)), ids=str)
def test_outputs_and_lse_equal_float64(bits, dim):
    """Query heads of a group and tokens that are 1 to 9 rows. One and two parts of codes, with and without a basis, and
    with the newest entries among the codes, where a token must not see those after it."""
    torch.manual_seed(dim)
    for number, (groups, tokens) in enumerate([(1, 1), (2, 1), (3, 1), (2, 2), (5, 1), (2, 3), (3, 3)]):
        case = (number + DIMS.index(dim)) % 3
        dtype = (torch.float32, torch.bfloat16, torch.float32)[case]
        value_dim = DIMS[(DIMS.index(dim) + number) % len(DIMS)]
        spans = Spans([bits, bits[::-1]][: 1 + case % 2], dim, value_dim, dtype, unquantized=0 if case == 2 else 7)
        basis = random_basis(dim, value_dim) if case else None
        q = torch.randn(2, 2 * groups, tokens, dim).to(dtype)
        causal = case != 1
        kv = spans.view._replace(basis=basis)
        out, lse = ragged_attention(q, kv, dim**-0.5, "cpp", causal=causal, lse=True)
        expected, expected_lse = spans.attend(q, dim**-0.5, causal, basis)
        empty = ~expected_lse.isfinite()
        assert out.dtype == dtype and (out[empty] == 0).all() and (lse[empty] == -torch.inf).all()
        assert_close(out[~empty], expected[~empty], dtype)
        torch.testing.assert_close(lse[~empty].double(), expected_lse[~empty], atol=5e-5, rtol=3e-6)


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("dim", [32, 64, 80, 128])
@pytest.mark.parametrize("bits", [[], [(3, 8)], [(8, 4), (4, 3)]], ids=str)
def test_a_step_appends_in_the_basis(bits, dim, dtype, count, threads):
    """Several steps of one and more tokens, over pools large enough for two threads."""
    torch.manual_seed(dim)
    spans, basis = Spans(bits, dim, dim, dtype, slack=400), random_basis(dim, dim)
    for tokens in (1, 3, 1):
        # As models give them: heads behind tokens.
        q, key, value = (torch.randn(2, tokens, heads, dim).to(dtype).transpose(1, 2) for heads in (6, 2, 2))
        before = spans.lens.clone()
        threads(count)
        out = append_and_attend(q, key, value, spans.view._replace(basis=basis), 0.1, "cpp")
        threads(1)
        assert torch.equal(spans.lens, before + tokens) and out.dtype == dtype
        assert_close(out, spans.attend(q, 0.1, basis=basis)[0], dtype)
        for row, head in product(range(2), range(2)):
            k, v = (x[-tokens:] for x in spans.entries(row, head))
            mean, scale = (x[row, head].double() for x in basis[:2])
            assert_close(k, (key[row, head].double() - mean) / scale @ basis.key_rotation.double(), dtype)
            assert_close(v, value[row, head].double() @ basis.value_rotation.double(), dtype)


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("tokens", [1, 3])
def test_other_backends_enter_and_leave_a_basis(dtype, tokens):
    torch.manual_seed(tokens)
    spans, basis = Spans([], 32, 16, dtype), random_basis(32, 16)
    q, key, value = (torch.randn(2, heads, tokens, n).to(dtype) for heads, n in ((4, 32), (2, 32), (2, 16)))
    kv = spans.view._replace(basis=basis)
    out = append_and_attend(q, key, value, kv, 0.2, "loop")
    again, lse = ragged_attention(q, kv, 0.2, "loop", lse=True)
    expected, expected_lse = spans.attend(q, 0.2, basis=basis)
    for ours, right in ((out, expected), (again, expected), (lse, expected_lse)):
        assert_close(ours, right, dtype, 4)  # queries and outputs are rounded once more


@pytest.mark.parametrize("name", Basis._fields)
def test_a_basis_that_does_not_fit_raises(name):
    spans, basis = Spans([(4, 4)], 32, 16, torch.float32), random_basis(32, 16)
    x = getattr(basis, name)
    for wrong in (x[..., :-1], x.double(), x.mT, x[0] if x.ndim == 3 else x[None]):
        kv = spans.view._replace(basis=basis._replace(**{name: wrong}))
        with pytest.raises(ValueError, match=r"basis|dimensions|one device"):
            ragged_attention(torch.randn(2, 4, 1, 32), kv, 0.2)


@pytest.mark.parametrize("change", [(0, 1), (0, -200), (1, 1), (1, -1)], ids=str)
def test_tables_that_reach_beyond_the_codes_raise(change):
    spans = Spans([(4, 3)], 64, 64, torch.float32)
    which, difference = change
    spans.parts[0].tables[which, 1, 1] += difference
    spans.parts[0].tables[which, 0, 0] += difference
    with pytest.raises(ValueError, match="reaches beyond the pools or codes"):
        ragged_attention(torch.randn(2, 4, 1, 64), spans.view, 0.2, "cpp")
