"""Prefill with eviction against plain prefill, and the bytes of k and v really held, on the embedded model.

python -m experiments.prefill    (writes prefill.json and cache_bytes.json)
"""
