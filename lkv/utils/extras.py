"""Optional packages of each extra. Does not import torch."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

from lkv.errors import MissingPackageError

# Import names of the packages of each extra; pyproject.toml has their versions.
EXTRAS = {
    "default-model": ("gguf", "accelerate"),
    "gguf": ("gguf", "accelerate"),
    "train": ("accelerate",),
    "data": ("datasets", "pyarrow", "numpy"),
    "kvpress": ("kvpress",),
    "plots": ("matplotlib", "pandas", "scipy"),
    "serve": ("fastapi", "uvicorn", "prometheus_client", "fsspec"),
    "vllm": ("accelerate", "fastapi", "fsspec", "prometheus_client"),
    "documents": ("inscriptis", "pypdf"),
    "lm-eval": ("lm_eval", "accelerate", "jieba", "fuzzywuzzy", "rouge", "nltk", "wonderwords"),
    "evals": ("accelerate", "wonderwords", "pyarrow", "rouge", "pandas", "scipy"),
}


def require(extra: str, purpose: str, packages: Sequence[str] = ()) -> None:
    """Check that the packages of an extra are installed.

    Args:
        extra: A key of `EXTRAS`.
        purpose: The feature that needs them, as the subject of the error message.
        packages: Those of the extra that are needed (default: all).

    Raises:
        MissingPackageError: Packages are missing; the message names them and the command that installs them.
    """
    missing = [name for name in packages or EXTRAS[extra] if find_spec(name) is None]
    if missing:
        names = f"{', '.join(missing[:-1])} and {missing[-1]}" if missing[1:] else missing[0]
        verb = "is" if len(missing) == 1 else "are"
        raise MissingPackageError(
            f"{purpose} needs {names}, which {verb} not installed; run `{install_command(extra)}`."
        )


@contextmanager
def optional_import(extra: str, purpose: str) -> Iterator[None]:
    """Raise MissingPackageError, with the command that installs `extra`, if an import of the block fails."""
    try:
        yield
    except ImportError as error:
        raise MissingPackageError(
            f"{purpose} needs optional packages that cannot be imported ({error}); run `{install_command(extra)}`."
        ) from error


def install_command(extra: str) -> str:
    """Return the command that installs an extra: from the checkout where LKV is imported from one, else by name."""
    is_checkout = (Path(__file__).parents[2] / "pyproject.toml").is_file()
    return f"pip install -e '.[{extra}]'" if is_checkout else f"pip install 'lkv-cache[{extra}]'"
