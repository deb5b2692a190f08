"""Contexts that share passes, models over several devices, weights shared out over processes: the same training."""

import copy
import threading
from dataclasses import replace

import pytest
import torch

from lkv.errors import TrainingError
from lkv.hf.attention import patch_attention
from lkv.hf.loading import load_model
from lkv.hf.spec import inspect_model
from lkv.policy.policy import Policy
from lkv.policy.scorer_inputs import ScorerInputs
from lkv.training.config import TrainingConfig, schedule
from lkv.training.data.samples import TokenizedSample
from lkv.training.distillation import (
    SampleDistillation,
    SampleGroup,
    check_batching,
    distillation_losses,
    group_samples,
    hard_mask,
)
from lkv.training.processes import place_model, run_at_once
from lkv.training.train_policy import Trainer
from lkv.training.warm_start import calibrate
from lkv.utils.cpp_compiler import find_compiler
from tests.conftest import save_model, tiny_llama
from tests.training.test_training import CONFIG, run_in_two_processes, sample

LENGTHS = (40, 31, 36, 33, 70, 12)
ALL_INPUTS = ScorerInputs("unrotated", "learned", 8)


def uneven(number: int) -> TokenizedSample:
    """Samples of unequal contexts, the third of them without anything to learn from."""
    own = sample(number, LENGTHS[number % len(LENGTHS)])
    return own if number % len(LENGTHS) != 2 else TokenizedSample("random", own.context, [])


def numbered():
    return [(number, uneven(number)) for number in range(len(LENGTHS))]


def policy_of(model, inputs=ALL_INPUTS):
    torch.manual_seed(1)
    policy = Policy(inspect_model(model), inputs=inputs)
    torch.nn.init.normal_(policy.heads.embeddings, std=2.0)
    for parameter in policy.tokens.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    return policy


def gradients(model, policy, most, config=CONFIG):
    """Losses and gradients summed over all groups of `most` contexts."""
    policy.zero_grad()
    sums = torch.zeros(2)
    for group in group_samples(numbered(), most):
        found = distillation_losses(model, policy, group, config, schedule(config, 3))
        sum(found).backward()
        sums += torch.tensor([float(loss.detach()) for loss in found])
    return sums, {name: value.grad.clone() for name, value in policy.named_parameters() if value.grad is not None}


def test_contexts_of_similar_length_share_a_pass():
    lengths = lambda most: [  # noqa: E731
        [len(own.context) for _, own in group.numbered] for group in group_samples(numbered(), most)
    ]
    assert lengths(1) == [[40], [31], [33], [70], [12]]
    assert lengths(2) == [[70], [40, 33], [31], [12]]
    assert lengths(8) == [[70], [40, 33, 31], [12]]
    kept = group_samples(numbered(), 1, is_sharded=True)
    assert [group.is_counted for group in kept] == [True] * 5 + [False] and str(kept[-1]) == "sample 2, source 'random'"


@pytest.mark.parametrize("settings", [{}, {"retention_low": 0.1, "retention_high": 0.4, "continuations": 2}])
def test_gradients_are_those_of_one_by_one(settings):
    """Contexts are filled up, yet nothing of a sample's losses and gradients depends on its neighbours."""
    model = attached()
    policy, config = policy_of(model).double(), replace(CONFIG, **settings)
    alone, expected = gradients(model, policy, 1, config)
    for most in (2, 8):
        together, found = gradients(model, policy, most, config)
        torch.testing.assert_close(together, alone, rtol=1e-6, atol=0)
        for name, value in expected.items():
            assert float(value.abs().max()) > 0
            torch.testing.assert_close(found[name], value, rtol=1e-7, atol=1e-7 * float(value.abs().max()))


def test_gradients_of_two_threads_are_those_of_one(threads):
    model = attached(torch.float32)
    policy, device = policy_of(model), torch.device("cpu")
    used, results = set(), []
    pairs = [[SampleGroup([(number, uneven(number))]) for number in pair] for pair in ((0, 1), (3, 4))]

    def add_gradients(group):
        used.add((threading.get_ident(), torch.get_num_threads()))
        sum(distillation_losses(model, policy, group, CONFIG, schedule(CONFIG, 3))).backward()

    for count in (1, 2, 2, 2):
        threads(count)
        results.append([])
        for pair in pairs:
            policy.zero_grad()
            run_at_once(add_gradients, pair, device, 2)
            results[-1] += [value.grad.clone() for value in policy.parameters() if value.grad is not None]
        assert torch.get_num_threads() == count
    assert len(used) > 1 and {count for _, count in used} == {1}
    for found in results[1:]:
        for value, expected in zip(found, results[0], strict=True):
            assert torch.equal(value, expected) and bool(value.any())


@pytest.mark.parametrize(("most", "device", "workers"), [(1, "cpu", 1), (2, "cpu", 2), (9, "cpu", 2), (2, "meta", 1)])
def test_only_a_cpu_has_several_contexts_at_once(threads, most, device, workers):
    threads(2)
    used, barrier = set(), threading.Barrier(workers)

    def note(item):
        used.add(threading.get_ident())
        barrier.wait(10)

    run_at_once(note, range(2), torch.device(device), most)
    assert len(used) == workers


def test_an_error_in_a_thread_is_raised_and_leaves_the_threads_as_they_were(threads):
    def fail(item):
        raise TrainingError(f"no {item}")

    threads(2)
    with pytest.raises(TrainingError, match="no 0"):
        run_at_once(fail, range(2), torch.device("cpu"), 2)
    assert torch.get_num_threads() == 2


def attached(dtype=torch.float64):
    model = tiny_llama(dtype=dtype).requires_grad_(False)
    patch_attention(model)
    return model


def test_what_fills_a_context_up_is_never_seen():
    """Teacher and hard-masked student of the shorter one beside a longer one, row by row."""
    model = attached()
    policy = policy_of(model, ScorerInputs())
    short, long = sample(1, 25), sample(2, 33)
    both = SampleDistillation(model, long, short)
    masks = [hard_mask(policy, both.scores(policy, own), 0.3, 2) for own in (0, 1)]
    for mask, part in ((None, None), (both.join_masks(masks), masks[1])):
        alone, together = SampleDistillation(model, short).run(part), both.run(mask)
        torch.testing.assert_close(together.log_probs[-len(alone.log_probs) :], alone.log_probs)
    with pytest.raises(ValueError, match="Expected one sample"):
        SampleDistillation(model, long, short, whole=True)


@pytest.mark.parametrize("most", [1, 4])
def test_a_step_accumulates_the_gradient_of_the_mean_loss(tmp_path, most):
    """Against one backward pass through the mean of all losses of the step."""
    model = attached()
    policy = policy_of(model).double()
    config = replace(CONFIG, batch=6, contexts_per_forward=most, max_grad_norm=1e6)
    now = schedule(config, 0)
    each = [distillation_losses(model, policy, group, config, now) for group in group_samples(numbered(), 1)]
    (sum(kl + config.beta * hidden for kl, hidden in each) / 6).backward()
    expected = {name: value.grad.clone() for name, value in policy.named_parameters() if value.grad is not None}
    Trainer(model, policy, config, uneven, [], tmp_path)._loop.update(schedule(config, 0))
    fresh = policy_of(model).double()
    for name, value in policy.named_parameters():
        torch.testing.assert_close(value.grad, expected[name], rtol=1e-6, atol=1e-9)
        assert not torch.equal(value, dict(fresh.named_parameters())[name])


def test_what_cannot_share_a_pass_is_refused(tmp_path):
    with pytest.raises(TrainingError, match=r"contexts_per_forward is 2 and student 'full'.*; give 1"):
        TrainingConfig(contexts_per_forward=2, student="full")
    stretched = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    model, config = tiny_llama(rope_parameters=stretched), replace(CONFIG, contexts_per_forward=2)
    with pytest.raises(TrainingError, match=r"depends on the longest text.*; give 1"):
        Trainer(model, policy_of(model, ScorerInputs()), config, sample, [], tmp_path)


@pytest.mark.skipif(find_compiler() is None, reason="there is no C++ compiler to build the fake GPU with")
@pytest.mark.parametrize("student", ["continuation", "full"])
def test_a_model_over_two_devices_gives_the_same_training(student):
    """`device_map` puts layers on two devices; the policy lies on the first."""
    import accelerate

    from tests.fake_gpu.device import load

    load()
    base = attached(torch.float32)
    first = dict.fromkeys(("model.embed_tokens", "model.rotary_emb", "model.layers.0"), "fake:0")
    places = first | dict.fromkeys(("model.layers.1", "model.layers.2", "model.norm", "lm_head"), "fake:1")
    split = accelerate.dispatch_model(copy.deepcopy(base), places, main_device="fake:0", force_hooks=True)
    patch_attention(split)
    texts = [sample(number, 50).context for number in range(4)]
    found, config, most = [], replace(CONFIG, student=student), 1 if student == "full" else 2
    # Autograd has a thread for each device that was there at its first use, which may have been before.
    with torch.autograd.set_multithreading_enabled(False):
        for model, device in ((base, "cpu"), (split, "fake:0")):
            policy = policy_of(base).to(device)
            calibrate(model, policy, texts)
            measured = policy.state_dict()
            found.append((*gradients(model, policy, most, config), measured))
    layers = SampleDistillation(split, sample(0)).prompt
    assert [str(layer.key.device) for layer in layers] == ["fake:0", "fake:1", "fake:1"]
    torch.testing.assert_close(found[1][0], found[0][0], rtol=1e-4, atol=0)
    for own in (1, 2):
        assert set(found[1][own]) == set(found[0][own])
        for name, value in found[0][own].items():
            scale = max(1e-6, float(value.abs().max()))
            torch.testing.assert_close(found[1][own][name].cpu(), value, rtol=1e-3, atol=1e-4 * scale)
            assert found[1][own][name].device == torch.device("fake:0")


SHARED = """
import torch
from dataclasses import replace
from pathlib import Path
from lkv.hf.attention import patch_attention
from lkv.hf.prompt_kv import query_rotations
from lkv.policy.policy import Policy
from lkv.training import processes
from lkv.training.train_policy import Trainer
from tests.training.test_sharing import CONFIG, uneven
from tests.training.test_training import sample

rank = processes.distributed_state("train", "training").process_index
loads = []
load = processes.load_model
processes.load_model = lambda *a: loads.append(a) or load(*a)
model, _ = processes.place_model({model!r}, torch.float32, None, "processes")
assert len(loads) == (rank == 0), loads
local = sum(p.to_local().numel() for p in model.parameters() if hasattr(p, "to_local"))
whole = sum(p.numel() for p in model.parameters() if hasattr(p, "to_local"))
assert local * 2 == whole > 0, (local, whole)
query_rotations(model, "this test")
torch.manual_seed(1)
policy = Policy(patch_attention(model).spec)
config, folder = replace(CONFIG, batch=6, steps=2, student={student!r}), Path({folder!r})
Trainer(model, policy, config, uneven, [sample(1000)], folder, is_sharded=True).run()
if rank == 0:
    torch.save(policy.state_dict(), folder / "policy.pt")
"""


@pytest.mark.slow
@pytest.mark.parametrize("student", ["continuation", "full"])
def test_weights_shared_out_over_two_processes_train_the_same(tmp_path, student):
    """FSDP over two processes, of which the first alone loads the model, against one process with the whole model."""
    folder = save_model(tmp_path / "model")
    model, _ = load_model(str(folder), torch.float32)
    torch.manual_seed(1)
    policy = Policy(patch_attention(model).spec)
    config, out = replace(CONFIG, batch=6, steps=2, student=student), tmp_path / "two"
    Trainer(model, policy, config, uneven, [sample(1000)], tmp_path / "one").run()
    shared = run_in_two_processes(out, SHARED.format(folder=str(out), model=str(folder), student=student))
    for name, value in policy.state_dict().items():
        torch.testing.assert_close(shared[name], value, atol=1e-6, rtol=1e-5)
    assert (tmp_path / "two" / "curve.jsonl").is_file()


def test_a_spread_that_does_not_go_with_the_processes_is_refused(tmp_path, monkeypatch):
    folder = str(save_model(tmp_path / "model"))
    with pytest.raises(TrainingError, match=r"as there is one; start several with `accelerate launch"):
        place_model(folder, torch.float32, None, "processes")
    spread, _ = place_model(folder, torch.float32, None, "devices")
    whole, _ = load_model(folder, torch.float32)
    ids = torch.tensor([[5, 9, 30]])
    assert torch.equal(spread(ids).logits, whole(ids).logits)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    with pytest.raises(TrainingError, match="leaves none to a second process of the machine; start one"):
        place_model(folder, torch.float32, None, "devices")
    with pytest.raises(TrainingError, match=r"5 contexts a step cannot be split evenly among 2"):
        check_batching(replace(CONFIG, batch=5), whole, 2)
    with pytest.raises(TrainingError, match="contexts_per_forward must be 1 where the model's weights are sharded"):
        check_batching(replace(CONFIG, contexts_per_forward=2), whole, 2)
