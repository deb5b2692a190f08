"""Evaluation of methods: one prefill and the same continuations for all methods."""
