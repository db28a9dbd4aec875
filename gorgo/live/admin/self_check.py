"""The answer of `GET /admin/check`: every invariant of the Router, and a count of open resources.

It visits the whole prefix index in one step of the event loop, so it is off unless the process has
`GORGO_INTERNAL_ROUTES=1`.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gorgo.core.buffer_budget import BufferBudget
    from gorgo.core.router import Router
    from gorgo.live.state import LiveState


def self_check(state: LiveState) -> dict[str, Any]:
    """Return open resources and the first violated invariant, `None` if all hold."""
    router = state.routing.router
    return {
        "violation": _violation(router, state.buffers),
        "index": {"blocks": router.index.stored_blocks, "nodes": router.index.nodes},
        "in_flight": router.in_flight,
        "queued": router.queued,
        "exchanges": len(state.exchanges),
        "buffered_bytes": state.buffers.used_bytes,
        "buffers": len(state.buffers),
        "draining": len(state.replicas.draining_targets),
        "active": {name: target.active for name, target in state.replicas.targets.items()},
        "open_responses": {name: target.upstream.open_responses for name, target in state.replicas.targets.items()},
        "connections": {name: target.upstream.connections for name, target in state.replicas.targets.items()},
        "tasks": dict(Counter(_name(task) for task in asyncio.all_tasks())),
    }


def _violation(router: Router, buffers: BufferBudget) -> str | None:
    try:
        router.check()
        buffers.check()
    except AssertionError as broken:
        return str(broken) or _place(broken)
    return None


def _place(broken: AssertionError) -> str:
    """Return the place of an assertion without a message."""
    at = broken.__traceback__
    while at is not None and at.tb_next is not None:
        at = at.tb_next
    return "an assertion" if at is None else f"{at.tb_frame.f_code.co_qualname}, line {at.tb_lineno}"


def _name(task: asyncio.Task[Any]) -> str:
    """Return the name of the coroutine, equal for all tasks of one kind."""
    return getattr(task.get_coro(), "__qualname__", "unknown")
