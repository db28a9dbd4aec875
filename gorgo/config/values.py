"""Types of the values in regions.yaml, each with its range or its check, and values that no file sets.

Owns the types, the addresses and the names of headers and of engines that are allowed, and the constants with their
reasons. Leaves the keys to `model` and `fleet`. Each check of a value returns its argument or raises `ValueError` with
the expectation, as pydantic requires.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from importlib.metadata import entry_points
from ipaddress import ip_address
from typing import Annotated, Any, TypeVar
from urllib.parse import urlsplit

from pydantic import AfterValidator, ConfigDict, Field, ValidatorFunctionWrapHandler, with_config

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
        return is_ip_address(text)
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


# Names of headers that an operator may let through the proxy beside those that always pass.


#: Headers of one hop: RFC 9110, 7.6.1, and older names still in use.
HOP_BY_HOP = frozenset(
    {
        *("connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "proxy-authentication-info"),
        *("proxy-connection", "te", "trailer", "transfer-encoding", "upgrade", "http2-settings"),
    }
)
#: Written anew by the proxy for each hop.
_OWN = frozenset({"host", "content-length", "expect", "x-request-id"})
_NAME = re.compile(r"[a-z0-9][a-z0-9-]{0,127}")


def checked_header(name: str) -> str:
    """Return `name` if it is a header in lower case that may pass. Raises `ValueError` for one of a hop or ours."""
    if not _NAME.fullmatch(name):
        raise ValueError("the name of a header: lower case, digits and hyphens")
    if name in HOP_BY_HOP or name in _OWN or name.startswith("x-gorgo-"):
        raise ValueError("a header that is neither of one hop nor written by the proxy")
    return name


# Names of engines in regions.yaml: the dialects of this package and of other installed packages.
#
# Names only: a file is checked without loading a dialect. `gorgo.engines.registry` has the classes.


#: Group in which another package offers a dialect: the entry point's name is the engine's, its object the class.
ENTRY_POINTS = "gorgo.engines"
BUILT_IN = ("sglang", "vllm", "llamacpp", "openai")
#: The kind is found by asking the engine.
AUTO = "auto"


def engine_names() -> list[str]:
    """Return all names of engines, this package's first. Entry points are read from files at each call."""
    others = {entry_point.name for entry_point in entry_points(group=ENTRY_POINTS)} - set(BUILT_IN)
    return [*BUILT_IN, *sorted(others)]


def checked_engine(name: str) -> str:
    """Return `name`. Raises `ValueError` with the allowed names."""
    if name == AUTO or name in BUILT_IN or name in engine_names():
        return name
    *first, last = (f"'{allowed}'" for allowed in (*engine_names(), AUTO))
    raise ValueError(f"{', '.join(first)} or {last}")


_Entry = TypeVar("_Entry")


def _printable(text: str) -> str:
    """Reject control characters and marks of direction: names are in logs, tables and pages."""
    if not text.isprintable():
        raise ValueError("printable characters")
    return text


def some(entries: tuple[_Entry, ...]) -> tuple[_Entry, ...]:
    """Reject an empty list. `min_length` would also fail where every entry is invalid by itself."""
    if not entries:
        raise ValueError("at least one entry")
    return entries


def auto_or(mapping: object) -> Callable[[Any, ValidatorFunctionWrapHandler], Any]:
    """Accept `auto` for a `mapping`."""

    def check(value: Any, handler: ValidatorFunctionWrapHandler) -> Any:
        if value == "auto":
            return handler(mapping)
        if not isinstance(value, Mapping):
            raise ValueError("auto, or a mapping")
        return handler(value)

    return check


Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,62}$")]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=1)]
Port = Annotated[int, Field(ge=1, le=65_535)]
#: Of a training; a sample takes 200 bytes in two processes.
Samples = Annotated[int, Field(ge=1, le=200_000)]
Text = Annotated[str, Field(min_length=1, max_length=256), AfterValidator(_printable)]
EnvironmentName = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]{0,127}$")]
Url = Annotated[str, AfterValidator(checked_url)]
StoreUrl = Annotated[str, AfterValidator(checked_store_url)]
FilePath = Annotated[str, Field(min_length=1, max_length=4096)]
KvEndpoint = Annotated[str, AfterValidator(checked_kv_endpoint)]
Origin = Annotated[str, AfterValidator(checked_origin)]
Bind = Annotated[str, AfterValidator(checked_bind)]
EngineName = Annotated[str, AfterValidator(checked_engine)]
HeaderName = Annotated[str, AfterValidator(checked_header)]

#: An unknown key is an error: a misspelt limit would silently keep its default.
strict = with_config(ConfigDict(extra="forbid"))


# Values that no file sets, each with its reason. The proxy and the simulator read the same ones.


#: Text per block of the proxy's prefix index: 64 tokens of 4 bytes.
BLOCK_BYTES = 256
#: `models[].tokenizer` of simulated engines, which count four bytes of text as a token.
SIMULATED_TOKENIZER = "simulated"
#: A probe or scrape is stale after this many intervals: one that is lost changes nothing.
STALE_INTERVALS = 3
#: A far replica on a new TLS connection answers a ping within 1 s. A slower one counts as down.
PROBE_TIMEOUT_S = 5.0
#: Idle connections per replica that pings keep warm: the first requests of a burst save a round trip, two with TLS.
WARM_CONNECTIONS = 2
#: Idle time of a connection to a replica, s. The shortest keep-alive in use is 5 s (uvicorn, so SGLang and vLLM); the
#: rest is the round trip of a far replica.
REPLICA_KEEP_ALIVE_S = 4.0
#: Two warm-ups within the idle time of a connection.
WARM_INTERVAL_S = REPLICA_KEEP_ALIVE_S / 2
#: Round trip from which the kernel's retransmission time-out is derived. That time-out is 0.2 to 0.4 s on any path, so
#: another value moves the estimate of an idle connection's window by less than a second.
ASSUMED_RTT_S = 0.1
#: Defaults of `limits.connections_per_replica` and `limits.first_token_timeout_s`; a simulation knows no other values.
CONNECTIONS_PER_REPLICA = 1024
FIRST_TOKEN_TIMEOUT_S = 120.0
#: Shortest token of the admin listener: 16 letters and digits at random are 95 bits; a word is guessed.
MIN_TOKEN_CHARS = 16
