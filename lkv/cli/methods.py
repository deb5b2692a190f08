"""lkv methods: the methods by name."""

import argparse

from lkv.methods.registry import REFIT, RULES, SELECTORS, describe, methods


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command has no options."""


def run(options: argparse.Namespace) -> None:
    """One line a method, then the rules and selectors that make others."""
    for name in methods():
        print(f"{name:18} {describe(name)}")
    print(f"\nMETHOD{REFIT} moves what any of them keeps, in the same bytes, to answer as all entries did.")
    print(f"Any budget rule goes with any selector, as RULE+SELECTOR.\nrules: {', '.join(RULES)}")
    print(f"selectors: {', '.join(SELECTORS)}")
    print("Queries and a second pass come from the text itself; a policy and a pattern are given, or shipped.")
