"""The seeded generator of chat traces: long prompts, many turns, high reuse, in Mooncake's form.

The same shape gives the same bytes on every machine and Python: only `random.Random.random`, whose sequence is part of
Python's promise, is drawn from, and all that is written is rounded to whole numbers.
"""

from __future__ import annotations

import gzip
import json
import math
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from gorgo.apps.datasets.shape import WorkloadShape
from gorgo.apps.traces import BLOCK_TOKENS

#: A prompt has at least so many tokens of its own behind the application's.
OWN_TOKENS_MIN = 16


def generate_trace(shape: WorkloadShape) -> bytes:
    """The trace as JSON lines, in the order of time."""
    rows = sorted(_Workload(shape).rows(), key=lambda row: row.timestamp_ms)
    ids = _Ids()
    return b"".join(_line(row, ids) for row in rows)


def write_trace(shape: WorkloadShape, path: Path) -> None:
    """Writes it, compressed where the name ends in .gz; no time stamp or name goes into the file."""
    text = generate_trace(shape)
    path.write_bytes(gzip.compress(text, mtime=0) if path.suffix == ".gz" else text)


@dataclass(slots=True)
class _Row:
    timestamp_ms: int
    application: int
    shared_tokens: int
    owner: int
    input_tokens: int
    output_tokens: int


@dataclass(slots=True)
class _User:
    owner: int
    application: int
    #: Their system prompt is the application's own, the same for all who use it.
    shares: bool


class _Draws:
    """The distributions that are needed, from uniform numbers."""

    def __init__(self, seed: int) -> None:
        self.uniform = random.Random(seed).random

    def exponential(self, mean: float) -> float:
        return -mean * math.log(1 - self.uniform())

    def log_normal(self, median: float, sigma: float) -> float:
        normal = math.sqrt(-2 * math.log(1 - self.uniform())) * math.cos(2 * math.pi * self.uniform())
        return median * math.exp(sigma * normal)

    def geometric(self, mean: float) -> int:
        """At least 1."""
        return 1 + int(math.log(1 - self.uniform()) / math.log(1 - 1 / mean)) if mean > 1 else 1

    def rank(self, count: int) -> int:
        """0 to count - 1, the n-th in proportion to 1/n."""
        target = self.uniform() * sum(1 / n for n in range(1, count + 1))
        for rank in range(count):
            target -= 1 / (rank + 1)
            if target < 0:
                return rank
        return count - 1


class _Workload:
    """Conversations that run side by side, each replaced when it ends, and single requests between them."""

    def __init__(self, shape: WorkloadShape) -> None:
        self._shape = shape
        self._draws = _Draws(shape.seed)
        self._owners = 0

    def rows(self) -> Iterator[_Row]:
        yield from self._singles()
        for place in range(self._shape.conversations):
            now_s = self._shape.ramp_s * place / self._shape.conversations
            while now_s < self._shape.duration_s:
                rows, now_s = self._conversation(now_s)
                yield from rows

    def _singles(self) -> Iterator[_Row]:
        shape, now_s = self._shape, 0.0
        while shape.single_per_s > 0:
            now_s += self._draws.exponential(1 / shape.single_per_s)
            if now_s >= shape.duration_s:
                return
            own = self._draws.log_normal(shape.single_median, shape.single_sigma)
            yield self._row(now_s, self._begin(), own)

    def _conversation(self, now_s: float) -> tuple[list[_Row], float]:
        """Its requests, and when its place is free again."""
        shape, draws = self._shape, self._draws
        user, rows = self._begin(), list[_Row]()
        own = draws.log_normal(shape.history_median, shape.history_sigma)
        for _ in range(draws.geometric(shape.turns_mean)):
            own += draws.log_normal(shape.turn_median, shape.turn_sigma)
            rows.append(self._row(now_s, user, own))
            own += rows[-1].output_tokens
            now_s += shape.think_s_min + draws.exponential(shape.think_s_mean)
            if rows[-1].input_tokens >= shape.input_max or now_s >= shape.duration_s:
                break
        return rows, now_s

    def _begin(self) -> _User:
        """Somebody new, with the system prompt of an application or with their own."""
        self._owners += 1
        application = self._draws.rank(self._shape.applications)
        return _User(self._owners, application, self._draws.uniform() < self._shape.application_share)

    def _row(self, now_s: float, user: _User, own_tokens: float) -> _Row:
        shape = self._shape
        system_tokens = shape.application_tokens * (shape.applications + user.application) // shape.applications
        output = self._draws.log_normal(shape.output_median, shape.output_sigma)
        return _Row(
            timestamp_ms=round(1000 * now_s),
            application=user.application,
            shared_tokens=system_tokens if user.shares else 0,
            owner=user.owner,
            input_tokens=min(shape.input_max, system_tokens + max(OWN_TOKENS_MIN, round(own_tokens))),
            output_tokens=max(1, min(shape.output_max, round(output))),
        )


class _Ids:
    """Numbers blocks in the order in which they are first seen, as Mooncake does.

    A block inside the application's prompt is everybody's; one behind it belongs to its conversation; a last block that
    is not full is another block once it has grown.
    """

    def __init__(self) -> None:
        self._by_block: dict[tuple[str, int, int, int], int] = {}

    def of(self, row: _Row) -> list[int]:
        return [self._one(row, start) for start in range(0, row.input_tokens, BLOCK_TOKENS)]

    def _one(self, row: _Row, start: int) -> int:
        end = min(start + BLOCK_TOKENS, row.input_tokens)
        shared = end <= row.shared_tokens
        key = ("application", row.application, start, end) if shared else ("owner", row.owner, start, end)
        return self._by_block.setdefault(key, len(self._by_block))


def _line(row: _Row, ids: _Ids) -> bytes:
    fields = {
        "timestamp": row.timestamp_ms,
        "input_length": row.input_tokens,
        "output_length": row.output_tokens,
        "hash_ids": ids.of(row),
    }
    return json.dumps(fields).encode() + b"\n"
