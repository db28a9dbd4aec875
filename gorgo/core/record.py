"""`record`: the dataclass of values that are made for each request, frozen for the type checker alone.

A frozen dataclass sets each field by `object.__setattr__`, which takes five times as long as an assignment. The values
of one request have 140 fields. mypy refuses an assignment to a field of a record as it does for a frozen dataclass.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeVar, dataclass_transform

T = TypeVar("T")


@dataclass_transform(frozen_default=True, field_specifiers=(field,))
def record(cls: type[T]) -> type[T]:
    """Return `cls` as a dataclass with slots, compared and hashed by its fields. No code changes one after it is made.

    Example
    -------
    >>> @record
    ... class Point:
    ...     x: float
    ...     y: float = 0.0
    >>> Point(1.0) == Point(1.0, 0.0), {Point(1.0): "found"}[Point(1.0)]
    (True, 'found')
    """
    return dataclass(slots=True, unsafe_hash=True)(cls)
