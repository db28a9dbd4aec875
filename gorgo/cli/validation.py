"""One verdict on regions.yaml for `gorgo check`, `gorgo serve` and each reload: every error in one list.

Owns the checks that need policies, engines and profiles, and what the file needs of this machine (`machine_problems`):
TLS files, client keys, API keys in the environment, addresses, packages. They read plain data, so that no other error
hides them; each is the check that `gorgo serve` makes when it uses the value.
"""

from __future__ import annotations

import json
import re
import ssl
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

from gorgo.cli.policies import compose_policy
from gorgo.config.document import Document, Problem
from gorgo.config.document import Path as Place
from gorgo.config.fleet import KubernetesApiConfig, ReplicaConfig
from gorgo.config.load import check_text, inside, items, problems_error
from gorgo.config.model import (
    ClientsConfig,
    Config,
    ModelConfig,
    PickerConfig,
    ProxyConfig,
    SharedConfig,
    SimulationConfig,
    TlsConfig,
)
from gorgo.config.values import MIN_TOKEN_CHARS, checked_bind
from gorgo.core.numeric import is_number
from gorgo.core.policy.interface import Policy
from gorgo.core.policy.weights import Weights
from gorgo.core.training.learning import NeedsPackages
from gorgo.engines.registry import dialect
from gorgo.errors import ConfigError, GorgoError, InvalidValueError, MissingExtra, UnknownPolicy, closest
from gorgo.live.extras import DNS, EVENTS, SHARED, Extra, is_installed, require_tracing
from gorgo.live.http.tls import served_tls, shared_tls, trust_clients_of, upstream_tls
from gorgo.live.listener.sockets import check_bind
from gorgo.live.prompt_tokens import read_tokenizers
from gorgo.live.replica_secrets import replica_secrets
from gorgo.live.request_options import read_client_keys
from gorgo.policies.registry import make_policy, make_shadow, policy_names

FrontEnd = Literal["proxy", "picker"]
_DEFAULTS: Mapping[str, Any] = {one.name: one.default for one in (*fields(ProxyConfig), *fields(SimulationConfig))}


@dataclass(frozen=True, slots=True, kw_only=True)
class Overrides:
    """Options that take precedence over the file, and the parts of the machine that are checked.

    Parameters
    ----------
    environ:
        Variables of the file, and API keys.
    admin_token:
        Of the admin listener, if one is set.
    metrics_token:
        For its metrics alone, if one is set.
    policy, weights_file, bind, admin_bind:
        As the options of `gorgo serve`; addresses are valid.
    front_end:
        Whose addresses are checked.
    pinned:
        Policy and weights of a weights file that was read before.
    machine:
        Check files and the environment; without it their absence is no error.
    ports:
        Check that this machine can listen on the addresses.
    """

    environ: Mapping[str, str]
    admin_token: str | None = None
    metrics_token: str | None = None
    policy: str | None = None
    weights_file: Path | None = None
    pinned: tuple[Policy, Weights] | None = None
    bind: str | None = None
    admin_bind: str | None = None
    front_end: FrontEnd = "proxy"
    machine: bool = True
    ports: bool = True


@dataclass(frozen=True, slots=True)
class ValidConfig:
    """A valid file with the options."""

    config: Config
    policy: Policy
    weights: Weights


def validate(text: bytes, *, source: Path, overrides: Overrides) -> ValidConfig:
    """Check the text of a regions file with the options. Raises `ConfigError` with every error."""
    _, valid = examine(text, source=source, overrides=overrides)
    assert valid is not None, "without `machine` a value may be unknown"
    return valid


def examine(text: bytes, *, source: Path, overrides: Overrides) -> tuple[Document, ValidConfig | None]:
    """As `validate`, without a result if the file is valid but a value depends on a variable that is not set here."""

    def further(document: Document) -> Iterator[Problem]:
        yield from _routing(document, overrides)
        yield from _profile(document)
        yield from _engines(document)
        yield from _tokens(overrides)
        if overrides.machine:
            binds = _binds(overrides) if overrides.ports else None
            yield from machine_problems(document, environ=overrides.environ, binds=binds)
            yield from _push_tokens(document, overrides)

    document, config = check_text(text, environ=overrides.environ, further=further, allow_unset=not overrides.machine)
    if document.problems or (config is None and not document.unknown):
        raise problems_error(str(source), document)
    if config is None:
        return document, None
    policy, weights = overrides.pinned or compose_policy(
        config, source=source, policy=overrides.policy, weights_file=overrides.weights_file
    )
    proxy = replace(config.proxy, policy=policy.name, weights=dict(weights))
    proxy = replace(proxy, bind=overrides.bind or proxy.bind, admin_bind=overrides.admin_bind or proxy.admin_bind)
    config = replace(config, proxy=proxy)
    return document, ValidConfig(config, policy, weights)


def _binds(overrides: Overrides) -> dict[str, str | None]:
    """Return the addresses that the process listens on, by key, as far as options give them."""
    if overrides.front_end == "picker":
        return {"picker.bind": None, "proxy.admin_bind": None}
    return {"proxy.bind": overrides.bind, "proxy.admin_bind": overrides.admin_bind}


# -- checks of names


def _routing(document: Document, overrides: Overrides) -> Iterator[Problem]:
    """Yield errors of policy, weights and shadow policy, in the file and in the options."""
    proxy = inside(document.data, "proxy")
    name = proxy.get("policy", _DEFAULTS["policy"])
    of_file = yield from _policy(document, ("proxy", "policy"), name, overrides)
    if of_file is not None:
        yield from _weights(document, of_file, inside(proxy, "weights"))
    chosen = yield from _chosen(document, overrides, of_file)
    shadow = proxy.get("shadow_policy")
    scoring = yield from _policy(document, ("proxy", "shadow_policy"), shadow, overrides)
    if isinstance(shadow, str) and scoring is not None and chosen is not None:
        try:
            make_shadow(shadow, chosen)
        except ConfigError as error:
            yield _problem(document, ("proxy", "shadow_policy"), error)


def _chosen(document: Document, overrides: Overrides, of_file: Policy | None) -> Iterator[Problem] | Any:
    """Yield errors of --policy and --weights; return the policy that they choose."""
    if overrides.pinned is not None:
        return overrides.pinned[0]
    if overrides.weights_file is None and overrides.policy is None:
        return of_file
    option = "--policy" if overrides.weights_file is None else "--weights"
    bare = Config(proxy=ProxyConfig(region="-", policy=of_file.name if of_file else "random"), regions=(), replicas=())
    try:
        policy, _ = compose_policy(
            bare, source=Path(option), policy=overrides.policy, weights_file=overrides.weights_file
        )
    except ConfigError as error:
        if option == "--policy":
            return (yield from _policy(document, (option,), overrides.policy, overrides))
        yield _problem(document, (option,), error)
        return None
    return policy


def _policy(document: Document, path: Place, name: object, overrides: Overrides) -> Any:
    """Yield an error if no policy has this name or this machine lacks a package that it needs; return the policy."""
    if not isinstance(name, str):
        return None
    try:
        policy = make_policy(name)
        if overrides.machine and isinstance(policy, NeedsPackages):
            policy.require_packages()
        return policy
    except MissingExtra as error:
        yield Problem(path, _line(document, path), f"{name}: {error}", "its extra to be installed, or another policy")
        return None
    except UnknownPolicy as error:
        names = policy_names()
        if name in names:
            yield _problem(document, path, error)  # the entry point of another package is broken
        else:
            yield _unknown(document, path, name, "policy", names)
        return None


def _weights(document: Document, policy: Policy, values: Mapping[str, object]) -> Iterator[Problem]:
    specs = {spec.name: spec for spec in policy.weight_specs}
    for name, value in values.items():
        path = ("proxy", "weights", name)
        spec = specs.get(name)
        if spec is None:
            names = ", ".join(specs) or f"none: {policy.name} has no weights"
            found = f"unknown weight of {policy.name}{closest(name, specs)}"
            yield Problem(path, document.line(path), found, f"one of {names}" if specs else names)
        elif is_number(value) and not spec.low <= value <= spec.high:
            expected = f"a number in [{spec.low:g}, {spec.high:g}]"
            yield Problem(path, document.line(path), f"{value:g}", expected)


def _profile(document: Document) -> Iterator[Problem]:
    simulation = inside(document.data, "simulation")
    named: dict[Place, object] = {("simulation", "profile"): simulation.get("profile")}
    named |= {("simulation", "profiles", name): profile for name, profile in inside(simulation, "profiles").items()}
    named = {path: name for path, name in named.items() if isinstance(name, str)}
    if not named:
        return
    # Of the laboratory, which a proxy without `simulation` does not load.
    from gorgo.lab.sim.engine.profiles import PROFILES, is_profile_file, read_profile

    for path, name in named.items():
        if not isinstance(name, str) or name in PROFILES:
            continue
        if not is_profile_file(name):
            yield _unknown(document, path, name, "engine profile", PROFILES)
            continue
        try:
            read_profile(Path(name))
        except ConfigError as error:
            yield Problem(path, document.line(path), str(error), "a profile file of gorgo calibrate")


def _engines(document: Document) -> Iterator[Problem]:
    """Yield dialects of other packages that cannot be loaded."""
    broken: dict[str, ConfigError | None] = {}
    for number, item in enumerate(items(document.data, "replicas")):
        name = item.get("engine") if isinstance(item, Mapping) else None
        if not isinstance(name, str):
            continue
        if name not in broken:
            broken[name] = _dialect_error(name)
        error = broken[name]
        if error is not None:
            yield _problem(document, ("replicas", number, "engine"), error)


def _dialect_error(name: str) -> ConfigError | None:
    try:
        dialect(name)
    except ConfigError as error:
        return error
    return None


def _tokens(overrides: Overrides) -> Iterator[Problem]:
    """Yield tokens that can be guessed, and a token for metrics that would let Prometheus administrate."""
    tokens = {"GORGO_ADMIN_TOKEN": overrides.admin_token, "GORGO_METRICS_TOKEN": overrides.metrics_token}
    for variable, token in tokens.items():
        if token is not None and len(token) < MIN_TOKEN_CHARS:
            expected = f"at least {MIN_TOKEN_CHARS}; openssl rand -hex 32 makes one"
            yield Problem((variable,), 0, f"a token of {len(token)} characters", expected)
    if overrides.metrics_token is not None and overrides.metrics_token == overrides.admin_token:
        yield Problem(("GORGO_METRICS_TOKEN",), 0, "the admin token", "a token of its own")


def _push_tokens(document: Document, overrides: Overrides) -> Iterator[Problem]:
    """Yield push tokens that would let an engine administrate."""
    entries: list[tuple[Place, object]] = [
        (("replicas", number), item) for number, item in enumerate(items(document.data, "replicas"))
    ]
    for number, item in enumerate(items(document.data, "fleet_sources")):
        entries.append((("fleet_sources", number, "replica"), inside(item, "replica")))
    for place, item in entries:
        variable = item.get("push_token_env") if isinstance(item, Mapping) else None
        if not isinstance(variable, str) or overrides.admin_token is None:
            continue
        if overrides.environ.get(variable, "").strip() == overrides.admin_token:
            path: Place = (*place, "push_token_env")
            yield Problem(path, document.line(path), f"{variable} has the admin token", "a token of its own")


def _unknown(document: Document, path: Place, name: str, kind: str, names: Iterable[str]) -> Problem:
    choices = list(names)
    found = f"{json.dumps(name[:60])} is not a known {kind}{closest(name, choices)}"
    return Problem(path, _line(document, path), found, f"one of {', '.join(choices)}")


def _problem(document: Document, path: Place, error: GorgoError) -> Problem:
    found, _, expected = str(error).partition("; expected ")
    return Problem(path, _line(document, path), found, expected or "one that can be loaded")


def _line(document: Document, path: Place) -> int:
    """Return the line of a key, 0 for an option."""
    return 0 if str(path[0]).startswith("--") else document.line(path)


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
        bind = inside(document.data, section).get(name, getattr(_SECTIONS[section], name))
        yield from _address(document, section, name, given, bind)


def ports_in_use(binds: Mapping[str, str]) -> list[str]:
    """Return a line for each address on which another process listens."""
    lines = []
    for key, bind in binds.items():
        with suppress(InvalidValueError):
            if not check_bind(bind, f"proxy.{key}"):
                lines.append(f"proxy.{key}: {bind} is in use; `gorgo serve` needs it, unless it is running already")
    return lines


_SECTIONS = {"proxy": ProxyConfig(region="-"), "picker": PickerConfig()}


def _address(document: Document, section: str, key: str, given: str | None, bind: object) -> Iterator[Problem]:
    if given is None:
        try:
            bind = checked_bind(bind) if isinstance(bind, str) else None
        except ValueError:
            return  # reported as such
    address = given or bind
    if isinstance(address, str):
        path: Place = (section, key) if given is None else (f"--{key.replace('_', '-')}",)
        yield from _checked(document, path, partial(check_bind, address, f"{section}.{key}"))


def _tracing(document: Document, proxy: Mapping[str, object]) -> Iterator[Problem]:
    if _texts(inside(proxy, "tracing"), "endpoint"):
        try:
            require_tracing()
        except MissingExtra as error:
            path = ("proxy", "tracing", "endpoint")
            yield Problem(path, document.line(path), str(error), "the extra otel to be installed")


def _tokenizers(document: Document) -> Iterator[Problem]:
    for number, item in enumerate(items(document.data, "models")):
        files = _texts(item, "tokenizer", "chat_template") if isinstance(item, Mapping) else {}
        if "tokenizer" not in files:
            continue
        path: Place = ("models", number, "tokenizer")
        try:
            yield from _checked(document, path, partial(read_tokenizers, [_model(**files)]))
        except MissingExtra as error:
            yield Problem(path, document.line(path), str(error), "the extra tokens to be installed")


def _replicas(document: Document, environ: Mapping[str, str]) -> Iterator[Problem]:
    #: Errors by files: a thousand replicas share a few.
    errors: dict[ReplicaConfig, InvalidValueError | None] = {}
    shared = shared_tls(ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT))
    rows: list[tuple[Place, object]] = [
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
        path: Place = ("fleet_sources", number)
        if item.get("kind") == "dns" and item.get("port") is None:
            yield from _needed(document, (*path, "host"), DNS)
        if item.get("kind") not in ("endpoint-slices", "pods", "inference-pool"):
            continue
        from gorgo.live.fleet_sources.kubernetes import api_url, own_namespace

        if not inside(item, "api").get("url"):
            yield from _in_cluster(document, (*path, "api", "url"), partial(api_url, KubernetesApiConfig(), environ))
        if not item.get("namespace"):
            yield from _in_cluster(document, (*path, "namespace"), partial(own_namespace, environ))


def _needed(document: Document, path: Place, extra: Extra) -> Iterator[Problem]:
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


def _in_cluster(document: Document, path: Place, check: Callable[[], object]) -> Iterator[Problem]:
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
    pairs = ((key, data.get(key)) for key in keys)
    return {key: value for key, value in pairs if isinstance(value, str) and value}


def _checked(document: Document, path: Place, check: Callable[[], object]) -> Iterator[Problem]:
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
