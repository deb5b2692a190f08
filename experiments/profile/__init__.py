"""Latency and memory by context length (Sec. 4.5), for any model shape."""
