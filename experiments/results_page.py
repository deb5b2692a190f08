"""docs/results.md, written from the result files alone."""

from collections.abc import Callable, Iterable, Sequence

from experiments.common import RESULTS
from experiments.evaluations import ABLE
from experiments.fit_tables import fits
from experiments.report.names import FULL, part_label
from experiments.tables import (
    AT_4096,
    KL,
    KVZIP_KEEPS_FIRST,
    Row,
    counted,
    cross,
    files_before,
    interval,
    kl_and_agreement,
    minus_lkv,
    name_of,
    other_models,
    overlapping_items,
    read,
    score,
    source,
    table,
    tokens,
    without_policy,
)

ROOT = RESULTS.parents[1]
LONGER = ("longer", "longest")  # results by length of fewer methods or tasks


def without_partial(rows: list[Row]) -> list[Row]:
    """Without methods that some contexts of a length were too long for: their means are of other contexts."""
    contexts = {row["tokens"]: row["contexts"] for row in rows if row["method"] == FULL}
    return [row for row in rows if row["contexts"] == contexts[row["tokens"]]]


def picture(name: str) -> str:
    path = RESULTS / "small" / f"{name}.png"
    return f"![{name}]({path.relative_to(ROOT)})" if path.is_file() else ""


def page(parts: Iterable[str]) -> str:
    """A page of docs/, whose pictures are in another folder."""
    return "\n\n".join(part.replace("](experiments/", "](../experiments/") for part in parts) + "\n"


def memory_name(label: str) -> str:
    """A method's name with its precision, where it has one."""
    method, _, precision = label.partition(" (")
    return name_of(method) + (f", {precision[:-1]}" if precision else "")


def results_page() -> str:
    """The shipped policies by length, by needles, and in serving."""
    lead = (
        "SmolLM2-135M-Instruct (the weights that LKV downloads, converted from 4 bits, Q4_1) with the shipped policy, "
        "the question unknown at compression; intervals are 95%, those of few contexts somewhat too narrow "
        "([how to read them](guides/evaluating.md#how-to-read-them)). Each "
        "figure comes from a file under `experiments/results/`, which names its command, machine and seed. "
        "LKV's training data held invented facts hidden in text, not unlike needles, and "
        f'{overlapping_items()}; the baselines are untrained. Tables "with a policy that is not shipped" are of the '
        "policy before, for which they were not. More methods and "
        "retentions on fewer samples are [below](#more-methods-and-retentions)."
    )
    kvzip = (
        "KVzip's second pass repeats up to 2,048 tokens behind the text, so of the model's 8,192 positions the text "
        "may take about 6,080. A length is the most that a context has: at 7,800 tokens few are short enough. The "
        'tables by memory show these few, those by R say "cannot run".'
    )
    if before := files_before("kvzip", KVZIP_KEEPS_FIRST):
        names = ", ".join(f"`{name}.json`" for name in before)
        kvzip += (
            " It keeps the first four tokens of a text, as its authors keep the system prompt. Earlier it did not, "
            "which made it worse, most at small R and on Qwen2.5-Coder: the rows of KVzip, and of other budgets with "
            f"its scores, in {names} are of that time."
        )
    least = (
        "LKV-H leaves each head 5 tokens at least; files whose `date` is before 2026-11-27 were measured without that. "
        "With the shipped policies it changes little (`dev/LOG.md`)."
    )
    refit = (
        "`METHOD+refit` adjusts the kept keys and values by least squares, at no extra memory, so that attention "
        "output stays close to the full cache's ([methods](methods.md#compensation)). Single facts do not profit "
        f"(RULER above, needles below). How the mean KL of LKV changes, at each length (tiers: {source('memory')}; "
        f"unquantised at R: {source('refit')}); the tables are of the same contexts as above."
    )
    ruler = ruler_by_retention(read("ruler_retrieval", task="all"), "RULER's five retrieval tasks", "ruler_retrieval")
    parts = [
        "# Results",
        lead,
        kvzip,
        least,
        *memory(),
        *lengths("length"),
        *needles("needles"),
        *ruler,
        *fidelity(),
        *variants(),
        *fits(),
        "With the policy of ten minutes without own texts:",
        *needles("fit_needles"),
    ]
    parts += ["## Compensation", refit, compensation(), *lengths("refit"), *needles("refit_needles")]
    parts += [part for name in other_models() for part in other_model(name)]
    parts += [part for name in other_models() for part in instructions(f"instructions-{name}")]
    return page([*parts, *more_methods(), *serving(), *in_vllm(), "## Memory and speed", costs()])


def memory() -> list[str]:
    """KL and agreement at equal bytes: every method in every precision."""
    parts = ["## Fidelity by memory"]
    if not read("memory"):
        return []
    for name in ("memory", *(f"memory-{other}" for other in other_models())):
        rows = read(name)
        for length in sorted({row["tokens"] for row in rows}):
            here = [row for row in rows if row["tokens"] == length]
            columns = sorted({row["memory"] for row in here}, reverse=True)
            cells = {(row["method"], row["memory"]): kl_and_agreement(row) for row in here}
            lines = (
                [memory_name(m), *(cells.get((m, share), "") for share in columns)]
                for m in dict.fromkeys(row["method"] for row in here)
            )
            most = max(row["contexts"] for row in here)
            fewer = {name_of(row["method"].split(" (")[0]): row["contexts"] for row in here if row["contexts"] < most}
            contexts = "".join(
                f"; {method} only {count}, the others are too long for it" for method, count in fewer.items()
            )
            lead = (
                f"{here[0]['model'].rpartition('/')[2]}, {tokens(length)}: {KL} and top-1 agreement by the share of a "
                f"16-bit cache's bytes; {most} contexts{contexts} ({source(name)}). Without a precision: tiers."
            )
            parts += [lead, table((f"{share:.0%}" for share in columns), lines)]
    parts.append("![memory](experiments/results/small/memory.png)")
    lead, budget = "RULER's five retrieval tasks", "{:.0%} of a 16-bit cache's bytes, in tiers"
    parts += ruler_by_retention(read("ruler_memory", task="all"), lead, "ruler_memory", budget)
    return [*parts, *needles("needles_memory"), "## By length"]


def lengths(name: str) -> list[str]:
    """KL and agreement by length, a table a retention."""
    every = read(name)
    measured = without_partial([row for row in every if row["task"] == "all"])
    tasks = ", ".join(dict.fromkeys(row["task"] for row in every if row["task"] != "all"))
    parts = []
    for retention in (0.15, 0.05):
        if rows := [row for row in measured if row["retention"] == retention]:
            contexts = f"{counted(row['contexts'] for row in rows)} contexts a length ({source(name)})"
            parts.append(f"{KL} and top-1 agreement by length at R = {retention:g}: {tasks}; {contexts}.")
            rows.sort(key=lambda row: row["tokens"])
            cells = {(row["method"], row["tokens"]): kl_and_agreement(row) for row in rows}
            parts.append(cross(cells, tokens))
    return [*parts, f"![{name}](experiments/results/small/{name}.png)"] if measured else []


def compensation() -> str:
    """How compensation changes LKV's KL, a line a model, a column a budget."""
    lines = []
    for suffix in ("", *(f"-{name}" for name in other_models())):
        changes = (
            compensation_changes(f"{file}{suffix}", budget, share)
            for file, budget in (("memory", "memory"), ("refit", "retention"))
            for share in (0.15, 0.05)
        )
        cells = (", ".join(f"{change:+.0%} at {length:,}" for length, change in each.items()) for each in changes)
        lines.append([read(f"length{suffix}")[0]["model"].rpartition("/")[2], *cells])
    return table(["15% of the bytes", "5% of the bytes", "R = 0.15", "R = 0.05"], lines)


def compensation_changes(name: str, budget: str, share: float) -> dict[int, float]:
    """The mean KL of LKV with compensation relative to that without it, minus one, by length."""
    rows = [row for row in read(name, **{budget: share}) if row.get("task", "all") == "all"]
    kl = {(row["method"], row["tokens"]): row["value"] for row in rows}
    lengths = sorted(tokens for method, tokens in kl if method == "lkv+refit")
    return {tokens: kl["lkv+refit", tokens] / kl["lkv", tokens] - 1 for tokens in lengths}


def needles(name: str) -> list[str]:
    """The share found of what was hidden, one needle or four at a time, by method, budget and length."""
    parts = []
    for count, what in ((1, "A needle"), (4, "One of four needles")):
        if rows := read(name, needles=count):
            budget = "memory" if "memory" in rows[0] else "retention"
            head, form = ("bytes", ".0%") if budget == "memory" else ("R", "g")
            columns = sorted({row["tokens"] for row in rows})
            cells = {(row["method"], row[budget], row["tokens"]): interval(row, digits=2) for row in rows}
            lines = [
                [name_of(m), format(r, form), *(cells.get((m, r, length), "cannot run") for length in columns)]
                for m, r in dict.fromkeys((method, retention) for method, retention, _ in cells)
            ]
            found = counted(row["n"] for row in rows)
            parts += [f"{what} in real prose, share found of {found} ({source(name)})."]
            parts += [table([head, *map(tokens, columns)], lines)]
    return parts


def ruler_by_retention(rows: Sequence[Row], lead: str, name: str, budget: str = "R = {:g}") -> list[str]:
    """RULER's mean score, the paired difference to LKV and the share kept by length, a table a retention."""
    parts = []
    for retention in sorted({row["retention"] for row in rows if row["method"] != FULL}, reverse=True):
        own = [row for row in rows if row["retention"] in (1.0, retention)]
        best: dict[str, float] = {}
        for row in own:
            best[row["method"]] = max(row["value"], best.get(row["method"], 0.0))
        samples = ", ".join(f"{row['n']} samples at {row['tokens']:,}" for row in own if row["method"] == FULL)
        cells = {}
        for row in sorted(own, key=lambda row: -best[row["method"]]):
            for title, text in (
                ("tokens", score(row)),
                ("minus LKV", minus_lkv(row)),
                ("kept", f"{row['realised']:.3f}"),
            ):
                cells[row["method"], f"{row['tokens']:,} {title}"] = text
        parts += [f"{lead}, {budget.format(retention)} ({samples}; {source(name)}).", cross(cells, str, "")]
    return parts


def fidelity() -> list[str]:
    """Held-out questions and text of 1k to 2k tokens: methods, and budget rules by selectors."""
    rows = {row["method"]: row for row in read("fidelity", task="all")}
    grid = {row["method"]: row for row in read("grid", task="all")}
    learned = rows["lkv"]
    methods = ([name_of(m), interval(row), interval(row, "agreement")] for m, row in rows.items() if m != FULL)
    rules, selectors = (tuple(dict.fromkeys(m.split("+")[i] for m in grid if "+" in m)) for i in (0, 1))
    combinations = ([part_label(rule), *(interval(grid[f"{rule}+{s}"]) for s in selectors)] for rule in rules)
    return [
        f"Fidelity on held-out questions and text at R = {learned['retention']}: {learned['n']} continuations of "
        f"{learned['contexts']} contexts of 1k to 2k tokens ({source('fidelity')}).",
        table([KL, "top-1 agreement"], methods),
        f"Budget rules by selectors: {KL} over {grid[FULL]['contexts']} of these contexts ({source('grid')}).",
        table(map(part_label, selectors), combinations),
    ]


def variants() -> list[str]:
    """Streaming and quantised storage, by length."""
    rows = read("variants")
    contexts = {row["tokens"]: row["contexts"] for row in sorted(rows, key=lambda row: row["tokens"])}
    texts = " and ".join(f"{count} contexts of {tokens(length)}" for length, count in contexts.items())
    first = min(contexts)
    lines: dict[str, list[str]] = {}
    for row in sorted(rows, key=lambda row: row["tokens"]):
        lines.setdefault(row["variant"], [row["variant"]]).append(kl_and_agreement(row))
    for row in rows:
        if row["tokens"] == first:
            lines[row["variant"]].append(f"{row['bytes']:.3f}")
    return [
        f"Streaming and quantised storage at R = {rows[0]['retention']:g}, beside LKV of the whole prompt: "
        f"{KL} and top-1 agreement, {texts} ({source('variants')}; bytes are those of k and v held, slack included, "
        f"of {rows[0]['dtype']}).",
        table([*map(tokens, contexts), f"bytes at {first:,}, of the full cache's"], lines.values()),
    ]


def other_model(name: str) -> list[str]:
    """A section for another model: fidelity by length, RULER, needles, whatever there is."""
    title = read(f"length-{name}")[0]["model"].rpartition("/")[2]
    lead = f"RULER: mean score over the tasks in which {title}'s full cache reaches 50 at every length"
    longer = [part for kind in LONGER for part in lengths(f"{kind}-{name}")]
    parts = [f"### {title}", *lengths(f"length-{name}")]
    parts += ["Longer texts, in bfloat16; KVzip, which reads a text twice, is left out.", *longer] if longer else []
    for kind, tasks in (("ruler", "of the five retrieval tasks"), ("ruler_other", "of the other eight")):
        parts += ruler_by_retention(read(f"{kind}-{name}", task=ABLE), f"{lead}, {tasks}", f"{kind}-{name}")
    return [*parts, *needles(f"needles-{name}"), *needles(f"longer_needles-{name}"), *lengths(f"refit-{name}")]


def instructions(name: str) -> list[str]:
    """The share of instructions that are still followed, by method and budget, with and without protection."""
    rows = read(name)
    if not rows:
        return []
    full = next(row for row in rows if row["method"] == FULL)
    control = next(row for row in rows if row["method"] == "none")
    compressed = [row for row in rows if row["method"] not in (FULL, "none")]
    cells = {(row["method"], (row["memory"], row["protect"])): interval(row, digits=2) for row in compressed}
    lead = (
        f"{full['model'].rpartition('/')[2]}: {full['instructions']} checkable instructions, two before each text of "
        f"{tokens(full['tokens'])}, the question after compression. The full cache follows {full['followed']:.2f} of "
        f"them ({control['followed']:.2f} are met without being asked for). The share of these that is still followed, "
        f"by the share of a 16-bit cache's bytes, without and with `protect`, which keeps {full['protected']} tokens "
        f"({full['n']} instructions, {source(name)})."
    )
    head = {False: "", True: ", protected"}
    return ["## Instructions", lead, cross(cells, lambda column: f"{column[0]:.0%}{head[column[1]]}")]


def serving() -> list[str]:
    """Requests at once over a few contexts, by concurrency, and what the contexts take."""
    rows = read("serving")
    single = {(row["what"], row["method"]): row for row in rows if "concurrency" not in row}
    size, load = (single[what, "lkv"] for what in ("memory", "loading"))
    parts = [
        "## Serving",
        f"Four contexts of {tokens(size['tokens'])} at R = {size['retention']:g} hold {size['value']:.3f} of the full "
        f"caches' bytes, and loading one is {load['value']:.0f} times as fast as compressing it "
        "(`python -m experiments.serving`, `serving.json`).",
    ]
    if rate := single.get(("throughput", "lkv")):  # measured on an idle machine
        tight = single["same memory", "lkv"]
        parts[-1] += (
            f" 16 requests at once give {interval(rate, digits=2)} times the tokens a second of `Context.ask`, one "
            f"after another ({rate['equal']} of {rate['answers']} answers equal); where memory holds little more than "
            f"one full cache there are {interval(tight, digits=2)} times the requests a second of full caches."
        )
        lines: dict[int, dict[tuple[str, str], str]] = {}
        for row in rows:
            if "concurrency" in row:
                column = (row["method"], row.get("statistic", "rate"))
                lines.setdefault(row["concurrency"], {})[column] = f"{row['value']:.1f}"
        columns = [(method, key) for method in ("lkv", FULL) for key in ("rate", "p50", "p95")]
        units = {"rate": "tokens/s", "p50": "p50, s", "p95": "p95, s"}
        body = ([str(n), *(lines[n][column] for column in columns)] for n in sorted(lines))
        head = (f"{name_of(method)}, {units[key]}" for method, key in columns)
        parts.append(table(head, body, "at once"))
    return [*parts, *filter(None, [without_policy("serving")])]


def in_vllm() -> list[str]:
    """The plugin for vLLM against vLLM's own prefix cache."""
    rows = read("vllm")
    if not rows:
        return []
    one = {row["what"]: row for row in rows if row["what"] != "fit"}
    fit = {row["method"]: row["value"] for row in rows if row["what"] == "fit"}
    rates = {(row["memory"], row["concurrency"]): row for row in rows if row["what"] == "throughput"}
    about = one["compression"]
    lead = (
        f"vLLM on a CPU in float32, {about['contexts']} contexts of {tokens(about['tokens'])} at R = "
        f"{about['retention']:g}, against vLLM's own prefix cache with the full contexts (`python -m "
        f"experiments.vllm`, {source('vllm')}). Reading and compressing a text takes "
        f"{interval(about, digits=2)} of the time of reading it, the first token "
        f"{interval(one['first token'], digits=2)}. 1 GB holds {fit['lkv']} contexts, and "
        f"{fit[FULL]} full ones. Tokens a second, by those over full contexts:"
    )
    body = ([str(n), memory, interval(row, digits=2)] for (memory, n), row in rates.items())
    return ["## Inside vLLM", lead, table(["pages", "tokens a second"], body, "at once")]


def costs() -> str:
    """Memory and speed at 4,096 tokens, in sentences."""
    (size,), (time,) = read("cache_bytes", **AT_4096), read("prefill", **AT_4096)
    parts = [
        f"At 4,096 tokens the cache holds {size['value']:.3f} of the full cache's bytes, slack included, and "
        f"prefill with eviction takes {interval(time)} of plain prefill (`cache_bytes.json`, `prefill.json`)."
    ]
    for row in read("decode", what="attention", dtype="float32", **AT_4096):
        (token,) = read("decode", what="token", dtype="float32", threads=row["threads"], **AT_4096)
        threads = f"{row['threads']} thread" + "s" * (row["threads"] > 1)
        parts.append(
            f"Decoding over it on {threads}, attention takes {interval(row)} of the time of "
            f"PyTorch's best over the full cache, a whole token {interval(token)} (`decode.json`)."
        )
    for row in read("comparison_cost"):
        parts.append(
            f"Comparing {row['methods']} on RULER at {tokens(row['tokens'])} takes {interval(row, digits=2)} of the "
            f"time of the full cache alone ({row['n']} samples, `comparison_cost.json`)."
        )
    for row in read("streaming"):
        parts.append(
            f"Reading {tokens(row['tokens'])} in parts of {row['chunk']:,} never holds more than {row['value']:.3f} "
            "of the full cache's bytes (`streaming.json`)."
        )
    files = ("cache_bytes", "prefill", "decode", "comparison_cost", "streaming")
    return " ".join(part for part in (*parts, without_policy(*files)) if part)


def more_methods() -> list[str]:
    """RULER with every kind of method and over R, LongBench."""
    budgets = "What each method leaves to the 90 heads of the model at the same R:"
    parts = ["## More methods and retentions", *ruler_tasks(), *ruler_sweep(), *longbench()]
    return [*parts, budgets, picture("budget_policies")]


def ruler_tasks() -> list[str]:
    """RULER's mean over all tasks, and over those that the full cache can do."""
    able = {row["method"]: row for row in read("ruler", task=ABLE)}
    full, rows = able[FULL], read("ruler", task="all")
    head = ["13 tasks", "minus LKV", "where full reaches 50", "KL", "top-1 agreement", "kept"]
    return [
        f"RULER at {tokens(full['tokens'])}, R = 0.15: the mean over its 13 tasks ({rows[0]['n']} samples), and "
        f"over those where the full cache scores at least 50 ({full['n']} samples; {source('ruler')}, as `make "
        "reproduce-small` makes it). KL and agreement are those of the right answer, over all tasks.",
        table(head, score_lines(rows, lambda row: [score(able[row["method"]])], ("kl", "agreement", "realised"))),
        picture("ruler_tasks"),
    ]


def score_lines(
    rows: Sequence[Row], middle: Callable[[Row], list[str]], keys: Sequence[str]
) -> Iterable[Iterable[str]]:
    """A line a method, the best score first: name, score, difference to LKV, `middle`, and the figures `keys`."""
    for row in sorted(rows, key=lambda row: -row["value"]):
        whole = ["1" if key == "realised" else "" for key in keys]
        figures = whole if row["method"] == FULL else [f"{row[key]:.3f}" for key in keys]
        yield [name_of(row["method"]), score(row), minus_lkv(row), *middle(row), *figures]


def ruler_sweep() -> list[str]:
    """RULER's retrieval tasks by retention."""
    rows = read("ruler_sweep", task="all")
    (full,) = (row for row in rows if row["method"] == FULL)
    others = [row for row in rows[::-1] if row["method"] != FULL]
    order = list(dict.fromkeys(row["method"] for row in others))
    others.sort(key=lambda row: (order.index(row["method"]), -row["retention"]))
    return [
        f"RULER's five retrieval tasks by retention, at {tokens(full['tokens'])} ({full['n']} samples; the full cache "
        f"scores {score(full)}; {source('ruler_sweep')}).",
        cross({(row["method"], row["retention"]): score(row) for row in others}, "R = {:g}".format),
        picture("swept_sweep"),
    ]


def longbench() -> list[str]:
    """A sample of LongBench: mean over its tasks."""
    rows = read("longbench", task="all")
    return [
        f"A sample of LongBench: the mean over its 16 tasks, {rows[0]['n']} samples in all, cut to the model's 8k "
        f"tokens ({source('longbench')}). KL and agreement are those of the right answer.",
        table(["score", "minus LKV", "KL", "top-1 agreement"], score_lines(rows, lambda row: [], ("kl", "agreement"))),
    ]
