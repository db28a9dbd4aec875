"""The state behind the routes of one simulated replica: engine, RTT, faults and open requests.

Owns the path of a request into the engine and of its response back, the engine model in wall time (`StepLoop`,
`Deliveries`), and the faults that a test or a demonstration injects. The routes read bodies and write answers.

At most one fault is active; a new one replaces it. It lasts for `count` requests that generate, or for `seconds`, or
until it is replaced.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from heapq import heappop, heappush
from math import inf
from time import monotonic, time
from typing import Any, Generic, Protocol
from uuid import uuid4
from weakref import WeakKeyDictionary
from zlib import crc32

import numpy as np
from aiohttp import web

from gorgo.core.lru import Lru
from gorgo.errors import BadRequest
from gorgo.lab.engine_server.cache_reports import KvEventPublisher
from gorgo.lab.engine_server.stats import EngineStats, VllmStats
from gorgo.lab.engine_server.streams import Served, Tape
from gorgo.lab.sim.engine.engines import Engine, make_engine
from gorgo.lab.sim.engine.profiles import EngineProfile
from gorgo.lab.sim.engine.request import RequestT, Stage, Step
from gorgo.lab.sim.network import Link, Path, SimConnection


class FaultKind(Enum):
    """Kind of a fault."""

    NONE = "none"
    #: The connection is reset before any answer; while it lasts without a count, on probes as well.
    REFUSE = "refuse"
    #: Status 500 after the round trip, without any work.
    ERROR = "500"
    #: The engine works, but nothing of the response ever comes.
    HANG_BEFORE_FIRST_TOKEN = "hang_before_first_token"
    #: Nothing more comes after half of the tokens.
    HANG_MID_STREAM = "hang_mid_stream"
    #: The connection is reset after half of the tokens.
    RESET_MID_STREAM = "reset_mid_stream"
    #: Every step takes `factor` times as long.
    SLOW = "slow"


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineFault:
    """One injected fault."""

    kind: FaultKind
    count: int | None = None
    seconds: float | None = None
    factor: float = 3.0


class EngineFaults:
    """The fault that is active now, if any."""

    def __init__(self) -> None:
        self._fault = EngineFault(kind=FaultKind.NONE)
        self._left: int | None = None
        self._until_s: float | None = None

    def inject(self, fault: EngineFault, *, now: float) -> None:
        self._fault = fault
        self._left = fault.count
        self._until_s = None if fault.seconds is None else now + fault.seconds

    def next_kind(self, *, now: float) -> FaultKind:
        """Return the fault of a generating request, and count it."""
        kind = self.active(now=now)
        if self._left is not None and kind is not FaultKind.NONE:
            self._left -= 1
        return kind

    def refuses_all(self, *, now: float) -> bool:
        """Whether probes are refused too."""
        return self.active(now=now) is FaultKind.REFUSE and self._left is None

    def slowdown(self, *, now: float) -> float:
        """By how much every step is longer."""
        return self._fault.factor if self.active(now=now) is FaultKind.SLOW else 1.0

    def active(self, *, now: float) -> FaultKind:
        ended = (self._left is not None and self._left <= 0) or (self._until_s is not None and now >= self._until_s)
        return FaultKind.NONE if ended else self._fault.kind


def read_fault(body: object) -> EngineFault:
    """Read the body of `POST /sim/faults`; raises `BadRequest`."""
    if not isinstance(body, Mapping):
        raise BadRequest("the body is not a JSON object")
    unknown = set(body) - {"kind", "count", "seconds", "factor"}
    if unknown:
        raise BadRequest(f"unknown {', '.join(sorted(map(str, unknown)))}; known are kind, count, seconds, factor")
    try:
        kind = FaultKind(str(body.get("kind")))
    except ValueError:
        names = ", ".join(kind.value for kind in FaultKind)
        raise BadRequest(f"kind is {body.get('kind')!r}, expected one of {names}") from None
    count = _positive(body, "count", int)
    if kind is FaultKind.SLOW and count is not None:
        raise BadRequest("slow concerns the whole engine: say for how many seconds, not a count")
    factor = _positive(body, "factor", float)
    return EngineFault(
        kind=kind,
        count=None if count is None else int(count),
        seconds=_positive(body, "seconds", float),
        factor=3.0 if factor is None else factor,
    )


def _positive(body: Mapping[str, Any], name: str, kind: type[int] | type[float]) -> float | None:
    value = body.get(name)
    if value is None:
        return None
    allowed = (int,) if kind is int else (int, float)
    if isinstance(value, bool) or not isinstance(value, allowed) or not 0 < value < 1e9:
        raise BadRequest(f"{name} must be a positive {'whole number' if kind is int else 'number'}")
    return value


# The engine model in wall time: the step loop, and the delivery of its tokens after their trip.
#
# `StepLoop` calls the model at the scheduled ends of its steps; `Deliveries` hands each piece of a response to its
# stream when it would have arrived. The streams decide the contents.
#
# Neither drifts: step k + 1 of a busy engine starts at the *scheduled* end of step k, however late the timer was, and
# a trip is counted from there. Timers of the event loop have about 1 ms of resolution, so that is the precision of a
# single event. Nothing here wakes a task per token: a step writes to all its streams from one callback.


class Stream(Protocol):
    """Where the pieces of one response arrive."""

    last_arrival_s: float

    def deliver(self, piece: bytes) -> None: ...


class StepLoop(Generic[RequestT]):
    """Drives one engine model by the wall clock.

    Parameters
    ----------
    model:
        The engine.
    emit:
        Called for each request that got a token, with the scheduled end of its step.
    """

    def __init__(self, model: Engine[RequestT], emit: Callable[[RequestT, float], None]) -> None:
        self.model = model
        self._emit = emit
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        #: Lateness of the last step: shows whether this machine keeps up with the simulated engine.
        self.lag_s = 0.0

    def submit(self, request: RequestT, now: float) -> None:
        """Hand over a request that arrived at `now`; an idle engine starts at once."""
        self.model.submit(request, now=now)
        if self._timer is None:
            self._start(now)

    def close(self) -> None:
        """Stop the engine where it is."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _start(self, now: float) -> None:
        step = self.model.start_step(now=now)
        if step is None and self.model.next_arrival_s is not None:
            step = self.model.start_step(now=max(now, self.model.next_arrival_s))
        if step is None:
            self._timer = None
        else:
            self._timer = self._loop.call_later(max(0.0, step.ends_s - monotonic()), self._finish, step)

    def _finish(self, step: Step[RequestT]) -> None:
        self.lag_s = monotonic() - step.ends_s
        emit, ended_s = self._emit, step.ends_s
        try:
            for request in self.model.finish_step(step):
                emit(request, ended_s)
        finally:
            self._start(ended_s)


class Deliveries:
    """Pieces of responses on their way back, in order per stream; those due in the same millisecond share a timer.

    A stream whose `last_arrival_s` is infinite hangs: nothing more of it arrives.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._direct = not path.link.rtt_s
        self._loop = asyncio.get_running_loop()
        self._due: dict[int, list[tuple[Stream, bytes]]] = {}
        self._heap: list[int] = []
        self._timer: asyncio.TimerHandle | None = None
        self._armed_ms = 0

    def send(self, stream: Stream, piece: bytes, sent_s: float) -> None:
        """Let `piece`, sent at `sent_s`, arrive after its trip and after all that `stream` was sent before."""
        arrival_s = self._path.arrival_s(sent_s, stream.last_arrival_s)
        if arrival_s == inf:
            return
        stream.last_arrival_s = arrival_s
        if self._direct:
            stream.deliver(piece)
            return
        due_ms = round(arrival_s * 1000)
        waiting = self._due.get(due_ms)
        if waiting is not None:
            waiting.append((stream, piece))
            return
        self._due[due_ms] = [(stream, piece)]
        heappush(self._heap, due_ms)
        self._arm()

    def close(self) -> None:
        """Drop all pieces in transit."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._due.clear()
        self._heap.clear()

    def _arm(self) -> None:
        """Have the one timer at the first millisecond at which something is due."""
        first_ms = self._heap[0]
        if self._timer is not None:
            if self._armed_ms <= first_ms:
                return
            self._timer.cancel()
        self._armed_ms = first_ms
        self._timer = self._loop.call_later(max(0.0, first_ms / 1000 - monotonic()), self._arrive)

    def _arrive(self) -> None:
        self._timer = None
        now_ms = round(monotonic() * 1000)
        while self._heap and self._heap[0] <= max(now_ms, self._armed_ms):
            for stream, piece in self._due.pop(heappop(self._heap)):
                stream.deliver(piece)
        if self._heap:
            self._arm()


#: Stored responses; each has at most the context of the engine, 128 kB, so that all have 32 MB.
MAX_RESPONSES = 256


class SimulatedReplica:
    """One engine at the end of one network path."""

    def __init__(
        self,
        *,
        name: str,
        model_name: str,
        profile: EngineProfile,
        rtt_s: float,
        jitter: float,
        seed: int,
        adapters: Sequence[str] = (),
    ) -> None:
        self.name = name
        self.model_name = model_name
        #: LoRA adapters that are loaded.
        self.adapters = tuple(adapters)
        self.engine: Engine[Served] = make_engine(profile)
        self.path = Path(Link(rtt_s=rtt_s, jitter=jitter), np.random.default_rng([seed, crc32(name.encode())]))
        self.deliveries = Deliveries(self.path)
        self.steps = StepLoop(self.engine, self._emit)
        self.is_vllm = profile.scheduler == "vllm"
        stats = VllmStats if self.is_vllm else EngineStats
        self.stats = stats(self.engine, model_name=model_name, now=time())
        self.faults = EngineFaults()
        #: `None` unless the engine publishes KV events.
        self.kv_events: KvEventPublisher | None = None
        self.tape = Tape(longest=profile.context_tokens)
        self.serving: dict[str, Served] = {}
        self._responses = Lru[str, bytes](MAX_RESPONSES)
        self._connections: WeakKeyDictionary[asyncio.Transport, SimConnection] = WeakKeyDictionary()
        self._slow_timer: asyncio.TimerHandle | None = None

    def close(self) -> None:
        """Stop the engine; pieces in transit are lost."""
        self.steps.close()
        self.deliveries.close()
        if self._slow_timer is not None:
            self._slow_timer.cancel()

    def inbound_s(self, request: web.Request, body_bytes: int = 0) -> float:
        """Return the time of a request to the replica, by its size and the window of its connection."""
        transport = request.transport
        if transport is None:
            return self.path.request_s(new_connection=False)
        connection = self._connections.get(transport)
        if connection is None:
            connection = self._connections[transport] = SimConnection(self.path)
        return connection.request_s(body_bytes, now=monotonic())

    async def travel(self, seconds: float) -> None:
        """Wait for a trip."""
        if seconds > 0:
            await asyncio.sleep(seconds)

    def new_id(self, wanted: str | None, prefix: str) -> str:
        """The id of a request: the client's own if it has one, which then must not be in use."""
        if wanted in self.serving:
            raise BadRequest(f"duplicate request id {wanted!r}: a request of that id is being served")
        return wanted or prefix + uuid4().hex

    def adapter_of(self, body: Mapping[str, object]) -> str | None:
        """Return the adapter that a body names as SGLang's clients do, `BASE:ADAPTER` or in `lora_path`."""
        model, path = body.get("model"), body.get("lora_path")
        base, colon, name = model.partition(":") if isinstance(model, str) else ("", "", "")
        if colon and base == self.model_name and name in self.adapters:
            return name
        if path is not None and path not in self.adapters:
            raise BadRequest(f"lora_path: expected a loaded adapter, one of {', '.join(self.adapters) or 'none'}")
        return path if isinstance(path, str) else None

    def admit(self, served: Served, arrives_s: float) -> None:
        """Put a request into the engine when it arrives."""
        self.serving[served.rid] = served
        delay_s = arrives_s - monotonic()
        if delay_s <= 0:
            self._submit(served, arrives_s)
        else:
            asyncio.get_running_loop().call_later(delay_s, self._submit, served, arrives_s)

    def leave(self, served: Served) -> None:
        """Remove a request from the engine after its response or after its client disconnected."""
        if self.serving.get(served.rid) is served:
            del self.serving[served.rid]
        self.engine.abort(served)
        served.close()

    def inject(self, fault: EngineFault) -> None:
        """Start a fault; a timer ends slowness, because the engine does not poll faults."""
        now = monotonic()
        self.faults.inject(fault, now=now)
        self.engine.slowdown = self.faults.slowdown(now=now)
        if self._slow_timer is not None:
            self._slow_timer.cancel()
            self._slow_timer = None
        if fault.seconds is not None:
            self._slow_timer = asyncio.get_running_loop().call_later(fault.seconds, self._speed_up)

    def _speed_up(self) -> None:
        self.engine.slowdown = 1.0

    def _submit(self, served: Served, arrives_s: float) -> None:
        """A client that went away while its request was on the way has left already."""
        if self.serving.get(served.rid) is served and served.stage is Stage.NEW:
            self.steps.submit(served, arrives_s)

    def remember(self, response_id: str, text: bytes) -> None:
        """Store the text of a response and its prompt, for the one that names it as previous."""
        self._responses.put(response_id, text)

    def text_of(self, response_id: str) -> bytes | None:
        """Return what `remember` stored; None for an unknown id."""
        return self._responses.get(response_id)

    def _emit(self, served: Served, now: float) -> None:
        if served.emitted == 1:
            self.stats.first_token(served, now)
            for follower in served.followers:  # their prompt is cached now
                self.admit(follower, now)
        served.emit(now)
