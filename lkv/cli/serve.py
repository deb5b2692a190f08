"""lkv serve: serve compressed contexts and chats over an OpenAI-compatible API."""

import errno
import logging
import os
import signal
import socket
import sys
from contextlib import suppress
from typing import TYPE_CHECKING, Literal

from lkv.cli.command import option
from lkv.cli.options import MethodName, PolicyOptions, RunOptions, check_methods
from lkv.errors import LkvError, ServerError
from lkv.serving import LOOPBACK
from lkv.serving.settings import KEY_VARIABLE, ServiceSettings
from lkv.utils.files import short_name

if TYPE_CHECKING:
    from lkv.serving.service import Service

_NOT_FOR_VLLM = (
    "--device --policy-revision --no-strict --max-batch --max-texts --keep-days --timeout --log-level --log-format"
).split()

_LOG = logging.getLogger(__name__)


class Serve(PolicyOptions, RunOptions, ServiceSettings):
    """Serve contexts and chats over an OpenAI-compatible API."""

    method: MethodName = option("a name from `lkv methods`, except full", "lkv")
    engine: Literal["lkv", "vllm"] = option(
        f"lkv's own small server, or vLLM's with the plugin (extra vllm), which refuses {', '.join(_NOT_FOR_VLLM)}",
        "lkv",
    )

    def run(self) -> None:
        """Serve until interrupted."""
        from lkv.methods.registry import FULL
        from lkv.utils.extras import require

        self._check_engine()
        require("serve" if self.engine == "lkv" else "vllm", "lkv serve")
        key = read_api_key(self.host, *self.allowed_hosts)
        if self.method == FULL:
            raise LkvError("uncompressed contexts cannot be stored; use a method that compresses, such as lkv.")
        check_port(self.host, self.port)
        check_methods(self, [self.method])
        if self.engine == "vllm":
            from lkv.integrations.vllm.command import server_command

            words, environment = server_command(self, self.model, self.revision, self.dtype, key)
            address = f"http://{self.host}:{self.port}"
            print(
                f"vLLM starts, which takes a minute or more, and then serves on {address} (Ctrl-C ends it)", flush=True
            )
            os.execve(words[0], words, {**os.environ, **environment})  # replaces this process
        from lkv.serving.app import HttpServer

        self._set_up_logs()
        service = self.make_service()
        if self.log_format == "text":
            print(f"lkv serves {service.name!r} on http://{self.host}:{self.port} (Ctrl-C ends it)", flush=True)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # uvicorn raises it again after the shutdown
        with suppress(KeyboardInterrupt):
            HttpServer(service, key).run()

    def _set_up_logs(self) -> None:
        """Write log lines to stderr, and with `--log-format json` also what is printed there as such lines."""
        from lkv.serving.middleware import JsonFormatter, LineLogger

        # Other packages' messages from warnings on; uvicorn's in the same form.
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
        if self.log_format == "json":
            handler.setFormatter(JsonFormatter())
            logging.raiseExceptions = False  # a broken stderr cannot be reported there
            sys.stderr = LineLogger(handler)
        logging.basicConfig(handlers=[handler])
        logging.getLogger("lkv").setLevel(self.log_level.upper())

    def make_service(self) -> "Service":
        """Load the model and its policy, and start the service. Raises as loading them does."""
        from lkv.methods.registry import parse_method
        from lkv.policy.lookup import resolve_policy
        from lkv.serving.service import Service

        _LOG.info("loading %s", self.model_name)
        model, tokenizer = self.load_model()
        policy = None
        if parse_method(self.method).needs_policy:
            policy = resolve_policy(model, self.load_policy(), name=self.model_name)
        return Service(model, tokenizer, self.name or short_name(self.model_name), self, policy)

    def _check_engine(self) -> None:
        """Raise LkvError for options that the engine does not read."""
        if self.engine == "vllm":
            advice = "leave them out, or use vLLM's own options in --vllm-args"
            self.refuse_unread("--engine vllm", *_NOT_FOR_VLLM, advice=advice)
        if self.engine == "lkv" and self.vllm_args:
            raise LkvError("--vllm-args needs --engine vllm; add it, or leave --vllm-args out.")


def read_api_key(*hosts: str) -> str | None:
    """Return the key that clients must send. Raises ServerError if one of `hosts` needs one and none is set."""
    key = os.environ.get(KEY_VARIABLE) or None
    if key is None and (public := [host for host in hosts if host not in LOOPBACK]):
        raise ServerError(
            f"{public[0]} can be reached by others: set {KEY_VARIABLE} to a key that clients must send, or leave "
            "--host and --allowed-hosts out."
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
