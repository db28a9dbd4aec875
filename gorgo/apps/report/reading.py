"""JSON values with their place: every error names file, line or row, field, value and what was expected."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from gorgo.errors import ReportError

#: Floats hold whole numbers exactly up to here; what is larger is no latency, count or weight.
MAX_NUMBER = 2**53
#: results.json and history.json are lists of small rows: more than this is another kind of file.
MAX_BYTES = 256 * 2**20
SHOWN = 60


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


#: Refuses NaN and Infinity, which Python's own reader takes.
DECODER = json.JSONDecoder(parse_constant=_no_constant)


def read_json(path: Path) -> Any:
    """The whole file. Raises `ReportError` with the line at which it is damaged."""
    try:
        if path.stat().st_size > MAX_BYTES:
            raise ReportError(f"{path}: larger than {MAX_BYTES // 2**20} MB; expected a file of this program")
        return DECODER.decode(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise ReportError(f"{path}, line {error.lineno}: not JSON ({error.msg})") from None
    except UnicodeDecodeError as error:
        raise ReportError(f"{path}: not UTF-8 ({error.reason} at byte {error.start})") from None
    except (ValueError, RecursionError) as error:
        raise ReportError(f"{path}: not JSON ({error})") from None
    except OSError as error:
        raise ReportError(f"{path}: {error.strerror or error}") from None


def shown(value: object) -> str:
    """A value for an error, cut."""
    text = json.dumps(value, default=str)
    return text if len(text) <= SHOWN else text[: SHOWN - 3] + "..."


@dataclass(frozen=True, slots=True)
class Place:
    """An object of a JSON file, and where it stands, as in `results.json, row 3`."""

    where: str
    values: Mapping[str, Any]

    @classmethod
    def of(cls, where: str, value: object) -> Place:
        if not isinstance(value, dict):
            raise ReportError(f"{where}: {shown(value)}; expected a JSON object")
        return cls(where, value)

    def fail(self, key: str, expected: str) -> NoReturn:
        value = shown(self.values[key]) if key in self.values else "missing"
        raise ReportError(f"{self.where}: {key} is {value}; expected {expected}")

    def number(self, key: str, *, expected: str = "a number") -> float:
        value = self.maybe_number(key, expected=expected)
        return self.fail(key, expected) if value is None else value

    def maybe_number(self, key: str, *, expected: str = "a number or null") -> float | None:
        value = self.values.get(key)
        if value is None and key in self.values:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float) or not -MAX_NUMBER <= value <= MAX_NUMBER:
            self.fail(key, expected)
        return float(value)

    def count(self, key: str) -> int:
        value = self.number(key, expected="a whole number, at least 0")
        if value != int(value) or value < 0:
            self.fail(key, "a whole number, at least 0")
        return int(value)

    def text(self, key: str) -> str:
        value = self.maybe_text(key)
        return self.fail(key, "a text") if value is None else value

    def maybe_text(self, key: str) -> str | None:
        value = self.values.get(key)
        if value is None and key in self.values:
            return None
        if not isinstance(value, str):
            self.fail(key, "a text or null")
        return value

    def inner(self, key: str) -> Place:
        value = self.values.get(key)
        if not isinstance(value, dict):
            self.fail(key, "an object")
        return Place(f"{self.where}, {key}", value)

    def numbers(self, key: str) -> dict[str, float]:
        inside = self.inner(key)
        return {name: inside.number(name) for name in inside.values}
