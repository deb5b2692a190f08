"""Measuring methods: one prefill, every method, the same continuations."""
