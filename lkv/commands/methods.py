"""lkv methods: the methods by name."""

import argparse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command has no options."""


def run(options: argparse.Namespace) -> None:
    """One line a method, then the rules and selectors that make others."""
    from lkv.methods.build import METHODS, RULES, SELECTORS, describe

    for name in METHODS:
        print(f"{name:18} {describe(name)}")
    print(f"\nAny budget rule goes with any selector, as RULE+SELECTOR.\nrules: {', '.join(RULES)}")
    print(f"selectors: {', '.join(SELECTORS)}, kvzip")
