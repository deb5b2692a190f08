"""Whether the working tree measures what another revision does: kept indices, logits, fidelity and a short training.

python experiments/unchanged.py REVISION [--samples 5] [--model tiny|embedded] [--tolerance 0]

The revision's package is taken from git; this file then runs once with each of the two, through what is public alone.
Exits with 1 where anything differs: kept indices must be equal, numbers within the tolerance.
"""

import argparse
import io
import json
import os
import subprocess
import sys
import tarfile
import tempfile
import warnings
from collections.abc import Callable, Iterable, Mapping
from itertools import product
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

ROOT = Path(__file__).resolve().parents[1]
MODELS = ("tiny", "embedded")
RETENTIONS = (0.5, 0.15)
_TOKENS = 300  # of a text
# Of a text for methods with a pattern, whose windows alone are 384; the tiny model reads its own text as twice as many.
WINDOWS_TOKENS = {"tiny": 500, "embedded": 1000}
_MEASURES = ("realised", "nbytes", "score", "kl", "agreement", "hidden_error")
_QUESTION = "What is this text about?"
Compressing = Callable[[str, float], Any]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("revision", help="what to compare with, or the folder of a package with --probe")
    parser.add_argument("--samples", type=int, default=5, help="texts a method")
    parser.add_argument("--model", choices=MODELS, default="tiny")
    parser.add_argument("--tolerance", type=float, default=0.0, help="by which numbers may differ")
    parser.add_argument("--probe", type=Path, default=None, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.probe:
        # An editable install would find modules that the other revision does not have.
        sys.meta_path[:] = [
            finder for finder in sys.meta_path if not getattr(finder, "__module__", "").startswith("__editable__")
        ]
        save_file(probe(options.model, options.samples), options.probe)
        return 0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        archive = subprocess.run(["git", "archive", options.revision, "lkv"], cwd=ROOT, check=True, capture_output=True)
        with tarfile.open(fileobj=io.BytesIO(archive.stdout)) as tree:
            tree.extractall(folder / "before", filter="data")
        before, now = (measured(options, tree, folder) for tree in (folder / "before", ROOT))
    apart = differences(before, now, options.tolerance)
    print("\n".join(apart) or f"{len(now)} results of {options.model}: all as at {options.revision}")
    return bool(apart)


def measured(options: argparse.Namespace, tree: Path, folder: Path) -> dict[str, torch.Tensor]:
    """What `probe` gives with the package in `tree`, in a process of its own."""
    out = folder / f"{tree.name}.safetensors"
    command = [sys.executable, "-P", __file__, str(tree), "--probe", str(out)]
    command += ["--samples", str(options.samples), "--model", options.model]
    env = {**os.environ, "PYTHONPATH": str(tree)}
    run = subprocess.run(command, env=env, cwd=folder, capture_output=True, text=True, check=False)
    if run.returncode:
        sys.exit(f"the measurement with the package in {tree} failed:\n{run.stderr[-3000:]}")
    return load_file(out)


def differences(before: dict[str, torch.Tensor], now: dict[str, torch.Tensor], tolerance: float) -> list[str]:
    """A line for each result that differs: integers at all, other numbers by more than `tolerance`."""
    lines = [f"{name}: only at the one" for name in sorted(before.keys() ^ now.keys())]
    for name in sorted(before.keys() & now.keys()):
        old, new = before[name], now[name]
        if old.shape != new.shape:
            lines.append(f"{name}: {tuple(old.shape)} and now {tuple(new.shape)}")
        elif not torch.equal(old.isnan(), new.isnan()):
            lines.append(f"{name}: measured at the one alone")
        elif not torch.equal(old, new):
            apart = float((old.double() - new.double()).abs().nan_to_num().max())
            if apart > (tolerance if old.is_floating_point() else 0):
                lines.append(f"{name}: up to {apart:.3g} apart")
    return lines


def probe(kind: str, samples: int) -> dict[str, torch.Tensor]:
    """Every result by its name, with the package that is imported."""
    from lkv.methods.registry import METHODS as methods  # noqa: N811

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model, tokenizer, policy = tiny(folder / "model") if kind == "tiny" else embedded()
        texts = [text_of(number, tokenizer, _TOKENS) for number in range(samples)]
        results: dict[str, torch.Tensor] = {}
        for number, text in enumerate(texts):
            compressed = compressing(model, tokenizer, policy, methods, text, kind == "embedded")
            results |= kept_and_predicted(compressed, methods, f"text {number}", text, folder / "context.kv")
        text = text_of(0, tokenizer, WINDOWS_TOKENS[kind])
        windowed = [name for name, spec in methods.items() if spec.needs_pattern]
        compressed = compressing(model, tokenizer, policy, methods, text, kind == "embedded")
        results |= kept_and_predicted(compressed, windowed, "longer text", text, folder / "context.kv")
        results |= fidelity(model, tokenizer, policy, list(methods), texts, folder / "eval.jsonl")
        return results | (training(folder) if kind == "tiny" else {})


def text_of(number: int, tokenizer: Any, tokens: int) -> str:
    """About `tokens` tokens of a module of the standard library, the same for the same interpreter."""
    modules = ("argparse.py", "heapq.py", "textwrap.py", "difflib.py", "statistics.py", "fractions.py", "shlex.py")
    text = (Path(json.__file__).parents[1] / modules[number % len(modules)]).read_text(encoding="utf-8")
    ids = tokenizer(text[: 8 * tokens], add_special_tokens=False)["input_ids"]
    return tokenizer.decode(ids[number : number + tokens])


def compressing(
    model: Any, tokenizer: Any, policy: Any, methods: Mapping[str, Any], text: str, once: bool
) -> Compressing:
    """What gives the context of `text` under a method at a retention. `once`: a method that needs no second pass evicts
    from what was read before, because reading takes nearly all of the time."""
    import lkv
    from lkv.hf.prompt_kv import read_prompt

    full = lkv.compress(model, tokenizer, text, method="full")
    prompt = read_prompt(model, torch.tensor([full.ids]), queries=True) if once else None

    def context(method: str, retention: float) -> Any:
        if method == "full":
            return full
        pattern = pattern_of(model) if methods[method].needs_pattern else None
        if prompt is None or methods[method].needs_second_pass:
            return lkv.compress(
                model, tokenizer, text, method=method, retention=retention, policy=policy, pattern=pattern
            )
        cache = lkv.RaggedCache(model, policy=policy, retention=retention, method=method, pattern=pattern)
        cache.fill(prompt)
        return lkv.Context(model, tokenizer, full.ids, cache)

    return context


def kept_and_predicted(
    compressed: Compressing, methods: Iterable[str], title: str, text: str, path: Path
) -> dict[str, torch.Tensor]:
    """The indices that each method keeps of a text, layer by layer and head by head, and what it then predicts."""
    from lkv.errors import PromptError

    results: dict[str, torch.Tensor] = {}
    full: list[Any] = list(compressed("full", 1.0).cache.layers)
    for method, retention in product(methods, RETENTIONS):
        name = f"{method} at {retention:g}, {title}"
        try:
            context = compressed(method, retention)
        except PromptError:  # the text is too short for what the method always keeps
            results[f"{name}: refused"] = torch.ones(1, dtype=torch.int64)
            continue
        context.save(path)
        state = load_file(path)
        indices = [indices_of(state, layer, full[layer].keys[0]) for layer in range(len(full))]
        results[f"{name}: kept"] = torch.cat(indices)
        results[f"{name}: logits"] = context.predict(_QUESTION, text[:60])[0]
    return results


def indices_of(state: dict[str, torch.Tensor], layer: int, whole: torch.Tensor) -> torch.Tensor:
    """For each head how many entries a saved layer holds, then which of `whole` [H, T, d] they are: equal rows of k."""
    counts = state[f"kept.{layer}"][0]
    parts = [counts]
    for kept_keys, keys in zip(state[f"k.{layer}"].split(counts.tolist()), whole, strict=True):
        equal = (kept_keys[:, None] == keys[None]).all(-1)
        if not bool(equal.any(-1).all()):
            raise ValueError(f"layer {layer} holds entries that the text has not")
        parts.append(equal.int().argmax(-1))
    return torch.cat(parts)


def fidelity(
    model: Any, tokenizer: Any, policy: Any, methods: list[str], texts: list[str], out: Path
) -> dict[str, torch.Tensor]:
    """All that an evaluation writes of each method, retention and text."""
    from lkv.evaluation.example import Example
    from lkv.evaluation.runner import EvaluationConfig, evaluate

    fields: dict[str, Any] = {"suite": "longbench", "task": "code", "question": _QUESTION, "answer_prefix": ""}
    fields |= {"max_new_tokens": 8, "metric": "qa_f1"}
    examples = [
        Example(number=number, context=text, answers=(text[40:100],), **fields) for number, text in enumerate(texts)
    ]
    config = EvaluationConfig(methods, RETENTIONS, policy=policy, pattern=pattern_of(model))
    evaluate(model, tokenizer, examples, config, out)
    results: dict[str, torch.Tensor] = {}
    for line in out.read_text(encoding="utf-8").splitlines()[1:]:
        sample = json.loads(line)
        for row in sample["rows"]:
            numbers = [float("nan") if row[name] is None else float(row[name]) for name in _MEASURES]
            name = f"{row['method']} at {row['retention']:g}, text {sample['number']}: measured"
            results[name] = torch.tensor(numbers, dtype=torch.float64)
    return results


def training(folder: Path) -> dict[str, torch.Tensor]:
    """The policies of two steps of training, with the paper's scorer and with every term."""
    from lkv.cli.main import main as command

    (folder / "data").mkdir()
    for number in range(40):
        text = " ".join(f"{(number * 7919 + i * i) % 9973}" for i in range(400))
        (folder / "data" / f"{number}.txt").write_text(text, encoding="utf-8")
    results: dict[str, torch.Tensor] = {}
    for preset in ("cpu", "paper-cpu"):
        out = folder / preset
        words = ["train", "--preset", preset, "--model", str(folder / "model"), "--data", str(folder / "data")]
        words += ["--out", str(out), "--batch", "2", "--steps", "2", "--continuations", "2"]
        words += ["--min-tokens", "100", "--max-tokens", "300"]
        if command(words):
            raise RuntimeError("the training was refused")
        policy = load_file(out / "policy" / "policy.safetensors")
        results |= {f"trained by {preset}: {name}": tensor for name, tensor in policy.items()}
    return results


def embedded() -> tuple[Any, Any, Any]:
    """The embedded model and its policy."""
    import lkv

    model, tokenizer = lkv.load_default()
    return model, tokenizer, lkv.default_policy()


def tiny(folder: Path) -> tuple[Any, Any, Any]:
    """A random Llama that reads bytes, saved in `folder`, with a random policy that has every term."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    import lkv
    from lkv.policy.scorer_inputs import ScorerInputs

    torch.manual_seed(0)
    letters = ["<pad>", "<s>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    words = Tokenizer(models.BPE(vocab={letter: number for number, letter in enumerate(letters)}, merges=[]))
    words.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", bos_token="<s>", eos_token="</s>")
    config = LlamaConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
        head_dim=8, vocab_size=len(letters), max_position_embeddings=2048, bos_token_id=1, eos_token_id=2,
        pad_token_id=0, initializer_range=0.3,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    policy = lkv.Policy(lkv.RaggedCache(model, method="knorm").spec, inputs=ScorerInputs("unrotated", "learned", 12))
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return model, tokenizer, policy.requires_grad_(False)


def pattern_of(model: Any) -> list[list[float]]:
    """A made-up pattern of retrieval heads for DuoAttention, every second one retrieving most."""
    config = model.config
    heads = config.num_key_value_heads
    return [
        [(layer + head) % 2 * 0.8 + 0.01 * head for head in range(heads)] for layer in range(config.num_hidden_layers)
    ]


if __name__ == "__main__":
    sys.exit(main())
