"""The paper's experiments and the measurements: beside the package, not part of it."""
