"""LKV inside other libraries."""
