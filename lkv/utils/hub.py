"""Whether the Hugging Face Hub can be reached."""

import socket
from urllib.parse import urlsplit
from urllib.request import getproxies

from huggingface_hub import constants

_SECONDS = 3.0


def is_offline() -> bool:
    """Return whether only cached files can be loaded; huggingface_hub would retry each request for 20 seconds."""
    if constants.HF_HUB_OFFLINE or getproxies():  # what a proxy reaches is seen by its use alone
        return constants.HF_HUB_OFFLINE
    address = urlsplit(constants.ENDPOINT)
    port = address.port or (80 if address.scheme == "http" else 443)
    try:
        socket.create_connection((address.hostname or "", port), _SECONDS).close()
    except OSError:
        return True
    return False
