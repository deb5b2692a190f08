"""The version, in one place: pyproject.toml reads it here."""

__version__ = "0.2.0.dev0"
