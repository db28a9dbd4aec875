"""What passes between workers and their parent, what they count in memory, and metrics of all as those of one."""

from __future__ import annotations

import asyncio
import os
import random
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, cast

import pytest

from gorgo.core.limits import ClientLimits, ClientQuotas, ClientRules
from gorgo.core.messages.actions import Dispatch
from gorgo.core.peers.exchange import HEARTBEAT_S
from gorgo.errors import ConfigError
from gorgo.live.admin.page.snapshot import alerts
from gorgo.live.admin.workers import merged_checks, merged_decisions
from gorgo.live.event_loop import RouterGateway
from gorgo.live.peer_store.local import INTERVAL_S, LocalPeers
from gorgo.live.telemetry.health import RecentStats
from gorgo.live.telemetry.metrics import Family, exposition, merged
from gorgo.live.workers.counts import SharedCounts, make_memory
from gorgo.live.workers.link import (
    ALL,
    MAX_WAITING_BYTES,
    Channel,
    Frame,
    FrameKind,
    WorkerLink,
    WorkerRow,
    WorkerStart,
    WorkerUnreachable,
    packed,
    unpacked,
)
from gorgo.live.workers.parent import LATE, SERVES, Parent, _Worker, announce, inherit, offered, pass_listeners, peer_of
from gorgo.live.workers.reports import RING_BYTES, SharedReports, reports_bytes
from tests.core.routers import COMPLETED, PROMPT, a_request, make_router
from tests.lab.sim.live_shell import VirtualLoop

# Frames on a socket pair.


async def channels() -> tuple[list[Frame], Channel, Channel, list[str]]:
    """Two ends: what the second one has received, both, and the ends that were noticed."""
    loop = asyncio.get_running_loop()
    found: list[Frame] = []
    ended: list[str] = []
    ours, theirs = socket.socketpair()
    made = []
    for name, end, take in (("first", ours, lambda _: None), ("second", theirs, found.append)):
        end.setblocking(False)
        channel = Channel(take, lambda name=name: ended.append(name))  # type: ignore[misc]
        await loop.create_unix_connection(lambda channel=channel: channel, sock=end)  # type: ignore[misc]
        made.append(channel)
    return found, made[0], made[1], ended


async def until(holds: object) -> None:
    assert callable(holds)
    async with asyncio.timeout(10):
        while not holds():
            await asyncio.sleep(0)


async def test_frames_arrive_whole_and_in_order_however_they_are_cut() -> None:
    chance = random.Random(3)
    frames = [
        Frame(
            chance.choice(list(FrameKind)),
            number % 3,
            ALL,
            number,
            chance.randbytes(chance.choice([0, 1, 500, 90_000])),
        )
        for number in range(200)
    ]
    found: list[Frame] = []
    channel = Channel(found.append, lambda: None)
    data = b"".join(frame.as_bytes() for frame in frames)
    while data:
        size = chance.choice([1, 2, 12, 13, 14, 5000, 200_000])
        channel.data_received(data[:size])
        data = data[size:]
    assert found == frames


async def test_a_reader_that_would_miss_events_is_cut() -> None:
    _, ours, theirs, ended = await channels()
    assert theirs._transport is not None
    theirs._transport.pause_reading()
    event = Frame(FrameKind.EVENT, 0, ALL, 0, bytes(MAX_WAITING_BYTES // 4))
    sent = 0
    while ours.write_frame(event):
        sent += 1
        assert sent < 8
    assert not ours.is_open
    await until(lambda: "first" in ended)
    theirs.close()


# Reports in shared memory.


@contextmanager
def rings(workers: int = 2) -> Iterator[list[SharedReports]]:
    memory = make_memory(workers, more=reports_bytes(workers))
    yield [SharedReports(memory, workers, own=number) for number in range(workers)]
    os.close(memory)


def test_reports_are_read_whole_once_and_in_order_however_the_ring_wraps() -> None:
    chance = random.Random(5)
    with rings(3) as (first, second, third):
        for _ in range(60):
            sent = [chance.randbytes(chance.choice((0, 1, 900, 70_000, RING_BYTES // 9))) for _ in range(6)]
            for report in sent:
                assert first.write(report)
            assert second.write(sent[0])
            assert list(third.read()) == [*((0, report) for report in sent), (1, sent[0])]
            assert list(third.read()) == []
        assert third.lapped == 0
        assert not first.write(bytes(RING_BYTES))


def test_a_reader_that_was_lapped_goes_on_with_the_last_report() -> None:
    with rings() as (first, second):
        for number in range(100):
            first.write(b"%d" % number * (RING_BYTES // 40))
        assert [(worker, report[:2]) for worker, report in second.read()] == [(0, b"99")]
        assert second.lapped == 1
        first.write(b"next")
        assert list(second.read()) == [(0, b"next")]


def test_what_is_overwritten_while_it_is_read_is_not_taken_for_a_report() -> None:
    with rings() as (first, second):
        for _ in range(4):
            first.write(b"old" * (RING_BYTES // 16))
        reports = second.read()
        next(reports)
        for _ in range(6):
            first.write(b"new" * (RING_BYTES // 16))
        assert list(reports) == []
        assert second.lapped == 1
        assert [report[:3] for _, report in second.read()] == [b"new"]


def test_what_a_worker_wrote_before_another_one_started_or_heard_of_its_end_is_no_news() -> None:
    memory = make_memory(2, more=reports_bytes(2))
    first = SharedReports(memory, 2, own=0)
    first.write(b"before")
    second = SharedReports(memory, 2, own=1)
    assert list(second.read()) == []
    first.write(b"last")
    second.skip(0)
    assert list(second.read()) == []
    os.close(memory)


# Questions to other workers.


def start(number: int, processes: int = 2) -> WorkerStart:
    return WorkerStart(
        number=number, processes=processes, leader=0, key=1, text=b"", admin_token="", data=-1, admin=-1, counts=-1
    )


@contextmanager
def linked() -> Iterator[tuple[WorkerLink, WorkerLink]]:
    """Two workers whose frames reach each other in the same step."""
    memory = make_memory(2)
    links = [WorkerLink(start(number), SharedCounts(memory, 2, own=number), 0) for number in range(2)]
    rows = tuple(WorkerRow(number, number, "ready") for number in range(2))

    class Direct(Channel):
        def __init__(self, other: WorkerLink) -> None:
            super().__init__(lambda _: None, lambda: None)
            self.other = other

        def write_frame(self, frame: Frame) -> bool:
            self.other.on_frame(frame)
            return True

    for link, other in zip(links, reversed(links), strict=True):
        link.connect(Direct(other))
        link.rows = rows
    try:
        yield links[0], links[1]
    finally:
        os.close(memory)


async def test_a_question_waits_for_a_worker_that_starts_and_not_for_one_that_has_ended() -> None:
    with linked() as (leader, other):
        asked = asyncio.create_task(leader.question(1, "sum", 2, 3))
        await asyncio.sleep(0)

        async def add(a: int, b: int) -> int:
            return a + b

        other.on_question("sum", add)
        assert await asked == 5
        lost = asyncio.create_task(leader.question(1, "never"))
        await asyncio.sleep(0)
        leader.on_frame(Frame(FrameKind.ENDED, -2, 0, 0, packed(1)))
        with pytest.raises(WorkerUnreachable, match="worker 1 has ended"):
            await lost


async def test_a_fault_in_an_answer_or_event_is_the_worker_s_own() -> None:
    with linked() as (leader, other):

        async def fail() -> None:
            raise RuntimeError("text of a client")

        def fail_at_once() -> None:
            raise RuntimeError("text of a client")

        other.on_question("fail", fail)
        other.on_event("fail", fail_at_once)
        leader.publish("fail")
        with pytest.raises(WorkerUnreachable, match=r"^worker 1: RuntimeError$"):
            await leader.question(1, "fail")
        assert await leader.question_all("fail") == {}


async def test_a_worker_leads_from_when_its_parent_says_so() -> None:
    with linked() as (_, other):
        found = [other.leads]
        other.on_frame(Frame(FrameKind.LEADER, -2, 1, 0, packed(1)))
        assert [*found, other.leads, other.leads_now.is_set()] == [False, True, True]


@pytest.mark.parametrize(("stopping", "retired", "leader"), [(False, False, 1), (True, False, 0), (True, True, 1)])
async def test_the_leader_stays_in_a_stop_that_all_have_been_told_of(
    stopping: bool, retired: bool, leader: int
) -> None:
    found, ours, theirs, _ = await channels()
    parent = Parent(cast(Any, None), cast(Any, None), _stopping=stopping, _retired=retired)
    parent.workers = [_Worker(number, cast(Any, object()), ours, "ready") for number in range(2)]
    parent._on_frame(parent.workers[0], Frame(FrameKind.LEAVE, 0, -1, 0, packed(None)))
    await until(lambda: found)
    assert parent.leader == leader
    assert {(frame.kind, unpacked(frame.content)) for frame in found} == {(FrameKind.LEADER, leader)}
    ours.close()
    theirs.close()


# Counts in memory.


def quotas_of_workers(workers: int, limits: ClientLimits) -> list[ClientQuotas]:
    memory = make_memory(workers)
    made = []
    for number in range(workers):
        quotas = ClientQuotas(ClientRules(limits))
        quotas.shared = SharedCounts(memory, workers, own=number)
        made.append(quotas)
    os.close(memory)
    return made


def test_a_limit_in_flight_is_that_of_all_workers() -> None:
    workers = quotas_of_workers(4, ClientLimits(max_in_flight=10))
    chance = random.Random(1)
    admitted = []
    for _ in range(40):
        worker = chance.choice(workers)
        if worker.acquire("a", now=0.0) is None:
            admitted.append(worker)
    assert len(admitted) == 10
    admitted.pop().release("a")
    assert chance.choice(workers).acquire("a", now=0.0) is None
    assert {worker.acquire("a", now=0.0) is None for worker in workers} == {False}
    assert workers[0].acquire("b", now=0.0) is None, "another client has its own limit"


def test_workers_that_decide_at_once_admit_at_most_one_more_each() -> None:
    """Each has read before any has written: the last request of the limit is admitted by all of them."""
    workers = quotas_of_workers(4, ClientLimits(max_in_flight=10))
    for _ in range(9):
        workers[0].acquire("a", now=0.0)
    checked = [worker.check("a") for worker in workers]
    assert checked == [None] * 4
    for worker in workers:
        worker._quota("a", worker._rules.for_client("a"), 0.0).in_flight += 1
        worker._share("a", worker._quotas["a"])
    assert workers[0].in_flight("a") == 10 + len(workers) - 1
    assert all(worker.acquire("a", now=0.0) for worker in workers)


def test_rates_are_those_of_all_workers_also_for_one_that_starts_later() -> None:
    limits = ClientLimits(requests_per_s=1.0, burst=6, tokens_per_s=10.0)
    workers = quotas_of_workers(3, limits)
    for number in range(6):
        assert workers[number % 2].acquire("a", now=100.0) is None
    assert [worker.acquire("a", now=100.0) is None for worker in workers] == [False] * 3
    assert workers[2].acquire("a", now=101.0) is None, "one has come back"
    assert [worker.acquire("a", now=101.0) is None for worker in workers] == [False] * 3


def test_tokens_that_an_engine_reports_are_charged_at_all_workers() -> None:
    workers = quotas_of_workers(2, ClientLimits(tokens_per_s=10.0))
    most = workers[0]._rules.for_client("a").most_tokens
    assert workers[0].acquire("a", now=100.0, tokens=10) is None
    assert workers[1].acquire("a", now=100.0, tokens=10) is None
    workers[0].release("a", tokens=10, used=int(most))
    assert workers[1].is_spent("a", now=100.0)


def test_a_worker_that_has_ended_has_nothing_in_flight_and_is_no_measure_for_others() -> None:
    memory = make_memory(3)
    first, second, third = (SharedCounts(memory, 3, own=number) for number in range(3))
    for number in range(3):
        first.reset(number)
    assert first.least_connections_of_others() > 1_000_000, "nobody else serves yet"
    second.set_connections(5)
    third.set_connections(2)
    second.set_in_flight("a", 3)
    second.spend("a", requests=3)
    assert (first.least_connections_of_others(), first.in_flight_of_others("a")) == (2, 3)
    first.reset(1)
    first.reset(2)
    assert first.in_flight_of_others("a") == 0
    assert first.spent_by_others("a") == (3, 0)
    assert first.least_connections_of_others() > 1_000_000
    os.close(memory)


def test_thousands_of_clients_are_told_apart() -> None:
    memory = make_memory(2)
    own, other = (SharedCounts(memory, 2, own=number) for number in range(2))
    names = [f"client-{number}" for number in range(4096)]
    for number, name in enumerate(names):
        own.set_in_flight(name, number)
    assert [other.in_flight_of_others(name) for name in names] == list(range(4096))
    os.close(memory)


# Metrics of all workers.


def family(name: str, kind: str, **values: float) -> Family:
    return Family(name, kind, "", {(name, (("replica", label),)): value for label, value in values.items()})


def test_each_kind_of_metric_is_merged_by_its_own_rule() -> None:
    one = [
        family("gorgo_attempts", "counter", a=1.0),
        family("gorgo_in_flight_requests", "gauge", a=2.0),
        family("gorgo_rtt_seconds", "gauge", a=0.1),
        family("gorgo_saturation_ratio", "gauge", a=0.5),
        family("gorgo_ready", "gauge", a=1.0),
        family("gorgo_config_reloads", "counter", a=4.0),
        family("gorgo_process_open_fds", "gauge", a=7.0),
    ]
    two = [
        family("gorgo_attempts", "counter", a=10.0, b=5.0),
        family("gorgo_in_flight_requests", "gauge", a=1.0, b=1.0),
        family("gorgo_rtt_seconds", "gauge", a=0.2),
        family("gorgo_saturation_ratio", "gauge", a=0.7),
        family("gorgo_ready", "gauge", a=0.0),
        family("gorgo_config_reloads", "counter", a=4.0),
        family("gorgo_process_open_fds", "gauge", a=8.0),
    ]
    found = {each.name: list(each.samples.values()) for each in merged(1, {0: one, 1: two})}
    assert found == {
        "gorgo_attempts": [11.0, 5.0],
        "gorgo_in_flight_requests": [3.0, 1.0],
        "gorgo_rtt_seconds": [0.2],
        "gorgo_saturation_ratio": [0.7],
        "gorgo_ready": [0.0],
        "gorgo_config_reloads": [4.0],
        "gorgo_process_open_fds": [8.0, 7.0],
    }
    text = exposition(merged(0, {0: one, 1: two})).decode()
    assert 'gorgo_process_open_fds{replica="a",worker="1"} 8.0' in text


def test_a_process_that_is_down_is_an_alert_and_one_that_is_back_is_none() -> None:
    stats = RecentStats.of([])
    rows = [WorkerRow(0, 1, "ready", 3), WorkerRow(1, None, "waiting", 1, 2.0), WorkerRow(2, 5, "starting")]
    found = alerts(
        [],
        stats,
        unreachable_regions=frozenset(),
        queued=0,
        stopping=False,
        config_refused=False,
        out_of_range=(),
        replicas={},
        workers=rows,
    )
    assert [alert.text for alert in found] == ["Process 1 is waiting, after 1 end that nobody asked for"]


def test_decisions_of_all_workers_are_in_one_order() -> None:
    rows = [{"decided_s": at, "ttft_ms": ttft} for at, ttft in ((1.0, 90.0), (3.0, None), (2.0, 10.0))]
    parts = [{"now_s": 4.0, "decisions": [rows[0]]}, {"now_s": 5.0, "decisions": rows[1:]}]
    newest = merged_decisions(parts, limit=2, slowest=False)
    assert [row["decided_s"] for row in newest["decisions"]] == [3.0, 2.0]
    slowest = merged_decisions(parts, limit=2, slowest=True)
    assert [row["ttft_ms"] for row in slowest["decisions"]] == [90.0, 10.0]


def test_a_violation_of_any_worker_is_one_of_the_router() -> None:
    checks: list[dict[str, Any]] = [
        {"violation": None, "active": {"a": 1}, "exchanges": 1},
        {"violation": "x", "active": {"a": 2, "b": 1}},
    ]
    assert merged_checks(checks) == {"violation": "x", "active": {"a": 3, "b": 1}, "exchanges": 1}


# What a router hands to its successor.


@contextmanager
def listeners() -> Iterator[tuple[socket.socket, socket.socket, socket.socket]]:
    """Listeners for data and admin, and the socket at which a successor is waited for."""
    with socket.create_server(("127.0.0.1", 0)) as data, socket.create_server(("127.0.0.1", 0)) as admin:
        offer = offered(admin)
        assert offer is not None
        with offer:
            yield data, admin, offer


def bind_of(listener: socket.socket) -> str:
    return "{}:{}".format(*listener.getsockname())


def test_a_successor_gets_the_listeners_and_the_name_from_the_router_of_its_admin_address() -> None:
    with listeners() as (data, admin, offer), ThreadPoolExecutor(1) as other:
        taking = other.submit(inherit, bind_of(admin))
        connection, _ = offer.accept()
        with connection:
            assert peer_of(connection) == os.getpid()
            pass_listeners(connection, data.fileno(), admin.fileno(), offer)
            found = taking.result(10)
            assert found.data is not None
            assert found.admin is not None
            assert found.offer is not None
            assert found.predecessor is not None
            taken = [each.getsockname() for each in (found.data, found.admin, found.offer)]
            assert taken == [each.getsockname() for each in (data, admin, offer)]
            assert offered(admin) is None, "one router has the name"
            assert announce(found.predecessor)
            assert connection.recv(100) == SERVES
        for each in (found.data, found.admin, found.offer):
            each.close()


def test_a_successor_that_was_given_up_does_not_serve() -> None:
    ours, theirs = socket.socketpair()
    with ours:
        ours.send(LATE)
        assert not announce(theirs)
    ours, theirs = socket.socketpair()
    ours.close()
    assert announce(theirs), "a predecessor that has ended serves no longer"


def test_nothing_is_taken_over_where_no_router_runs_or_it_does_not_serve() -> None:
    with listeners() as (data, admin, offer), ThreadPoolExecutor(1) as other:
        with pytest.raises(ConfigError, match="no router can be taken over at the admin address") as raised:
            inherit(bind_of(data))
        assert "--processes" in str(raised.value)
        taking = other.submit(inherit, bind_of(admin))
        offer.accept()[0].close()
        with pytest.raises(ConfigError, match="it starts, stops, or another successor starts"):
            taking.result(10)


def test_another_user_hands_nothing_over(monkeypatch: pytest.MonkeyPatch) -> None:
    with listeners() as (_, admin, _):
        monkeypatch.setattr(os, "geteuid", lambda: 12345)
        monkeypatch.setattr("gorgo.live.workers.parent._TRUSTED", ())
        with pytest.raises(ConfigError, match="another user's"):
            inherit(bind_of(admin))


# --- When a worker reports to those beside it, in virtual time.


class Linked:
    """In place of a worker's link."""

    number = 0

    def __init__(self) -> None:
        self.on_ended: list[Callable[[int], None]] = []


class Turns:
    """In place of the memory: when it was read and written."""

    def __init__(self, time: Callable[[], float]) -> None:
        self._time = time
        self.read_s: list[float] = []
        self.written_s: list[float] = []

    def read(self) -> Iterator[tuple[int, bytes]]:
        self.read_s.append(self._time())
        return iter(())

    def write(self, report: bytes) -> bool:
        assert report
        self.written_s.append(self._time())
        return True


class Exchange:
    """In place of a request's exchange."""

    def deliver(self, action: object) -> None:
        raise AssertionError(action)


def test_a_worker_reports_each_change_within_its_interval_and_sleeps_while_streams_go_on() -> None:
    async def run() -> None:
        time = asyncio.get_running_loop().time
        router, turns = make_router("a", "b", policy="gorgo-ms"), Turns(time)
        gateway = RouterGateway(router, time, lambda _: None)
        peers = LocalPeers(
            cast(WorkerLink, Linked()), cast(SharedReports, turns), router, gateway, time, key_id="one key"
        )
        task = asyncio.create_task(peers.run())
        await asyncio.sleep(0.7)

        async def reported_after(event: Callable[[], Any]) -> Any:
            """Let an event happen between two heartbeats; the change is written once, and nothing is done after it."""
            found, began_s = event(), time()
            await asyncio.sleep(0.15)
            written = [at_s for at_s in turns.written_s if at_s > began_s]
            assert written == pytest.approx([began_s + INTERVAL_S]), event
            assert len([at_s for at_s in turns.read_s if at_s > began_s]) <= 2, event
            await asyncio.sleep(0.7 - 0.15)
            return found

        gateway.register("r", Exchange())
        sent = await reported_after(lambda: gateway.submit(a_request("r", blocks=PROMPT)))
        assert isinstance(sent, Dispatch)
        await reported_after(lambda: gateway.first_token(sent.attempt_id, now=time()))
        await reported_after(lambda: gateway.finish(sent, COMPLETED))
        idle = [at_s for at_s in turns.written_s if at_s > time() - 0.8]
        assert len(idle) <= 0.8 / HEARTBEAT_S + 1, "an idle worker says that it is there, and nothing else"
        task.cancel()
        gateway.close()

    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        runner.run(run())
