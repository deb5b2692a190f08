"""The compiled attention of the ragged cache on a CPU against the float64 reference."""

import logging
import os
import platform
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lkv.cache.ragged_cache import RaggedCache
from lkv.errors import BackendError
from lkv.kernels.ragged_attention import api, append_and_attend, loop, ragged_attention
from tests.conftest import tiny_llama
from tests.kernels.pools import pool_of
from tests.kernels.test_ragged_attention import Without

pytest.importorskip("numba")
from lkv.kernels.ragged_attention import numba as compiled
from lkv.kernels.ragged_attention import numba_kernels as kernels

if reason := compiled.refusal(torch.device("cpu"), torch.float32, 64, 64):
    pytest.skip(reason, allow_module_level=True)
TOLERANCES = {torch.float32: 3e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3}


@pytest.fixture
def threads():
    """Sets PyTorch's number of threads, and shares out whatever is there among them."""
    before = torch.get_num_threads()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compiled, "_LEAST_SHARED", 0)
        yield torch.set_num_threads
    torch.set_num_threads(before)


def close(ours, exact, dtype, factor=1.0):
    tolerance = TOLERANCES[dtype] * factor
    torch.testing.assert_close(ours, exact, atol=tolerance, rtol=tolerance)


@settings(max_examples=30, deadline=None)
@given(
    st.lists(st.lists(st.integers(0, 200), min_size=2, max_size=2), min_size=1, max_size=3),
    st.integers(1, 3), st.integers(1, 5), st.booleans(), st.sampled_from([(16, 16), (48, 32), (64, 128)]),
    st.sampled_from(list(TOLERANCES)), st.integers(1, 2), st.floats(0.01, 5),
)  # fmt: skip
def test_equals_reference(held, groups, tokens, causal, dims, dtype, count, scale):
    """Empty spans, several new tokens, both sizes of heads, slices that end anywhere, large scores."""
    torch.manual_seed(1)
    lengths = [[length + tokens if causal else length for length in row] for row in held]
    k, v, starts, lens = pool_of(lengths, 3, *dims, dtype)
    q = torch.randn(len(held), 2 * groups, tokens, dims[0]).to(dtype)
    before = torch.get_num_threads()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compiled, "_LEAST_SHARED", 0)
        torch.set_num_threads(count)
        out, lse = ragged_attention(q, k, v, starts, lens, scale, "numba", causal=causal, lse=True)
    torch.set_num_threads(before)
    exact, exact_lse = ragged_attention(q, k, v, starts, lens, scale, "reference", causal=causal, lse=True)
    empty = lens.repeat_interleave(groups, 1) == 0
    assert out.dtype == dtype and (out[empty] == 0).all() and (lse[empty] == -torch.inf).all()
    # What float32 leaves off a score counts in its exponential.
    close(out, torch.nan_to_num(exact, nan=0.0), dtype, max(1.0, scale * dims[0] ** 0.5))
    torch.testing.assert_close(lse.double(), exact_lse, atol=2e-5, rtol=3e-6)
    assert lens.tolist() == lengths


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("tokens", [1, 3])
@pytest.mark.parametrize("count", [1, 2])
def test_extend_appends_and_attends_as_the_loop_does(dtype, tokens, count, threads):
    threads(count)
    torch.manual_seed(2)
    pools = pool_of([[70, 0], [1, 300]], 4 * tokens, 32, 16, dtype)
    others = [x.clone() for x in pools]
    for _ in range(4):
        # As models give them: heads behind tokens.
        q, key = (torch.randn(2, tokens, heads, 32).to(dtype).transpose(1, 2) for heads in (6, 2))
        value = torch.randn(2, tokens, 2, 16).to(dtype).transpose(1, 2)
        ours = append_and_attend(q, key, value, *pools, 0.2, "numba")
        loops = append_and_attend(q, key, value, *others, 0.2, "loop")
        close(ours, loops, dtype)
        close(ours, ragged_attention(q, *pools, 0.2, "reference"), dtype)
    for pool, other in zip(pools, others, strict=True):
        torch.testing.assert_close(pool, other, rtol=0, atol=0, equal_nan=True)
    assert pools[3].tolist() == [[70 + 4 * tokens, 4 * tokens], [1 + 4 * tokens, 300 + 4 * tokens]]


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("dtype", TOLERANCES)
def test_what_is_no_number_stays_none(bad, dtype):
    """In the head that holds it, and in no other."""
    torch.manual_seed(3)
    k, v, starts, lens = pool_of([[90, 90]], 2, 16, 16, dtype)
    v[100] = bad
    q = torch.randn(1, 2, 1, 16).to(dtype)
    out = ragged_attention(q, k, v, starts, lens, 0.3, "numba")
    exact = ragged_attention(q, k, v, starts, lens, 0.3, "reference")
    assert out[0, 0].isfinite().all() and not out[0, 1].isfinite().any()
    torch.testing.assert_close(out[0, 1], exact[0, 1], equal_nan=True)
    k[:] = torch.nan
    assert ragged_attention(q, k, v, starts, lens, 0.3, "numba").isnan().all()


def test_scores_of_minus_infinity_have_no_weight():
    torch.manual_seed(3)
    k, v, starts, lens = pool_of([[150]], 2, 16, 16, torch.float32)
    k[:100, 0] = -torch.inf
    q = torch.randn(1, 3, 1, 16)
    q[..., 0] = 1.0
    out, lse = ragged_attention(q, k, v, starts, lens, 0.3, "numba", lse=True)
    exact, exact_lse = ragged_attention(q, k, v, starts, lens, 0.3, "reference", lse=True)
    close(out, exact, torch.float32)
    torch.testing.assert_close(lse.double(), exact_lse, atol=1e-5, rtol=1e-5)


def test_powers_of_two_are_as_exact_as_they_say():
    import numba
    import numpy as np

    @numba.vectorize
    def powers(x):
        return kernels.exp2(x)

    x = np.concatenate([np.linspace(-126, 0, 20001), -np.logspace(-9, 0, 999)]).astype(np.float32)
    exact = np.exp2(x.astype(np.float64))
    assert np.abs(powers(x) / exact - 1).max() < 3e-7
    assert powers(np.float32(-np.inf)) == powers(np.float32(-500)) == 2.0**-126
    with np.errstate(invalid="ignore"):
        assert np.isnan(powers(np.float32(np.nan))) and powers(np.float32(0)) == 1


def test_threads_that_ask_at_once_are_answered_each_its_own(threads):
    threads(2)

    def ask(seed):
        generator = torch.Generator().manual_seed(seed)
        k, v = (torch.randn(900, 32, generator=generator) for _ in "kv")
        starts, lens = (torch.tensor([row], dtype=torch.int32) for row in ([0, 500], [480 - seed, 300 + seed]))
        q = torch.randn(1, 6, 1, 32, generator=generator)
        exact = ragged_attention(q, k, v, starts, lens, 0.2, "reference")
        torch.set_num_threads(2)
        return max((ragged_attention(q, k, v, starts, lens, 0.2, "numba") - exact).abs().max() for _ in range(20))

    with ThreadPoolExecutor(4) as pool:
        assert max(pool.map(ask, range(8))) < 3e-6


def test_threads_are_as_many_as_pytorch_has(monkeypatch):
    asked, parallel, before = [], compiled._parallel(), torch.get_num_threads()

    def counted(function, argument, threads, flags):
        asked.append(threads)
        parallel(function, argument, threads, flags)

    monkeypatch.setattr(compiled, "_parallel", lambda: counted)
    for length in (100, 2000):
        k, v, starts, lens = pool_of([[length]], 2, 64, 64, torch.float32)
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            ragged_attention(torch.randn(1, 4, 1, 64), k, v, starts, lens, 0.2, "numba")
    torch.set_num_threads(before)
    # Neither one thread nor a short span is shared out.
    assert asked == [2, 3]


def arguments(dim=16, tokens=1, dtype=torch.float32):
    return torch.randn(1, 4, tokens, dim).to(dtype), *pool_of([[8 + tokens, 9 + tokens]], 2, dim, dim, dtype)


def test_auto_takes_it_where_it_can_run_and_is_faster():
    def chosen(q, *tensors):
        return api._backend_for("auto", *tensors, q)

    assert chosen(*arguments()) == chosen(*arguments(tokens=4)) == chosen(*arguments(dtype=torch.bfloat16)) == "numba"
    assert chosen(*arguments(dim=kernels.LANES // 2)) == chosen(*arguments(dtype=torch.float64)) == "loop"
    assert chosen(*arguments(tokens=40)) == "loop"
    q, k, v, starts, lens = arguments()
    assert chosen(q, k, v, starts.long(), lens) == "loop"
    assert chosen(q, k.t().contiguous().t(), v, starts, lens) == "loop"
    assert chosen(q, k.to("meta"), v, starts, lens) == "loop"
    assert api._backend_for("auto", k, v, starts, lens, q, torch.ones(1, requires_grad=True)) == "loop"
    assert chosen(q.requires_grad_(), k, v, starts, lens) == "loop"
    with torch.no_grad():
        assert chosen(q, k, v, starts, lens) == "numba"


def test_without_numba_auto_takes_the_loop_and_says_nothing(monkeypatch, caplog):
    monkeypatch.setattr(api, "_module", Without("numba"))
    api._chosen.cache_clear()
    q, *pools = arguments()
    calls = []
    monkeypatch.setattr(loop, "attend", lambda *given: calls.append(given) or torch.zeros(1))
    ragged_attention(q, *pools, 1.0)
    assert len(calls) == 1 and not caplog.records
    with pytest.raises(BackendError, match="'numba' cannot run: numba cannot be imported"):
        ragged_attention(q, *pools, 1.0, "numba")
    api._chosen.cache_clear()


def test_by_name_it_says_what_it_lacks():
    def refused(says, q, *pools):
        with pytest.raises(BackendError, match=f"'numba' cannot run: .*{says}"):
            ragged_attention(q, *pools, 1.0, "numba")

    refused("takes float32, bfloat16 and float16", *arguments(dtype=torch.float64))
    refused(f"takes multiples of {kernels.LANES}", *arguments(dim=12))
    q, k, v, starts, lens = arguments()
    refused("contiguous", q, k.t().contiguous().t(), v, starts, lens)
    refused("int32, not torch.int64", q, k, v, starts.long(), lens)
    refused("no_grad", q.requires_grad_(), k, v, starts, lens)
    assert "on 'cuda'" in compiled.refusal(torch.device("cuda"), torch.float32, 64, 64)


def test_what_does_not_fit_the_pools_is_refused_and_counts_nothing():
    q, k, v, starts, lens = arguments()
    for wrong in (starts - 1, starts + 4):
        with pytest.raises(ValueError, match="reach beyond the pools"):
            ragged_attention(q, k, v, wrong, lens, 1.0, "numba")
    for wrong in ([[20, -3]], [[-1, 0]]):
        with pytest.raises(ValueError, match="reach beyond the pools"):
            ragged_attention(q, k, v, starts, torch.tensor(wrong, dtype=torch.int32), 1.0, "numba")
    key = torch.randn(1, 2, 3, 16)
    with pytest.raises(ValueError, match="reach beyond the pools"):
        append_and_attend(q.expand(-1, -1, 3, -1), key, key, k, v, starts, lens, 1.0, "numba")
    assert lens.tolist() == [[9, 10]]
    with pytest.raises(ValueError, match="do not fit the pools"):
        append_and_attend(q, key.half(), key.half(), k, v, starts, lens, 1.0, "numba")
    with pytest.raises(ValueError, match="do not fit the pools"):
        append_and_attend(q, key[:, :1], key, k, v, starts, lens, 1.0, "numba")


def test_no_compiler_no_threads_no_folder(monkeypatch, caplog):
    def refusal():
        return compiled.refusal(torch.device("cpu"), torch.float32, 64, 64)

    def failing():
        raise RuntimeError("LLVM knows no such machine\nin detail")

    asked = []

    def cfunc(signature, cache=False):
        asked.append(cache)
        if cache:
            raise RuntimeError("cannot cache function")
        return lambda python: python

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compiled, "_compiled", failing)
        assert refusal() == "numba could not compile (LLVM knows no such machine)."
        patch.setattr(compiled, "_parallel", lambda: None)
        assert "PyTorch's threads cannot be asked here" in refusal()
        patch.setattr(compiled, "cfunc", cfunc)
        assert compiled._function(kernels.join_slices) is kernels.join_slices
    assert asked == [True, False]
    assert refusal() is None
    compiled._compiled.cache_clear()
    with caplog.at_level(logging.INFO):
        for _ in range(3):
            compiled._compiled()
    assert [record.message for record in caplog.records if "compiled" in record.message] == [
        "ragged attention is compiled for this CPU, or read from numba's cache"
    ]


@torch.no_grad()
def test_a_cache_decodes_with_it_as_with_the_loop(monkeypatch):
    torch.manual_seed(0)
    model, ids, steps = tiny_llama(dtype=torch.float32, head_dim=16), torch.arange(3, 90)[None] % 67, []
    run = compiled._run
    monkeypatch.setattr(compiled, "_run", lambda *given: steps.append(given) or run(*given))

    def logits():
        api._chosen.cache_clear()
        cache = RaggedCache(model, method="knorm", retention=0.4)
        model(ids, past_key_values=cache)
        given = [model(torch.tensor([[5 + step]]), past_key_values=cache).logits for step in range(40)]
        return torch.stack(given).double()

    ours = logits()
    # Slack runs out on the way; appending is part of the step.
    assert len(steps) == 40 * model.config.num_hidden_layers
    monkeypatch.setattr(api, "_module", Without("numba"))
    loop = logits()
    model.double()
    exact = logits()  # numba compiles nothing for it
    assert len(steps) == 40 * model.config.num_hidden_layers
    torch.testing.assert_close(ours, exact, atol=3e-5, rtol=0)
    # Two ways of rounding, neither of them farther off.
    assert (ours - exact).square().mean() < 2 * (loop - exact).square().mean()
    api._chosen.cache_clear()


@pytest.mark.skipif(platform.machine() != "x86_64", reason="names a processor of that kind")
def test_processors_without_avx512_compute_the_same(tmp_path):
    words = ["-m", "pytest", "-q", "-p", "no:cacheprovider", __file__, "-k", "not avx512"]
    older = os.environ | {"NUMBA_CPU_NAME": "haswell", "NUMBA_CACHE_DIR": str(tmp_path)}
    done = subprocess.run([sys.executable, *words], env=older, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout[-2000:]
