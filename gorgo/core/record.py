"""`record`: the frozen dataclass of values that are made for each request, made in C.

The constructor of a dataclass is Python code, to which each keyword argument comes in a dict: six fields take 450 ns. A
`msgspec.Struct` with the same fields takes 70 ns. The values of one request have 140 fields. What a dataclass compares,
hashes and prints stays; `replace`, `fields` and `asdict` work. More than eight arguments are cheaper by position.
"""

from __future__ import annotations

from dataclasses import MISSING, Field, dataclass, field, fields
from typing import Any, TypeVar, cast, dataclass_transform

import msgspec

T = TypeVar("T")

#: Of a class made by Python; the struct has its own.
_OF_THE_CLASS = ("__dict__", "__weakref__", "__match_args__", "__eq__")


@dataclass_transform(frozen_default=True, field_specifiers=(field,))
def record(cls: type[T]) -> type[T]:
    """Return `cls` as a frozen dataclass with slots, compared and hashed by its fields.

    Example
    -------
    >>> @record
    ... class Point:
    ...     x: float
    ...     y: float = 0.0
    >>> Point(1.0) == Point(1.0, 0.0), {Point(1.0): "found"}[Point(1.0)]
    (True, 'found')
    """
    made: type[Any] = dataclass(init=False, unsafe_hash=True)(cls)
    left_out = {*_OF_THE_CLASS, *(each.name for each in fields(made))}
    body = {name: value for name, value in vars(made).items() if name not in left_out}
    bases = tuple(base for base in made.__bases__ if base is not object)
    struct = msgspec.defstruct(
        made.__name__,
        [_as_struct_field(each) for each in fields(made)],
        bases=(msgspec.Struct, *bases),
        module=made.__module__,
        namespace=body,
        frozen=True,
    )
    struct.__qualname__ = made.__qualname__
    return cast(type[T], struct)


def _as_struct_field(each: Field[Any]) -> tuple[str, Any] | tuple[str, Any, Any]:
    if each.default_factory is not MISSING:
        return each.name, each.type, msgspec.field(default_factory=each.default_factory)
    return (each.name, each.type) if each.default is MISSING else (each.name, each.type, each.default)
