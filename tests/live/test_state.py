"""How a proxy is wired from its configuration, who gets which action of the Router, and when it is woken."""

from __future__ import annotations

import asyncio
import os
import ssl
import sys
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import httpx
import pytest

from gorgo.config.fleet import ReplicaConfig
from gorgo.config.model import Config, OverloadConfig, ProxyConfig, RegionConfig
from gorgo.config.router_settings import router_limits
from gorgo.core.dispatch.lifecycle import SERVED_ELSEWHERE
from gorgo.core.messages.actions import (
    Action,
    Cancel,
    Dispatch,
    FleetEvent,
    HealthChanged,
    Hedge,
    Hold,
    RegionChanged,
    Reject,
)
from gorgo.core.messages.decision import Decision
from gorgo.core.messages.request import AttemptResult, Outcome, RouteRequest
from gorgo.core.router import Router
from gorgo.live.build import build_live
from gorgo.live.event_loop import EpochClock, RouterGateway, ahead_s
from gorgo.live.state import LiveState, why_not_ready
from gorgo.policies.registry import make_policy
from tests.lab.sim.live_shell import VirtualLoop
from tests.live.admin.page.made import view
from tests.proxy.conftest import QUIET, Start, system_tls
from tests.proxy.fakes import answer, chat
from tests.proxy.followed import follow, regions
from tests.proxy.test_reload_process import served

# --- How a proxy is wired from its configuration.


CONFIG = Config(
    proxy=QUIET,
    regions=(RegionConfig(name="here"),),
    replicas=(ReplicaConfig(name="a", region="here", url="https://127.0.0.1:1"),),
)


async def built(config: Config = CONFIG, **options: Any) -> LiveState:
    state = build_live(config, policy=make_policy("round-robin"), weights=None, environ={}, key=1, seed=1, **options)
    await state.aclose()
    return state


async def test_replicas_must_show_a_certificate_of_the_system_s_authorities_by_default(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    monkeypatch.setattr(ssl, "create_default_context", lambda: made)
    assert (await built()).replicas.tls() is made


async def test_a_context_that_is_given_is_the_one_of_replicas_without_files() -> None:
    assert (await built(tls=system_tls())).replicas.tls() is system_tls()


@pytest.mark.parametrize(("variable", "internal"), [({}, False), ({"GORGO_INTERNAL_ROUTES": "1"}, True)])
async def test_internal_routes_are_there_for_those_who_ask(variable: dict[str, str], internal: bool) -> None:
    policy = make_policy("round-robin")
    state = build_live(CONFIG, policy=policy, weights=None, environ=variable, key=1, seed=1, tls=system_tls())
    await state.aclose()
    assert state.internal_routes is internal


@pytest.mark.parametrize(
    ("proxy", "stale_after_s"),
    [
        ({"probe_interval_s": 5.0, "scrape_interval_s": 30.0}, 90.0),
        ({"probe_interval_s": 40.0, "scrape_interval_s": 30.0}, 120.0),
    ],
)
def test_what_is_known_is_stale_after_three_of_the_longer_interval(
    proxy: dict[str, float], stale_after_s: float
) -> None:
    limits = router_limits(Config(proxy=ProxyConfig(region="here", **proxy), regions=CONFIG.regions, replicas=()))  # type: ignore[arg-type]
    assert limits.stale_after_s == stale_after_s
    assert limits.region_window_s == proxy["probe_interval_s"]


def test_milliseconds_of_the_file_are_seconds_of_the_router() -> None:
    file = OverloadConfig(
        max_backlog_ms=1500.0,
        slo_ttft_ms=2000.0,
        slo_e2e_ms=9000.0,
        no_replica_wait_s=4.0,
        queue_max_requests=17,
    )
    limits = router_limits(Config(proxy=QUIET, regions=CONFIG.regions, replicas=(), overload=file))
    found = limits.overload
    assert (found.max_backlog_s, found.slo_ttft_s, found.slo_e2e_s) == (1.5, 2.0, 9.0)
    assert (found.no_replica_wait_s, found.queue_max_requests) == (4.0, 17)
    unset = router_limits(CONFIG).overload
    assert (unset.slo_ttft_s, unset.slo_e2e_s) == (None, None)


SILENT = "without an answer to probes"
NOT_ALLOWED = "without a model that its region may serve"


@pytest.mark.parametrize(
    ("changes", "obstacle"),
    [
        ({}, None),
        ({"answers": False}, None),  # one lost ping after a recent round trip
        ({"answers": False, "rtt_ms": None, "failures_in_a_row": 0}, None),  # requests succeed
        ({"answers": None, "rtt_ms": None}, None),  # no probe yet
        ({"answers": False, "rtt_ms": None, "failures_in_a_row": 1}, SILENT),
        ({"state": "ejected", "ejected_by": "probes"}, SILENT),
        ({"state": "ejected", "ejected_by": "region"}, SILENT),
        ({"state": "ejected", "ejected_by": "attempts"}, "ejected after failed requests"),
        ({"state": "half_open", "ejected_by": "attempts", "answers": True}, None),
        ({"state": "half_open", "ejected_by": "probes", "answers": False}, SILENT),
        ({"state": "draining"}, "draining"),
        ({"models": ("m",)}, NOT_ALLOWED),
        ({"models": ("m", "free")}, None),
        ({"models": ("far only", "m")}, NOT_ALLOWED),
    ],
)
def test_replica_counts_only_if_it_could_serve_a_request(changes: dict[str, Any], obstacle: str | None) -> None:
    allowed = {"m": frozenset({"elsewhere"}), "far only": frozenset({"far"})}
    expected = None if obstacle is None else ("no_replica", f"no replica can serve a request: 1 {obstacle}")
    assert why_not_ready([view(**changes)], allowed) == expected


def test_reason_counts_the_replicas_of_each_kind_and_names_none() -> None:
    gone = [view("a", state="draining"), view("b", state="ejected", ejected_by="probes"), view("c", state="draining")]
    assert why_not_ready(gone, {}) == ("no_replica", f"no replica can serve a request: 2 draining, 1 {SILENT}")
    assert why_not_ready([*gone, view("d")], {}) is None


def test_replica_whose_pings_find_no_connection_does_not_count_before_its_probes_eject_it() -> None:
    expected = ("no_replica", "no replica can serve a request: 1 without a connection")
    assert why_not_ready([view("a")], {}, unreachable={"a"}) == expected
    assert why_not_ready([view("a"), view("b")], {}, unreachable={"a"}) is None


def test_empty_fleet_is_not_ready() -> None:
    assert why_not_ready([], {}) == ("no_replica", "no replica can serve a request: the fleet is empty")


async def test_fleet_that_is_ejected_by_failed_requests_is_not_ready_until_a_trial_may_start(start: Start) -> None:
    fleet = await start.fleet([answer(500)])
    for _ in range(3):
        await fleet.client.post("/v1/chat/completions", content=chat())
    refused = await fleet.client.get("/ready")
    assert refused.status_code == 503
    assert refused.json()["error"]["message"].endswith("1 ejected after failed requests")
    alerts = [row["text"] for row in (await fleet.admin.get("/admin/status")).json()["alerts"]]
    assert "No replica can serve a request: 1 ejected after failed requests" in alerts
    fleet.state.routing.router.handle_timer(now=fleet.state.routing.clock() + 60.0)
    assert (await fleet.client.get("/ready")).status_code == 200


async def test_replica_whose_region_may_serve_none_of_its_models_does_not_make_the_proxy_ready(
    start: Start, tmp_path: Path
) -> None:
    replica = await start.replica(answer(200))
    row = {"url": replica.url, "models": ["m"]}
    places = [{"name": "here"}, {"name": "far"}]
    rule = [{"name": "m", "allowed_regions": ["far"]}]
    followed = await follow(start, tmp_path, regions({"a": row}, regions=places, models=rule), [replica])
    client = followed.fleet.client
    assert NOT_ALLOWED in (await client.get("/ready")).json()["error"]["message"]
    assert (await client.post("/v1/chat/completions", content=chat())).status_code == 403
    await followed.rewrite(regions({"a": row}, regions=places, clients={"open": True}))
    assert (await client.get("/ready")).status_code == 200


@asynccontextmanager
async def engine(folder: Path, port: int) -> AsyncIterator[asyncio.subprocess.Process]:
    """`gorgo engine` on this port, killed at the end of the block."""
    words = ("engine", "--config", str(folder / "engine.yaml"), "--replica", "a", "--port", str(port))
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "gorgo", *words),
        stdout=asyncio.subprocess.PIPE,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )
    try:
        assert process.stdout is not None
        assert b"listening on" in await asyncio.wait_for(process.stdout.readline(), 30)
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


async def ready_becomes(client: httpx.AsyncClient, status: int) -> httpx.Response:
    async with asyncio.timeout(30):
        while (response := await client.get("/ready")).status_code != status:
            await asyncio.sleep(0.05)
    return response


@pytest.mark.system
async def test_processes_that_die_and_return_turn_ready_off_and_on(tmp_path: Path, unused_tcp_port: int) -> None:
    row = {"url": f"http://127.0.0.1:{unused_tcp_port}"}
    text = regions({"a": row}, proxy={"probe_interval_s": 0.2}, simulation={"rtt_ms": {"here": 1}})
    (tmp_path / "engine.yaml").write_bytes(text)
    (tmp_path / "regions.yaml").write_bytes(text)
    async with served(tmp_path / "regions.yaml") as proxy:
        # Dead from the start: the first answer of the process says so.
        first = await proxy.client.get("/ready")
        assert (first.status_code, first.json()["error"]["code"]) == (503, "no_replica")
        assert first.json()["error"]["message"] == f"no replica can serve a request: 1 {SILENT}"
        assert (await proxy.client.get("/health")).status_code == 200
        for _ in range(2):  # comes up, dies
            async with engine(tmp_path, unused_tcp_port):
                await ready_becomes(proxy.client, 200)
                assert (await proxy.client.post("/v1/chat/completions", content=chat(max_tokens=2))).is_success
            await ready_becomes(proxy.client, 503)


@pytest.mark.system
async def test_death_shows_in_seconds_though_probes_are_half_a_minute_apart(
    tmp_path: Path, unused_tcp_port: int
) -> None:
    row = {"url": f"http://127.0.0.1:{unused_tcp_port}"}
    text = regions({"a": row}, proxy={"probe_interval_s": 30.0}, simulation={"rtt_ms": {"here": 1}})
    (tmp_path / "engine.yaml").write_bytes(text)
    (tmp_path / "regions.yaml").write_bytes(text)
    async with engine(tmp_path, unused_tcp_port) as process, served(tmp_path / "regions.yaml") as proxy:
        assert (await proxy.client.get("/ready")).status_code == 200
        process.kill()
        died_s = time.monotonic()
        down = await ready_becomes(proxy.client, 503)
        assert time.monotonic() - died_s < 20.0  # two rounds of pings, 2 s apart, and room for a busy machine
        assert down.json()["error"]["message"] == "no replica can serve a request: 1 without a connection"


# --- Who gets which action of the Router, and when the Router is woken, in virtual time.


LEFT = Outcome(AttemptResult.CLIENT_DISCONNECTED)


def dispatch(request_id: str, attempt: int = 1) -> Dispatch:
    """Only who it is for matters here."""
    return Dispatch(request_id, f"{request_id}/{attempt}", attempt, "", "", cast(Decision, None))


def reject(request_id: str) -> Reject:
    return Reject(request_id, 503, "no_replica", "no replica", None)


@dataclass
class ScriptedRouter:
    """Answers each event with the actions that a test has put there, and wants to be woken when it says."""

    own: Action | None = None
    actions: list[Action] = field(default_factory=list)
    due_s: float | None = None
    events: list[tuple[Any, ...]] = field(default_factory=list)
    fleet_events: deque[FleetEvent] = field(default_factory=deque)
    queued: int = 0
    reported: list[FleetEvent] = field(default_factory=list)

    def _happened(self, *event: Any) -> list[Action]:
        self.events.append(event)
        actions, self.actions = self.actions, []
        return actions

    def submit(self, request: str, *, now: float) -> tuple[Action | None, list[Action]]:
        return self.own, self._happened("submit", request, now)

    def abandon(self, request_id: str, *, now: float) -> list[Action]:
        return self._happened("abandon", request_id, now)

    def on_first_token(self, attempt_id: str, *, now: float) -> list[Action]:
        return self._happened("first token", attempt_id, now)

    def on_finish(self, attempt_id: str, outcome: Outcome, *, now: float) -> tuple[Action | None, list[Action]]:
        return self.own, self._happened("finish", attempt_id, outcome.result, now)

    def on_served_elsewhere(
        self, attempt_id: str, replica: str, outcome: Outcome, *, now: float
    ) -> tuple[Action | None, list[Action]]:
        return self.own, self._happened("served elsewhere", attempt_id, replica, outcome, now)

    def handle_timer(self, *, now: float) -> list[Action]:
        self.due_s = None
        return self._happened("timer", now)

    def next_timer(self) -> float | None:
        return self.due_s


@dataclass
class Exchange:
    """Notes what it is to do."""

    received: list[Action] = field(default_factory=list)

    def deliver(self, action: Action) -> None:
        self.received.append(action)


def virtually(test: Callable[[ScriptedRouter, RouterGateway], Awaitable[None]]) -> None:
    async def run() -> None:
        router = ScriptedRouter()
        gateway = RouterGateway(cast(Router, router), asyncio.get_running_loop().time, router.reported.append)
        await test(router, gateway)
        gateway.close()

    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        runner.run(run())


@dataclass
class Connections:
    """Of one replica; puts itself among the events."""

    events: list[tuple[Any, ...]]

    def refresh(self) -> None:
        self.events.append(("connections",))


def test_changed_connections_are_reported_before_each_event_that_may_dispatch() -> None:
    async def test(router: ScriptedRouter, gateway: RouterGateway) -> None:
        def events_of(event: Callable[[], object]) -> list[str]:
            router.events.clear()
            gateway.stale_connections.append(Connections(router.events))
            event()
            gateway.stale_connections.clear()
            return [name for name, *_ in router.events]

        completed, failed = Outcome(AttemptResult.COMPLETED), Outcome(AttemptResult.FAILED_BEFORE_CONTENT)
        assert events_of(lambda: gateway.submit(cast(RouteRequest, "own"))) == ["connections", "submit"]
        assert events_of(lambda: gateway.finish(dispatch("own"), failed)) == ["connections", "finish"]
        assert events_of(gateway.run_timer) == ["connections", "timer"]
        assert events_of(lambda: gateway.finish(dispatch("own"), completed)) == ["finish"]
        assert events_of(lambda: gateway.first_token("own/1", now=0.0)) == ["first token"]
        router.queued = 1
        assert events_of(lambda: gateway.finish(dispatch("own"), completed)) == ["connections", "finish"]
        assert events_of(lambda: gateway.first_token("own/1", now=0.0)) == ["connections", "first token"]

    virtually(test)


def test_submit_returns_the_action_of_the_request_and_delivers_the_others() -> None:
    async def test(router: ScriptedRouter, gateway: RouterGateway) -> None:
        other = Exchange()
        gateway.register("other", other)
        router.own, router.actions = Hold("own"), [reject("other")]
        assert gateway.submit(cast(RouteRequest, "own")) == Hold("own")
        assert other.received == [reject("other")]

    virtually(test)


def test_finish_returns_the_next_action_of_the_request_and_delivers_the_others() -> None:
    async def test(router: ScriptedRouter, gateway: RouterGateway) -> None:
        own, other = Exchange(), Exchange()
        gateway.register("own", own)
        gateway.register("other", other)
        for router.own in (dispatch("own", 2), reject("own"), None):
            router.actions = [reject("other")]
            assert gateway.finish(dispatch("own"), Outcome(AttemptResult.BUSY)) is router.own
        assert (own.received, other.received) == ([], [reject("other")] * 3)

    virtually(test)


def test_cancel_of_another_attempt_is_delivered_after_a_failure_too() -> None:
    async def test(router: ScriptedRouter, gateway: RouterGateway) -> None:
        own = Exchange()
        gateway.register("own", own)
        router.actions = [Cancel("own", "own/2")]
        assert gateway.finish(dispatch("own"), Outcome(AttemptResult.BUSY)) is None
        assert own.received == [Cancel("own", "own/2")]

    virtually(test)


def test_each_dispatch_is_observed_whoever_it_is_for() -> None:
    """By submit, by a retry, by an action for another request, and as a hedge."""

    async def test(router: ScriptedRouter, gateway: RouterGateway) -> None:
        observed: list[Dispatch] = []
        gateway.on_dispatch.append(observed.append)
        gateway.register("other", Exchange())
        sent = [dispatch("own"), dispatch("own", 2), dispatch("other"), dispatch("other", 2)]
        router.own = sent[0]
        gateway.submit(cast(RouteRequest, "own"))
        router.own, router.actions = sent[1], [sent[2], Hedge("other", sent[3])]
        gateway.finish(sent[0], Outcome(AttemptResult.BUSY))
        router.own, router.actions = Hold("next"), [reject("other")]
        gateway.submit(cast(RouteRequest, "next"))
        assert observed == [sent[0], sent[2], sent[3], sent[1]]

    virtually(test)


def test_served_elsewhere_returns_the_attempt_there_and_delivers_the_others() -> None:
    async def test(router: ScriptedRouter, gateway: RouterGateway) -> None:
        other = Exchange()
        gateway.register("other", other)
        router.own, router.actions = dispatch("own", 2), [reject("other")]
        assert gateway.served_elsewhere(dispatch("own"), "b", SERVED_ELSEWHERE) is router.own
        assert router.events == [("served elsewhere", "own/1", "b", SERVED_ELSEWHERE, 0.0)]
        assert other.received == [reject("other")]

    virtually(test)


@pytest.mark.parametrize("event", ["abandon", "first token", "apply", "run_timer"])
def test_actions_of_any_event_are_delivered(event: str) -> None:
    async def test(router: ScriptedRouter, gateway: RouterGateway) -> None:
        exchange = Exchange()
        gateway.register("r", exchange)
        await asyncio.sleep(5.0)
        router.actions = [reject("r")]
        if event == "abandon":
            gateway.abandon("x")
            assert router.events == [("abandon", "x", 5.0)]
        elif event == "first token":
            gateway.first_token("x/1", now=4.5)
            assert router.events == [("first token", "x/1", 4.5)]
        elif event == "run_timer":
            gateway.run_timer()
            assert router.events == [("timer", 5.0)]
        else:
            gateway.apply([reject("r")])
        assert exchange.received == [reject("r")]

    virtually(test)


@pytest.mark.parametrize("event", ["submit", "finish", "apply"])
def test_changes_of_the_fleet_are_reported_in_order_and_once(event: str) -> None:
    async def test(router: ScriptedRouter, gateway: RouterGateway) -> None:
        router.own = Hold("r")
        changes: list[FleetEvent] = [RegionChanged("far", reachable=False), HealthChanged("a", "ejected")]
        router.fleet_events.extend(changes)
        for _ in range(2):
            if event == "submit":
                gateway.submit(cast(RouteRequest, "r"))
            elif event == "finish":
                gateway.finish(dispatch("r"), LEFT)
            else:
                gateway.apply([])
        assert router.reported == changes

    virtually(test)


def test_id_that_is_open_already_gets_another_name_until_it_is_free() -> None:
    async def test(_: ScriptedRouter, gateway: RouterGateway) -> None:
        names = [gateway.register("r", Exchange()) for _ in range(3)]
        assert names == ["r", "r+2", "r+3"]
        gateway.unregister("r")
        assert gateway.register("r", Exchange()) == "r"
        gateway.register("r+4", Exchange())
        assert gateway.register("r", Exchange()) == "r+5"

    virtually(test)


def test_what_was_reserved_for_nobody_is_given_back() -> None:
    async def test(router: ScriptedRouter, gateway: RouterGateway) -> None:
        gateway.apply([dispatch("a"), Hedge("b", dispatch("b", 2)), reject("c"), Cancel("d", "d/1")])
        assert router.events == [("finish", "a/1", LEFT.result, 0.0), ("finish", "b/2", LEFT.result, 0.0)]

    virtually(test)


def test_what_giving_back_makes_possible_is_delivered_too() -> None:
    async def test(router: ScriptedRouter, gateway: RouterGateway) -> None:
        exchange = Exchange()
        gateway.register("r", exchange)
        router.actions = [dispatch("r")]
        gateway.apply([dispatch("nobody")])
        assert [action.request_id for action in exchange.received] == ["r"]

    virtually(test)


def woken(router: ScriptedRouter) -> list[float]:
    return [event[1] for event in router.events if event[0] == "timer"]


def test_router_is_woken_when_it_wants_to_be() -> None:
    async def test(router: ScriptedRouter, gateway: RouterGateway) -> None:
        router.due_s = 3.0
        gateway.apply([])
        await asyncio.sleep(2.9)
        assert woken(router) == []
        await asyncio.sleep(0.2)
        assert woken(router) == [3.0]
        router.due_s = 10.0
        gateway.apply([])
        await asyncio.sleep(20.0)
        assert woken(router) == [3.0, 10.0]

    virtually(test)


def test_sooner_time_stands_in_for_a_later_one_and_not_the_other_way() -> None:
    async def test(router: ScriptedRouter, gateway: RouterGateway) -> None:
        for router.due_s in (9.0, 5.0, 7.0):
            gateway.apply([])
        await asyncio.sleep(20.0)
        assert woken(router) == [5.0]

    virtually(test)


def test_time_that_is_over_is_told_in_the_next_turn_and_not_in_the_same() -> None:
    async def test(router: ScriptedRouter, gateway: RouterGateway) -> None:
        await asyncio.sleep(5.0)
        router.due_s = 1.0
        gateway.apply([])
        assert woken(router) == []
        await asyncio.sleep(0.0)
        await asyncio.sleep(0.0)
        assert woken(router) == [5.0]

    virtually(test)


def test_nobody_is_woken_after_the_end() -> None:
    async def test(router: ScriptedRouter, gateway: RouterGateway) -> None:
        router.due_s = 1.0
        gateway.apply([])
        gateway.close()
        gateway.apply([])
        await asyncio.sleep(5.0)
        assert woken(router) == []

    virtually(test)


# -- the clock
def test_clock_goes_on_through_a_step_of_the_system_s_clock_and_knows_how_far_it_is_ahead() -> None:
    wall, steady = [1000.0], [50.0]
    clock = EpochClock(wall=lambda: wall[0], steady=lambda: steady[0])
    assert (clock.now(), clock.ahead_s()) == (1000.0, 0.0)
    steady[0] += 10.0
    wall[0] = 90_000.0
    assert (clock.now(), ahead_s(clock.now)) == (1010.0, 88_990.0)
    assert ahead_s(lambda: 3.0) == 0.0
