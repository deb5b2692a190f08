"""The compiled attention of the ragged cache on a CPU, over entries and over codes, against the float64 reference."""

import json
import os
import platform
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from lkv.cache.ragged_cache import RaggedCache
from lkv.cache.tiers import _join
from lkv.errors import BackendError
from lkv.kernels import QUANTIZED_BITS
from lkv.kernels.ragged_attention import QuantizedKV, RaggedKV, api, cpp, loop, ragged_attention
from lkv.kernels.ragged_attention.arguments import LEVELS
from lkv.utils import cpp_compiler as build
from tests import dense
from tests.conftest import tiny_llama
from tests.kernels.pools import coded_pools, pool_of
from tests.kernels.test_ragged_attention import Without

if reason := cpp.unsupported_reason(torch.device("cpu"), torch.float32, 64, 64):
    pytest.skip(reason, allow_module_level=True)
pytestmark = pytest.mark.usefixtures("threads")
TOLERANCES = {torch.float32: 3e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3}


def assert_close(ours, expected, dtype, factor=1.0):
    tolerance = TOLERANCES[dtype] * factor
    torch.testing.assert_close(ours, expected, atol=tolerance, rtol=tolerance)


def test_levels_are_those_of_the_other_backends():
    """The constants of the source, by number of bits."""
    source = cpp._SOURCE.read_text()
    for index, name in enumerate(("kSlope", "kCubic")):
        line = re.search(rf"float {name} = B == 8 \? (\S+)f : B == 4 \? (\S+)f : (\S+)f;", source)
        assert [float(x) for x in line.groups()] == [LEVELS[bits][index] for bits in (8, 4, 3)]


@pytest.mark.parametrize("rows", [1, 8, 9])
@pytest.mark.parametrize("dim", [256, 264])
@pytest.mark.parametrize("bits", QUANTIZED_BITS)
def test_every_code_is_its_level(bits, dim, rows):
    """Of k in the log-sum-exp of the one entry there is, of v in the output; expanded in registers, and restored."""
    codes, norm = torch.arange(dim) % 2 ** abs(bits), 0.75
    packed, norms = _join(codes[None].to(torch.uint8), bits), torch.full((1,), norm).bfloat16()
    tables, ones = torch.tensor([[[1]], [[0]]]).int(), torch.ones(1, 1).int()
    tier = QuantizedKV(packed, norms, packed, norms, tables, bits, bits)
    kv = RaggedKV(torch.empty(0, dim), torch.empty(0, dim), -ones, ones, (tier,))
    levels = (norm * dense.levels_of(bits)[codes]).float()
    for channels in torch.arange(dim).split(rows):
        out, lse = ragged_attention(torch.eye(dim)[channels][None, :, None], kv, 1.0, "cpp", lse=True)
        torch.testing.assert_close(lse[0, :, 0], levels[channels], rtol=1e-6, atol=1e-7)
        torch.testing.assert_close(out[0, :, 0], levels.expand(len(channels), -1), rtol=1e-6, atol=0)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("dtype", TOLERANCES)
def test_nan_and_infinity_stay_in_their_head(bad, dtype):
    torch.manual_seed(3)
    kv = pool_of([[90, 90]], 2, 16, 16, dtype)
    kv.v_pool[181] = bad
    q = torch.randn(1, 2, 1, 16).to(dtype)
    out = ragged_attention(q, kv, 0.3, "cpp")
    expected = ragged_attention(q, kv, 0.3, "reference")
    assert out[0, 0].isfinite().all() and not out[0, 1].isfinite().any()
    torch.testing.assert_close(out[0, 1], expected[0, 1], equal_nan=True)
    kv.k_pool[:] = torch.nan
    assert ragged_attention(q, kv, 0.3, "cpp").isnan().all()


def test_scores_of_minus_infinity_have_no_weight():
    torch.manual_seed(3)
    kv = pool_of([[150]], 2, 16, 16, torch.float32)
    kv.k_pool[:100, 0] = -torch.inf
    q = torch.randn(1, 3, 1, 16)
    q[..., 0] = 1.0
    out, lse = ragged_attention(q, kv, 0.3, "cpp", lse=True)
    expected, expected_lse = ragged_attention(q, kv, 0.3, "reference", lse=True)
    assert_close(out, expected, torch.float32)
    torch.testing.assert_close(lse.double(), expected_lse, atol=1e-5, rtol=1e-5)


def test_concurrent_calls(threads):
    threads(2)

    def ask(seed):
        generator = torch.Generator().manual_seed(seed)
        k, v = (torch.randn(1900, 32, generator=generator) for _ in "kv")
        starts, lens = (torch.tensor([row], dtype=torch.int32) for row in ([0, 500], [480 - seed, 300 + seed]))
        q = torch.randn(1, 6, 1, 32, generator=generator)
        kv = RaggedKV(k, v, starts, lens)
        expected = ragged_attention(q, kv, 0.2, "reference")
        torch.set_num_threads(2)
        for _ in range(20):
            torch.testing.assert_close(ragged_attention(q, kv, 0.2, "cpp"), expected, atol=3e-6, rtol=0)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(ask, range(8)))


def arguments(dim=16, tokens=1, dtype=torch.float32):
    return torch.randn(1, 4, tokens, dim).to(dtype), pool_of([[8 + tokens, 9 + tokens]], 2, dim, dim, dtype)


def test_auto_takes_it_where_it_can_run_and_is_faster():
    def chosen(q, kv, new=()):
        return api._select_backend("auto", q, kv, *new)

    for able in ((16, 1, torch.float32), (16, 4, torch.float32), (16, 1, torch.bfloat16), (7, 1, torch.float16)):
        assert chosen(*arguments(*able)) == "cpp"
    assert chosen(*arguments(dtype=torch.float64)) == chosen(*arguments(tokens=40)) == "loop"
    q, kv = arguments()
    assert chosen(q, kv._replace(starts=kv.starts.long())) == "loop"
    assert chosen(q, kv._replace(k_pool=kv.k_pool.t().contiguous().t())) == "loop"
    assert chosen(q, kv, new=[torch.ones(1, requires_grad=True)]) == "loop"
    assert chosen(q.requires_grad_(), kv) == "loop"
    with torch.no_grad():
        assert chosen(q, kv) == "cpp"


@pytest.fixture
def uncached():
    """Without what is known of the compiler, before and after the test."""
    for cached in (api._available_backend, cpp._load):
        cached.cache_clear()
    yield
    for cached in (api._available_backend, cpp._load):
        cached.cache_clear()


def test_without_a_compiler_auto_takes_the_loop_and_warns_once(uncached, monkeypatch, caplog, tmp_path):
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    monkeypatch.setattr(build, "find_compiler", lambda: None)
    q, pools = arguments()
    calls, attend = [], loop.attend
    monkeypatch.setattr(loop, "attend", lambda *args: calls.append(args) or attend(*args))
    for _ in range(2):
        ragged_attention(q, pools, 1.0)
    assert len(calls) == 2 and [record.levelname for record in caplog.records] == ["WARNING"]
    with pytest.raises(BackendError, match=r"'cpp' cannot run: there is no C\+\+ compiler .* install one"):
        ragged_attention(q, pools, 1.0, "cpp")


def test_a_failing_compiler_is_named(monkeypatch, tmp_path):
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    source = tmp_path / "broken.cpp"
    source.write_text("int main( {}")
    with pytest.raises(RuntimeError, match=r"fails: .*error"):
        build.build_library(source)
    assert list((tmp_path / "lkv").iterdir()) == []


def test_a_library_is_on_the_disk_before_it_has_its_name(monkeypatch, tmp_path):
    source, order = tmp_path / "small.cpp", []
    source.write_text('extern "C" int answer() { return 42; }')
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "kept"))
    monkeypatch.setattr(os, "fsync", lambda handle: order.append(os.fstat(handle).st_size))
    replace = os.replace
    monkeypatch.setattr(os, "replace", lambda *paths: order.append("named") or replace(*paths))
    library = build.build_library(source)
    assert order == [library.stat().st_size, "named"]
    assert library.stat().st_mode & 0o777 == 0o755  # whoever shares the folder loads it


def test_a_library_is_compiled_once_and_again_where_damaged(monkeypatch, tmp_path):
    source = tmp_path / "small.cpp"
    source.write_text('extern "C" int answer() { return 42; }')
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "kept"))
    first = build.build_library(source)
    monkeypatch.setattr(subprocess, "run", None)
    assert build.build_library(source) == first and first.parent == tmp_path / "kept" / "lkv"
    monkeypatch.undo()
    first.write_bytes(b"")
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "kept"))
    assert build.build_library(source, rebuild=True).stat().st_size > 0
    # A folder that cannot be made: a temporary one.
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(source))
    assert build.build_library(source).exists()


def test_by_name_it_raises_with_the_reason():
    def assert_refused(reason, q, pools):
        with pytest.raises(BackendError, match=f"'cpp' cannot run: .*{reason}"):
            ragged_attention(q, pools, 1.0, "cpp")

    assert_refused("takes float32, bfloat16 and float16", *arguments(dtype=torch.float64))
    q, kv = arguments()
    assert_refused("contiguous", q, kv._replace(k_pool=kv.k_pool.t().contiguous().t()))
    assert_refused("int32, not torch.int64", q, kv._replace(starts=kv.starts.long()))
    assert_refused("no_grad", q.requires_grad_(), kv)
    assert "on 'cuda'" in cpp.unsupported_reason(torch.device("cuda"), torch.float32, 64, 64)


@torch.no_grad()
def test_a_cache_decodes_as_with_the_loop(monkeypatch):
    torch.manual_seed(0)
    model, ids, calls = tiny_llama(dtype=torch.float32, head_dim=16), torch.arange(3, 90)[None] % 67, []
    run = cpp.append_and_attend
    monkeypatch.setattr(cpp, "append_and_attend", lambda *args: calls.append(1) or run(*args))

    def logits():
        api._available_backend.cache_clear()
        cache = RaggedCache(model, method="knorm", retention=0.4)
        model(ids, past_key_values=cache)
        steps = [model(torch.tensor([[5 + step]]), past_key_values=cache).logits for step in range(40)]
        return torch.stack(steps).double()

    ours = logits()
    # Slack runs out on the way; appending is part of the step.
    assert len(calls) == 40 * model.config.num_hidden_layers
    monkeypatch.setattr(api, "_module", Without("cpp"))
    of_loop = logits()
    model.double()
    expected = logits()
    torch.testing.assert_close(ours, expected, atol=3e-5, rtol=0)
    # Two ways of rounding, neither of them farther off.
    assert (ours - expected).square().mean() < 2 * (of_loop - expected).square().mean()
    api._available_backend.cache_clear()


def test_codes_that_it_cannot_read_are_named():
    pools = coded_pools([[[8]], [[1]]], ((8, 8),), 1, 16, 16, torch.float32)
    (tier,), q = pools.kv.quantized, torch.zeros(1, 1, 1, 16)
    transposed = tier._replace(key_codes=tier.key_codes.t().contiguous().t())
    with pytest.raises(BackendError, match="contiguous"):
        ragged_attention(q, pools.kv._replace(quantized=[transposed]), 1.0, "cpp")
    for part, change in ((0, 3), (0, -200), (1, 3), (1, -3)):
        tables = tier.tables.clone()
        tables[part] += change
        with pytest.raises(ValueError, match="reaches beyond the pools or codes"):
            ragged_attention(q, pools.kv._replace(quantized=[tier._replace(tables=tables)]), 1.0, "cpp")


@pytest.mark.slow
@pytest.mark.skipif(platform.machine() != "x86_64", reason="names a processor of that kind")
def test_processors_without_avx512_compute_the_same():
    path = Path(__file__).with_name("test_ragged_attention.py")
    words = ["-m", "pytest", "-q", "-p", "no:cacheprovider", str(path), "-k", "cpp"]
    older = os.environ | {"ATEN_CPU_CAPABILITY": "avx2"}
    done = subprocess.run([sys.executable, *words], env=older, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout[-2000:]


# Widths of k and v: of an entry of 64 channels with three query heads, softmax included.
INSTRUCTIONS = {
    "avx512": {"8/8": 130, "8/4": 115, "4/4": 90, "4/3": 86, "3/3": 104},
    "avx2": {"8/8": 281, "8/4": 248, "4/4": 228, "4/3": 213, "3/3": 223},
}


@pytest.mark.slow
@pytest.mark.skipif(platform.machine() != "x86_64", reason="counts instructions of that kind")
@pytest.mark.parametrize("capability", INSTRUCTIONS)
def test_instructions_of_an_entry_over_codes(capability):
    if capability == "avx512" and torch.backends.cpu.get_cpu_capability() != "AVX512":
        pytest.skip("this processor has no AVX-512")
    words = [sys.executable, "-m", "tests.kernels.cpu_instructions"]
    environment = os.environ | {"ATEN_CPU_CAPABILITY": capability}
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=600, check=False)
    if "ptrace is not permitted" in done.stderr:
        pytest.skip("ptrace is not permitted")
    counts = json.loads(done.stdout)
    assert counts.keys() == INSTRUCTIONS[capability].keys()
    assert {width: n for width, n in counts.items() if n > INSTRUCTIONS[capability][width]} == {}


def test_a_compiler_that_is_no_command_is_passed_over(monkeypatch):
    usual = build.find_compiler()
    monkeypatch.setenv("CXX", '"')
    assert build.find_compiler() == usual
