"""Options that several commands share, and checks that need no torch."""

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from os.path import exists, isfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from lkv.cli.command import Command, option
from lkv.errors import LkvError, PolicyFileError, check_retention
from lkv.methods.targets import check_memory
from lkv.utils.durations import format_duration

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from lkv.policy.policy import Policy

_KVPRESS_PIECE = 4096  # tokens per piece of a text whose pattern is estimated as kvpress does
_DEVICE = "device the model runs on, such as cpu, cuda, cuda:1 or mps"


def check_method(name: str) -> str:
    """Return `name` if it is "full" or a method's; raise LkvError, with similar names, otherwise."""
    from lkv.methods.registry import FULL, parse_method

    if name != FULL:
        parse_method(name)
    return name


def log(line: str) -> None:
    """Print a line about the work, in brackets, on stderr."""
    print(f"[{line}]", file=sys.stderr, flush=True)


PositiveInt = Annotated[int, Field(ge=1)]
Retention = Annotated[float, AfterValidator(check_retention)]
Memory = Annotated[str, AfterValidator(check_memory)]
MethodName = Annotated[str, AfterValidator(check_method)]
Dtype = Literal["float32", "bfloat16", "float16"]
# Fields of several commands.
GPU_DEVICE = option(f"{_DEVICE} (default: a GPU if any)")
PATTERN_FILE = option("for duo: full_attention_heads.tsv, or a long text to estimate it from")


class ModelOptions(Command):
    """Which model is loaded."""

    model: str | None = option("folder, GGUF file or Hub id of the model (default: the demo model, SmolLM2-135M)")
    revision: str | None = option("commit, tag or branch of a --model on the Hub")

    @property
    def model_name(self) -> str:
        """The model's name, by default the demo model's."""
        from lkv.hf.loading import DEFAULT

        return self.model or DEFAULT


class RunOptions(ModelOptions):
    """Which model is loaded, in which dtype, and where it runs."""

    dtype: Dtype | None = option("dtype of the model (default: as stored; float32 where bfloat16 is emulated)")
    device: str | None = option(f"{_DEVICE} (default: cpu)")

    def load_model(self, device: str | None = None) -> "tuple[PreTrainedModel, PreTrainedTokenizerBase]":
        """Load model and tokenizer; `device` is the default of --device."""
        from lkv.hf.loading import load_model
        from lkv.utils.devices import find_device, torch_dtype
        from lkv.utils.progress import ProgressBar

        dtype, place = torch_dtype(self.dtype), find_device(self.device or device)
        with ProgressBar.without_total(f"loading {self.model_name}"):
            return load_model(self.model_name, dtype, self.revision, place)


class PolicyOptions(Command):
    """Which policy is loaded, and whether it may be another model's."""

    policy: str | None = option("folder or Hub id of a policy (default: the model's, shipped or fitted)")
    policy_revision: str | None = option("commit, tag or branch of a --policy on the Hub")
    strict: bool = option("warn instead of failing if --policy was trained for another model", True)

    @property
    def has_policy(self) -> bool:
        """Whether a policy is given."""
        return bool(self.policy)

    @model_validator(mode="after")
    def _check_policy(self) -> Self:
        extra = ["--no-strict"] * (not self.strict) + ["--policy-revision"] * (self.policy_revision is not None)
        if extra and not self.has_policy:
            raise LkvError(
                f"{' and '.join(extra)} without --policy; add the policy that is meant (`lkv policies` lists the "
                "shipped ones)."
            )
        if isinstance(self.policy, str):
            check_policy_exists(self.policy)
        return self

    def load_policy(self) -> "Policy | None":
        """Load the policy of --policy, None without."""
        from lkv.policy.lookup import load_policy

        return load_policy(self.policy, self.strict, self.policy_revision) if self.policy else None


def check_policy_exists(name: str) -> None:
    """Raise PolicyFileError, without importing torch, if `name` is not a folder, Hub id or policy on this machine."""
    from lkv.policy.shipped import named_policy

    if "/" not in name and not exists(name) and named_policy(name) is None:
        raise PolicyFileError(
            f"there is no policy folder {name!r}; give a folder, a Hub id such as 'owner/name', or the name of a "
            "policy that `lkv policies` lists."
        )


def find_needs(method: str) -> tuple[str, ...]:
    """Return what a method needs, as named in `lkv.methods.registry`; imports torch."""
    from lkv.methods.registry import FULL, parse_method

    return () if method == FULL else parse_method(method).needs


def check_policy_is_read(options: PolicyOptions, methods: Sequence[str]) -> None:
    """Raise LkvError if --policy is given and none of the methods reads a policy; imports torch if it is given."""
    from lkv.methods.registry import POLICY

    if options.policy and not any(POLICY in find_needs(method) for method in methods):
        names = " and ".join(map(repr, methods))
        raise LkvError(f"{names} {'take' if len(methods) > 1 else 'takes'} no --policy; leave it out.")


def check_methods(options: PolicyOptions, methods: Sequence[str]) -> None:
    """Raise LkvError if no method reads a given --policy, or one lacks DuoAttention's pattern; imports torch."""
    from lkv.methods.registry import PATTERN

    check_policy_is_read(options, methods)
    pattern: Path | None = getattr(options, "pattern", None)
    if pattern and not isfile(pattern):
        raise LkvError(f"{pattern} does not exist; give --pattern a .tsv file or a text.")
    name = next((method for method in methods if PATTERN in find_needs(method)), None)
    if name and not hasattr(options, "pattern"):
        raise LkvError(
            f"{name!r} needs a pattern of retrieval heads, which this command does not take; use another method."
        )
    if name and pattern is None:
        raise LkvError(
            f"{name!r} needs the retrieval heads of the model; give --pattern with a full_attention_heads.tsv as "
            "DuoAttention's authors publish it, or with a long text to estimate them from."
        )


def load_pattern(
    path: Path, model: "PreTrainedModel", tokenizer: "PreTrainedTokenizerBase", estimate: str = "attention"
) -> list[list[float]]:
    """Read DuoAttention's pattern from a .tsv file, or estimate it on a text.

    Args:
        path: The .tsv file, or a document, as `read_document` reads it.
        model: The model whose heads it is of.
        tokenizer: Its tokenizer.
        estimate: How it is estimated, see `estimate_retrieval_heads`.

    Returns:
        The share of each head, [layers][KV heads].
    """
    from lkv.context.document_reader import read_document
    from lkv.hf.attention import patch_attention
    from lkv.hf.spec import check_ids
    from lkv.methods.budgets import read_pattern
    from lkv.utils.prompts import encode_context

    spec = patch_attention(model).spec
    if path.suffix == ".tsv":
        return read_pattern(path, spec.layers, spec.kv_heads)
    ids = encode_context(tokenizer, read_document(path))[: spec.max_positions]
    check_ids(model, tokenizer, ids)
    return estimate_retrieval_heads(model, ids, estimate)


def estimate_retrieval_heads(model: "PreTrainedModel", ids: list[int], estimate: str) -> list[list[float]]:
    """Estimate DuoAttention's pattern, [layers][KV heads], on the ids of a text.

    The estimate is the attention that a window would miss, or kvpress's mean over pieces of the text.
    """
    from lkv.methods.budgets import estimate_mean_pattern, estimate_pattern

    if estimate == "attention":
        return estimate_pattern(model, [ids])
    starts = range(0, len(ids), _KVPRESS_PIECE)
    return estimate_mean_pattern(model, [ids[start : start + _KVPRESS_PIECE] for start in starts])


@contextmanager
def show_reading(model: "PreTrainedModel", tokens: int, readings: float = 1.0, purpose: str = "") -> Iterator[None]:
    """Log what reading a text in the block costs, and show how much of it is read.

    Args:
        model: The model that reads.
        tokens: The tokens of the text.
        readings: The block's time, relative to one prefill of the text.
        purpose: The end of the logged sentence.
    """
    from lkv.hf.progress import estimate_reading_seconds, full_cache_nbytes, report_progress
    from lkv.utils.progress import ProgressBar

    form = "{desc} {percentage:3.0f}% |{bar:20}| {n:,.0f} of {total:,} tokens, {rate_fmt}, {remaining} left"
    bar = ProgressBar(total=tokens, desc="reading", unit=" tokens", bar_format=form, leave=False)

    def advance(count: float) -> None:
        bar.update(min(count, tokens - bar.n))  # a second pass over the text does not count

    duration = format_duration(readings * estimate_reading_seconds(model, tokens))
    size = full_cache_nbytes(model, tokens) / 1e6
    log(f"reading {tokens:,} tokens{purpose}: {duration}; the full KV cache takes {size:,.1f} MB")
    with bar, report_progress(model, advance):
        yield
