"""Methods: a budget rule with a selector, by name."""
