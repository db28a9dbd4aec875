"""Weights files of `gorgo freeze --export` and `gorgo tune --out`, read by `gorgo serve` and `gorgo freeze`.

The reader checks the form; the caller checks policy and ranges.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from gorgo.config.atomic import write_atomically
from gorgo.config.document import show_value
from gorgo.core.numeric import is_number
from gorgo.errors import ConfigError

SCHEMA = 1
#: Four weights take 100 bytes, evidence is a table.
MAX_BYTES = 65_536

_EXPECTED = '{"policy": "NAME", "weights": {"NAME": NUMBER, ...}}'
_TEXTS = ("source", "created", "note")
_KEYS = ("gorgo_weights", "policy", "weights", "widened", *_TEXTS, "evidence")


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightsFile:
    """One set of weights and its origin.

    Parameters
    ----------
    policy:
        Whose weights they are.
    weights:
        Values by name; what is left out is at the policy's default.
    widened:
        Whether values out of range are intended.
    source:
        What made the file, in a few words.
    created:
        When, ISO 8601.
    note:
        For people.
    evidence:
        Figures that speak for these weights, as their maker has them.

    Example
    -------
    >>> file = parse_weights_file(b'{"policy": "gorgo", "weights": {"w_rtt": 0.7}}', source="tuned.json")
    >>> file.policy, file.weights, file.widened
    ('gorgo', {'w_rtt': 0.7}, False)
    >>> parse_weights_file(weights_file_text(file), source="again") == file
    True
    """

    policy: str
    weights: Mapping[str, float]
    widened: bool = False
    source: str | None = None
    created: str | None = None
    note: str | None = None
    evidence: Mapping[str, Any] | None = None


def read_weights_file(path: Path) -> WeightsFile:
    """Read a weights file. Raises `ConfigError`."""
    try:
        with path.open("rb") as file:
            text = file.read(MAX_BYTES + 1)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: cannot be read as weights ({error}); expected {_EXPECTED}") from error
    return parse_weights_file(text, source=str(path))


def write_weights_file(path: Path, file: WeightsFile) -> None:
    """Write the file atomically. Raises `OSError`."""
    write_atomically(path, weights_file_text(file))


def weights_file_text(file: WeightsFile) -> bytes:
    """Return the content of the file, without unknown fields."""
    document: dict[str, Any] = {"gorgo_weights": SCHEMA, "policy": file.policy, "weights": dict(file.weights)}
    if file.widened:
        document["widened"] = True
    optional = {key: getattr(file, key) for key in (*_TEXTS, "evidence")}
    document |= {key: value for key, value in optional.items() if value is not None}
    return json.dumps(document, indent=2).encode() + b"\n"


def parse_weights_file(text: bytes, *, source: str) -> WeightsFile:
    """Parse the content of a file. Raises `ConfigError` with `source`, place and expectation."""

    def fail(what: str) -> NoReturn:
        raise ConfigError(f"{source}: {what}; expected {_EXPECTED}")

    if len(text) > MAX_BYTES:
        fail(f"is larger than {MAX_BYTES} bytes")
    try:
        document: Any = json.loads(text)
    except (ValueError, RecursionError) as error:  # too deep for the JSON parser is RecursionError
        raise ConfigError(f"{source}: cannot be read as weights ({error}); expected {_EXPECTED}") from error
    if not isinstance(document, dict):
        fail("is no JSON object")
    schema = document.get("gorgo_weights", SCHEMA)
    if isinstance(schema, int) and schema > SCHEMA:
        raise ConfigError(f"{source}: this weights file has form {schema}, of a newer GORGO; this one reads {SCHEMA}")
    unknown = [key for key in document if key not in _KEYS]
    if unknown or schema != SCHEMA:
        fail(f"has the unknown key {unknown[0]!r}" if unknown else f"gorgo_weights is {schema!r}")
    policy, weights, widened = document.get("policy"), document.get("weights"), document.get("widened", False)
    if not isinstance(policy, str):
        fail("policy is no name")
    if not isinstance(weights, dict):
        fail("weights are no object")
    for name, value in weights.items():
        if not is_number(value):
            fail(f"weight {show_value(name)} is {show_value(value)}, no number that can be counted with")
    if not isinstance(widened, bool):
        fail("widened is neither true nor false")
    texts = {key: document.get(key) for key in _TEXTS}
    wrong = [key for key, value in texts.items() if value is not None and not isinstance(value, str)]
    evidence = document.get("evidence")
    if wrong or not (evidence is None or isinstance(evidence, dict)):
        fail(f"{wrong[0]} is no text" if wrong else "evidence is no object")
    values = {name: float(value) for name, value in weights.items()}
    return WeightsFile(policy=policy, weights=values, widened=widened, evidence=evidence, **texts)
