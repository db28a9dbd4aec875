"""regions.yaml to `Config`, or one `ConfigError` with all errors of the file; and a file from the URLs of replicas.

Owns the checks of a whole file, the message of each error (`explain`), the table of old keys with their new names
(`renamed_keys`), and the text that `gorgo serve --replica` runs (`config_text`). Leaves syntax to `document`.

pydantic checks types and ranges of the dataclasses in `config.model`, strictly: "30" is not a number, true is not 1.
Each error names path, line, value and expectation; values that may be secret are not shown. The shells check names of
policies and profiles.
"""

from __future__ import annotations

import json
import os
import pathlib
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from functools import cache
from types import UnionType
from typing import Annotated, Any, TypeVar, Union, get_args, get_origin, get_type_hints

from pydantic import TypeAdapter, ValidationError
from pydantic_core import ErrorDetails

from gorgo.config.document import MAX_BYTES, Document, Path, Problem, read_document, show_path, show_value
from gorgo.config.model import Config
from gorgo.config.replica_advice import without_api_path
from gorgo.config.values import URL_EXPECTED, checked_url
from gorgo.core.numeric import is_number
from gorgo.errors import ConfigError, closest

#: Errors shown; the rest is counted.
MAX_PROBLEMS_SHOWN = 200

_ADAPTER = TypeAdapter(Config)

T = TypeVar("T")


def load_config(path: pathlib.Path) -> Config:
    """Read and check the file at `path`; raises `ConfigError`."""
    return parse_config(read_text(path), source=str(path))


def load_settings(
    path: pathlib.Path, model: type[T], *, further: Callable[[T], Iterable[tuple[Path, str, str]]] | None = None
) -> T:
    """Read a YAML file with the keys of the dataclass `model`; raises `ConfigError`.

    `further` yields path, found and expected of what the types of the keys do not say.
    """
    document = read_document(read_text(path, expected="a settings file"))
    settings = _typed(document, TypeAdapter(model), model)
    if settings is not None and further is not None:
        for key, found, expected in further(settings):
            document.report(key, found, expected)
    if document.problems or settings is None:
        raise ConfigError(_message(str(path), document.problems))
    return settings


def read_text(path: pathlib.Path, *, expected: str = "a regions.yaml file") -> bytes:
    """Return the file's content, no more than can be checked; raises `ConfigError`."""
    try:
        with path.open("rb") as file:
            # One byte beyond the bound shows that it is too large, whatever `path` is.
            return file.read(MAX_BYTES + 1)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ConfigError(f"{path}: cannot be read: {reason}; expected {expected}") from error


def parse_config(text: bytes, *, source: str = "regions.yaml", environ: Mapping[str, str] = os.environ) -> Config:
    """Parse the text of a regions file; `source` names it in the `ConfigError`, `environ` has its variables."""
    document, config = check_text(text, environ=environ)
    if document.problems or config is None:
        raise problems_error(source, document)
    return config


def check_text(
    text: bytes,
    *,
    environ: Mapping[str, str],
    further: Callable[[Document], Iterable[Problem]] | None = None,
    allow_unset: bool = False,
) -> tuple[Document, Config | None]:
    """Return the checked document with its errors, and the configuration if there are none.

    `further` yields more errors of the plain data. With `allow_unset` a variable that is not set is no error, and there
    is no configuration.
    """
    document = read_document(text, environ, allow_unset=allow_unset)
    if not document.lines and not document.problems:
        document.report((), "empty", "a mapping with proxy, regions and replicas")
    config = check_document(document) if document.lines else None
    if further is not None and document.lines:
        reported = {problem.path for problem in document.problems}
        document.problems.extend(problem for problem in further(document) if problem.path not in reported)
    document.hide_expanded()
    return document, config


def problems_error(source: str, document: Document) -> ConfigError:
    """Return the error that lists all problems of a document."""
    return ConfigError(_message(source, document.problems))


def check_document(document: Document) -> Config | None:
    """Check plain data by every rule of a regions file; errors are added to the document's problems."""
    document.problems.extend(renamed_keys(document))
    config = _typed(document, _ADAPTER, Config)
    document.problems.extend(_disagreements(document))
    return config


def _typed(document: Document, adapter: TypeAdapter[T], model: type[T]) -> T | None:
    try:
        return adapter.validate_json(json.dumps(document.data), strict=True)
    except ValidationError as invalid:
        reported = {problem.path for problem in document.problems} | document.unknown
        problems = (explain(error, document, model) for error in invalid.errors(include_url=False))
        # A value with a syntax error is null in the data: one error per path.
        document.problems.extend(problem for problem in problems if problem.path not in reported)
        return None


def _message(source: str, problems: Iterable[Problem]) -> str:
    ordered = sorted(problems, key=lambda problem: (problem.line, show_path(problem.path)))
    lines = [f"  {problem}" for problem in ordered[:MAX_PROBLEMS_SHOWN]]
    if len(ordered) > MAX_PROBLEMS_SHOWN:
        lines.append(f"  and {len(ordered) - MAX_PROBLEMS_SHOWN} more")
    count = "1 error" if len(ordered) == 1 else f"{len(ordered)} errors"
    return "\n".join([f"{source}: {count}", *lines])


def _disagreements(document: Document) -> Iterator[Problem]:
    """Yield contradictions between keys, from plain data: no other error hides them."""
    regions = _names(document.data, "regions")
    yield from _repeated(regions, document)
    yield from _tls(document)
    yield from _deadlines(document)
    yield from _repeated(_names(document.data, "replicas"), document)
    yield from _repeated(_names(document.data, "models"), document)
    yield from _repeated(_names(document.data, "fleet_sources"), document)
    yield from _some_replicas(document)
    yield from _repeated(_names(document.data, "rules", "clients"), document)
    yield from _aliases(document)
    yield from _profiled(document)
    region_names = sorted(set(regions.values()))
    if not region_names or any(path[0] == "regions" for path in document.unknown):
        return  # Already reported, or a name is not known here; every region below would be unknown.
    for path, region in _regions_used(document.data):
        if region not in region_names:
            what = f"{json.dumps(region)} is not a region of this file{closest(region, region_names)}"
            yield Problem(path, document.line(path), what, f"one of {', '.join(region_names)}")
    yield from _same_address(document)
    yield from _ready_replicas(document)


def _names(data: object, section: str, within: str | None = None) -> dict[Path, str]:
    above: Path = () if within is None else (within,)
    return {
        (*above, section, number, "name"): item["name"]
        for number, item in enumerate(items(data if within is None else inside(data, within), section))
        if isinstance(item, Mapping) and isinstance(item.get("name"), str)
    }


def _repeated(names: Mapping[Path, str], document: Document) -> Iterator[Problem]:
    first: dict[str, Path] = {}
    for path, name in names.items():
        if name in first:
            where = f"{show_path(first[name])} on line {document.line(first[name])}"
            yield Problem(path, document.line(path), f"{json.dumps(name)} is the name of {where}", "each name once")
        first.setdefault(name, path)


def _aliases(document: Document) -> Iterator[Problem]:
    """Yield each alias that also names another model."""
    named = {name: path for path, name in _names(document.data, "models").items()}
    for number, item in enumerate(items(document.data, "models")):
        for position, alias in enumerate(items(item, "aliases")):
            path: Path = ("models", number, "aliases", position)
            if isinstance(alias, str) and alias in named:
                where = f"{show_path(named[alias])} on line {document.line(named[alias])}"
                yield Problem(path, document.line(path), f"{json.dumps(alias)} is also {where}", "each name once")
            elif isinstance(alias, str):
                named[alias] = path


def _regions_used(data: object) -> Iterator[tuple[Path, str]]:
    """Yield every path that names a region, with the name."""
    region = inside(data, "proxy").get("region")
    if isinstance(region, str):
        yield ("proxy", "region"), region
    for number, item in enumerate(items(data, "replicas")):
        if isinstance(item, Mapping) and isinstance(item.get("region"), str):
            yield ("replicas", number, "region"), item["region"]
    for number, item in enumerate(items(data, "fleet_sources")):
        region = inside(item, "replica").get("region")
        if isinstance(region, str):
            yield ("fleet_sources", number, "replica", "region"), region
    yield from _allowed(inside(data, "clients"), "rules", ("clients",))
    yield from _allowed(data, "models", ())
    rtt_ms = inside(inside(data, "simulation"), "rtt_ms")
    for name in rtt_ms:
        yield ("simulation", "rtt_ms", name), name


def _profiled(document: Document) -> Iterator[Problem]:
    """Yield each simulated profile of a replica that the file lacks."""
    replica_names = sorted(set(_names(document.data, "replicas").values()))
    for name in inside(inside(document.data, "simulation"), "profiles"):
        if replica_names and name not in replica_names:
            path: Path = ("simulation", "profiles", name)
            what = f"{json.dumps(name)} is not a replica of this file{closest(name, replica_names)}"
            yield Problem(path, document.line(path), what, f"one of {', '.join(replica_names)}")


def _tls(document: Document) -> Iterator[Problem]:
    """Yield TLS files of a url without TLS, and incomplete pairs."""
    for number, item in enumerate(items(document.data, "replicas")):
        if not isinstance(item, Mapping):
            continue
        path: Path = ("replicas", number)
        given = [key for key in ("ca_file", "client_cert", "client_key") if item.get(key) is not None]
        url = item.get("url")
        if given and isinstance(url, str) and not url.lower().startswith("https:"):
            key_path = (*path, given[0])
            yield Problem(key_path, document.line(key_path), "given for a url without TLS", "an https:// url beside it")
        if ("client_cert" in given) != ("client_key" in given):
            key_path = (*path, given[-1])
            yield Problem(
                key_path, document.line(key_path), "half a pair", "client_cert and client_key, both or neither"
            )


#: Phases of a request; none may take longer than the whole.
_PHASES = ("connect_timeout_s", "first_token_timeout_s", "response_timeout_s", "stream_idle_timeout_s")


def _deadlines(document: Document) -> Iterator[Problem]:
    """Yield each phase that may take longer than the whole request."""
    limits = inside(document.data, "limits")
    total = limits.get("request_timeout_s")
    yield from _too_long(document, ("limits",), limits, total)
    for number, region in enumerate(items(document.data, "regions")):
        yield from _too_long(document, ("regions", number, "limits"), inside(region, "limits"), total)


def _too_long(document: Document, above: Path, limits: Mapping[str, object], total: object) -> Iterator[Problem]:
    for key in _PHASES:
        given = limits.get(key)
        if is_number(given) and is_number(total) and given > total:
            path: Path = (*above, key)
            yield Problem(path, document.line(path), f"{given:g}", f"at most request_timeout_s, which is {total:g}")


def _some_replicas(document: Document) -> Iterator[Problem]:
    """Yield the lack of replicas, unless a fleet source may have some."""
    if not isinstance(document.data, Mapping) or items(document.data, "fleet_sources"):
        return
    path: Path = ("replicas",)
    if "replicas" not in document.data:
        yield Problem(path, document.line(path), "missing", "this key with a list")
    elif document.data["replicas"] == []:
        yield Problem(path, document.line(path), "an empty list", "at least one entry")


def _allowed(data: object, key: str, above: Path) -> Iterator[tuple[Path, str]]:
    for number, item in enumerate(items(data, key)):
        for position, region in enumerate(items(item, "allowed_regions")):
            if isinstance(region, str):
                yield (*above, key, number, "allowed_regions", position), region


def _same_address(document: Document) -> Iterator[Problem]:
    proxy = inside(document.data, "proxy")
    bind, admin = proxy.get("bind"), proxy.get("admin_bind")
    if isinstance(bind, str) and bind == admin and not bind.endswith(":0"):
        path: Path = ("proxy", "admin_bind")
        yield Problem(path, document.line(path), f"{json.dumps(bind)} is also proxy.bind", "an address of its own")


def _ready_replicas(document: Document) -> Iterator[Problem]:
    wanted, have = inside(document.data, "proxy").get("min_ready_replicas"), len(items(document.data, "replicas"))
    if is_number(wanted) and wanted > max(have, 1) and not items(document.data, "fleet_sources"):
        path: Path = ("proxy", "min_ready_replicas")
        yield Problem(path, document.line(path), f"{wanted:g}", f"at most the number of replicas, which is {have}")


def inside(data: object, key: str) -> Mapping[str, object]:
    """Return the mapping at `key` of plain data; an empty one without it."""
    inner = data.get(key) if isinstance(data, Mapping) else None
    return inner if isinstance(inner, Mapping) else {}


def items(data: object, key: str) -> list[object]:
    """Return the list at `key` of plain data; an empty one without it."""
    value = data.get(key) if isinstance(data, Mapping) else None
    return value if isinstance(value, list) else []


# A regions.yaml from the URLs of replicas: what `gorgo serve --replica` runs, and prints for a user who needs a file.
#
# `URL` is a replica in the region `local`, where the proxy is, and `REGION=URL` one in another. Names are the region
# and a number. A `/v1` at the end, as clients of OpenAI write it, is left out.


LOCAL = "local"

#: Set, it holds the API key of every replica that is given by its URL.
KEY_VARIABLE = "GORGO_REPLICA_API_KEY"

_NAMED = re.compile(r"(?P<region>[A-Za-z0-9][A-Za-z0-9._-]{0,62})=(?P<url>.*)", re.DOTALL)


def config_text(
    urls: Sequence[str], *, engine: str, proxy: Mapping[str, str | None], environ: Mapping[str, str]
) -> str:
    """Return the file. Raises `ConfigError` for a URL that is none, and for one that is given twice.

    Parameters
    ----------
    urls:
        `URL` or `REGION=URL` of each replica.
    engine:
        Of all replicas.
    proxy:
        Further keys of `proxy`; `None` leaves one out.
    environ:
        May hold a key for the replicas, which the file names and does not contain.

    Example
    -------
    >>> print(config_text(["http://a:30000"], engine="auto", proxy={}, environ={}))
    proxy:
      region: "local"
    regions:
      - name: "local"
    replicas:
      - name: "local-0"
        region: "local"
        url: "http://a:30000"
        engine: "auto"
    <BLANKLINE>
    """
    replicas = [_region_and_url(text) for text in urls]
    twice = [url for url, n in Counter(url.rstrip("/") for _, url in replicas).items() if n > 1]
    if twice:
        raise ConfigError(f"--replica {twice[0]}: given twice; expected each replica once")
    lines = ["proxy:", f"  region: {_scalar(LOCAL)}"]
    lines += [f"  {key}: {_scalar(value)}" for key, value in proxy.items() if value is not None]
    lines += ["regions:", *(f"  - name: {_scalar(name)}" for name in dict.fromkeys([LOCAL, *dict(replicas)]))]
    lines.append("replicas:")
    numbers: Counter[str] = Counter()
    for region, url in replicas:
        lines += [f"  - name: {_scalar(f'{region}-{numbers[region]}')}", f"    region: {_scalar(region)}"]
        lines += [f"    url: {_scalar(url)}", f"    engine: {_scalar(engine)}"]
        if environ.get(KEY_VARIABLE):
            lines.append(f"    api_key_env: {_scalar(KEY_VARIABLE)}")
        numbers[region] += 1
    return "\n".join(lines) + "\n"


def _region_and_url(text: str) -> tuple[str, str]:
    named = _NAMED.fullmatch(text)
    region, url = (LOCAL, text) if named is None else (named["region"], named["url"])
    try:
        return region, without_api_path(checked_url(url))
    except ValueError:
        shown = "text with '@', not shown because it may hold a password" if "@" in text else ascii(text[:100])
        raise ConfigError(f"--replica: {shown}; expected URL or REGION=URL with {URL_EXPECTED}") from None


def _scalar(text: str) -> str:
    """Return the text as YAML, in which nothing is a reference to a variable."""
    return json.dumps(text.replace("$", "$$"))


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
    keys = keys_at(path[:-1], model)
    found = f"unknown key{closest(str(path[-1]), keys)}"
    return Problem(path, document.line(path), found, f"one of {', '.join(keys)}")


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


# Old keys of regions.yaml: the new key of each, or the reason for its removal. The error for an old key names the new
# one, so that an old file can be corrected from the error alone. No old key is read.


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
