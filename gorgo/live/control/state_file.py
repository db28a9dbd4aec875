"""The state that survives a restart: policy, weights, freeze, drain marks, learned lengths. One small JSON file.

Owns the file (`StateFile`), the edits of policy and weights in regions.yaml that wait (`FileRouting`), and the state
with which a proxy starts (`InitialState`). Leaves the order of writes to `transactions`.

Theory of operation: the file is written whole and atomically, so it never holds a mixture of two states. It also holds
the configuration of that time. At a start this tells an edited configuration from live changes.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NoReturn

from gorgo.config.atomic import write_atomically
from gorgo.config.fleet import ReplicaConfig
from gorgo.config.model import Config
from gorgo.config.registered import entry_as_json, entry_from_json
from gorgo.core.numeric import is_number
from gorgo.core.policy.interface import Policy
from gorgo.core.policy.weights import Weights
from gorgo.core.prompt.fingerprint import BytesPerToken
from gorgo.core.prompt.media import MediaTokens
from gorgo.errors import ConfigError, StateError, UnknownPolicy, WeightsError
from gorgo.policies.registry import make_policy

SCHEMA = 1
#: Ten times the file of 1,000 draining replicas.
MAX_BYTES = 1 << 20
#: The largest integer in JSON whose numbers are floats.
MAX_VERSION = 1 << 53

_KEYS = ("gorgo_state", "policy", "weights", "version", "frozen", "draining", "configured")
#: Written only if there are any, so that other versions read a file without them.
_REGISTERED, _LEARNED = "registered", "learned"


@dataclass(frozen=True, slots=True)
class Frozen:
    """A freeze of the weights: start (ISO 8601, UTC), reason and operator."""

    since: str
    reason: str | None = None
    by: str | None = None

    def as_dict(self) -> dict[str, str | None]:
        return {"since": self.since, "reason": self.reason, "by": self.by}

    def __str__(self) -> str:
        by = "" if self.by is None else f" by {self.by}"
        reason = "" if self.reason is None else f" ({self.reason})"
        return f"frozen since {self.since}{by}{reason}"


@dataclass(frozen=True, slots=True)
class ConfigSnapshot:
    """The configuration of persisted values, with the options of the command line."""

    policy: str
    weights: Mapping[str, float]
    draining: frozenset[str]

    @classmethod
    def by(cls, config: Config) -> ConfigSnapshot:
        marked = frozenset(replica.name for replica in config.replicas if replica.draining)
        return cls(config.proxy.policy, dict(config.proxy.weights), marked)


@dataclass(frozen=True, slots=True, kw_only=True)
class PersistedState:
    """The state of one proxy."""

    policy: str
    weights: Mapping[str, float]
    version: int
    frozen: Frozen | None
    #: Names of draining replicas.
    draining: frozenset[str]
    configured: ConfigSnapshot
    #: Replicas registered by the admin API.
    registered: tuple[ReplicaConfig, ...] = ()
    #: What reports taught of prompts' lengths (`Router.learned_tokens`): bytes per token and tokens of media, by model.
    learned: Mapping[str, Any] = field(default_factory=dict)
    #: Keys of the file that this version does not know, as of a newer one.
    unknown_keys: tuple[str, ...] = ()


class StateFile:
    """The state file of one proxy.

    Parameters
    ----------
    path:
        The file may be missing; its folder must exist.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def read(self) -> PersistedState | None:
        """Return the state, `None` without a file. Raises `ConfigError` for an unreadable or damaged one."""
        try:
            with open(self.path, "rb", opener=_nonblocking) as file:
                text = file.read(MAX_BYTES + 1)
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            raise ConfigError(f"{self.path}: the state file cannot be read: {_reason(error)}") from error
        return parse_state(text, source=str(self.path))

    def keep_copy(self) -> Path | None:
        """Copy the file beside itself, for the version that knows what this one sets aside; return where it is."""
        path = self.path.with_name(f"{self.path.name}.set-aside")
        try:
            write_atomically(path, self.path.read_bytes()[: MAX_BYTES + 1])
        except OSError:
            return None
        return path

    def write(self, state: PersistedState) -> None:
        """Write the state durably; block until then. Raises `StateError`."""
        try:
            text = encode_state(state)
            if len(text) > MAX_BYTES:
                raise ValueError(f"it would have {len(text):,} bytes; at most {MAX_BYTES:,} are read")
            write_atomically(self.path, text)
        except (OSError, ValueError) as error:
            raise StateError(f"the state file {self.path} cannot be written: {_reason(error)}") from error


def encode_state(state: PersistedState) -> bytes:
    """Return the content of the file.

    >>> configured = ConfigSnapshot("gorgo", {}, frozenset())
    >>> state = PersistedState(
    ...     policy="random", weights={}, version=2, frozen=None, draining=frozenset(), configured=configured
    ... )
    >>> parse_state(encode_state(state), source="example") == state
    True
    """
    configured = state.configured
    document: dict[str, Any] = {
        "gorgo_state": SCHEMA,
        "policy": state.policy,
        "weights": dict(state.weights),
        "version": state.version,
        "frozen": None if state.frozen is None else state.frozen.as_dict(),
        "draining": sorted(state.draining),
        "configured": {
            "policy": configured.policy,
            "weights": dict(configured.weights),
            "draining": sorted(configured.draining),
        },
    }
    if state.registered:
        document[_REGISTERED] = [entry_as_json(entry) for entry in state.registered]
    if state.learned:
        document[_LEARNED] = dict(state.learned)
    return json.dumps(document, indent=2, allow_nan=False).encode() + b"\n"


def parse_state(text: bytes, *, source: str) -> PersistedState:
    """Parse the content of a file. Raises `ConfigError` with `source`, place and expectation."""
    return _StateReader(source).state(text)


class _StateReader:
    """A strict parser: any deviation from the written form is damage, but for keys that a newer version may have."""

    def __init__(self, source: str) -> None:
        self._source = source

    def state(self, text: bytes) -> PersistedState:
        document = self._document(text)
        registered, learned = document.pop(_REGISTERED, []), document.pop(_LEARNED, {})
        unknown = sorted(document.keys() - set(_KEYS))
        for key in unknown:
            del document[key]
        self._keys(document, _KEYS, "the file")
        frozen, configured = document["frozen"], document["configured"]
        self._keys(configured, ("policy", "weights", "draining"), "configured")
        version = document["version"]
        if not isinstance(version, int) or isinstance(version, bool) or not 1 <= version <= MAX_VERSION:
            self._damaged("version", version, f"a whole number from 1 to {MAX_VERSION}")
        return PersistedState(
            policy=self._text(document, "policy"),
            weights=self._weights(document["weights"], "weights"),
            version=version,
            frozen=None if frozen is None else self._frozen(frozen),
            draining=self._names(document["draining"], "draining"),
            configured=ConfigSnapshot(
                self._text(configured, "policy"),
                self._weights(configured["weights"], "configured.weights"),
                self._names(configured["draining"], "configured.draining"),
            ),
            registered=tuple(self._registered(registered)),
            learned=self._learned(learned),
            unknown_keys=tuple(unknown),
        )

    def _document(self, text: bytes) -> dict[str, Any]:
        if len(text) > MAX_BYTES:
            self._fail(f"is larger than {MAX_BYTES} bytes")
        try:
            document = json.loads(text)
        except (ValueError, RecursionError) as error:
            self._fail(f"is not JSON ({error})")
        schema = document.get("gorgo_state") if isinstance(document, dict) else None
        if not isinstance(schema, int) or isinstance(schema, bool) or schema < 1:
            self._fail(f"has no key gorgo_state with a format number; this GORGO writes {SCHEMA}")
        if schema > SCHEMA:
            raise ConfigError(f"{self._source}: format {schema} is of a newer GORGO; this one reads up to {SCHEMA}")
        assert isinstance(document, dict)
        return document

    def _frozen(self, value: Any) -> Frozen:
        self._keys(value, ("since", "reason", "by"), "frozen")
        for key in ("reason", "by"):
            if value[key] is not None and not isinstance(value[key], str):
                self._damaged(f"frozen.{key}", value[key], "text or null")
        return Frozen(self._text(value, "since"), value["reason"], value["by"])

    def _keys(self, value: Any, keys: tuple[str, ...], key: str) -> None:
        if not isinstance(value, dict) or set(value) != set(keys):
            self._fail(f"{key} does not have exactly the keys {', '.join(keys)}")

    def _text(self, value: Mapping[str, Any], key: str) -> str:
        text = value[key]
        if not isinstance(text, str) or not text:
            self._damaged(key, text, "text")
        return text

    def _weights(self, value: Any, key: str) -> dict[str, float]:
        if not isinstance(value, dict) or not all(is_number(number) for number in value.values()):
            self._damaged(key, value, "finite numbers by name")
        return {name: float(number) for name, number in value.items()}

    def _names(self, value: Any, key: str) -> frozenset[str]:
        if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
            self._damaged(key, value, "a list of names")
        return frozenset(value)

    def _registered(self, value: Any) -> Iterator[ReplicaConfig]:
        if not isinstance(value, list):
            self._damaged(_REGISTERED, value, "a list of replicas")
        for number, entry in enumerate(value):
            try:
                yield entry_from_json(entry)
            except ValueError:
                self._damaged(f"{_REGISTERED}[{number}]", entry, "a replica as in regions.yaml")

    def _learned(self, value: Any) -> dict[str, Any]:
        if not isinstance(value, dict):
            self._damaged(_LEARNED, value, "lists by name")
        for name, restore in (("text", BytesPerToken().restore), ("media", MediaTokens().restore)):
            try:
                restore(value.get(name, []))
            except ValueError as error:
                self._damaged(f"{_LEARNED}.{name}", value[name], f"what a process has learned ({error})")
        return value

    def _damaged(self, key: str, value: object, expected: str) -> NoReturn:
        self._fail(f"{key} is {str(value)[:60]!r}; expected {expected}")

    def _fail(self, what: str) -> NoReturn:
        advice = "put a copy back, or move it away to start from the configuration"
        raise ConfigError(f"{self._source}: the state file is damaged: {what}; {advice}")


def _nonblocking(path: str, flags: int) -> int:
    """Open without blocking: a pipe would block until a writer comes."""
    return os.open(path, flags | os.O_NONBLOCK)


def _reason(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error)


# Policy and weights of regions.yaml: those last applied, and an edit that waits for the end of a freeze. Pure.
#
# The state file has the applied ones. A start therefore finds a waiting edit by the difference from regions.yaml.


@dataclass(frozen=True, slots=True)
class PendingEdit:
    """An edit of policy or weights, and the shadow policy that was checked with it."""

    policy: Policy
    weights: Weights
    shadow: str | None = None


@dataclass(frozen=True, slots=True)
class FileRouting:
    """The applied configuration, and the edit that is not."""

    applied: ConfigSnapshot
    pending: PendingEdit | None = None

    def deferred(self, config: Config, policy: Policy, weights: Weights) -> FileRouting:
        """Return this with the file's policy and weights as the waiting edit; without one if they are the applied."""
        edited = ConfigSnapshot.by(config)
        applied = replace(edited, policy=self.applied.policy, weights=self.applied.weights)
        if same_routing(applied, edited, policy):
            return FileRouting(applied)
        return FileRouting(applied, PendingEdit(policy, weights, config.proxy.shadow_policy))

    def unedited(self, config: Config) -> FileRouting:
        """Return this after a reload that changed neither policy nor weights."""
        applied = replace(ConfigSnapshot.by(config), policy=self.applied.policy, weights=self.applied.weights)
        pending = self.pending and replace(self.pending, shadow=config.proxy.shadow_policy)
        return FileRouting(applied, pending)

    def released(self) -> FileRouting:
        """Return this with the waiting edit applied."""
        if self.pending is None:
            return self
        edit = self.pending
        return FileRouting(replace(self.applied, policy=edit.policy.name, weights=dict(edit.weights)))


def same_routing(before: ConfigSnapshot, now: ConfigSnapshot, policy: Policy) -> bool:
    """Return whether two configurations have equal policies and weights; `policy` is that of `now`."""
    if before.policy != now.policy:
        return False
    return _complete(before.weights, policy) == _complete(now.weights, policy)


def _complete(values: Mapping[str, float], policy: Policy) -> dict[str, float]:
    """Return `values` with defaults for missing weights: a weight that is new in the policy is not an edit."""
    return {spec.name: spec.default for spec in policy.weight_specs} | dict(values)


# The initial state of a proxy: state file, configuration, or parts of both. Pure.
#
# Frozen weights hold, whatever the configuration says; an edit waits for the end of the freeze. Live weights hold
# until the configuration of policy or weights is edited: the edit is newer. Drain marks follow the same rule, per
# replica. Versions never decrease.
#
# A file of another version may have a policy or weights that this one lacks, or lack some that this one has. A freeze
# and drain marks hold all the same: what is not known is set aside, what is missing has its default, and both are said.


@dataclass(frozen=True, slots=True)
class InitialState:
    """Policy, weights, freeze and drain marks at the start. `source` is for the log and the history.

    `set_aside` names what of the state file this version does not know, `gained` has the weights that the file lacks,
    with their defaults.
    """

    policy: Policy
    weights: Weights
    frozen: Frozen | None
    draining: frozenset[str]
    source: str
    file: FileRouting
    set_aside: tuple[str, ...] = ()
    gained: Mapping[str, float] = field(default_factory=dict)


def initial_state(
    persisted: PersistedState | None, config: Config, policy: Policy, weights: Weights | None, *, source: str = ""
) -> InitialState:
    """Choose between the state file and the configuration's `policy` and `weights` (its defaults if `None`).

    Raises `ConfigError`, naming `source`, if persisted weights are none that the policy may have.
    """
    config_state = ConfigSnapshot.by(config)
    if weights is None:
        weights = Weights.of(policy.weight_specs, version=1)
    if persisted is None:
        return InitialState(policy, weights, None, config_state.draining, "configuration", FileRouting(config_state))
    draining = _draining(persisted, config, config_state)
    if persisted.frozen is not None or same_routing(persisted.configured, config_state, policy):
        return _persisted_state(persisted, config, policy, weights, draining, source)
    same = (policy.name, dict(weights)) == (persisted.policy, dict(persisted.weights))
    version = persisted.version if same else persisted.version + 1
    return InitialState(
        policy, Weights(dict(weights), version), None, draining, "configuration", FileRouting(config_state)
    )


def _persisted_state(
    persisted: PersistedState,
    config: Config,
    policy: Policy,
    weights: Weights,
    draining: frozenset[str],
    source: str,
) -> InitialState:
    """Return the state of the file, as far as this version knows what is in it."""
    try:
        live = make_policy(persisted.policy)
    except UnknownPolicy:
        # Its weights mean nothing here either.
        aside = (
            *persisted.unknown_keys,
            f"policy {persisted.policy}",
            *(f"weights.{name}" for name in persisted.weights),
        )
        after, file = Weights(dict(weights), persisted.version + 1), FileRouting(ConfigSnapshot.by(config))
        return InitialState(policy, after, persisted.frozen, draining, "configuration", file, aside)
    weight_names = {spec.name for spec in live.weight_specs}
    values = {name: value for name, value in persisted.weights.items() if name in weight_names}
    aside = (*persisted.unknown_keys, *(f"weights.{name}" for name in persisted.weights if name not in weight_names))
    try:
        # Their range was checked when they were set.
        in_force = Weights.of(live.weight_specs, values, version=persisted.version, allow_out_of_range=True)
    except WeightsError as error:
        advice = "move the file away to start from the configuration"
        raise ConfigError(f"{source}: its weights are invalid: {error}; {advice}") from error
    gained = {name: value for name, value in in_force.items() if name not in values}
    file = FileRouting(persisted.configured).deferred(config, policy, weights)
    return InitialState(live, in_force, persisted.frozen, draining, "state", file, aside, gained)


def _draining(persisted: PersistedState, config: Config, config_state: ConfigSnapshot) -> frozenset[str]:
    marked = set(config_state.draining)
    for name in (replica.name for replica in config.replicas):
        if (name in persisted.configured.draining) == (name in config_state.draining):
            marked = marked | {name} if name in persisted.draining else marked - {name}
    return frozenset(marked)
