"""Models by name: loading, the embedded default, GGUF conversion, shapes."""
