"""Fields of Protocol Buffers as bytes: messages that are made for each request are joined, not built and serialized.

Owns lengths and tags of fields with content. An object of a message costs a microsecond per field.
"""

from __future__ import annotations

from functools import lru_cache

_ONE_BYTE = tuple(bytes([number]) for number in range(128))


def varint(number: int) -> bytes:
    """Return a number that is not negative.

    >>> varint(300).hex()
    'ac02'
    """
    if number < 128:
        return _ONE_BYTE[number]
    found = bytearray()
    while number > 127:
        found.append(number & 127 | 128)
        number >>= 7
    found.append(number)
    return bytes(found)


def length_at(message: bytes, position: int) -> tuple[int, int]:
    """Return a length below 2^21, and the position behind it. Raises `IndexError` for any other.

    >>> length_at(varint(70_000), 0)
    (70000, 3)
    """
    first = message[position]
    if first < 128:
        return first, position + 1
    second = message[position + 1]
    if second < 128:
        return first & 127 | second << 7, position + 2
    third = message[position + 2]
    if third > 127:
        raise IndexError("a longer number")
    return first & 127 | (second & 127) << 7 | third << 14, position + 3


def field(number: int, content: bytes) -> bytes:
    """Return a field of bytes, text or a message; its number is at most 15.

    >>> field(1, b"a").hex()
    '0a0161'
    """
    return _ONE_BYTE[number << 3 | 2] + varint(len(content)) + content


@lru_cache(64)
def text_key(name: str) -> bytes:
    """Return the key of a map's entry."""
    return field(1, name.encode())


def text_entry(name: str, text: bytes) -> bytes:
    """Return an entry of a `Struct` with a text."""
    return field(1, text_key(name) + field(2, field(3, text)))


def struct_entry(name: str, entries: bytes) -> bytes:
    """Return an entry of a `Struct` with a `Struct` of these entries."""
    return field(1, text_key(name) + field(2, field(5, entries)))
