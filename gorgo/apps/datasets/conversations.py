"""The generator of short chat traces: conversations side by side, long prompts, many turns, high reuse."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from gorgo.apps.datasets.distributions import RandomDraws
from gorgo.apps.datasets.shape import WorkloadShape
from gorgo.apps.datasets.synthetic import MadeRow

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
        for place in range(self._shape.conversations):
            now_s = self._shape.ramp_s * place / self._shape.conversations
            while now_s < self._shape.duration_s:
                rows, now_s = self._conversation(now_s)
                yield from rows

    def _singles(self) -> Iterator[MadeRow]:
        shape, now_s = self._shape, 0.0
        while shape.single_per_s > 0:
            now_s += self._draws.exponential(1 / shape.single_per_s)
            if now_s >= shape.duration_s:
                return
            own = self._draws.log_normal(shape.single_median, shape.single_sigma)
            yield self._row(now_s, self._begin(), own)

    def _conversation(self, now_s: float) -> tuple[list[MadeRow], float]:
        """Its requests, and when its place is free again."""
        shape, draws = self._shape, self._draws
        user, rows = self._begin(), list[MadeRow]()
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
