"""Time of one small request through the calls of an endpoint picker, without any transport, beside its decision.

Target: at most 100 us for the two messages and the end of a BUFFERED request, without its decision: that is reading its
body and what the Router does, as `gorgo_decision_seconds` counts. The call of first tokens and the entry of the access
log, which come in batches, are beside it. Processor time of the thread: others may use the machine.
"""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Callable
from importlib import import_module
from statistics import median
from typing import Any

from gorgo.config.fleet import ReplicaConfig
from gorgo.config.model import Config, ProxyConfig, RegionConfig
from gorgo.live.build import build_live
from gorgo.live.logs import set_up_logs
from gorgo.picker.call import PickerCall
from gorgo.picker.pending import read_now
from gorgo.picker.protocol.protos import ProcessingResponse, StreamAccessLogsMessage
from gorgo.picker.server import take_access_log
from gorgo.picker.state import PICKER, PickerState
from gorgo.policies.registry import make_policy
from tests.picker.virtual import BUFFERED, DUPLEX, body_message, headers_message, log_message
from tests.proxy.fakes import DONE, delta

REPLICAS = 64
REQUESTS = 500
#: Requests in flight at once.
OPEN = 25
ROUNDS = 7
#: Entries of one message, as 50 ms of a thousand requests a second are.
BATCH = 50
BODY = b'{"model": "m", "stream": true, "messages": [{"role": "user", "content": "%s"}]}' % (b"word " * 80)
#: Headers as a client and an Envoy send them.
HEADERS = (
    *(("user-agent", "OpenAI/Python 1.99.1"), ("accept", "application/json"), ("content-type", "application/json")),
    *(("x-forwarded-proto", "http"), ("x-request-id", "4b7ffb61-2a0c-4b9e-8f7c-0d8f5dd0c111")),
    *(("x-stainless-lang", "python"), ("x-stainless-os", "Linux"), ("content-length", str(len(BODY)))),
    *(("accept-encoding", "gzip, deflate"), ("authorization", "Bearer sk-0123456789abcdef")),
)
#: What a gateway calls: the Router's part of an exchange.
ROUTER_CALLS = ("submit", "first_token", "released", "finish")


class _Output:
    __slots__ = ("sent",)

    def __init__(self) -> None:
        self.sent: list[bytes] = []

    def send_message(self, message: bytes) -> None:
        self.sent.append(message)

    def end_call(self) -> None:
        pass


class _DecisionTime:
    """The gateway of a state, with the time that it and the reading of bodies take."""

    def __init__(self, gateway: Any) -> None:
        self._gateway = gateway
        self.spent_ns = 0
        for name in ROUTER_CALLS:
            setattr(self, name, self._timed(getattr(gateway, name)))
        self.read_now = self._timed(read_now)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._gateway, name)

    def _timed(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            start = time.thread_time_ns()
            try:
                return call(*args, **kwargs)
            finally:
                self.spent_ns += time.thread_time_ns() - start

        return timed


def run() -> None:
    """Print medians of rounds, us a request."""
    set_up_logs(level="warning")
    asyncio.run(_measure())


async def _measure() -> None:
    state = make_state()
    timed = _DecisionTime(state.routing.gateway)
    state.routing.gateway = timed  # type: ignore[assignment]
    setattr(import_module("gorgo.picker.pending"), "read_now", timed.read_now)  # noqa: B010 - it is not the module's own
    rows: dict[str, list[tuple[float, float]]] = {}
    measures = {"BUFFERED": _buffered, "first token": _first_token, "access log": _access_log, "FULL_DUPLEX": _duplex}
    for _ in range(ROUNDS):
        for name, measure in measures.items():
            rows.setdefault(name, []).append(measure(state, timed))
            state.open_exchanges.aclose()  # those without an entry, which would be closed within the next measure
        gc.collect()
    print(f"{REPLICAS} replicas, gorgo-ms, a body of {len(BODY)} bytes; us a request, median (least) of {ROUNDS}")
    print(f"{'':<12}  {'decision':>15}  {'all else':>15}")
    for name, found in rows.items():
        decision = [router for _, router in found]
        rest = [whole - router for whole, router in found]
        print(f"{name:<12}  {_shown(decision):>15}  {_shown(rest):>15}")
    state.open_exchanges.aclose()
    await state.live.aclose()


def make_state() -> PickerState:
    replicas = tuple(
        ReplicaConfig(name=f"r{n}", region=f"region-{n % 8}", url=f"http://10.0.{n // 250}.{n % 250 + 1}:8000")
        for n in range(REPLICAS)
    )
    config = Config(
        proxy=ProxyConfig(region="region-0"),
        regions=tuple(RegionConfig(name=f"region-{n}") for n in range(8)),
        replicas=replicas,
    )
    policy = make_policy("gorgo-ms")
    state = PickerState(build_live(config, policy=policy, weights=None, environ={}, key=1, seed=1, kind=PICKER))
    for number, replica in enumerate(replicas):
        state.routing.router.replicas.on_probe(replica.name, 0.002 * (1 + number), now=state.routing.clock())
    return state


def _shown(found: list[float]) -> str:
    return f"{median(found):.1f} ({min(found):.1f})"


def _begun(state: PickerState, count: int) -> list[tuple[PickerCall, str]]:
    """Requests up to their choices: calls and ids."""
    head = headers_message("request_headers", *HEADERS, mode=BUFFERED).SerializeToString()
    body = body_message("request_body", BODY).SerializeToString()
    found = []
    for _ in range(count):
        output = _Output()
        call = PickerCall(state, output)
        call.feed(head)
        call.feed(body)
        chosen = ProcessingResponse.FromString(output.sent[-1])
        found.append((call, chosen.dynamic_metadata.fields["epp"].struct_value.fields["id"].string_value))
    return found


def _buffered(state: PickerState, timed: _DecisionTime) -> tuple[float, float]:
    """Return us a request: all, and its decision."""
    head = headers_message("request_headers", *HEADERS, mode=BUFFERED).SerializeToString()
    body = body_message("request_body", BODY).SerializeToString()
    start, decided_ns = time.thread_time_ns(), timed.spent_ns
    for _ in range(REQUESTS):
        call = PickerCall(state, _Output())
        call.feed(head)
        call.feed(body)
        call.closed()
    return _per_request(start, decided_ns, timed)


def _first_token(state: PickerState, timed: _DecisionTime) -> tuple[float, float]:
    """Return the same of the calls of first tokens."""
    whole_ns = decision_ns = 0
    for _ in range(0, REQUESTS, OPEN):
        begun = _begun(state, OPEN)
        messages = [
            body_message("response_body", delta("a"), end=False, exchange_id=exchange_id).SerializeToString()
            for _, exchange_id in begun
        ]
        start, decided_ns = time.thread_time_ns(), timed.spent_ns
        for message in messages:
            call = PickerCall(state, _Output())
            call.feed(message)
            call.closed()
        whole_ns += time.thread_time_ns() - start
        decision_ns += timed.spent_ns - decided_ns
        for call, _ in begun:
            call.closed()
    return whole_ns / REQUESTS / 1e3, decision_ns / REQUESTS / 1e3


def _access_log(state: PickerState, timed: _DecisionTime) -> tuple[float, float]:
    """Return the same of entries of the access log."""
    begun: list[str] = []
    for _ in range(0, REQUESTS, OPEN):
        found = _begun(state, OPEN)
        begun += [exchange_id for _, exchange_id in found]
        for call, _ in found:
            call.closed()
    batches = [StreamAccessLogsMessage() for _ in range(0, REQUESTS, BATCH)]
    usage = {"prompt_tokens": 90, "completion_tokens": 9, "cached_tokens": 0}
    for number, exchange_id in enumerate(begun):
        batches[number // BATCH].MergeFromString(log_message(exchange_id, usage=usage, first_body_us=900))
    messages = [batch.SerializeToString() for batch in batches]
    start, decided_ns = time.thread_time_ns(), timed.spent_ns
    for message in messages:
        take_access_log(state, message)
    return _per_request(start, decided_ns, timed)


def _duplex(state: PickerState, timed: _DecisionTime) -> tuple[float, float]:
    """Return the same where the call carries both bodies: the answer is a head and two chunks."""
    head = headers_message("request_headers", *HEADERS, mode=DUPLEX, response_mode=DUPLEX).SerializeToString()
    events = (":status", "200"), ("content-type", "text/event-stream")
    messages = [
        head,
        body_message("request_body", BODY, end=False).SerializeToString(),
        body_message("request_body", b"").SerializeToString(),
        headers_message("response_headers", *events).SerializeToString(),
        body_message("response_body", delta("a"), end=False).SerializeToString(),
        body_message("response_body", delta("b") + DONE).SerializeToString(),
    ]
    start, decided_ns = time.thread_time_ns(), timed.spent_ns
    for _ in range(REQUESTS):
        call = PickerCall(state, _Output())
        for message in messages:
            call.feed(message)
        call.closed()
    return _per_request(start, decided_ns, timed)


def _per_request(start: int, decided_ns: int, timed: _DecisionTime) -> tuple[float, float]:
    whole_ns = time.thread_time_ns() - start
    return whole_ns / REQUESTS / 1e3, (timed.spent_ns - decided_ns) / REQUESTS / 1e3
