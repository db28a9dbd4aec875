"""The loop against a proxy in virtual time: order, failures, freezes, restarts of either side; a sample counts once."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from gorgo.errors import HistoryError
from tests.tuner.sidecar.fake_proxy import DEFAULTS, PAPER, Beside, FakeProxy
from tuner.campaign.machine import Campaign
from tuner.campaign.options import CampaignOptions
from tuner.objective import TunerSample
from tuner.sidecar import bootstrap, loop
from tuner.sidecar.progress import shown

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
