"""Processor time (ms) and memory (MiB) that parsing the worst bodies takes, for a model of 8,192 positions."""

import resource
import time
from contextlib import suppress

from lkv.errors import PromptError
from lkv.serving.schemas import parse_chat, parse_context

SIZE = 6 * 16 * 8192 + 2**16
FORM = b'--b\r\nContent-Disposition: form-data; name="file"\r\n\r\n'
MESSAGE, END = b'{"messages":[{"role":"user","content":', b"}]}"
BODIES = [  # beginning, what is repeated, end
    (b'{"messages":[', b"1,", b"1]}"),
    (b'{"messages":[', b"{},", b"{}]}"),
    (b'{"tools":[', b"1,", b"1]}"),
    (b"", b"[", b""),
    (b"{", b'"a":1,', b'"b":1}'),
    (MESSAGE + b"[", b'{"type":"text","text":""},', b"{}]" + END),
    (MESSAGE + b'"', b"\\u0041", b'"' + END),
    (MESSAGE + b'"', b'\\"', b'"' + END),
    (MESSAGE + b'"', b"\xff", b'"' + END),
    (b"", b"--b\r\n\r\n", b"--b--"),
    (FORM, b"\r\n", b"\r\n--b--"),
]


def parse_all(body: bytes) -> None:
    """As a chat, as a context, and as a form."""
    for parse in (
        parse_chat,
        lambda body: parse_context(body, "application/json"),
        lambda body: parse_context(body, "multipart/form-data; boundary=b"),
    ):
        with suppress(PromptError):
            parse(body)


def main() -> None:
    """Print both."""
    parse_all(b"{}")
    before, slowest = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, 0.0
    for head, unit, tail in BODIES:
        body = head + unit * ((SIZE - len(head) - len(tail)) // len(unit)) + tail
        began = time.thread_time()
        parse_all(body)
        slowest = max(slowest, time.thread_time() - began)
    print(1000 * slowest, (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024)


if __name__ == "__main__":
    main()
