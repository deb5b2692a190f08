"""docs/results.md: the shipped policies by length, by needles, and in serving."""

from typing import Any

from benchmarks.evaluations import ABLE
from benchmarks.pages.parts import (
    LONGER,
    complete,
    counted,
    interval,
    name_of,
    needle_tables,
    other_models,
    rows,
    ruler_tables,
    source,
    table,
)  # fmt: skip
from lkv.evaluation.report.names import part_label
from lkv.methods.registry import FULL

_SERVING = "`python -m benchmarks.serving`"


def results_page() -> str:
    """The whole of docs/results.md."""
    lead = (
        "SmolLM2-135M-Instruct with the shipped policy, the question unknown at compression; intervals are 95%. Each "
        "figure comes from a file under `benchmarks/results/`, which names its command, machine and seed. "
        "LKV's training data held invented facts hidden in text, not unlike needles, and 137 of its 22,869 items "
        "overlap with evaluated texts (`overlap.json`); the rivals are untrained. [More results](more-results.md) has "
        "all of RULER's tasks with more methods, RULER over R, and LongBench."
    )
    parts = ["# Results", lead, *_length(), *(needle_tables() if rows("needles", method="lkv-paper") else [])]
    parts += [*_ruler(), *_fidelity(), *_refit()]
    parts += [part for name in other_models() for part in _other_model(name)]
    parts += [*_serving(), "## Memory and speed", *_costs()]
    return "\n\n".join(part.replace("](benchmarks/", "](../benchmarks/") for part in parts) + "\n"


def _serving() -> list[str]:
    """Requests at once over a few contexts, by concurrency, and what the contexts take."""
    measured = rows("serving")
    by = {(row["what"], row["method"]): row for row in measured if "concurrency" not in row}
    if not by:
        return []
    rate, size, load, tight = (by[measure, "lkv"] for measure in ("throughput", "memory", "loading", "same memory"))
    seen = {
        (row["method"], row["concurrency"], row.get("statistic", "rate")): row["value"]
        for row in measured
        if "concurrency" in row
    }
    methods, concurrency = ("lkv", "full"), sorted({clients for _, clients, _ in seen})
    return [
        "## Serving",
        f"Questions about 4 texts of {rate['tokens']:,} tokens at R = {rate['retention']:g}, answers of at most 32 "
        f"tokens, on two cores ({_SERVING}, `serving.json`): 16 requests at once give "
        f"{interval(rate, digits=2)} times the tokens a second of `Context.ask`, one after another "
        f"(the table is of the server's engine alone; {rate['equal']} of {rate['answers']} answers equal). The "
        f"contexts hold {size['value']:.3f} of the full caches' bytes, loading one is {load['value']:.0f} times as "
        "fast as compressing it, and where memory holds little more than one full cache there are "
        f"{interval(tight, digits=2)} times the requests a second of full caches.",
        table(
            ("at once", *(f"{name_of(m)}, {unit}" for m in methods for unit in ("tokens/s", "p50, s", "p95, s"))),
            (
                [str(n), *(f"{seen[m, n, key]:.1f}" for m in methods for key in ("rate", "p50", "p95"))]
                for n in concurrency
            ),
        ),
    ]


def _fidelity() -> list[str]:
    """Held-out questions and text of 1k to 2k tokens: methods, and budget rules by selectors."""
    fidelity = {row["method"]: row for row in rows("fidelity", task="all")}
    learned = fidelity["lkv"]
    parts = [
        f"Fidelity on held-out questions and text at R = {learned['retention']}: {learned['n']} continuations of "
        f"{learned['contexts']} contexts of 1k to 2k tokens ({source('fidelity')}).",
        table(
            ("", "KL(full \\|\\| compressed)", "top-1 agreement"),
            ([name_of(m), interval(fidelity[m]), interval(fidelity[m], "agreement")] for m in fidelity if m != FULL),
        ),
    ]
    if grid := {row["method"]: row for row in rows("grid", task="all")}:
        rules, selectors = (tuple(dict.fromkeys(m.split("+")[i] for m in grid if "+" in m)) for i in (0, 1))
        parts += [
            f"Budget rules by selectors: KL(full \\|\\| compressed) over {grid[FULL]['contexts']} of these contexts "
            f"({source('grid')}).",
            table(
                ("", *map(part_label, selectors)),
                ([part_label(rule), *(interval(grid[f"{rule}+{s}"]) for s in selectors)] for rule in rules),
            ),
        ]
    return [*parts, *_variants()]


def _variants() -> list[str]:
    """Streaming and quantised storage, by length."""
    every = rows("variants")
    measured = {(row["variant"], row["tokens"]): row for row in every}
    if not measured:
        return []
    lengths = sorted({tokens for _, tokens in measured})
    contexts = " and ".join(
        f"{next(r['contexts'] for (_, t), r in measured.items() if t == tokens)} contexts of {tokens:,} tokens"
        for tokens in lengths
    )
    return [
        f"Streaming and quantised storage at R = {every[0]['retention']:g}, beside LKV of the whole prompt: "
        f"KL(full \\|\\| compressed) and top-1 agreement, {contexts} ({source('variants')}; bytes are those of k and v "
        f"held, slack included, of {every[0]['dtype']}).",
        table(
            ("", *(f"{tokens:,} tokens" for tokens in lengths), f"bytes at {lengths[0]:,}, of the full cache's"),
            (
                [
                    variant,
                    *(
                        f"{interval(measured[variant, tokens])} / {measured[variant, tokens]['agreement']:.3f}"
                        for tokens in lengths
                    ),
                    f"{measured[variant, lengths[0]]['bytes']:.3f}",
                ]
                for variant in dict.fromkeys(variant for variant, _ in measured)
            ),
        ),
    ]


def _costs() -> list[str]:
    speed = []
    for row in rows("prefill", method="lkv", tokens=4096):
        size = rows("cache_bytes", method="lkv", tokens=4096)[0]
        speed.append(
            f"At 4,096 tokens the cache holds {size['value']:.3f} of the full cache's bytes, slack included, and "
            f"prefill with eviction takes {interval(row)} of plain prefill (`cache_bytes.json`, `prefill.json`)."
        )
    for row in rows("decode", method="lkv", tokens=4096, dtype="float32", what="attention"):
        threads = row["threads"]
        token = rows("decode", method="lkv", tokens=4096, dtype="float32", what="token", threads=threads)[0]
        many = f"{threads} thread" + "s" * (threads > 1) + " (extra `cpu`)" * (row.get("backend") == "numba")
        speed.append(
            f"Decoding over it on {many}, attention takes {interval(row)} of the time of "
            f"PyTorch's best over the full cache, a whole token {interval(token)} (`decode.json`)."
        )
    for row in rows("comparison_cost"):
        speed.append(
            f"Comparing {row['methods']} on RULER at {row['tokens']:,} tokens takes {interval(row, digits=2)} of the "
            f"time of the full cache alone ({row['n']} samples, `comparison_cost.json`)."
        )
    for row in rows("streaming"):
        speed.append(
            f"Reading {row['tokens']:,} tokens in parts of {row['chunk']:,} never holds more than {row['value']:.3f} "
            "of the full cache's bytes (`streaming.json`)."
        )
    return [" ".join(speed)]


def _ruler() -> list[str]:
    """RULER's retrieval tasks, a table a retention."""
    return _by_retention(rows("ruler_retrieval", task="all"), "RULER's five retrieval tasks", "ruler_retrieval")


def _by_retention(measured: list[dict[str, Any]], lead: str, name: str) -> list[str]:
    """RULER's tables of what was measured, one for each retention."""
    retentions = sorted({row["retention"] for row in measured if row["method"] != FULL}, reverse=True)
    return [
        part
        for retention in retentions
        for part in ruler_tables(
            [row for row in measured if row["retention"] in (1.0, retention)], f"{lead}, R = {retention:g}", name
        )
    ]


def _refit() -> list[str]:
    """Methods with what they keep refitted, beside themselves."""
    measured = _length("refit")
    if not measured:
        return []
    lead = (
        "`METHOD+refit` moves what is kept so that it answers as all entries did, by least squares in the same bytes "
        "([methods](methods.md#refitted)): nearer to the full cache in the mean, but at single facts (RULER above, "
        "needles below) no better, and at R = 0.05 worse. The same contexts as above."
    )
    return ["## Refitted", lead, *measured, *needle_tables("refit_needles")]


def _other_model(name: str) -> list[str]:
    """A part of its own for another model: fidelity by length, RULER, needles, whatever there is."""
    title = rows(f"length-{name}")[0]["model"].rpartition("/")[2]
    able, others = (rows(f"{kind}-{name}", task=ABLE) for kind in ("ruler", "ruler_other"))
    lead = f"RULER: mean score over the tasks in which {title}'s full cache reaches 50 at every length"
    longer = [_length(f"{kind}-{name}") for kind in LONGER]
    return [
        f"### {title}",
        *_length(f"length-{name}"),
        *(["Longer texts, in bfloat16; KVzip, which reads a text twice, is left out."] if any(longer) else []),
        *(part for tables in longer for part in tables),
        *_by_retention(able, f"{lead}, of the five retrieval tasks", f"ruler-{name}"),
        *_by_retention(others, f"{lead}, of the other eight", f"ruler_other-{name}"),
        *needle_tables(f"needles-{name}"),
        *needle_tables(f"longer_needles-{name}"),
        *_length(f"refit-{name}"),
    ]


def _length(name: str = "length") -> list[str]:
    every = rows(name)
    measured = complete([row for row in every if row["task"] == "all"])
    if not measured:
        return []
    parts = []
    lengths = sorted({row["tokens"] for row in measured})
    tasks = ", ".join(dict.fromkeys(row["task"] for row in every if row["task"] != "all"))
    for retention in sorted({row["retention"] for row in measured if row["method"] != "full"}, reverse=True):
        if retention not in (0.15, 0.05):
            continue
        by = {(row["method"], row["tokens"]): row for row in measured if row["retention"] == retention}
        contexts = [row["contexts"] for row in by.values()]
        parts += [
            f"KL(full \\|\\| compressed) and top-1 agreement by length at R = {retention:g}: {tasks}; "
            f"{counted(contexts)} contexts a length ({source(name)}).",
            table(
                ("", *(f"{tokens:,} tokens" for tokens in lengths)),
                (
                    [
                        name_of(method),
                        *(
                            f"{interval(by[method, tokens])} / {by[method, tokens]['agreement']:.3f}"
                            if (method, tokens) in by
                            else "cannot run"
                            for tokens in lengths
                        ),
                    ]
                    for method in dict.fromkeys(method for method, _ in by)
                ),
            ),
        ]
    return [*parts, f"![{name}](benchmarks/results/small/{name}.png)"]
