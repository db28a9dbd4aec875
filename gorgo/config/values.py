"""Types of the values in regions.yaml, each with its range or its check, and values that no file sets.

Owns the types, the names of headers and of engines that are allowed, and the constants with their reasons. Leaves the
keys to `model` and `fleet`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from importlib.metadata import entry_points
from typing import Annotated, Any, TypeVar

from pydantic import AfterValidator, ConfigDict, Field, ValidatorFunctionWrapHandler, with_config

from gorgo.config.addresses import checked_bind, checked_kv_endpoint, checked_origin, checked_store_url, checked_url

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
    others = {found.name for found in entry_points(group=ENTRY_POINTS)} - set(BUILT_IN)
    return [*BUILT_IN, *sorted(others)]


def checked_engine(name: str) -> str:
    """Return `name`. Raises `ValueError` with the allowed names."""
    if name == AUTO or name in BUILT_IN or name in engine_names():
        return name
    *first, last = (f"'{known}'" for known in (*engine_names(), AUTO))
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


def auto_or(found: object) -> Callable[[Any, ValidatorFunctionWrapHandler], Any]:
    """Accept `auto` for the mapping `found`."""

    def check(value: Any, handler: ValidatorFunctionWrapHandler) -> Any:
        if value == "auto":
            return handler(found)
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
