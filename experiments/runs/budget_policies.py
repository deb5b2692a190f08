"""The budget policies of five methods on one real text (the paper's Fig. 1): the share that each head keeps.

python -m experiments.runs.budget_policies --text FILE    (writes budget_policies.json and budget_policies.png)

For an 8B model: --model, --policy and --pattern full_attention_heads.tsv, on a GPU with 24 GB or more. The paper
measured kvpress's methods: --methods snapkv pyramidkv-kvpress duo-kvpress adakv-snapkv lkv --pattern-by kvpress.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from experiments.report.figures import plot_policies, save_figure
from experiments.report.names import method_label
from experiments.result_file import write_results
from lkv.cache.ragged_cache import RaggedCache
from lkv.cli.options import estimate_retrieval_heads, load_pattern
from lkv.context.document_reader import read_document
from lkv.errors import LkvError, check_retention
from lkv.hf.attention import patch_attention
from lkv.hf.loading import DEFAULT, load_model
from lkv.hf.prompt_kv import read_prompt
from lkv.methods.request import CompressionRequest, resolve_method
from lkv.policy.lookup import default_policy
from lkv.policy.policy import Policy
from lkv.utils.prompts import encode_context

METHODS = ("snapkv", "pyramidkv", "duo", "adakv-snapkv", "lkv")


@torch.no_grad()
def shares(
    model: Any, ids: list[int], policy: Policy, retention: float, pattern: list[list[float]], methods: Sequence[str]
) -> dict[str, list[list[float]]]:
    """Kept / all tokens of each KV head [layers][KV heads] by method, from one forward pass over `ids`."""
    prompt = read_prompt(model, torch.tensor([ids], device=model.device), queries=True)
    by_method = {}
    for name in methods:
        is_duo = name.startswith("duo")
        method = resolve_method(
            CompressionRequest(method=name, retention=retention, policy=policy, pattern=pattern if is_duo else None),
            model,
        )
        cache = RaggedCache(model, method=method)
        cache.fill(prompt)
        by_method[name] = [[kept / len(ids) for kept in heads] for heads in cache.kept_counts()]
    return by_method


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--text", type=Path, required=True, help="a long text, read as a prompt")
    parser.add_argument("--tokens", type=int, default=4096, help="read no more of it than this")
    parser.add_argument("--retention", type=float, default=0.15)
    parser.add_argument("--model", default=DEFAULT, help="folder or hub id")
    parser.add_argument("--policy", help="folder or hub id (default: the one shipped)")
    parser.add_argument("--methods", nargs="+", default=METHODS, help="a panel each")
    parser.add_argument(
        "--pattern", type=Path, help="DuoAttention's .tsv, or a text to estimate it on (default: --text)"
    )
    parser.add_argument("--pattern-by", choices=("attention", "kvpress"), default="attention", help="its estimate")
    parser.add_argument("--out", type=Path, default=Path("runs-local"))
    try:
        _run(parser.parse_args(arguments))
    except LkvError as error:
        print(f"budget_policies: {error}", file=sys.stderr)
        return 1
    return 0


def _run(options: argparse.Namespace) -> None:
    check_retention(options.retention)
    text = read_document(str(options.text))
    model, tokenizer = load_model(options.model)
    model.to("cuda" if torch.cuda.is_available() else "cpu")  # type: ignore[arg-type]
    policy = Policy.from_pretrained(options.policy) if options.policy else default_policy()
    policy.check_model(patch_attention(model).spec)
    ids = encode_context(tokenizer, text)[: options.tokens]
    if options.pattern:
        pattern = load_pattern(options.pattern, model, tokenizer, options.pattern_by)
    else:
        pattern = estimate_retrieval_heads(model, ids, options.pattern_by)
    by_method = shares(model, ids, policy, options.retention, pattern, options.methods)
    common = {"model": Path(options.model).name, "tokens": len(ids), "retention": options.retention}
    rows = [
        common | {"method": method, "layer": layer, "head": head, "value": share, "unit": "kept / all"}
        for method, table in by_method.items()
        for layer, row in enumerate(table)
        for head, share in enumerate(row)
    ]
    command = (
        f"python -m experiments.runs.budget_policies --text FILE --tokens {options.tokens} "
        f"--retention {options.retention:g} --methods {' '.join(options.methods)} --pattern-by {options.pattern_by}"
    )
    write_results(options.out / "budget_policies.json", "budget_policies", rows, seed=0, command=command)
    panels = {method_label(method): table for method, table in by_method.items()}
    save_figure(plot_policies(panels, options.retention), options.out / "budget_policies.png")


if __name__ == "__main__":
    sys.exit(main())
