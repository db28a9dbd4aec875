"""Rows as the generators make them: numbering their blocks, and writing them in Mooncake's form.

A made row has the identity of the text that its prompt begins with and of the text that follows. The rows of a user
also have `user_id` and `turn`, which other readers ignore.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from gorgo.apps.traces import BLOCK_TOKENS, TraceRequest

#: Identity of a text: a word for its kind, and a number.
TextName = tuple[str, int]


@dataclass(frozen=True, slots=True)
class MadeRow:
    """One request. Its prompt is `shared_tokens` of the text `shared`, then the text `own` up to `input_tokens`.

    `parts` are whole texts between the two, each with its length: a block in one of them is common to all prompts that
    begin with the same texts up to it. `boundaries` are the ends of its messages, empty where it is not made of them;
    files do not have them.

    A row and a longer one of the same `own` (and thus the same `shared_tokens`) have the shorter one's text in common.
    """

    timestamp_ms: int
    shared: TextName
    shared_tokens: int
    own: TextName
    input_tokens: int
    output_tokens: int
    user: str | None = None
    turn: int | None = None
    parts: tuple[tuple[TextName, int], ...] = ()
    boundaries: tuple[int, ...] = ()


def as_requests(rows: Iterable[MadeRow], *, block_tokens: int = BLOCK_TOKENS) -> list[TraceRequest]:
    """The rows as a trace that was read from a file, in the order of time; files have blocks of 512 tokens."""
    blocks = _Blocks(block_tokens)
    return [
        TraceRequest(
            index=index,
            timestamp_s=row.timestamp_ms / 1000,
            input_tokens=row.input_tokens,
            output_tokens=row.output_tokens,
            hash_ids=tuple(blocks.of(row)),
            user=row.user,
            turns=row.turn,
            boundaries=row.boundaries,
        )
        for index, row in enumerate(_in_order(rows))
    ]


def as_lines(rows: Iterable[MadeRow]) -> bytes:
    """The rows as JSON lines, in the order of time."""
    blocks = _Blocks(BLOCK_TOKENS)
    return b"".join(_line(row, blocks) for row in _in_order(rows))


def _in_order(rows: Iterable[MadeRow]) -> list[MadeRow]:
    return sorted(rows, key=lambda row: row.timestamp_ms)


class _Blocks:
    """Numbers blocks in the order of their first occurrence, as Mooncake does.

    A block inside the shared text is common to all prompts that begin with it; one behind it belongs to `own`; a last
    block that is not full is another block once it has grown.
    """

    def __init__(self, block_tokens: int) -> None:
        self._block_tokens = block_tokens
        self._count = 0
        #: Blocks of each text by their last token; where a block begins follows from it.
        self._by_text: dict[TextName | tuple[TextName, ...], dict[int, int]] = {}

    def of(self, row: MadeRow) -> list[int]:
        size, length, found, end = self._block_tokens, row.input_tokens, list[int](), 0
        for text, reached in _texts(row):
            known = self._by_text.setdefault(text, {})
            while end < length and (next_end := min(end + size, length)) <= reached:
                end = next_end
                number = known.get(end)
                if number is None:
                    number = known[end] = self._count
                    self._count += 1
                found.append(number)
        return found


def _texts(row: MadeRow) -> Iterator[tuple[TextName | tuple[TextName, ...], int]]:
    """Yield what the blocks are part of, in order, with the token up to which: one text, or all texts up to there."""
    yield row.shared, row.shared_tokens
    begun_with: tuple[TextName, ...] = (row.shared,)
    reached = row.shared_tokens
    for name, tokens in row.parts:
        begun_with = (*begun_with, name)
        reached += tokens
        yield begun_with, reached
    yield row.own, row.input_tokens


def _line(row: MadeRow, blocks: _Blocks) -> bytes:
    fields: dict[str, object] = {
        "timestamp": row.timestamp_ms,
        "input_length": row.input_tokens,
        "output_length": row.output_tokens,
        "hash_ids": blocks.of(row),
    }
    if row.user is not None:
        fields |= {"user_id": row.user, "turn": row.turn}
    return json.dumps(fields).encode() + b"\n"
