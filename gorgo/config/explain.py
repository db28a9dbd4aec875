"""The message of one pydantic error: the value found, what was expected, and the key that was probably meant.

Owns the messages (`explain`), and the table of old keys with their new names (`renamed_keys`). Leaves reading and
listing errors to `load`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from functools import cache
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

from pydantic_core import ErrorDetails

from gorgo.config.document import Document, Path, Problem, show_value
from gorgo.config.model import Config
from gorgo.errors import closest

#: Its value is the name of a variable; a pasted key must not be shown.
_SECRET_KEYS = frozenset({"api_key_env", "push_token_env", "password_env", "key_env"})

_PATTERNS = {
    **dict.fromkeys(_SECRET_KEYS, "the name of an environment variable: letters, digits and '_'"),
    "default": "letters, digits, '.', '_' and '-', the first a letter or digit, at most 63",
}

_EXPECTED = {
    "bool_type": "true or false",
    "dataclass_type": "a mapping",
    "dict_type": "a mapping",
    "float_type": "a number",
    "greater_than": "a number greater than {gt:g}",
    "greater_than_equal": "a number of at least {ge:g}",
    "int_type": "a whole number",
    "less_than_equal": "a number of at most {le:g}",
    "literal_error": "{expected}",
    "mapping_type": "a mapping",
    "string_too_long": "at most {max_length} characters",
    "string_too_short": "text that is not empty",
    "string_type": "text",
    "tuple_type": "a list",
    "value_error": "{error}",
}


def explain(error: ErrorDetails, document: Document, model: type = Config) -> Problem:
    """Return `error` as a line about a file that has the keys of `model`."""
    path, kind = _path(error["loc"]), error["type"]
    if kind == "unexpected_keyword_argument":
        return _unknown_key(path, document, model)
    if kind == "missing":
        return Problem(path, document.line(path), "missing", _required(path, model))
    reference = document.references.get(path)
    found = _found(path, error["input"]) if reference is None else f"the value of {show_value(reference)}"
    return Problem(path, document.line(path), found, _expected(error, path))


def keys_at(path: Path, model: type = Config) -> list[str]:
    """Return the keys that the file may have in the mapping at `path`.

    >>> keys_at(("replicas", 3, "capacity"))[:2]
    ['kv_tokens', 'max_running_requests']
    >>> keys_at(("replicas", 3, "url"))
    []
    """
    kind = _type_at(path, model)
    return [item.name for item in fields(kind)] if is_dataclass(kind) else []


def _unknown_key(path: Path, document: Document, model: type) -> Problem:
    # The value is not shown: it may be a misplaced API key.
    known = keys_at(path[:-1], model)
    found = f"unknown key{closest(str(path[-1]), known)}"
    return Problem(path, document.line(path), found, f"one of {', '.join(known)}")


def _found(path: Path, value: object) -> str:
    if path and path[-1] in _SECRET_KEYS:
        return "a value that is not shown"
    if isinstance(value, str) and "@" in value:
        return "text with '@', not shown because it may hold a password"
    return show_value(value)


def _expected(error: ErrorDetails, path: Path) -> str:
    if error["type"] == "string_pattern_mismatch":
        return _PATTERNS.get(str(path[-1]) if path else "", _PATTERNS["default"])
    template = _EXPECTED.get(error["type"])
    text = error["msg"] if template is None else template.format(**error.get("ctx", {}))
    quoted = error["type"] == "string_type" and isinstance(error["input"], int | float)
    return f"{text} (put it in quotes)" if quoted else text


def _required(path: Path, model: type) -> str:
    kind = _type_at(path, model)
    words = {tuple: "a list", str: "text", Config: "a mapping"}
    shape = "a mapping" if is_dataclass(kind) else words.get(kind, "a value")
    return f"this key with {shape}"


def _path(location: tuple[int | str, ...]) -> Path:
    # pydantic marks a fault in a mapping's key, not its value, with one more part.
    return location[:-1] if location and location[-1] == "[key]" else location


def _type_at(path: Path, model: type) -> Any:
    """Return the class of the model at `path`, without `Annotated` and `None`; `object` without one."""
    kind: Any = model
    for part in path:
        kind = _bare(_step(kind, part))
    return get_origin(kind) or kind


def _step(kind: Any, part: str | int) -> Any:
    if isinstance(kind, type) and is_dataclass(kind) and isinstance(part, str):
        return _hints(kind).get(part, object)
    arguments = get_args(kind)
    if not arguments:
        return object
    return arguments[1] if issubclass(get_origin(kind), Mapping) else arguments[0]


@cache
def _hints(kind: type) -> dict[str, Any]:
    """Return the type hints, cached: reading them takes 1 ms, and each line may have an error."""
    return get_type_hints(kind, include_extras=True)


def _bare(kind: Any) -> Any:
    while get_origin(kind) is Annotated:
        kind = get_args(kind)[0]
    if get_origin(kind) in (Union, UnionType):
        return _bare(next(part for part in get_args(kind) if part is not type(None)))
    return kind


# Old keys of regions.yaml: the new key of each, or the reason for its removal.
#
# Owns the table. The error for an old key names the new one, so that an old file can be corrected from the error
# alone. No old key is read.


_EVERY_REGION = "set for all regions in limits"

#: Old key -> its new key, both dotted and with places in lists left out (`regions.limits.connect_timeout_s`), or a few
#: words that say why it is gone.
RENAMED: dict[str, str] = {
    "overload.hold": "overload.queue_enabled",
    "overload.max_held": "overload.queue_max_requests",
    "overload.open_work_ms": "overload.max_backlog_ms",
    "overload.open_in_flight": "overload.max_concurrency_per_replica",
    "overload.hopeless_wait_ms": "fixed at 300 ms",
    "overload.infeasible_max_wait_ms": "fixed at 300 ms",
    "overload.hedge_share": "overload.hedge_budget_ratio",
    "overload.hedge_late_ms": "fixed at 500 ms",
    "overload.hedge_delay_ms": "fixed at 500 ms",
    "overload.retry_share": "overload.retry_budget_ratio",
    "proxy.ready_replicas": "proxy.min_ready_replicas",
    "proxy.stale_after_s": "fixed at three of the longer interval",
    "proxy.rtt_ewma_alpha": "fixed at 0.3",
    "replicas.capacity.prefill_base_ms": "fixed at 12 ms",
    "replicas.capacity.prefill_kappa_s": "fixed at 1.6e-9 s",
    "clients.keys_env": "keys are read from clients.keys_file alone",
    "picker.transport": "HTTP/2 of the project alone carries gRPC",
    "simulation.jitter": "fixed at 0.02",
    "limits.body_gap_timeout_s": "fixed at 15 s",
    "limits.body_idle_timeout_s": "fixed at 15 s",
    "limits.max_header_lines": "fixed at 128",
    "limits.first_content_timeout_s": "limits.first_token_timeout_s",
    "limits.whole_answer_timeout_s": "limits.response_timeout_s",
    "limits.between_chunks_timeout_s": "limits.stream_idle_timeout_s",
    "limits.total_timeout_s": "limits.request_timeout_s",
    "regions.limits.first_content_timeout_s": "regions.limits.first_token_timeout_s",
    "regions.limits.connect_timeout_s": _EVERY_REGION,
    "regions.limits.response_timeout_s": _EVERY_REGION,
    "regions.limits.whole_answer_timeout_s": _EVERY_REGION,
    "regions.limits.stream_idle_timeout_s": _EVERY_REGION,
    "regions.limits.between_chunks_timeout_s": _EVERY_REGION,
    "regions.limits.request_timeout_s": _EVERY_REGION,
    "regions.limits.total_timeout_s": _EVERY_REGION,
}


def renamed_keys(document: Document) -> Iterator[Problem]:
    """Each key of the table that the file has, also inside a section that was renamed itself."""
    for path, line in document.lines.items():
        became = RENAMED.get(_dotted(path))
        if became is None or path[-1] in keys_at(path[:-1]):
            continue
        if " " in became:
            yield Problem(path, line, f"unknown key (removed: {became})", "the file without it")
        else:
            yield Problem(path, line, "unknown key (renamed)", became)


def _dotted(path: Path) -> str:
    return ".".join(part for part in path if isinstance(part, str))
