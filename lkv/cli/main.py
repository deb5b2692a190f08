"""Entry point of the command line. It imports the module of the requested command alone, so that help is fast."""

import argparse
import io
import logging
import os
import re
import sys
from collections.abc import Sequence
from difflib import get_close_matches
from importlib import import_module
from typing import TYPE_CHECKING

from lkv.errors import LkvError, TrainingStoppedError
from lkv.version import __version__

if TYPE_CHECKING:
    from lkv.cli.command import Command

    Commands = type[Command] | dict[str, type[Command]]  # one command, or its actions by name

# The class of each, or several by the name of the action, is in the module of the same name unless _MODULES has it.
COMMANDS = {
    "ask": "ask questions about a document from a compressed cache",
    "serve": "serve contexts and chats over an OpenAI-compatible API",
    "doctor": "check the installation and suggest fixes",
    "methods": "list the methods with paper and requirements",
    "policies": "list the policies, shipped or fitted here: models, training, fidelity",
    "fit": "make a policy for a model in minutes",
    "inspect": "show a policy's budgets, or what is kept of a text",
    "train": "train a policy with settings of your own, or resume the training",
    "eval": "measure methods on RULER or LongBench, or resume a measurement",
}
_MODULES = {"policies": "methods", "fit": "train"}
_EPILOG = "Sizes: 1 MB is 10^6 and 1 GB 10^9 bytes; options in MiB and GiB count 2^20 and 2^30 bytes."

_USER_ERROR = 2  # as argparse exits; 1 is left to tracebacks
# How often a GNU OpenMP thread polls for work before it sleeps, on a busy machine. By default it spins for up to 15 ms,
# which takes time from other programs and from its own waiting threads: prefill took three times as long. On an idle
# machine, sleeping slows down answers by a tenth.
_SPINS_WHEN_BUSY = "20000"
_INTERRUPTED = 130  # as shells report Ctrl-C
_CLOSED_PIPE = 141  # as shells report SIGPIPE
# Loggers whose warnings concern kernels and types that LKV does not use; transformers imports torchao if installed.
_IRRELEVANT_LOGGERS = ("torchao", "torch.utils._pytree")


def main(arguments: Sequence[str] | None = None, command: "Commands | None" = None, program: str = "lkv") -> int:
    """Run the command line.

    Args:
        arguments: The words after the program's name (default: those of this process).
        command: The only command of a program of its own, or its actions by name (default: the commands of `lkv`).
        program: The program's name in messages.

    Returns:
        The exit status: 0, 2 for errors that the user can fix (one sentence on stderr), 130 after Ctrl-C.
    """
    if sys.stdin is None:  # closed before the start: then there is nothing to read
        sys.stdin = io.TextIOWrapper(io.BytesIO(), encoding="utf-8")
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="backslashreplace")  # answers may have characters that the terminal lacks
    try:
        try:
            words = sys.argv[1:] if arguments is None else arguments
            requested = parse_arguments(words, command, program)
            if not sys.stderr.isatty():
                os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")  # keep progress bars out of logs
            if hasattr(os, "getloadavg") and os.getloadavg()[0] >= (os.cpu_count() or 1) / 2:  # others compute
                os.environ.setdefault("GOMP_SPINCOUNT", _SPINS_WHEN_BUSY)  # which PyTorch reads when it is imported
            for name in _IRRELEVANT_LOGGERS:
                logging.getLogger(name).setLevel(logging.ERROR)
            requested.run()
        finally:
            _flush_output()  # the interpreter would print a traceback if flushing failed at its exit
    except BrokenPipeError:
        _drop_output()
        return _CLOSED_PIPE
    except KeyboardInterrupt:
        print("lkv: interrupted", file=sys.stderr)
        return _INTERRUPTED
    except LkvError as error:
        print(f"lkv: {error}", file=sys.stderr)
        return _INTERRUPTED if isinstance(error, TrainingStoppedError) else _USER_ERROR
    except OSError as error:  # from paths that were not checked before, such as standard output
        print(f"lkv: the system refuses to read or write ({error}); give another place.", file=sys.stderr)
        return _USER_ERROR
    return 0


def _flush_output() -> None:
    """Flush buffered output; on an OSError, drop the output and raise."""
    if sys.stdout is None:  # closed before the start
        return
    try:
        sys.stdout.flush()
    except OSError:
        _drop_output()
        raise


def _drop_output() -> None:
    """Discard buffered output."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def parse_arguments(words: Sequence[str], command: "Commands | None" = None, program: str = "lkv") -> "Command":
    """Return the command that a command line describes, validated. Raises LkvError for a wrong value."""
    parser = _build_parser(words, command, program)
    options, rest = parser.parse_known_args(words)
    # argparse splits positional words around options; `ask` takes its questions on both sides of them.
    if rest:
        if not hasattr(options, "words") or any(word.startswith("-") for word in rest):
            options.parser.error(_describe_unrecognized(rest, options.parser))
        options.words += rest
    from lkv.cli.command import build_command

    return build_command(options)


def _describe_unrecognized(rest: Sequence[str], parser: argparse.ArgumentParser) -> str:
    """Name the words that no argument of a command takes, with the option that resembles one of them."""
    flags, usage = re.findall(r"(?<![\w-])--[a-z][a-z-]*", parser.format_help()), parser.format_usage()
    names = [word.partition("=")[0] for word in rest if word.startswith("--")]
    meant = [f"{name[2:].upper()} without {name}" for name in names if name[2:].upper() in usage]
    meant += [match for name in names for match in get_close_matches(name, flags, 1, 0.7)]
    hint = f"did you mean {meant[0]}? " if meant else ""
    return f"unrecognized arguments: {' '.join(rest)}; {hint}`{parser.prog} --help` lists what it takes"


def _build_parser(words: Sequence[str], command: "Commands | None", program: str) -> argparse.ArgumentParser:
    """Return the parser for a command line; for `lkv`, with the options of the commands that occur in `words`."""
    if command is not None:
        parser = argparse.ArgumentParser(prog=program, epilog=_EPILOG)
        _add_command(parser, command)
        return parser
    description = "Learned KV cache eviction for transformers models."
    parser = argparse.ArgumentParser(prog=program, description=description, epilog=_EPILOG)
    parser.add_argument("--version", action="version", version=f"lkv {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for name, line in COMMANDS.items():
        subparser = commands.add_parser(name, help=line, description=line[0].upper() + line[1:] + ".", epilog=_EPILOG)
        if name in words:
            _add_command(subparser, find_command(name))
    return parser


def _add_command(parser: argparse.ArgumentParser, command: "Commands") -> None:
    from lkv.cli.command import add_arguments

    if isinstance(command, dict):
        actions = parser.add_subparsers(required=True, metavar="ACTION")
        for action, part in command.items():
            add_arguments(actions.add_parser(action, help=part.__doc__, description=part.__doc__), part)
    else:
        add_arguments(parser, command)


def find_command(name: str) -> "Commands":
    """Import the class of a command, or its classes by action."""
    return getattr(import_module(f"lkv.cli.{_MODULES.get(name, name)}"), name.capitalize())


if __name__ == "__main__":
    sys.exit(main())
