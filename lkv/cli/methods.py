"""lkv methods: the methods by name."""

import argparse

from lkv.methods.registry import REFIT, budgets, methods, selectors


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command has no options."""


def run(options: argparse.Namespace) -> None:
    """One line a method, then the budgets and selectors that make others."""
    for name, spec in methods().items():
        print(f"{name:18} {spec.description}")
    print(f"\nMETHOD{REFIT} adjusts the kept keys and values by least squares, at no extra memory.")
    print(f"Any budget goes with any selector, as BUDGET+SELECTOR.\nbudgets: {', '.join(budgets())}")
    print(f"selectors: {', '.join(selectors())}")
    print("Queries and a second pass come from the text itself; a policy and a pattern are given, or shipped.")
