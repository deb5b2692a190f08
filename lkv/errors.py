"""The exceptions of LKV.

Every error that LKV raises on purpose derives from `LkvError`. Its message is one sentence that names what is wrong,
what is allowed and how to fix it; the command line prints that sentence and exits with status 2.
"""

import math
import operator
import re
from collections.abc import Iterable
from difflib import get_close_matches
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pydantic import ValidationError


class LkvError(Exception):
    """Base class of all LKV errors."""


class RetentionError(LkvError, ValueError):
    """The retention lies outside (0, 1]."""


class BudgetError(LkvError):
    """A budget rule has invalid parameters, or its table of heads does not fit the model."""


class CacheError(LkvError):
    """The cache cannot serve a call, or its options or stored tensors are invalid."""


class PromptError(LkvError):
    """The prompt is empty, too short, or longer than the model can read."""


class UnsupportedModelError(LkvError):
    """LKV does not support this model's architecture."""


class ModelLoadError(LkvError):
    """The model or its tokenizer cannot be found, downloaded, read or converted."""


class PolicyFileError(LkvError):
    """The policy's files are missing, damaged or of an unknown format."""


class PolicyMismatchError(LkvError):
    """The policy was trained for another model, or no policy is shipped for this one."""


class ContextFileError(LkvError):
    """The saved context is missing, damaged, too large for the memory, or belongs to another model or policy."""


class DocumentError(LkvError):
    """The document cannot be read as text."""


class DataError(LkvError):
    """A data or result file is missing, malformed or cannot be written."""


class TrainingError(LkvError):
    """The training settings are invalid, or the checkpoint belongs to another run."""


class TrainingStoppedError(TrainingError):
    """The user stopped the training; its last step is saved."""


class EvaluationError(LkvError):
    """The benchmark cannot be run with these settings."""


class ReportError(LkvError):
    """The result files cannot be read or do not belong in one table."""


class IntegrationError(LkvError):
    """An integration (lm-eval, continuous batching) is used in a way that it does not support."""


class MissingPackageError(LkvError):
    """A feature needs optional packages that are not installed."""


class BackendError(LkvError):
    """The requested kernel backend cannot run on this machine.

    Args:
        backend: The backend's name, such as `"triton"`.
        reason: Why it cannot run, one sentence.
    """

    def __init__(self, backend: str, reason: str):
        super().__init__(backend, reason)
        self.backend, self.reason = backend, reason

    def __str__(self) -> str:
        return f"the backend {self.backend!r} cannot run: {self.reason} Use backend='auto' to select one that can."


class ServerError(LkvError):
    """The server cannot be started with these settings."""


class StoreError(LkvError):
    """The context store cannot be read or written."""


class UnknownContextError(StoreError):
    """The context store has no context of this id."""


class ContextPendingError(StoreError):
    """The context is still being compressed, or its compression failed."""


class BusyError(LkvError):
    """The engine or server is at its request limit; retry later."""


DEFAULT_MEMORY = "10%"  # the share of the 16-bit cache's bytes that is kept
DEFAULT_RETENTION = 0.15  # the share of the entries that is kept where all have one precision, as in the paper


def check_retention(retention: float) -> float:
    """Validate a retention, the fraction of the KV cache to keep.

    Args:
        retention: A number; strings and booleans are rejected.

    Returns:
        The retention as a float in (0, 1].

    Raises:
        RetentionError: The value is not a number in (0, 1].
    """
    try:
        value = float("nan" if isinstance(retention, str | bytes | bool) else retention)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        value = float("nan")
    if not 0.0 < value <= 1.0:
        raise RetentionError(
            f"retention is {retention!r}, but it must lie in (0, 1]: the fraction of the KV cache to keep; "
            "use 0.15 to keep 15%, or 1.0 to keep everything."
        )
    return value


def check_count(value: object, error: LkvError, least: float = 1, most: float = math.inf) -> int:
    """Return a whole number of any type, such as NumPy's, as an int.

    Raises `error` for booleans, numbers of other types and numbers outside `least` to `most`.
    """
    try:
        count = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise error from None
    if not least <= count <= most or "bool" in str(getattr(value, "dtype", type(value))):
        raise error
    return count


def describe_invalid_value(error: "ValidationError", names: Iterable[str], prefix: str = "") -> str:
    """Return one sentence about the first value that pydantic rejected.

    Args:
        error: The validation error.
        names: The fields of the model.
        prefix: Prefix of field names: "--" for command line options.
    """
    problem = error.errors()[0]
    name = str(problem["loc"][0])
    option = prefix + (name.replace("_", "-") if prefix else name)
    if name not in names:
        near = get_close_matches(name, names, n=1)
        return f"there is no setting {option!r}" + (f"; did you mean {near[0]!r}?" if near else ".")
    if isinstance(cause := problem.get("ctx", {}).get("error"), LkvError):
        return str(cause)
    value = str(problem["input"])
    if not prefix or not value or not value.isprintable():
        value = repr(problem["input"])
    value = value if len(value) < 80 else f"{value[:80]}..."
    allowed = re.split(", (?:unable|got) ", problem["msg"].removeprefix("Input should be "))[0]
    return f"{option} is {value}, but must be {allowed}."
