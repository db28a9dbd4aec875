"""Waiting for the leadership, and tuning while this process has it.

Theory of operation: a candidate that does not lead is a standby and tries again each second. As the leader it opens
the campaign from the history, so it resumes what an earlier leader had written. Without the leadership it puts nothing
more, not even the incumbent: the next leader puts what the history says. A standby whose campaign ended meanwhile ends.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from gorgo.errors import LeadershipLost, TunerError
from tuner.leader.candidate import Leadership
from tuner.sidecar.metrics import TunerMetrics
from tuner.sidecar.progress import Reporter

#: Between two attempts of a standby.
RETRY_S = 1.0


async def lead(
    leadership: Leadership,
    tune: Callable[[bool], Awaitable[bool]],
    reporter: Reporter,
    metrics: TunerMetrics,
    stop: asyncio.Event,
    *,
    wait: Callable[[asyncio.Event, float], Awaitable[None]],
) -> bool:
    """Call `tune` with each leadership until it ends by itself or `stop` is set; return whether all is in order.

    The argument of `tune` is whether another process may have led before. Raises `TunerError` at once where a second
    candidate cannot wait.
    """
    waited, said = False, ""
    while not stop.is_set():
        reason = await leadership.try_to_lead()
        if reason is not None:
            if not leadership.has_standby:
                raise TunerError(f"{reason}; a standby needs a history in PostgreSQL, or `shared` in --config")
            if reason != said:
                reporter.say(f"standby: {reason}")
            waited, said = True, reason
            await wait(stop, RETRY_S)
            continue
        if waited:
            reporter.say("leader: takes over from the history")
        metrics.leader(True)
        try:
            return await tune(waited)
        except LeadershipLost as lost:
            reporter.complain(f"standby: {lost}; puts nothing more")
            waited, said = True, ""
        finally:
            metrics.leader(False)
            await leadership.release()
    return True
