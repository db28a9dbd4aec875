"""Addresses in regions.yaml: the base URL of a replica, and `host:port` of a listener.

Each check returns its argument or raises `ValueError` with the expectation, as pydantic requires.
"""

from __future__ import annotations

import re
from contextlib import suppress
from ipaddress import ip_address
from urllib.parse import urlsplit

URL_EXPECTED = "an http:// or https:// URL with a host and no user, query or fragment, such as http://10.0.0.5:30000"
ORIGIN_EXPECTED = "'*', or an origin in lower case without a path, such as https://chat.example.com"
KV_ENDPOINT_EXPECTED = "tcp://host:port or ipc://path, such as tcp://10.0.0.5:5557 or, with mode: bind, tcp://*:5557"
STORE_URL_EXPECTED = (
    "redis://host:port/db or rediss://host:port/db (TLS), without user, password or options, "
    "such as rediss://store.internal:6379/0"
)
BIND_EXPECTED = "host:port with a port of 0 to 65535, such as 127.0.0.1:8080 or [::1]:8080"

_BIND = re.compile(r"(?:\[(?P<six>[0-9A-Fa-f:.]+)\]|(?P<host>[A-Za-z0-9._-]+)):(?P<port>[0-9]{1,5})", re.ASCII)
_KV_ADDRESS = re.compile(r"(?:\[(?P<six>[0-9A-Fa-f:.]+)\]|(?P<host>\*|[A-Za-z0-9._-]+)):(?P<port>[0-9]{1,5})", re.ASCII)
#: Of a Unix socket.
_MAX_IPC_PATH = 100
#: Redis numbers its databases; by default there are 16.
_DATABASE = re.compile(r"(?:/[0-9]{0,4})?", re.ASCII)
_HOST = re.compile(r"[A-Za-z0-9._-]+|[0-9A-Fa-f:.]+", re.ASCII)


def checked_url(text: str) -> str:
    """Return `text` if it is the base URL of a replica.

    >>> checked_url("http://10.0.0.5:30000")
    'http://10.0.0.5:30000'
    """
    if not _is_url(text):
        raise ValueError(URL_EXPECTED)
    return text


def checked_origin(text: str) -> str:
    """Return `text` if it is `*` or the origin of web pages, as browsers send it.

    >>> checked_origin("https://chat.example.com")
    'https://chat.example.com'
    """
    if text != "*" and (not _is_url(text) or text != text.lower() or urlsplit(text).path):
        raise ValueError(ORIGIN_EXPECTED)
    return text


def checked_bind(text: str) -> str:
    """Return `text` if it is `host:port`."""
    split_bind(text)
    return text


def split_bind(text: str) -> tuple[str, int]:
    """Return host and port of a `host:port`; IPv6 in brackets.

    >>> split_bind("[::1]:8080")
    ('::1', 8080)
    """
    match = _BIND.fullmatch(text)
    if match is None or int(match["port"]) > 65535:
        raise ValueError(BIND_EXPECTED)
    return match["six"] or match["host"], int(match["port"])


def checked_kv_endpoint(text: str) -> str:
    """Return `text` if it is an address of ZeroMQ between two processes.

    >>> checked_kv_endpoint("tcp://[::1]:5557")
    'tcp://[::1]:5557'
    """
    scheme, _, address = text.partition("://")
    if scheme == "ipc" and address.startswith("/") and address.isprintable() and len(address) <= _MAX_IPC_PATH:
        return text
    match = _KV_ADDRESS.fullmatch(address) if scheme == "tcp" else None
    if match is None or not 0 < int(match["port"]) <= 65535:
        raise ValueError(KV_ENDPOINT_EXPECTED)
    host = match["six"] or match["host"]
    if host != "*" and not _is_host(host):
        raise ValueError(KV_ENDPOINT_EXPECTED)
    return text


def checked_store_url(text: str) -> str:
    """Return `text` if it is the address of a Redis or Valkey server.

    >>> checked_store_url("rediss://store.internal:6379/0")
    'rediss://store.internal:6379/0'
    """
    if not _is_url(text, "redis", "rediss") or not _DATABASE.fullmatch(urlsplit(text).path):
        raise ValueError(STORE_URL_EXPECTED)
    return text


def _is_url(text: str, *schemes: str) -> bool:
    # urlsplit drops tabs and newlines and accepts control characters.
    if not text.isascii() or not text.isprintable() or any(sign in text for sign in " ?#@\\"):
        return False
    try:
        parts = urlsplit(text)
        port = parts.port
    except ValueError:
        return False
    host_ok = parts.hostname is not None and _is_host(parts.hostname)
    return parts.scheme in (schemes or ("http", "https")) and host_ok and port != 0


def _is_host(text: str) -> bool:
    if _HOST.fullmatch(text) is None:
        return False
    if ":" in text or text.replace(".", "").isdigit():  # an address and no name: 10.0.0.999 is neither
        with suppress(ValueError):
            ip_address(text)
            return True
        return False
    # A dot at the end is the root's; no label of a name is empty or too long for DNS.
    return all(0 < len(label) <= 63 for label in text.removesuffix(".").split("."))


def is_ip_address(host: str) -> bool:
    """Return whether a host is an IPv4 or IPv6 address, not a name.

    >>> is_ip_address("10.0.0.5"), is_ip_address("::1"), is_ip_address("replica")
    (True, True, False)
    """
    try:
        ip_address(host)
    except ValueError:
        return False
    return True
