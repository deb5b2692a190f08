"""The operators: Soft-TopK, soft-masked attention, attention over the ragged cache."""

QUANTIZED_BITS = (8, 4, 3)  # bits of a value of a quantised entry
