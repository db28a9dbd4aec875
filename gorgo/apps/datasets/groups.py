"""The generator of groups: users behind shared system prompts, each in conversations of their own."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from gorgo.apps.datasets.distributions import RandomDraws
from gorgo.apps.datasets.prefix_shapes import GroupsShape
from gorgo.apps.datasets.synthetic import MadeRow
from gorgo.core.prompt.boundaries import bounded


@dataclass(slots=True)
class _GroupUser:
    number: int
    group: int
    ready_s: float = 0.0
    conversation: int = 0
    #: Requests of the conversation that are still to come.
    turns_left: int = 0
    turn: int = 0
    own_tokens: float = 0.0
    #: Ends of the messages so far, in tokens of the conversation.
    ends: list[int] = field(default_factory=list)


def group_rows(shape: GroupsShape) -> Iterator[MadeRow]:
    """The requests in the order of time."""
    return _GroupTraffic(shape).generate()


class _GroupTraffic:
    def __init__(self, shape: GroupsShape) -> None:
        self._shape = shape
        self._draws = draws = RandomDraws(shape.seed)
        self._systems = [round(draws.log_normal(shape.system_median, shape.system_sigma)) for _ in range(shape.groups)]
        self._users = [_GroupUser(number, draws.rank(shape.groups)) for number in range(shape.users)]
        self._conversations = 0

    def generate(self) -> Iterator[MadeRow]:
        now_s = 0.0
        while True:
            now_s += self._draws.exponential(1 / self._shape.rate_per_s)
            if now_s >= self._shape.duration_s:
                return
            yield self._request(self._next_user(now_s), now_s)

    def _next_user(self, now_s: float) -> _GroupUser:
        """Return a user drawn at random, or the next one whose pause is over; the first drawn if none's is."""
        first = self._draws.below(len(self._users))
        places = (first + step for step in range(len(self._users)))
        ready = (self._users[place % len(self._users)] for place in places)
        return next((user for user in ready if user.ready_s <= now_s), self._users[first])

    def _request(self, user: _GroupUser, now_s: float) -> MadeRow:
        shape, draws, system_tokens = self._shape, self._draws, self._systems[user.group]
        if not user.turns_left or system_tokens + user.own_tokens >= shape.input_max:
            self._begin(user, system_tokens)
        user.own_tokens += max(1.0, draws.log_normal(shape.turn_median, shape.turn_sigma))
        user.turn += 1
        user.turns_left -= 1
        output = max(1, min(shape.output_max, round(draws.log_normal(shape.output_median, shape.output_sigma))))
        user.ready_s = now_s + shape.think_s_min + output * shape.answer_token_s
        input_tokens = min(shape.input_max, system_tokens + max(1, round(user.own_tokens)))
        user.ends.append(input_tokens)
        row = MadeRow(
            timestamp_ms=int(1000 * now_s),
            shared=("group", user.group),
            shared_tokens=min(system_tokens, shape.input_max - 1),
            own=("conversation", user.conversation),
            input_tokens=input_tokens,
            output_tokens=output,
            user=f"user-{user.number}",
            turn=user.turn,
            boundaries=tuple(bounded(user.ends)),
        )
        user.own_tokens += output
        user.ends.append(input_tokens + output)
        return row

    def _begin(self, user: _GroupUser, system_tokens: int) -> None:
        shape, draws = self._shape, self._draws
        self._conversations += 1
        user.conversation = self._conversations
        user.turns_left, user.turn = draws.geometric(shape.turns_mean), 0
        user.own_tokens = draws.log_normal(shape.history_median, shape.history_sigma) if shape.history_median else 0.0
        history = round(user.own_tokens)
        user.ends = [system_tokens, system_tokens + history] if history else [system_tokens]
