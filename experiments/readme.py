"""The README's headline and results, and the pages results and claims, written from the result files alone.

python -m experiments.readme [--check]
"""

import sys

import torch

from experiments.claims import claims_page
from experiments.common import RESULTS
from experiments.evaluations import ABLE
from experiments.memory import best_precisions, comparable_length
from experiments.report.names import FULL
from experiments.results_page import results_page
from experiments.tables import (
    AT_4096,
    KL,
    KVZIP_KEEPS_FIRST,
    Row,
    date_of,
    document,
    interval,
    name_of,
    overlapping_items,
    read,
    score,
    table,
    tokens,
)

ROOT = RESULTS.parents[1]
README, RESULTS_PAGE = ROOT / "README.md", ROOT / "docs" / "results.md"
CLAIMS_PAGE = ROOT / "docs" / "claims.md"
TITLE = "## Results\n\n"
TIERS = "lkv, tiers"  # of decode.json
_SECOND_MODEL = "memory-qwen2.5-coder-0.5b-instruct"


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
        sys.exit(f"{names} differ from the result files: run python -m experiments.readme")
    for path in stale:
        path.write_text(pages[path], encoding="utf-8")


def headline() -> str:
    """What compression changes, at every length at which all methods were measured on the same contexts; for whom."""
    length = comparable_length(read("memory", memory=0.05))
    lengths = sorted({row["tokens"] for row in read("memory", memory=0.05) if row["tokens"] <= length})
    tenth = _agreement("lkv", 0.1, lengths)
    contexts = [str(_best("lkv", 0.05)[length]["contexts"]) for length in lengths]
    (time,), (token,) = read("prefill", **AT_4096), read("decode", dtype="float32", what="token", threads=1, **AT_4096)
    (tiers,) = read("decode", dtype="float32", what="token", threads=1, **{**AT_4096, "method": TIERS})
    return (
        "**LKV shrinks the KV cache of a long prompt to a tenth of its bytes, and the model still predicts the same "
        f"next token in {min(tenth)} to {max(tenth)}% of cases.**\nThe KV cache is what a transformer stores of the "
        "text that it has read: a key and a value for every token, in every head and layer. At 5% of the bytes, after "
        f"{' / '.join(f'{tokens:,}' for tokens in lengths)} tokens, the prediction is the same in "
        f"{_shares('lkv', lengths)} of cases; with KVzip, which reads\nthe text twice, in "
        f"{_shares('kvzip', lengths)}, with SnapKV in {_shares('snapkv', lengths)} (SmolLM2-135M-Instruct; "
        f"{' / '.join(contexts)} texts; bytes of a 16-bit cache,\nhalf of those of "
        "the float32 that a CPU computes in by default; every method stores what it keeps in 8 to 3 bits a "
        "value; `memory.json`).\n\n"
        "* **For** many questions about one long text, and for serving more of them in the same memory.\n"
        f"* **Costs** {time['value'] - 1:.0%} more time to read the text, once. An answer token then takes "
        f"{token['value']:.2f} of the full cache's time over 15% of the entries, unquantised, and {tiers['value']:.2f} "
        f"over {bytes_beside(tiers, token)} in 8 to 3 bits ([measured](#results) at 4,096 tokens on a CPU).\n"
        "* **Needs** a *policy*, a small network that is trained once for each model. Two are included; `lkv fit` "
        "makes others in minutes.\n"
        "* **Not for** short prompts, which leave little to save, or for work in which no detail may be lost.\n"
        "* **Measured** on two small models (135M and 0.5B parameters) on CPUs; on a [GPU](docs/gpu.md), times alone. "
        "Not on the paper's 8B models ([scripts](experiments/runs/README.md))."
    )


def bytes_beside(row: Row, other: Row) -> str:
    """How many bytes a row of decode.json holds beside another one of its dtype: "as many" where they differ by less
    than a twentieth."""
    ratio = _own_bytes(row) / _own_bytes(other)
    words = {1.0: "as many bytes", 0.5: "half as many bytes"}
    return next((text for of, text in words.items() if abs(ratio / of - 1) < 0.05), f"{ratio:.2f} times as many bytes")


def _own_bytes(row: Row) -> float:
    """The bytes of the entries in a row of decode.json, or their share of the full cache's where the file has none."""
    if "nbytes" in row:
        return row["nbytes"]
    if "memory" in row:  # a share of a 16-bit cache's bytes
        return row["memory"] * 2 / getattr(torch, row["dtype"]).itemsize
    return row["realised"]


def _agreement(method: str, memory: float, lengths: list[int]) -> list[int]:
    """In how many of a hundred cases the most likely next token is the full cache's, at each length."""
    return [round(100 * _best(method, memory)[length]["agreement"]) for length in lengths]


def _shares(method: str, lengths: list[int]) -> str:
    return " / ".join(map(str, _agreement(method, 0.05, lengths))) + "%"


def _best(method: str, memory: float) -> dict[int, dict]:
    """The rows of a method in its best of the precisions that all have, by their lengths."""
    rows = best_precisions(read("memory", memory=memory))
    return {row["tokens"]: row for row in rows if row["method"] == method}


def readme_section() -> str:
    """One table of what each method keeps of the model, and what LKV costs."""
    memory = read("memory", memory=0.05)
    length = comparable_length(memory)
    by_bytes = {row["method"]: row for row in best_precisions([row for row in memory if row["tokens"] == length])}
    by_entries = {row["method"]: row for row in read("length", task="all", tokens=length, retention=0.15)}
    ruler = {row["method"]: row for row in read("ruler", task=ABLE)}
    lines = []
    for method in (FULL, "lkv", "kvzip", "lkv-h+expected", "adakv-snapkv", "snapkv"):
        whole = "0" if method == FULL else "not measured"
        lines.append(
            [
                name_of(method),
                interval(by_bytes[method]) if method in by_bytes else whole,
                interval(by_entries[method]) if method in by_entries and method != FULL else whole,
                score(ruler[method]) if method in ruler else "not measured",
            ]
        )
    plain, own = (read("grid", task="all", method=method)[0] for method in ("uniform+expected", "lkv-h+lkv-t"))
    head = ["KL, 5% of the bytes", "KL, 15% of the entries", "RULER, 15% of the entries"]
    is_earlier = date_of("kvzip", "ruler") < KVZIP_KEEPS_FIRST
    earlier_kvzip = "; KVzip before it kept the first four tokens, which improved it" * is_earlier
    notes = (
        "SmolLM2-135M-Instruct; texts are compressed before the question is known; brackets are 95% intervals. LKV was "
        f"trained on other texts of the same kinds, invented facts among them ({overlapping_items()}; "
        "`lkv/policy/checkpoints/*/config.json` names the data sets); the baselines are untrained.\n"
        f"* {KL} of next-token predictions, in nats per token: 0 is no difference. First column: equal bytes, 5% of a "
        "16-bit cache's, each method in its best of the precisions that all have "
        f"({tokens(length)}, {by_bytes['lkv']['contexts']} contexts, `memory.json`). Second: equal entries (an entry "
        "is the key and value of one token in one head) in float32 "
        f"({tokens(length)}, {by_entries['lkv']['contexts']} contexts, `length.json`). Expected Attention with its own "
        f"uniform budgets: {interval(plain)}, where LKV has {interval(own)} (1k to 2k tokens, {own['contexts']} "
        "contexts, `grid.json`).\n"
        "* RULER: score of 100, over the tasks where the full cache reaches 50 "
        f"(2,048 tokens, {ruler[FULL]['n']} samples, `ruler.json`{earlier_kvzip})."
    )
    second = {row["method"]: interval(row) for row in best_precisions(read(_SECOND_MODEL, memory=0.05))}
    links = (
        f"On **Qwen2.5-Coder-0.5B-Instruct**, KL at 5% of the bytes is {second['lkv']}, with KVzip {second['kvzip']}, "
        f"with SnapKV {second['snapkv']} (1,000 tokens, 5 contexts, `{_SECOND_MODEL}.json`). "
        "All figures come from `experiments/results/`, whose files name command, machine and seed. "
        "[Results](docs/results.md) has other lengths, needles, LongBench and a second model; [claims](docs/claims.md) "
        "lists what held of the paper."
    )
    return "\n\n".join([table(head, lines), notes, _cost_sentence(), links])


def _cost_sentence() -> str:
    """Bytes and times of LKV at 4,096 tokens, by those of the full cache."""
    (size,), (time,) = read("cache_bytes", **AT_4096), read("prefill", **AT_4096)
    (token,), (half,) = (
        read("decode", dtype=dtype, what="token", threads=1, **AT_4096) for dtype in ("float32", "bfloat16")
    )
    machines = [document(name)["machine"] for name in ("prefill", "decode")]
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
