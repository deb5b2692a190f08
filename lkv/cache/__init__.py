"""The compressed KV cache: stores of KV entries, cache layers, and the cache as transformers sees it."""
