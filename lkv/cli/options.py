"""Options that several commands take, and kinds of them."""

import argparse

from lkv.errors import LkvError


def positive(text: str) -> int:
    """A whole number of at least 1."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is not a positive number")
    return number


def add_model(parser: argparse._ActionsContainer) -> None:
    """--model, as every command takes it."""
    parser.add_argument("--model", default=None, help="folder, GGUF file or hub id (default: embedded SmolLM2-135M)")


def add_revision(parser: argparse._ActionsContainer) -> None:
    """--revision, which of a hub's versions of the model is meant."""
    parser.add_argument("--revision", default=None, help="commit, tag or branch of a --model on the hub")


def add_policy(parser: argparse._ActionsContainer) -> None:
    """--policy, which of its versions, and whether it may be another model's."""
    parser.add_argument("--policy", default=None, help="folder or hub id of a policy (default: the one shipped)")
    add_policy_revision(parser)
    parser.add_argument(
        "--no-strict", dest="strict", action="store_false", help="warn, not refuse, if --policy was trained for others"
    )


def add_policy_revision(parser: argparse._ActionsContainer) -> None:
    """--policy-revision, as every command with a policy takes it."""
    parser.add_argument("--policy-revision", default=None, help="commit, tag or branch of a policy on the hub")


def check_policy(options: argparse.Namespace) -> None:
    """Raise LkvError for what is said of a --policy where none is given."""
    said = ["--no-strict"] * (not getattr(options, "strict", True))
    said += ["--policy-revision"] * (options.policy_revision is not None)
    if said and not options.policy:
        raise LkvError(
            f"{' and '.join(said)} without --policy, which {'these say' if len(said) > 1 else 'it says'} more of: name "
            "the policy too (`lkv policies` lists the shipped ones)."
        )


def add_dtype(parser: argparse._ActionsContainer) -> None:
    """--dtype of the model."""
    parser.add_argument(
        "--dtype", choices=("float32", "bfloat16", "float16"), default=None, help="of the model (default: as stored)"
    )


def add_device(parser: argparse._ActionsContainer) -> None:
    """--device of the model."""
    parser.add_argument("--device", default=None, help="where the model runs, such as cuda or mps (default: cpu)")
