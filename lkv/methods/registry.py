"""Methods by name: budget, selector and paper.

A method is a *budget* (how many tokens a KV head keeps) with a *selector* (which tokens). `METHODS` lists the named
ones; any other combination is written "BUDGET+SELECTOR". "METHOD+compensation" adds least-squares compensation
(`lkv.methods.compensation`), and "METHOD@NAME" selects one of several policies. `parse_method` parses these names.

Budgets and selectors register themselves: their classes carry `@register_budget(...)` or `@register_selector(...)`.
Other packages add methods with `register_method`, through the entry point group `lkv.methods`. This module does not
import torch; it imports the classes lazily, on the first look-up of a budget or selector.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from difflib import get_close_matches
from functools import cache, partial
from importlib import import_module
from importlib.metadata import entry_points
from pkgutil import iter_modules
from typing import TYPE_CHECKING, Any, TypeVar

from lkv.errors import LkvError

if TYPE_CHECKING:
    from lkv.methods.base import Budget, MethodInputs, Selector

FULL = "full"  # no method: transformers' own cache, uncompressed
POLICY, PATTERN, QUERIES, SECOND_PASS = "a policy", "a pattern of retrieval heads", "queries", "a second pass"
COMPENSATION = "+compensation"
_KVPRESS_NAMES = {  # kvpress's names, letters and digits only, if they differ from LKV's names and titles
    "adakv": "adakv-snapkv",
    "adakvexpectedattention": "adakv-expected",
    "adakvexpectedattentione2": "adakv-expected-e2",
    "duoattentiononthefly": "duo",
    "expectedattentione2": "expected-e2",
}

T = TypeVar("T", bound=type[Any])


@dataclass(frozen=True)
class RegisteredComponent:
    """A registered budget or selector: its name in "BUDGET+SELECTOR", labels, factory and requirements."""

    name: str
    description: str
    label: str
    build: Callable[["MethodInputs"], Any]
    needs: tuple[str, ...] = ()  # besides k and v, among POLICY, PATTERN, QUERIES and SECOND_PASS
    variant: str = ""
    compares_heads: bool = False
    uses_counts: bool = False


@dataclass(frozen=True)
class MethodSpec:
    """A parsed method name: its budget and selector, paper and labels."""

    name: str  # as given, including "+compensation" and "@NAME"
    budget: str
    selector: str
    paper: str = ""
    link: str = ""
    title: str = ""  # for tables and figures; by default made of the components' labels
    compensation: bool = False
    policy_name: str = ""  # NAME of "METHOD@NAME"
    canonical: str = ""  # the shortest name of the same method, without "@NAME"; set by `parse_method`

    @property
    def components(self) -> tuple[RegisteredComponent, RegisteredComponent]:
        """The budget and the selector."""
        return budgets()[self.budget], selectors()[self.selector]

    @property
    def needs(self) -> tuple[str, ...]:
        """The requirements of the method besides k and v."""
        budget, selector = self.components
        return tuple(dict.fromkeys((*selector.needs, *budget.needs, *[QUERIES] * self.compensation)))

    @property
    def needs_policy(self) -> bool:
        """Whether it reads a learned policy."""
        return POLICY in self.needs

    @property
    def needs_pattern(self) -> bool:
        """Whether it reads DuoAttention's pattern of retrieval heads."""
        return PATTERN in self.needs

    @property
    def needs_second_pass(self) -> bool:
        """Whether it reads the text twice, and so works only with `lkv.compress`."""
        return SECOND_PASS in self.needs

    @property
    def variants(self) -> tuple[str, ...]:
        """The variants of its components, if there are several of the same name."""
        return tuple(component.variant for component in self.components if component.variant)

    @property
    def label(self) -> str:
        """Its name in tables and figures."""
        label = self.title or "{1.label}, {0.label} budgets".format(*self.components)
        label += ", compensated" if self.compensation else ""
        return f"{label} ({self.policy_name})" if self.policy_name else label

    @property
    def description(self) -> str:
        """A line with budget, selector, paper and requirements."""
        budget, selector = self.components
        paper = f" [{self.paper}]" if self.paper else ""
        compensation = ["kept entries are compensated"] if self.compensation else []
        needs = f"needs {', '.join(self.needs) or 'nothing more'}"
        return "; ".join([budget.description, selector.description + paper, *compensation, needs, *self.variants])

    def build_budget(self, inputs: "MethodInputs") -> "Budget":
        """Build the budget from `MethodInputs`. Raises LkvError for missing inputs."""
        return self.components[0].build(inputs)

    def build_selector(self, inputs: "MethodInputs") -> "Selector":
        """Build the selector, as the budget."""
        return self.components[1].build(inputs)


# Name, budget, selector, paper, its arXiv number, title.
_NAMED = (
    ("lkv", "lkv-h", "lkv-t", "LKV", "", "LKV"),
    ("lkv-t", "uniform", "lkv-t", "LKV, ablation", "", "LKV-T, uniform budgets"),
    ("snapkv", "uniform", "snapkv", "Li et al. 2024", "2404.14469", "SnapKV"),
    ("pyramidkv", "pyramid", "snapkv", "Cai et al. 2024", "2406.02069", "PyramidKV"),
    ("adakv-snapkv", "ada", "snapkv", "Feng et al. 2024", "2407.11550", "Ada-SnapKV"),
    ("adakv-expected", "ada", "expected", "Feng et al. 2024, Devoto et al. 2025", "2407.11550",
     "Ada-Expected Attention"),
    ("expected", "uniform", "expected", "Devoto et al. 2025", "2510.00636", "Expected Attention"),
    ("duo", "duo", "duo-window", "Xiao et al. 2024 (DuoAttention)", "2410.10819", "DuoAttention"),
    ("pyramidkv-kvpress", "pyramid-kvpress", "snapkv", "Cai et al. 2024, as kvpress has it", "2406.02069",
     "PyramidKV (kvpress)"),
    ("duo-kvpress", "duo-heads", "duo-window", "Xiao et al. 2024, as kvpress has it", "2410.10819",
     "DuoAttention (kvpress)"),
    ("expected-e2", "uniform", "expected-e2", "Devoto et al. 2025, epsilon of their evaluations", "2510.00636",
     "Expected Attention, epsilon 0.01"),
    ("adakv-expected-e2", "ada", "expected-e2", "Devoto et al. 2025, as they evaluate it", "2510.00636",
     "Ada-Expected Attention, epsilon 0.01"),
    ("kvzip", "global", "kvzip", "Kim et al. 2025", "2505.23416", "KVzip (two passes)"),
    ("rdkv", "water-filling", "expected", "Zhang et al. 2026", "2605.08317", "Expected Attention, RDKV's allocation"),
    ("criticalkv", "uniform", "critical-snapkv", "Feng et al. 2025", "2502.03805", "CriticalKV"),
    ("h2o", "uniform", "h2o", "Zhang et al. 2023", "2306.14048", "H2O"),
    ("observed-attention", "uniform", "observed", "H2O as kvpress has it", "2306.14048", "Observed Attention"),
    ("tova", "uniform", "tova", "Oren et al. 2024", "2401.06104", "TOVA"),
    ("r-kv", "uniform", "r-kv", "Cai et al. 2025", "2505.24133", "R-KV"),
    ("streaming-llm", "uniform", "streaming-llm", "Xiao et al. 2023", "2309.17453", "StreamingLLM"),
    ("knorm", "uniform", "knorm", "Devoto et al. 2024", "2406.11430", "Knorm"),
    ("keydiff", "uniform", "keydiff", "Park et al. 2025", "2504.15364", "KeyDiff"),
    ("random", "uniform", "random", "", "", "Random"),
    ("lkv-h+snapkv", "lkv-h", "snapkv", "LKV, ablation", "", "SnapKV, LKV-H budgets"),
    ("lkv-h+expected", "lkv-h", "expected", "LKV, ablation", "", "Expected Attention, LKV-H budgets"),
    ("ada+lkv-t", "ada", "lkv-t", "LKV, ablation", "", "LKV-T, AdaKV budgets"),
    ("lkv-h+kvzip", "lkv-h", "kvzip", "KVzip's scores under learned budgets", "", "KVzip, LKV-H budgets"),
)  # fmt: skip
METHODS = {
    name: MethodSpec(name, budget, selector, paper, arxiv and f"https://arxiv.org/abs/{arxiv}", title)
    for name, budget, selector, paper, arxiv, title in _NAMED
}
_BUDGETS: dict[str, RegisteredComponent] = {}
_SELECTORS: dict[str, RegisteredComponent] = {}


def _register(
    registry: dict[str, RegisteredComponent],
    name: str,
    *,
    label: str,
    description: str,
    variant: str = "",
    **options: object,
) -> Callable[[T], T]:
    """Register a class under a name; a class may be registered under several.

    Requirements follow from the class: its `required_inputs`, `reads_queries` and `has_second_pass`. The keywords are
    the fields of `RegisteredComponent`; `options` are passed on to the class's `from_inputs`.
    """

    def register(cls: T) -> T:
        if name in registry:
            raise LkvError(f"the name {name!r} is taken by another budget or selector; give {cls.__name__} another.")
        needs = {
            POLICY: "policy" in cls.required_inputs,
            PATTERN: "pattern" in cls.required_inputs,
            QUERIES: getattr(cls, "reads_queries", False),
            SECOND_PASS: getattr(cls, "has_second_pass", False),
        }
        registry[name] = RegisteredComponent(
            name,
            description,
            label,
            build=partial(cls.from_inputs, **options),
            needs=tuple(need for need, is_needed in needs.items() if is_needed),
            variant=variant,
            compares_heads=getattr(cls, "compares_heads", False),
            uses_counts=getattr(cls, "uses_counts", False),
        )
        return cls

    return register


register_budget = partial(_register, _BUDGETS)  # @register_budget("NAME", label=..., description=...), for "NAME+..."
register_selector = partial(_register, _SELECTORS)  # the same for selectors, "...+NAME"


def register_method(
    name: str,
    selector: str | Callable[..., Any],
    budget: str | Callable[..., Any] = "uniform",
    *,
    needs: tuple[str, ...] = (),
    description: str = "",
    label: str = "",
    paper: str = "",
    link: str = "",
) -> None:
    """Register a method by name: for `lkv methods`, `lkv eval`, `RaggedCache`, `compress` and tables.

    Args:
        name: the method's name, without "+" and "@".
        selector: the name of a selector, or a callable that takes `lkv.methods.base.MethodInputs` and returns a
            `Selector`; a callable is registered as a selector by the same name, so that "BUDGET+NAME" works as well.
        budget: the same for the budget.
        needs: the requirements of the new components, among POLICY, PATTERN, QUERIES and SECOND_PASS.
        description: what the new components do, in one line; the callable's docstring by default.
        label: the name in tables and figures.
        paper: authors and year.
        link: the paper's address.

    Raises:
        LkvError: If the name is taken, or a component does not exist.
    """
    if "+" in name or "@" in name:
        raise LkvError(
            f"the method name {name!r} contains '+' or '@', which separate components and policies; give another."
        )
    if name in METHODS or name in (FULL, COMPENSATION[1:]):
        raise LkvError(
            f"the method name {name!r} is taken by LKV, by this program or by an installed plugin; give another name, "
            "or register it only once."
        )
    if unknown := {*needs} - {POLICY, PATTERN, QUERIES, SECOND_PASS}:
        constants = "POLICY, PATTERN, QUERIES and SECOND_PASS"
        raise LkvError(f"needs has {min(unknown)!r}; give constants of lkv.methods.registry, among {constants}.")
    _import_components()
    parts = (("budget", budget, _BUDGETS), ("selector", selector, _SELECTORS))
    for kind, part, registry in parts:
        if callable(part) and name in registry:
            raise LkvError(f"there is a {kind} {name!r} already; give the method another name.")
        if not callable(part) and part not in registry:
            raise LkvError(f"there is no {kind} {part!r}; give one of {_listed(registry)}, or a callable.")
    for _, part, registry in parts:
        if callable(part):
            line = description or (part.__doc__ or name).strip().splitlines()[0]
            registry[name] = RegisteredComponent(name, line, label or name, part, needs)
    budget_name, selector_name = (name if callable(part) else part for _, part, _ in parts)
    METHODS[name] = MethodSpec(name, budget_name, selector_name, paper, link, label or name)


def load_plugins() -> None:
    """Register the methods of other packages, once. Raises LkvError, naming the package, if one fails."""
    if failure := _load_plugins():
        message, error = failure
        raise LkvError(message) from error


@cache
def _load_plugins() -> tuple[str, Exception] | None:
    """Return the first package that failed to register its methods, with its error; cached, so it runs once."""
    for point in entry_points(group="lkv.methods"):
        try:
            loaded = point.load()
            if callable(loaded):
                loaded()
        except Exception as error:  # plugin code may raise anything
            return (
                f"the plugin {point.name!r} ({point.value}) could not register its methods: {str(error).rstrip('.')}. "
                "Fix it, or uninstall its package."
            ), error
    return None


@cache
def _import_components() -> None:
    """Import all modules of budgets and selectors, which register their classes."""
    for folder in ("lkv.methods.budgets", "lkv.methods.selectors"):
        for module in iter_modules(import_module(folder).__path__, f"{folder}."):
            import_module(module.name)


def budgets() -> dict[str, RegisteredComponent]:
    """Return all budgets by name, including those of other packages."""
    _import_components()
    load_plugins()
    return dict(_BUDGETS)


def selectors() -> dict[str, RegisteredComponent]:
    """Return all selectors by name, including those of other packages."""
    _import_components()
    load_plugins()
    return dict(_SELECTORS)


def methods() -> dict[str, MethodSpec]:
    """Return all named methods, including those of other packages."""
    load_plugins()
    return dict(METHODS)


def parse_method(name: str) -> MethodSpec:
    """Parse a method name: a named method or "BUDGET+SELECTOR", optionally with "+compensation" and "@NAME".

    Raises:
        LkvError: For an unknown method; the message suggests similar names.
    """
    if not isinstance(name, str):
        raise LkvError(f"the method is {name!r}; give a name that `lkv methods` lists.")
    load_plugins()
    plain, _, policy_name = name.partition("@")
    if "+" in policy_name:
        raise LkvError(f"the policy name {policy_name!r} contains '+'; write METHOD{COMPENSATION}@NAME.")
    pair = plain.removesuffix(COMPENSATION)
    compensation = pair != plain
    spec = METHODS.get(pair) or _combination(pair)
    canonical = spec.name + COMPENSATION * compensation
    return replace(spec, name=name, compensation=compensation, policy_name=policy_name, canonical=canonical)


def method_label(name: str) -> str:
    """Return the method's label for tables and figures; the name itself if it is not a known method."""
    spec = find_method(name)
    return spec.label if spec else name


def find_method(name: str) -> MethodSpec | None:
    """Return `parse_method(name)`, or None for an unknown method, as in result files of other programs."""
    try:
        return parse_method(name)
    except LkvError:
        return None


def _combination(name: str) -> MethodSpec:
    """Return the method "BUDGET+SELECTOR", or the named method of this combination. Raises LkvError."""
    budget, plus, selector = name.partition("+")
    if not plus:
        raise LkvError(_unknown(name))
    for spec in METHODS.values():
        if (spec.budget, spec.selector) == (budget, selector):
            return spec
    _import_components()
    has_budget, has_selector = budget in _BUDGETS, selector in _SELECTORS
    if has_budget != has_selector:
        kind, missing, registry = ("selector", selector, _SELECTORS) if has_budget else ("budget", budget, _BUDGETS)
        raise LkvError(f"there is no {kind} {missing!r} for {name!r}; use one of {_listed(registry)}.")
    if not has_budget:
        raise LkvError(_unknown(name))
    if _BUDGETS[budget].compares_heads and _SELECTORS[selector].uses_counts:
        fitting = _listed({name: part for name, part in _BUDGETS.items() if not part.compares_heads})
        raise LkvError(
            f"the selector {selector!r} ranks the tokens of each head separately, but under the budget {budget!r} "
            f"heads compete by their scores; use it with one of {fitting}."
        )
    return MethodSpec(name, budget, selector)


def _unknown(name: str) -> str:
    """Describe why `name` is unknown, from the named methods only, so that a typo does not import torch."""
    if name == FULL:
        return f"{FULL!r} keeps everything: use transformers' DynamicCache, or lkv.compress for a context."
    for kind, registry, pair in (("budget", _BUDGETS, "{}+SELECTOR"), ("selector", _SELECTORS, "BUDGET+{}")):
        if name in registry or any(name == getattr(spec, kind) for spec in METHODS.values()):
            return f"{name!r} is a {kind}: write {pair.format(name)}; `lkv methods` lists budgets and selectors."
    hint = f"did you mean {' or '.join(map(repr, similar))}? " if (similar := _similar_methods(name)) else ""
    return f"there is no method {name!r}; {hint}`lkv methods` lists them all."


def _similar_methods(name: str) -> list[str]:
    """Return the method with another spelling `name` (case, title, kvpress's name), else up to three similar ones."""
    named = {_letters(method): method for method in (*METHODS, *(method + COMPENSATION for method in METHODS))}
    titles = {_letters(spec.title): method for method, spec in METHODS.items() if spec.title}
    by_letters = titles | _KVPRESS_NAMES | named
    letters = _letters(name)
    for key in (letters, letters.removesuffix("press")):
        if key in by_letters:
            return [by_letters[key]]
    return list(dict.fromkeys(by_letters[key] for key in get_close_matches(letters, by_letters, n=3)))


def _letters(name: str) -> str:
    return "".join(character for character in name.lower() if character.isalnum())


def _listed(registry: dict[str, RegisteredComponent]) -> str:
    return ", ".join(sorted(registry))
