"""A picker in virtual time, and an Envoy or a gateway that a test speaks for: messages in, decoded messages out."""

from __future__ import annotations

import asyncio
import json
import weakref
from base64 import b64encode
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from gorgo.config.fleet import ReplicaConfig
from gorgo.config.model import Config, RegionConfig
from gorgo.live.build import build_live
from gorgo.live.event_loop import RouterGateway
from gorgo.live.telemetry.health import HealthLog
from gorgo.picker.call import PickerCall
from gorgo.picker.protocol.answers import PIECE_BYTES
from gorgo.picker.protocol.messages import BODY as BODY_KEY
from gorgo.picker.protocol.messages import DESTINATION, LB, OWN, SERVED, USAGE
from gorgo.picker.protocol.protos import (
    HeaderValue,
    ProcessingMode,
    ProcessingRequest,
    ProcessingResponse,
    StreamAccessLogsMessage,
)
from gorgo.picker.server import FIRST_BODY_TAG, take_access_log
from gorgo.picker.state import HOLD_S, PICKER, OpenExchanges, PickerState
from gorgo.policies.registry import make_policy
from tests.lab.sim.live_shell import VirtualLoop
from tests.proxy.conftest import QUIET, system_tls

# --- A picker in virtual time, and an Envoy that a test speaks for: messages in, decoded messages out.
#
# Nothing here waits: the event loop's clock jumps to its next timer, and every clock of the picker is the loop's.


CHAT = "/v1/chat/completions"
BODY = b'{"model": "m", "messages": [{"role": "user", "content": "hello"}], "stream": true}'
JSON_BODY = b'{"model": "m", "messages": [{"role": "user", "content": "hello"}]}'
BUFFERED, DUPLEX = ProcessingMode.BUFFERED, ProcessingMode.FULL_DUPLEX_STREAMED
NONE, STREAMED = ProcessingMode.NONE, ProcessingMode.STREAMED


def config_of(*addresses: str, **parts: Any) -> Config:
    """A fleet of replicas `r0`, `r1` ... at these addresses."""
    rows = tuple(
        ReplicaConfig(name=f"r{n}", region="here", url=f"http://{address}", engine="sglang")
        for n, address in enumerate(addresses)
    )
    return Config(**{"proxy": QUIET, "regions": (RegionConfig(name="here"),), "replicas": rows, **parts})


@dataclass
class Output:
    """The transport's end of a call."""

    sent: list[Any] = field(default_factory=list)
    ends: int = 0
    #: Set by each message, and by the end.
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    #: Of which it is: both transports close the call in the step that ends it. Weak, as a cycle would keep both.
    call: weakref.ref[PickerCall] | None = None

    def send_message(self, message: bytes) -> None:
        assert not self.ends, "nothing is sent after the end"
        self.sent.append(ProcessingResponse.FromString(message))
        self.changed.set()

    def end_call(self) -> None:
        self.ends += 1
        self.changed.set()
        assert self.ends == 1, "a call ends once"
        call = None if self.call is None else self.call()
        if call is not None:
            call.closed()


def headers_message(
    kind: str,
    *headers: tuple[str, str],
    end: bool = False,
    mode: int | None = BUFFERED,
    response_mode: int = NONE,
    path: str = CHAT,
    method: str = "POST",
) -> Any:
    """The headers of a request or of a response."""
    message = ProcessingRequest()
    part = getattr(message, kind)
    own = [(":method", method), (":path", path), (":authority", "x")] if kind == "request_headers" else []
    for name, value in (*own, *headers):
        part.headers.headers.append(HeaderValue(key=name, raw_value=value.encode()))
    part.end_of_stream = end
    if kind == "request_headers" and mode is not None:
        message.protocol_config.request_body_mode = mode
        message.protocol_config.response_body_mode = response_mode
    return message


def body_message(kind: str, body: bytes, *, end: bool = True, exchange_id: str | None = None) -> Any:
    message = ProcessingRequest()
    part = getattr(message, kind)
    part.body, part.end_of_stream = body, end
    if exchange_id is not None:
        message.observability_mode = True
        message.metadata_context.filter_metadata[OWN].update({"id": exchange_id})
    return message


class Call:
    """One call of Envoy."""

    def __init__(self, state: PickerState) -> None:
        self.output = Output()
        self.call = PickerCall(state, self.output)
        self.output.call = weakref.ref(self.call)

    def feed(self, message: Any) -> list[Any]:
        """Feed a message; return what was sent within this step."""
        before = len(self.output.sent)
        self.call.feed(message.SerializeToString())
        return self.output.sent[before:]

    def close(self) -> None:
        self.call.closed()

    @property
    def last(self) -> Any:
        return self.output.sent[-1]


@dataclass
class Picked:
    """The choice of an answer."""

    message: Any

    @property
    def common(self) -> Any:
        return getattr(self.message, self.message.WhichOneof("response")).response

    @property
    def headers(self) -> dict[str, str]:
        return {each.header.key: each.header.raw_value.decode() for each in self.common.header_mutation.set_headers}

    @property
    def addresses(self) -> list[str]:
        found = self.headers[DESTINATION]
        assert found == self.message.dynamic_metadata.fields[LB].struct_value.fields[DESTINATION].string_value
        return found.split(",")

    @property
    def exchange_id(self) -> str:
        found: str = self.message.dynamic_metadata.fields[OWN].struct_value.fields["id"].string_value
        return found


class VirtualPicker:
    """The picker, and how its tests drive it."""

    def __init__(self, state: PickerState) -> None:
        self.state = state

    def call(self) -> Call:
        return Call(self.state)

    def request(self, body: bytes = BODY, *headers: tuple[str, str], **options: Any) -> tuple[Call, Picked]:
        """An own Envoy's request up to its choice."""
        call = self.call()
        call.feed(headers_message("request_headers", *headers, **options))
        call.feed(body_message("request_body", body))
        return call, Picked(call.last)

    def first_bytes(self, exchange_id: str, *chunks: bytes, end: bool = False) -> Call:
        """The call of the filter of first tokens."""
        call = self.call()
        for number, chunk in enumerate(chunks, 1):
            if not call.output.ends:
                last = end and number == len(chunks)
                call.feed(body_message("response_body", chunk, end=last, exchange_id=exchange_id))
        return call

    def log(self, exchange_id: str, *, status: int = 200, **entry: Any) -> None:
        take_access_log(self.state, log_message(exchange_id, status=status, **entry))

    def logged(self, message: bytes) -> None:
        """A batch of the access log."""
        take_access_log(self.state, message)

    def total(self, name: str, **labels: str) -> float:
        return self.state.telemetry.metrics.registry.get_sample_value(name, labels) or 0.0

    def attempts(self, result: str, replica: str = "r0") -> float:
        return self.total("gorgo_attempts_total", replica=replica, region="here", result=result)

    def check(self) -> None:
        """Nothing is open, reserved or buffered."""
        state = self.state
        assert (state.routing.router.in_flight, state.routing.router.queued) == (0, 0)
        assert (len(state.open_exchanges), len(state.calls)) == (0, 0)
        assert (state.live.buffers.used_bytes, len(state.live.buffers)) == (0, 0)
        assert [target.active for target in state.replicas.targets.values()] == [0] * len(state.replicas.targets)
        state.routing.router.check()
        for view in state.routing.router.view.snapshots(now=state.routing.clock()):
            assert (view.in_flight_requests, view.in_flight_tokens, view.queued_prefill_tokens) == (0, 0, 0)


def log_message(
    exchange_id: str,
    *,
    status: int = 200,
    flags: Sequence[str] = (),
    usage: Mapping[str, int | str] | None = None,
    body: bytes | None = None,
    first_body_us: int | None = None,
    served: str | None = None,
    details: str = "via_upstream",
) -> bytes:
    """A batch with one entry."""
    batch = StreamAccessLogsMessage()
    entry = batch.http_logs.log_entry.add()
    common = entry.common_properties
    common.metadata.filter_metadata[OWN].update({"id": exchange_id})
    if usage is not None:
        common.metadata.filter_metadata[USAGE].update(usage)
    if body is not None:
        common.metadata.filter_metadata[USAGE].update({BODY_KEY: b64encode(body).decode()})
    if served is not None:
        common.metadata.filter_metadata[LB].update({SERVED: served})
    if first_body_us is not None:
        common.custom_tags[FIRST_BODY_TAG] = str(first_body_us)
    for flag in flags:
        setattr(common.response_flags, flag, True)
    entry.response.response_code.value = status
    entry.response.response_code_details = details
    message: bytes = batch.SerializeToString()
    return message


def in_virtual_time(
    test: Callable[[VirtualPicker], Awaitable[None]],
    config: Config | None = None,
    *,
    hold_s: float = HOLD_S,
    **options: Any,
) -> None:
    """Run `test` with a picker of `config`, whose replicas are a round trip of 10 ms away; nothing may be left."""
    config = config or config_of("10.0.0.1:8000", "10.0.0.2:8000")

    async def run() -> None:
        now = asyncio.get_running_loop().time
        wiring = {"weights": None, "environ": {}, "key": 1, "seed": 1, "tls": system_tls(), **options}
        live = build_live(config, policy=make_policy(config.proxy.policy), kind=PICKER, **wiring)
        await live.aclose()
        state = PickerState(live, hold_s)
        state.routing.clock = now
        state.open_exchanges = OpenExchanges(now, picker="pick")
        state.routing.gateway = RouterGateway(state.routing.router, now, HealthLog(state.telemetry.metrics))
        for name in state.replicas.targets:
            state.routing.router.replicas.on_probe(name, 0.01, now=now())
        picker = VirtualPicker(state)
        await test(picker)
        await asyncio.sleep(1.1)  # longer than any entry of the access log is waited for
        picker.check()
        state.open_exchanges.aclose()
        state.routing.gateway.close()

    with pytest.MonkeyPatch.context() as patched, asyncio.Runner(loop_factory=VirtualLoop) as runner:
        patched.setattr("gorgo.live.http.body.monotonic", runner.get_loop().time)
        runner.run(run())


def error_of(message: Any) -> tuple[int, str, dict[str, str]]:
    """Status, code and headers of an ImmediateResponse."""
    immediate = message.immediate_response
    headers = {each.header.key: each.header.raw_value.decode() for each in immediate.headers.set_headers}
    return immediate.status.code, json.loads(immediate.body)["error"]["code"], headers


# --- What a gateway does of a call, and the bodies that it gets back.


EVENTS = (":status", "200"), ("content-type", "text/event-stream")


def begin(picker: VirtualPicker, *headers: tuple[str, str], **options: Any) -> Call:
    call = picker.call()
    assert call.feed(headers_message("request_headers", *headers, mode=DUPLEX, response_mode=DUPLEX, **options)) == []
    return call


def chosen(picker: VirtualPicker, body: bytes = BODY) -> Call:
    call = begin(picker)
    call.feed(body_message("request_body", body))
    return call


def returned(messages: list[Any], kind: str) -> bytes:
    """The body that answers give back; the end is in the last one alone."""
    pieces = [getattr(message, kind).response.body_mutation.streamed_response for message in messages]
    assert [piece.end_of_stream for piece in pieces[:-1]] == [False] * (len(pieces) - 1)
    assert all(len(piece.body) <= PIECE_BYTES for piece in pieces)
    return b"".join(piece.body for piece in pieces)
