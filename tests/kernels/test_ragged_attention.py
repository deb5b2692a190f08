"""Attention over the ragged pool against the float64 reference."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from experiments.profile.memory import LiveBytes
from lkv.errors import BackendError
from lkv.kernels.ragged_attention import RaggedKV, api, loop, masked_attention, merge_attention, ragged_attention
from tests.kernels.pools import pool_of


@given(
    st.lists(st.lists(st.integers(0, 30), min_size=2, max_size=2), min_size=1, max_size=3), st.integers(1, 3),
    st.integers(1, 17), st.booleans(), st.booleans(), st.integers(1, 9),
    st.sampled_from([torch.float64, torch.float32, torch.float16]),
)  # fmt: skip
def test_loop_equals_reference(older, groups, rows, causal, with_lse, block, dtype):
    """Spans without entries, and new tokens in several blocks, included."""
    torch.manual_seed(1)
    lengths = [[count + rows if causal else count for count in row] for row in older]
    kv = pool_of(lengths, 3, 16, 16, dtype)
    q = torch.randn(len(older), 2 * groups, rows, 16).to(dtype)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "_ROWS", block)
        found = ragged_attention(q, kv, 0.25, "loop", causal=causal, lse=with_lse)
    exact, exact_lse = ragged_attention(q, kv, 0.25, backend="reference", causal=causal, lse=True)
    tolerance = {torch.float64: 1e-12, torch.float32: 3e-6, torch.float16: 4e-3}[dtype]
    torch.testing.assert_close(found[0] if with_lse else found, exact, atol=tolerance, rtol=tolerance)
    if with_lse:
        torch.testing.assert_close(found[1].double(), exact_lse, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rows", [1, 5])
@pytest.mark.parametrize("older", [[0, 40], [30, 30], [5000, 9]])
def test_half_precision(dtype, rows, older):
    torch.manual_seed(1)
    kv = pool_of([[count + rows for count in older]], 4, 32, 32, dtype)
    q = torch.randn(1, 6, rows, 32).to(dtype)
    ours = ragged_attention(q, kv, 32**-0.5, backend="loop")
    exact = ragged_attention(q, kv, 32**-0.5, backend="reference")
    assert ours.dtype == dtype
    torch.testing.assert_close(ours, exact, atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_long_heads_are_shared_out_among_threads(threads, dtype):
    torch.manual_seed(3)
    kv = pool_of([[2100, 2101, 5, 4999]], 3, 16, 16, dtype)
    q = torch.randn(1, 12, 1, 16).to(dtype)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        ours = ragged_attention(q, kv, 0.25, backend="loop")
        assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)
    exact = ragged_attention(q, kv, 0.25, backend="reference")
    tolerance = 1e-12 if dtype == torch.float64 else 4e-3
    torch.testing.assert_close(ours, exact, atol=tolerance, rtol=2 * tolerance)


@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize(
    ("lengths", "runs"),
    [
        ([[7, 7], [7, 7]], [(0, 4)]),
        ([[7, 7], [3, 7]], [(0, 2), (2, 1), (3, 1)]),
        ([[5, 7], [7, 7]], [(0, 1), (1, 3)]),
    ],
)
def test_spans_of_one_length_are_one_batch(rows, lengths, runs):
    torch.manual_seed(2)
    kv = pool_of([[count + rows for count in row] for row in lengths], 3, 16, 16, torch.float64)
    found = loop._runs(kv.starts, kv.lens)
    assert [run[:2] for run in found] == runs
    q = torch.randn(2, 4, rows, 16, dtype=torch.float64)
    exact = ragged_attention(q, kv, 0.25, backend="reference")
    torch.testing.assert_close(ragged_attention(q, kv, 0.25, backend="loop"), exact, atol=1e-12, rtol=1e-12)


class Without:
    """A module that cannot be imported."""

    def __init__(self, *missing: str):
        self.missing, self.plain = missing, api._module

    def __call__(self, name: str):
        if name in self.missing:
            raise ImportError(f"No module named {name!r}", name=name)
        return self.plain(name)


def test_a_missing_library_is_named_and_auto_goes_on(monkeypatch, caplog):
    monkeypatch.setattr(api, "_module", Without("triton"))
    api._chosen.cache_clear()
    kv = pool_of([[4, 5]], 0, 8, 8, torch.float32)
    q = torch.zeros(1, 2, 1, 8)
    with pytest.raises(BackendError, match="'triton' cannot run: triton cannot be imported"):
        ragged_attention(q, kv, 1.0, backend="triton")
    for _ in range(3):
        assert api._chosen("auto", torch.device("cuda"), torch.float64, 8, 8) == "loop"
    assert [record.args[0] for record in caplog.records] == ["triton"]
    assert api._chosen("auto", torch.device("cpu"), torch.float64, 8, 8) == "loop"
    assert len(caplog.records) == 1
    api._chosen.cache_clear()


def test_a_part_of_a_prompt_holds_no_mask_of_all_its_tokens():
    rows, length = 1024, 4096
    kv = pool_of([[length, length]], 2, 16, 16, torch.float32)
    q = torch.randn(1, 6, rows, 16)
    with LiveBytes() as live:
        ragged_attention(q, kv, 0.3, backend="loop")
    assert live.peak < 2 * rows * length  # PyTorch makes 4 bytes of each that is masked


@given(
    st.integers(0, 20), st.integers(0, 20), st.integers(1, 3), st.floats(0.01, 80), st.booleans(), st.integers(0, 99)
)
def test_joined_partial_attentions_equal_attention_over_all(first, second, rows, scale, masked, seed):
    """Over two pools, and over a pool and a masked tail; scores far from 0 included."""
    torch.manual_seed(seed)
    draw = torch.randn(2, 2, first + second, 8, dtype=torch.float64)
    q = torch.randn(1, 4, rows, 8, dtype=torch.float64)

    def part(begin, end):
        k, v = (x[:, begin:end].reshape(-1, 8) for x in draw)
        starts = torch.tensor([[0, end - begin]], dtype=torch.int32)
        return RaggedKV(k, v, starts, torch.full_like(starts, end - begin))

    def attend(begin, end):
        return ragged_attention(q, part(begin, end), scale, backend="reference", causal=False, lse=True)

    tail = draw[:, None, :, first:]
    late = masked_attention(q, *tail, torch.ones(1, 1, rows, second, dtype=torch.bool), scale)
    out, lse = merge_attention(*attend(0, first), *(late if masked else attend(first, first + second)))
    exact, exact_lse = attend(0, first + second)
    torch.testing.assert_close(out, exact, atol=1e-10, rtol=1e-10)
    torch.testing.assert_close(lse, exact_lse, atol=1e-10, rtol=1e-10)


def test_a_masked_tail_hides_what_it_should():
    torch.manual_seed(0)
    q, k, v = torch.randn(2, 4, 3, 8), torch.randn(2, 2, 5, 8), torch.randn(2, 2, 5, 8)
    visible = torch.rand(2, 1, 3, 5) > 0.4
    visible[0, 0, 1] = False
    out, lse = masked_attention(q, k, v, visible, 0.5)
    scores = (q * 0.5) @ k.repeat_interleave(2, 1).mT
    scores = scores.masked_fill(~visible, -torch.inf)
    exact = torch.nan_to_num(scores.softmax(-1), nan=0.0) @ v.repeat_interleave(2, 1)
    torch.testing.assert_close(out, exact)
    torch.testing.assert_close(lse, scores.logsumexp(-1))
    assert (out[0, :, 1] == 0).all() and (lse[0, :, 1] == -torch.inf).all()


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("cut", ["later rows", "every second row", "columns"])
def test_pools_may_be_views(rows, cut):
    torch.manual_seed(0)
    q = torch.randn(1, 2, rows, 8, dtype=torch.float64)
    wide = torch.randn(2, 300, 24, dtype=torch.float64)
    parts = {"later rows": wide[:, 100:, :8], "every second row": wide[:, ::2, :8], "columns": wide[:, :, 8:16]}
    k, v = parts[cut]
    starts, lens = torch.tensor([[0, 50]], dtype=torch.int32), torch.tensor([[50, 50]], dtype=torch.int32)
    kv = RaggedKV(k, v, starts, lens)
    exact, exact_lse = ragged_attention(q, RaggedKV(k.clone(), v.clone(), starts, lens), 0.3, "reference", lse=True)
    for backend in ("loop", "auto"):
        torch.testing.assert_close(ragged_attention(q, kv, 0.3, backend), exact)
    out, lse = ragged_attention(q, kv, 0.3, "loop", lse=True)
    torch.testing.assert_close(out, exact)
    torch.testing.assert_close(lse, exact_lse)


@pytest.mark.parametrize("options", [{}, {"lse": True}, {"sinks": torch.randn(4, dtype=torch.float64)}])
@pytest.mark.parametrize("rows", [1, 3])
def test_the_loop_gives_gradients(rows, options):
    torch.manual_seed(0)
    kv = pool_of([[7, 12]], 3, 8, 8, torch.float64)
    found = []
    for backend in ("loop", "reference"):
        q = torch.randn(1, 4, rows, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).requires_grad_()
        out = ragged_attention(q, kv, 0.3, backend, **options)
        out, lse = out if "lse" in options else (out, torch.zeros(()))
        (out.square().sum() + lse.sin().sum()).backward()
        found.append(q.grad)
    torch.testing.assert_close(*found, atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("rows", [1, 3])
def test_spans_may_be_in_any_order(rows):
    torch.manual_seed(0)
    starts, lens = (torch.tensor([numbers], dtype=torch.int32) for numbers in ([20, 10, 0], [8, 8, 8]))
    kv = pool_of([[30, 30]], 3, 8, 8, torch.float64)._replace(starts=starts, lens=lens)
    q = torch.randn(1, 3, rows, 8, dtype=torch.float64)
    for with_lse in (False, True):
        found, exact = (ragged_attention(q, kv, 0.3, name, lse=with_lse) for name in ("loop", "reference"))
        torch.testing.assert_close(found, exact, atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("name", ["triton", "cpp"])
def test_compiled_backends_leave_gradients_to_the_loop(name, monkeypatch):
    monkeypatch.setattr(api, "_chosen", lambda *_: name)
    kv = pool_of([[7, 12]], 3, 8, 8, torch.float32)
    q = torch.ones(1, 2, 1, 8, requires_grad=True)
    assert api._choose("auto", q.detach(), kv) == name
    assert api._choose("auto", q, kv) == "loop"
    with pytest.raises(BackendError, match="it gives no gradients"):
        api._choose(name, q, kv)
    with torch.no_grad():
        assert api._choose("auto", q, kv) == name
