"""What regions.yaml needs of this machine: TLS files, client keys, API keys in the environment, addresses, packages.

Reads plain data; each check is the one that `gorgo serve` makes when it uses the value.
"""

from __future__ import annotations

import re
import ssl
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial

from gorgo.config.document import Document, Path, Problem
from gorgo.config.fleet import KubernetesApiConfig, ReplicaConfig
from gorgo.config.load import inside, items
from gorgo.config.model import ClientsConfig, ModelConfig, PickerConfig, ProxyConfig, SharedConfig, TlsConfig
from gorgo.config.values import checked_bind
from gorgo.errors import ConfigError, InvalidValueError, MissingExtra
from gorgo.live.extras import DNS, EVENTS, SHARED, Extra, is_installed
from gorgo.live.http.tls import served_tls, shared_tls, trust_clients_of, upstream_tls
from gorgo.live.listener.sockets import check_bind
from gorgo.live.prompt_tokens import read_tokenizers
from gorgo.live.replica_secrets import replica_secrets
from gorgo.live.request_options import read_client_keys
from gorgo.live.telemetry.tracing import require_extra

#: As in the model: another value is an error already, and may be a key.
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,127}")


def machine_problems(
    document: Document, *, environ: Mapping[str, str], binds: Mapping[str, str | None] | None
) -> Iterator[Problem]:
    """Yield every error. `binds` has addresses by key, `None` for the file's; `None` checks no address."""
    proxy = inside(document.data, "proxy")
    tls = _texts(inside(proxy, "tls"), "cert", "key")
    if len(tls) == 2:
        files = TlsConfig(**tls)
        yield from _checked(document, ("proxy", "tls", "cert"), partial(served_tls, files))
    picker_tls = _texts(inside(inside(document.data, "picker"), "tls"), "cert", "key")
    if len(picker_tls) == 2:
        check = partial(served_tls, TlsConfig(**picker_tls), place="picker.tls")
        yield from _checked(document, ("picker", "tls", "cert"), check)
    client_ca = _texts(inside(inside(document.data, "picker"), "tls"), "client_ca").get("client_ca")
    if client_ca is not None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        check_ca = partial(trust_clients_of, context, client_ca, "picker.tls")
        yield from _checked(document, ("picker", "tls", "client_ca"), check_ca)
    keys_file = _texts(inside(document.data, "clients"), "keys_file").get("keys_file")
    if keys_file is not None:
        yield from _checked(
            document, ("clients", "keys_file"), partial(read_client_keys, ClientsConfig(keys_file=keys_file))
        )
    yield from _tracing(document, proxy)
    yield from _replicas(document, environ)
    yield from _tokenizers(document)
    yield from _fleet_sources(document, environ)
    yield from _shared(document, environ)
    for key, given in (binds or {}).items():
        section, _, name = key.partition(".")
        bind = inside(document.data, section).get(name, getattr(_DEFAULTS[section], name))
        yield from _address(document, section, name, given, bind)


def ports_in_use(binds: Mapping[str, str]) -> list[str]:
    """Return a line for each address on which another process listens."""
    lines = []
    for key, bind in binds.items():
        with suppress(InvalidValueError):
            if not check_bind(bind, f"proxy.{key}"):
                lines.append(f"proxy.{key}: {bind} is in use; `gorgo serve` needs it, unless it is running already")
    return lines


_DEFAULTS = {"proxy": ProxyConfig(region="-"), "picker": PickerConfig()}


def _address(document: Document, section: str, key: str, given: str | None, bind: object) -> Iterator[Problem]:
    if given is None:
        try:
            bind = checked_bind(bind) if isinstance(bind, str) else None
        except ValueError:
            return  # reported as such
    address = given or bind
    if isinstance(address, str):
        path: Path = (section, key) if given is None else (f"--{key.replace('_', '-')}",)
        yield from _checked(document, path, partial(check_bind, address, f"{section}.{key}"))


def _tracing(document: Document, proxy: Mapping[str, object]) -> Iterator[Problem]:
    if _texts(inside(proxy, "tracing"), "endpoint"):
        try:
            require_extra()
        except MissingExtra as error:
            path = ("proxy", "tracing", "endpoint")
            yield Problem(path, document.line(path), str(error), "the extra otel to be installed")


def _tokenizers(document: Document) -> Iterator[Problem]:
    for number, item in enumerate(items(document.data, "models")):
        files = _texts(item, "tokenizer", "chat_template") if isinstance(item, Mapping) else {}
        if "tokenizer" not in files:
            continue
        path: Path = ("models", number, "tokenizer")
        try:
            yield from _checked(document, path, partial(read_tokenizers, [_model(**files)]))
        except MissingExtra as error:
            yield Problem(path, document.line(path), str(error), "the extra tokens to be installed")


def _replicas(document: Document, environ: Mapping[str, str]) -> Iterator[Problem]:
    #: Errors by files: a thousand replicas share a few.
    errors: dict[ReplicaConfig, InvalidValueError | None] = {}
    shared = shared_tls(ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT))
    rows: list[tuple[Path, object]] = [
        (("replicas", number), item) for number, item in enumerate(items(document.data, "replicas"))
    ]
    for number, item in enumerate(items(document.data, "fleet_sources")):
        rows.append((("fleet_sources", number, "replica"), inside(item, "replica")))
    for place, item in rows:
        if not isinstance(item, Mapping):
            continue
        for key, variable in _texts(item, "api_key_env", "push_token_env").items():
            if _VARIABLE.fullmatch(variable):
                entry = _replica(**{key: variable})
                yield from _checked(document, (*place, key), partial(replica_secrets, entry, environ))
        if item.get("kv_events") is not None:
            yield from _needed(document, (*place, "kv_events"), EVENTS)
        pair = _texts(item, "client_cert", "client_key")
        for key, files in (("ca_file", _texts(item, "ca_file")), ("client_cert", pair if len(pair) == 2 else {})):
            if not files:
                continue
            entry = _replica(**files)
            if entry not in errors:
                errors[entry] = _error(partial(upstream_tls, entry, shared))
            error = errors[entry]
            if error is not None:
                path = (*place, key)
                yield Problem(path, document.line(path), error.found, error.expected)


def _fleet_sources(document: Document, environ: Mapping[str, str]) -> Iterator[Problem]:
    """Yield sources that need a package that is not installed, or a cluster where there is none."""
    for number, item in enumerate(items(document.data, "fleet_sources")):
        if not isinstance(item, Mapping):
            continue
        path: Path = ("fleet_sources", number)
        if item.get("kind") == "dns" and item.get("port") is None:
            yield from _needed(document, (*path, "host"), DNS)
        if item.get("kind") not in ("endpoint-slices", "pods", "inference-pool"):
            continue
        from gorgo.live.fleet_sources.kubernetes import api_url, own_namespace

        if not inside(item, "api").get("url"):
            yield from _in_cluster(document, (*path, "api", "url"), partial(api_url, KubernetesApiConfig(), environ))
        if not item.get("namespace"):
            yield from _in_cluster(document, (*path, "namespace"), partial(own_namespace, environ))


def _needed(document: Document, path: Path, extra: Extra) -> Iterator[Problem]:
    """Yield that an extra is missing, if it is."""
    if not is_installed(extra):
        yield Problem(path, document.line(path), extra.missing, extra.expected)


def _shared(document: Document, environ: Mapping[str, str]) -> Iterator[Problem]:
    """Yield what the store needs and is not there."""
    shared = inside(document.data, "shared")
    if not shared:
        return
    yield from _needed(document, ("shared",), SHARED)
    from gorgo.live.peer_store import connection as store

    entry = SharedConfig(url="rediss://-", group="-", key_env="-")
    for key, read in (("key_env", store.group_key), ("password_env", store.store_password)):
        variable = shared.get(key)
        if isinstance(variable, str) and _VARIABLE.fullmatch(variable):
            given = replace(entry, **{key: variable})
            yield from _checked(document, ("shared", key), partial(read, given, environ))
    files = _texts(shared, "ca_file")
    if files:
        yield from _checked(document, ("shared", "ca_file"), partial(store.store_tls, replace(entry, **files)))


def _in_cluster(document: Document, path: Path, check: Callable[[], object]) -> Iterator[Problem]:
    try:
        check()
    except ConfigError as error:
        found, _, expected = str(error).partition("; expected ")
        yield Problem(path, document.line(path), found, expected)


def _replica(**values: str) -> ReplicaConfig:
    return ReplicaConfig(name="-", region="-", url="-", **values)  # type: ignore[arg-type] # texts alone


def _model(**values: str) -> ModelConfig:
    return ModelConfig(name="-", **values)  # type: ignore[arg-type] # texts alone


def _texts(data: Mapping[str, object], *keys: str) -> dict[str, str]:
    """Return the values that are texts; others are errors already."""
    found = ((key, data.get(key)) for key in keys)
    return {key: value for key, value in found if isinstance(value, str) and value}


def _checked(document: Document, path: Path, check: Callable[[], object]) -> Iterator[Problem]:
    error = _error(check)
    if error is not None:
        option = str(path[0]).startswith("--")
        yield Problem(path, 0 if option else document.line(path), error.found, error.expected)


def _error(check: Callable[[], object]) -> InvalidValueError | None:
    try:
        check()
    except InvalidValueError as error:
        return error
    return None
