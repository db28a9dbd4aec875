"""Values of a report's fields as they come in JSON: each is within its bounds, or `BadReport` says where it is not."""

from __future__ import annotations

from base64 import b64decode
from binascii import Error as Base64Error
from collections.abc import Callable
from typing import Any, TypeVar

from gorgo.core.peers.records import MAX_COUNT, MAX_NAME_BYTES
from gorgo.errors import BadReport

#: Of one hash of a prefix.
HASH_BYTES = 8
_Record = TypeVar("_Record")


def read_records(value: Any, most: int, place: str, decode: Callable[[Any, str], _Record]) -> tuple[_Record, ...]:
    if not isinstance(value, list) or len(value) > most:
        raise BadReport(f"{place} is no array of at most {most} entries")
    return tuple([decode(each, f"{place}[{number}]") for number, each in enumerate(value)])


def read_array(value: Any, length: int, place: str) -> list[Any]:
    if not isinstance(value, list) or len(value) != length:
        raise BadReport(f"{place} is no array of {length} values")
    return value


def read_hashes(value: Any, place: str) -> bytes:
    try:
        return b64decode(_text(value, place), validate=True)
    except (Base64Error, ValueError):
        raise BadReport(f"{place} has hashes that are no base64") from None


def read_count(value: Any, place: str) -> int:
    if type(value) is not int or not 0 <= value <= MAX_COUNT:
        raise BadReport(f"{place} has {shown(value)}; expected a whole number from 0 to {MAX_COUNT}")
    return value


def read_number(value: Any, most: float, place: str) -> float:
    # No comparison with NaN is true.
    if type(value) not in (int, float) or not 0.0 <= value <= most:
        raise BadReport(f"{place} has {shown(value)}; expected a number from 0 to {most:g}")
    return float(value)


def read_flag(value: Any, place: str) -> bool:
    if type(value) is not bool:
        raise BadReport(f"{place} has {shown(value)}; expected true or false")
    return value


def _text(value: Any, place: str) -> str:
    if type(value) is not str:
        raise BadReport(f"{place} has {shown(value)}; expected a text")
    return value


def read_name(value: Any, place: str) -> str:
    text = _text(value, place)
    if len(text.encode("utf-8", "surrogatepass")) > MAX_NAME_BYTES:
        raise BadReport(f"{place} has a name longer than {MAX_NAME_BYTES} bytes")
    return text


def read_optional_name(value: Any, place: str) -> str | None:
    return None if value is None else read_name(value, place)


def shown(value: Any) -> str:
    """Return a value for an error; of an array or an object its kind alone."""
    return f"{value!r:.20}" if isinstance(value, int | float | str) else type(value).__name__
