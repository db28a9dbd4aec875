"""`gorgo serve`, the whole command, with a window: at SIGUSR1 it writes what it holds to a file.

    python -m tests.soak.served FILE serve --config regions.yaml

Nothing else is changed: the command line, its settings of the garbage collector and its signals are those of `gorgo`.
`FILE` is replaced as a whole at each look, so that a reader never sees half of one. With `GORGO_SOAK_TRACE` set, the
ten places that have allocated most since the look before are said on standard error.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import tracemalloc
from collections.abc import Callable
from pathlib import Path

from gorgo.cli import main
from gorgo.live import process
from gorgo.live.build import build_live
from gorgo.live.state import LiveState
from tests.bench.relay.measure import resident_bytes
from tests.soak.ledgers import Ledgers

TRACE_VARIABLE = "GORGO_SOAK_TRACE"
#: Frames per allocation, and places that are shown.
FRAMES, PLACES = 6, 12


def look(state: LiveState, number: int) -> Ledgers:
    """Everything that is open in this process now. The Router's parts are read where they are."""
    router = state.routing.router
    views = router.view.snapshots(now=state.routing.clock())
    targets = (*state.replicas.targets.values(), *state.replicas.draining_targets)
    return Ledgers(
        number=number,
        in_flight=router.in_flight,
        held=router.queued,
        exchanges=len(state.exchanges),
        addressees=len(state.routing.gateway._open),
        sources=sum(target.upstream.open_responses for target in targets),
        replica_requests=sum(view.in_flight_requests for view in views),
        replica_tokens=sum(view.in_flight_tokens for view in views),
        queued_prefill_tokens=sum(view.queued_prefill_tokens for view in views),
        clocked=sum(len(member.prefill_queue) for member in router._fleet.replicas.values()),
        clients={name: account.in_flight for name, account in router.quotas._quotas.items()},
        retries_spent=router._lifecycle._retries._spent,
        hedges_spent=router._hedger._budget._spent,
        hedge_watch=len(router._hedger.watched),
        drop_watch=len(router._admission._shed_timers),
        tasks=len(asyncio.all_tasks()),
        fds=len(os.listdir("/proc/self/fd")) - 1,  # less the one that lists them
        resident=resident_bytes([os.getpid()]),
        index_blocks=sum(view.index_blocks for view in views),
        samples=len(list(router.samples)),
        faults=_faults(router.check),
    )


def _faults(check: Callable[[], None]) -> str:
    try:
        check()
    except AssertionError as fault:
        return str(fault) or "an invariant of index, ledger or clocks does not hold"
    return ""


class Window:
    """What a process that serves holds, in a file."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._looks = 0
        self._before: tracemalloc.Snapshot | None = None

    def open_here(self) -> None:
        """Open the window of this process once it serves."""
        setattr(process, "build_live", self.open)  # noqa: B010 - the name that the process calls

    def open(self, *args: object, **kwargs: object) -> LiveState:
        """In place of `build_live`: the same, and looked at from then on."""
        state = build_live(*args, **kwargs)  # type: ignore[arg-type]  # handed on as they came
        asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, self._write, state)
        if os.environ.get(TRACE_VARIABLE):
            tracemalloc.start(FRAMES)
        return state

    def _write(self, state: LiveState) -> None:
        self._looks += 1
        whole = self._file.with_suffix(".part")
        whole.write_text(look(state, self._looks).as_text())
        whole.replace(self._file)
        if tracemalloc.is_tracing():
            self._compare()

    def _compare(self) -> None:
        taken = tracemalloc.take_snapshot()
        if self._before is not None:
            for place in taken.compare_to(self._before, "traceback")[:PLACES]:
                sys.stderr.write(f"{place}\n" + "\n".join(place.traceback.format()) + "\n")
        self._before = taken


if __name__ == "__main__":
    Window(Path(sys.argv.pop(1))).open_here()
    main()
