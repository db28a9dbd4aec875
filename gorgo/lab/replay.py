"""The loop of a replay: each request is sent at its time in the trace, whether or not earlier ones have ended.

In a closed loop the turns of a session follow each other instead: each is sent a think time after the answer before it.

Owns the loop and its progress on stderr. Leaves one request and its record to `gorgo.lab.replay_client`. Bodies are
built while nothing is due. Latency counts from the scheduled time; lateness is measured as slip, not hidden.
"""

from __future__ import annotations

import asyncio
import gc
import json
import secrets
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, suppress
from pathlib import Path
from signal import Signals
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn

from gorgo.config.atomic import create_text_file
from gorgo.errors import TraceError
from gorgo.lab.datasets import load_requests, own_block_tokens, unit_warning
from gorgo.lab.progress import ProgressDisplay, progress_display
from gorgo.lab.prompt_text import beginning, body_of, is_keyed, largest_share, warning
from gorgo.lab.replay_client import (
    ReplayClient,
    ReplayOptions,
    ReplayRecord,
    ReplayReport,
    Tally,
    first_model,
    open_http,
    wait_for_port,
)
from gorgo.lab.results import write_results
from gorgo.lab.termination import stop_signals
from gorgo.lab.traces import TraceRequest, next_turns, scheduled_s
from gorgo.policies.registry import make_policy, policy_names

#: Bodies built ahead of time. The largest burst on one stamp of the traces in use is 28; 100 kB each is 3 MB.
LOOK_AHEAD = 32


class BodiesAhead:
    """Requests with their bodies, in order; idle time is used to build the next few."""

    def __init__(self, requests: Sequence[TraceRequest], model: str, *, look_ahead: int = LOOK_AHEAD) -> None:
        self._left: Iterator[TraceRequest] = iter(requests)
        self._model = model
        self._look_ahead = look_ahead
        self._ready: deque[tuple[TraceRequest, bytes]] = deque()

    def build_one(self) -> bool:
        """Builds one more body; False when enough are ready or none is left."""
        request = next(self._left, None) if len(self._ready) < self._look_ahead else None
        if request is None:
            return False
        self._ready.append((request, body_of(request, self._model)))
        return True

    def next(self) -> tuple[TraceRequest, bytes] | None:
        """The next request and its body; None at the end."""
        if not self._ready:
            self.build_one()
        return self._ready.popleft() if self._ready else None


#: So that the longest policy's name, the bar and the status fit 80 characters.
BAR_WIDTH = 8


class ReplayProgress:
    """The progress of a replay. The replay sets `in_flight`; the rest is read from the tally."""

    def __init__(self, tally: Tally, total: int, label: str, console: Console | None = None) -> None:
        self._tally = tally
        self._total = total
        self._label = label
        self._console = console
        self.in_flight = 0

    def status(self) -> str:
        """Return the state of the replay as text."""
        p95_s = self._tally.ttft_s_p95()
        ttft = "-" if p95_s is None else f"{p95_s * 1000:,.0f} ms"
        return f"{self.in_flight} in flight, {self._tally.error_count} errors, TTFT p95 {ttft}"

    @asynccontextmanager
    async def displayed(self) -> AsyncIterator[None]:
        """Show progress while the body runs, and its result."""
        columns = (BarColumn(bar_width=BAR_WIDTH), MofNCompleteColumn())
        with progress_display(self._label, self._total, *columns, console=self._console) as display:
            task = asyncio.create_task(self._show(display), name="replay progress")
            try:
                yield
            finally:
                task.cancel()
                with suppress(asyncio.CancelledError):
                    await task
                display.update(self._tally.n, self.status())

    async def _show(self, display: ProgressDisplay) -> None:
        while True:
            await asyncio.sleep(display.interval_s)
            display.update(self._tally.n, self.status())


#: Between building the first bodies and the first request.
LEAD_S = 0.1
#: No body is begun this shortly before a request is due; the largest takes about a millisecond.
QUIET_S = 0.003


def replay_command(options: ReplayOptions) -> ReplayReport:
    """Load the trace, replay it and write the files of `gorgo replay`; SIGINT and SIGTERM end it early.

    Raises `TraceError` for the trace, and `ReplayError` if the router cannot be reached or does not name its model.
    Failed requests are counted, never raised.
    """
    block_tokens = own_block_tokens(options.trace)
    requests = load_requests(options.trace, options.filters, seed=options.filters.seed, block_tokens=block_tokens)
    if options.closed_loop and all(request.session is None for request in requests):
        raise TraceError(f"{options.trace}: no request has a session; expected session_id in rows, or --user-sessions")

    async def until_signal() -> ReplayReport:
        with stop_signals() as stop:
            return await replay(requests, options, stop=stop)

    return asyncio.run(until_signal())


async def replay(
    requests: Sequence[TraceRequest],
    options: ReplayOptions,
    *,
    clock: Callable[[], float] = time.monotonic,
    stop: asyncio.Future[Signals] | None = None,
) -> ReplayReport:
    """Replay requests that are loaded already, to the end or until `stop` has a signal.

    The result of an interrupted replay is of the requests that have ended.
    """
    run = _Run(requests, options, clock)
    ended = await _ended_before(stop, run.work())
    row = run.tally.row(options, planned=len(requests))
    if options.out is not None and run.start_s is not None:
        write_results(options.out, [row])
    return ReplayReport(
        row=row,
        warning="; ".join(filter(None, _warnings(options, row.policy, requests))) or None,
        wall_s=0.0 if run.start_s is None else clock() - run.start_s,
        interrupted_by=None if ended or stop is None else stop.result(),
    )


def _warnings(options: ReplayOptions, policy: str | None, requests: Sequence[TraceRequest]) -> Iterator[str | None]:
    """Yield the warnings about the trace."""
    span_s = requests[-1].timestamp_s - requests[0].timestamp_s if requests else 0.0
    yield unit_warning(options.trace, len(requests), span_s)
    yield None if policy is None else _key_warning(policy, requests)


def _key_warning(policy: str, requests: Sequence[TraceRequest]) -> str | None:
    if policy not in policy_names() or not is_keyed(make_policy(policy)):
        return None
    return warning(policy, largest_share(request.session or beginning(request) for request in requests))


async def _ended_before(stop: asyncio.Future[Signals] | None, work: Coroutine[Any, Any, None]) -> bool:
    """Run the work until it ends or `stop` is done; return whether it ended."""
    task = asyncio.create_task(work, name="replay")
    ends: set[asyncio.Future[Any]] = {task} if stop is None else {task, stop}
    try:
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            task.result()
        return task.done()
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


class _Run:
    """One replay. `tally` has the requests that have ended; `start_s` is None before the first is due."""

    def __init__(self, requests: Sequence[TraceRequest], options: ReplayOptions, clock: Callable[[], float]) -> None:
        self.tally = Tally()
        self.start_s: float | None = None
        self._requests, self._options, self._clock = requests, options, clock

    async def work(self) -> None:
        """Reach the router, then send every request and read its answer."""
        options, clock = self._options, self._clock
        async with AsyncExitStack() as stack:
            await wait_for_port(options.url, wait_s=options.port_wait_s, on_wait=self._say_that_it_waits)
            http = await stack.enter_async_context(open_http(options))
            model = options.model or await first_model(http, options.url)
            write = stack.enter_context(_requests_file(options.out))
            progress = ReplayProgress(self.tally, len(self._requests), options.label)
            if options.show_progress:
                await stack.enter_async_context(progress.displayed())
            stack.enter_context(_quiet_gc())
            start_s = self.start_s = clock() + LEAD_S
            client = ReplayClient(http, options, clock=clock, start_s=start_s, run=secrets.token_hex(4))
            turns = next_turns(self._requests) if options.closed_loop else {}
            followers = {turn.index for turn, _ in turns.values()}
            first = [request for request in self._requests if request.index not in followers]
            loop = _Loop(client, options, progress, turns, model, clock=clock, start_s=start_s)
            await loop.run(BodiesAhead(first, model), done=(self.tally.add, write))

    def _say_that_it_waits(self) -> None:
        if self._options.show_progress:
            words = f"waiting for {self._options.url}, at most {self._options.port_wait_s:g} s"
            Console(stderr=True, soft_wrap=True, highlight=False).print(f"gorgo: {words}", markup=False)


class _Loop:
    """Sends on time, at most `max_in_flight` at once; beyond that a request waits and its slip shows it.

    `turns` has what is sent after the end of a request, by its index, and how long after; a failed one is followed too.
    """

    def __init__(
        self,
        client: ReplayClient,
        options: ReplayOptions,
        progress: ReplayProgress,
        turns: Mapping[int, tuple[TraceRequest, float]],
        model: str,
        *,
        clock: Callable[[], float],
        start_s: float,
    ) -> None:
        self._client = client
        self._time_scale = options.time_scale
        self._slots = asyncio.Semaphore(options.max_in_flight)
        self._progress = progress
        self._turns, self._model = turns, model
        self._clock = clock
        self._start_s = start_s

    async def run(self, bodies: BodiesAhead, *, done: Sequence[Callable[[ReplayRecord], None]]) -> None:
        async with asyncio.TaskGroup() as group:
            while (item := bodies.next()) is not None:
                request, body = item
                due_s = scheduled_s(request, self._time_scale)
                await self._wait_until(due_s, bodies)
                await self._slots.acquire()
                group.create_task(self._one(request, body, due_s, done))

    async def _wait_until(self, due_s: float, bodies: BodiesAhead) -> None:
        while self._left_s(due_s) > QUIET_S and bodies.build_one():  # noqa: ASYNC110 - lets answers in between bodies
            await asyncio.sleep(0)
        await asyncio.sleep(max(0.0, self._left_s(due_s)))

    async def _one(
        self, request: TraceRequest, body: bytes, due_s: float, done: Sequence[Callable[[ReplayRecord], None]]
    ) -> None:
        """Send a request, and in a closed loop the turns that follow it."""
        while True:
            self._progress.in_flight += 1
            try:
                record = await self._client.send(request, body, due_s)
                for take in done:
                    take(record)
            finally:
                self._progress.in_flight -= 1
                self._slots.release()
            if request.index not in self._turns:
                return
            request, think_s = self._turns[request.index]
            due_s = self._clock() - self._start_s + think_s * self._time_scale
            body = body_of(request, self._model)
            await asyncio.sleep(max(0.0, self._left_s(due_s)))
            await self._slots.acquire()

    def _left_s(self, due_s: float) -> float:
        return self._start_s + due_s - self._clock()


@contextmanager
def _requests_file(out: Path | None) -> Iterator[Callable[[ReplayRecord], None]]:
    """Write each record as it ends: an interrupted replay keeps its records."""
    if out is None:
        yield lambda _: None
        return
    out.mkdir(parents=True, exist_ok=True)
    with create_text_file(out / "requests.jsonl") as file:
        yield lambda record: print(json.dumps(record.as_json()), file=file)


@contextmanager
def _quiet_gc() -> Iterator[None]:
    """Freeze the objects of the trace: a garbage collection over them would appear as latency.

    What a caller has frozen before stays so.
    """
    frozen = gc.get_freeze_count() > 0
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        if not frozen:
            gc.unfreeze()
