"""The generator of Poisson arrivals: many users with short questions and few conversations."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

from gorgo.apps.datasets.distributions import RandomDraws
from gorgo.apps.datasets.shape import PoissonShape
from gorgo.apps.datasets.synthetic import MadeRow, TextName

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
