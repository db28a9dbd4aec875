"""Ends of the messages of a prompt: in bytes of its text, and from there in tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

#: Ends of a prompt that are stored, the first and the last half of them: a shared beginning has few messages, and the
#: next turn of a long conversation adds two.
MAX_BOUNDARIES = 128

_T = TypeVar("_T")


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
    return tuple([end * tokens // size for end in ends])  # a list: no frame per message


def bounded(ends: Sequence[_T]) -> Sequence[_T]:
    """Return the first and the last ends, at most `MAX_BOUNDARIES`."""
    half = MAX_BOUNDARIES // 2
    return ends if len(ends) <= MAX_BOUNDARIES else [*ends[:half], *ends[-half:]]
