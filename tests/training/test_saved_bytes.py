"""What a training step saves for its backward pass, and how often it waits, at the sizes of a layer of an 8B model."""

import copy
from contextlib import contextmanager, nullcontext
from functools import partial
from unittest.mock import patch

import pytest
import torch
from transformers import Gemma3ForCausalLM, Gemma3TextConfig

from lkv.hf.attention import patch_attention
from lkv.hf.prompt_kv import LayerKV
from lkv.hf.spec import inspect_model
from lkv.kernels.soft_mask_attention import continuation_attention
from lkv.policy.policy import Policy
from lkv.policy.scorer_inputs import ScorerInputs
from lkv.training import distillation
from lkv.training.config import TrainingConfig, schedule
from lkv.training.data.samples import TokenizedSample
from lkv.training.distillation import SampleDistillation, SampleGroup, distillation_losses, soft_mask
from lkv.utils.cpp_compiler import find_compiler
from tests.conftest import tiny_llama

pytest.importorskip("triton")

HEADS, KV_HEADS, DIM = 32, 8, 128


class Saved:
    """Bytes of the storages that a block saves for its backward pass; not those of `known` tensors."""

    def __init__(self, *known: torch.Tensor):
        self._known = {x.untyped_storage()._cdata for x in known}
        self._storages: dict[int, torch.UntypedStorage] = {}
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, lambda x: x)

    def _pack(self, x: torch.Tensor) -> torch.Tensor:
        storage = x.untyped_storage()
        if storage._cdata not in self._known:
            self._storages[storage._cdata] = storage  # kept, so that no other gets its address
        return x

    def __enter__(self) -> "Saved":
        self._hooks.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._hooks.__exit__(*error)

    @property
    def nbytes(self) -> int:
        return sum(storage.nbytes() for storage in self._storages.values())


def scorer_of_a_layer() -> Policy:
    shape = {"num_hidden_layers": 1, "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "head_dim": DIM}
    return Policy(inspect_model(tiny_llama(**shape)), inputs=ScorerInputs("cached", "none", 13))


def prompt_of_a_layer(policy: Policy, tokens: int) -> tuple[SampleDistillation, list[torch.Tensor]]:
    """A prompt that was read, and the tensors that are there anyway."""
    key, value = (torch.randn(1, KV_HEADS, tokens, DIM, dtype=torch.bfloat16) for _ in range(2))
    run = SampleDistillation.__new__(SampleDistillation)
    run.prompt, run.lengths, run._device = [LayerKV(key, value, DIM**-0.5)], [tokens], torch.device("cpu")
    return run, [key, value, *policy.parameters(), *policy.buffers()]


def test_the_scorer_saves_nothing_of_the_prompt():
    """2,049 bytes a token and head where it is not computed again."""
    policy, tokens = scorer_of_a_layer(), 256
    run, known = prompt_of_a_layer(policy, tokens)
    gradients, sizes = [], []
    for plain in (True, False):
        policy.zero_grad()
        with Saved(*known) as saved:
            scores = policy.tokens(run.prompt[0], 0) if plain else run.scores(policy)
        scores.square().sum().backward()
        sizes.append(saved.nbytes / (KV_HEADS * tokens))
        gradients.append([x.grad.clone() for x in policy.tokens.parameters() if x.grad is not None])
    assert sizes[0] > 2000 and sizes[1] == 0
    for one, other in zip(*gradients, strict=True):
        assert torch.equal(one, other)


def test_the_mask_of_a_long_prompt_is_all_that_is_saved_of_its_scores():
    """At 16,000 tokens and 4 continuations: 4 bytes an entry of the mask, 2 MB a layer. It was 264 MB."""
    policy, n, tokens = scorer_of_a_layer(), 4, 16_000
    run, known = prompt_of_a_layer(policy, tokens)
    with Saved(*known) as saved:
        scores = run.scores(policy)
        mask = soft_mask(policy, scores, 0.15, 0.1, torch.zeros(n, *scores.shape))
    assert mask.shape == (1, n, KV_HEADS, tokens)
    assert mask.nbytes <= saved.nbytes < 1.01 * mask.nbytes


@contextmanager
def keeping_activations():
    """The student over whole sequences as it would be without gradient checkpointing."""
    plain = {
        "checkpoint_layers": lambda model: nullcontext(),
        "checkpoint": lambda function, *args, **options: function(*args),
    }
    with patch.multiple(distillation, **plain):
        yield


def model_with_windows():
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}
    kinds = ["sliding_attention", "full_attention"] * 2
    config = Gemma3TextConfig(
        **sizes, head_dim=8, vocab_size=67, num_hidden_layers=4, layer_types=kinds, sliding_window=8
    )
    return Gemma3ForCausalLM(config).eval()


@pytest.mark.parametrize("make_model", [partial(tiny_llama, dtype=torch.float32), model_with_windows])
def test_gradients_of_the_full_student_are_those_without_checkpointing(make_model):
    model = make_model().requires_grad_(False)
    patch_attention(model)
    text = torch.randint(3, 67, (33,), generator=torch.Generator().manual_seed(2)).tolist()
    sample, config = TokenizedSample("test", text, [(text[:7], 2), (text[5:10], 1)]), TrainingConfig(student="full")
    policy = Policy(inspect_model(model), inputs=ScorerInputs("unrotated", "none", 8))
    found = []
    for block in (keeping_activations, nullcontext):
        policy.zero_grad()
        with block():
            losses = distillation_losses(model, policy, SampleGroup([(3, sample)]), config, schedule(config, 5))
            sum(losses).backward()
        found.append([*losses, *(x.grad for x in policy.parameters() if x.grad is not None)])
    assert len(found[0]) > 4 and all(bool(x.any()) for x in found[0][:2])
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)
    # With every token in view both students see what the model sees, in sliding windows too.
    runs = (SampleDistillation(model, sample, whole=whole) for whole in (True, False))
    torch.testing.assert_close(*(run.run(None).log_probs for run in runs))
    assert not any("forward" in vars(module) for module in model.modules())


def saved_by_the_full_student(layers: int, tokens: int) -> int:
    """Bytes in bfloat16 of a model of an eighth of an 8B's width, other than its own, the prompt and its mask."""
    widths = {"hidden_size": 512, "intermediate_size": 1792, "num_attention_heads": 4, "num_key_value_heads": 1}
    model = tiny_llama(dtype=torch.bfloat16, num_hidden_layers=layers, head_dim=DIM, **widths).requires_grad_(False)
    patch_attention(model)
    run = SampleDistillation(model, TokenizedSample("test", [3] * tokens, [([4] * 9, 1)]), whole=True)
    log_mask = torch.zeros(layers, 1, 1, tokens).requires_grad_()
    with torch.no_grad():
        teacher = run.run(None)
    prompt = [x for layer in run.prompt for x in (layer.key, layer.value)]
    with Saved(*model.parameters(), *model.buffers(), *prompt, log_mask) as saved:
        student = run.run(log_mask)
        loss = run.kl(teacher, student) + run.hidden_distance(teacher, student, "relative")
    loss.backward()
    return saved.nbytes


def test_the_full_student_saves_hidden_states_alone():
    """Of a token in a layer of an 8B model 16 KiB, of teacher and student: 8 GiB at 16k tokens in 32 layers, not 77."""
    found = []
    for block in (keeping_activations, nullcontext):
        with block():
            short, long = ([saved_by_the_full_student(layers, tokens) for layers in (1, 2)] for tokens in (32, 64))
        found.append(8 * ((long[1] - long[0]) - (short[1] - short[0])) / 32)
    kept, checkpointed = (bytes_a_token * 32 * 16_384 / 2**30 for bytes_a_token in found)
    assert found[1] == 2 * 4096 * 2 and checkpointed == 8
    assert 76 < kept < 80


@pytest.mark.skipif(find_compiler() is None, reason="there is no C++ compiler to build the fake GPU with")
def test_attention_saves_nothing_of_the_prompt():
    """At 16,000 tokens and 4 continuations of 120. A copy of k and v for each of them took 264 MB a layer."""
    from tests.fake_gpu.kernels import fake_gpus

    n, rows, tokens = 4, 120, 16_000
    options = {"dtype": torch.bfloat16, "device": "fake:0"}
    with fake_gpus(stubbed=True) as launches, torch.autograd.set_multithreading_enabled(False):
        prompt = [torch.zeros(1, KV_HEADS, tokens, DIM, **options) for _ in range(2)]
        q = torch.zeros(n, HEADS, rows, DIM, **options).requires_grad_()
        new = [torch.zeros(n, KV_HEADS, rows, DIM, **options).requires_grad_() for _ in range(2)]
        log_mask = torch.zeros(n, KV_HEADS, tokens, device="fake:0").requires_grad_()
        with Saved(*prompt, q, *new, log_mask) as saved:
            out = continuation_attention(q, *new, *prompt, log_mask)
        out.backward(out.detach())
    # The output, a log-sum-exp a row, and little for the tail.
    assert saved.nbytes < out.numel() * 2 + 4 * n * rows * (HEADS + KV_HEADS) + 100
    assert [x.grad.shape for x in (q, *new, log_mask)] == [x.shape for x in (q, *new, log_mask)]
    names = ["continuation_forward", "continuation_query_gradient", "key_gradient", "mask_gradient"]
    assert launches == names


@pytest.mark.slow
@pytest.mark.skipif(find_compiler() is None, reason="there is no C++ compiler to build the fake GPU with")
def test_losses_on_a_gpu_are_computed_without_waiting():
    from tests.fake_gpu.device import watched
    from tests.fake_gpu.kernels import fake_gpus

    torch.manual_seed(0)
    base = tiny_llama(dtype=torch.float32, head_dim=64, num_hidden_layers=2)
    text = torch.randint(3, 67, (33,)).tolist()
    sample = TokenizedSample("test", text, [(text[:7], 2), (text[5:10], 1)])
    config = TrainingConfig(steps=10)
    policy = Policy(inspect_model(base), inputs=ScorerInputs("unrotated", "learned", 8))
    found = []
    for device, gpus in (("cpu", nullcontext), ("fake:0", fake_gpus)):
        model, own = copy.deepcopy(base).to(device).requires_grad_(False), copy.deepcopy(policy).to(device)
        patch_attention(model)
        with gpus(), torch.autograd.set_multithreading_enabled(False):
            group, now = SampleGroup([(3, sample)]), schedule(config, 5)
            distillation_losses(model, own, group, config, now)  # tables that are made once
            with watched() as log:
                losses = distillation_losses(model, own, group, config, now)
                sum(losses).backward()
            found.append([*(x.detach().cpu() for x in losses), *(x.grad.cpu() for x in own.parameters())])
    assert log.count("wait") == 0, log.summary("wait")
    torch.testing.assert_close(*found, atol=1e-4, rtol=1e-3)
