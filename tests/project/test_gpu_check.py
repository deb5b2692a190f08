"""`make gpu-check` as far as it goes without a GPU: what it runs, in which order, and what it does with failures."""

import json
import runpy
import sys
from types import ModuleType

import pytest
import torch
from transformers import DynamicCache
from transformers.cache_utils import StaticLayer

from dev import gpu_check
from experiments import gpu_steps, static_cache
from lkv.hf.attention import patch_attention
from tests.conftest import tiny_llama

# In older versions of transformers the model gives the position to the cache; the benchmark sets it in the cache.
sets_position = pytest.mark.skipif(
    not hasattr(StaticLayer(1), "cumulative_length"), reason="needs a static cache that counts its tokens"
)


def checked(tmp_path, statuses, sanitizer=None):
    """The exit status, and the commands run, where they end with `statuses` in turn."""
    left, commands = list(statuses), []

    def run(command, limit):
        commands.append((command, limit))
        return left.pop(0)

    check = gpu_check.Check("NVIDIA H100 80GB HBM3", "llama-3.1-8b", tmp_path, run, sanitizer)
    return check.run(), commands


def test_all_is_checked_and_then_timed_within_a_quarter_of_an_hour(tmp_path, capsys, monkeypatch):
    status, commands = checked(tmp_path, [0] * 8, "/cuda/compute-sanitizer")
    assert status == 0 and all(limit <= 900 for _, limit in commands)
    tools = [words[words.index("--tool") + 1] for words, _ in commands[:3]]
    assert tools == ["memcheck", "racecheck", "initcheck"] and commands[0][0][0] == "/cuda/compute-sanitizer"
    assert commands[3][0][-len(gpu_check.CHECKS) :] == gpu_check.CHECKS
    folder = tmp_path / "NVIDIA-H100-80GB-HBM3"
    assert folder.is_dir() and all(str(folder) in " ".join(words) for words, _ in commands[4:])
    assert "correct; 4 of 4 measurements" in capsys.readouterr().out
    # The first command takes all of the time: nothing else is begun.
    clock = iter([0.0, 0.0, *[901.0] * 99])
    monkeypatch.setattr(gpu_check.time, "monotonic", lambda: next(clock))
    status, commands = checked(tmp_path, [0])
    assert status == 1 and len(commands) == 1


@pytest.mark.parametrize(("sanitizer", "statuses"), [("/cuda/compute-sanitizer", [0, 9]), (None, [1])])
def test_what_is_wrong_is_not_timed(tmp_path, capsys, sanitizer, statuses):
    status, commands = checked(tmp_path, statuses, sanitizer)
    assert status == 1 and len(commands) == len(statuses)
    assert "nothing was timed" in (out := capsys.readouterr().out)
    assert ("racecheck found something" in out) == bool(sanitizer) != ("is not installed" in out)


def test_a_measurement_that_fails_keeps_no_other_from_being_taken(tmp_path, capsys):
    status, commands = checked(tmp_path, [0, 0, 124, 0, 0])
    assert status == 1 and len(commands) == 5
    assert "3 of 4" in (out := capsys.readouterr().out) and "experiments.ragged_attention could not" in out


def test_without_a_gpu_it_says_so(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["gpu_check"])
    with pytest.raises(SystemExit, match="PyTorch sees no CUDA device"):  # a sentence, so that the status is 1
        runpy.run_path(gpu_check.__file__, run_name="__main__")


def flash_attn_with_kvcache(q, k_cache, v_cache, *, cache_seqlens, softmax_scale):
    """As FlashAttention's, by the formula."""
    out = torch.empty_like(q)
    for row, length in enumerate(cache_seqlens.tolist()):
        q_row, k, v = (x[row].transpose(0, 1) for x in (q, k_cache[:, :length], v_cache[:, :length]))
        k, v = (x.repeat_interleave(len(q_row) // len(x), 0) for x in (k, v))
        out[row] = (torch.softmax(q_row @ k.mT * softmax_scale, -1) @ v).transpose(0, 1)
    return out


class BatchDecodeWithPagedKVCacheWrapper:
    """As FlashInfer's."""

    def __init__(self, workspace, layout, *, use_cuda_graph, **buffers):
        assert layout == "HND" and use_cuda_graph and len(buffers) == 3

    def plan(
        self, starts, pages, last, heads, kv_heads, dim, page, *, q_data_type, kv_data_type, sm_scale
    ):  # fmt: skip
        self.lengths, self.scale = (starts.diff() - 1) * page + last, sm_scale
        assert pages.tolist() == list(range(len(last))) and q_data_type == kv_data_type == torch.float32

    def run(self, q, pages):
        k, v = (x.transpose(1, 2) for x in pages)
        return flash_attn_with_kvcache(q[:, None], k, v, cache_seqlens=self.lengths, softmax_scale=self.scale)[:, 0]


@pytest.fixture
def packages(monkeypatch):
    """What FlashAttention-2, FlashAttention-3 and FlashInfer are called by, computed by the formula."""
    for name, member in (
        ("flash_attn", flash_attn_with_kvcache),
        ("flash_attn_interface", flash_attn_with_kvcache),
        ("flashinfer", BatchDecodeWithPagedKVCacheWrapper),
    ):
        module = ModuleType(name)
        setattr(module, member.__name__, member)
        monkeypatch.setitem(sys.modules, name, module)


@sets_position
@torch.no_grad()
def test_the_full_cache_under_every_attention_gives_what_the_model_gives(packages):
    """One step behind 20 tokens, with free slots behind them that hold random numbers."""
    model = tiny_llama(dtype=torch.float32)
    spec = patch_attention(model).spec
    ids, positions = torch.tensor([[5], [7]]), torch.full((2, 1), 20)
    cache = static_cache.static_cache(model, spec, 2, 20, 9)
    full = DynamicCache()
    for index, layer in enumerate(cache.layers):
        full.update(layer.keys[:, :, :20].clone(), layer.values[:, :, :20].clone(), index)
    expected = model(ids, position_ids=positions, past_key_values=full).logits
    for name in static_cache.ATTENTIONS:
        for layer in cache.layers:
            layer.cumulative_length.fill_(20)
        attend = static_cache.attention_by(name, spec, 21, cache.layers[0].keys)
        with static_cache.attention_replaced(model, attend):
            found = model(ids, position_ids=positions, past_key_values=cache).logits
        torch.testing.assert_close(found, expected)


@pytest.mark.slow
@sets_position
def test_steps_of_a_model_are_measured(tmp_path, packages, capsys, monkeypatch):
    """The command that `gpu_check` runs, on a CPU and a tiny shape; one prompt finds no memory."""
    config = tmp_path / "config.json"
    config.write_text(tiny_llama().config.to_json_string())
    words = "--device cpu --dtype float32 --tokens 64 96 --batches 1 2 --train-tokens 40 --repeats 2 --config"
    plain = gpu_steps.prefill_rows

    def prefill_rows(bench, tokens):
        if tokens == 96:
            raise torch.OutOfMemoryError
        return plain(bench, tokens)

    monkeypatch.setattr(gpu_steps, "prefill_rows", prefill_rows)
    gpu_steps.main([*words.split(), str(config), "--out", str(tmp_path / "gpu_steps.json")])
    rows = json.loads((tmp_path / "gpu_steps.json").read_text())["rows"]
    timed = [row for row in rows if "reason" not in row]
    assert all(row["seconds"] > 0 for row in timed)
    for shape in ((64, 1), (64, 2), (96, 1), (96, 2)):
        decoded = {row["attention"]: row["value"] for row in timed if (row["tokens"], row.get("batch")) == shape}
        assert decoded.keys() == {*static_cache.ATTENTIONS, "ragged", "tiers"}
        assert min(decoded[name] for name in static_cache.ATTENTIONS) == pytest.approx(1.0, abs=0.5)
    assert {row["reason"] for row in rows if row.get("launch") == "graphed"} == {
        "LkvError: the model is on 'cpu', but CUDA graphs need a CUDA device."
    }
    assert [row["method"] for row in timed if row["what"] == "prefill"] == ["full", "lkv", "lkv, eviction alone"]
    assert [row["reason"] for row in rows if (row["what"], row["tokens"]) == ("prefill", 96)] == ["out of memory"]
    (training,) = (row for row in timed if row["what"] == "training")
    assert training["peak_bytes"] > 0 and len(capsys.readouterr().out.splitlines()) == len(rows) + 2
