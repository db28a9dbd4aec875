"""The load of one Router's open attempts per replica, as its report has it."""

from __future__ import annotations

from collections.abc import Iterable

from gorgo.core.dispatch.in_flight import Attempt, InFlightTable
from gorgo.core.fleet.replica import Replica
from gorgo.core.peers.records import ReplicaLoad


def own_loads(table: InFlightTable, *, now: float) -> Iterable[ReplicaLoad]:
    """Yield the load of each replica with an open attempt."""
    by_replica: dict[Replica, list[Attempt]] = {}
    for attempt in table.attempts():
        by_replica.setdefault(attempt.replica, []).append(attempt)
    for replica, attempts in by_replica.items():
        if replica.slot < 0:
            continue
        waiting = [each for each in attempts if each.first_token_s is None]
        first_s = [each.first_token_s for each in attempts if each.first_token_s is not None]
        yield ReplicaLoad(
            replica.spec.name,
            len(attempts),
            sum(each.state.request.prompt_tokens for each in attempts),
            len(waiting),
            sum(each.state.request.prompt_tokens for each in waiting),
            sum(each.uncached_tokens for each in waiting),
            replica.prefill_queue.left_s(engine_s=now),
            max(0.0, len(first_s) * now - sum(first_s)),
        )
