"""Text for training and fidelity: samples, sources, recipes."""
