"""Work on copies: each has one item at a time, and an interrupt ends what runs before it goes on."""

from __future__ import annotations

from threading import Event

import pytest
from rich.progress import Progress

from tests.mutants.trial import Copy
from tests.mutants.workers import Workers


class _Copy(Copy):
    """A copy of nothing, whose work lasts until it is ended."""

    def __init__(self) -> None:
        self.ended = Event()

    def end(self) -> None:
        self.ended.set()


def test_every_item_is_worked_on() -> None:
    workers = Workers([_Copy(), _Copy()], Progress(disable=True))
    found = workers.each("squares", [1, 2, 3, 4], lambda _, item: item**2)
    assert sorted(found) == [(1, 1), (2, 4), (3, 9), (4, 16)]


def test_an_interrupt_ends_what_runs_and_begins_nothing_more() -> None:
    copies, begun = [_Copy(), _Copy()], []

    def work(copy: Copy, item: str) -> bool:
        assert isinstance(copy, _Copy)
        begun.append(item)
        return item == "short" or copy.ended.wait(60)

    def interrupted() -> None:
        for item, _ in Workers(copies, Progress(disable=True)).each("work", ["short", "a", "b", "c", "d"], work):
            assert item == "short"
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert all(copy.ended.is_set() for copy in copies)
    assert set(begun) <= {"short", "a", "b"}
