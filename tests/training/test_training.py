"""Training: the paper's schedule, teacher and student against the stock model and the cache, exact resume."""

import json
import math
import os
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from torch.nn.functional import kl_div
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from lkv.cache.ragged_cache import RaggedCache
from lkv.errors import DataError, TrainingError
from lkv.hf.attention import patch_attention
from lkv.hf.spec import inspect_model
from lkv.kernels.soft_topk import soft_topk
from lkv.policy.policy import Policy
from lkv.training.config import PRESETS, TrainingConfig, schedule
from lkv.training.data.samples import TokenizedSample
from lkv.training.datasets import require_samples
from lkv.training.distillation import SampleDistillation, gumbel, hard_mask, soft_mask
from lkv.training.train_policy import Trainer
from lkv.training.warm_start import CALIBRATION_SAMPLES
from tests.conftest import tiny_llama

CONFIG = TrainingConfig(
    steps=6, batch=2, warmup=2, checkpoint_every=2, evaluate_every=3, tau_end=0.05, min_tokens=30, max_tokens=40
)


def sample(number: int, tokens: int = 30) -> TokenizedSample:
    generator = torch.Generator().manual_seed(number)
    draw = lambda count: torch.randint(3, 67, (count,), generator=generator).tolist()  # noqa: E731
    return TokenizedSample("random", draw(tokens), [(draw(9), 4), (draw(6), 0)])


def trainer(folder, config=CONFIG, samples=sample, **kwargs):
    model = tiny_llama(dtype=torch.float32)
    torch.manual_seed(1)
    policy = Policy(inspect_model(model))
    return Trainer(model, policy, config, samples, [sample(1000)], folder, **kwargs), policy


class KilledError(Exception):
    """In place of a signal that no program can catch."""


def train_for(run, steps):
    """`run.run()`, killed after so many steps: what they saved stays, and nothing more is saved."""
    update, taken = run._loop.update, []

    def counted(now):
        if len(taken) == steps:
            raise KilledError
        taken.append(1)
        return update(now)

    run._loop.update = counted
    with pytest.raises(KilledError):
        run.run()


def test_schedule_is_the_papers():
    """App. C.3: warm-up over 20 steps, linear decay 1e-3 to 1e-4, exponential tau and R."""
    paper = PRESETS["paper"]
    assert (paper.steps, paper.batch, paper.beta, paper.max_grad_norm) == (1000, 64, 0.5, 1.0)
    assert schedule(paper, 0).lr == pytest.approx(1e-3 / 20)
    assert schedule(paper, 20).lr == pytest.approx(1e-3)
    assert schedule(paper, 1000).lr == pytest.approx(1e-4)
    assert schedule(paper, 0).tau == 1.0 and schedule(paper, 0).retention == 0.5
    assert schedule(paper, 500).tau == pytest.approx(math.sqrt(0.001))
    assert schedule(paper, 500).retention == pytest.approx(math.sqrt(0.5 * 0.15))
    assert schedule(paper, 1000).tau == pytest.approx(0.001)
    assert schedule(paper, 1000).retention == pytest.approx(0.15)


def test_gumbel_noise_has_its_moments():
    noise = gumbel((200_000,), torch.Generator().manual_seed(0))
    assert float(noise.mean()) == pytest.approx(0.5772, abs=0.01)
    assert float(noise.var()) == pytest.approx(math.pi**2 / 6, rel=0.02)


def test_teacher_equals_the_stock_model(model):
    item = sample(3)
    expected = [
        torch.log_softmax(model(torch.tensor([item.context + ids])).logits[0, 30 + max(0, skip - 1) : -1].float(), -1)
        for ids, skip in item.continuations
    ]
    patch_attention(model)
    out = SampleDistillation(model, item).run(None)
    torch.testing.assert_close(out.log_probs, torch.cat(expected))


def test_student_equals_inference_through_the_cache(model, policy):
    """The hard-masked student is the exact twin of what the ragged cache computes (DESIGN: continuation mode)."""
    item = sample(4)
    patch_attention(model)
    run = SampleDistillation(model, item)
    out = run.run(hard_mask(policy, run.scores(policy), 0.3, 2))
    rows = []
    for ids, skip in item.continuations:
        cache = RaggedCache(model, policy=policy, retention=0.3)
        model(torch.tensor([item.context]), past_key_values=cache, use_cache=True)
        logits = model(torch.tensor([ids]), past_key_values=cache, use_cache=True).logits[0]
        rows.append(torch.log_softmax(logits[max(0, skip - 1) : -1].float(), -1))
    torch.testing.assert_close(out.log_probs, torch.cat(rows), atol=1e-6, rtol=1e-6)


def test_the_full_student_masks_every_row(model):
    """Against the stock model with log m of each KV head added to the logits, in float64; the teacher is the same."""
    item = sample(4)
    model.set_attn_implementation("eager")
    log_mask = -torch.rand(2, 2, 30, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 5
    expected = []
    for row, (ids, skip) in enumerate(item.continuations):
        length = 30 + len(ids)
        bias = torch.full((length, length), -math.inf, dtype=torch.float64).triu(1)[None].repeat(4, 1, 1)
        bias[:, :, :30] += log_mask[row].repeat_interleave(2, 0)[:, None]
        logits = model(torch.tensor([item.context + ids]), attention_mask=bias[None]).logits[0]
        expected.append(torch.log_softmax(logits[30 + max(0, skip - 1) : -1].float(), -1))
    model.set_attn_implementation("sdpa")
    patch_attention(model)
    run, half = SampleDistillation(model, item, whole=True), SampleDistillation(model, item)
    torch.testing.assert_close(run.run(None).log_probs, half.run(None).log_probs)
    out = run.run(log_mask.expand(3, -1, -1, -1))
    torch.testing.assert_close(out.log_probs, torch.cat(expected))
    assert out.hidden[0].shape[1] == 30 + 9 and run.row_weights.sum() == pytest.approx(1.0)
    assert not torch.allclose(half.run(log_mask.expand(3, -1, -1, -1)).log_probs, out.log_probs)


def test_the_full_student_learns(tmp_path):
    run, policy = trainer(tmp_path, replace(CONFIG, student="full"))
    before = policy.tokens.output.detach().clone()
    run.run()
    assert not torch.equal(policy.tokens.output, before)
    assert math.isfinite(json.loads((tmp_path / "curve.jsonl").read_text().splitlines()[-1])["train_kl"])


def run_in_two_processes(folder, code):
    """What `code` saves as policy.pt in `folder` when two processes run it on the CPU."""
    folder.mkdir()
    script, root = folder / "script.py", str(Path(__file__).parents[2])
    script.write_text(f"import sys\nsys.path.insert(0, {root!r})\n{code}")
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "ACCELERATE_USE_CPU": "true"}
    done = subprocess.run(launch, env=environment, cwd=root, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-3000:]
    return torch.load(folder / "policy.pt", weights_only=True)


@pytest.mark.slow
def test_two_processes_train_as_one_that_accumulates_twice_as_much(tmp_path):
    """The contexts of a step are shared out; each process adds up the gradients of its own before they are summed."""
    one, policy = trainer(tmp_path / "one")
    one.run()
    code = f"""
import torch
from pathlib import Path
from tests.training.test_training import trainer
run, policy = trainer(Path({str(tmp_path / "two")!r}))
run.run()
if torch.distributed.get_rank() == 0:
    torch.save(policy.state_dict(), {str(tmp_path / "two" / "policy.pt")!r})
"""
    both = run_in_two_processes(tmp_path / "two", code)
    for name, value in policy.state_dict().items():
        torch.testing.assert_close(both[name], value, atol=1e-6, rtol=1e-5)
    curves = [
        [json.loads(line) for line in (tmp_path / name / "curve.jsonl").read_text().splitlines()]
        for name in ("one", "two")
    ]
    assert [row["train_kl"] for row in curves[0]] == pytest.approx([row["train_kl"] for row in curves[1]], abs=2e-5)


def test_losses_are_the_papers_formulas(model):
    item = sample(5)
    patch_attention(model.requires_grad_(False))
    run = SampleDistillation(model, item)
    teacher = run.run(None)
    log_mask = -torch.rand(3, 2, 2, 30, dtype=torch.float64) * 5
    student = run.run(log_mask)
    counts = [5, 5]  # targets: 9 - 4 after a question; 6 - 1 directly after the context
    pointwise = kl_div(student.log_probs, teacher.log_probs, reduction="none", log_target=True)
    rows = torch.split(pointwise.sum(-1), counts)
    means = torch.stack([r.mean() for r in rows])
    torch.testing.assert_close(run.kl(teacher, student), means.mean())
    weight = torch.tensor([0.5, 3.0], dtype=torch.float64)
    torch.testing.assert_close(run.kl(teacher, student, weight), (means * weight).mean())
    scaled = 0.3 * torch.log(1 + means / 0.3)
    torch.testing.assert_close(run.kl(teacher, student, scale=0.3), scaled.mean())
    torch.testing.assert_close(run.kl(teacher, student, weight, scale=0.3), (scaled * weight).mean())
    for norm in ("sum", "mean", "relative"):
        total = 0.0
        for target, own in zip(teacher.hidden, student.hidden, strict=True):
            for row, length in enumerate((9, 6)):
                squared = (target[row, :length] - own[row, :length]).float().norm(dim=-1) ** 2
                scale = {"sum": 1.0, "mean": 32.0, "relative": target[row, :length].float().norm(dim=-1) ** 2}[norm]
                total += float((squared / scale).mean()) / 2 / 3
        assert float(run.hidden_distance(teacher, student, norm)) == pytest.approx(total, rel=1e-5)
    assert 0 <= run.agreement(teacher, student) <= 1


def test_soft_mask_spends_the_budget_of_each_head(model, policy):
    scores = torch.randn(3, 2, 30)
    mask = soft_mask(policy, scores, 0.2, 0.5, torch.randn(4, 3, 2, 30)).exp()
    expected = (policy.ratios(0.2) * 30)[:, None].expand(3, 4, 2)
    torch.testing.assert_close(mask.sum(-1), expected, atol=1e-4, rtol=0)
    assert float(mask.sum()) == pytest.approx(4 * 0.2 * 6 * 30, rel=1e-5)


def rms_norm_in_float64(module, x):
    return module.weight * x * (x.square().mean(-1, keepdim=True) + module.variance_epsilon).rsqrt()


def test_gradients_of_the_whole_loss_against_finite_differences(model, policy):
    """Through soft mask, attention, model and losses, to a budget embedding and a selector weight."""
    patch_attention(model)
    model.requires_grad_(False)
    for module in model.modules():
        # The stock norm rounds to float32, which finite differences would see.
        if isinstance(module, LlamaRMSNorm):
            module.forward = partial(rms_norm_in_float64, module)
    policy = policy.double().requires_grad_(True)
    torch.nn.init.normal_(policy.heads.embeddings, std=1.0)
    run = SampleDistillation(model, sample(6))
    with torch.no_grad():
        teacher = run.run(None)
    noise = gumbel((2, 3, 2, 30), torch.Generator().manual_seed(0)).double()
    kv = torch.stack([torch.cat([layer.key, layer.value], -1)[0] for layer in run.prompt])

    def loss() -> torch.Tensor:
        hidden = torch.einsum("lhtc,lhcd->lhtd", kv, policy.tokens.hidden) + policy.tokens.bias[:, :, None]
        scores = torch.einsum("lhtd,lhd->lht", torch.nn.functional.silu(hidden), policy.tokens.output)
        budgets = policy.ratios(0.3) * 30
        student = run.run(soft_topk(scores + noise, budgets, 0.5).log_mask.transpose(0, 1))
        return sum((a - b).square().mean() for a, b in zip(teacher.hidden, student.hidden, strict=True))

    loss().backward()
    for parameter, place in [
        (policy.heads.embeddings, (1, 0, 3)),
        (policy.tokens.hidden, (0, 1, 2, 4)),
        (policy.tokens.output, (2, 0, 5)),
    ]:
        step = 1e-5
        with torch.no_grad():
            parameter[place] += step
            up = float(loss())
            parameter[place] -= 2 * step
            down = float(loss())
            parameter[place] += step
        slope = float(parameter.grad[place])
        assert slope != 0
        assert slope == pytest.approx((up - down) / (2 * step), rel=1e-5, abs=1e-10)


def test_training_lowers_the_loss_and_changes_the_budgets(tmp_path):
    run, policy = trainer(tmp_path, replace(CONFIG, steps=40, lr=1e-2, evaluate_every=20), lambda _: sample(8))
    before = policy.ratios(0.15).detach().clone()
    run.run()
    curve = [json.loads(line) for line in (tmp_path / "curve.jsonl").read_text().splitlines()]
    assert [row["step"] for row in curve] == [20, 40]
    assert float((policy.ratios(0.15) - before).detach().abs().max()) > 0.02
    untrained = trainer(tmp_path / "other", samples=lambda _: sample(8))[0]
    patch_attention(untrained._model)
    untrained._validation = run._validation = [sample(8)]
    assert run.evaluate()["kl"] < 0.8 * untrained.evaluate()["kl"]


def test_normalisation_is_measured_on_the_training_text(tmp_path):
    run, policy = trainer(tmp_path)
    train_for(run, 1)
    model = tiny_llama(dtype=torch.float32)
    kv = []
    for number in range(CALIBRATION_SAMPLES):
        cache = model(torch.tensor([sample(number).context]), use_cache=True).past_key_values
        kv.append(torch.cat([cache.layers[2].keys, cache.layers[2].values], -1)[0].detach())
    kv = torch.cat(kv, 1)
    torch.testing.assert_close(policy.tokens.mean[2], kv.mean(1), atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(policy.tokens.std[2], kv.std(1, correction=0), atol=1e-4, rtol=1e-3)


def test_resumed_training_is_bit_for_bit_the_same(tmp_path):
    whole, first = trainer(tmp_path / "whole")
    whole.run()
    train_for(trainer(tmp_path / "parts")[0], 3)  # one step beyond the checkpoint, to be repeated
    resumed, second = trainer(tmp_path / "parts")
    resumed.run()
    for name, tensor in first.state_dict().items():
        assert torch.equal(tensor, second.state_dict()[name]), name
    assert (tmp_path / "whole/curve.jsonl").read_text() == (tmp_path / "parts/curve.jsonl").read_text()


def test_nan_in_the_loss_stops_and_keeps_the_checkpoint(tmp_path):
    run, _ = trainer(tmp_path)
    train_for(run, 4)
    before = (tmp_path / "checkpoint.safetensors").read_bytes()
    broken, _ = trainer(tmp_path)
    broken._model.lm_head.weight.data[5] = torch.nan
    with pytest.raises(TrainingError, match=r"the loss is nan at step 4 .* keeps the last good state"):
        broken.run()
    assert (tmp_path / "checkpoint.safetensors").read_bytes() == before


def test_samples_without_continuations_are_named():
    with pytest.raises(DataError, match="no sample has a continuation"):
        require_samples([TokenizedSample("x", [1, 2], [])])
