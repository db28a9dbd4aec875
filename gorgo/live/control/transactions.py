"""Durable changes, one at a time: request, plan, write, apply.

Theory of operation: a change is planned in full, written to the state file in a thread, and then applied in one step
of the event loop. If the write fails, the change is refused and nothing differs. A process that is killed between
write and apply starts with the written state. Each change runs in its own task, so that a cancelled caller cannot
separate write and apply.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from typing import Any

from gorgo.errors import StateError
from gorgo.live.control.state_file import PersistedState, StateFile
from gorgo.live.logs import log
from gorgo.live.telemetry.metrics import Metrics


@dataclass(frozen=True, slots=True, kw_only=True)
class ChangeRequest:
    """Options of a change of weights.

    Parameters
    ----------
    expected_version:
        The change is refused if another version is in force. `None`: any version.
    allow_out_of_range:
        Accept values outside the policy's range.
    reason, by:
        For the history and the message of a freeze.
    source:
        The requester in one word, as `admin` or `reload`.
    """

    expected_version: int | None = None
    allow_out_of_range: bool = False
    reason: str | None = None
    by: str | None = None
    source: str = "admin"


@dataclass(frozen=True, slots=True)
class WeightsChange:
    """One version, and the wall-clock time at which it was applied."""

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
    """The state to write, and the step that applies it."""

    state: PersistedState
    apply: Callable[[], None]


class ChangeQueue:
    """Runs one change at a time and writes each before it is applied.

    Parameters
    ----------
    file:
        The state file. Without one `durable` is false: changes end with the process.
    """

    def __init__(self, file: StateFile | None, metrics: Metrics) -> None:
        self._file = file
        self._metrics = metrics
        self._lock = asyncio.Lock()
        self._running: set[asyncio.Task[None]] = set()

    @property
    def durable(self) -> bool:
        """Whether changes outlive the process."""
        return self._file is not None

    @property
    def busy(self) -> bool:
        """Whether a change runs or is queued."""
        return bool(self._running)

    async def execute(self, plan: Callable[[], PlannedChange]) -> None:
        """Plan, write and apply one change after all earlier ones. Raises what `plan` raises, and `StateError`."""
        task = asyncio.create_task(self._run(plan))
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        await asyncio.shield(task)

    @asynccontextmanager
    async def paused(self, in_force: Callable[[], PersistedState]) -> AsyncIterator[None]:
        """Block other changes, then write the state in force. A failed write is logged."""
        async with self._lock:
            yield
            await self.persist(in_force())

    async def persist(self, state: PersistedState) -> None:
        """Write the state; log a failure."""
        try:
            await self.write(state)
        except StateError as error:
            log("state_not_written", level=logging.ERROR, error=str(error))

    async def write(self, state: PersistedState) -> None:
        """Write the state. Raises `StateError`."""
        if self._file is None:
            return
        try:
            await asyncio.to_thread(self._file.write, state)
        except StateError:
            self._metrics.state_written(False)
            raise
        self._metrics.state_written(True)

    async def aclose(self) -> None:
        """Wait for running changes."""
        await asyncio.gather(*self._running, return_exceptions=True)

    async def _run(self, plan: Callable[[], PlannedChange]) -> None:
        async with self._lock:
            planned = plan()
            await self.write(planned.state)
            planned.apply()
