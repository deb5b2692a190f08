"""The distillation: the frozen model with its full cache teaches itself with a compressed one (Sec. 3.5)."""
