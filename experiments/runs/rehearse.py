"""Run the scripts of this folder end to end on a CPU, with tiny random models of both architectures and tiny data.

python -m experiments.runs.rehearse [--out FOLDER]    (make rehearse)

It runs `all.sh llama` and `all.sh qwen`; only the sizes differ from a run on GPUs. The numbers mean nothing: the
rehearsal tests commands, files and formats before you spend GPU hours. First it takes inputs away: the preflight must
name each of them, and nothing may be started.
"""

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pyarrow as pa
import torch
from pyarrow import parquet
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast, Qwen3Config

from lkv.evaluation.longbench import TASKS

ROOT = Path(__file__).parent.parent
ARCHITECTURES = ("llama", "qwen")
# In the style of both families: Llama's turns, and Qwen3's with its thinking block.
_TEMPLATES = {
    "llama": "<s>{% for m in messages %}[{{ m['role'] }}]\n\n{{ m['content'] | trim }}[end]{% endfor %}"
    "{% if add_generation_prompt %}[assistant]\n\n{% endif %}",
    "qwen": "{% for m in messages %}<s>{{ m['role'] }}\n{{ m['content'] }}</s>\n{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant\n"
    "{% if enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>\n\n"
    "{% endif %}{% endif %}",
}
_STEMS = "river tower garden letter market silver winter engine harbour lantern orchard piano window yellow".split()
_ITEMS = 40  # of each set: about two of them are held out


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status of the first script that fails."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--out", type=Path, default=None, help="folder for all files, which are kept (default: a temporary one)"
    )
    parser.add_argument("--only", choices=ARCHITECTURES, default=None, help="one architecture alone")
    options = parser.parse_args(arguments)
    with nullcontext(options.out) if options.out else tempfile.TemporaryDirectory(prefix="rehearsal-") as out:
        folder = Path(out)
        start = time.monotonic()
        make_data(folder)
        for name in (options.only,) if options.only else ARCHITECTURES:
            make_model(name, folder / name)
            if unnamed := unnamed_inputs(name, folder):
                print(f"the preflight does not name what is missing: {', '.join(unnamed)}", file=sys.stderr)
                return 1
            command = ["bash", str(ROOT / "runs" / "all.sh"), name]
            status = subprocess.run(command, env=environment(name, folder), check=False).returncode
            if status:
                return status
            missing = [made for made in EXPECTED if not (folder / f"{name}-out" / made).is_file()]
            if missing:
                print(f"the scripts made no {', '.join(missing)}", file=sys.stderr)
                return 1
        print(f"rehearsed in {time.monotonic() - start:.0f} s", file=sys.stderr)
    return 0


EXPECTED = (
    "preflight/passed", "data/build.json",
    "training/policy/policy.safetensors", "training/curve.jsonl", "table1.md",
    "breakdown.tex", "table2.csv",
    "budget_policies.png", "figure3.pdf", "figure4a.pdf", "figure4b.pdf", "table3.md", "figure5.pdf",
)  # fmt: skip


# What is taken away, by the variable that has it, and what the preflight says then.
MISSING = {
    "TEXT": "TEXT: not set", "PATTERN": "PATTERN: not set", "RULER": "hides its needles in essays",
    "LONGBENCH": "hotpotqa.jsonl", "DATA": "train-v1.1.json", "MODEL": "cannot be read", "POLICY": "'no/policy'",
    "TRAIN": "no program 'no-such-program'", "LAUNCH": "no program 'no-such-launcher'",
}  # fmt: skip


def unnamed_inputs(name: str, folder: Path) -> list[str]:
    """The variables of `MISSING` that the preflight does not name when all of them are gone at once."""
    left = folder / "left"
    for path in ("longbench", "data", "ruler"):
        shutil.copytree(folder / path, left / path, dirs_exist_ok=True)
    for path in ("longbench/hotpotqa.jsonl", "data/train-v1.1.json", "ruler/PaulGrahamEssays.json"):
        (left / path).unlink()
    taken = {"TEXT": "", "PATTERN": "", "MODEL": "no/model", "POLICY": "no/policy", "HF_HUB_OFFLINE": "1"}
    taken |= {"TRAIN": "no-such-program", "LAUNCH": "no-such-launcher"}
    taken |= {variable: str(left / variable.lower()) for variable in ("RULER", "LONGBENCH", "DATA")}
    command = ["bash", str(ROOT / "runs" / "all.sh"), name]
    ran = subprocess.run(command, env=environment(name, folder) | taken, check=False, capture_output=True, text=True)
    unnamed = [variable for variable, said in MISSING.items() if said not in ran.stderr]
    if not ran.returncode or "nothing was started" not in ran.stderr or (folder / f"{name}-out").exists():
        unnamed.append("something was started all the same")
    return unnamed


def environment(name: str, folder: Path) -> dict[str, str]:
    """The caller's environment with the variables that make the scripts small."""
    python = sys.executable
    bounds = "--min-tokens 200 --max-tokens 700"
    settings = {
        "MODEL": folder / name, "OUT": folder / f"{name}-out", "DATA": folder / "data",
        "LONGBENCH": folder / "longbench",
        "RULER": folder / "ruler", "PATTERN": folder / "book.txt", "TEXT": folder / "book.txt", "PYTHON": python,
        "LAUNCH": f"{python} -m lkv", "TRAIN": f"{python} -m lkv",
        "DATA_OPTIONS": f"--samples 40 --held-out 8 {bounds}",
        "TRAIN_OPTIONS": f"--steps 2 --batch 2 {bounds} --max-continuation 300 --dtype float32 --warmup 1 "
        "--checkpoint-every 1 --evaluate-every 2 --validation-samples 2",
        "EVAL_OPTIONS": "--samples 1 --dtype float32",
        "LENGTHS": "2048 3072", "LENGTH": "3072",
        "PROFILE_OPTIONS": f"--config {folder / name / 'config.json'} --tokens 512 1024 --new-tokens 2 --repeats 1 "
        "--device cpu --memory-limit 0.02",
        "ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "2"),
    }  # fmt: skip
    return os.environ | {key: str(value) for key, value in settings.items()}


def make_model(name: str, folder: Path) -> None:
    """Save a random model of the architecture, with a tokenizer trained on the rehearsal's own words."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    special = ["<pad>", "<s>", "</s>"]
    trainer = trainers.BpeTrainer(
        vocab_size=700, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator([_prose(random.Random(0), 3000)], trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>", eos_token="</s>")
    fast.chat_template = _TEMPLATES[name]
    fast.save_pretrained(folder)
    shape: dict[str, Any] = {
        "vocab_size": len(fast), "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 4096,
        "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
    }  # fmt: skip
    torch.manual_seed(0)
    config = LlamaConfig(**shape) if name == "llama" else Qwen3Config(**shape)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)


def make_data(folder: Path) -> None:
    """Write made-up rows of every dataset under its official name, with its official fields."""
    rng = random.Random(0)
    data, longbench, ruler = (folder / name for name in ("data", "longbench", "ruler"))
    for path in (data, longbench, ruler):
        path.mkdir(parents=True, exist_ok=True)
    (folder / "book.txt").write_text(_prose(rng, 3000), encoding="utf-8")
    _json(data / "hotpot_train_v1.1.json", [_hotpot_row(rng, i) for i in range(_ITEMS)])
    _json(data / "train-v1.1.json", {"data": [_squad_article(rng, i) for i in range(_ITEMS)], "version": "1.1"})
    events = [(" ||||| ".join(_prose(rng, 80) for _ in range(3)), _prose(rng, 20)) for _ in range(_ITEMS)]
    (data / "train.src.cleaned").write_text("".join(f"{articles}\n" for articles, _ in events), encoding="utf-8")
    (data / "train.tgt").write_text("".join(f"{summary}\n" for _, summary in events), encoding="utf-8")
    questions = (f"NUM:count How many {rng.choice(_STEMS)}s are in house {i} ?\n" for i in range(_ITEMS * 4))
    (data / "train_5500.label").write_text("".join(questions), encoding="latin-1")
    code = [
        {
            "content": "\n".join(f"def winter(garden):\n    return {_prose(rng, 6)}" for _ in range(20)),
            "max_stars_repo_path": f"src/file{i}.py",
        }
        for i in range(_ITEMS)
    ]
    _parquet(data / "the-stack" / "data" / "python" / "data-00000-of-00001.parquet", code)
    sums = [
        {"question": f"What are {i} and {i}?", "subject": "", "choices": ["1", "2", "3", str(2 * i)], "answer": 3}
        for i in range(_ITEMS * 4)
    ]
    _parquet(data / "mmlu" / "all" / "auxiliary_train-00000-of-00001.parquet", sums)
    stories = [
        {"document": {"id": f"d{i}", "text": _prose(rng, 600)}, "question": {"text": f"Who left house {i}?"},
         "answers": [{"text": "the keeper"}]}
        for i in range(_ITEMS)
    ]  # fmt: skip
    _parquet(data / "narrativeqa" / "data" / "train-00000-of-00001.parquet", stories)
    for task in TASKS:
        rows = [_longbench_row(random.Random(f"{task}-{i}"), task, i) for i in range(2)]
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        (longbench / f"{task}.jsonl").write_text(lines, encoding="utf-8")
    _json(ruler / "PaulGrahamEssays.json", {"text": _prose(rng, 4000)})
    _json(
        ruler / "dev-v2.0.json", {"data": [_squad_article(rng, i, "evaluated") for i in range(90)], "version": "v2.0"}
    )
    _json(ruler / "hotpot_dev_distractor_v1.json", [_hotpot_row(rng, i, "evaluated") for i in range(40)])


def _prose(rng: random.Random, words: int) -> str:
    """Sentences of random words: a few stems with endings."""
    sentence = []
    for i in range(words):
        word = rng.choice(_STEMS) + rng.choice(("", "s", "ed", "ing"))
        sentence.append(word.capitalize() if i % 9 == 0 else word + ("." if i % 9 == 8 else ""))
    return " ".join(sentence)


def _hotpot_row(rng: random.Random, number: int, kind: str = "trained") -> dict[str, Any]:
    titles = [f"House {kind} {number} {i}" for i in range(10)]
    return {
        "_id": f"{kind}{number}", "question": f"Who built the {kind} house {number}?", "answer": f"Mason {number}",
        "type": "bridge", "level": "hard", "supporting_facts": [[titles[2], 0], [titles[5], 1]],
        "context": [[title, [_prose(rng, 15), f" Mason {number} built it."]] for title in titles],
    }  # fmt: skip


def _squad_article(rng: random.Random, number: int, kind: str = "trained") -> dict[str, Any]:
    key = f"Key {number}"
    question = {
        "id": f"{kind}{number}",
        "question": f"Which key opens the {kind} house {number}?",
        "is_impossible": False,
    }
    paragraph = {
        "context": f"{_prose(rng, 60)} {key} opens it.",
        "qas": [{**question, "answers": [{"text": key, "answer_start": 0}]}],
    }
    return {"title": f"House_{number}", "paragraphs": [paragraph]}


def _longbench_row(rng: random.Random, task: str, number: int) -> dict[str, Any]:
    answers = {
        "passage_count": ["3"],
        "passage_retrieval_en": [f"Paragraph {number + 1}"],
        "trec": ["Number of something"],
    }
    return {
        "input": f"Question: Which {rng.choice(_STEMS)} is it?\nType:" if task == "trec" else f"Which is {number}?",
        "context": _prose(rng, 900), "answers": answers.get(task, [_prose(rng, 4)]), "length": 900, "dataset": task,
        "language": "en", "all_classes": ["Number of something", "Definition of something"], "_id": f"{task}{number}",
    }  # fmt: skip


def _json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value), encoding="utf-8")


def _parquet(path: Path, rows: list[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    parquet.write_table(pa.Table.from_pylist(rows), path)


if __name__ == "__main__":
    sys.exit(main())
