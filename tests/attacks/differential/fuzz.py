"""Runs items of a differential fuzz by number, and reports the first disagreement in its smallest form."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from random import Random
from typing import Any

from tests.attacks.differential import readers as client
from tests.attacks.differential import readers as reader
from tests.attacks.differential.messages import Answered, request_bytes, response_bytes
from tests.attacks.differential.odd_bytes import minimised, pieces


@dataclass(frozen=True, slots=True)
class Verdict:
    """Both readings of an item: what is wrong with them, and why each side refused."""

    wrong: str | None
    ours: str
    theirs: str


@dataclass(frozen=True, slots=True)
class Item:
    """Bytes, whether they are well formed, and how to read pieces of them."""

    text: bytes
    ordinary: bool
    compare: Callable[[Sequence[bytes]], Verdict]


@dataclass(slots=True)
class Found:
    """Items, those that both accept or refuse, and why the proxy alone refused."""

    items: int = 0
    accepted: int = 0
    refused_by_both: int = 0
    stricter: Counter[str] = field(default_factory=Counter)


class DisagreementError(AssertionError):
    """Bytes with two readings."""


Make = Callable[[Random], Item]


@contextmanager
def _requests() -> Iterator[Make]:
    def compare(parts: Sequence[bytes]) -> Verdict:
        ours, theirs = reader.read(parts), reader.read_h11(parts)
        return Verdict(reader.disagreement(ours, theirs), ours.refused, theirs.refused)

    yield lambda chance: Item(*request_bytes(chance), compare)


@contextmanager
def _responses() -> Iterator[Make]:
    reading = client.Client()

    def compare(answered: Answered, parts: Sequence[bytes]) -> Verdict:
        ours, theirs = reading.read(answered, parts), client.read_h11_client(answered, parts)
        wrong = client.disagreement_client(ours, theirs)
        if wrong is not None and any(
            client.disagreement_client(ours, client.read_h11_client(answered, new)) is None
            for new in client.without_skipped(parts)
        ):
            wrong = None
        return Verdict(wrong, ours.refused, theirs.refused)

    def make(chance: Random) -> Item:
        answered, text, ordinary = response_bytes(chance)
        return Item(text, ordinary, lambda parts: compare(answered, parts))

    try:
        yield make
    finally:
        reading.close()


KINDS: dict[str, Any] = {"requests": _requests, "responses": _responses}


def fuzz(kind: str, count: int, *, seed: int, first: int = 0, on_item: Callable[[Found], None] | None = None) -> Found:
    """Read `count` items from number `first` on. Raises `DisagreementError` with the smallest pieces that show one."""
    found = Found()
    with KINDS[kind]() as make:
        for number in range(first, first + count):
            chance = Random(f"{seed} {number}")
            item = make(chance)
            _check(item, pieces(chance, item.text), f"{kind}, item {number} of seed {seed}", found)
            if on_item is not None:
                on_item(found)
    return found


def _check(item: Item, parts: list[bytes], name: str, found: Found) -> None:
    verdict = item.compare(parts)
    if verdict.wrong is not None:
        smallest = minimised(parts, lambda new: item.compare(new).wrong is not None)
        raise DisagreementError(f"{name}: {item.compare(smallest).wrong}\nsmallest: {smallest}\nwhole: {parts}")
    if item.ordinary and verdict.ours:
        raise DisagreementError(f"{name}: a well formed item is refused: {verdict.ours}\nwhole: {parts}")
    found.items += 1
    found.accepted += not verdict.ours and not verdict.theirs
    found.refused_by_both += bool(verdict.ours and verdict.theirs)
    if verdict.ours and not verdict.theirs:
        found.stricter[verdict.ours] += 1
