"""Small random models, a policy for them, and training data."""

import logging
import os
import random
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

# One thread: the tensors are tiny, and the suite runs its files side by side.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Kernels run in the interpreter where there is no GPU; Triton reads this when it is imported first.
os.environ.setdefault("TRITON_INTERPRET", "1")

import pytest
import torch
from hypothesis import settings
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from lkv.hf.spec import inspect_model
from lkv.methods import registry
from lkv.policy.policy import Policy

settings.register_profile("lkv", deadline=None, max_examples=40, derandomize=True)
settings.load_profile("lkv")
torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _kept_log_level() -> Iterator[None]:
    """Undo `lkv serve --log-level`, which is for a process that only serves."""
    logger = logging.getLogger("lkv")
    level = logger.level
    yield
    logger.setLevel(level)


@pytest.hookimpl(tryfirst=True)  # before pytest selects by markers
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the cases of a `sweep` as slow, but for the number that it names, drawn by the test's name."""
    sweeps: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("sweep"):
            sweeps.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for name, cases in sweeps.items():
        (count,) = cases[0].get_closest_marker("sweep").args
        for item in random.Random(name).sample(cases, max(0, len(cases) - count)):
            item.add_marker("slow")


def present(family: Any) -> Any:
    """Return a family of models; skips the test where this version of transformers cannot run it."""
    if family.missing:
        pytest.skip(family.missing)
    return family


def tiny_llama(seed: int = 0, dtype: torch.dtype = torch.float64, **changes) -> LlamaForCausalLM:
    """A random Llama with 3 layers, 4 query heads and 2 KV heads."""
    torch.manual_seed(seed)
    settings = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "vocab_size": 67,
        "max_position_embeddings": 512,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
        # Large weights: attention far from uniform, so that a wrong mask shows.
        "initializer_range": 0.3,
    }
    return LlamaForCausalLM(LlamaConfig(**(settings | changes))).to(dtype).eval()


def save_model(path: Path, **changes) -> Path:
    """A tiny random model and a byte-level tokenizer, saved as a user would have them."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: number for number, letter in enumerate(["<pad>", "<s>", "</s>", *letters])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>", eos_token="</s>")
    fast.save_pretrained(path)
    tiny_llama(**{"dtype": torch.float32, "vocab_size": len(vocabulary)} | changes).save_pretrained(path)
    assert AutoTokenizer.from_pretrained(path)("ab")["input_ids"]
    return path


@pytest.fixture
def model() -> LlamaForCausalLM:
    return tiny_llama()


def uneven_policy(model, seed: int = 5, **options) -> Policy:
    """A random policy of `model` whose heads keep very different shares."""
    torch.manual_seed(seed)
    policy = Policy(inspect_model(model), **options)
    torch.nn.init.normal_(policy.heads.embeddings, std=20.0)
    return policy.requires_grad_(False)


@pytest.fixture
def policy(model) -> Policy:
    return uneven_policy(model)


@pytest.fixture
def threads():
    """Sets PyTorch's number of threads for a test."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.fixture
def interruptible():
    """Ctrl-C as a terminal has it: a run in the background may have been started with it ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def own_registry():
    """What a test registers as methods, budgets and selectors goes when the test ends."""
    registry.budgets(), registry.selectors()  # registered once, when they are imported
    with patch.dict(registry.METHODS), patch.dict(registry._BUDGETS), patch.dict(registry._SELECTORS):
        yield


@pytest.fixture
def data_folder(tmp_path):
    """A small folder of training data, with made-up rows in the official fields."""
    from tests.ruler import write_lines

    folder = tmp_path / "data"
    folder.mkdir()
    words = ["the", "quick", "brown", "fox", "jumps", "over", "a", "lazy", "dog", "near", "some", "old", "river"]
    rng = random.Random(0)

    def text(count):
        return " ".join(rng.choice(words) for _ in range(count)) + "."

    write_lines(
        folder / "squad_train_subset.jsonl.gz",
        [
            {"title": f"T_{i}", "context": f"{text(60)} Key {i}.", "question": f"Which? {i}", "answers": [f"Key {i}"]}
            for i in range(80)
        ],
    )  # fmt: skip
    write_lines(
        folder / "hotpotqa_train_200.jsonl.gz",
        [
            {"question": f"Q{i}", "answer": f"A{i}", "supporting_facts": [["P0", 0], ["P3", 0]],
             "context": [[f"P{j}", [text(30), f" A{i} here."]] for j in range(6)]}
            for i in range(40)
        ],
    )  # fmt: skip
    for number in range(40):
        (folder / f"story{number}.txt").write_text(text(900))
        (folder / f"tool{number}.py").write_text("\n".join(f"def f{k}(x):\n    return x + {k}" for k in range(80)))
    return folder
