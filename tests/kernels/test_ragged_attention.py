"""Attention over the ragged pools, their tiers and bases, by every backend against the float64 reference.

Triton's kernels run in its interpreter on the CPU, and on a GPU where TRITON_INTERPRET=0 is set.
"""

import os
import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from experiments.profile.memory import LiveBytes
from lkv.errors import BackendError
from lkv.kernels.ragged_attention import (
    RaggedKV,
    api,
    append_and_attend,
    cpp,
    loop,
    masked_attention,
    merge_attention,
    ragged_attention,
)
from tests.kernels.pools import (
    TIERS,
    assert_attention,
    assert_equals_reference,
    assert_near,
    assert_steps,
    coded_pools,
    poison_buffers,
    pool_of,
    split_randomly,
    tiered_store,
)

pytestmark = pytest.mark.usefixtures("threads")
FUSED = ["cpp", "triton"]
BACKENDS = ["loop", *FUSED]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.fixture(autouse=True)
def on_device(request, monkeypatch):
    """Skip backends that cannot run here. New tensors are on the backend's device, and buffers full of NaN."""
    backend, device = request.node.callspec.params.get("backend") if hasattr(request.node, "callspec") else None, "cpu"
    if backend == "cpp" and (reason := cpp.unsupported_reason(torch.device("cpu"), torch.float32, 64, 64)):
        pytest.skip(reason)
    if backend == "triton":
        devices = pytest.importorskip("lkv.kernels.triton_helpers")
        device = "cpu" if devices.is_interpreted() else "cuda"
        if device == "cuda" and not torch.cuda.is_available():
            pytest.skip("TRITON_INTERPRET=0 was set, and there is no GPU")
    poison_buffers(monkeypatch)
    with torch.device(device):
        yield


def heads_of(most, rows=3):
    """Numbers of entries of up to `rows` batch rows and three heads."""
    return st.integers(1, 3).flatmap(
        lambda heads: st.lists(
            st.lists(st.integers(0, most), min_size=heads, max_size=heads), min_size=1, max_size=rows
        )
    )


@pytest.mark.parametrize("backend", BACKENDS)
@settings(max_examples=15, deadline=None)
@given(
    heads_of(200), st.integers(1, 3), st.integers(1, 5), st.booleans(), st.sampled_from([3, 900]), st.integers(1, 2),
    st.sampled_from([(16, 16), (48, 32), (64, 128), (7, 20), (80, 8)]), st.sampled_from(DTYPES), st.integers(0, 99),
)  # fmt: skip
def test_attention_equals_the_reference(backend, older, group, rows, causal, slack, threads, dims, dtype, seed):
    """Empty spans, several new tokens, slices that end anywhere; one slice, and (pools with much slack) several."""
    torch.manual_seed(seed)
    torch.set_num_threads(threads)
    lengths = [[count + rows if causal else count for count in row] for row in older]
    kv = pool_of(lengths, slack, *dims, dtype)
    # Queries as models give them: a view with the heads inside the tokens.
    q = torch.randn(len(older), rows, group * len(older[0]), dims[0]).to(dtype).transpose(1, 2)
    assert_attention(q, kv, 2 * dims[0] ** -0.5, backend, causal)
    assert kv.lens.tolist() == lengths


@pytest.mark.sweep(6)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 3, 20])
def test_steps_append_and_attend(backend, dtype, rows, threads):
    threads(2)
    torch.manual_seed(rows)
    lengths = [[70, 0], [1, 300]]
    kv = pool_of(lengths, 3 * rows + 900, 32, 16, dtype)
    expected, ends = [pool.clone() for pool in kv[:2]], kv.starts + kv.lens
    for step in range(3):
        q, *new = (
            torch.randn(2, rows, heads, size).to(dtype).transpose(1, 2) for heads, size in ((6, 32), (2, 32), (2, 16))
        )
        for span, end in enumerate((ends + step * rows).flatten().tolist()):
            for pool, entries in zip(expected, new, strict=True):
                pool[end : end + rows] = entries.flatten(0, 1)[span]
        out = append_and_attend(q, *new, kv, 0.2, backend)
        for pool, right in zip(kv[:2], expected, strict=True):
            torch.testing.assert_close(pool, right, rtol=0, atol=0, equal_nan=True)
        assert kv.lens.tolist() == [[count + (step + 1) * rows for count in row] for row in lengths]
        wide = kv._replace(k_pool=kv.k_pool.double(), v_pool=kv.v_pool.double())
        assert_near(out, ragged_attention(q.double(), wide, 0.2, "reference"), dtype)


@pytest.mark.sweep(6)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dims", [(32, 16), (80, 24)], ids=str)
def test_a_basis_is_entered_and_left(backend, dtype, dims, threads):
    """By steps of one and more tokens, over pools large enough for two threads."""
    threads(2)
    torch.manual_seed(dims[0])
    for rows in (1, 3):
        pools = coded_pools([[[7, 9], [60, 5]]], (), 400, *dims, dtype, has_basis=True)
        assert_equals_reference(pools, 3, rows, 0.1, backend)


@pytest.mark.sweep(3)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_capped_scores(backend, dtype, threads):
    """Scores of a deviation above the cap: in pools, causal and not, and (fused) in tiers with and without a basis."""
    threads(2)
    torch.manual_seed(0)
    kv = pool_of([[70, 9], [30, 300]], 900, 32, 16, dtype)
    for rows, causal in ((1, True), (3, True), (9, False)):
        q = torch.randn(2, rows, 6, 32).to(dtype).transpose(1, 2)
        assert_attention(q, kv, 1.0, backend, causal, softcap=5.0)
        capped, plain = (ragged_attention(q, kv, 1.0, backend, softcap=cap).float() for cap in (5.0, None))
        assert float((capped - plain).abs().max()) > 0.3
    for rows, has_basis in ((1, False), (3, True)) if backend in FUSED else ():
        lens = [[[3, 60]], [[40, 0]], [[5, 7]]]
        pools = coded_pools(lens, ((8, 4), (4, 3)), 3, 32, 16, dtype, has_basis=has_basis)
        if has_basis:  # without a mean, as caches of capped scores have it
            basis = pools.kv.basis._replace(mean=torch.zeros_like(pools.kv.basis.mean))
            pools = pools._replace(kv=pools.kv._replace(basis=basis))
        assert_equals_reference(pools, 2, rows, 0.5, backend, softcap=5.0)


# Group and new tokens: all numbers of rows that the C++ kernel treats apart.
SHAPES = {"cpp": [(1, 1), (2, 1), (3, 1), (2, 2), (5, 1), (2, 3), (3, 3)], "triton": [(4, 2)]}


@pytest.mark.sweep(8)
@pytest.mark.parametrize("backend", FUSED)
@pytest.mark.parametrize("dim", [8, 32, 64, 80, 96, 128, 256])
@pytest.mark.parametrize("tiers", [*TIERS, ((3, 4),)], ids=str)
def test_head_sizes_over_tiers(backend, tiers, dim):
    """With and without a basis, and with the newest entries among the codes, where no token may see those after it."""
    torch.manual_seed(dim)
    for number, (group, rows) in enumerate(SHAPES[backend]):
        case = (number + dim // 8) % 3
        rest = [[5, 7]] if case else [[0, 0]]
        lens = [*([[3, 60]], [[40, 0]])[: len(tiers)], rest]
        pools = coded_pools(lens, tiers, rows, dim, 8 + 120 % dim, DTYPES[case], has_basis=case == 1)
        assert_equals_reference(pools, group, rows, dim**-0.5, backend)


@pytest.mark.parametrize("backend", ["cpp", pytest.param("triton", marks=pytest.mark.slow)])
@settings(max_examples=20, deadline=None)
@given(
    heads_of(150, 2), st.sampled_from(TIERS), st.integers(1, 3), st.integers(1, 4),
    st.sampled_from([(8, 8), (64, 96), (96, 32), (128, 128), (40, 24)]), st.sampled_from(DTYPES), st.integers(0, 99),
)  # fmt: skip
def test_attention_over_tiers(backend, lengths, tiers, group, rows, dims, dtype, seed):
    """Tiers and spans without entries, negative starts, and slices that begin and end in any tier."""
    torch.manual_seed(seed)
    lens = split_randomly(lengths, len(tiers))
    pools = coded_pools(lens, tiers, rows + 600 * (seed % 2), *dims, dtype, has_basis=seed % 3 == 0)
    torch.set_num_threads(1 + seed % 2)
    assert_equals_reference(pools, group, rows, dims[0] ** -0.5, backend)


@pytest.mark.parametrize("backend", ["cpp", pytest.param("triton", marks=pytest.mark.slow)])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tiers", TIERS, ids=str)
def test_a_tiered_store_attends_to_its_codes(backend, tiers, dtype):
    """And restores nothing; steps of one and more tokens."""
    torch.manual_seed(len(tiers))
    for dims in ((8, 8), (64, 64), (96, 128)):
        store = tiered_store([[70, 0], [1, 300]], 6, *dims, dtype, tiers, torch.get_default_device())
        assert_steps(store, 3, [1, 3, 2], backend)
        assert store.appended_tokens == 6


@pytest.mark.parametrize("backend", ["cpp", pytest.param("triton", marks=pytest.mark.slow)])
def test_nothing_beyond_the_tensors_is_read(backend):
    """Entries and codes, in a process that ends where it is."""
    words = [sys.executable, "-m", "tests.kernels.guarded", backend]
    done = subprocess.run(words, env=os.environ | {"TRITON_INTERPRET": "1"}, capture_output=True, text=True)
    assert done.stdout == "ok\n", (done.returncode, done.stderr[-2000:])


@settings(max_examples=25)
@given(st.integers(1, 17), st.booleans(), st.integers(1, 9), st.lists(st.integers(0, 30), min_size=2, max_size=4))
def test_the_loop_over_blocks_of_new_tokens_is_exact(rows, causal, block, older):
    """With a log-sum-exp it attends to so many new tokens at once; in float64."""
    kv = pool_of([[count + rows if causal else count for count in older]], 3, 16, 16, torch.float64)
    q = torch.randn(1, 2 * len(older), rows, 16, dtype=torch.float64)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "_ROWS", block)
        found = ragged_attention(q, kv, 0.25, "loop", causal=causal, lse=True)
    exact = ragged_attention(q, kv, 0.25, "reference", causal=causal, lse=True)
    torch.testing.assert_close(found, exact, atol=1e-12, rtol=1e-12, equal_nan=True)


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
    [([[7, 7], [7, 7]], [(0, 4)]), ([[7, 7], [3, 7]], [(0, 2), (2, 1), (3, 1)]), ([[5, 7], [7, 7]], [(0, 1), (1, 3)])],
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
    api._available_backend.cache_clear()
    kv = pool_of([[4, 5]], 0, 8, 8, torch.float32)
    q = torch.zeros(1, 2, 1, 8)
    with pytest.raises(BackendError, match="'triton' cannot run: triton cannot be imported"):
        ragged_attention(q, kv, 1.0, backend="triton")
    for _ in range(3):
        assert api._available_backend("auto", torch.device("cuda"), torch.float64, 8, 8) == "loop"
    assert [record.args[0] for record in caplog.records] == ["triton"]
    assert api._available_backend("auto", torch.device("cpu"), torch.float64, 8, 8) == "loop"
    assert len(caplog.records) == 1
    api._available_backend.cache_clear()


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
    monkeypatch.setattr(api, "_available_backend", lambda *_: name)
    kv = pool_of([[7, 12]], 3, 8, 8, torch.float32)
    q = torch.ones(1, 2, 1, 8, requires_grad=True)
    assert api._select_backend("auto", q.detach(), kv) == name
    assert api._select_backend("auto", q, kv) == "loop"
    with pytest.raises(BackendError, match="it gives no gradients"):
        api._select_backend(name, q, kv)
    with torch.no_grad():
        assert api._select_backend("auto", q, kv) == name
