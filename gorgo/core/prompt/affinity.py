"""The hash of a prompt's first 256 tokens, which stands for a session without an id.

Its key is public and fixed: a restart moves no session, proxies agree, and a simulation has the same replicas. It only
chooses replicas; the hashes of cached blocks have a secret key (`fingerprint`). A client gains nothing by a collision
that it would not by a session id.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from hashlib import blake2b

from gorgo.core.prompt.boundaries import Mark, Marks
from gorgo.core.prompt.parse import Prompt

#: Bytes of the prompt that count: 256 tokens of 4 bytes.
HEAD_BYTES = 1024
_KEY = b"gorgo session affinity"


def head_of(prompt: Prompt) -> tuple[bytes, tuple[Mark, ...]]:
    """Return the first bytes of a prompt and the marks in them."""
    marks = Marks.of(prompt.message_starts)
    count = bisect_left(marks.starts, HEAD_BYTES)
    return prompt.text[:HEAD_BYTES], tuple(zip(marks.starts[:count], marks.roles[:count], strict=True))


def prefix_hash(head: bytes, marks: Iterable[Mark], *, adapter: str | None = None) -> int:
    """Return 64 bits for a prompt's beginning; one for an adapter differs from any other's.

    Example
    -------
    >>> hex(prefix_hash(*head_of(Prompt(b"You are a helpful assistant.", ((0, "system"),)))))
    '0x272b468adf3232ea'
    """
    person = b"" if adapter is None else blake2b(_text(adapter), digest_size=blake2b.PERSON_SIZE).digest()
    digest = blake2b(head, key=_KEY, person=person, digest_size=8)
    for offset, role in marks:
        digest.update(b"%d %s\0" % (offset, _text(role)))
    return int.from_bytes(digest.digest(), "little")


def _text(name: str) -> bytes:
    return name.encode("utf-8", "surrogatepass")
