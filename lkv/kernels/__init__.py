"""The method's operators: Soft-TopK, soft-masked attention, attention over the ragged cache."""
