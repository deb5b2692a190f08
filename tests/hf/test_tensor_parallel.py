"""transformers' own tensor parallelism: two processes over loopback against one."""

import inspect
import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers.distributed import DistributedConfig

from lkv.cache.ragged_cache import RaggedCache
from lkv.errors import UnsupportedModelError
from lkv.hf.spec import inspect_model, local_kv_heads
from lkv.policy.policy import Policy
from tests.conftest import tiny_llama

SECONDS = 120
# One process of the group. Its collectives give up before the test does, so that a lost partner hangs nothing.
WORKER = """
import sys, traceback
from datetime import timedelta
from pathlib import Path
import torch
import torch.distributed as dist

folder, rank = Path(sys.argv[1]), int(sys.argv[2])
found = {}

def stock():
    from transformers import AutoModelForCausalLM
    from transformers.distributed import DistributedConfig
    model = AutoModelForCausalLM.from_pretrained(folder, distributed_config=DistributedConfig(tp_plan="auto")).eval()
    text = torch.load(folder / "text.pt")
    out = model(text)
    found["logits"] = out.logits
    found["keys"] = [layer.keys for layer in out.past_key_values.layers]
    found["text"] = model.generate(text, max_new_tokens=8, do_sample=False)
    return model

with torch.no_grad():
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/group", rank=rank, world_size=2, timeout=timedelta(seconds=60)
    )
    try:
        model = stock()
    except Exception:
        found["stock failed"] = traceback.format_exc()
    else:
        from lkv.hf.attention import patch_attention
        from lkv.hf.spec import inspect_model, local_kv_heads
        found["spec"], found["heads"] = inspect_model(model), local_kv_heads(model)
        patch_attention(model)
        text = torch.load(folder / "text.pt")
        found["attached"] = model(text).logits
        from lkv.cache.ragged_cache import RaggedCache
        from lkv.policy.policy import Policy
        cache = RaggedCache(model, policy=Policy.from_pretrained(folder / "policy"), retention=0.4)
        model(text[:, :30], past_key_values=cache, use_cache=True)
        found["kept"], found["bytes"] = cache.kept_counts(), cache.nbytes()
        found["compressed"] = model(text[:, 30:], past_key_values=cache, use_cache=True).logits
    torch.save(found, folder / f"found{rank}.pt")
    dist.destroy_process_group()
"""


def two_processes(folder: Path) -> list[dict]:
    """What each of the two processes found."""
    env = os.environ | {"WORLD_SIZE": "2", "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    root = str(Path(__file__).parents[2])
    logs = [folder / f"log{rank}" for rank in range(2)]
    processes = []
    try:
        for rank, log in enumerate(logs):
            own = env | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            with log.open("w") as out:
                command = [sys.executable, "-c", WORKER, str(folder), str(rank)]
                processes.append(subprocess.Popen(command, cwd=root, env=own, stdout=out, stderr=out))
        end = time.monotonic() + SECONDS
        codes = [process.wait(max(0.0, end - time.monotonic())) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    assert codes == [0, 0], "\n".join(log.read_text() for log in logs)
    found = [torch.load(folder / f"found{rank}.pt", weights_only=False) for rank in range(2)]
    for each in found:
        assert "stock failed" not in each, f"transformers' own tensor parallelism: {each['stock failed']}"
    return found


_TIED = pytest.param({"num_key_value_heads": 4, "tie_word_embeddings": True}, marks=pytest.mark.slow, id="tied")


@pytest.mark.slow
@pytest.mark.skipif(
    "tp_plan" not in inspect.signature(DistributedConfig).parameters,
    reason="this version of transformers takes no plan of tensor parallelism in DistributedConfig",
)
@pytest.mark.parametrize("changes", [{}, _TIED])
def test_each_process_has_its_share_of_the_heads_and_the_spec_of_the_whole_model(tmp_path, changes):
    model = tiny_llama(vocab_size=68, **changes)
    model.save_pretrained(tmp_path)
    policy = Policy(inspect_model(model))
    torch.nn.init.normal_(policy.heads.embeddings, std=20.0)
    policy.save_pretrained(tmp_path / "policy")
    text = torch.randint(3, 67, (2, 40), generator=torch.Generator().manual_seed(0))
    torch.save(text, tmp_path / "text.pt")
    with torch.no_grad():
        expected = model(text)
        generated = model.generate(text, max_new_tokens=8, do_sample=False)
        cache = RaggedCache(model, policy=policy, retention=0.4)
        model(text[:, :30], past_key_values=cache, use_cache=True)
        kept, size = torch.tensor(cache.kept_counts()), cache.nbytes()
        compressed = model(text[:, 30:], past_key_values=cache, use_cache=True).logits
    assert len(set(kept.flatten().tolist())) > 2

    found_bytes = 0
    for rank, found in enumerate(two_processes(tmp_path)):
        torch.testing.assert_close(found["logits"], expected.logits, atol=1e-12, rtol=1e-12)
        assert torch.equal(found["text"], generated)
        half = model.config.num_key_value_heads // 2
        assert found["heads"] == slice(rank * half, (rank + 1) * half)
        for mine, whole in zip(found["keys"], expected.past_key_values.layers, strict=True):
            torch.testing.assert_close(mine, whole.keys[:, found["heads"]], atol=1e-12, rtol=1e-12)
        assert found["spec"] == inspect_model(model)
        assert torch.equal(found["attached"], found["logits"])
        # Each process evicts its own heads, as they are evicted in one process.
        assert found["kept"] == kept[:, found["heads"]].tolist()
        torch.testing.assert_close(found["compressed"], compressed, atol=1e-12, rtol=1e-12)
        found_bytes += found["bytes"]
    assert found_bytes == size


def split(kv_heads: int, size: int, rank: int = 0, tp_size: int | None = None, style: str = "colwise"):
    text = SimpleNamespace(num_key_value_heads=kv_heads)
    return SimpleNamespace(
        config=SimpleNamespace(get_text_config=lambda decoder: text),
        tp_plan={"model.layers.*.self_attn.k_proj": style, "model.layers.*.mlp.up_proj": "colwise"},
        tp_size=tp_size or size,
        _device_mesh=SimpleNamespace(ndim=1, size=lambda: size, get_local_rank=lambda: rank),
    )


def test_shares_in_order_of_rank(model):
    shares = [local_kv_heads(split(8, 4, rank)) for rank in range(4)]
    assert shares == [slice(0, 2), slice(2, 4), slice(4, 6), slice(6, 8)]
    # One process alone, and a plan that gathers k and v again, have all heads.
    assert local_kv_heads(model) == slice(0, 2)
    assert local_kv_heads(split(8, 2, 1, style="colwise_gather_output")) == slice(0, 8)


@pytest.mark.parametrize(("model", "message"), [(split(3, 2), "divides 3"), (split(4, 4, tp_size=2), "alone")])
def test_other_splits_are_refused(model, message):
    with pytest.raises(UnsupportedModelError, match=message):
        local_kv_heads(model)
