"""Any order of messages, ends and time, and bytes that no Envoy sends: ledgers end at zero, and nothing is left."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gorgo.config.model import OverloadConfig
from gorgo.picker.call import PickerCall
from gorgo.picker.protocol.messages import LB, SERVED, ProtocolError
from gorgo.picker.protocol.protos import ProcessingRequest
from gorgo.picker.server import take_access_log
from gorgo.picker.transport.connection import Connection
from tests.picker.transport.peer import data, greeted, headers
from tests.picker.transport.peer import message as message_frame
from tests.picker.virtual import (
    BODY,
    BUFFERED,
    DUPLEX,
    JSON_BODY,
    NONE,
    STREAMED,
    Call,
    Output,
    Picked,
    VirtualPicker,
    body_message,
    config_of,
    headers_message,
    in_virtual_time,
    log_message,
)
from tests.proxy.fakes import DONE, ROLE, USAGE, delta

# --- Any order of messages, ends, aborts, log entries and time: ledgers end at zero, and each byte comes back once.


CONFIG = config_of("10.0.0.1:8000", "10.0.0.2:8000", overload=OverloadConfig(no_replica_wait_s=3.0))
PARTS = (ROLE, delta("a"), b": ping\n\n", USAGE, DONE, b"no event", b"x" * 130_000, b"")
BODIES = (
    BODY,
    BODY,
    JSON_BODY,
    b"{",
    b'{"messages": [1], "stream": true}',
    b'{"prompt": [1, 2, 3], "stream": true}',
    b"",
)
STATUSES = ("200", "404", "429", "500")


@dataclass
class Driven:
    """One exchange, and what went through it."""

    call: Call
    duplex: bool
    body: bytes
    sent: int = 0
    #: Bytes of the response that Envoy has given the picker.
    response: bytes = b""
    choices: int = 0
    first: Call | None = None
    ended: bool = False
    answered: bool = False
    response_ended: bool = False
    pieces: list[bytes] = field(default_factory=list)

    @property
    def picked(self) -> Picked | None:
        for message in self.call.output.sent:
            if message.HasField("dynamic_metadata"):
                return Picked(message)
        return None

    def check(self) -> None:
        """The bodies have come back once, as far as they have come."""
        output = self.call.output
        kinds = [message.WhichOneof("response") for message in output.sent]
        choices = [message for message in output.sent if message.HasField("dynamic_metadata")]
        assert len(choices) + kinds.count("immediate_response") <= 1
        if not self.duplex:
            return
        requests = [
            message.request_body.response.body_mutation.streamed_response
            for message in output.sent
            if message.HasField("request_body")
        ]
        responses = [
            message.response_body.response.body_mutation.streamed_response
            for message in output.sent
            if message.HasField("response_body")
        ]
        if choices:
            assert b"".join(piece.body for piece in requests) == self.body[: self.sent]
            assert sum(piece.end_of_stream for piece in requests) <= 1
        else:
            assert not requests
        assert b"".join(piece.body for piece in responses) == self.response
        assert all(len(piece.body) <= 62_000 for piece in (*requests, *responses))
        assert sum(piece.end_of_stream for piece in responses) <= 1
        assert "immediate_response" not in kinds[:-1]


class Envoy:
    """What an Envoy does, in an order that chance chooses and a protocol allows; now and then one that it does not."""

    def __init__(self, picker: VirtualPicker, chance: Random) -> None:
        self.picker = picker
        self.chance = chance
        self.driven: list[Driven] = []

    async def do(self, move: str) -> None:
        await getattr(self, move)()
        for each in self.driven:
            each.check()
        self.picker.state.routing.router.check()

    def one(self, *, ended: bool = False) -> Driven | None:
        """One of the last exchanges: an open one, or where `ended` is set any."""
        found = [each for each in self.driven[-12:] if ended or not (each.ended or each.call.output.ends)]
        return self.chance.choice(found) if found else None

    def feed(self, driven: Driven, message: Any) -> bool:
        """Feed a message; a call that broke the protocol has ended."""
        if driven.ended or driven.call.output.ends:
            return False
        try:
            driven.call.feed(message)
        except ProtocolError as error:
            refused = str(error)
            driven.ended = True
        else:
            return True
        assert refused.startswith("expected"), refused
        return False

    # -- moves

    async def open(self) -> None:
        duplex = self.chance.random() < 0.5
        mode = DUPLEX if duplex else BUFFERED
        driven = Driven(self.picker.call(), duplex, self.chance.choice(BODIES))
        path = "/v1/chat/completions" if self.chance.random() < 0.9 else "/other"
        response_mode = DUPLEX if duplex else NONE
        if self.feed(driven, headers_message("request_headers", mode=mode, response_mode=response_mode, path=path)):
            self.driven.append(driven)
        else:
            driven.call.close()

    async def part(self) -> None:
        """The request's body, or a part of it."""
        driven = self.one()
        if driven is None or driven.answered:
            return
        start = driven.sent
        whole = not driven.duplex or self.chance.random() < 0.5
        stop = len(driven.body) if whole else self.chance.randint(start, len(driven.body))
        end = stop == len(driven.body)
        driven.sent = stop
        driven.answered = end
        if not self.feed(driven, body_message("request_body", driven.body[start:stop], end=end)):
            driven.answered = True

    async def trailers(self) -> None:
        driven = self.one()
        if driven is not None and driven.duplex and not driven.answered:
            driven.answered = True
            message = ProcessingRequest()
            message.request_trailers.SetInParent()
            self.feed(driven, message)

    async def head(self) -> None:
        driven = self.one()
        if driven is None or not driven.duplex or driven.picked is None:
            return
        served = self.chance.choice(("10.0.0.1:8000", "10.0.0.2:8000", "nowhere"))
        headers = [(":status", self.chance.choice(STATUSES)), ("content-type", "text/event-stream")]
        message = headers_message("response_headers", *headers)
        if self.chance.random() < 0.3:
            message.metadata_context.filter_metadata[LB].update({SERVED: served})
        self.feed(driven, message)

    async def answer(self) -> None:
        driven = self.one()
        if driven is None or not driven.duplex or driven.picked is None or driven.response_ended:
            return
        chunk = self.chance.choice(PARTS)
        end = self.chance.random() < 0.2
        if self.feed(driven, body_message("response_body", chunk, end=end)):
            driven.response += chunk
            driven.response_ended = end

    async def first(self) -> None:
        driven = self.one(ended=True)
        if driven is None or driven.picked is None:
            return
        if driven.first is None:
            driven.first = self.picker.call()
        if not driven.first.output.ends:
            message = body_message(
                "response_body",
                self.chance.choice(PARTS),
                end=self.chance.random() < 0.2,
                exchange_id=driven.picked.exchange_id,
            )
            driven.first.feed(message)

    async def log(self) -> None:
        driven = self.one(ended=True)
        if driven is not None and driven.picked is not None:
            flags = [["downstream_connection_termination"], ["upstream_remote_reset"], [], []]
            entry = log_message(
                driven.picked.exchange_id,
                status=int(self.chance.choice(STATUSES)),
                flags=self.chance.choice(flags),
                usage={"prompt_tokens": 5, "completion_tokens": self.chance.choice((1, 7))},
                first_body_us=self.chance.choice((None, 1000)),
                served=self.chance.choice((None, "10.0.0.2:8000")),
            )
            self.picker.logged(entry)

    async def close(self) -> None:
        driven = self.one()
        if driven is not None:
            driven.ended = True
            driven.call.close()

    async def close_first(self) -> None:
        driven = self.one(ended=True)
        if driven is not None and driven.first is not None:
            driven.first.close()

    async def wait(self) -> None:
        await asyncio.sleep(self.chance.choice((0.001, 0.1, 0.6, 2.0)))

    async def long_wait(self) -> None:
        await asyncio.sleep(4000.0)

    async def drain(self) -> None:
        state, draining = self.picker.state, self.chance.random() < 0.3
        state.routing.router.replicas.drain(self.chance.choice(("r0", "r1")), draining, now=state.routing.clock())
        state.routing.gateway.run_timer()

    async def fail_probes(self) -> None:
        state = self.picker.state
        rtt_s = self.chance.choice((None, 0.01, 0.01))
        state.routing.gateway.apply(
            state.routing.router.replicas.on_probe(self.chance.choice(("r0", "r1")), rtt_s, now=state.routing.clock())
        )

    async def end_all(self) -> None:
        for driven in self.driven:
            driven.call.close()
            if driven.first is not None:
                driven.first.close()
        # Longer than any request is queued, and any entry waited for.
        await asyncio.sleep(10.0)


MOVES = (
    *("open", "open", "part", "part", "part", "trailers", "head", "answer", "answer", "first", "log", "close"),
    *("close_first", "wait", "wait", "long_wait", "drain", "fail_probes"),
)


def drive(moves: Sequence[str], seed: int) -> None:
    async def test(picker: VirtualPicker) -> None:
        envoy = Envoy(picker, Random(seed))
        for move in moves:
            await envoy.do(move)
        await envoy.end_all()
        picker.check()

    in_virtual_time(test, CONFIG)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.sampled_from(MOVES), max_size=40), st.integers(0, 2**16))
def test_any_order_of_events_leaves_nothing_reserved_and_loses_no_byte(moves: list[str], seed: int) -> None:
    drive(moves, seed)


def test_long_runs_leave_nothing_reserved_and_lose_no_byte() -> None:
    for seed in range(4):
        chance = Random(seed)
        likely = [move for move in MOVES if move != "long_wait"]
        drive([chance.choice(likely) for _ in range(400)], seed)


# --- Bytes and messages that no Envoy sends: a call ends with `ProtocolError`, and nothing else is left of it.


KINDS = ("request_headers", "request_body", "response_headers", "response_body")


def feed(picker: VirtualPicker, messages: list[bytes]) -> None:
    output = Output()
    call = PickerCall(picker.state, output)
    refused = "expected"
    try:
        for message in messages:
            call.feed(message)
    except ProtocolError as error:
        refused = str(error)
    assert refused.startswith("expected"), refused
    call.closed()


@settings(max_examples=40, deadline=None)
@given(st.lists(st.binary(max_size=60), max_size=5))
def test_random_bytes_end_a_call_with_what_was_expected(messages: list[bytes]) -> None:
    async def test(picker: VirtualPicker) -> None:
        feed(picker, messages)
        for message in messages:
            with suppress(ProtocolError):
                take_access_log(picker.state, message)

    in_virtual_time(test)


def odd_message(chance: Random) -> bytes:
    """A message that is well formed, or nearly so."""
    kind = chance.choice(KINDS)
    mode = chance.choice((BUFFERED, DUPLEX, NONE, STREAMED, None))
    if kind.endswith("headers"):
        path = chance.choice(("/v1/chat/completions", "/v1/responses", "/health", "/v1/models", "", "%00", "/x?y"))
        name = chance.choice(("x-slo-ttft-ms", "x-request-id", "content-encoding", ":status", "x-forwarded-for"))
        value = chance.choice(("", "1", "200", "nan", "\x7f", "x" * 5000, "10.0.0.1", "gzip"))
        end = chance.random() < 0.3
        response_mode = chance.choice((NONE, STREAMED, DUPLEX))
        message = headers_message(kind, (name, value), mode=mode, path=path, end=end, response_mode=response_mode)
    else:
        body = chance.choice((BODY, b"", b"{}", b"[1]", b"\xff", delta("a") + DONE, BODY.replace(b"true", b"5")))
        exchange_id = chance.choice((None, None, "pick-1", "x"))
        message = body_message(kind, body, end=chance.random() < 0.6, exchange_id=exchange_id)
    if chance.random() < 0.1:
        message.metadata_context.filter_metadata["envoy.lb.subset_hint"].update(
            {"x-gateway-destination-endpoint-subset": chance.choice(("", "10.0.0.1:8000", 5, [], ["x"], {"a": 1}))}
        )
    if chance.random() < 0.1:
        message.metadata_context.filter_metadata["epp"].update({"id": chance.choice((5, [], "", "pick-1"))})
    data: bytes = message.SerializeToString()
    if chance.random() < 0.1:
        at = chance.randrange(len(data) + 1)
        data = data[:at] + bytes([chance.randrange(256)]) + data[at + 1 :]
    return data


def test_shuffled_and_damaged_messages_crash_nothing() -> None:
    async def test(picker: VirtualPicker) -> None:
        chance = Random(1)
        for _ in range(1500):
            feed(picker, [odd_message(chance) for _ in range(chance.randrange(6))])
            picker.state.routing.router.check()

    in_virtual_time(test)


def test_damaged_entries_crash_nothing() -> None:
    async def test(picker: VirtualPicker) -> None:
        chance = Random(2)
        for _ in range(500):
            call, picked = picker.request()
            call.close()
            data = bytearray(log_message(picked.exchange_id, usage={"prompt_tokens": 1}, first_body_us=5, served="x"))
            for _ in range(chance.randrange(4)):
                data[chance.randrange(len(data))] = chance.randrange(256)
            with suppress(ProtocolError):
                take_access_log(picker.state, bytes(data))

    in_virtual_time(test)


def test_an_empty_request_is_a_message_without_a_phase() -> None:
    assert ProcessingRequest().WhichOneof("request") is None


# --- A request that has ended is freed at once: nothing of it waits for the collector.


@pytest.fixture
def garbage() -> Iterator[Callable[[], set[str]]]:
    """Return the types of GORGO that only the collector could have freed since the start of the test."""

    def found() -> set[str]:
        gc.collect()
        kinds = {type(item) for item in gc.garbage}
        return {kind.__qualname__ for kind in kinds if str(kind.__module__).startswith("gorgo.")}

    gc.collect()
    gc.disable()
    gc.set_debug(gc.DEBUG_SAVEALL)
    yield found
    gc.set_debug(0)
    gc.garbage.clear()
    gc.enable()


def _entry(picker: VirtualPicker) -> None:
    call, picked = picker.request()
    picker.first_bytes(picked.exchange_id, delta("a")).close()
    call.close()
    picker.log(picked.exchange_id)


def _no_entry(picker: VirtualPicker) -> None:
    call, _ = picker.request()
    call.close()


def _no_body(picker: VirtualPicker) -> None:
    call = picker.call()
    call.feed(headers_message("request_headers"))
    call.close()


def _refused(picker: VirtualPicker) -> None:
    call = picker.call()
    call.feed(headers_message("request_headers"))
    call.feed(body_message("request_body", b"{"))
    assert call.last.HasField("immediate_response")
    call.close()


def _duplex(picker: VirtualPicker) -> None:
    call = picker.call()
    call.feed(headers_message("request_headers", mode=DUPLEX, response_mode=DUPLEX))
    call.feed(body_message("request_body", BODY))
    call.feed(headers_message("response_headers", (":status", "200"), ("content-type", "text/event-stream")))
    call.feed(body_message("response_body", delta("a") + DONE))
    call.close()


@pytest.mark.parametrize("exchange", [_entry, _no_entry, _no_body, _refused, _duplex])
def test_an_ended_request_is_freed_at_once(
    exchange: Callable[[VirtualPicker], None], garbage: Callable[[], set[str]]
) -> None:
    async def test(picker: VirtualPicker) -> None:
        for _ in range(2):
            exchange(picker)
        await asyncio.sleep(1.1)  # longer than an entry of the access log is waited for
        assert garbage() == set()

    in_virtual_time(test)


def test_a_queued_request_is_freed_at_its_end(garbage: Callable[[], set[str]]) -> None:
    async def test(picker: VirtualPicker) -> None:
        picker.state.routing.router.replicas.drain("r0", now=picker.state.routing.clock())
        call, _ = picker.request()
        assert picker.state.routing.router.queued == 1
        call.close()
        del call, _
        await asyncio.sleep(0.0)  # a cancelled timer is let go
        assert garbage() == set()

    config = replace(config_of("10.0.0.1:8000"), overload=OverloadConfig(no_replica_wait_s=30.0))
    in_virtual_time(test, config)


def test_a_stream_is_freed_at_its_end(garbage: Callable[[], set[str]]) -> None:
    peer = greeted()
    peer.send(headers(1), data(1, message_frame(b"one")), data(1, b"", end=True))
    assert isinstance(peer.connection, Connection)
    assert peer.connection.is_idle
    peer.calls.clear()
    assert garbage() == set()
