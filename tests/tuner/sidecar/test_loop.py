"""The loop against a proxy in virtual time: order, failures, freezes, restarts of either side; a sample counts once."""

from __future__ import annotations

import asyncio
import json
import sqlite3
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from sqlalchemy import event

from gorgo.errors import HistoryError, ProxyUnreachable
from tests.tuner.campaign.fleet import START, Proxy, Run
from tests.tuner.history.examples import generation
from tests.tuner.sidecar.fake_proxy import DEFAULTS, PAPER, Beside, FakeProxy
from tuner.campaign.machine import Campaign
from tuner.campaign.options import CampaignOptions
from tuner.history import CampaignRow, EventRow, History, database
from tuner.history.store import EventKind
from tuner.objective import TunerSample
from tuner.proxy_client import ProxyWeights, SampleBatchResult
from tuner.sidecar import bootstrap, history_buffer, loop
from tuner.sidecar.commands import CommandQueue
from tuner.sidecar.history_buffer import FIRST_RETRY_S, MAX_WAITING, CampaignStart, HistoryBuffer, as_line
from tuner.sidecar.loop import CampaignObserver
from tuner.sidecar.metrics import TunerMetrics
from tuner.sidecar.progress import Reporter, shown

# --- The loop against a proxy in virtual time: order of things, failures, freezes, restarts of either side.


@pytest.fixture
def proxy() -> FakeProxy:
    return FakeProxy()


@pytest.fixture
def beside(proxy: FakeProxy, tmp_path: Path) -> Beside:
    return Beside(proxy, tmp_path)


async def test_generations_are_put_measured_and_written_one_after_the_other(beside: Beside) -> None:
    await beside.start()
    await beside.until_generation(5)
    assert beside.numbers == [0, 1, 2, 3, 4]
    rows = beside.history.generations()
    tried = [put["weights"] for put in beside.proxy.puts]
    assert [row.weights for row in rows[1:]] == tried[1:5]
    assert all(row.weights_version == place + 2 for place, row in enumerate(rows))


async def test_every_put_expects_the_version_that_was_seen_and_names_its_process(beside: Beside) -> None:
    await beside.start()
    await beside.until_generation(3)
    assert [put["expected_version"] for put in beside.proxy.puts] == list(range(1, len(beside.proxy.puts) + 1))
    assert all(put["by"].startswith("gorgo tune, campaign 1, process ") for put in beside.proxy.puts)


async def test_a_frozen_proxy_is_left_alone_until_it_is_unfrozen(beside: Beside) -> None:
    await beside.start()
    await beside.until_generation(2)
    beside.proxy.frozen = {"reason": "held-out week"}
    puts = len(beside.proxy.puts)
    for _ in range(20):
        await beside.step(8)
    assert len(beside.proxy.puts) == puts
    assert beside.sidecar.progress().trouble == "frozen: held-out week"
    beside.proxy.frozen = None
    await beside.until_generation(4)
    assert beside.events == ["freeze", "unfreeze"]
    assert beside.numbers == [0, 1, 2, 3]


async def test_weights_that_somebody_pinned_are_the_incumbent_once_they_are_unfrozen(beside: Beside) -> None:
    await beside.start()
    await beside.until_generation(2)
    beside.proxy.set({"w_rtt": 1.5}, by="operator", source="freeze")
    beside.proxy.frozen = {"reason": "held-out week"}
    await beside.step()
    boots = beside.proxy
    pinned, frozen = boots.weights, boots.frozen
    boots.restart()
    boots.weights, boots.frozen, boots.history[-1]["source"] = pinned, frozen, "state"
    await beside.step()
    beside.proxy.frozen = None
    await beside.step()
    assert beside.sidecar.campaign.incumbent["w_rtt"] == 1.5
    await beside.until_generation(4)


async def test_a_freeze_between_the_look_and_the_put_is_no_error(beside: Beside) -> None:
    await beside.start()
    look = beside.sidecar._read_weights

    async def look_and_then_freeze() -> None:
        await look()
        beside.proxy.frozen = {"reason": "just now"}

    beside.sidecar._read_weights = look_and_then_freeze  # type: ignore[method-assign]
    await beside.step()
    assert beside.proxy.puts == []
    assert beside.sidecar.progress().trouble == "frozen: just now"
    assert beside.complaints == []


async def test_weights_of_an_operator_become_the_incumbent(beside: Beside) -> None:
    await beside.start()
    await beside.until_generation(2)
    beside.proxy.set({"w_rtt": 1.5}, by="operator")
    await beside.step()
    assert beside.sidecar.campaign.incumbent["w_rtt"] == 1.5
    assert beside.proxy.weights["w_rtt"] == 1.5, "measured first, as they are"
    assert beside.events == ["foreign"]
    await beside.until_generation(4)


async def test_weights_outside_the_box_stop_the_campaign_and_stay(beside: Beside) -> None:
    await beside.start()
    await beside.until_generation(2)
    beside.proxy.set({"w_rtt": 50.0}, by="operator")
    await beside.step()
    assert beside.sidecar.stopped is not None
    assert await beside.sidecar.finish()
    assert beside.proxy.weights["w_rtt"] == 50.0
    assert beside.history.campaigns()[0].outcome == beside.sidecar.stopped


async def test_another_policy_pauses_until_it_is_ours_again(beside: Beside) -> None:
    await beside.start()
    await beside.until_generation(2)
    beside.proxy.policy = "random"
    puts = len(beside.proxy.puts)
    for _ in range(10):
        await beside.step(8)
    assert len(beside.proxy.puts) == puts
    beside.proxy.policy = "gorgo"
    await beside.until_generation(3)


async def test_a_restarted_proxy_gets_its_weights_again_and_nothing_of_before_counts(beside: Beside) -> None:
    await beside.start()
    await beside.until_generation(2)
    await beside.step(3)
    offspring = dict(beside.proxy.weights)
    beside.proxy.restart()
    await beside.step()
    assert beside.proxy.weights == offspring
    assert beside.sidecar.campaign.ledger.number == 2
    assert beside.events == ["restart"]
    await beside.until_generation(4)
    assert beside.numbers == [0, 1, 2, 3]


async def test_lost_samples_void_what_was_measured(tmp_path: Path) -> None:
    beside = Beside(FakeProxy(stored=6), tmp_path)
    await beside.start()
    await beside.until_generation(1)
    puts = len(beside.proxy.puts)
    await beside.step(50)
    assert len(beside.proxy.puts) == puts + 1, "the same weights under a new version"
    assert beside.proxy.puts[-1]["weights"] == beside.proxy.puts[-2]["weights"]
    assert "44 samples are missing" in beside.complaints[0]


async def test_a_proxy_that_cannot_be_reached_is_asked_less_and_less_often_for_ever(beside: Beside) -> None:
    await beside.start()
    await beside.until_generation(2)
    beside.proxy.down = True
    waits = [await beside.step() for _ in range(12)]
    assert waits[:4] == [0.5, 1.0, 2.0, 4.0]
    assert waits[-1] == 30.0
    assert len(beside.complaints) == 1
    beside.proxy.down = False
    assert await beside.step() <= 1.0
    assert beside.said[-1] == "the proxy answers again"
    await beside.until_generation(4)
    assert beside.numbers == [0, 1, 2, 3]


async def test_an_order_without_an_answer_is_known_for_ours(beside: Beside) -> None:
    await beside.start()
    await beside.until_generation(2)
    beside.proxy.deaf = True
    for _ in range(4):
        await beside.step(8)
    beside.proxy.deaf = False
    await beside.until_generation(4)
    assert "foreign" not in beside.events


async def test_a_proxy_whose_disk_is_full_gets_the_order_again(beside: Beside) -> None:
    await beside.start()
    beside.proxy.broken = 507
    await beside.step()
    assert "out of order; routing goes on" in beside.complaints[0]
    beside.proxy.broken = None
    await beside.until_generation(2)


async def test_a_killed_sidecar_is_continued_where_it_was(beside: Beside) -> None:
    await beside.start()
    await beside.until_generation(3)
    await beside.step(2)
    before = beside.sidecar.campaign
    candidate = before.optimizer.ask()
    await beside.start()  # the first is not heard of any more
    assert beside.said[-1] == "resumes campaign 1, generation 3"
    assert beside.sidecar.campaign.optimizer.ask() == candidate
    assert beside.sidecar.campaign.incumbent == before.incumbent
    await beside.until_generation(6)
    assert beside.numbers == [0, 1, 2, 3, 4, 5]
    assert [row.id for row in beside.history.campaigns()] == [1]


async def test_weights_that_somebody_set_while_the_sidecar_was_dead_are_kept(beside: Beside) -> None:
    await beside.start()
    await beside.until_generation(3)
    beside.proxy.set({"w_rtt": 1.25}, by="operator")
    await beside.start()
    await beside.step()
    assert beside.sidecar.campaign.incumbent["w_rtt"] == 1.25


async def test_new_begins_another_campaign_and_ends_the_old_one(beside: Beside, tmp_path: Path) -> None:
    await beside.start()
    await beside.until_generation(2)
    again = Beside(beside.proxy, tmp_path, new_campaign=True)
    await again.start()
    old, new = sorted(again.history.campaigns(), key=lambda row: row.id)
    assert old.outcome == "replaced by a new campaign"
    assert new.outcome is None


async def test_an_ended_process_leaves_the_incumbent_in_force(beside: Beside) -> None:
    await beside.start()
    await beside.until_generation(2)
    incumbent = {**beside.proxy.weights, **beside.sidecar.campaign.incumbent}
    assert beside.proxy.weights != incumbent, "an offspring is under test"
    assert await beside.sidecar.finish()
    assert beside.proxy.weights == incumbent


async def test_an_ended_process_that_cannot_put_back_says_so(beside: Beside) -> None:
    await beside.start()
    await beside.until_generation(2)
    beside.proxy.down = True
    assert not await beside.sidecar.finish()
    assert "may be in force still" in beside.complaints[-1]


async def test_a_campaign_at_its_end_puts_the_incumbent_and_freezes_it(proxy: FakeProxy, tmp_path: Path) -> None:
    options = CampaignOptions(mode="paper", window=8, hop=4, warm_up_s=0.0, max_generations=3, freeze_at_end=True)
    beside = Beside(proxy, tmp_path, options)
    await beside.start()
    for _ in range(40):
        await beside.step(4)
        if beside.sidecar.stopped:
            break
    assert beside.sidecar.stopped == "3 generations"
    assert proxy.frozen == {"reason": "3 generations"}
    assert proxy.weights == {**DEFAULTS, **beside.sidecar.campaign.incumbent}
    assert await beside.sidecar.finish()
    assert beside.history.campaigns()[0].outcome == "3 generations"
    assert beside.history.unfinished(target="http://proxy:9090", policy="gorgo") is None


async def test_the_end_waits_for_a_proxy_that_is_away(proxy: FakeProxy, tmp_path: Path) -> None:
    options = CampaignOptions(mode="paper", window=8, hop=4, warm_up_s=0.0, budget_s=100.0)
    beside = Beside(proxy, tmp_path, options)
    await beside.start()
    await beside.until_generation(2)
    proxy.deaf = True
    await beside.step(8, seconds=200.0)
    waiting = beside.sidecar.stopped
    proxy.deaf = False
    await beside.step()
    assert (waiting, beside.sidecar.stopped) == (None, "budget of 100 s is spent")
    assert proxy.weights == {**DEFAULTS, **beside.sidecar.campaign.incumbent}


async def test_a_dry_run_puts_nothing_and_writes_nothing(proxy: FakeProxy, tmp_path: Path) -> None:
    beside = Beside(proxy, tmp_path, dry_run=True)
    await beside.start()
    for _ in range(10):
        await beside.step(4)
        if beside.sidecar.stopped:
            break
    assert beside.sidecar.stopped == "a dry run"
    assert await beside.sidecar.finish()
    assert proxy.puts == []
    assert proxy.weights == DEFAULTS
    assert beside.history.campaigns() == []
    assert "would put w_rtt=" in beside.said[-1]
    assert "generation 0 accepted" in beside.said[-2]


async def test_harm_is_rolled_back_before_anything_is_written(proxy: FakeProxy, tmp_path: Path) -> None:
    options = CampaignOptions(window=8, hop=4, warm_up_s=0.0, rest_blocks=0.0, max_generations=4)
    beside = Beside(proxy, tmp_path, options)
    await beside.start()
    while beside.sidecar.campaign.trial is None or beside.sidecar.campaign.trial.arm == "incumbent":
        await beside.step(4)
    start = {**DEFAULTS, **beside.sidecar.campaign.incumbent}
    proxy.serve(8)
    for row in list(proxy.ring)[-8:]:
        row["e2e_s"] = 90.0
    await beside.step()
    assert "rollback" in beside.events
    assert proxy.weights == start
    assert not beside.history.generations()[-1].accepted


async def test_progress_counts_samples_of_the_weights_in_force(beside: Beside) -> None:
    await beside.start()
    await beside.step(3)
    await beside.step(5)
    progress = beside.sidecar.progress()
    assert (progress.phase, progress.samples, progress.needed) == ("warming", 5, PAPER.window)


async def test_who_set_the_weights_is_asked_only_when_their_version_is_another(beside: Beside) -> None:
    await beside.start()
    await beside.until_generation(1)
    beside.proxy.calls.clear()
    await beside.step()
    assert beside.proxy.calls == ["GET /admin/samples", "GET /admin/policy"]
    beside.proxy.set({}, by="operator")
    await beside.step()
    assert beside.proxy.calls[3:5] == ["GET /admin/policy", "GET /admin/weights"]


async def test_a_put_that_is_refused_again_and_again_is_left_for_the_next_step(beside: Beside) -> None:
    await beside.start()
    put, conflicts = beside.proxy._put, []

    def refuse(body: dict[str, Any]) -> httpx.Response:
        conflicts.append(body["expected_version"])
        return httpx.Response(409, json={"error": {"message": "version conflict"}})

    beside.proxy._put = refuse  # type: ignore[method-assign]
    await beside.step()
    assert conflicts == [1, 1, 1]
    assert beside.complaints == [], "each refusal was looked into"
    beside.proxy._put = put  # type: ignore[method-assign]
    await beside.step()
    assert len(beside.proxy.puts) == 1


async def test_a_proxy_that_does_not_let_it_freeze_is_said_and_the_campaign_ends(
    proxy: FakeProxy, tmp_path: Path
) -> None:
    options = CampaignOptions(mode="paper", window=8, hop=4, warm_up_s=0.0, max_generations=1, freeze_at_end=True)
    beside = Beside(proxy, tmp_path, options)
    answer = proxy._answer

    def refuse(request: httpx.Request) -> httpx.Response:
        if request.url.path == "/admin/freeze":
            return httpx.Response(409, json={"error": {"message": "frozen already"}})
        return answer(request)

    proxy._answer = refuse  # type: ignore[method-assign]
    await beside.start()
    while beside.sidecar.stopped is None:
        await beside.step(4)
    assert beside.sidecar.stopped == "1 generations"
    assert "not frozen by the tuner: " in beside.complaints[-1]
    assert "frozen already" in beside.complaints[-1]
    assert proxy.frozen is None


async def test_a_freeze_at_the_end_is_an_event_with_its_weights(proxy: FakeProxy, tmp_path: Path) -> None:
    options = CampaignOptions(mode="paper", window=8, hop=4, warm_up_s=0.0, max_generations=1, freeze_at_end=True)
    beside = Beside(proxy, tmp_path, options)
    await beside.start()
    while beside.sidecar.stopped is None:
        await beside.step(4)
    await beside.sidecar.finish()
    freeze, stop = beside.history.events()
    assert (freeze.kind, freeze.reason, freeze.weights) == ("freeze", "pinned: 1 generations", proxy.weights)
    assert (stop.kind, stop.reason, stop.weights) == ("stop", "1 generations", beside.sidecar.campaign.incumbent)


async def test_where_the_campaign_is_is_written_when_more_than_samples_has_changed(beside: Beside) -> None:
    await beside.start()
    await beside.step(2)
    number, state = beside.history.unfinished(target="http://proxy:9090", policy="gorgo") or (0, {})
    await beside.step(2)
    assert beside.history.unfinished(target="http://proxy:9090", policy="gorgo") == (number, state)
    await beside.until_generation(1)
    assert beside.history.unfinished(target="http://proxy:9090", policy="gorgo") != (number, state)


async def test_the_next_look_is_when_the_campaign_has_something_to_do(proxy: FakeProxy, tmp_path: Path) -> None:
    options = CampaignOptions(window=8, hop=4, warm_up_s=10.0, rest_blocks=0.0)
    beside = Beside(proxy, tmp_path, options, poll_s=4.0)
    await beside.start()
    assert await beside.step() == 4.0, "samples are awaited"
    assert await beside.step(8, seconds=7.0) == 3.0, "the warm-up is over in three seconds"
    assert await beside.step(seconds=2.5) == 0.5
    assert await beside.step(seconds=0.5) == 4.0


async def test_an_ended_process_leaves_weights_alone_that_are_right_or_pinned(beside: Beside) -> None:
    await beside.start()
    assert await beside.sidecar.finish()
    assert beside.proxy.puts == [], "nothing is known to be in force"
    await beside.start()
    await beside.step()
    puts = len(beside.proxy.puts)
    assert await beside.sidecar.finish()
    assert len(beside.proxy.puts) == puts, "the incumbent is"
    await beside.until_generation(2)
    puts = len(beside.proxy.puts)
    beside.proxy.frozen = {"reason": "by hand"}
    await beside.step()
    assert await beside.sidecar.finish()
    assert len(beside.proxy.puts) == puts


async def test_rows_that_could_not_be_written_are_said_at_the_end(beside: Beside, tmp_path: Path) -> None:
    await beside.start()
    await beside.until_generation(1)

    def full(_campaign: int, **_what: object) -> None:
        raise HistoryError("disk is full")

    beside.history.write = full  # type: ignore[assignment, method-assign]
    await beside.until_generation(2)
    assert not await beside.sidecar.finish()
    assert 'not in the history: {"number": 1' in beside.complaints[-1]


async def test_a_freeze_of_another_policy_s_weights_is_no_wish_about_ours(beside: Beside) -> None:
    await beside.start()
    await beside.until_generation(2)
    incumbent = dict(beside.sidecar.campaign.incumbent)
    beside.proxy.policy = "random"
    beside.proxy.set({"w_rtt": 1.5}, by="operator")
    await beside.step()
    assert beside.sidecar.progress().trouble == "the proxy routes by random, not by gorgo"
    beside.proxy.restart()
    await beside.step()
    assert beside.sidecar.campaign.incumbent == incumbent
    assert beside.events[:1] == ["freeze"]


async def test_it_runs_until_the_campaign_is_over_or_it_is_told_to_stop(
    proxy: FakeProxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = CampaignOptions(mode="paper", window=8, hop=4, warm_up_s=0.0, budget_s=30.0)
    beside, stop, waits = Beside(proxy, tmp_path, options), asyncio.Event(), list[float]()

    async def wait(_stop: asyncio.Event, seconds: float) -> None:
        waits.append(seconds)
        beside.now += 1.0
        proxy.serve(4)
        if len(waits) == 10:
            stop.set()

    monkeypatch.setattr(loop, "wait", wait)
    await beside.start()
    assert await beside.sidecar.run(stop)
    assert (len(waits), beside.sidecar.stopped) == (10, None)
    assert waits == [1.0] * 10
    assert {**DEFAULTS, **beside.sidecar.campaign.incumbent} == proxy.weights
    stop.clear()
    waits.clear()
    await beside.start()
    beside.now += 30.0
    assert await beside.sidecar.run(stop)
    assert beside.sidecar.stopped == "budget of 30 s is spent"
    assert len(waits) < 5


async def test_a_wait_ends_with_its_time_or_with_the_process() -> None:
    stop = asyncio.Event()
    await asyncio.wait_for(loop.wait(stop, 0.001), timeout=5.0)
    stop.set()
    await asyncio.wait_for(loop.wait(stop, 1e6), timeout=5.0)


async def test_a_restart_is_followed_by_weights_that_the_proxy_has_not_seen(beside: Beside) -> None:
    await beside.start()
    await beside.until_generation(2)
    beside.proxy.restart()
    beside.proxy.puts.clear()
    await beside.step(3)
    assert [put["expected_version"] for put in beside.proxy.puts] == [1], "the version of the new run"


async def test_weights_of_somebody_without_a_name_are_somebody_s(beside: Beside) -> None:
    await beside.start()
    await beside.until_generation(1)
    beside.proxy.set({"w_rtt": 1.5}, by="the operator")
    await beside.step()
    beside.proxy.set({"w_rtt": 1.6}, by=None, source="reload")  # type: ignore[arg-type]
    await beside.step()
    reasons = [event.reason for event in beside.history.events() if event.kind == "foreign"]
    assert reasons == [
        "weights set by the operator: the campaign continues from them",
        "weights set by reload: the campaign continues from them",
    ]


async def test_a_dry_run_says_the_candidate_that_it_would_try(proxy: FakeProxy, tmp_path: Path) -> None:
    for mode in ("paper", "switchback"):
        beside = Beside(proxy, tmp_path, replace(PAPER, mode=mode), dry_run=True)
        await beside.start()
        while beside.sidecar.stopped is None:
            await beside.step(8)
        candidate = {**DEFAULTS, **beside.sidecar.campaign.optimizer.ask()}
        assert f"would put {shown(candidate)}: " in beside.said[-1]
    beside = Beside(proxy, tmp_path, PAPER, dry_run=True)
    await beside.start()
    proxy.set({"w_rtt": 0.75}, by="operator")
    await beside.step()
    assert beside.sidecar.stopped is None, "what is in force is measured from there on"
    assert proxy.puts == []


def test_three_conflicts_end_a_turn_and_a_conflict_is_409() -> None:
    assert (loop.MAX_CONFLICTS, loop.CONFLICT) == (3, 409)


# --- Whatever happens to proxy, network and sidecar: a sample counts once, for weights that this process has put.


MEASURED: list[tuple[str | None, int, int]] = []


class Watched(Campaign):
    """Writes down what it measures."""

    def _measure(self, samples: list[TunerSample], now: float) -> None:
        MEASURED.extend((self.cursor.boot_id, sample.seq, sample.weights_version) for sample in samples)
        super()._measure(samples, now)


WHAT = st.sampled_from(
    [
        *["serve"] * 3,
        "burst",
        "proxy restarts",
        "killed",
        "somebody puts",
        "cut",
        "mended",
        "deaf",
        "hears",
        "freeze",
        "unfreeze",
    ]
)


@pytest.mark.parametrize("mode", ["paper", "switchback"])
@given(happenings=st.lists(WHAT, min_size=5, max_size=40), page=st.integers(1, 30))
@settings(max_examples=6, phases=[Phase.generate])
def test_a_sample_counts_once_whatever_happens(mode: str, happenings: Sequence[str], page: int) -> None:
    MEASURED.clear()
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(bootstrap, "Campaign", Watched)
        asyncio.run(live_through(mode, happenings, page, Path(folder)))


async def live_through(mode: str, happenings: Sequence[str], page: int, folder: Path) -> None:
    proxy = FakeProxy(stored=60, page=page)
    options = CampaignOptions(
        mode=mode,  # type: ignore[arg-type]  # hypothesis has checked less
        window=8,
        hop=4,
        warm_up_s=0.0,
        block_s=4.0,
        discard_s=0.0,
        min_block_samples=2,
        pairs=2,
    )
    beside = Beside(proxy, folder, options)
    await beside.start()
    for happening in happenings:
        if happening == "killed" and not proxy.down:
            await beside.start()
        happens(proxy, happening)
        await beside.step()
    proxy.down = proxy.deaf = False
    proxy.frozen = None
    for _ in range(400):
        await beside.step(6, seconds=30.0)
        if len(beside.numbers) > 2:
            break
    seen = [(boot, seq) for boot, seq, _ in MEASURED]
    assert len(seen) == len(set(seen)), "counted twice"
    ours = {(put["boot"], put["version"]) for put in proxy.puts}
    assert {(boot, version) for boot, _, version in MEASURED} <= ours
    numbers = beside.numbers
    assert numbers == list(range(len(numbers))), "generations go on without holes or repeats"
    assert len(numbers) >= 2, "and the campaign has not stuck"


def happens(proxy: FakeProxy, what: str) -> None:
    match what:
        case "serve":
            proxy.serve(5)
        case "burst":
            proxy.serve(100)  # more than the ring keeps
        case "proxy restarts":
            proxy.restart()
        case "cut" | "mended":
            proxy.down = what == "cut"
        case "deaf" | "hears":
            proxy.deaf = what == "deaf"
        case "freeze" | "unfreeze":
            proxy.frozen = {"reason": "r"} if what == "freeze" else None
        case "somebody puts":
            proxy.set({"w_rtt": 0.7}, by="operator")


# --- What is said, counted and written of a campaign, and a database in trouble: nothing is lost, everything is said.


# --- What is said, counted and written of a campaign, and how long is waited after what fails.


SAMPLE = TunerSample(1, 0.0, "a", 5, 400.0, 2.0, 12.0, 200)


class Kept(HistoryBuffer):
    """Remembers its rows."""

    def __init__(self) -> None:
        self.complained: list[str] = []
        super().__init__(
            None, 1, CampaignStart(started_s=0.0, target="t", policy="gorgo", options={}), self.complained.append
        )
        self.rows: list[Any] = []

    def add(self, row: Any) -> None:
        self.rows.append(row)


class Told:
    """A teller of a campaign that has just begun, with version 5 of the weights in force."""

    def __init__(self, **options: Any) -> None:
        self.run = Run(Proxy(), CampaignOptions(**{"window": 4, "hop": 2, "warm_up_s": 0.0} | options), start=ALL)
        self.orders = CommandQueue("c", "c p", 5)
        self.journal, self.metrics = Kept(), TunerMetrics()
        self.said: list[str] = []
        self.complaints: list[str] = []
        reporter = Reporter(self.said.append, self.complaints.append)
        self.teller = CampaignObserver(
            self.run.campaign, self.orders, self.journal, reporter, self.metrics, clock=lambda: 1234.0
        )

    def deliver(self, *ttft_ms: float, version: int = 5, lost: int = 0, unreadable: tuple[str, ...] = ()) -> None:
        samples = tuple(replace(SAMPLE, ttft_ms=one, weights_version=version) for one in ttft_ms)
        self.teller.delivered(SampleBatchResult("boot-1", samples, lost, unreadable))

    def count(self, name: str, **labels: str) -> float | None:
        return self.metrics.registry.get_sample_value(f"gorgo_tuner_{name}_total", labels)


ALL = {**START, "delta": 3.0}


@pytest.fixture
def told() -> Told:
    return Told()


def test_an_event_is_a_line_now_and_a_row_in_the_history(told: Told) -> None:
    told.teller.log_event("freeze", "by hand", {"w_rtt": 0.5})
    told.teller.log_event("unfreeze", "over")
    assert told.said == ["freeze: by hand", "unfreeze: over"]
    assert told.journal.rows == [
        EventRow(at_s=1234.0, kind="freeze", weights={"w_rtt": 0.5}, reason="by hand"),
        EventRow(at_s=1234.0, kind="unfreeze", weights=None, reason="over"),
    ]


@pytest.mark.parametrize(
    ("lost", "unreadable", "missing", "words"),
    [
        (0, (), 0, []),
        (3, (), 3, ["3 samples are missing: the current measurement starts again"]),
        (
            0,
            ("sample 2: no", "sample 3: no"),
            2,
            ["2 samples are missing: the current measurement starts again; sample 2: no"],
        ),
        (3, ("sample 2: no",), 4, ["4 samples are missing: the current measurement starts again; sample 2: no"]),
    ],
)
def test_samples_that_are_missing_are_said_and_counted(
    told: Told, lost: int, unreadable: tuple[str, ...], missing: int, words: list[str]
) -> None:
    told.deliver(400.0, 500.0, lost=lost, unreadable=unreadable)
    assert told.complaints == words
    assert told.count("lost_samples") == missing
    assert told.count("samples") == 2


def test_the_line_is_about_samples_of_the_weights_in_force(told: Told) -> None:
    told.deliver(100.0, 100.0, version=4)
    told.deliver(400.0, 400.0, 400.0, 400.0, 800.0, 800.0, 800.0, 800.0)
    progress = told.teller.progress(None)
    assert (progress.samples, progress.needed, progress.ttft_ms_p95) == (8, 4, 800.0)
    told.teller.applied()
    progress = told.teller.progress(None)
    assert (progress.samples, progress.ttft_ms_p95) == (0, None)
    told.deliver(400.0)
    told.teller.restarted()
    assert told.teller.progress(None).ttft_ms_p95 is None
    assert told.count("proxy_restarts") == 1
    assert [row.kind for row in told.journal.rows] == ["restart"]


def test_a_generation_is_written_with_the_weights_that_do_not_move(told: Told) -> None:
    told.teller.decided(generation(1, weights={"w_rtt": 0.7, "w_queue": 0.2}, reason="r"))
    (row,) = told.journal.rows
    assert row.weights == {"w_rtt": 0.7, "w_queue": 0.2, "delta": 3.0}
    assert told.said == ["generation 1 accepted: w_rtt=0.7 w_queue=0.2, p95 TTFT 1584 ms: r"]
    assert told.count("generations", outcome="accepted") == 1


def test_a_roll_back_is_counted_and_written(told: Told) -> None:
    told.teller.rolled_back("harm", {"w_rtt": 0.5})
    assert told.count("rollbacks") == 1
    kinds: list[EventKind] = [row.kind for row in told.journal.rows]
    assert (kinds, told.said) == (["rollback"], ["rollback: harm"])


def test_what_fails_is_said_once_and_tried_again_less_and_less_often(told: Told) -> None:
    assert told.teller.back_off_s() is None
    assert told.said == [], "nothing has failed"
    waits = []
    for _ in range(14):
        told.teller.failed(ProxyUnreachable("no answer"))
        waits.append(told.teller.back_off_s())
    assert waits == [0.5, 1.0, 2.0, 4.0, 8.0, 16.0, *[30.0] * 8]
    assert told.complaints == ["no answer; routing goes on, the tuner tries again"]
    assert told.teller.progress("frozen: r").trouble == "no answer"
    told.teller.trouble = None
    assert [told.teller.back_off_s(), told.teller.back_off_s()] == [None, None]
    assert told.said == ["the proxy answers again"]
    assert told.teller.progress("frozen: r").trouble == "frozen: r"
    told.teller.failed(ProxyUnreachable("no answer"))
    assert told.teller.back_off_s() == 0.5
    assert len(told.complaints) == 2


def test_a_step_is_counted_and_shown(told: Told) -> None:
    told.teller.stepped(None)
    told.teller.failed(ProxyUnreachable("no answer"))
    told.teller.stepped(None)
    assert (told.count("polls", result="ok"), told.count("polls", result="failed")) == (1, 1)
    assert told.said == ["warming: w_rtt=0.5 w_queue=0.1, 0 of 4 samples"]
    assert told.metrics.registry.get_sample_value("gorgo_tuner_generation") == 0


@pytest.mark.parametrize(
    ("mode", "arm", "needed", "detail"),
    [("switchback", "incumbent", 0, "0 of 20 pairs"), ("paper", "offspring", 2, "")],
)
def test_progress_says_what_is_waited_for(mode: str, arm: str, needed: int, detail: str) -> None:
    told = Told(mode=mode)
    before = told.teller.progress(None)
    assert (before.phase, before.arm, before.needed, before.detail, before.weights) == ("warming", "", 4, "", None)
    told.run.until(lambda: told.run.campaign.phase == "comparing")
    told.orders.see(ProxyWeights("gorgo", 6, {"w_rtt": 0.7}, None))
    found = told.teller.progress(None)
    assert (found.phase, found.generation, found.arm, found.needed, found.detail) == (
        "comparing",
        1,
        arm,
        needed,
        detail,
    )
    assert (found.weights, found.incumbent) == ({"w_rtt": 0.7}, START)


def test_a_proxy_that_is_away_is_polled_after_half_a_second_and_then_within_half_a_minute() -> None:
    assert (loop.FIRST_BACK_OFF_S, loop.MAX_BACK_OFF_S) == (0.5, 30.0)


# --- A database in trouble: nothing is lost, everything is said, and it is not asked all the time.


BEGINNING = CampaignStart(started_s=1.0, target="http://proxy", policy="gorgo", options={"seed": 1})
STOP = EventRow(at_s=2.0, kind="stop", weights=None, reason="the end")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "history.sqlite3"


@pytest.fixture
def history(path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[History]:
    monkeypatch.setattr(database, "BUSY_TIMEOUT_S", 0.02)
    opened = History(f"sqlite:///{path}")
    opened.begin_campaign(now_s=1.0, target="http://proxy", policy="gorgo", options={"seed": 1})
    yield opened
    opened.close()


@pytest.fixture
def said() -> list[str]:
    return []


@pytest.fixture
def journal(history: History, said: list[str]) -> HistoryBuffer:
    return HistoryBuffer(history, 1, BEGINNING, said.append)


def numbers(history: History) -> list[int]:
    return [row.number for row in history.generations()]


def test_a_row_and_where_the_campaign_is_after_it_are_written_together(
    journal: HistoryBuffer, history: History
) -> None:
    journal.add(generation(0))
    journal.save({"generation": 1})
    assert journal.flush(now=10.0)
    assert numbers(history) == [0]
    assert history.unfinished(target="http://proxy", policy="gorgo") == (1, {"generation": 1})


def test_an_outcome_ends_the_campaign(journal: HistoryBuffer, history: History) -> None:
    journal.save({"generation": 1})
    journal.end("converged")
    assert journal.flush(now=10.0)
    (row,) = history.campaigns()
    assert (row.outcome, row.finished_s) == ("converged", 10.0)
    assert history.unfinished(target="http://proxy", policy="gorgo") is None


def test_rows_wait_for_a_locked_database_and_are_written_in_order(
    journal: HistoryBuffer, history: History, path: Path, said: list[str]
) -> None:
    other = sqlite3.connect(path, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    for number in range(3):
        journal.add(generation(number))
        assert not journal.flush(now=10.0 + number)
    assert journal.waiting == 3
    assert len(said) == 1
    assert "another process" in said[0]
    other.execute("ROLLBACK")
    other.close()
    assert not journal.flush(now=10.5), "not asked again so soon"
    assert journal.flush(now=10.0 + FIRST_RETRY_S)
    assert numbers(history) == [0, 1, 2]
    assert said[-1] == "the history is written again"


def test_a_full_disk_keeps_the_rows_of_before_and_gets_the_others_later(
    journal: HistoryBuffer, history: History, said: list[str]
) -> None:
    journal.add(generation(0))
    assert journal.flush(now=1.0)

    def small(connection: sqlite3.Connection, _entry: object) -> None:
        pages = connection.execute("PRAGMA page_count").fetchone()[0]
        connection.execute(f"PRAGMA max_page_count={pages}")

    event.listen(history._engine, "connect", small)
    for number in range(1, 21):
        journal.add(generation(number, reason="x" * 1_000))
    assert not journal.flush(now=2.0)
    assert "disk is full" in said[0]
    assert numbers(history)[0] == 0
    assert len(numbers(history)) < 21
    event.remove(history._engine, "connect", small)
    assert journal.flush(now=3.0, at_once=True)
    assert numbers(history) == list(range(21))


def test_a_damaged_file_that_is_moved_away_is_replaced_by_a_new_one(
    journal: HistoryBuffer, history: History, path: Path, said: list[str]
) -> None:
    journal.add(generation(0))
    assert journal.flush(now=1.0)
    for file in path.parent.glob("history.sqlite3-*"):
        file.unlink()
    path.write_bytes(b"a diary, not a database\n" * 1000)
    journal.add(generation(1))
    assert not journal.flush(now=2.0)
    assert "not a database" in said[0]
    path.rename(path.with_suffix(".damaged"))
    journal.save({"generation": 2})
    assert journal.flush(now=100.0)
    assert numbers(history) == [1]
    assert [row.target for row in history.campaigns()] == ["http://proxy"]
    assert "campaign 1 there" in said[1]


def test_what_was_never_written_is_left_over_as_json(journal: HistoryBuffer, path: Path, said: list[str]) -> None:
    other = sqlite3.connect(path, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    journal.add(generation(4))
    journal.add(STOP)
    assert not journal.flush(now=1.0)
    other.close()
    assert [line[:12] for line in journal.unsaved()] == ['{"number": 4', '{"at_s": 2.0']


def test_a_row_that_finds_no_room_is_said_whole(journal: HistoryBuffer, said: list[str]) -> None:
    for number in range(MAX_WAITING + 1):
        journal.add(generation(number))
    assert journal.waiting == MAX_WAITING
    assert '"number": 0' in said[0]
    assert "is lost" in said[0]


def test_a_dry_run_writes_nothing(said: list[str]) -> None:
    journal = HistoryBuffer(None, 0, BEGINNING, said.append)
    journal.add(STOP)
    journal.save({})
    journal.end("over")
    assert journal.waiting == 0
    assert journal.flush(now=1.0)


class Trouble:
    """A history that refuses to be written while there are words for it."""

    def __init__(self) -> None:
        self.words: str | None = "locked"
        self.written: list[dict[str, Any]] = []
        self.begun: list[dict[str, Any]] = []
        self.row: CampaignRow | None = None
        self.asked_s: list[float] = []

    def write(self, campaign: int, **what: Any) -> None:
        self.asked_s.append(what["now_s"])
        if self.words is not None:
            raise HistoryError(self.words)
        self.written.append({"campaign": campaign} | what)

    def bring_up_to_date(self) -> None:
        pass

    def campaign(self, _number: int) -> CampaignRow | None:
        return self.row

    def begin_campaign(self, **what: Any) -> int:
        self.begun.append(what)
        return 9


def troubled(said: list[str]) -> tuple[HistoryBuffer, Trouble]:
    trouble = Trouble()
    return HistoryBuffer(trouble, 1, BEGINNING, said.append), trouble  # type: ignore[arg-type]


def known(**changes: Any) -> CampaignRow:
    mine: dict[str, Any] = {"id": 1, "started_s": 1.0, "finished_s": None, "outcome": None, "target": "http://proxy"}
    return CampaignRow(**mine | {"policy": "gorgo", "options": {}} | changes)


def test_a_database_in_trouble_is_asked_less_and_less_often(said: list[str]) -> None:
    journal, trouble = troubled(said)
    trouble.row = known()
    journal.add(STOP)
    for half_s in range(600):
        assert not journal.flush(now=half_s / 2)
    assert trouble.asked_s == [0.0, 5.0, 15.0, 35.0, 75.0, 135.0, 195.0, 255.0]
    trouble.words = None
    assert not journal.flush(now=314.9)
    assert journal.flush(now=315.0)
    trouble.words = "locked"
    journal.add(STOP)
    assert not journal.flush(now=320.0)
    assert not journal.flush(now=325.0)
    assert trouble.asked_s[-2:] == [320.0, 325.0], "from the first wait again"


def test_what_waits_is_the_order_of_the_rows_and_only_the_newest_state(said: list[str]) -> None:
    journal, trouble = troubled(said)
    trouble.words = None
    journal.add(generation(0))
    journal.add(STOP)
    journal.add(generation(1))
    journal.save({"generation": 1})
    journal.save({"generation": 2})
    assert journal.waiting == 3
    assert journal.flush(now=7.0)
    assert trouble.written == [
        {
            "campaign": 1,
            "generations": [generation(0), generation(1)],
            "events": [STOP],
            "state": {"generation": 2},
            "outcome": None,
            "now_s": 7.0,
        }
    ]
    assert journal.waiting == 0
    assert journal.flush(now=8.0)
    assert len(trouble.written) == 1, "what was written is not written again"


@pytest.mark.parametrize("what", ["row", "state", "outcome"])
def test_a_single_thing_to_write_is_written(what: str, said: list[str]) -> None:
    journal, trouble = troubled(said)
    trouble.words = None
    if what == "row":
        journal.add(STOP)
    elif what == "state":
        journal.save({})
    else:
        journal.end("over")
    assert [journal.flush(now=7.0), journal.flush(now=8.0)] == [True, True]
    assert len(trouble.written) == 1, "what is written does not wait any more"
    assert trouble.begun == [], "there was no trouble to find it again after"


def test_an_error_is_said_once_and_again_when_it_changes(said: list[str]) -> None:
    journal, trouble = troubled(said)
    trouble.row = known()
    journal.add(STOP)
    for words in ("locked", "locked", "full", "full", "locked"):
        trouble.words = words
        assert not journal.flush(now=0.0, at_once=True)
    assert said == [f"{words}; routing goes on, 1 rows wait to be written" for words in ("locked", "full", "locked")]
    assert journal.error == "locked"
    trouble.words = None
    assert journal.flush(now=0.0, at_once=True)
    assert said[3:] == ["the history is written again"]
    journal.add(STOP)
    assert journal.flush(now=0.0), "and nothing is waited for any more"
    assert len(said) == 4


@pytest.mark.parametrize(
    ("row", "mine"),
    [(known(), True), (None, False), (known(started_s=2.0), False), (known(target="http://other"), False)],
)
def test_after_trouble_the_campaign_s_row_is_looked_for(row: CampaignRow | None, mine: bool, said: list[str]) -> None:
    journal, trouble = troubled(said)
    journal.add(STOP)
    assert not journal.flush(now=0.0)
    trouble.words, trouble.row = None, row
    assert journal.flush(now=FIRST_RETRY_S)
    assert trouble.written[0]["campaign"] == journal.campaign == (1 if mine else 9)
    begun = {"now_s": 1.0, "target": "http://proxy", "policy": "gorgo", "options": {"seed": 1}}
    assert trouble.begun == ([] if mine else [begun])
    assert ("the database is another one: this is campaign 9 there" in said) != mine


def test_rows_are_one_line_of_json_each() -> None:
    assert json.loads(as_line(generation(4))) == generation(4).as_json()
    assert json.loads(as_line(STOP)) == {"at_s": 2.0, "kind": "stop", "weights": None, "reason": "the end"}


def test_a_thousand_rows_wait_for_a_database_in_trouble_and_the_oldest_is_lost(said: list[str]) -> None:
    journal, trouble = troubled(said)
    for number in range(1001):
        journal.add(EventRow(at_s=float(number), kind="stop", weights={"w": 1.0}, reason="r"))
    assert (journal.waiting, MAX_WAITING) == (1000, 1000)
    assert len(said) == 1
    assert '"at_s": 0.0' in said[0]
    assert '"weights": {"w": 1.0}' in said[0]
    trouble.words = None
    assert journal.flush(now=1.0)
    assert journal.waiting == 0


def test_a_database_is_tried_again_after_five_seconds_and_then_within_a_minute() -> None:
    assert (FIRST_RETRY_S, history_buffer.MAX_RETRY_S) == (5.0, 60.0)
