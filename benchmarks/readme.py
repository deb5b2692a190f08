"""The README's headline and results, and the pages results and claims, written from the result files alone.

python -m benchmarks.readme [--check]
"""

import json
import sys

from benchmarks.claims import claims_page
from benchmarks.common import RESULTS
from benchmarks.evaluations import ABLE
from benchmarks.memory import best_precisions, comparable_length
from benchmarks.results_page import results_page
from benchmarks.tables import AT_4096, KL, interval, name_of, overlapping_items, read, score, table, tokens
from lkv.evaluation.report.names import FULL

ROOT = RESULTS.parents[1]
README, RESULTS_PAGE = ROOT / "README.md", ROOT / "docs" / "results.md"
CLAIMS_PAGE = ROOT / "docs" / "claims.md"
TITLE = "## Results\n\n"


def main() -> None:
    text = README.read_text(encoding="utf-8")
    start = text.index(TITLE) + len(TITLE)
    end = text.index("\n## ", start)
    first, last = text.index("\n\n") + 2, text.index("\n\n![")
    pages = {README: text[:first] + headline() + text[last:start] + readme_section() + "\n" + text[end:]}
    pages |= {RESULTS_PAGE: results_page(), CLAIMS_PAGE: claims_page()}
    stale = [path for path, page in pages.items() if not path.is_file() or path.read_text(encoding="utf-8") != page]
    if "--check" in sys.argv and stale:
        names = ", ".join(path.name for path in stale)
        sys.exit(f"{names} differ from the result files: run python -m benchmarks.readme")
    for path in stale:
        path.write_text(pages[path], encoding="utf-8")


def headline() -> str:
    """What 5% of the bytes change, at every length at which all methods were measured on the same contexts."""
    length = comparable_length(read("memory", memory=0.05))
    lengths = sorted({row["tokens"] for row in read("memory", memory=0.05) if row["tokens"] <= length})
    return (
        "**LKV shrinks what a transformer remembers of a long prompt, its KV cache, to a tenth or a twentieth of the "
        "bytes, and its predictions hardly change.**\nAt 5% of the bytes the KL divergence to the full cache's "
        f"next-token predictions is {_by_length('lkv', 0.05, lengths)} nats a token (0: no difference)\n"
        f"after {' / '.join(f'{tokens:,}' for tokens in lengths)} tokens; with KVzip, which reads a text twice, it is "
        f"{_by_length('kvzip', 0.05, lengths)}, with SnapKV {_by_length('snapkv', 0.05, lengths)}.\nAt 15% it is "
        f"{_by_length('lkv', 0.15, lengths)}, with KVzip {_by_length('kvzip', 0.15, lengths)} (SmolLM2-135M-Instruct; "
        "bytes of a 16-bit cache; all of them store what they keep in 8 to 3 bits a value)."
    )


def _by_length(method: str, memory: float, lengths: list[int]) -> str:
    rows = {row["tokens"]: row for row in best_precisions(read("memory", memory=memory)) if row["method"] == method}
    return " / ".join(f"{rows[length]['value']:.3f}" for length in lengths)


def readme_section() -> str:
    """One table of what each method keeps of the model, and what LKV costs."""
    memory = read("memory", memory=0.05)
    length = comparable_length(memory)
    by_bytes = {row["method"]: row for row in best_precisions([row for row in memory if row["tokens"] == length])}
    by_entries = {_COMPARED.get(row["method"], row["method"]): row for row in read("grid", task="all")}
    ruler = {row["method"]: row for row in read("ruler", task=ABLE)}
    lines = []
    for method in (FULL, "lkv", "kvzip", "lkv-h+expected", "expected", "adakv-snapkv", "snapkv"):
        whole = "0" if method == FULL else "not measured"
        lines.append(
            [
                name_of(method),
                interval(by_bytes[method]) if method in by_bytes else whole,
                interval(by_entries[method]) if method in by_entries and method != FULL else whole,
                score(ruler[method]) if method in ruler else "not measured",
            ]
        )
    grid = read("grid", task="all", method=FULL)[0]
    head = ["KL, 5% of the bytes", "KL, 15% of the entries", "RULER, 15% of the entries"]
    notes = (
        "SmolLM2-135M-Instruct; texts are compressed before the question is known; brackets are 95% intervals. "
        f"{KL} of next-token predictions, in nats per token: 0 is no difference. "
        f"First column: equal bytes, 5% of a 16-bit cache's, each method in its best precision ({tokens(length)}, "
        f"{by_bytes['lkv']['contexts']} contexts, `memory.json`). Second: equal entries (an entry is the key and value "
        f"of one token in one head) in float32 (1k to 2k tokens, {grid['contexts']} contexts, `grid.json`). RULER: "
        f"score of 100, over the tasks where the full cache reaches 50 (2,048 tokens, {ruler[FULL]['n']} samples, "
        "`ruler.json`). LKV was trained on other texts of the same kinds, invented facts among them "
        f"({overlapping_items()}, `overlap.json`); the baselines are untrained."
    )
    links = (
        "All figures come from `benchmarks/results/`, whose files name command, machine and seed. "
        "[Results](docs/results.md) has other lengths, needles, LongBench and a second model; [claims](docs/claims.md) "
        "lists what held of the paper."
    )
    return "\n\n".join([table(head, lines), notes, _cost_sentence(), links])


_COMPARED = {
    "lkv-h+lkv-t": "lkv", "uniform+snapkv": "snapkv", "uniform+expected": "expected", "ada+snapkv": "adakv-snapkv",
}  # fmt: skip


def _cost_sentence() -> str:
    """Bytes and times of LKV at 4,096 tokens, by those of the full cache."""
    (size,), (time,) = read("cache_bytes", **AT_4096), read("prefill", **AT_4096)
    (token,), (half,) = (
        read("decode", dtype=dtype, what="token", threads=1, **AT_4096) for dtype in ("float32", "bfloat16")
    )
    machines = [json.loads((RESULTS / f"{name}.json").read_text())["machine"] for name in ("prefill", "decode")]
    return (
        f"**Cost**, at 15% of the entries and 4,096 tokens, as a fraction of the full cache's: memory "
        f"{size['value']:.3f}, prefill time {interval(time, digits=2)} ({machines[0]}), time per decoded token "
        f"{interval(token, digits=2)} in float32 and {interval(half, digits=2)} in bfloat16 (one thread, "
        f"{machines[1]}). {_vllm_sentence()}"
    )


def _vllm_sentence() -> str:
    """Tokens a second inside vLLM, by those over full contexts."""
    rates = {row["memory"]: row for row in read("vllm", what="throughput", concurrency=16)}
    about = rates["equal"]
    return (
        f"In vLLM on a CPU, 16 concurrent requests over {about['contexts']} contexts of {tokens(about['tokens'])} "
        f"produce {rates['unlimited']['value']:.1f} times the tokens per second of full contexts in the prefix cache, "
        f"and {about['value']:.0f} times with equal memory for both."
    )


if __name__ == "__main__":
    main()
