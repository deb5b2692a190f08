"""The compressed KV cache: stores of entries, one layer, and all layers as a transformers cache."""
