"""What a replica is asked in the background, and when, in virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise, product
from types import SimpleNamespace
from typing import Any, cast

import pytest

from gorgo.cli.connectivity import reach_all
from gorgo.config.fleet import ReplicaConfig
from gorgo.config.model import Config, LimitsConfig, ProxyConfig, RegionConfig
from gorgo.config.values import REPLICA_KEEP_ALIVE_S, WARM_CONNECTIONS
from gorgo.core.fleet.replica import ReplicaSpec
from gorgo.core.fleet.snapshot import ReplicaSnapshot
from gorgo.core.latency.ttft import TcpWindows
from gorgo.core.messages.actions import Dispatch
from gorgo.core.messages.request import AttemptResult, EngineSample, Outcome, RouteRequest
from gorgo.core.policy.weights import Weights
from gorgo.live.build import build_live
from gorgo.live.event_loop import RouterGateway
from gorgo.live.http.headers import Header
from gorgo.live.monitor.fleet_monitor import FleetMonitor, probe_overdue, run_timers
from gorgo.live.monitor.replica_monitor import FIRST_PROBE_TIMEOUT_S, RECHECK_S, ReplicaMonitor
from gorgo.live.state import LiveState, Routing
from gorgo.live.telemetry.health import HealthLog
from gorgo.live.upstream.client import POOL_EXHAUSTED, UpstreamClient, UpstreamError
from gorgo.live.upstream.connection import ConnectionTracker, NextConnectionState, OnChange
from gorgo.policies.registry import make_policy
from tests.answering import answering
from tests.lab.sim.live_shell import VirtualLoop
from tests.proxy.conftest import system_tls

PING, METRICS, LOADS = "/ping", "/metrics", "/v1/loads?include=core"
RUNNING = b"sglang:num_running_reqs 3.0\n"


@dataclass
class Engine:
    """In the place of the way to a replica: answers after `takes_s`, or fails as `fails` says by path."""

    takes_s: float = 0.0
    fails: dict[str, str] = field(default_factory=dict)
    #: Paths without a connection.
    refused: set[str] = field(default_factory=set)
    answers: dict[str, tuple[int, bytes]] = field(default_factory=lambda: {METRICS: (200, RUNNING)})
    asked: list[tuple[float, str]] = field(default_factory=list)
    keys: set[bytes] = field(default_factory=set)
    report: OnChange | None = None
    #: Whether a connection is open and free.
    has_idle: bool = False
    #: What its name has in DNS; `None` for an address.
    addresses: list[str] | None = None
    looked_up: list[float] = field(default_factory=list)
    replaced: Callable[[str, str], None] | None = None

    @property
    def has_name(self) -> bool:
        return self.addresses is not None

    async def resolve_name(self) -> frozenset[str]:
        self.looked_up.append(asyncio.get_running_loop().time())
        if not self.addresses:
            raise OSError("no answer")
        return frozenset(self.addresses)

    def on_replaced(self, report: Callable[[str, str], None]) -> None:
        self.replaced = report

    def on_connection_change(self, report: OnChange, on_stale: Callable[[ConnectionTracker], None]) -> None:
        self.report = report

    async def fetch(
        self, path: str, headers: Sequence[Header] = (), *, timeout_s: float, body: bytes | None = None
    ) -> tuple[int, bytes]:
        self.asked.append((asyncio.get_running_loop().time(), path))
        self.keys |= {value for name, value in headers if name == b"authorization"}
        try:
            async with asyncio.timeout(timeout_s):
                await asyncio.sleep(self.takes_s)
        except TimeoutError:
            raise UpstreamError("timeout") from None
        if path in self.refused:
            raise UpstreamError("connect_failed", "connection refused")
        if path in self.fails:
            raise UpstreamError(self.fails[path])
        return self.answers.get(path, (200, b"{}"))

    async def aclose(self) -> None:
        return

    def times(self, path: str) -> list[float]:
        return [at for at, asked in self.asked if asked == path]


@dataclass
class Watch:
    """One replica, its watcher and the proxy that is told."""

    state: LiveState
    engine: Engine
    watcher: ReplicaMonitor

    @property
    def view(self) -> ReplicaSnapshot:
        (found,) = self.state.routing.router.view.snapshots(now=self.state.routing.clock())
        return found

    def counted(self, name: str) -> float:
        value = self.state.telemetry.metrics.registry.get_sample_value(name, {"replica": "a", "region": "here"})
        return value or 0.0

    async def run(self, seconds: float) -> None:
        """Let the loops run for so long."""
        loops = asyncio.create_task(self.watcher.run())
        await asyncio.sleep(seconds)
        loops.cancel()
        await asyncio.wait((loops,))


def watched(
    test: Callable[[Watch], Awaitable[None]],
    *,
    spread: float = 0.5,
    probe_interval_s: float = 30.0,
    scrape_interval_s: float | None = 30.0,
    policy: str = "round-robin",
    **replica: Any,
) -> None:
    """Run `test` in virtual time. Intervals are as configured where `spread`, drawn from [0, 1), is in the middle."""

    async def run() -> None:
        loop = asyncio.get_running_loop()
        proxy = ProxyConfig(region="here", probe_interval_s=probe_interval_s, scrape_interval_s=scrape_interval_s)
        row = replace(ReplicaConfig(name="a", region="here", url="http://127.0.0.1:1", engine="sglang"), **replica)
        config = Config(proxy=proxy, regions=(RegionConfig(name="here"),), replicas=(row,), limits=LimitsConfig())
        environ = {"REPLICA_KEY": "sk-replica"}
        state = build_live(
            config, policy=make_policy(policy), weights=None, environ=environ, key=1, seed=1, tls=system_tls()
        )
        await state.aclose()
        state.routing.clock = loop.time
        state.routing.gateway = RouterGateway(state.routing.router, loop.time, HealthLog(state.telemetry.metrics))
        engine = Engine()
        state.replicas.targets["a"].upstream = cast(UpstreamClient, engine)
        await test(Watch(state, engine, ReplicaMonitor(state, state.replicas.targets["a"], lambda: spread)))
        state.routing.gateway.close()

    with pytest.MonkeyPatch.context() as patched, asyncio.Runner(loop_factory=VirtualLoop) as runner:
        patched.setattr("gorgo.live.monitor.replica_monitor.perf_counter", runner.get_loop().time)
        runner.run(run())


def gaps(times: Iterable[float]) -> list[float]:
    return [round(later - earlier, 6) for earlier, later in pairwise(sorted(set(times)))]


# -- intervals


@pytest.mark.parametrize(("spread", "share"), [(0.0, 0.95), (0.5, 1.0), (1.0, 1.05)])
def test_loops_ask_at_their_intervals_spread_by_a_twentieth_to_each_side(spread: float, share: float) -> None:
    async def test(watch: Watch) -> None:
        await watch.run(180.0)
        assert watch.engine.times(METRICS) == pytest.approx([40.0 * share * turn for turn in (1, 2, 3, 4)])

    watched(test, spread=spread, probe_interval_s=1000.0, scrape_interval_s=40.0)


@pytest.mark.parametrize(
    ("policy", "given", "interval_s"),
    [("lodestar", None, 1.0), ("load-prefix", None, 1.0), ("round-robin", None, 30.0), ("lodestar", 10.0, 10.0)],
)
def test_scrapes_are_as_frequent_as_the_policy_needs_unless_the_file_says_otherwise(
    policy: str, given: float | None, interval_s: float
) -> None:
    async def test(watch: Watch) -> None:
        watch.engine.fails[METRICS] = "timeout"
        await watch.run(95.0)
        assert gaps(watch.engine.times(METRICS)) == [interval_s] * (int(95.0 / interval_s) - 1)

    watched(test, policy=policy, probe_interval_s=1000.0, scrape_interval_s=given)


def test_another_policy_at_run_time_is_scraped_for_within_seconds() -> None:
    async def test(watch: Watch) -> None:
        loops = asyncio.create_task(watch.watcher.run())
        await asyncio.sleep(7.0)
        assert not watch.engine.times(METRICS)
        policy = make_policy("load-prefix")
        watch.state.routing.router.settings.set_policy(policy, Weights.of(policy.weight_specs), now=7.0)
        await asyncio.sleep(RECHECK_S + 1.0)
        assert len(watch.engine.times(METRICS)) >= 2
        loops.cancel()
        await asyncio.wait((loops,))

    watched(test, probe_interval_s=1000.0, scrape_interval_s=None)


def test_probes_have_an_interval_of_their_own() -> None:
    async def test(watch: Watch) -> None:
        watch.engine.fails[PING] = "timeout"  # nothing is kept warm then
        await watch.run(100.0)
        assert watch.engine.times(PING)[-5:] == pytest.approx([15.0, 30.0, 45.0, 60.0, 75.0, 90.0][-5:])

    watched(test, probe_interval_s=15.0, scrape_interval_s=1000.0)


def test_connections_are_kept_warm_well_within_the_time_that_engines_keep_them() -> None:
    async def test(watch: Watch) -> None:
        await watch.run(60.0)
        pings = watch.engine.times(PING)
        assert [pings.count(at) for at in sorted(set(pings))] == [WARM_CONNECTIONS] * 28
        # uvicorn and llama.cpp close what is idle for 5 s, the pool what is idle for 4 s.
        assert max(gaps(pings)) < REPLICA_KEEP_ALIVE_S < 5.0

    watched(test, spread=1.0, probe_interval_s=1000.0, scrape_interval_s=1000.0)


def test_silent_replica_is_kept_warm_no_more_until_a_probe_finds_it_again() -> None:
    async def test(watch: Watch) -> None:
        watch.engine.fails[PING] = "connect_failed"
        await watch.watcher.probe()
        await watch.run(19.0)
        assert len(watch.engine.times(PING)) == 1
        del watch.engine.fails[PING]
        await watch.watcher.probe()
        await watch.run(19.0)
        assert len(watch.engine.times(PING)) == 1 + 2 + 9 * WARM_CONNECTIONS

    watched(test, probe_interval_s=1000.0, scrape_interval_s=1000.0)


def test_pings_that_find_no_connection_say_so_after_two_rounds_and_one_that_does_ends_it() -> None:
    async def test(watch: Watch) -> None:
        (target,) = watch.state.replicas.targets.values()
        watch.engine.refused = {PING}
        for unreachable in (False, True):
            await watch.watcher.warm()
            assert target.unreachable is unreachable
        await watch.watcher.probe()
        watch.engine.refused = set()
        await watch.watcher.probe()
        assert not target.unreachable

    watched(test)


def test_replica_that_a_probe_finds_gone_first_is_pinged_until_that_is_certain() -> None:
    async def test(watch: Watch) -> None:
        (target,) = watch.state.replicas.targets.values()
        watch.engine.refused = {PING}
        await watch.watcher.probe()
        await watch.run(19.0)
        assert target.unreachable
        assert len(watch.engine.times(PING)) == 1 + 2 * WARM_CONNECTIONS

    watched(test, probe_interval_s=1000.0, scrape_interval_s=1000.0)


def test_watch_that_ends_as_it_is_about_to_ping_leaves_no_coroutine_behind() -> None:
    async def test(watch: Watch) -> None:
        warming = asyncio.create_task(watch.watcher.warm())
        await asyncio.sleep(0)
        warming.cancel()
        await asyncio.wait((warming,))
        assert watch.engine.asked == []

    watched(test)


# -- probes


def test_round_trip_is_that_of_the_second_ping() -> None:
    async def test(watch: Watch) -> None:
        fetch = watch.engine.fetch

        async def slower_at_first(path: str, headers: Sequence[Header] = (), **options: Any) -> tuple[int, bytes]:
            watch.engine.takes_s = 0.02 if watch.engine.asked else 0.5
            return await fetch(path, headers, **options)

        watch.engine.fetch = slower_at_first  # type: ignore[method-assign]
        await watch.watcher.probe()
        assert watch.view.rtt_ms == pytest.approx(20.0)
        ((at_s, rtt_s),) = watch.state.telemetry.probe_history.for_replica("a")
        assert (at_s, rtt_s or 0.0) == pytest.approx((0.52, 0.02))

    watched(test)


@pytest.mark.parametrize(
    ("status", "answers"),
    [(200, True), (204, True), (301, False), (401, False), (403, False), (499, False), (500, False), (503, False)],
)
def test_a_probe_is_well_with_2xx_alone(status: int, answers: bool) -> None:
    async def test(watch: Watch) -> None:
        watch.engine.answers[PING] = (status, b"")
        await watch.watcher.probe()
        assert (watch.view.rtt_ms is not None) is answers
        assert watch.counted("gorgo_probe_failures_total") == (0.0 if answers else 1.0)
        assert watch.view.failures_in_a_row == (0 if answers else 1)

    watched(test)


@pytest.mark.parametrize(
    ("ping", "models", "answers", "refusal"),
    [
        (404, 200, True, None),
        (405, 200, True, None),
        (404, 404, False, 404),
        (404, 401, False, 401),
        (404, 500, False, 404),
        (401, 200, False, 401),
        (500, 200, False, None),
    ],
)
def test_an_engine_without_the_path_of_a_probe_is_probed_on_another_one(
    ping: int, models: int, answers: bool, refusal: int | None
) -> None:
    async def test(watch: Watch) -> None:
        watch.engine.answers |= {PING: (ping, b""), "/v1/models": (models, b"")}
        await watch.watcher.probe()
        assert (watch.view.rtt_ms is not None, watch.view.refusal) == (answers, refusal)
        before = len(watch.engine.asked)
        await watch.watcher.probe()
        paths = [path for _, path in watch.engine.asked[before:] if path != METRICS]
        if answers:
            assert set(paths) <= {"/v1/models", LOADS}
        watch.engine.answers |= {PING: (200, b""), "/v1/models": (200, b"")}
        await watch.watcher.probe()
        assert (watch.view.rtt_ms is not None, watch.view.refusal) == (True, None)

    watched(test)


def test_probe_for_which_this_process_has_no_connection_says_nothing_of_the_replica() -> None:
    async def test(watch: Watch) -> None:
        watch.engine.fails[PING] = POOL_EXHAUSTED
        await watch.watcher.probe()
        assert watch.view.failures_in_a_row == 0
        assert watch.counted("gorgo_probe_failures_total") == 0.0

    watched(test)


def test_figures_are_read_at_once_of_a_replica_that_is_back() -> None:
    async def test(watch: Watch) -> None:
        await watch.watcher.probe()
        assert watch.engine.times(METRICS) == []
        watch.engine.fails[PING] = "timeout"
        await watch.watcher.probe()
        assert watch.engine.times(METRICS) == []
        del watch.engine.fails[PING]
        await watch.watcher.probe()
        assert len(watch.engine.times(METRICS)) == 1
        assert watch.view.running_requests == 3.0

    watched(test)


def test_ping_that_takes_too_long_is_given_up() -> None:
    async def test(watch: Watch) -> None:
        watch.engine.takes_s = 1000.0
        await watch.watcher.probe()
        assert asyncio.get_running_loop().time() == pytest.approx(5.0)
        assert watch.view.failures_in_a_row == 1

    watched(test)


# -- figures


def test_figures_that_take_too_long_are_unknown() -> None:
    async def test(watch: Watch) -> None:
        watch.engine.takes_s = 1000.0
        await watch.watcher.scrape()
        assert asyncio.get_running_loop().time() == pytest.approx(20.0)  # two of them
        assert watch.counted("gorgo_scrape_failures_total") == 1.0

    watched(test)


def test_silence_of_the_metrics_is_logged_when_it_begins_and_again_after_they_were_back(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def told() -> int:
        return sum(record.getMessage() == "scrape_failed" for record in caplog.records)

    async def test(watch: Watch) -> None:
        watch.engine.fails |= {METRICS: "timeout", LOADS: "timeout"}
        for _ in range(3):
            await watch.watcher.scrape()
        assert told() == 1
        watch.engine.fails.clear()
        await watch.watcher.scrape()
        watch.engine.fails |= {METRICS: "timeout", LOADS: "timeout"}
        await watch.watcher.scrape()
        assert told() == 2
        assert watch.counted("gorgo_scrape_failures_total") == 4.0

    watched(test)


def test_metrics_and_loads_complete_each_other() -> None:
    loads = b'{"loads": [{"num_running_reqs": 9, "max_total_num_tokens": 5000, "max_running_requests": 8}]}'

    async def test(watch: Watch) -> None:
        watch.engine.answers[LOADS] = (200, loads)
        await watch.watcher.scrape()
        assert (watch.view.running_requests, watch.view.kv_capacity_tokens) == (3.0, 5000.0)
        watch.engine.answers[LOADS] = (500, loads.replace(b"5000", b"6000"))
        await watch.watcher.scrape()
        assert watch.view.kv_capacity_tokens == 5000.0
        watch.engine.answers = {LOADS: (200, loads), METRICS: (404, b"")}
        await watch.watcher.scrape()
        assert (watch.view.running_requests, watch.view.max_running_requests) == (9.0, 8.0)

    watched(test)


CORE = b'{"loads": [{"num_running_reqs": 9, "num_waiting_reqs": 1, "num_used_tokens": 70}]}'


def test_a_short_interval_reads_the_loads_each_time_and_all_metrics_every_five_seconds() -> None:
    async def test(watch: Watch) -> None:
        watch.engine.answers[LOADS] = (200, CORE)
        await watch.run(20.0)
        loads, metrics = watch.engine.times(LOADS), watch.engine.times(METRICS)
        assert len(loads) == pytest.approx(200, abs=2)
        assert set(gaps(loads)) == {0.1}
        assert all(5.0 <= gap <= 5.1 for gap in gaps(metrics))
        assert len(metrics) == 4
        assert watch.view.running_requests == 9.0

    watched(test, scrape_interval_s=0.1)


@pytest.mark.parametrize("answer", [(404, b""), (200, b"{}"), (200, CORE.replace(b"num_used_tokens", b"other"))])
def test_an_engine_without_the_loads_is_read_by_its_metrics_each_time(answer: tuple[int, bytes]) -> None:
    async def test(watch: Watch) -> None:
        watch.engine.answers[LOADS] = answer
        await watch.run(5.0)
        assert set(gaps(watch.engine.times(METRICS))) == {0.1}

    watched(test, scrape_interval_s=0.1)


def test_a_short_interval_reads_the_models_once_a_second() -> None:
    async def test(watch: Watch) -> None:
        await watch.run(5.5)
        assert set(gaps(watch.engine.times("/v1/models"))) == {1.0}

    watched(test, scrape_interval_s=0.1)


def test_engine_without_figures_is_asked_for_none() -> None:
    async def test(watch: Watch) -> None:
        await watch.watcher.scrape()
        await watch.watcher.probe_once()
        assert {path for _, path in watch.engine.asked} == {"/v1/models"}
        assert watch.counted("gorgo_scrape_failures_total") == 0.0

    watched(test, engine="openai")


def test_replica_is_asked_with_its_own_key() -> None:
    async def test(watch: Watch) -> None:
        await watch.watcher.probe_once()
        assert watch.engine.keys == {b"Bearer sk-replica"}

    watched(test, api_key_env="REPLICA_KEY")


def test_engine_that_started_again_is_logged_and_counted(caplog: pytest.LogCaptureFixture) -> None:
    async def test(watch: Watch) -> None:
        for served in (900, 901, 20, 30):
            watch.engine.answers[METRICS] = (200, RUNNING + b"sglang:prompt_tokens_total %d\n" % served)
            await watch.watcher.scrape()
        assert watch.counted("gorgo_replica_restarts_total") == 1.0
        assert [record.getMessage() for record in caplog.records] == ["replica_restarted"]

    watched(test)


# -- after a broken connection


def test_a_break_is_followed_by_a_probe_at_once_because_the_engine_may_have_died() -> None:
    async def test(watch: Watch) -> None:
        loops = asyncio.create_task(watch.watcher.run())
        await asyncio.sleep(5.0)
        assert 5.0 not in watch.engine.times(PING)
        watch.engine.fails[PING] = "connect_failed"
        watch.state.replicas.targets["a"].connection_lost.set()
        await asyncio.sleep(0.1)
        assert watch.engine.times(PING)[-1] == pytest.approx(5.0)
        (view,) = watch.state.routing.router.view.snapshots(now=watch.state.routing.clock())
        assert view.answers is False
        loops.cancel()
        await asyncio.wait((loops,))

    watched(test, probe_interval_s=1000.0, scrape_interval_s=1000.0)


def test_figures_are_read_soon_after_a_break_and_ever_later_until_the_engine_tells() -> None:
    async def test(watch: Watch) -> None:
        watch.engine.fails |= {METRICS: "connect_failed", LOADS: "connect_failed"}
        loops = asyncio.create_task(watch.watcher.run())
        watch.state.replicas.targets["a"].connection_lost.set()
        await asyncio.sleep(4.0)
        watch.engine.fails.clear()
        await asyncio.sleep(20.0)
        # 0.5 s after it, 1 s after that, 2 s after that, and 4 s after that, when it answers.
        assert watch.engine.times(METRICS) == pytest.approx([0.5, 1.5, 3.5, 7.5])
        assert not watch.state.replicas.targets["a"].connection_lost.is_set()
        watch.state.replicas.targets["a"].connection_lost.set()
        await asyncio.sleep(1.0)
        assert watch.engine.times(METRICS)[4:] == pytest.approx([24.5])
        loops.cancel()
        await asyncio.wait((loops,))

    watched(test, probe_interval_s=1000.0, scrape_interval_s=1000.0)


def test_looks_after_a_break_end_where_the_next_scrape_is_due_anyway() -> None:
    async def test(watch: Watch) -> None:
        watch.engine.fails |= {METRICS: "connect_failed", LOADS: "connect_failed"}
        watch.state.replicas.targets["a"].connection_lost.set()
        await watch.run(3.0)
        assert watch.engine.times(METRICS) == pytest.approx([0.5, 1.5, 2.0])

    watched(test, probe_interval_s=1000.0, scrape_interval_s=2.0)


@pytest.mark.timeout(10)
def test_break_is_left_to_scrapes_that_come_sooner_than_a_look_after_it() -> None:
    async def test(watch: Watch) -> None:
        watch.state.replicas.targets["a"].connection_lost.set()
        await watch.run(0.9)
        assert watch.engine.times(METRICS) == pytest.approx([0.25, 0.5, 0.75])

    watched(test, probe_interval_s=1000.0, scrape_interval_s=0.25)


# -- before the Router knows it


def test_first_look_is_kept_until_it_is_told() -> None:
    async def test(watch: Watch) -> None:
        look = await watch.watcher.probe_once()
        assert (watch.view.rtt_ms, watch.view.running_requests) == (None, None)
        watch.watcher.publish(look)
        assert (watch.view.rtt_ms, watch.view.running_requests) == (0.0, 3.0)

    watched(test)


@pytest.mark.parametrize(
    ("fails", "rtt", "figures"),
    [({PING: "timeout"}, False, True), ({METRICS: "timeout", LOADS: "timeout"}, True, False)],
)
def test_half_a_first_look_is_one(fails: dict[str, str], rtt: bool, figures: bool) -> None:
    async def test(watch: Watch) -> None:
        watch.engine.fails |= fails
        look = await watch.watcher.probe_once()
        assert (look.rtt_s is not None, look.sample is not None) == (rtt, figures)

    watched(test)


@pytest.mark.parametrize(("silent", "failures"), [({PING}, 1.0), ({METRICS}, 0.0)])
def test_first_look_ends_in_time_and_what_came_by_then_counts(silent: set[str], failures: float) -> None:
    async def test(watch: Watch) -> None:
        fetch = watch.engine.fetch

        async def some_hang(path: str, headers: Sequence[Header] = (), **options: Any) -> tuple[int, bytes]:
            if path in silent:
                await asyncio.sleep(1000.0)
            return await fetch(path, headers, **options)

        watch.engine.fetch = some_hang  # type: ignore[method-assign]
        look = await watch.watcher.probe_once()
        assert asyncio.get_running_loop().time() == pytest.approx(FIRST_PROBE_TIMEOUT_S)
        assert (look.rtt_s is None) is (PING in silent)
        assert watch.counted("gorgo_probe_failures_total") == failures

    watched(test)


# -- connections


def test_next_connection_is_told_to_the_router_unless_the_name_is_another_processs() -> None:
    async def test(watch: Watch) -> None:
        report, columns = watch.engine.report, watch.state.routing.router._fleet.columns
        assert report is not None
        await asyncio.sleep(10.0)
        report(NextConnectionState(TcpWindows(20_000, 30_000), 4.0))
        assert (columns.cwnd_bytes[0], columns.rwnd_bytes[0], columns.sent_s[0]) == (20_000, 30_000, 6.0)
        watch.state.replicas.targets = {}
        report(NextConnectionState(TcpWindows(1, 2), 0.0))
        assert columns.cwnd_bytes[0] == 20_000

    watched(test)


def probes_of(watch: Watch) -> list[float]:
    """The times of its probes from now on."""
    times, probe = [], watch.watcher.probe

    async def recorded() -> None:
        times.append(round(asyncio.get_running_loop().time(), 3))
        await probe()

    watch.watcher.probe = recorded  # type: ignore[method-assign]
    return times


def joined(watch: Watch) -> Awaitable[None]:
    """The first look at a replica, as before it joins the fleet."""

    async def join() -> None:
        watch.watcher.publish(await watch.watcher.probe_once())

    return join()


def test_a_replica_that_is_silent_at_first_is_probed_each_second_while_no_replica_answers() -> None:
    async def test(watch: Watch) -> None:
        watch.engine.refused = {PING}
        await joined(watch)
        loops = asyncio.create_task(watch.watcher.run())
        await asyncio.sleep(20.5)
        watch.engine.refused = set()
        await asyncio.sleep(1.0)
        assert watch.view.answers, "it answers within a second of its start"
        assert watch.state.why_not_ready() is None
        loops.cancel()
        await asyncio.wait((loops,))

    watched(test)


def test_a_silent_replica_of_a_fleet_that_answers_is_probed_ever_more_rarely() -> None:
    async def test(watch: Watch) -> None:
        watch.engine.refused = {PING}
        await joined(watch)
        router = watch.state.routing.router
        router.replicas.set_fleet([ReplicaSpec("a", "here"), ReplicaSpec("b", "here")], now=0.0)
        router.replicas.on_probe("b", 0.01, now=0.0)
        probes = probes_of(watch)
        await watch.run(110.0)
        assert probes == [1, 3, 7, 15, 31, 61, 91]

    watched(test)


def test_the_first_three_answers_come_a_second_apart_and_the_shortest_counts() -> None:
    async def test(watch: Watch) -> None:
        watch.engine.takes_s = 0.4
        await joined(watch)
        assert watch.view.rtt_ms == pytest.approx(400.0)
        watch.engine.takes_s = 0.01
        start_s, probes = asyncio.get_running_loop().time(), probes_of(watch)
        await watch.run(70.0)
        assert [round(at - start_s) for at in probes] == [1, 2, 32, 62]
        assert watch.view.rtt_ms == pytest.approx(10.0), "one slow probe is no price for half a minute"

    watched(test)


# -- names


def test_name_is_looked_up_in_the_background_and_an_address_is_not() -> None:
    async def test(watch: Watch) -> None:
        await watch.run(21.0)
        assert watch.engine.looked_up == []
        watch.engine.addresses = ["10.0.0.1"]
        await watch.run(21.0)
        assert gaps(watch.engine.looked_up) == [5.0, 5.0, 5.0]

    watched(test)


def test_name_with_several_addresses_is_warned_of_once_and_dns_may_be_away(caplog: pytest.LogCaptureFixture) -> None:
    async def test(watch: Watch) -> None:
        for addresses in (["10.0.0.1", "fd00::1"], ["10.0.0.1", "10.0.0.2"], [], ["10.0.0.1", "10.0.0.2", "10.0.0.3"]):
            watch.engine.addresses = addresses
            await watch.watcher.resolve_name()

    watched(test)
    (said,) = [record for record in caplog.records if record.getMessage() == "replica_has_several_addresses"]
    assert getattr(said, "fields", {})["replica"] == "a"
    assert "2 addresses (10.0.0.1, 10.0.0.2)" in getattr(said, "fields", {})["advice"]
    assert "fleet_sources" in getattr(said, "fields", {})["advice"]


def test_changed_peer_is_another_process_whose_cache_is_empty() -> None:
    async def test(watch: Watch) -> None:
        router = watch.state.routing.router
        blocks = b"".join(number.to_bytes(8, "big") for number in range(4))
        request = RouteRequest("r", 0.0, 256, blocks, 64.0, 1)
        dispatch, _ = router.submit(request, now=0.0)
        assert isinstance(dispatch, Dispatch)
        router.on_first_token(dispatch.attempt_id, now=0.1)
        router.on_finish(dispatch.attempt_id, Outcome(AttemptResult.COMPLETED, status=200), now=0.2)
        router.replicas.on_engine_sample("a", EngineSample(prompt_tokens_total=900.0), now=0.3)
        assert watch.view.index_blocks == 4
        assert watch.engine.replaced is not None
        watch.engine.replaced("10.0.0.1", "10.0.0.2")
        assert (watch.view.index_blocks, watch.view.restarts) == (0, 1)
        router.replicas.on_engine_sample("a", EngineSample(prompt_tokens_total=20.0), now=0.4)
        assert watch.view.restarts == 1, "its counters are its own"
        before = len(watch.engine.asked)
        await watch.run(1.0)
        assert {path for _, path in watch.engine.asked[before:]} >= {"/v1/models", METRICS}, "it is read anew at once"

    watched(test)


def test_probe_is_one_request_on_a_warm_connection_and_two_where_it_has_to_open_one() -> None:
    async def test(watch: Watch) -> None:
        for has_idle, pings in ((False, 2), (True, 1)):
            watch.engine.has_idle = has_idle
            before = len(watch.engine.times(PING))
            await watch.watcher.probe()
            assert len(watch.engine.times(PING)) - before == pings

    watched(test)


# --- When the Router is told the time, and what probes and `gorgo check --live` agree on.


# --- When the Router is told the time, in virtual time.


def times_told(due_s: list[float | None], run_s: float) -> list[float]:
    """When the Router hears the time, if it wants to at `due_s`, one after the other and then the last again."""

    async def run() -> list[float]:
        now, told = asyncio.get_running_loop().time, []

        def next_timer() -> float | None:
            return due_s.pop(0) if len(due_s) > 1 else due_s[0]

        router = SimpleNamespace(next_timer=next_timer)
        gateway = SimpleNamespace(run_timer=lambda: told.append(round(now(), 6)))
        timers = asyncio.create_task(
            run_timers(cast(Routing, SimpleNamespace(router=router, gateway=gateway, clock=now)))
        )
        await asyncio.sleep(run_s)
        timers.cancel()
        await asyncio.wait((timers,))
        return told

    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(run())


@pytest.mark.parametrize(
    ("due_s", "told"),
    [
        ([None], [1.0, 2.0, 3.0]),
        ([1000.0], [1.0, 2.0, 3.0]),
        ([0.25, None], [0.25, 1.25, 2.25, 3.25]),
        ([0.25, 0.75, None], [0.25, 0.75, 1.75, 2.75]),
        ([-5.0, None], [0.01, 1.01, 2.01, 3.01]),
    ],
)
def test_router_is_told_the_time_when_it_wants_and_each_second_anyway(
    due_s: list[float | None], told: list[float]
) -> None:
    assert times_told(due_s, 3.5) == told


async def test_a_probe_out_of_turn_runs_once_at_a_time_and_for_replicas_of_the_fleet_alone() -> None:
    probes, answer = [], asyncio.Event()

    class Monitor:
        target = SimpleNamespace(name="a")

        async def run(self) -> None:
            await asyncio.Event().wait()

        async def probe(self) -> None:
            probes.append("a")
            await answer.wait()

    async with asyncio.TaskGroup() as tasks:
        monitors = FleetMonitor(tasks)
        monitors.start(cast(ReplicaMonitor, Monitor()))
        for name in ("a", "a", "gone"):
            monitors.probe(name)
        await asyncio.sleep(0)
        assert probes == ["a"]
        answer.set()
        await asyncio.sleep(0.01)
        answer.clear()
        monitors.probe("a")
        await asyncio.sleep(0)
        assert probes == ["a", "a"]
        monitors.stop_all()  # the one in progress too


def test_a_replica_with_overdue_requests_is_probed_out_of_turn_each_second() -> None:
    async def run() -> list[tuple[float, str]]:
        now, probed = asyncio.get_running_loop().time, []
        view = SimpleNamespace(overdue_replicas=lambda now: ["hung"] if 1.5 < now < 4.5 else [])
        routing = cast(Routing, SimpleNamespace(router=SimpleNamespace(view=view), clock=now))
        fleet = cast(FleetMonitor, SimpleNamespace(probe=lambda name: probed.append((round(now(), 6), name))))
        watching = asyncio.create_task(probe_overdue(routing, fleet))
        await asyncio.sleep(10.0)
        watching.cancel()
        await asyncio.wait((watching,))
        return probed

    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        assert runner.run(run()) == [(2.0, "hung"), (3.0, "hung"), (4.0, "hung")]


# --- `gorgo check --live` and the probes of the proxy agree on every pair of answers.


STATUSES = (200, 204, 302, 401, 403, 404, 405, 429, 500, 503)
MODELS = "/v1/models"


async def checked() -> dict[tuple[int, int], bool]:
    """Whether check takes the replica for well, by the statuses of both paths."""
    found, statuses = dict[tuple[int, int], bool](), dict[str, int]()
    async with answering(lambda path: statuses.get(path, 404)) as url:
        for ping, models in product(STATUSES, STATUSES):
            statuses.update({PING: ping, MODELS: models})
            replica = ReplicaConfig(name="r", region="a", url=url, engine="sglang")
            (row,) = await asyncio.to_thread(reach_all, [replica], environ={}, timeout_s=5.0)
            found[ping, models] = row.error is None
    return found


def probed() -> dict[tuple[int, int], bool]:
    """Whether the first probe of a proxy is answered."""
    return {(ping, models): is_probed(ping, models) for ping, models in product(STATUSES, STATUSES)}


def is_probed(ping: int, models: int) -> bool:
    answers: list[bool] = []

    async def test(watch: Watch) -> None:
        watch.engine.answers |= {PING: (ping, b""), MODELS: (models, b"")}
        await watch.watcher.probe()
        answers.append(watch.view.rtt_ms is not None)

    watched(test)
    return answers == [True]


def test_check_live_and_probes_agree_on_every_pair_of_answers() -> None:
    found = asyncio.run(checked())
    assert found == probed()
    well = {pair for pair, is_well in found.items() if is_well}
    assert well == {(ping, models) for ping, models in found if ping < 300 or (ping in (404, 405) and models < 300)}
