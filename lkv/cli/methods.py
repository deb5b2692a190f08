"""lkv methods and lkv policies: list all methods or policies, or describe one method or model."""

import json
import shutil
import textwrap
from typing import Any

from lkv.cli.command import Command, option
from lkv.policy.shipped import StoredPolicy, describe_card, fitted_policies, shipped_policies


class Methods(Command):
    """List the methods with paper and requirements."""

    name: str | None = option(
        "describe this method in full; BUDGET+SELECTOR and METHOD+compensation work as well",
        positional=True,
        nargs="?",
        metavar="[NAME]",
    )
    json_: bool = option("print all that is known, as JSON", False, alias="json")

    def run(self) -> None:
        """Print a table that fits the terminal, one method in full, or JSON."""
        from lkv.methods.registry import methods

        entries = [_describe_method(name) for name in ([self.name] if self.name else methods())]
        width = max(60, shutil.get_terminal_size().columns)
        if self.json_:
            print(json.dumps(entries[0] if self.name else entries, indent=1))
        elif self.name:
            print("\n".join(_wrap(key, value, 12, width) for key, value in entries[0].items() if value))
        else:
            _print_table(entries, width)


def _describe_method(name: str) -> dict[str, Any]:
    from lkv.methods.registry import parse_method

    spec = parse_method(name)
    budget, selector = spec.components
    return {
        "name": name,
        "label": spec.label,
        "budget": f"{budget.name}: {budget.description}",
        "selector": f"{selector.name}: {selector.description}",
        "needs": list(spec.needs),
        "variants": list(spec.variants),
        "paper": spec.paper,
        "link": spec.link,
    }


def _print_table(entries: list[dict[str, Any]], width: int) -> None:
    from lkv.methods.registry import COMPENSATION, budgets, selectors

    rows = [("method", "budget", "selector", "needs", "paper")]
    for entry in entries:
        budget, selector = (entry[part].split(":")[0] for part in ("budget", "selector"))
        needs = ", ".join(need.removeprefix("a ").split(" of ")[0] for need in entry["needs"])
        rows.append((entry["name"], budget, selector, needs, entry["paper"]))
    most = max(60, shutil.get_terminal_size((1000, 24)).columns)  # a pipe or a file cuts nothing
    widths = [max(len(row[column]) for row in rows) + 2 for column in range(4)]
    for row in rows:
        line = "".join(cell.ljust(size) for cell, size in zip(row, widths, strict=False)) + row[4]
        print((line if len(line) <= most else line[: most - 1] + "…").rstrip())
    all_budgets, all_selectors = budgets(), selectors()
    for title, components in (("budgets", all_budgets), ("selectors", all_selectors)):
        print(f"\n{title}:")
        for name, component in components.items():
            print(_wrap(f"  {name}", component.description, 20, width))
    competing = ", ".join(name for name, budget in all_budgets.items() if budget.compares_heads)
    by_head = ", ".join(name for name, selector in all_selectors.items() if selector.uses_counts)
    notes = (
        f"`lkv methods NAME` describes a method in full. Any budget goes with any selector, as BUDGET+SELECTOR, except "
        f"those under which heads compete ({competing}) with those that rank each head by itself ({by_head}); "
        f"METHOD{COMPENSATION} adjusts the kept values by least squares, in the same memory. Queries and a "
        "second pass come from the text itself; give --policy or --pattern, or use the shipped policy."
    )
    print("\n" + textwrap.fill(notes, width))


def _wrap(key: str, value: str | list[str], indent: int, width: int) -> str:
    text = value if isinstance(value, str) else ", ".join(value)
    start = f"{key:{indent}}" if len(key) < indent else f"{key}  "
    return textwrap.fill(text, width, initial_indent=start, subsequent_indent=" " * indent, break_on_hyphens=False)


class Policies(Command):
    """List the policies, shipped or fitted here: models, training, fidelity."""

    model: str | None = option("show what is available for this folder, GGUF file or Hub id (default: list all)")

    def run(self) -> None:
        """Print one paragraph per policy, or what is available for one model."""
        if self.model:
            print(_describe_model(self.model))
            return
        for policy in (*shipped_policies(), *fitted_policies()):
            print(_describe_policy(policy) + "\n")
        print(
            "R (retention) is the share of the KV entries that is kept; in the model's dtype it is the share of the "
            "memory too.\n`--memory 10%` sets the memory instead: entries are stored in 8 to 3 bits, and more of them "
            "fit. KL and agreement\nare to the full cache's next-token predictions (0 and 1: no difference).\n"
            "Other models: `lkv fit NAME` makes a policy in minutes; `lkv policies --model NAME` estimates how many; "
            "`lkv methods` lists the methods that need no policy."
        )


def _describe_model(name: str) -> str:
    """Load a model, which policies recognise by its weights, and describe its policies or the alternatives."""
    from lkv.hf.attention import patch_attention
    from lkv.hf.loading import load_model
    from lkv.hf.progress import estimate_reading_seconds, full_cache_nbytes
    from lkv.methods.registry import methods
    from lkv.policy.lookup import estimate_fit_minutes, fit_unsupported_reason
    from lkv.policy.model_match import model_difference
    from lkv.utils.devices import dtype_name
    from lkv.utils.durations import format_duration

    model, _ = load_model(name)
    spec = patch_attention(model).spec
    stored = (*fitted_policies(), *shipped_policies())
    matching = [policy for policy in stored if model_difference(policy.spec, spec) is None]
    if matching:
        return "\n\n".join(map(_describe_policy, matching))
    fit = (
        fit_unsupported_reason(model)
        or f"`lkv fit {name} --minutes {estimate_fit_minutes(model)}` makes one on this machine"
    )
    free = ", ".join(method for method, described in methods().items() if not described.needs_policy)
    return (
        f"There is no policy for {name} ({spec.architecture}, {spec.layers} layers of {spec.kv_heads} KV heads).\n"
        f"  reading   1,000 tokens take {format_duration(estimate_reading_seconds(model, 1000))} here, and "
        f"{full_cache_nbytes(model, 1000) / 1e6:,.1f} MB uncompressed in {dtype_name(model.dtype)}\n"
        f"  methods   without a policy: {free}\n"
        f"  fit       {fit}"
    )


def _describe_policy(policy: StoredPolicy) -> str:
    lines = describe_card(policy.spec, policy.card)
    if fit := policy.card.get("fit"):
        fate = "" if policy.is_preferred else ", not the default: another one, or SnapKV, was better"
        means = f"on {fit['contexts']} contexts" if fit.get("contexts") else "without a distillation"
        lines.append(f"fitted    here in {fit.get('minutes')} minutes {means}{fate}; {policy.folder}")
    return "\n".join([policy.name, *(f"  {line}" for line in lines)])
