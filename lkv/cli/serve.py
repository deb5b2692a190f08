"""lkv serve: contexts compressed once and asked by many, over an OpenAI-compatible API."""

import argparse
import os

from lkv.cli.options import add_device, add_dtype, add_model, add_policy, add_revision, check_policy, positive
from lkv.errors import LkvError, ServerError, check_retention

_KEY = "LKV_API_KEY"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    add_model(parser)
    add_revision(parser)
    add_dtype(parser)
    add_device(parser)
    add_policy(parser)
    parser.add_argument("--name", default=None, help="what clients call the model (default: from --model)")
    parser.add_argument("--method", default="lkv", help="a name that `lkv methods` lists, but not full")
    parser.add_argument("--retention", type=float, default=0.15, help="share of the cache to keep, in (0, 1]")
    parser.add_argument("--host", default="127.0.0.1", help=f"other than this machine's own needs ${_KEY}")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--store", default=None, help="folder or fsspec URL of contexts (default: the cache folder)")
    parser.add_argument("--memory", type=float, default=1024, help="MiB of contexts in memory (default 1024)")
    parser.add_argument(
        "--pages", type=positive, default=512, help="of 32 tokens, of questions and answers (default 512)"
    )
    parser.add_argument("--max-requests", type=positive, default=64, help="at once; further ones get 429 (default 64)")
    parser.add_argument("--max-texts", type=positive, default=16, help="that wait to be compressed (default 16)")
    parser.add_argument("--max-upload", type=positive, default=16, help="MiB of one request (default 16)")
    parser.add_argument("--max-tokens", type=positive, default=1024, help="of one answer (default 1024)")
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds of one answer (default 300)")
    parser.add_argument("--grace", type=float, default=30.0, help="seconds for answers at hand at the end (default 30)")
    parser.add_argument("--ray", action="store_true", help="replicas behind one address, by Ray Serve (extra ray)")
    parser.add_argument("--replicas", type=positive, default=2, help="of --ray")


def run(options: argparse.Namespace) -> None:
    """Serve until interrupted; raises LkvError for what the user can mend."""
    from lkv.methods.registry import FULL, parse_method
    from lkv.utils.extras import require

    require("ray" if options.ray else "serve", "lkv serve")
    key = checked_key(options.host)
    check_retention(options.retention)
    if options.method == FULL:
        raise LkvError("uncompressed contexts cannot be stored; give a method that compresses, such as lkv.")
    if parse_method(options.method).needs_pattern:
        raise LkvError(f"{options.method!r} needs a pattern of retrieval heads, which a server takes none of.")
    check_policy(options)
    if not 0 < options.port < 65536:
        raise ServerError(f"port is {options.port}; give one from 1 to 65535.")
    if options.ray:
        from lkv.serving.ray import serve_replicas

        check_port(options.host, options.port)
        serve_replicas(vars(options), key)
        return
    _serve(options, key)


def checked_key(host: str) -> str | None:
    """The key that clients must send. Raises ServerError where there must be one and is none."""
    key = os.environ.get(_KEY) or None
    if host not in ("localhost", "127.0.0.1", "::1") and key is None:
        raise ServerError(
            f"{host} can be reached by others: set {_KEY} to a key that clients must send, or leave --host out."
        )
    return key


def _serve(options: argparse.Namespace, key: str | None) -> None:
    import uvicorn

    from lkv.serving.app import make_app
    from lkv.serving.middleware import LOOPBACK
    from lkv.serving.service import make_service

    check_port(options.host, options.port)
    service = make_service(vars(options))
    app = make_app(service, key, options.host in LOOPBACK, options.grace)
    print(f"lkv serves {service.name!r} on http://{options.host}:{options.port} (Ctrl-C ends it)", flush=True)
    uvicorn.run(
        app, host=options.host, port=options.port, log_level="warning", access_log=False,
        timeout_graceful_shutdown=int(options.grace) + 1,
    )  # fmt: skip


def check_port(host: str, port: int) -> None:
    """Raise ServerError where nothing can listen, before a model is loaded."""
    import socket

    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        with socket.socket(family) as trial:
            trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            trial.bind((host, port))
    except OSError as error:
        raise ServerError(f"{host}:{port} cannot be listened on ({error.strerror}); give another --port.") from error
