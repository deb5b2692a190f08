"""Self-distillation from the frozen model with the full cache to itself with a compressed cache (Sec. 3.5)."""
