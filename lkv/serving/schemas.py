"""Request and response schemas in the format of OpenAI's API."""

import json
from collections.abc import Callable
from typing import Annotated, Any, ClassVar, Literal, Self, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    Json,
    PlainValidator,
    StrictBool,
    StrictInt,
    StrictStr,
    ValidationError,
    ValidationInfo,
    WrapValidator,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError
from starlette.responses import JSONResponse

from lkv.context.document_reader import Document, parse_document
from lkv.errors import (
    BusyError,
    ContextFileError,
    ContextPendingError,
    DocumentError,
    IntegrationError,
    LkvError,
    MissingPackageError,
    PolicyFileError,
    PolicyMismatchError,
    PromptError,
    RetentionError,
    StoreError,
    UnknownContextError,
)
from lkv.serving.answer import SamplingParams
from lkv.serving.forms import decode_field, form_parts, parameter
from lkv.serving.inputs import CompressionSettings
from lkv.utils.prompts import ContextKind

# Fields of OpenAI's API that are ignored.
_WITHOUT_EFFECT = frozenset(
    "user metadata store service_tier safety_identifier prompt_cache_key prompt_cache_retention "
    "parallel_tool_calls".split()
)
# Unsupported fields, with the values that do not change an answer.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "logit_bias": ({},),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none",),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "repetition_penalty": (1,),
    "min_p": (0,),
}


class ClientGoneError(LkvError):
    """The client has disconnected."""


class TooLargeError(PromptError):
    """The request has more bytes than the server takes."""


UNREADABLE = "unreadable_context"  # an error's code
_STATUS: dict[type[LkvError], tuple[int, str]] = {
    ClientGoneError: (499, "invalid_request_error"),  # as web servers log it
    UnknownContextError: (404, "not_found_error"),
    BusyError: (429, "rate_limit_error"),
    ContextFileError: (409, "conflict_error"),
    ContextPendingError: (409, "conflict_error"),
    PolicyFileError: (409, "conflict_error"),
    PolicyMismatchError: (409, "conflict_error"),
    StoreError: (507, "server_error"),
    TooLargeError: (413, "invalid_request_error"),
    PromptError: (400, "invalid_request_error"),
    RetentionError: (400, "invalid_request_error"),
    IntegrationError: (400, "invalid_request_error"),
    DocumentError: (400, "invalid_request_error"),
    MissingPackageError: (400, "invalid_request_error"),
}
_MAX_TOKENS = 2**31
_MAX_TOOLS = 100_000  # characters


def _check_memory(value: Any) -> str | float:
    """Return a memory budget as text or number, which `MemoryTarget` reads."""
    is_text = isinstance(value, str) and len(value) <= 20
    if is_text or (isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < 2**60):
        return value
    raise PydanticCustomError("memory", "Expected a share such as 0.1 or '10%', or bytes such as '2MB'")


def _check_tools(tools: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return tools unchanged, in which all that chat templates need is there."""
    functions: list[Any] = [tool.get("type") == "function" and tool.get("function") for tool in tools]
    if not all(isinstance(each, dict) and each.get("name") and isinstance(each["name"], str) for each in functions):
        raise PydanticCustomError("tools", 'Expected tools such as {"type": "function", "function": {"name": "..."}}')
    if len({each["name"] for each in functions}) < len(functions):
        raise PydanticCustomError("tools", "Expected tools of different names")
    if len(json.dumps(tools)) > _MAX_TOOLS:
        raise PydanticCustomError("tools", "Expected at most 100,000 characters of tools")
    return tools


def _of_union(message: str) -> WrapValidator:
    """Return a validator for a union of types, whose members' errors would each name one type alone."""

    def validate(value: object, handler: Callable[[object], Any]) -> Any:
        try:
            return handler(value)
        except ValidationError:
            raise PydanticCustomError("union", message) from None

    return WrapValidator(validate)


Name = Annotated[StrictStr, Field(max_length=300)]
Role = Annotated[StrictStr, Field(pattern=r"^[a-z_]{1,32}$")]
Words = Annotated[StrictStr, Field(max_length=100_000)]
_StopText = Annotated[StrictStr, Field(min_length=1, max_length=200)]
# Validation stops at the first error of a list, however long that is.
Stop = Annotated[
    _StopText | Annotated[list[_StopText], Field(max_length=4, fail_fast=True)],
    _of_union("Expected a text of 1 to 200 characters, or a list of up to 4 such texts"),
]
Content = Annotated[
    StrictStr | Annotated[list[dict[str, Any]], Field(max_length=1000, fail_fast=True)],
    _of_union('Expected a text, or a list of up to 1,000 parts such as {"type": "text", "text": "..."}'),
]
Length = Annotated[StrictInt, Field(ge=1, le=_MAX_TOKENS)]
Number = Annotated[float, Field(allow_inf_nan=False)]
Memory = Annotated[str | float, PlainValidator(_check_memory)]
_MAX_SKIPPED, _MAX_SKIPPED_TEXT = 50, 200  # descriptions of skipped content, characters of each

_Schema = TypeVar("_Schema", "ChatRequest", "ContextRequest", "Turns")
_SHAPE_ERRORS = ("missing", "json_invalid", "model_type", "model_attributes_type")  # which an example explains best


class RequestObject(BaseModel):
    """An object of a request, in which null stands for a field's default, as OpenAI's clients may send it."""

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, data: object) -> object:
        return {name: value for name, value in data.items() if value is not None} if isinstance(data, dict) else data


class ToolFunction(BaseModel):
    """The function of a tool call, and its arguments."""

    name: Annotated[StrictStr, Field(min_length=1, max_length=300)]
    arguments: Json[dict[str, Any]]


class ToolCall(RequestObject):
    """A call of an earlier turn, as chat templates read it."""

    id: Name | None = None
    type: Literal["function"] = "function"
    function: ToolFunction


class Message(RequestObject):
    """One turn of a chat; its content is a text or a list of texts, or missing beside tool calls."""

    role: Role
    content: Content | None = None
    tool_calls: Annotated[list[ToolCall], Field(max_length=100, fail_fast=True)] | None = None
    tool_call_id: Name | None = None
    name: Name | None = None
    function_call: object = None

    @model_validator(mode="after")
    def _check_content(self) -> Self:
        if self.content is None and not self.tool_calls:
            raise PydanticCustomError("content", "content is missing, which only a message with tool_calls may lack")
        return self

    def plain(self) -> dict[str, Any]:
        """Return role, text and tool calls, as chat templates read them. Raises PromptError for other content."""
        if self.function_call:
            raise PromptError("a message holds function_call, which this server does not offer; leave it out.")
        parts = self.content or ""
        if not isinstance(parts, str):
            texts = [part.get("text") for part in parts if part.get("type") == "text"]
            if len(texts) < len(parts) or not all(isinstance(text, str) for text in texts):
                kinds = ", ".join(sorted({str(part.get("type"))[:40] for part in parts} - {"text"})) or "text"
                raise PromptError(
                    f"a message holds something other than text ({kinds}), which this server does not read; send text. "
                    "lkv.compress takes images."
                )
            parts = "".join(map(str, texts))
        plain: dict[str, Any] = {"role": "system" if self.role == "developer" else self.role, "content": parts}
        if self.tool_calls:
            plain["tool_calls"] = [call.model_dump(exclude_none=True) for call in self.tool_calls]
        return plain | self.model_dump(include={"tool_call_id", "name"}, exclude_none=True)


class StreamOptions(RequestObject):
    """Options for the end of a stream."""

    include_usage: StrictBool = False


Messages = Annotated[list[Message], Field(min_length=1, max_length=1000, fail_fast=True)]
Tools = Annotated[list[dict[str, Any]], Field(max_length=128, fail_fast=True), AfterValidator(_check_tools)]


class ProtectedRole(BaseModel):
    """All messages of a role, which every head keeps."""

    model_config = ConfigDict(extra="forbid")

    role: Role


Protected = Annotated[
    Words | ProtectedRole, _of_union('Expected up to 100,000 characters of the text, or {"role": "..."}')
]


class Turns(RequestObject):
    """What a chat template renders of a chat."""

    example: ClassVar[str] = 'send JSON such as {"messages": [{"role": "user", "content": "..."}]}'

    messages: Messages
    tools: Tools | None = None


class ChatRequest(RequestObject):
    """The body of a chat completion; `context` is the one field that OpenAI's API does not have."""

    model_config = ConfigDict(extra="allow")
    example: ClassVar[str] = Turns.example

    model: Name = ""
    messages: Messages
    context: Annotated[Name, Field(min_length=1)] | None = None
    stream: StrictBool = False
    stream_options: StreamOptions | None = None
    max_tokens: Length | None = None
    max_completion_tokens: Length | None = None
    temperature: Annotated[Number, Field(ge=0, le=2)] | None = None
    top_p: Annotated[Number, Field(ge=0, le=1)] | None = None
    top_k: Annotated[StrictInt, Field(ge=-1, le=_MAX_TOKENS)] | None = None
    seed: Annotated[StrictInt, Field(ge=-(2**63), lt=2**63)] | None = None
    stop: Stop | None = None

    def sampling(self) -> SamplingParams:
        """Return how the answer is generated: greedily unless a temperature is given, or if `top_p` is 0."""
        length = self.max_completion_tokens or self.max_tokens
        stop = [self.stop] if isinstance(self.stop, str) else self.stop or []
        temperature = 0.0 if self.top_p == 0 else self.temperature or 0.0
        top_k = None if self.top_k in (-1, 0) else self.top_k
        return SamplingParams(temperature, self.top_p or 1.0, top_k, self.seed, length, stop)

    def check_offered(self) -> None:
        """Raise PromptError for unsupported fields that could change the answer, including misspelt ones."""
        for name, value in (self.model_extra or {}).items():
            if name not in _WITHOUT_EFFECT and value not in _NEUTRAL.get(name, ()):
                raise PromptError(f"{name[:80]} is not offered by this server; leave it out.")


class ContextRequest(RequestObject):
    """The body of a new context, a text or a conversation.

    Unknown fields are rejected, so that misspelt ones are noticed.
    """

    model_config = ConfigDict(extra="forbid")
    example: ClassVar[str] = 'send JSON such as {"text": "...", "memory": "10%"}, or a form with file=@PATH'

    messages: Messages | None = None
    text: Annotated[StrictStr | None, Field(validate_default=True)] = None
    name: Annotated[StrictStr, Field(max_length=200)] = ""
    system: Words | None = None
    tools: Tools | None = None
    retention: Number | None = None
    memory: Memory | None = None
    protect: Annotated[list[Protected], Field(max_length=64, fail_fast=True)] = []

    @field_validator("text")
    @classmethod
    def _check_text(cls, text: str | None, info: ValidationInfo) -> str | None:
        if text is None and info.data.get("messages") is None:
            raise PydanticCustomError("missing", "Field required")
        if text is not None and info.data.get("messages") is not None:
            raise PydanticCustomError("text", "a context is made of a text or of messages, not of both")
        return text

    def content(self) -> str | list[dict[str, Any]]:
        """Return the text, or the messages. Raises PromptError for messages that hold more than text."""
        return self.text or "" if self.messages is None else [message.plain() for message in self.messages]

    def settings(self, defaults: CompressionSettings) -> CompressionSettings:
        """Return the settings of this text. Raises PromptError or RetentionError for a budget that cannot be."""
        protect = [each if isinstance(each, str) else each.model_dump() for each in self.protect]
        kind: ContextKind = "text" if self.messages is None else "conversation"
        return defaults.for_text(self.retention, self.memory, self.system, protect, kind, self.tools)


def parse_chat(body: bytes) -> ChatRequest:
    """Return a chat request that this server can answer. Raises PromptError for any other body."""
    request = parse(ChatRequest, body)
    request.check_offered()
    return request


def parse_context(body: bytes, content_type: str, query: str = "") -> tuple[ContextRequest, list[str] | None]:
    """Return the new context of a JSON body or a form, and the parts of an uploaded file that its text leaves out.

    Raises PromptError or DocumentError for anything else.
    """
    if query:
        raise PromptError("the query of the URL is not read; send its fields in the form or in the JSON body.")
    kind = content_type.partition(";")[0].strip().lower()
    if kind == "application/x-www-form-urlencoded" and not body.lstrip().startswith(b"{"):  # curl -d sends JSON as it
        raise PromptError(f"a urlencoded form is not read; {ContextRequest.example}.")
    if kind != "multipart/form-data":
        return parse(ContextRequest, body), None
    if (parameter(content_type, "charset") or "utf-8").lower() not in ("utf-8", "us-ascii"):
        raise PromptError("the form has another charset than UTF-8; send it as UTF-8.")
    fields: dict[str, Any] = {}
    document: Document | None = None
    for name, file, data in form_parts(body, parameter(content_type, "boundary") or ""):
        if name == "protect":
            is_role = data.lstrip().startswith(b'{"role"')
            fields.setdefault(name, []).append(decode_field("messages" if is_role else name, data))
            continue
        if name in fields or (name == "file" and document is not None):
            raise PromptError(f"the form has the field {name[:80]!r} twice; send it once.")
        if name != "file":
            fields[name] = decode_field(name, data)
        elif file is None:
            raise PromptError("the form's field 'file' is not a file; write file=@PATH, or send text as 'text'.")
        else:
            file_name = " ".join(file.split())[:200]
            document = parse_document(data, file_name or "the file")
    if document is None:
        return parse(ContextRequest, fields), None
    if "text" in fields:
        raise PromptError("the form has a file and a text; send one of them.")
    skipped = [text[:_MAX_SKIPPED_TEXT] for text in document.skipped[:_MAX_SKIPPED]]
    return parse(ContextRequest, {"name": file_name, **fields, "text": document.text}), skipped


def parse(schema: type[_Schema], data: bytes | dict[str, Any]) -> _Schema:
    """Parse the body of a request, JSON or the fields of a form. Raises PromptError with one problem."""
    try:
        return schema.model_validate_json(data) if isinstance(data, bytes) else schema.model_validate(data)
    except ValidationError as error:
        kinds = [problem["type"] for problem in error.errors(include_url=False, include_input=False)]
        place, problem = first_problem(error)
        field = place[:100] or "the body"
        if "extra_forbidden" in kinds:
            names = ", ".join(schema.model_fields)
            raise PromptError(f"{field}: there is no such field; the fields are {names}, and in a form file.") from None
        if kinds[0] in _SHAPE_ERRORS:
            says = "this field is missing" if kinds[0] == "missing" else problem
            raise PromptError(f"{field}: {says}; {schema.example}.") from None
        raise PromptError(f"{field}: {problem}; check the request.") from None


def first_problem(error: ValidationError) -> tuple[str, str]:
    """Return the field that pydantic refused, and why; a misspelt one first, which may be why another is missing."""
    problems = error.errors(include_url=False, include_context=False, include_input=False)
    problem = next((each for each in problems if each["type"] == "extra_forbidden"), problems[0])
    return ".".join(map(str, problem["loc"])), problem["msg"]


def error_response(error: LkvError) -> JSONResponse:
    """Return the answer to a request that fails with `error`."""
    status, kind = next((value for cls, value in _STATUS.items() if isinstance(error, cls)), (500, "server_error"))
    content = error_object(str(error), kind, UNREADABLE if isinstance(error, ContextFileError) else None)
    return JSONResponse(content, status, {"Retry-After": "1"} if isinstance(error, BusyError) else None)


def error_object(message: str, kind: str, code: str | None = None) -> dict[str, Any]:
    """Return an error as OpenAI's clients read it."""
    return {"error": {"message": message, "type": kind, "param": None, "code": code}}
