"""The integration with transformers: the only folder that depends on its internals."""
