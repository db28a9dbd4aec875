"""How much of what one process can do is in use, by resource: what an autoscaler of proxies reads.

The fleet behind the proxy is no part of it: more proxies do not make engines faster.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from time import monotonic, process_time

from gorgo.core.buffer_budget import BufferBudget
from gorgo.core.router import Router

#: Shortest window of the processor's share: two servers may scrape a moment apart.
MIN_WINDOW_S = 5.0


class Saturation:
    """The shares of one process, from 0 to 1.

    Parameters
    ----------
    wall, processor:
        Clocks; the second one counts the time of this process on a processor. It has one event loop, so 1 is the most
        that it gets done.
    """

    def __init__(
        self,
        router: Router,
        buffers: BufferBudget,
        *,
        wall: Callable[[], float] = monotonic,
        processor: Callable[[], float] = process_time,
    ) -> None:
        self._router = router
        self._buffers = buffers
        self._wall = wall
        self._processor = processor
        self._from = wall(), processor()
        self._share = 0.0

    def shares(self) -> Iterator[tuple[str, float]]:
        """Yield resource and share."""
        yield "requests", min(1.0, self._router.in_flight / self._router.settings.limits.max_in_flight)
        yield "buffers", min(1.0, self._buffers.used_bytes / self._buffers.limit_bytes)
        yield "processor", self._processor_share()

    def _processor_share(self) -> float:
        """Return the share since the last window's end, or that of the window before while a new one is short."""
        wall_s, processor_s = self._wall(), self._processor()
        before_wall_s, before_processor_s = self._from
        if wall_s - before_wall_s >= MIN_WINDOW_S:
            self._share = min(1.0, max(0.0, (processor_s - before_processor_s) / (wall_s - before_wall_s)))
            self._from = wall_s, processor_s
        return self._share
