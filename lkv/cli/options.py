"""Options that several commands share, and checks of methods that need no torch."""

from collections.abc import Iterable
from difflib import get_close_matches
from os.path import exists
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import AfterValidator, BaseModel, Field

from lkv.errors import LkvError, PolicyFileError, check_retention

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

_KVPRESS_PIECE = 4096  # tokens per piece of a text whose pattern is estimated as kvpress does

PositiveInt = Annotated[int, Field(ge=1)]
Retention = Annotated[float, AfterValidator(check_retention)]
Dtype = Literal["float32", "bfloat16", "float16"]


class ModelOptions(BaseModel):
    """Which model is loaded."""

    model: str | None = Field(
        default=None, description="folder, GGUF file or Hub id of the model (default: embedded SmolLM2-135M)"
    )
    revision: str | None = Field(default=None, description="commit, tag or branch of a --model on the Hub")


class DeviceOptions(BaseModel):
    """Where the model runs, and in which dtype."""

    dtype: Dtype | None = Field(default=None, description="dtype of the model (default: as stored)")
    device: str | None = Field(
        default=None, description="device the model runs on, such as cpu, cuda, cuda:1 or mps (default: cpu)"
    )


class PolicyOptions(BaseModel):
    """Which policy is loaded."""

    policy: str | None = Field(default=None, description="folder or Hub id of a policy (default: the shipped one)")
    policy_revision: str | None = Field(default=None, description="commit, tag or branch of a --policy on the Hub")
    strict: bool = Field(default=True, description="warn instead of failing if --policy was trained for another model")


def check_policy_options(options: BaseModel) -> None:
    """Raise LkvError for --no-strict or --policy-revision without --policy, and for a policy that does not exist."""
    fields = options.model_dump(include={"policy", "policy_revision", "strict"})
    extra = ["--no-strict"] * (not fields.get("strict", True))
    extra += ["--policy-revision"] * (fields["policy_revision"] is not None)
    if extra and not fields["policy"]:
        raise LkvError(
            f"{' and '.join(extra)} without --policy; add the policy that is meant (`lkv policies` lists the shipped "
            "ones)."
        )
    if isinstance(fields["policy"], str):
        check_policy_exists(fields["policy"])


def check_policy_exists(name: str) -> None:
    """Raise PolicyFileError, without importing torch, if `name` is no folder, Hub id or shipped policy."""
    from lkv.policy.shipped import shipped_policies

    known = [known.lower() for policy in shipped_policies() for known in (policy.name, *policy.hub_names)]
    if "/" not in name and not exists(name) and name.lower() not in known:
        raise PolicyFileError(
            f"there is no policy folder {name!r}; give a folder, a Hub id such as 'owner/name', or the name of a "
            "shipped policy (`lkv policies` lists them)."
        )


def find_needs(method: str) -> tuple[str, ...]:
    """Return what a method needs, as named in `lkv.methods.registry`. Raises LkvError for an unknown name."""
    from lkv.methods.registry import FULL, parse_method

    return () if method == FULL else parse_method(method).needs


def check_names(methods: Iterable[str]) -> None:
    """Raise LkvError for an unknown method, without importing torch where the name is that of a listed method."""
    from lkv.methods.registry import FULL, parse_method

    for method in methods:
        if method != FULL:
            parse_method(method)


def check_methods(methods: Iterable[str], pattern: Path | None = None, takes_pattern: bool = True) -> None:
    """Raise LkvError for an unknown method, or one that lacks DuoAttention's pattern of retrieval heads.

    Args:
        methods: Names as in `lkv methods`, or "full".
        pattern: The file of --pattern, if any.
        takes_pattern: Whether the command has an option --pattern.
    """
    from lkv.methods.registry import PATTERN

    with_pattern = [method for method in methods if PATTERN in find_needs(method)]
    if with_pattern and not takes_pattern:
        raise LkvError(
            f"{with_pattern[0]!r} needs a pattern of retrieval heads, which this command does not take; use another "
            "method."
        )
    if with_pattern and pattern is None:
        raise LkvError(
            f"{with_pattern[0]!r} needs the retrieval heads of the model; give --pattern with a "
            "full_attention_heads.tsv as DuoAttention's authors publish it, or with a long text to estimate them from."
        )
    if pattern and not pattern.is_file():
        raise LkvError(f"{pattern} does not exist; give --pattern a .tsv file or a UTF-8 text file.")


def load_pattern(
    path: Path, model: "PreTrainedModel", tokenizer: "PreTrainedTokenizerBase", estimate: str = "attention"
) -> list[list[float]]:
    """Read DuoAttention's pattern from a .tsv file, or estimate it on a text.

    Args:
        path: `full_attention_heads.tsv`, or a UTF-8 text file.
        model: The model whose heads are meant.
        tokenizer: Its tokenizer.
        estimate: "attention": the attention that a window would miss; "kvpress": the mean over pieces of 4,096 tokens.

    Returns:
        One alpha per layer and KV head, [layers][KV heads].
    """
    from lkv.integrations.transformers.attention import patch_attention
    from lkv.methods.budgets import estimate_mean_pattern, estimate_pattern, read_pattern
    from lkv.utils.prompts import encode_context

    spec = patch_attention(model).spec
    if path.suffix == ".tsv":
        return read_pattern(path, spec.layers, spec.kv_heads)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise LkvError(f"{path} cannot be read as text ({error}); give a .tsv file or a UTF-8 text file.") from error
    ids = encode_context(tokenizer, text)[: spec.max_positions]
    if estimate == "attention":
        return estimate_pattern(model, [ids])
    starts = range(0, len(ids), _KVPRESS_PIECE)
    return estimate_mean_pattern(model, [ids[start : start + _KVPRESS_PIECE] for start in starts])


def check_choice(value: str, choices: Iterable[str], subject: str) -> None:
    """Raise LkvError, with the nearest choices, unless `value` is one of `choices`."""
    choices = list(choices)
    if value not in choices:
        near = get_close_matches(value, choices, n=2) or choices
        raise LkvError(f"there is no {subject} {value!r}; did you mean {' or '.join(map(repr, near))}?")
