"""The process that trains, as a neighbour of the event loop."""

from __future__ import annotations

import signal
from time import process_time

from gorgo.live.training.worker import PAUSE_S, SLICE_S, pace


def test_it_pauses_after_each_slice_of_processor_time() -> None:
    pauses: list[float] = []
    handler = signal.getsignal(signal.SIGVTALRM)
    try:
        pace(pauses.append)
        end_s = process_time() + 12 * SLICE_S
        while process_time() < end_s:
            pass
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0.0)
        signal.signal(signal.SIGVTALRM, handler)
    assert len(pauses) >= 4, "so coarse is the clock of the slowest kernel"
    assert set(pauses) == {PAUSE_S}
