"""Compressed contexts behind an HTTP API: a store, an engine, an OpenAI-compatible server."""

LOOPBACK = ("localhost", "127.0.0.1", "::1")  # hosts that other machines cannot reach
