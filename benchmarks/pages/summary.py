"""The README's section: three small tables, each with its command."""

from typing import Any

from benchmarks.evaluations import ABLE, LEAST_SCORE
from benchmarks.pages.parts import LONGER, complete, counted, interval, name_of, other_models, rows, table
from lkv.evaluation.report.names import method_label
from lkv.methods.registry import FULL

REFITTED = "lkv+refit"
_COMPILED = {"numba": ", extra `cpu`"}  # what the backend of a row asks for


def section() -> str:
    """The README's section: three small tables, each with its command."""
    more = other_models()
    return "\n\n".join(
        [
            f"SmolLM2-135M-Instruct{' unless another is named' if more else ''}, the question unknown at compression, "
            "R = 0.15; 95% intervals. All figures come from `benchmarks/results/`, whose files name command, machine "
            "and seed. More lengths, methods and R: [results](docs/results.md). "
            'Refitted is `method="lkv+refit"`, which moves what is kept, in the same bytes: nearer in the mean, no '
            "better at single facts ([how](docs/methods.md#refitted)).",
            *_short_length("length"),
            *(part for name in more for part in _short_length(f"length-{name}", _other_ruler(name))),
            *_short_ruler(),
            *_short_costs(),
        ]
    )


def _short_length(name: str, told: str = "") -> list[str]:
    """KL by length of LKV and those closest to it, at R = 0.15; what is `told` of the model goes behind the lead."""
    measured = complete(rows(name, task="all"))
    by = {(row["method"], row["tokens"]): row for row in measured if row["retention"] == 0.15}
    if not by:
        return []
    lengths = sorted({tokens for _, tokens in by})
    refitted = rows(name.replace("length", "refit"), task="all", method=REFITTED, retention=0.15)
    by |= {(REFITTED, row["tokens"]): row for row in refitted}
    longer = [row for kind in LONGER for row in rows(name.replace("length", kind), task="all", retention=0.15)]
    longer = [row for row in longer if row["tokens"] > lengths[-1]]
    by |= {(row["method"], row["tokens"]): row for row in longer}
    apart = sorted({row["tokens"] for row in longer})
    options, model = "", measured[0]["model"]
    contexts = counted(row["contexts"] for row in by.values())
    lead = "**Fidelity by length**: KL(full \\|\\| compressed) in nats a token"
    if name != "length":
        options, lead = f" --model {model}", f"The same for **{model.rpartition('/')[2]}**"
    other = f"; {' and '.join(f'{tokens:,}' for tokens in apart)} tokens apart, in bfloat16" if apart else ""
    return [
        f"{lead}; {contexts} contexts a length{other} (`python -m benchmarks.length{options}`).{told}",
        table(
            ("", *(f"{tokens:,} tokens" for tokens in (*lengths, *apart))),
            (
                [
                    name_of(m),
                    *(interval(by[m, t]) if (m, t) in by else _missing(m, t in apart) for t in (*lengths, *apart)),
                ]
                for m in ("lkv", REFITTED, "kvzip", "lkv-h+expected", "snapkv")
                if m != REFITTED or refitted
            ),
        ),
    ]


def _missing(method: str, left_out: bool) -> str:
    """What stands where a method has no figure: a refitted one runs wherever it does plain."""
    return "not measured" if left_out or method == REFITTED else "cannot run"


def _short_ruler() -> list[str]:
    """RULER's retrieval tasks at both lengths and retentions."""
    retrieval = rows("ruler_retrieval", task="all")
    if not retrieval:
        return []
    by = {(row["method"], row["retention"], row["tokens"]): row for row in retrieval}
    lengths = sorted({tokens for _, _, tokens in by})
    retentions = sorted({retention for method, retention, _ in by if method != FULL}, reverse=True)
    return [
        f"**RULER**, five retrieval tasks, score of 100, {by[FULL, 1.0, lengths[0]]['n']} samples a length "
        "(`lkv eval ruler`).",
        table(
            ("", *(f"{tokens:,} tokens, R = {retention:g}" for tokens in lengths for retention in retentions)),
            (
                [
                    name_of(m),
                    *(interval(by[m, 1.0 if m == FULL else r, t], digits=1) for t in lengths for r in retentions),
                ]
                for m in (FULL, "lkv", REFITTED, "kvzip", "snapkv")
                if m != REFITTED or (m, retentions[0], lengths[0]) in by
            ),
        ),
    ]


def _other_ruler(name: str) -> str:
    """A sentence of RULER's tasks for another model at R = 0.15, as far as they were measured."""
    measured = rows(f"ruler-{name}", task="all")
    by = {(row["method"], row["tokens"]): row for row in measured if row["retention"] in (0.15, 1.0)}
    if not by:
        return ""
    lengths = sorted({tokens for _, tokens in by})
    scores = {
        method_label(method): " / ".join(f"{by[method, tokens]['value']:.1f}" for tokens in lengths)
        for method in dict.fromkeys([FULL, "lkv", *(method for method, _ in by)])
    }
    samples = counted(by[FULL, tokens]["n"] for tokens in lengths)
    at = " / ".join(f"{tokens:,}" for tokens in lengths)
    told = "; ".join(f"{method} {values}" for method, values in scores.items())
    return f" RULER's five retrieval tasks at {at} tokens, {samples} samples a length: {told}.{_all_able(name)}"


def _all_able(name: str) -> str:
    """A sentence of every RULER task that the full cache can do, where the others than retrieval were measured too."""
    other = rows(f"ruler_other-{name}", task=ABLE)
    if not other:
        return ""
    tokens = other[0]["tokens"]
    tasks: dict[str, dict[str, float]] = {}
    for row in rows(f"ruler-{name}", tokens=tokens) + rows(f"ruler_other-{name}", tokens=tokens):
        if row["method"] in (FULL, "lkv") and row["retention"] in (0.15, 1.0) and row["task"] not in ("all", ABLE):
            tasks.setdefault(row["task"], {})[row["method"]] = row["value"]
    able = [scores for scores in tasks.values() if scores[FULL] >= LEAST_SCORE]
    full, lkv = (sum(scores[method] for scores in able) / len(able) for method in (FULL, "lkv"))
    return (
        f" All {len(able)} of its tasks in which the full cache reaches {LEAST_SCORE:g} at {tokens:,} tokens: "
        f"Full cache {full:.1f}; LKV {lkv:.1f}."
    )


def _short_costs() -> list[str]:
    """Bytes and times of LKV at 4,096 tokens, by those of the full cache."""
    wanted: dict[str, Any] = {"method": "lkv", "tokens": 4096}
    lines = [
        ["bytes of k and v held, slack included", f"{row['value']:.3f}", "`python -m benchmarks.prefill`"]
        for row in rows("cache_bytes", **wanted)
    ]
    lines += [
        ["prefill with eviction", interval(row), "`python -m benchmarks.prefill`"] for row in rows("prefill", **wanted)
    ]
    for part, name in (("attention", "decoding, attention alone"), ("token", "decoding, a whole token")):
        lines += [
            [
                f"{name}, 1 thread{_COMPILED.get(str(row.get('backend')), '')}",
                interval(row),
                "`python -m benchmarks.decode`",
            ]
            for row in rows("decode", dtype="float32", what=part, threads=1, **wanted)
        ]
    if not lines:
        return []
    return [
        "**Memory and speed** on a CPU at 4,096 tokens, by the full cache's.",
        table(("", "of the full cache's", "command"), lines),
    ]
