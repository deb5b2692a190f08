"""Settings of both servers: options of `lkv serve`, and the key `lkv` of vLLM's `--additional-config`."""

import re
from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field
from pydantic_core import PydanticCustomError

from lkv.errors import DEFAULT_MEMORY, check_retention
from lkv.methods.targets import check_memory

KEY_VARIABLE = "LKV_API_KEY"
_MIB = 2**20


def _check_host(name: str) -> str:
    """Return a host name in lower case. Raises PydanticCustomError for others."""
    if not re.fullmatch(r"[A-Za-z0-9.-]+", name):
        raise PydanticCustomError("host_name", "a host name without scheme and port, such as lkv.example.com")
    return name.lower()


class ContextSettings(BaseModel):
    """How texts are compressed and where contexts are kept, in both servers."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    store: str | None = Field(
        None, description="folder or fsspec URL of the saved contexts (default: in the cache folder)"
    )
    method: str = Field("lkv", description="how texts are compressed")
    policy: str | None = Field(None, description="the policy (default: the model's, shipped or fitted)")
    memory: Annotated[str, AfterValidator(check_memory)] = Field(
        DEFAULT_MEMORY,
        description="what k and v of a text may take, where a request does not say: 10% of the 16-bit cache's bytes, "
        "or 2MB",
    )
    retention: Annotated[float, AfterValidator(check_retention)] | None = Field(
        None, description="instead of memory: fraction of the KV entries to keep, all in one precision"
    )
    contexts_memory: float = Field(1024, ge=0, le=2**40, description="MiB of contexts in memory")
    max_upload: float = Field(16, gt=0, le=2**40, description="MiB per request")
    max_store: float = Field(65536, gt=0, le=2**40, description="MiB of all saved contexts")
    max_tokens: int = Field(
        1024,
        ge=1,
        description="tokens per answer; with --engine vllm, of a chat's answer about a context whose request names no "
        "number",
    )

    allowed_hosts: tuple[Annotated[str, AfterValidator(_check_host)], ...] = Field(
        (),
        description="host names beside localhost by which clients and pages may ask, such as that of a reverse proxy; "
        f"needs ${KEY_VARIABLE}",
    )

    @property
    def store_url(self) -> str:
        """The place of the saved contexts."""
        from lkv.utils.files import cache_folder

        return self.store or str(cache_folder() / "contexts")

    @property
    def contexts_bytes(self) -> int:
        """Bytes of contexts in memory."""
        return int(self.contexts_memory * _MIB)

    @property
    def upload_bytes(self) -> int:
        """The largest request in bytes."""
        return int(self.max_upload * _MIB)

    @property
    def store_bytes(self) -> int:
        """Bytes of all saved contexts."""
        return int(self.max_store * _MIB)


class ServiceSettings(ContextSettings):
    """Settings of `lkv serve`, beside those that vLLM's plugin has too."""

    max_requests: int = Field(
        64, ge=1, description="requests in flight; further ones get status 429, or wait with --engine vllm"
    )
    max_batch: int = Field(16, ge=1, description="requests about one context that are answered together")
    max_texts: int = Field(16, ge=1, description="texts that wait, beside the one that is being compressed")
    keep_days: float | None = Field(
        None, gt=0, le=36500, description="days after which contexts that nobody asks are deleted (default: never)"
    )
    timeout: float = Field(300.0, gt=0, le=86400, description="seconds per answer")
    name: str | None = Field(None, description="the model's name for clients (default: from --model)")
    host: str = Field("127.0.0.1", description=f"address to listen on; other than localhost needs ${KEY_VARIABLE}")
    port: int = Field(8000, ge=1, le=65535, description="port to listen on")
    grace: float = Field(30.0, ge=0, le=86400, description="seconds that a shutdown waits for answers in flight")
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        "info", description="what goes to stderr; info has a line for each request and each text"
    )
    log_format: Literal["text", "json"] = Field(
        "text", description="form of all lines on stderr; json is one object a line"
    )
    vllm_args: str = Field(
        "",
        description="with --engine vllm: further options of vLLM's server, as one text, after an equals sign: "
        "--vllm-args='--enforce-eager'",
    )

    @property
    def keep_seconds(self) -> float | None:
        """Seconds after which a context that nobody asked about is deleted."""
        return None if self.keep_days is None else self.keep_days * 86400
