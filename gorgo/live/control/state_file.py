"""The state that survives a restart: policy, weights with version, freeze, drain marks. One small JSON file.

Theory of operation: the file is written whole and atomically, so it never holds a mixture of two states. It also holds
the configuration of that time. At a start this tells an edited configuration from live changes.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from gorgo.config.atomic import write_atomically
from gorgo.config.model import Config, ReplicaConfig
from gorgo.config.registered import entry_as_json, entry_from_json
from gorgo.core.numeric import is_number
from gorgo.errors import ConfigError, StateError

SCHEMA = 1
#: Ten times the file of 1,000 draining replicas.
MAX_BYTES = 1 << 20
#: The largest integer in JSON whose numbers are floats.
MAX_VERSION = 1 << 53

_KEYS = ("gorgo_state", "policy", "weights", "version", "frozen", "draining", "configured")
#: Written only if there are any, so that other versions read a file without them.
_REGISTERED = "registered"


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
    return json.dumps(document, indent=2, allow_nan=False).encode() + b"\n"


def parse_state(text: bytes, *, source: str) -> PersistedState:
    """Parse the content of a file. Raises `ConfigError` with `source`, place and expectation."""
    return _StateReader(source).state(text)


class _StateReader:
    """A strict parser: any deviation from the written form is damage."""

    def __init__(self, source: str) -> None:
        self._source = source

    def state(self, text: bytes) -> PersistedState:
        document = self._document(text)
        registered = document.pop(_REGISTERED, [])
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

    def _keys(self, value: Any, keys: tuple[str, ...], place: str) -> None:
        if not isinstance(value, dict) or set(value) != set(keys):
            self._fail(f"{place} does not have exactly the keys {', '.join(keys)}")

    def _text(self, value: Mapping[str, Any], key: str) -> str:
        found = value[key]
        if not isinstance(found, str) or not found:
            self._damaged(key, found, "text")
        return found

    def _weights(self, value: Any, place: str) -> dict[str, float]:
        if not isinstance(value, dict) or not all(is_number(number) for number in value.values()):
            self._damaged(place, value, "finite numbers by name")
        return {name: float(number) for name, number in value.items()}

    def _names(self, value: Any, place: str) -> frozenset[str]:
        if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
            self._damaged(place, value, "a list of names")
        return frozenset(value)

    def _registered(self, value: Any) -> Iterator[ReplicaConfig]:
        if not isinstance(value, list):
            self._damaged(_REGISTERED, value, "a list of replicas")
        for number, entry in enumerate(value):
            try:
                yield entry_from_json(entry)
            except ValueError:
                self._damaged(f"{_REGISTERED}[{number}]", entry, "a replica as in regions.yaml")

    def _damaged(self, place: str, value: object, expected: str) -> NoReturn:
        self._fail(f"{place} is {str(value)[:60]!r}; expected {expected}")

    def _fail(self, what: str) -> NoReturn:
        advice = "put a copy back, or move it away to start from the configuration"
        raise ConfigError(f"{self._source}: the state file is damaged: {what}; {advice}")


def _nonblocking(path: str, flags: int) -> int:
    """Open without blocking: a pipe would block until a writer comes."""
    return os.open(path, flags | os.O_NONBLOCK)


def _reason(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error)
