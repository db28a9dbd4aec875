"""What ends `gorgo tune` before it has begun, and what it waits for."""

from __future__ import annotations

import asyncio
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from gorgo.errors import LeadershipLost, ProxyRefused, ProxyUnreachable, TraceError, TunerError, WeightsError
from tests.tuner.sidecar.fake_proxy import PAPER, Beside, FakeProxy
from tests.tuner.sidecar.group.beside_group import BesideGroup
from tuner.campaign.generation import Freeze, PutWeights, RollBack, Stop
from tuner.campaign.machine import Refutes
from tuner.campaign.options import CampaignOptions
from tuner.history import History
from tuner.proxy_client import ProxyClient, ProxyWeights
from tuner.sidecar import bootstrap, commands
from tuner.sidecar.bootstrap import SidecarOptions, connect, lead, leadership_of, recorded_options, run_sidecar
from tuner.sidecar.commands import CommandQueue
from tuner.sidecar.metrics import TunerMetrics
from tuner.sidecar.progress import Reporter


def client(proxy: FakeProxy) -> ProxyClient:
    return ProxyClient("http://proxy", "t", transport=httpx.MockTransport(proxy.handle))


def quiet(said: list[str]) -> Reporter:
    return Reporter(said.append, said.append)


async def connected(
    proxy: FakeProxy, reporter: Reporter, stop: asyncio.Event, *, wait_s: float = 3600.0
) -> ProxyWeights | None:
    """Connect on a clock that stands still."""
    return await connect(client(proxy), reporter, stop, wait_s=wait_s, clock=lambda: 7.0)


async def test_a_proxy_that_is_not_there_yet_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    proxy, said, waits = FakeProxy(), [], []  # type: ignore[var-annotated]
    proxy.down = True

    async def wait(_stop: asyncio.Event, seconds: float) -> None:
        waits.append(seconds)
        proxy.broken = 503 if len(waits) < 4 else None
        proxy.down = len(waits) < 3

    monkeypatch.setattr(bootstrap, "wait", wait)
    found = await connected(proxy, quiet(said), asyncio.Event())
    assert found is not None
    assert waits == [0.5, 1.0, 2.0, 4.0]
    assert all("waiting for the proxy" in line for line in said)


async def test_the_wait_ends_when_the_process_is_to_end() -> None:
    proxy, stop = FakeProxy(), asyncio.Event()
    proxy.down = True
    stop.set()
    assert await connected(proxy, quiet([]), stop) is None


async def test_a_wrong_token_is_no_reason_to_wait() -> None:
    proxy = FakeProxy()
    proxy.broken = 401
    with pytest.raises(ProxyRefused, match="out of order"):
        await connected(proxy, quiet([]), asyncio.Event())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"start": {"w_rtt": 50.0}}, r"expected a number in \[0.05, 2\]"),
        ({"start": {"m_rtt": 1.0}}, "no weight of gorgo"),
        ({"allow_out_of_range": {"m_rtt": (0.1, 1.0)}}, "not a weight that is moved"),
        ({"allow_out_of_range": {"w_rtt": (0.0, 1.0)}}, "log space"),
    ],
)
async def test_weights_that_cannot_be_tuned_so_are_refused(
    options: dict[str, Any], message: str, tmp_path: Path
) -> None:
    beside = Beside(FakeProxy(), tmp_path, **options)
    with pytest.raises(WeightsError, match=message):
        await beside.start()
    assert beside.history.campaigns() == []


async def test_an_unfinished_campaign_of_another_mode_is_not_begun_again_in_silence(tmp_path: Path) -> None:
    proxy = FakeProxy()
    beside = Beside(proxy, tmp_path)
    await beside.start()
    await beside.step(4)
    with pytest.raises(TunerError, match=r"campaign 1 cannot be resumed.*--new starts another"):
        await Beside(proxy, tmp_path, CampaignOptions(mode="switchback")).start()


async def test_a_widened_box_is_put_with_the_proxy_s_consent(tmp_path: Path) -> None:
    proxy = FakeProxy()
    beside = Beside(proxy, tmp_path, start={"w_rtt": 5.0}, allow_out_of_range={"w_rtt": (0.05, 10.0)})
    await beside.start()
    await beside.until_generation(1)
    assert proxy.puts[0]["weights"] == {"w_rtt": 5.0, "w_queue": 0.1}
    assert all(put["allow_out_of_range"] for put in proxy.puts)


async def test_the_history_keeps_options_and_seed_and_no_token(tmp_path: Path) -> None:
    beside = Beside(FakeProxy(), tmp_path)
    await beside.start()
    stored = beside.history.campaigns()[0].options
    assert (stored["algorithm"], stored["mode"], stored["seed"]) == ("es-published", "paper", 1)
    assert "token" not in stored


@pytest.mark.parametrize("status", [500, 503])
async def test_a_proxy_that_is_in_trouble_is_waited_for_and_one_that_refuses_is_not(
    status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    proxy, said = FakeProxy(), list[str]()

    async def wait(_stop: asyncio.Event, _seconds: float) -> None:
        proxy.broken = None

    monkeypatch.setattr(bootstrap, "wait", wait)
    proxy.broken = status
    assert await connected(proxy, quiet(said), asyncio.Event()) is not None
    assert said == [
        f"GET http://proxy/admin/weights: {status} out of order; waiting for the proxy, at most another 3600 s"
    ]
    proxy.broken = 499
    with pytest.raises(ProxyRefused):
        await connected(proxy, quiet(said), asyncio.Event())


async def test_the_wait_for_a_proxy_is_half_a_minute_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    proxy, waits = FakeProxy(), list[float]()
    proxy.down = True

    async def wait(stop: asyncio.Event, seconds: float) -> None:
        waits.append(seconds)
        if len(waits) == 8:
            stop.set()

    monkeypatch.setattr(bootstrap, "wait", wait)
    assert await connected(proxy, quiet([]), asyncio.Event()) is None
    assert waits == [0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0]


@pytest.mark.parametrize("status", [None, 503])
async def test_a_proxy_that_does_not_come_is_given_up_after_the_wait(
    status: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    proxy, waits = FakeProxy(), list[float]()
    proxy.down, proxy.broken = status is None, status

    async def wait(_stop: asyncio.Event, seconds: float) -> None:
        waits.append(seconds)

    monkeypatch.setattr(bootstrap, "wait", wait)
    with pytest.raises(ProxyUnreachable, match=r"no proxy for 10 s: is --url right\? \(setting proxy_wait_s\)"):
        await connect(client(proxy), quiet([]), asyncio.Event(), wait_s=10.0, clock=lambda: sum(waits))
    assert waits == [0.5, 1.0, 2.0, 4.0, 2.5]


async def test_a_new_campaign_s_row_says_when_and_what_was_begun(tmp_path: Path) -> None:
    beside = Beside(
        FakeProxy(),
        tmp_path,
        start={"w_rtt": 0.7},
        allow_out_of_range={"w_queue": (0.01, 0.9)},
        tune_lambda=True,
        seed=4,
    )
    await beside.start()
    (row,) = beside.history.campaigns()
    assert (row.started_s, row.target, row.policy) == (1000.0, "http://proxy:9090", "gorgo")
    assert (row.options["start"], row.options["bounds"]) == ({"w_rtt": 0.7}, {"w_queue": [0.01, 0.9]})
    assert (row.options["tune_lambda"], row.options["seed"], row.options["window"]) == (True, 4, 8)
    assert beside.said[0] == "campaign 1 on gorgo from w_rtt=0.7 w_queue=0.1"
    assert beside.sidecar.campaign.incumbent == {"w_rtt": 0.7, "w_queue": 0.1}


async def test_a_process_that_goes_on_keeps_the_row_of_the_first(tmp_path: Path) -> None:
    beside = Beside(FakeProxy(), tmp_path)
    await beside.start()
    await beside.until_generation(1)
    for _ in range(2):
        beside.now += 1000.0
        await beside.start()
    (row,) = beside.history.campaigns()
    assert row.started_s == 1000.0


async def test_new_ends_the_old_campaign_now(tmp_path: Path) -> None:
    beside = Beside(FakeProxy(), tmp_path)
    await beside.start()
    await beside.until_generation(1)
    again = Beside(beside.proxy, tmp_path, new_campaign=True)
    again.now = 5000.0
    await again.start()
    new, old = again.history.campaigns()
    assert (old.finished_s, old.outcome) == (5000.0, "replaced by a new campaign")
    assert (new.started_s, new.finished_s) == (5000.0, None)
    assert again.said[0].startswith("campaign 2 on gorgo from")


async def test_the_same_seed_proposes_the_same_and_none_is_another_each_time(tmp_path: Path) -> None:
    asked = []
    for place, seed in enumerate((3, 3, 4, None, None)):
        (tmp_path / str(place)).mkdir()
        beside = Beside(FakeProxy(), tmp_path / str(place), seed=seed)
        await beside.start()
        campaign = beside.sidecar.campaign
        asked.append((tuple(campaign.optimizer.ask().values()), campaign.rng.random()))
        assert beside.history.campaigns()[0].options["seed"] is not None
    assert asked[0] == asked[1]
    assert len(set(asked)) == 4


@pytest.mark.parametrize(("max_generations", "budget"), [(100, 200), (300, 300)])
async def test_the_optimizer_lasts_as_long_as_the_campaign(max_generations: int, budget: int, tmp_path: Path) -> None:
    beside = Beside(FakeProxy(), tmp_path, replace(PAPER, max_generations=max_generations))
    await beside.start()
    assert beside.sidecar.campaign.optimizer.state()["budget"] == budget


@pytest.mark.parametrize(
    ("options", "w_rtt", "widened"),
    [
        ({}, 0.5, False),
        ({}, 2.0, False),
        ({}, 0.05, False),
        ({"allow_out_of_range": {"w_queue": (0.04, 0.6)}}, 0.5, True),
    ],
)
async def test_consent_for_weights_outside_the_policy_s_box_is_asked_only_where_needed(
    options: dict[str, Any], w_rtt: float, widened: bool, tmp_path: Path
) -> None:
    beside = Beside(FakeProxy(), tmp_path, start={"w_rtt": w_rtt}, **options)
    await beside.start()
    await beside.step()
    assert ("allow_out_of_range" in beside.proxy.puts[0]) == widened


async def test_a_weight_that_there_is_not_is_named_beside_those_that_there_are(tmp_path: Path) -> None:
    beside = Beside(FakeProxy(), tmp_path, start={"b": 1.0, "a": 1.0})
    with pytest.raises(WeightsError, match="start: 'a' is no weight of gorgo; it has: w_rtt, w_queue"):
        await beside.start()


def test_the_clock_is_unix_time_that_only_moves_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    unix, steady = [1e9], [50.0]
    monkeypatch.setattr(bootstrap, "time", SimpleNamespace(time=lambda: unix[0], monotonic=lambda: steady[0]))
    clock = bootstrap.unix_clock()
    unix[0], steady[0] = 5.0, 57.5
    assert clock() == 1e9 + 7.5


class Answering(ProxyClient):
    """A client of a proxy that is set up before."""

    proxy: FakeProxy

    def __init__(self, url: str, token: str | None) -> None:
        super().__init__(url, token, transport=httpx.MockTransport(self.proxy.handle))


async def test_a_sidecar_runs_from_its_options_until_it_is_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    proxy, stop, said = FakeProxy(), asyncio.Event(), list[str]()
    monkeypatch.setattr(bootstrap, "ProxyClient", type("Client", (Answering,), {"proxy": proxy}))

    async def wait(_stop: asyncio.Event, _seconds: float) -> None:
        proxy.serve(4)
        if len(proxy.puts) == 3:
            stop.set()

    monkeypatch.setattr("tuner.sidecar.loop.wait", wait)
    database = f"sqlite:///{tmp_path}/history.sqlite3"
    given: dict[str, Any] = {"url": "http://proxy", "token": "t", "database": database, "campaign": PAPER}
    options = SidecarOptions(**given, metrics_bind=("127.0.0.1", 0))
    assert await run_sidecar(options, quiet(said), stop)
    assert re.fullmatch(r"metrics on http://127\.0\.0\.1:\d+/metrics", said[0])
    assert proxy.weights == {"w_rtt": 0.5, "w_queue": 0.1} | dict(proxy.puts[-1]["weights"])
    history = History(database)
    assert len(history.generations()) >= 2
    history.close()


async def test_a_sidecar_that_is_stopped_before_the_proxy_answers_has_begun_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    proxy, stop, said = FakeProxy(), asyncio.Event(), list[str]()
    monkeypatch.setattr(bootstrap, "ProxyClient", type("Client", (Answering,), {"proxy": proxy}))
    stop.set()
    database = f"sqlite:///{tmp_path}/history.sqlite3"
    assert await run_sidecar(SidecarOptions(url="http://proxy", token="t", database=database), quiet(said), stop)
    assert (said, proxy.calls) == ([], [])
    history = History(database)
    assert history.campaigns() == []
    history.close()


async def test_a_dry_run_opens_no_history(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bootstrap, "ProxyClient", type("Client", (Answering,), {"proxy": FakeProxy()}))
    stop = asyncio.Event()
    stop.set()
    options = SidecarOptions(url="http://proxy", token="t", database=f"sqlite:///{tmp_path}/h.sqlite3", dry_run=True)
    assert await run_sidecar(options, quiet([]), stop)
    assert list(tmp_path.iterdir()) == []


class Speechless:
    """A proxy whose refusal has no status: what answers there is no proxy of ours."""

    async def weights(self) -> None:
        raise ProxyRefused("no weights in the answer")


async def test_an_answer_that_is_none_of_a_proxy_is_not_waited_for() -> None:
    said: list[str] = []
    with pytest.raises(ProxyRefused, match="no weights in the answer"):
        await connect(Speechless(), quiet(said), asyncio.Event(), wait_s=9.0, clock=lambda: 7.0)  # type: ignore[arg-type]
    assert said == []


class FakeLeadership:
    """A leadership whose tries and confirmations a test lists."""

    def __init__(self, tries: list[str | None], *, has_standby: bool = True) -> None:
        self.tries, self.has_standby, self.lost = tries, has_standby, False
        self.released = 0

    async def try_to_lead(self) -> str | None:
        return self.tries.pop(0)

    async def confirm_leadership(self) -> None:
        if self.lost:
            raise LeadershipLost("the lease in the store has ended")

    async def release(self) -> None:
        self.released += 1


class Candidate:
    """One process around a leadership."""

    def __init__(self, leadership: FakeLeadership) -> None:
        self.leadership, self.stop, self.metrics = leadership, asyncio.Event(), TunerMetrics()
        self.said: list[str] = []
        self.waits: list[float] = []
        self.led: list[bool] = []
        self.lose = 0

    async def run(self) -> bool:
        reporter = Reporter(self.said.append, self.said.append)
        return await lead(self.leadership, self.tune, reporter, self.metrics, self.stop, wait=self.wait)

    async def wait(self, _stop: asyncio.Event, seconds: float) -> None:
        self.waits.append(seconds)

    async def tune(self, waited: bool) -> bool:
        self.led.append(waited)
        assert self.leads == 1.0
        if len(self.led) <= self.lose:
            raise LeadershipLost("the lease in the store has ended")
        return True

    @property
    def leads(self) -> float | None:
        return self.metrics.registry.get_sample_value("gorgo_tuner_leader")


async def test_a_standby_tries_each_second_and_says_why_once() -> None:
    candidate = Candidate(FakeLeadership(["another process leads"] * 3 + [None]))
    assert await candidate.run()
    assert candidate.waits == [1.0] * 3
    assert candidate.led == [True]
    assert candidate.said == ["standby: another process leads", "leader: takes over from the history"]
    assert (candidate.leads, candidate.leadership.released) == (0.0, 1)


async def test_the_first_leader_has_not_waited() -> None:
    candidate = Candidate(FakeLeadership([None]))
    assert await candidate.run()
    assert (candidate.led, candidate.said) == ([False], [])


async def test_a_leader_that_loses_the_leadership_is_a_standby_again() -> None:
    candidate = Candidate(FakeLeadership([None, "another process leads", None]))
    candidate.lose = 1
    assert await candidate.run()
    assert candidate.led == [False, True]
    assert candidate.said[0] == "standby: the lease in the store has ended; puts nothing more"
    assert candidate.leadership.released == 2


async def test_a_second_candidate_without_a_standby_ends_with_the_remedy() -> None:
    candidate = Candidate(FakeLeadership(["process 7 tunes http://a"], has_standby=False))
    with pytest.raises(TunerError, match=r"^process 7 tunes http://a; a standby needs a history in PostgreSQL"):
        await candidate.run()


async def test_a_stopped_standby_ends_in_order() -> None:
    candidate = Candidate(FakeLeadership(["another process leads"]))
    candidate.stop.set()
    assert await candidate.run()
    assert candidate.led == []


async def test_a_leader_that_was_replaced_puts_and_writes_nothing_more(tmp_path: Path) -> None:
    beside = BesideGroup(tmp_path)
    beside.leadership = FakeLeadership([])
    await beside.start()
    await beside.until_generation(2)
    first, group = beside.sidecar, beside.group
    await beside.start()  # the history is claimed
    assert beside.said[-1] == "resumes campaign 1, generation 2"
    rows, puts = beside.numbers, len(beside.a.puts)
    second = beside.sidecar
    beside.sidecar = first
    with pytest.raises(LeadershipLost, match="taken over campaign 1"):
        await beside.until_generation(4)
    assert beside.numbers == rows
    beside.sidecar = second
    await beside.step()
    await beside.until_generation(5)
    assert beside.numbers == [0, 1, 2, 3, 4]
    assert len(beside.a.puts) > puts
    assert group is not beside.group


async def test_without_the_leadership_no_weights_are_put_not_even_the_incumbent(tmp_path: Path) -> None:
    beside = BesideGroup(tmp_path)
    beside.leadership = leadership = FakeLeadership([])
    await beside.start()
    await beside.until_generation(2)
    puts, candidate = len(beside.a.puts), beside.weights
    leadership.lost = True
    with pytest.raises(LeadershipLost):
        await beside.step()
    with pytest.raises(LeadershipLost):
        await beside.sidecar.finish()
    assert (len(beside.a.puts), beside.weights) == (puts, candidate)


async def test_two_tuners_on_one_history_in_sqlite_are_refused(tmp_path: Path) -> None:
    beside = Beside(FakeProxy(), tmp_path)
    lock = leadership_of(beside.options)
    assert await lock.try_to_lead() is None
    said: list[str] = []
    with pytest.raises(TunerError, match=r"tunes http://proxy:9090 with this history; a standby needs"):
        await run_sidecar(beside.options, Reporter(said.append, said.append), asyncio.Event())
    await lock.release()


async def test_a_standby_ends_with_the_campaign_for_which_it_waited(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    beside = Beside(FakeProxy(), tmp_path)
    number = beside.history.begin_campaign(now_s=1.0, target=beside.options.url, policy="gorgo", options={})
    leadership, said = FakeLeadership(["another process leads", None]), list[str]()
    monkeypatch.setattr("tuner.sidecar.bootstrap.leadership_of", lambda _options: leadership)

    async def wait(_stop: asyncio.Event, _seconds: float) -> None:
        beside.history.end_campaign(number, now_s=2.0, outcome="100 generations")

    monkeypatch.setattr("tuner.sidecar.bootstrap.wait", wait)
    options = SidecarOptions(url=beside.options.url, token="t", database=beside.options.database, campaign=PAPER)
    assert await run_sidecar(options, Reporter(said.append, said.append), asyncio.Event())
    assert said[-1] == "campaign 1 has ended; `gorgo history` shows it"
    assert len(beside.history.campaigns()) == 1


def test_a_campaign_of_mode_paper_is_recorded_without_a_guard_and_with_the_sets_that_share_a_window() -> None:
    def recorded(**campaign: Any) -> dict[str, Any]:
        options = SidecarOptions(url="http://proxy", token="t", database="x", campaign=CampaignOptions(**campaign))
        return recorded_options(options, seed=1)

    paper = recorded(mode="paper")
    assert (paper["mode"], paper["guard"], paper["audit"], paper["sets_in_window"]) == ("paper", False, False, 4)
    usual = recorded()
    assert (usual["guard"], usual["audit"], "sets_in_window" in usual) == (True, True, False)
    assert recorded(guard=False)["audit"] is False


CAMPAIGN = "gorgo tune, campaign 1,"
US = f"{CAMPAIGN} process 7"


def found(version: int, source: str | None = "admin", by: str | None = None) -> ProxyWeights:
    return ProxyWeights("gorgo", version, {"w_rtt": 0.5}, None, source, by)


def put(ticket: int) -> PutWeights:
    return PutWeights({"w_rtt": 0.5}, "r", ticket)


def test_a_newer_order_for_weights_replaces_an_older_one_and_keeps_the_rest() -> None:
    orders = CommandQueue(CAMPAIGN, US, 1)
    for one in (put(1), Freeze({}, "r"), RollBack({}, "r", 2), Stop("r")):
        orders.add(one)
    kinds = []
    while (order := orders.next) is not None:
        kinds.append(type(order))
        orders.done(order)
    assert kinds == [Freeze, RollBack, Stop]


def test_an_order_that_was_replaced_while_it_was_on_its_way_does_not_end_the_newer_one() -> None:
    orders = CommandQueue(CAMPAIGN, US, 1)
    first, second = put(1), put(2)
    orders.add(first)
    orders.add(second)
    orders.done(first)
    assert orders.next is second


def test_weights_that_a_restarted_proxy_has_kept_are_known_by_their_values() -> None:
    orders = CommandQueue(CAMPAIGN, US, 3)
    orders.see(found(3))
    orders.mark_sent({"w_rtt": 0.7})
    orders.restarted()
    stored = [ProxyWeights("gorgo", 9, {"w_rtt": value}, None, "state") for value in (0.5, 0.7, 0.9)]
    assert [orders.owner_of(one) for one in stored] == ["proxy's", "proxy's", "foreign"]


@pytest.mark.parametrize(
    ("known", "seen", "owner"),
    [
        (3, found(3), "known"),
        (3, found(4, by="operator"), "foreign"),
        (3, found(4, source="reload"), "foreign"),
        (3, found(4, source="freeze", by="operator"), "foreign"),
        (3, found(4, by=US), "ours"),
        (3, found(4, by=f"{CAMPAIGN} process 8"), "foreign"),  # two of them at once: each must see the other
        (None, found(4, by=f"{CAMPAIGN} process 8"), "ours"),  # the one that was killed before
        (None, found(4, by="gorgo tune, campaign 12, process 8"), "foreign"),
        (None, found(4, by="operator"), "foreign"),
        (None, found(1, source="configuration"), "proxy's"),
        (3, found(9, source="state"), "proxy's"),
    ],
)
def test_whose_weights_are_found(known: int | None, seen: ProxyWeights, owner: str) -> None:
    assert CommandQueue(CAMPAIGN, US, known).owner_of(seen) == owner


def test_an_order_waits_until_it_is_done_and_only_those_for_weights_can_be_dropped() -> None:
    orders = CommandQueue(CAMPAIGN, US, 1)
    assert (orders.next, len(orders)) == (None, 0)
    freeze = Freeze({}, "r")
    for one in (freeze, put(1)):
        orders.add(one)
    assert len(orders) == 2
    orders.done(put(1))
    assert orders.next is freeze, "not the one that is next"
    orders.drop_puts()
    assert (orders.next, len(orders)) == (freeze, 1)
    orders.done(freeze)
    orders.done(freeze)
    assert orders.next is None


def test_a_process_is_named_by_its_campaign() -> None:
    assert CommandQueue(CAMPAIGN, US, 1).by == US


def test_what_was_seen_last_is_in_force_until_the_proxy_is_another_run() -> None:
    orders = CommandQueue(CAMPAIGN, US, 1)
    assert (orders.version, orders.in_force) == (1, None)
    orders.see(found(4))
    assert (orders.version, orders.in_force) == (4, {"w_rtt": 0.5})
    orders.restarted()
    assert (orders.version, orders.in_force) == (None, None)


def stored(values: float) -> ProxyWeights:
    return ProxyWeights("gorgo", 9, {"w_rtt": values}, None, "state")


def test_a_process_that_has_seen_nothing_takes_what_a_proxy_has_kept_for_the_proxy_s() -> None:
    assert CommandQueue(CAMPAIGN, US, None).owner_of(stored(0.9)) == "proxy's"


def test_the_last_sixteen_weight_sets_are_known_for_ours() -> None:
    orders = CommandQueue(CAMPAIGN, US, 3)
    for place in range(17):
        orders.mark_sent({"w_rtt": float(place)})
    orders.restarted()
    assert [orders.owner_of(stored(float(place))) for place in (0, 1, 16)] == ["foreign", "proxy's", "proxy's"]


def test_sixteen_of_its_own_weights_are_remembered() -> None:
    assert commands.MAX_OWN == 16


async def test_a_log_that_cannot_be_read_begins_no_campaign(tmp_path: Path) -> None:
    def log_filter(_policy: str) -> Refutes:
        raise TraceError("outcomes.jsonl: No such file")

    beside = Beside(FakeProxy(), tmp_path, log_filter=log_filter)
    with pytest.raises(TraceError):
        await beside.start()
    assert beside.history.campaigns() == []


async def test_a_log_of_decisions_is_the_campaign_s_filter(tmp_path: Path) -> None:
    asked = []

    def log_filter(policy: str) -> Refutes:
        asked.append(policy)
        return lambda _ours, _theirs: "the log refutes it"

    beside = Beside(FakeProxy(), tmp_path, log_filter=log_filter)
    await beside.start()
    await beside.until_generation(3)
    assert asked == ["gorgo"]
    assert [row.reason for row in beside.history.generations()[1:]] == ["the log refutes it"] * 2
