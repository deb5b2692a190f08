"""The cache: ragged spans, one layer, and all layers as a transformers cache."""
