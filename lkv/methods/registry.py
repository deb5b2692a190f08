"""Every method by name: how much a head keeps, which tokens, whose idea it is, how it is drawn. No torch here.

`METHODS` holds the names that people use; any rule of `RULES` goes with any selector of `SELECTORS` as "RULE+SELECTOR".
`register_method` adds to all three, also from other packages (entry points of the group `lkv.methods`).
"METHOD+refit" is any of them with least-squares compensation (`methods.compensation`); "METHOD@NAME" is the method
under the policy of that name, where several policies are compared.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from difflib import get_close_matches
from functools import cache
from importlib.metadata import entry_points
from typing import Any

from lkv.errors import LkvError

FULL = "full"  # no method: transformers' own cache, uncompressed
POLICY, PATTERN, QUERIES, SECOND_PASS = "a policy", "a pattern of retrieval heads", "queries", "a second pass"
REFIT = "+refit"
_GREY = "#7F7F7F"


@dataclass(frozen=True)
class Part:
    """A budget rule or a selector: what it does, its name in print, what it needs beside k and v, what builds it where
    `methods.build` does not know it, and which variant it is where there are several of one name."""

    line: str
    label: str
    needs: tuple[str, ...] = ()
    builder: Callable[[Any], Any] | None = None
    variant: str = ""


@dataclass(frozen=True)
class Entry:
    """A method: its parts, whose it is (`paper`, and its address), and its `label`, `colour` and `marker` in print;
    `compensation`: whether what it keeps is refitted."""

    rule: str
    selector: str
    paper: str = ""
    link: str = ""
    label: str = ""
    colour: str = _GREY
    marker: str = "."
    compensation: bool = False


_COMPARING, _RANKING = ("ada", "global"), ("critical-snapkv", "critical-expected")
RULES = {
    "uniform": Part("every head keeps the same share", "Uniform"),
    "pyramid": Part(
        "lower layers keep more (PyramidKV)", "PyramidKV",
        variant="PyramidKV as its paper has it: a pyramid at every length",
    ),
    "pyramid-kvpress": Part(
        "lower layers keep more, in long texts (PyramidKV of kvpress)", "PyramidKV of kvpress",
        variant="PyramidKV (kvpress) as kvpress has it: all layers alike where the last would keep less than 64 tokens",
    ),
    "ada": Part("the heads of a layer compete by their scores (AdaKV)", "AdaKV"),
    "duo": Part(
        "retrieval heads keep all, others sinks and recent tokens (DuoAttention)", "DuoAttention", (PATTERN,),
        variant="DuoAttention with the exact budget: as many retrieval heads as R leaves room for beside the windows",
    ),
    "duo-heads": Part(
        "the share R of heads keeps all, others sinks and recent tokens (DuoAttention of kvpress)",
        "DuoAttention of kvpress",
        (PATTERN,),
        variant="DuoAttention (kvpress) as kvpress has it: the share R of heads keeps all, and so more than R is kept",
    ),
    "lkv-h": Part("learned budgets (LKV-H)", "LKV-H", (POLICY,)),
    "global": Part("all heads of all layers compete by their scores (KVzip)", "Global top-k"),
}  # fmt: skip
SELECTORS = {
    "lkv-t": Part("learned scores of k and v (LKV-T)", "LKV-T", (POLICY,)),
    "snapkv": Part("attention from the last 64 tokens, smoothed", "SnapKV", (QUERIES,)),
    "expected": Part(
        "attention expected of queries to come", "Expected Attention", (QUERIES,),
        variant="Expected Attention with epsilon 0, kvpress's default",
    ),
    "expected-e2": Part(
        "attention expected of queries to come, plus 0.01", "Expected Attention, epsilon 0.01", (QUERIES,),
        variant="Expected Attention with epsilon 0.01, as kvpress evaluates it",
    ),
    "h2o": Part("attention received from all tokens", "H2O", (QUERIES,)),
    "observed": Part("attention received, divided by how many tokens saw it", "Observed Attention", (QUERIES,)),
    "tova": Part("attention from the last token", "TOVA", (QUERIES,)),
    "streaming-llm": Part("the first and the most recent tokens", "StreamingLLM"),
    "duo-window": Part("the first 128 and the most recent tokens (DuoAttention)", "DuoAttention"),
    "knorm": Part("small keys", "Knorm"),
    "keydiff": Part("keys unlike the mean key", "KeyDiff"),
    "critical-snapkv": Part(
        "SnapKV, weighed by the size of the projected values (CriticalKV)", "CriticalKV", (QUERIES,)
    ),
    "critical-expected": Part(
        "Expected Attention, weighed by the size of the projected values (CriticalKV)",
        "CriticalKV over Expected Attention",
        (QUERIES,),
    ),
    "random": Part("chance", "Random"),
    "kvzip": Part("attention received while the text is repeated (KVzip)", "KVzip", (SECOND_PASS,)),
}  # fmt: skip

_ARXIV = "https://arxiv.org/abs/"
# Okabe and Ito's palette, told apart by the colour-blind; vermilion is LKV's. What has no colour of its own is grey.
METHODS = {
    "lkv": Entry("lkv-h", "lkv-t", "LKV", label="LKV", colour="#D55E00", marker="o"),
    "lkv-t": Entry("uniform", "lkv-t", "LKV, ablation", label="LKV-T, uniform budgets", marker="p"),
    "snapkv": Entry("uniform", "snapkv", "Li et al. 2024", _ARXIV + "2404.14469", "SnapKV", "#0072B2", "s"),
    "pyramidkv": Entry("pyramid", "snapkv", "Cai et al. 2024", _ARXIV + "2406.02069", "PyramidKV", marker="^"),
    "adakv-snapkv": Entry("ada", "snapkv", "Feng et al. 2024", _ARXIV + "2407.11550", "Ada-SnapKV", "#56B4E9", "v"),
    "adakv-expected": Entry(
        "ada", "expected", "Feng et al. 2024, Devoto et al. 2025", _ARXIV + "2407.11550", "Ada-Expected Attention",
        marker="d",
    ),
    "expected": Entry("uniform", "expected", "Devoto et al. 2025", _ARXIV + "2510.00636", "Expected Attention",
                      marker="X"),
    "duo": Entry(
        "duo", "duo-window", "Xiao et al. 2024 (DuoAttention)", _ARXIV + "2410.10819", "DuoAttention", marker="P"
    ),
    "pyramidkv-kvpress": Entry("pyramid-kvpress", "snapkv", "Cai et al. 2024, as kvpress has it", _ARXIV + "2406.02069",
                               "PyramidKV (kvpress)", marker="^"),
    "duo-kvpress": Entry("duo-heads", "duo-window", "Xiao et al. 2024, as kvpress has it", _ARXIV + "2410.10819",
                         "DuoAttention (kvpress)", marker="P"),
    "expected-e2": Entry("uniform", "expected-e2", "Devoto et al. 2025, epsilon of their evaluations",
                         _ARXIV + "2510.00636", "Expected Attention, epsilon 0.01", marker="X"),
    "adakv-expected-e2": Entry("ada", "expected-e2", "Devoto et al. 2025, as they evaluate it", _ARXIV + "2510.00636",
                               "Ada-Expected Attention, epsilon 0.01", marker="d"),
    "kvzip": Entry("global", "kvzip", "Kim et al. 2025", _ARXIV + "2505.23416", "KVzip (two passes)", "#009E73", "D"),
    "criticalkv": Entry("uniform", "critical-snapkv", "Feng et al. 2025", _ARXIV + "2502.03805", "CriticalKV",
                        marker=">"),
    "h2o": Entry("uniform", "h2o", "Zhang et al. 2023", _ARXIV + "2306.14048", "H2O", marker="<"),
    "observed-attention": Entry("uniform", "observed", "H2O as kvpress has it", _ARXIV + "2306.14048",
                                "Observed Attention", marker="h"),
    "tova": Entry("uniform", "tova", "Oren et al. 2024", _ARXIV + "2401.06104", "TOVA", marker="H"),
    "streaming-llm": Entry("uniform", "streaming-llm", "Xiao et al. 2023", _ARXIV + "2309.17453", "StreamingLLM",
                           marker="8"),
    "knorm": Entry("uniform", "knorm", "Devoto et al. 2024", _ARXIV + "2406.11430", "Knorm", marker="*"),
    "keydiff": Entry("uniform", "keydiff", "Park et al. 2025", _ARXIV + "2504.15364", "KeyDiff", "#CC79A7", "X"),
    "random": Entry("uniform", "random", label="Random", marker="x"),
    "lkv-h+snapkv": Entry("lkv-h", "snapkv", "LKV, ablation", marker="1"),
    "lkv-h+expected": Entry("lkv-h", "expected", "LKV, ablation", colour="#E69F00", marker="^"),
    "ada+lkv-t": Entry("ada", "lkv-t", "LKV, ablation", marker="2"),
    "lkv-h+kvzip": Entry("lkv-h", "kvzip", "KVzip's scores under learned budgets", colour="#7A3E9D", marker="p"),
}  # fmt: skip


def register_method(
    name: str,
    selector: str | Callable[..., Any],
    rule: str | Callable[..., Any] = "uniform",
    *,
    needs: tuple[str, ...] = (),
    line: str = "",
    label: str = "",
    paper: str = "",
    link: str = "",
    colour: str = _GREY,
    marker: str = ".",
) -> None:
    """Make a method known by `name`, to `lkv methods`, `lkv eval`, `RaggedCache` and tables.

    `selector` and `rule` are names that are known, or callables that take `methods.build.MethodInputs` and give a
    `Selector` or a budget rule; these become known as parts by the same name, so that they go with others as
    "RULE+SELECTOR". `needs` of the new selector are among POLICY, PATTERN, QUERIES and SECOND_PASS. Raises LkvError for
    a name that is taken, or a part that is not known.
    """
    if "+" in name or "@" in name:
        raise LkvError(
            f"the method name {name!r} holds a '+' or '@', which put parts and policies together; give another."
        )
    if name in METHODS or name in (FULL, REFIT[1:]):
        raise LkvError(
            f"the method name {name!r} is taken: by LKV, by this program or by an installed plugin; give another, or "
            "register it in one place alone."
        )
    chosen, parts = {}, []
    for kind, given, known in (("rule", rule, RULES), ("selector", selector, SELECTORS)):
        if callable(given):
            if name in known:
                raise LkvError(f"there is a {kind} {name!r} already; give the method another name.")
            part = Part(line or (given.__doc__ or name).strip().splitlines()[0], label or name, needs, given)
            parts.append((known, part))
            chosen[kind] = name
        elif given in known:
            chosen[kind] = given
        else:
            raise LkvError(f"there is no {kind} {given!r}; give one of {', '.join(sorted(known))}, or a callable.")
    for known, part in parts:  # only now, so that a call which was refused leaves nothing
        known[name] = part
    METHODS[name] = Entry(chosen["rule"], chosen["selector"], paper, link, label or name, colour, marker)


@cache
def load_plugins() -> None:
    """Let other packages register their methods, once. Raises LkvError, which names the package, where one fails."""
    for point in entry_points(group="lkv.methods"):
        try:
            loaded = point.load()
            if callable(loaded):
                loaded()
        except Exception as error:  # whatever a stranger's code raises
            raise LkvError(
                f"the plugin {point.name!r} ({point.value}) could not register its methods: {str(error).rstrip('.')}. "
                "Otherwise mend it, or uninstall its package."
            ) from error


def methods() -> dict[str, Entry]:
    """All methods by name, those of other packages too."""
    load_plugins()
    return METHODS


def find(name: str) -> Entry:
    """The method `name`: one of METHODS or "RULE+SELECTOR", also with "+refit" behind it.

    Raises LkvError for an unknown name.
    """
    if not isinstance(name, str):
        raise LkvError(f"method is {name!r}; give a name that `lkv methods` lists.")
    load_plugins()
    name, _, tag = _canonical(name).partition("@")
    if "+" in tag:
        raise LkvError(f"the policy name {tag!r} holds a '+'; write METHOD{REFIT}@NAME, the policy's name last.")
    if name in METHODS:
        return METHODS[name]
    plain = name.removesuffix(REFIT)
    if plain != name and not plain.endswith(REFIT):
        return replace(find(plain), compensation=True)
    rule, plus, selector = name.partition("+")
    if plus and rule in RULES and selector in SELECTORS:
        if rule in _COMPARING and selector in _RANKING:
            fitting = ", ".join(sorted(known for known in RULES if known not in _COMPARING))
            raise LkvError(
                f"{selector!r} ranks the tokens of each head alone, but under {rule!r} heads compete by their scores; "
                f"use it with one of {fitting}."
            )
        return Entry(rule, selector)
    if plus and (rule in RULES) != (selector in SELECTORS):
        known, part = (SELECTORS, selector) if rule in RULES else (RULES, rule)
        raise LkvError(f"there is no {part!r} to make {name!r} of; use one of {', '.join(sorted(known))}.")
    if name == FULL:
        raise LkvError(f"{FULL!r} keeps everything: use transformers' own DynamicCache, or lkv.compress for a context.")
    if name in RULES or name in SELECTORS:
        rule, selector = (name, "SELECTOR") if name in RULES else ("RULE", name)
        raise LkvError(
            f"{name!r} is a part of methods: give it as {rule}+{selector}; `lkv methods` lists rules and selectors."
        )
    near = get_close_matches(name, [*METHODS, *(known + REFIT for known in METHODS)], n=2) or sorted(METHODS)
    raise LkvError(
        f"there is no method {name!r}; did you mean {' or '.join(map(repr, near))}? `lkv methods` lists them all."
    )


def _canonical(name: str) -> str:
    """The name with the budget as it is called today: result files of earlier versions have "contest" for "global"."""
    return name.replace("contest+", "global+", 1) if name.startswith("contest+") else name


def builder_of(kind: str, name: str) -> Callable[[Any], Any] | None:
    """What builds the registered "rule" or "selector" `name`, None for those of `methods.build`."""
    return (RULES if kind == "rule" else SELECTORS)[name].builder


def needs(name: str) -> tuple[str, ...]:
    """What the method `name` needs beside k and v."""
    entry = find(name)
    refit = (QUERIES,) if entry.compensation else ()
    return tuple(dict.fromkeys((*SELECTORS[entry.selector].needs, *RULES[entry.rule].needs, *refit)))


def needs_pattern(name: str) -> bool:
    """Whether the method `name` reads DuoAttention's pattern of retrieval heads."""
    return PATTERN in needs(name)


def needs_policy(name: str) -> bool:
    """Whether the method `name` reads a learned policy."""
    return POLICY in needs(name)


def needs_second_pass(name: str) -> bool:
    """Whether the method `name` reads the text twice, and so works with `compress` alone."""
    return SECOND_PASS in needs(name)


def describe(name: str) -> str:
    """One line: how much, which, whose, and what the method needs."""
    entry = find(name)
    tail = f" [{entry.paper}]" if entry.paper else ""
    required = ", ".join(needs(name)) or "nothing more"
    parts = [RULES[entry.rule].line, SELECTORS[entry.selector].line + tail]
    parts += [*(["what is kept is refitted"] if entry.compensation else []), f"needs {required}"]
    return "; ".join([*parts, *variants(name)])


def variants(name: str) -> tuple[str, ...]:
    """Which variants the method `name` is made of, where others of the same name exist; none for an unknown name."""
    known = named_like(name)
    parts = (RULES[known[1].rule], SELECTORS[known[1].selector]) if known else ()
    return tuple(part.variant for part in parts if part.variant)


def label(name: str) -> str:
    """The method as it is called in print; "uniform+snapkv" is SnapKV as "snapkv" is."""
    known = named_like(name)
    if known is None:
        return name
    entry, tag = known[1], policy_name(name)
    shown = entry.label or f"{SELECTORS[entry.selector].label}, {RULES[entry.rule].label} budgets"
    shown += ", refitted" if entry.compensation else ""
    return f"{shown} ({tag})" if tag else shown


def policy_name(name: str) -> str:
    """The name of the policy in "METHOD@NAME", "" where it has none."""
    return name.partition("@")[2]


def named_like(name: str) -> tuple[str, Entry] | None:
    """The known name and entry of the method `name` under any of its names, or None for a name that is not known."""
    load_plugins()
    name = _canonical(name.partition("@")[0])
    if name.endswith(REFIT):
        plain = named_like(name.removesuffix(REFIT))
        return (
            None if plain is None or plain[1].compensation else (plain[0] + REFIT, replace(plain[1], compensation=True))
        )
    rule, plus, selector = name.partition("+")
    if name in METHODS and not plus:
        return name, METHODS[name]
    for known, entry in METHODS.items():
        if plus and (entry.rule, entry.selector) == (rule, selector):
            return known, entry
    if plus and rule in RULES and selector in SELECTORS:
        return name, Entry(rule, selector)
    return None
