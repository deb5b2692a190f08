"""lkv ask: answer questions about a document from a compressed cache."""

import re
import sys
import time
from itertools import takewhile
from os.path import exists, isfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from lkv.cli.command import option
from lkv.cli.options import (
    PATTERN_FILE,
    Memory,
    MethodName,
    PolicyOptions,
    PositiveInt,
    Retention,
    RunOptions,
    check_methods,
    find_needs,
    load_pattern,
    log,
    show_reading,
)
from lkv.errors import DEFAULT_MEMORY, DEFAULT_RETENTION, CacheError, DocumentError, LkvError

if TYPE_CHECKING:
    from lkv.context.chat import Chat
    from lkv.context.context import Context

_SECOND_PASS_READINGS = 3.0  # of KVzip, which replays the text in chunks over all that was read
_NEARLY_ALL, _TOO_FEW = 0.9, 16  # of the KV entries; entries a head
_STREAMING_CHUNK = 1024  # tokens per part with --streaming and without --chunk
_FILE_NAME = re.compile(r"[^\s?]+\.(txt|md|pdf|html?|rst|csv|jsonl?|py)", re.IGNORECASE)
Bits = Annotated[int | str, Field(union_mode="left_to_right")]
_COMPRESSION_OPTIONS = "memory retention method policy pattern chunk bits streaming protect".split()
_CHAT_COMMANDS = {"/help": "list the commands", "/undo": "take the last question and its answer back"}


class Ask(PolicyOptions, RunOptions):
    """Ask questions about a document from a compressed cache."""

    words: list[str] = option(
        "text, Markdown, HTML, PDF, folders of these, or - for stdin (none with --load); then questions, or none: chat",
        [],
        positional=True,
        nargs="*",
        metavar="[FILE ...] [QUESTION ...]",
    )
    method: MethodName = option("a name from `lkv methods`, or full", "lkv")
    pattern: Path | None = PATTERN_FILE
    chunk: PositiveInt | None = option("read the text in chunks of this many tokens")
    streaming: bool = option("evict after every chunk: for texts too long for memory", False)
    memory: Memory | None = option(
        "what k and v may take: 10% of the 16-bit cache's bytes, or 200MB (default: "
        f"{DEFAULT_MEMORY} without --retention and --bits)"
    )
    retention: Retention | None = option(
        "instead of --memory: fraction of the KV entries to keep, all in one precision (default: "
        f"{DEFAULT_RETENTION} with --bits)"
    )
    bits: Bits | None = option("quantise the KV entries that --retention keeps to 3, 4 or 8 bits, or to fp8")
    protect: list[str] = option(
        "words of the text that are kept whatever else is evicted; may be repeated", [], append=True, metavar="WORDS"
    )
    compare: bool = option("also answer from the full cache, for which the text is read once more", False)
    save: Path | None = option("write the compressed text to this file")
    load: Path | None = option("resume from a file written by --save, instead of FILE")
    max_new_tokens: PositiveInt | None = option("tokens of an answer (default: up to 128)")

    @property
    def _documents(self) -> list[str]:
        """The words before the first question: files and folders."""
        others = takewhile(lambda word: word == "-" or exists(word), self.words[1:])
        return [] if self.load else [*self.words[:1], *others]

    @property
    def _questions(self) -> list[str]:
        return self.words[len(self._documents) :]

    def run(self) -> None:
        """Read and compress the document, or load it, then answer."""
        self._check()
        from lkv.context.input_checks import check_text
        from lkv.context.saved_context import check_replaceable
        from lkv.utils.files import check_writable_file

        questions = self._questions
        for question in questions:
            check_text(question, "the question", "ask something about the text")
        if self.save:
            check_writable_file(self.save, LkvError, "the compressed text")
            check_replaceable(self.save)
        context = self._load_context() if self.load else self._compress()
        if self.save:
            context.save(self.save)
            log(f"saved to {self.save}, {self.save.stat().st_size / 1e6:.1f} MB")
        full = self._read_in_full(context) if self.compare else None
        for question in questions:
            if len(questions) > 1:
                print(f"\n> {question}", flush=True)
            context.ask(question, self.max_new_tokens, stream=True)
            _warn_if_truncated(context)
            if full:
                print("with the full cache: ", end="", flush=True)
                full.ask(question, self.max_new_tokens, stream=True)
        if not questions and (not self.save or sys.stdin.isatty()):
            _chat(context, self.max_new_tokens)

    @property
    def _chunk(self) -> int | None:
        return self.chunk or (_STREAMING_CHUNK if self.streaming else None)

    def _check(self) -> None:
        from lkv.methods.registry import FULL

        compressing = [f"--{name}" for name in _COMPRESSION_OPTIONS if name in self.model_fields_set]
        if self.load and self.words and isfile(self.words[0]):
            raise LkvError(f"--load reads the saved text instead of FILE; leave {self.words[0]} out.")
        if self.load and compressing:
            raise LkvError(f"the text that --load reads is already compressed; leave {' and '.join(compressing)} out.")
        if not self.load and not self.words:
            raise LkvError("give a file to read (or - for stdin), or --load with a file written by --save.")
        questions = self._questions
        if "-" in self._documents and not questions and not self.save:
            raise LkvError("a chat cannot be typed while the text comes from stdin; give the question as well.")
        if not self.load and (others := [word for word in questions if isfile(word)]):
            raise LkvError(f"{others[0]} is a file, and not a question; give all files before the first question.")
        if not self.load and (missing := [word for word in questions if _FILE_NAME.fullmatch(word)]):
            raise LkvError(f"{missing[0]} does not exist; give a file, or a question of more than a file's name.")
        if self.compare and not questions:
            raise LkvError("--compare answers from the full cache as well: it needs a question; leave --compare out.")
        if self.load:
            return
        if self.words[0] != "-" and not exists(self.words[0]):  # before torch is loaded
            raise DocumentError(f"{self.words[0]} does not exist; give a file, or - for stdin.")
        for name in self._documents:
            if self.save and exists(self.save) and exists(name) and self.save.samefile(name):
                raise LkvError(f"--save would overwrite {name}, the text itself; give another file.")
        if self.save and self.method == FULL:
            raise LkvError(f"the uncompressed cache of {FULL!r} cannot be saved; leave --save out, or use a method.")
        from lkv.methods.request import CompressionRequest

        pattern: list[list[float]] | None = [] if self.pattern else None  # read once the model is there
        CompressionRequest(
            method=self.method, memory=self.memory, retention=self.retention, bits=self.bits, pattern=pattern
        )
        if self.compare and self.method == FULL:
            raise LkvError(f"{FULL!r} is the full cache itself; leave --compare out, or use a method.")
        check_methods(self, [self.method])

    def _load_context(self) -> "Context":
        from lkv.context.context import Context

        assert self.load is not None
        context = Context.load(self.load, *self.load_model())
        log(f"loaded {context.tokens:,} tokens; {_describe_size(context)}")
        return context

    def _read_in_full(self, context: "Context") -> "Context":
        """Return the text of `context` with its full cache."""
        from lkv.context.compression import compress_ids
        from lkv.methods.registry import FULL
        from lkv.methods.request import CompressionRequest

        if getattr(context.model.config, "image_token_id", None) in context.ids:
            raise LkvError("the saved text has images, which --compare cannot read again; leave --compare out.")
        with show_reading(context.model, context.tokens, purpose=" for the full cache"):
            request = CompressionRequest.of_text({"method": FULL, "chunk": self._chunk})
            return compress_ids(context.model, context.tokenizer, context.ids, request, kind=context.kind)

    def _compress(self) -> "Context":
        """Return the documents' compressed context."""
        from lkv.context.document_reader import read_documents

        text = read_documents(self._documents)
        from lkv.context.compression import check_fits_model, compress
        from lkv.methods.registry import POLICY, SECOND_PASS
        from lkv.policy.lookup import default_policy
        from lkv.utils.prompts import encode_context, strip_end

        policy = self.load_policy()
        model, tokenizer = self.load_model()
        if policy is None and POLICY in find_needs(self.method):
            policy = default_policy(model, name=self.model)
        started = time.perf_counter()
        readings = _SECOND_PASS_READINGS if SECOND_PASS in find_needs(self.method) else 1.0
        tokens = len(encode_context(tokenizer, strip_end(tokenizer, text)))
        check_fits_model(model, tokens)  # before the time that it would take is printed
        with show_reading(model, tokens, readings):
            context = compress(
                model,
                tokenizer,
                text,
                memory=self.memory,
                retention=self.retention,
                method=self.method,
                policy=policy,
                chunk=self._chunk,
                protect=self.protect,
                bits=self.bits,
                streaming=self.streaming,
                pattern=load_pattern(self.pattern, model, tokenizer) if self.pattern else None,
            )
        seconds = time.perf_counter() - started
        entries, budget = _describe_budget(context, self.memory or DEFAULT_MEMORY)
        log(
            f"read {context.tokens:,} tokens in {seconds:.1f} s ({context.tokens / seconds:,.0f} tokens/s); "
            f"kept {context.realised_retention():.1%} of the KV entries{entries}; {_describe_size(context, budget)}"
        )
        return context


def _describe_budget(context: "Context", memory: str) -> tuple[str, str]:
    """Return the settings of the entries, and the memory budget if there is one, as additions to the log line."""
    from lkv.cache.ragged_cache import RaggedCache
    from lkv.methods.targets import TierTarget

    target = context.cache.target if isinstance(context.cache, RaggedCache) else None
    share = context.realised_retention()
    a_head = share * context.tokens
    few = f" (about {a_head:.0f} a head: too few for most answers)" * (a_head < min(_TOO_FEW, context.tokens / 2))
    if not isinstance(target, TierTarget):
        return f" (requested: {1.0 if target is None else target.retention:g}){few}", ""
    most = " (nearly everything: methods hardly differ in what they keep)" * (share > _NEARLY_ALL)
    full = target.shape.reference_nbytes(context.tokens)
    return f", quantised{most}{few}", f"; memory budget: {memory} of {full / 1e6:.1f} MB in 16 bits"


def _describe_size(context: "Context", budget: str = "") -> str:
    from lkv.utils.devices import dtype_name

    size, full, dtype = context.nbytes() / 1e6, context.full_nbytes() / 1e6, dtype_name(context.model.dtype)
    other = getattr(context.cache, "other_nbytes", int)() / 1e6  # 0 in a full cache
    others = f", {other:.1f} MB of it windows and states" if other else ""
    line = f"KV cache {size:.1f} MB{others} ({full:.1f} MB in {dtype} without compression{budget})"
    weights = sum(weight.nbytes for weight in context.model.parameters()) / 1e6
    return line + f"; the model's weights take {weights:,.0f} MB" * (size < weights / 10)


def _warn_if_truncated(answers: "Context | Chat") -> None:
    if answers.is_truncated:
        log(f"cut off after {answers.answer_tokens:,} tokens; --max-new-tokens allows more")


def _chat(context: "Context", max_new_tokens: int | None) -> None:
    """Answer typed questions; each follows those before it where the cache can append turns."""
    from lkv.context.chat import Chat

    try:
        answers: Chat | Context = Chat(context)
    except CacheError:
        answers = context
        log("no chat history: with this cache, each question is answered from the text alone")
    prompt, has_stopped, is_typed = "", False, sys.stdin.isatty()
    if is_typed:
        import readline  # noqa: F401 - arrow keys edit and recall lines

        print("Ask about the text; /help lists commands, Ctrl-C stops an answer, Ctrl-D ends.", file=sys.stderr)
        prompt = "> "
    while True:
        try:
            question = input(prompt)
        except EOFError:
            return
        except KeyboardInterrupt:
            if has_stopped or not is_typed:
                raise
            has_stopped = True
            print("\nCtrl-C again, or Ctrl-D, ends the chat.", file=sys.stderr)
            continue
        except UnicodeDecodeError as error:
            raise LkvError(f"the question on stdin cannot be read as text ({error}); give it in UTF-8.") from error
        has_stopped = False
        if not question.strip():
            continue
        if question.strip() in _CHAT_COMMANDS:
            _run_chat_command(question.strip(), answers)
            continue
        try:
            for piece in answers.stream(question, max_new_tokens):
                print(piece, end="", flush=True)
            print()
            _warn_if_truncated(answers)
        except KeyboardInterrupt:
            if not is_typed:
                raise
            has_stopped = True
            print("\n[stopped; Ctrl-C again, or Ctrl-D, ends the chat]", file=sys.stderr)
        except LkvError as error:
            if not is_typed:
                raise
            print(f"lkv: {error}", file=sys.stderr)  # the chat continues without this turn


def _run_chat_command(command: str, answers: "Chat | Context") -> None:
    """Run /help, or take the last turn of a chat back."""
    from lkv.context.chat import Chat

    if command == "/help":
        print("\n".join(f"{name}: {effect}" for name, effect in _CHAT_COMMANDS.items()), file=sys.stderr)
    elif isinstance(answers, Chat) and answers.turns:
        print(f"taken back: {answers.turns[-1].question}", file=sys.stderr)
        answers.undo()
    else:
        print("there is no turn to take back", file=sys.stderr)
