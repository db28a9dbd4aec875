"""Starts and ends of the messages of a prompt: in bytes of its text, and from there in tokens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeVar, overload

#: Ends of a prompt that are stored, the first and the last half of them: a shared beginning has few messages, and the
#: next turn of a long conversation adds two.
MAX_BOUNDARIES = 128

_T = TypeVar("_T")

#: Offset of a message's first byte, and its role.
Mark = tuple[int, str]


class Marks(Sequence[Mark]):
    """Where messages start, ascending, and their roles: in two columns, since an object per message takes time.

    >>> marks = Marks((0, 10), ("user", "assistant"))
    >>> marks[1], marks == ((0, "user"), (10, "assistant"))
    ((10, 'assistant'), True)
    """

    __slots__ = ("roles", "starts")

    def __init__(self, starts: Sequence[int] = (), roles: Sequence[str] = ()) -> None:
        self.starts = starts
        self.roles = roles

    @classmethod
    def of(cls, marks: Sequence[Mark]) -> Marks:
        """Return marks in columns."""
        return marks if isinstance(marks, cls) else cls(*zip(*marks, strict=True))

    def __len__(self) -> int:
        return len(self.starts)

    @overload
    def __getitem__(self, place: int) -> Mark: ...
    @overload
    def __getitem__(self, place: slice) -> Sequence[Mark]: ...
    def __getitem__(self, place: int | slice) -> Mark | Sequence[Mark]:
        if isinstance(place, slice):
            return Marks(self.starts[place], self.roles[place])
        return self.starts[place], self.roles[place]

    def __iter__(self) -> Iterator[Mark]:
        return zip(self.starts, self.roles, strict=True)

    def __eq__(self, other: object) -> bool:
        return tuple(self) == tuple(other) if isinstance(other, Marks | tuple) else NotImplemented

    def __hash__(self) -> int:
        return hash(tuple(self))

    def __repr__(self) -> str:
        return repr(tuple(self))


def message_ends(starts: Sequence[int], text_bytes: int) -> tuple[int, ...]:
    """Return where messages end in a text from where they start, both ascending; an empty message has no own end.

    >>> message_ends((0, 10, 10, 25), 40)
    (10, 25, 40)
    """
    if not starts:
        return ()
    ends = dict.fromkeys(starts[1:])  # ascending, as the starts are
    ends[text_bytes] = None
    ends.pop(0, None)
    return tuple(bounded([*ends]))


def token_boundaries(ends: Sequence[int], *, size: int, tokens: int) -> tuple[int, ...]:
    """Return the tokens before each end, in proportion: `size` is that of a prompt with `tokens` tokens.

    >>> token_boundaries((10, 25, 40), size=40, tokens=12)
    (3, 7, 12)
    """
    if size == tokens:
        return tuple(ends)
    return tuple([end * tokens // size for end in ends])  # a list: no frame per message


def bounded(ends: Sequence[_T]) -> Sequence[_T]:
    """Return the first and the last ends, at most `MAX_BOUNDARIES`."""
    half = MAX_BOUNDARIES // 2
    return ends if len(ends) <= MAX_BOUNDARIES else [*ends[:half], *ends[-half:]]
