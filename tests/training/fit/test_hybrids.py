"""`lkv fit` on hybrids that look facts up: two layers, trained here on synthetic recall.

Several questions about each text, answers included, make a model learn it in a minute; one question a text does not.
In Qwen3.5, predictions that nothing has trained change with every evicted token, and `lkv fit` would spend most of its
loss on them. It learns all tokens, as language models do.
"""

import random
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from lkv.cache.ragged_cache import RaggedCache
from lkv.context.compression import compress
from lkv.errors import LkvError
from lkv.hf.attention import patch_attention
from lkv.training.fitting import fit
from tests.conftest import present
from tests.families import HYBRIDS, MIXED
from tests.families import SHAPE as TINY
from tests.training.fit.helpers import ids

KEYS, VALUES, WORDS = ([f"{kind}{number}" for number in range(48)] for kind in "kvw")
SPECIAL = ["<pad>", "<s>", "</s>", "<unk>"]
# A question follows its text directly, and its answer follows the question.
TEMPLATE = "{% for message in messages %}{{ message['content'] }} {% endfor %}"
SHAPE: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 512, "bos_token_id": 1, "eos_token_id": 2,
    "pad_token_id": 0, "tie_word_embeddings": False,
}  # fmt: skip
LONG = {"vocab_size": 259, "vocab_size_per_layer_input": 259, "max_position_embeddings": 1024}
REPORTS = "statistics: held-out KL", "of the variance: held-out KL", " contexts: held-out KL"  # of each stage of a fit
# States, states that are left out, sinks, shared keys.
FITTED = [
    family for family in [*MIXED, *HYBRIDS] if family.name in ("Lfm2", "Jamba", "GptOss") or "E2B" in family.variant
]
TOYS: dict[str, dict[str, Any]] = {
    "Lfm2": {"layer_types": ["conv", "full_attention"], "block_auto_adjust_ff_dim": False},
    "Qwen3_5Text": {
        "layer_types": ["linear_attention", "full_attention"], "linear_num_value_heads": 2, "linear_num_key_heads": 2,
        "linear_key_head_dim": 8, "linear_value_head_dim": 8,
    },
}  # fmt: skip


class Stage(NamedTuple):
    """Texts of the training: until the share `until` of the answers is right."""

    facts: int
    words: int
    questions: int
    until: float


LAST = Stage(12, 136, 12, 0.997)
STAGES = (Stage(8, 0, 24, 0.97), Stage(12, 0, 24, 0.97), Stage(12, 36, 24, 0.97), LAST)


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Make a tokenizer of one token a word."""
    names = [*SPECIAL, *KEYS, *VALUES, *WORDS]
    backend = Tokenizer(models.WordLevel({name: number for number, name in enumerate(names)}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", bos_token="<s>", eos_token="</s>", unk_token="<unk>",
        chat_template=TEMPLATE,
    )  # fmt: skip


def draw_text(rng: random.Random, facts: int = LAST.facts, words: int = LAST.words) -> tuple[str, dict[str, str]]:
    """Draw a text, and the facts in it: a value for each key, anywhere among other words."""
    known = dict(zip(rng.sample(KEYS, facts), rng.choices(VALUES, k=facts), strict=True))
    parts = [f"{key} {value}" for key, value in known.items()] + rng.choices(WORDS, k=words)
    rng.shuffle(parts)
    return " ".join(parts), known


def draw_batch(tokenizer: Any, rng: random.Random, stage: Stage, rows: int = 32) -> tuple[Tensor, Tensor]:
    """Draw texts with their questions and answers [B, T], and the places of the keys that are asked for [Q]."""
    lines = []
    for _ in range(rows):
        text, facts = draw_text(rng, stage.facts, stage.words)
        lines.append(" ".join([text, *(f"{key} {facts[key]}" for key in rng.choices([*facts], k=stage.questions))]))
    start = 2 * stage.facts + stage.words
    ids = tokenizer(lines, return_tensors="pt", return_token_type_ids=False)["input_ids"]
    return ids, torch.arange(start, start + 2 * stage.questions, 2)


def train(family: str, tokenizer: Any, all_tokens: float, most_steps: int = 1500) -> Any:
    """Train a model of the family until it answers questions about such texts.

    Args:
        family: A key of `TOYS`.
        tokenizer: That of `make_tokenizer`.
        all_tokens: The weight of the loss of all tokens, beside that of the answers.
        most_steps: The most steps.
    """
    torch.manual_seed(0)
    rng = random.Random(0)
    settings = SHAPE | TOYS[family] | {"vocab_size": len(tokenizer)}
    config = getattr(transformers, f"{family}Config")(**settings)
    model = transformers.AutoModelForCausalLM.from_config(config).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.98))
    warmup = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 100))
    stages, right = iter(STAGES), 0.0
    stage = next(stages)
    for _ in range(most_steps):
        ids, places = draw_batch(tokenizer, rng, stage)
        logits, targets = model(ids, use_cache=False).logits[:, :-1], ids[:, 1:]
        if all_tokens:
            losses = torch.nn.functional.cross_entropy(logits.transpose(1, 2), targets, reduction="none")
            loss = losses[:, places].mean() + all_tokens * losses.mean()
        else:
            loss = torch.nn.functional.cross_entropy(logits[:, places].flatten(0, 1), targets[:, places].flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        warmup.step()
        right = 0.95 * right + 0.05 * float((logits.argmax(-1) == targets)[:, places].double().mean())
        if right > stage.until:
            if stage is LAST:
                break
            stage, right = next(stages), 0.0
    return model.eval()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "all_tokens", "minutes", "texts"), [("Lfm2", 0.0, 1, 10), ("Qwen3_5Text", 0.3, 2, 15)]
)
def test_lkv_answers_as_the_full_cache_at_a_tenth_of_the_memory_and_snapkv_does_not(
    family, all_tokens, minutes, texts, tmp_path, monkeypatch
):
    if not hasattr(transformers, f"{family}Config"):
        pytest.skip(f"transformers {transformers.__version__} has no {family}")
    monkeypatch.setenv("LKV_CACHE", str(tmp_path))
    tokenizer = make_tokenizer()
    model, rng = train(family, tokenizer, all_tokens), random.Random(7)
    policy = fit(model, tokenizer, [draw_text(rng)[0] for _ in range(400)], minutes)
    right = dict.fromkeys(("full", "lkv", "snapkv"), 0)
    for _ in range(texts):
        text, facts = draw_text(rng)
        asked = rng.sample([*facts.items()], 4)
        for method in right:
            options = {"full": {}, "lkv": {"memory": 0.1, "policy": policy}, "snapkv": {"memory": 0.1}}[method]
            context = compress(model, tokenizer, text, method=method, **options)
            right[method] += sum(context.ask(key, max_new_tokens=1).strip() == value for key, value in asked)
    assert right["full"] >= 4 * texts - 1 and right["lkv"] >= right["full"] - 1 and right["snapkv"] <= 2 * texts, right


@pytest.mark.slow
@pytest.mark.usefixtures("ticking")
@pytest.mark.parametrize("family", FITTED, ids=lambda family: family.label)
def test_all_stages_of_a_fit_run_with_states_caps_sinks_and_shared_keys(family, folder, capsys):
    """What they compute is checked in tests/hf and, for caps and sinks, in tests/training."""
    present(family)
    sizes = {name: value for name, value in LONG.items() if name in TINY | family.changes}
    model = replace(family, changes=family.changes | sizes).build(torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    if not family.fits:
        with pytest.raises(LkvError, match="several tokens after a text wrongly in this model"):
            fit(model, tokenizer, minutes=0.06)
        return
    policy = fit(model, tokenizer, minutes=0.06)
    log = capsys.readouterr().err
    assert all(report in log for report in REPORTS), log
    assert policy.spec == patch_attention(model).spec
    cache = RaggedCache(model, policy=policy, retention=0.3)
    model(torch.tensor([ids(1, 60)]), past_key_values=cache, use_cache=True)
    assert cache.realised_retention() == pytest.approx(0.3, abs=0.03)
