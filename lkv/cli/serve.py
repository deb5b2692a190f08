"""lkv serve: serve compressed contexts and chats over an OpenAI-compatible API."""

import errno
import os
import socket

from pydantic import Field

from lkv.cli.arguments import Command
from lkv.cli.options import (
    DeviceOptions,
    ModelOptions,
    PolicyOptions,
    PositiveInt,
    Retention,
    check_methods,
    check_names,
    check_policy_options,
)
from lkv.errors import LkvError, ServerError

_KEY_VARIABLE = "LKV_API_KEY"


class Serve(PolicyOptions, DeviceOptions, ModelOptions, Command):
    """Serve contexts and chats over an OpenAI-compatible API."""

    name: str | None = Field(default=None, description="the model's name for clients (default: from --model)")
    method: str = Field(default="lkv", description="a name from `lkv methods`, except full")
    retention: Retention = Field(default=0.15, description="fraction of the KV cache to keep")
    host: str = Field(
        default="127.0.0.1", description=f"address to listen on; other than localhost needs ${_KEY_VARIABLE}"
    )
    port: int = Field(default=8000, ge=1, le=65535, description="port to listen on")
    store: str | None = Field(
        default=None, description="folder or fsspec URL of the saved contexts (default: in the cache folder)"
    )
    memory: float = Field(default=1024, ge=0, allow_inf_nan=False, description="MiB of contexts in memory")
    pages: PositiveInt = Field(default=512, description="pages of 32 tokens for questions and answers")
    max_requests: PositiveInt = Field(default=64, description="requests in flight; further ones get status 429")
    max_texts: PositiveInt = Field(default=16, description="texts that wait to be compressed")
    max_upload: PositiveInt = Field(default=16, description="MiB per request")
    max_store: PositiveInt = Field(default=65536, description="MiB of all saved contexts")
    max_tokens: PositiveInt = Field(default=1024, description="tokens per answer")
    timeout: float = Field(default=300.0, gt=0, allow_inf_nan=False, description="seconds per answer")
    grace: float = Field(
        default=30.0, ge=0, allow_inf_nan=False, description="seconds that a shutdown waits for answers in flight"
    )
    ray: bool = Field(default=False, description="replicas behind one address, by Ray Serve (extra ray)")
    replicas: PositiveInt = Field(default=2, description="replicas with --ray")

    def run(self) -> None:
        """Serve until interrupted."""
        from lkv.methods.registry import FULL
        from lkv.utils.extras import require

        require("ray" if self.ray else "serve", "lkv serve")
        key = read_api_key(self.host)
        if self.method == FULL:
            raise LkvError("uncompressed contexts cannot be stored; use a method that compresses, such as lkv.")
        check_names([self.method])
        check_policy_options(self)
        check_port(self.host, self.port)
        check_methods([self.method], takes_pattern=False)
        if self.ray:
            from lkv.serving.ray import serve_replicas

            serve_replicas(self.model_dump(), key)
            return
        import uvicorn

        from lkv.serving.app import make_app
        from lkv.serving.middleware import LOOPBACK
        from lkv.serving.service import make_service

        service = make_service(self.model_dump())
        app = make_app(service, key, self.host in LOOPBACK, self.grace)
        print(f"lkv serves {service.name!r} on http://{self.host}:{self.port} (Ctrl-C ends it)", flush=True)
        uvicorn.run(
            app,
            host=self.host,
            port=self.port,
            log_level="warning",
            access_log=False,
            timeout_graceful_shutdown=int(self.grace) + 1,
        )


def read_api_key(host: str) -> str | None:
    """Return the key that clients must send. Raises ServerError if `host` needs one and none is set."""
    key = os.environ.get(_KEY_VARIABLE) or None
    if host not in ("localhost", "127.0.0.1", "::1") and key is None:
        raise ServerError(
            f"{host} can be reached by others: set {_KEY_VARIABLE} to a key that clients must send, or leave --host "
            "out."
        )
    return key


def check_port(host: str, port: int) -> None:
    """Raise ServerError, before a model is loaded, if nothing can listen on this address."""
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        with socket.socket(family) as trial:
            trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            trial.bind((host, port))
    except OSError as error:
        in_use = error.errno == errno.EADDRINUSE
        problem = f"port {port} is already in use" if in_use else f"cannot listen on {host}:{port} ({error.strerror})"
        raise ServerError(f"{problem}; give another --port{'' if in_use else ' or --host'}.") from error


COMMAND = Serve
