"""The seam to transformers: the only folder that knows its internals."""
