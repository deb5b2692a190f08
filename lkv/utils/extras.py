"""The optional packages of each extra, and one sentence that names all that are missing; no torch here."""

from importlib.util import find_spec

from lkv.errors import MissingPackageError

# Names as they are imported, which are those on the index too; pyproject.toml says the versions.
EXTRAS = {
    "default-model": ("gguf", "accelerate"),
    "gguf": ("gguf", "accelerate"),
    "train": ("accelerate",),
    "data": ("datasets", "pyarrow", "numpy"),
    "quantization": ("torchao",),
    "kvpress": ("kvpress",),
    "cpu": ("numba",),
    "plots": ("matplotlib",),
    "serve": ("fastapi", "uvicorn", "prometheus_client", "python_multipart", "fsspec"),
    "ray": ("ray", "fastapi", "uvicorn", "prometheus_client", "python_multipart", "fsspec"),
    "documents": ("inscriptis", "pypdf"),
    "lm-eval": ("lm_eval", "accelerate", "jieba", "fuzzywuzzy", "rouge", "nltk", "wonderwords"),
    "evals": ("accelerate", "wonderwords", "pyarrow", "rouge"),
}


def require(extra: str, purpose: str) -> None:
    """Raise MissingPackageError unless all packages of `extra` are installed; `purpose` is what needs them."""
    missing = [name for name in EXTRAS[extra] if find_spec(name) is None]
    if not missing:
        return
    names = f"{', '.join(missing[:-1])} and {missing[-1]}" if missing[1:] else missing[0]
    verb = "is" if len(missing) == 1 else "are"
    raise MissingPackageError(
        f"{purpose} needs {names}, which {verb} not installed; run `pip install 'lkv-cache[{extra}]'`."
    )
