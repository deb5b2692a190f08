"""Compressed contexts behind an HTTP API: a store, an engine, an OpenAI-compatible server."""
