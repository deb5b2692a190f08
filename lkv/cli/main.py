"""The command line. Only the module of the command that is asked for is imported, so that help is there at once."""

import argparse
import logging
import os
import sys
from collections.abc import Sequence
from importlib import import_module

from lkv.errors import LkvError, TrainingStoppedError
from lkv.version import __version__

# Each is a module of this package, with `add_arguments(parser)` and `run(options)`.
COMMANDS = {
    "ask": "ask questions about a document from a compressed cache",
    "serve": "serve contexts and chats over an OpenAI-compatible API",
    "doctor": "say what there is to work with, whether it works, and the mend",
    "methods": "list the methods: what they keep, whose they are, what they need",
    "policies": "list the shipped policies: for which models, how trained, how faithful",
    "inspect": "show what a policy learned, or what is kept of a text",
    "data": "build training data, the paper's or your own, and show what was built",
    "train": "train a policy for a model, or resume the training",
    "eval": "measure methods on RULER or LongBench, or resume a measurement",
    "report": "make tables and figures from result files",
    "profile": "measure prefill and decode latency, peak memory and bytes of k and v",
}


# What a user can mend ends as argparse's own complaints do; 1 is left to what Python ends with a traceback.
_REFUSED = 2
_INTERRUPTED = 130  # as a shell tells of a program that Ctrl-C ended
# transformers imports torchao where it is installed, and these warn of kernels and types that no command uses.
_OFF_TOPIC = ("torchao", "torch.utils._pytree")


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit status: 2 for errors a user can mend, each one sentence on stderr."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    try:
        try:
            options = parse_arguments(words)
            if not sys.stderr.isatty():
                # A log would have every step of each bar that transformers draws.
                os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
            for name in _OFF_TOPIC:
                logging.getLogger(name).setLevel(logging.ERROR)
            options.run(options)
        finally:
            # Nothing may be left to be written when the interpreter ends: it would print a traceback of its own.
            sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141  # as a shell tells of a program that a closed pipe ended
    except KeyboardInterrupt:
        print("lkv: interrupted", file=sys.stderr)
        return _INTERRUPTED
    except LkvError as error:
        print(f"lkv: {error}", file=sys.stderr)
        return _INTERRUPTED if isinstance(error, TrainingStoppedError) else _REFUSED
    return 0


def parse_arguments(words: Sequence[str]) -> argparse.Namespace:
    """The options of a command line; words may stand on both sides of options where a command takes many."""
    parser = build_parser(words)
    options, rest = parser.parse_known_args(words)
    if rest and (not hasattr(options, "words") or any(word.startswith("-") for word in rest)):
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    if rest:
        options.words += rest
    return options


def build_parser(words: Sequence[str]) -> argparse.ArgumentParser:
    """The parser for these arguments; the other commands are there by name and line alone."""
    parser = argparse.ArgumentParser(prog="lkv", description="Learned KV cache eviction for transformers models.")
    parser.add_argument("--version", action="version", version=f"lkv {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for name, line in COMMANDS.items():
        command = commands.add_parser(name, help=line, description=line[0].upper() + line[1:] + ".")
        if name in words:
            module = import_module(f"lkv.cli.{name}")
            module.add_arguments(command)
            command.set_defaults(run=module.run)
    return parser


if __name__ == "__main__":
    sys.exit(main())
