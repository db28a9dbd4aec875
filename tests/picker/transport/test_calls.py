"""Calls by grpcio's client: messages in order, ends of both sides, statuses, health, TLS, a stop that ends no reply."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2

from gorgo.picker.transport.services import ACCESS_LOGS, CHECK, DECIDING, MAX_WATCHES, WATCH, Health, Status
from tests.picker.transport.conftest import MESSAGE_BYTES, Served
from tests.proxy.conftest import until


async def failed(call: Any) -> tuple[str, str]:
    """Return code and text of a call that ends with an error."""
    with suppress(grpc.aio.AioRpcError):
        while await call.read() is not grpc.aio.EOF:
            pass
    return (await call.code()).name, await call.details()


async def test_each_message_is_answered_and_the_half_close_ends_the_call(served: Served) -> None:
    call = served.call(served.channel())
    for word in (b"one", b"two"):
        await call.write(word)
        assert await call.read() == b"echo " + word
    await call.done_writing()
    assert await call.read() is grpc.aio.EOF
    assert await call.code() is grpc.StatusCode.OK
    assert (served.calls[0].received, served.calls[0].ends) == ([b"one", b"two"], 1)


async def test_answer_may_come_later_than_the_message(served: Served) -> None:
    call = served.call(served.channel())
    await call.write(b"later")
    assert await call.read() == b"late"
    await call.write(b"again")
    assert await call.read() == b"echo again"


async def test_call_ends_by_the_picker_at_once_or_later(served: Served) -> None:
    channel = served.channel()
    for word, answers in ((b"end", [b"last"]), (b"endlater", [])):
        call = served.call(channel)
        await call.write(word)
        for answer in answers:
            assert await call.read() == answer
        assert await call.read() is grpc.aio.EOF
        assert await call.code() is grpc.StatusCode.OK
    await until(lambda: [each.ends for each in served.calls] == [1, 1])


async def test_cancelled_call_and_lost_connection_end_the_exchange(served: Served) -> None:
    channel = served.channel()
    calls = []
    for _ in range(2):
        calls.append(served.call(channel))
        await calls[-1].write(b"one")
        await calls[-1].read()
    calls[0].cancel()
    await until(lambda: served.calls[0].ends == 1)
    assert served.calls[1].ends == 0
    await channel.close()
    await until(lambda: served.calls[1].ends == 1)
    await until(lambda: len(served.services) == 0)


async def test_wrong_message_is_an_invalid_argument_with_its_text(served: Served) -> None:
    call = served.call(served.channel())
    await call.write(b"wrong")
    assert await failed(call) == ("INVALID_ARGUMENT", "expected another word")
    assert served.calls[0].ends == 1


async def test_fault_of_the_picker_ends_one_call_and_no_other(served: Served) -> None:
    channel = served.channel()
    other = served.call(channel)
    await other.write(b"one")
    await other.read()
    call = served.call(channel)
    await call.write(b"broken")
    assert await failed(call) == ("INTERNAL", "ZeroDivisionError")
    await other.write(b"two")
    assert await other.read() == b"echo two"


async def test_unknown_method_is_unimplemented(served: Served) -> None:
    code, text = await failed(served.call(served.channel(), "/nothing.Here/Is"))
    assert code == "UNIMPLEMENTED"
    assert "/nothing.Here/Is" in text


async def test_message_as_large_as_the_bound_passes_and_a_larger_one_does_not(served: Served) -> None:
    channel = served.channel()
    call = served.call(channel)
    large = b"quiet " + b"x" * (MESSAGE_BYTES - 6)
    await call.write(large)
    await call.write(b"one")
    assert await call.read() == b"echo one"
    assert served.calls[0].received[0] == large
    second = served.call(channel)
    await second.write(large + b"x")
    code, _ = await failed(second)
    assert code == "RESOURCE_EXHAUSTED"
    await until(lambda: served.calls[-1].ends == 1)


async def test_many_large_answers_come_whole_and_in_order_to_a_client_that_reads_late(served: Served) -> None:
    call = served.call(served.channel())
    await call.write(b"pieces 60")
    await asyncio.sleep(0.05)
    for number in range(60):
        assert await call.read() == b"%d " % number + b"x" * 60_000


async def test_64_calls_at_once_are_independent(served: Served) -> None:
    channel = served.channel()

    async def one(number: int) -> None:
        call = served.call(channel)
        for turn in range(5):
            word = b"%d-%d" % (number, turn)
            await call.write(word)
            assert await call.read() == b"echo " + word
        await call.done_writing()
        assert await call.code() is grpc.StatusCode.OK

    await asyncio.gather(*(one(number) for number in range(64)))
    assert sorted(len(call.received) for call in served.calls) == [5] * 64


async def test_entries_of_the_access_log_are_taken(served: Served) -> None:
    call = served.call(served.channel(), ACCESS_LOGS)
    await call.write(b"first")
    await call.write(b"second")
    await until(lambda: served.entries == [b"first", b"second"])


def checked(service: str) -> bytes:
    return bytes(health_pb2.HealthCheckRequest(service=service).SerializeToString())


def status(message: bytes) -> str:
    return str(
        health_pb2.HealthCheckResponse.ServingStatus.Name(health_pb2.HealthCheckResponse.FromString(message).status)
    )


@pytest.mark.parametrize("ready", [True, False])
async def test_health_of_each_service(served: Served, ready: bool) -> None:
    served.ready[0] = ready
    check = served.channel().unary_unary(CHECK)
    assert status(await check(checked("liveness"))) == "SERVING"
    for name in ("readiness", "envoy.service.ext_proc.v3.ExternalProcessor", ""):
        assert status(await check(checked(name))) == ("SERVING" if ready else "NOT_SERVING")
    with pytest.raises(grpc.aio.AioRpcError) as failure:
        await check(checked("other"))
    # A picker without a replica is still asked.
    assert status(await check(checked("deciding"))) == "SERVING"
    assert failure.value.code() is grpc.StatusCode.NOT_FOUND


def test_a_picker_that_an_envoy_has_to_leave_says_so() -> None:
    leaving = [False]
    health = Health(lambda: True, lambda: leaving[0])
    before = health.answer(DECIDING)
    leaving[0] = True
    assert health.answer(DECIDING) not in (None, before)


async def test_watched_health_changes_once_per_change(served: Served) -> None:
    watch = served.call(served.channel(), WATCH)
    await watch.write(checked("readiness"))
    assert status(await watch.read()) == "SERVING"
    served.health.update()
    served.ready[0] = False
    served.health.update()
    assert status(await watch.read()) == "NOT_SERVING"
    watch.cancel()
    await until(lambda: not served.health._subscribers)


class WatchOutput:
    """The answers of one call."""

    def __init__(self) -> None:
        self.sent: list[bytes] = []
        self.failed: Status | None = None

    def send_message(self, message: bytes) -> None:
        self.sent.append(message)

    def end_call(self) -> None:
        raise AssertionError("a watch has no end of its own")

    def fail_call(self, status: Status, text: str) -> None:
        self.failed = status


def test_watching_calls_are_bounded_and_the_state_is_looked_at_once_for_all() -> None:
    """16,000 of them looked at the fleet 64,000 times a second."""
    looks = [0]

    def is_ready() -> bool:
        looks[0] += 1
        return looks[0] <= MAX_WATCHES

    health = Health(is_ready)
    outputs = [WatchOutput() for _ in range(MAX_WATCHES + 3)]
    calls = [health.watch(output) for output in outputs]
    for call in calls:
        call.take_message(checked("readiness"))
    assert [output.failed for output in outputs[-4:]] == [None, *[Status.RESOURCE_EXHAUSTED] * 3]
    assert looks == [MAX_WATCHES]
    health.update()
    assert looks == [MAX_WATCHES + 1]
    assert {len(output.sent) for output in outputs[:MAX_WATCHES]} == {2}
    calls[0].on_end()
    later = WatchOutput()
    health.watch(later).take_message(checked("readiness"))
    assert (later.failed, len(later.sent)) == (None, 1)


async def test_watch_of_an_unknown_service_says_so_and_stays_open(served: Served) -> None:
    watch = served.call(served.channel(), WATCH)
    await watch.write(checked("other"))
    assert status(await watch.read()) == "SERVICE_UNKNOWN"
    assert not watch.done()


async def test_open_calls_end_with_ok_at_the_stop(served: Served) -> None:
    channel = served.channel()
    calls = [served.call(channel) for _ in range(3)]
    for call in calls:
        await call.write(b"one")
        await call.read()
    served.closing.set()
    for call in calls:
        assert await call.read() is grpc.aio.EOF
        assert await call.code() is grpc.StatusCode.OK
    await asyncio.wait_for(asyncio.shield(served.task), 10)
    assert [call.ends for call in served.calls] == [1, 1, 1]
