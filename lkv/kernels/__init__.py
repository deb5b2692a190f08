"""The operators: Soft-TopK, soft-masked attention, attention over the ragged cache."""

FP8 = -8  # as a number of bits: 8, but of floating-point numbers (e4m3)
QUANTIZED_BITS = (8, FP8, 4, 3)  # bits of a value of a quantised entry, best first
BITS_BY_NAME: dict[int | str, int] = {8: 8, "fp8": FP8, 4: 4, 3: 3}  # as users write them
