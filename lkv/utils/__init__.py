"""Shared helpers for files, devices, results and statistics."""
