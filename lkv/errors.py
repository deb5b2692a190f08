"""The exceptions a user can meet. Each message says what is wrong, what is allowed and how to mend it."""


class LkvError(Exception):
    """Base of every error that LKV raises on purpose."""


class UnsupportedModelError(LkvError):
    """The model's architecture has no cache that LKV can evict from."""


class PolicyMismatchError(LkvError):
    """The policy was trained for another model."""


class PolicyFileError(LkvError):
    """A policy file is missing, truncated or tampered with."""


class PromptError(LkvError):
    """The prompt is empty, too short or longer than the model can read."""


class BudgetError(LkvError):
    """A budget rule got numbers it cannot work with, or a file of them that does not fit the model."""


class DataError(LkvError):
    """There is no usable data, or a data file is malformed."""


class TrainingError(LkvError):
    """Training cannot go on, or a checkpoint does not belong to this run."""


class TrainingStoppedError(TrainingError):
    """The user stopped a training; what was done is saved."""


class CacheError(LkvError):
    """A cache is used in a way it cannot serve."""


class ContextFileError(LkvError):
    """A saved context is missing, damaged, or belongs to another model or policy."""


class QuantizationError(LkvError):
    """Quantised storage is asked for, but the library is missing or the stored tensors are not such a pool."""


class DefaultModelError(LkvError):
    """The embedded default model cannot be found or converted."""


class ModelFileError(LkvError):
    """A model's file is missing, damaged or of a kind that cannot be read, or there is no room for its conversion."""


class MissingPackageError(LkvError):
    """Optional packages that a feature needs are not installed."""


class BackendError(LkvError):
    """A backend asked for by name cannot run here: for the `reason`, one sentence."""

    def __init__(self, backend: str, reason: str):
        super().__init__(backend, reason)
        self.backend, self.reason = backend, reason

    def __str__(self) -> str:
        return f"the backend {self.backend!r} cannot run: {self.reason} Give backend='auto' for one that can."


class IntegrationError(LkvError):
    """A package that an integration is written for is missing."""


class StoreError(LkvError):
    """Contexts cannot be kept or found where they are to be."""


class UnknownContextError(StoreError):
    """There is no context of that name."""


class ServerError(LkvError):
    """A server is asked to run in a way that it cannot or should not."""


class BusyError(LkvError):
    """An engine or a server has as many requests as it takes; ask again later."""


class DocumentError(LkvError):
    """A document cannot be read as text."""


class EvaluationError(LkvError):
    """A benchmark is asked for something that it cannot give."""


class ReportError(LkvError):
    """A result file is malformed, results do not belong in one table, or there is nothing to report."""


class RetentionError(LkvError, ValueError):
    """The retention is outside (0, 1]."""


def check_retention(retention: float) -> float:
    """Return `retention` as a float if it lies in (0, 1]; raise `RetentionError` otherwise."""
    try:
        # A text that reads as a number would go on as a text.
        value = float("nan" if isinstance(retention, str | bytes | bool) else retention)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        value = float("nan")
    if not 0.0 < value <= 1.0:
        raise RetentionError(
            f"retention is {retention!r}, but it is the fraction of the cache to keep and must lie in (0, 1]; "
            "use 0.15 to keep 15%, or 1.0 to keep everything."
        )
    return value
