"""A change of what the proxy routes by: who orders it, what is remembered of it, and how it is carried out.

Owns that changes come one at a time and that what is answered as done outlives the process. What may be changed, and
to what, is `steering`'s; the file is `kept`'s.

Theory of operation: a change is planned in full, then written to the state file (in a thread: a disk that hangs stops
no stream), and only then, in one step, put in force. If the file cannot be written the change is refused and nothing
differs. A process that is killed in between has written what it was about to do. The change runs in a task of its own,
so that a caller who leaves cannot part the writing from the doing.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from typing import Any

from gorgo.errors import StateError
from gorgo.proxy.control.state_file import PersistedState, StateFile
from gorgo.proxy.logs import log
from gorgo.proxy.telemetry.metrics import Metrics


@dataclass(frozen=True, slots=True, kw_only=True)
class ChangeRequest:
    """What comes with every change of weights.

    Parameters
    ----------
    expected_version:
        The version that the caller has seen; another one in force refuses the change. `None`: whatever it is.
    widen:
        Take values outside the policy's box.
    reason, by:
        For the history and for whoever finds the weights frozen.
    source:
        Who asks, in a word.
    """

    expected_version: int | None = None
    allow_out_of_range: bool = False
    reason: str | None = None
    by: str | None = None
    source: str = "admin"


@dataclass(frozen=True, slots=True)
class WeightsChange:
    """One version, as it came into force at a wall-clock time."""

    version: int
    policy: str
    weights: Mapping[str, float]
    at: str
    source: str
    reason: str | None = None
    by: str | None = None

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, slots=True)
class PlannedChange:
    """What is to be kept, and the step that puts it in force."""

    state: PersistedState
    apply: Callable[[], None]


class ChangeQueue:
    """One at a time, each written before it is in force.

    Parameters
    ----------
    file:
        Where what is in force is kept; without one nothing outlives the process, and `durable` says so.
    """

    def __init__(self, file: StateFile | None, metrics: Metrics) -> None:
        self._file = file
        self._metrics = metrics
        self._lock = asyncio.Lock()
        self._at_work: set[asyncio.Task[None]] = set()

    @property
    def durable(self) -> bool:
        """Whether what is set outlives the process."""
        return self._file is not None

    @property
    def busy(self) -> bool:
        """Whether a change is under way, or waits for its turn."""
        return bool(self._at_work)

    async def execute(self, plan: Callable[[], PlannedChange]) -> None:
        """Plan, write and do, when it is this one's turn. Raises what `plan` raises, and `StateError`."""
        task = asyncio.create_task(self._in_turn(plan))
        self._at_work.add(task)
        task.add_done_callback(self._at_work.discard)
        await asyncio.shield(task)

    @asynccontextmanager
    async def is_paused(self, in_force: Callable[[], PersistedState]) -> AsyncIterator[None]:
        """Nothing else is changed within. What is in force at its end is kept as far as the disk allows."""
        async with self._lock:
            yield
            await self.persist(in_force())

    async def persist(self, kept: PersistedState) -> None:
        """Write what is in force anyway; a disk that refuses is said in the log."""
        try:
            await self.write(kept)
        except StateError as error:
            log("state_not_written", level=logging.ERROR, error=str(error))

    async def write(self, kept: PersistedState) -> None:
        """Raises `StateError`."""
        if self._file is None:
            return
        try:
            await asyncio.to_thread(self._file.write, kept)
        except StateError:
            self._metrics.state_written(False)
            raise
        self._metrics.state_written(True)

    async def aclose(self) -> None:
        """Wait for a change that is under way."""
        await asyncio.gather(*self._at_work, return_exceptions=True)

    async def _in_turn(self, plan: Callable[[], PlannedChange]) -> None:
        async with self._lock:
            made = plan()
            await self.write(made.state)
            made.apply()
