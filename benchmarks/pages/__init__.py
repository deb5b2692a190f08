"""Markdown written from the result files: the README's section, docs/results.md and docs/more-results.md."""
