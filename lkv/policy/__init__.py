"""The policy: LKV-H and LKV-T, their file format, the hub and the shipped checkpoints."""
