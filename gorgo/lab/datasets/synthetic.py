"""Rows as the generators make them, and the two simple generators: Poisson arrivals, and short chat traces.

Owns the numbering of a row's blocks and their form as Mooncake writes them. Leaves lasting users and shared prefixes to
`gorgo.lab.datasets.users`.

A made row has the identity of the text that its prompt begins with and of the text that follows. The rows of a user
also have `user_id` and `turn`, which other readers ignore.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from gorgo.lab.datasets.shape import PoissonShape, RandomDraws, WorkloadShape
from gorgo.lab.traces import BLOCK_TOKENS, TraceRequest

#: Identity of a text: a word for its kind, and a number.
TextName = tuple[str, int]


@dataclass(frozen=True, slots=True)
class MadeRow:
    """One request. Its prompt is `shared_tokens` of the text `shared`, then the text `own` up to `input_tokens`.

    `parts` are whole texts between the two, each with its length: a block in one of them is common to all prompts that
    begin with the same texts up to it. `boundaries` are the ends of its messages, empty where it is not made of them.

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
    """The rows as a trace that was read from a file, in the order of time."""
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
            block_tokens=block_tokens,
        )
        for index, row in enumerate(_in_order(rows))
    ]


def as_lines(rows: Iterable[MadeRow], *, block_tokens: int = BLOCK_TOKENS) -> bytes:
    """The rows as JSON lines, in the order of time."""
    blocks = _Blocks(block_tokens)
    return b"".join(_line(row, blocks, block_tokens) for row in _in_order(rows))


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
        size, length, numbers, end = self._block_tokens, row.input_tokens, list[int](), 0
        for text, reached in _texts(row):
            number_of_end = self._by_text.setdefault(text, {})
            while end < length and (next_end := min(end + size, length)) <= reached:
                end = next_end
                number = number_of_end.get(end)
                if number is None:
                    number = number_of_end[end] = self._count
                    self._count += 1
                numbers.append(number)
        return numbers


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


def _line(row: MadeRow, blocks: _Blocks, block_tokens: int) -> bytes:
    fields: dict[str, object] = {
        "timestamp": row.timestamp_ms,
        "input_length": row.input_tokens,
        "output_length": row.output_tokens,
        "hash_ids": blocks.of(row),
    }
    if row.user is not None:
        fields |= {"user_id": row.user, "turn": row.turn}
    if row.boundaries:
        fields["boundaries"] = row.boundaries
    if block_tokens != BLOCK_TOKENS:
        fields["block_tokens"] = block_tokens
    return json.dumps(fields).encode() + b"\n"


# The generator of Poisson arrivals: many users with short questions and few conversations.


#: Most conversations that may continue; the oldest is dropped.
OPEN_MAX = 2048


@dataclass(slots=True)
class _Conversation:
    number: int
    last_s: float
    tokens: int
    turn: int = 1


def poisson_rows(shape: PoissonShape) -> Iterator[MadeRow]:
    """The requests in the order of time."""
    draws, waiting, begun, now_s = RandomDraws(shape.seed), deque[_Conversation](), 0, 0.0
    while True:
        now_s += draws.exponential(1 / shape.rate_per_s)
        if now_s >= shape.duration_s:
            return
        ready = bool(waiting) and waiting[0].last_s + shape.continue_after_s <= now_s
        if draws.uniform() < shape.continue_share and ready:
            conversation = waiting.popleft()
            _continue(conversation, draws.log_normal(shape.turn_median, shape.turn_sigma), shape.input_max)
        else:
            begun += 1
            conversation = _Conversation(begun, now_s, _length(shape, draws))
        conversation.last_s = now_s
        _wait(waiting, conversation)
        yield _row(conversation, draws.log_normal(shape.output_median, shape.output_sigma), shape)


def _length(shape: PoissonShape, draws: RandomDraws) -> int:
    return max(1, min(shape.input_max, round(draws.log_normal(shape.input_median, shape.input_sigma))))


def _continue(conversation: _Conversation, added: float, input_max: int) -> None:
    conversation.tokens = min(input_max, conversation.tokens + max(1, round(added)))
    conversation.turn += 1


def _wait(waiting: deque[_Conversation], conversation: _Conversation) -> None:
    waiting.append(conversation)
    if len(waiting) > OPEN_MAX:
        waiting.popleft()


def _row(conversation: _Conversation, output: float, shape: PoissonShape) -> MadeRow:
    text: TextName = ("conversation", conversation.number)
    return MadeRow(
        timestamp_ms=int(1000 * conversation.last_s),
        shared=text,
        shared_tokens=0,
        own=text,
        input_tokens=conversation.tokens,
        output_tokens=max(1, min(shape.output_max, round(output))),
        user=f"user-{conversation.number}",
        turn=conversation.turn,
    )


# The generator of short chat traces: conversations side by side, long prompts, many turns, high reuse.


#: A prompt has at least so many tokens of its own behind the application's.
OWN_TOKENS_MIN = 16


def conversation_rows(shape: WorkloadShape) -> Iterator[MadeRow]:
    """The requests, conversation by conversation."""
    return _Workload(shape).rows()


@dataclass(slots=True)
class _User:
    owner: int
    application: int
    #: Their system prompt is the application's own, the same for all who use it.
    shares: bool


class _Workload:
    """Conversations that run side by side, each replaced when it ends, and single requests between them."""

    def __init__(self, shape: WorkloadShape) -> None:
        self._shape = shape
        self._draws = RandomDraws(shape.seed)
        self._owners = 0

    def rows(self) -> Iterator[MadeRow]:
        yield from self._singles()
        for index in range(self._shape.conversations):
            now_s = self._shape.ramp_s * index / self._shape.conversations
            while now_s < self._shape.duration_s:
                rows, now_s = self._conversation(now_s)
                yield from rows

    def _singles(self) -> Iterator[MadeRow]:
        shape, now_s = self._shape, 0.0
        while shape.single_per_s > 0:
            now_s += self._draws.exponential(1 / shape.single_per_s)
            if now_s >= shape.duration_s:
                return
            tokens = self._draws.log_normal(shape.single_median, shape.single_sigma)
            yield self._row(now_s, self._begin(), tokens)

    def _conversation(self, now_s: float) -> tuple[list[MadeRow], float]:
        """Its requests, and when its place is free again."""
        shape, draws = self._shape, self._draws
        user, rows = self._begin(), list[MadeRow]()
        tokens = draws.log_normal(shape.history_median, shape.history_sigma)
        for _ in range(draws.geometric(shape.turns_mean)):
            tokens += draws.log_normal(shape.turn_median, shape.turn_sigma)
            rows.append(self._row(now_s, user, tokens))
            tokens += rows[-1].output_tokens
            now_s += shape.think_s_min + draws.exponential(shape.think_s_mean)
            if rows[-1].input_tokens >= shape.input_max or now_s >= shape.duration_s:
                break
        return rows, now_s

    def _begin(self) -> _User:
        """Return a new user, with the system prompt of an application or an own one."""
        self._owners += 1
        application = self._draws.rank(self._shape.applications)
        return _User(self._owners, application, self._draws.uniform() < self._shape.application_share)

    def _row(self, now_s: float, user: _User, own_tokens: float) -> MadeRow:
        shape = self._shape
        system_tokens = shape.application_tokens * (shape.applications + user.application) // shape.applications
        output = self._draws.log_normal(shape.output_median, shape.output_sigma)
        return MadeRow(
            timestamp_ms=round(1000 * now_s),
            shared=("application", user.application),
            shared_tokens=system_tokens if user.shares else 0,
            own=("owner", user.owner),
            input_tokens=min(shape.input_max, system_tokens + max(OWN_TOKENS_MIN, round(own_tokens))),
            output_tokens=max(1, min(shape.output_max, round(output))),
        )
