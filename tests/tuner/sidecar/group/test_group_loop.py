"""One sidecar beside several proxies in virtual time: weights at all or at none, samples of all once."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import httpx
import pytest

from gorgo.errors import ProxyRefused, WeightsError
from tests.tuner.sidecar.fake_proxy import DEFAULTS, PAPER
from tests.tuner.sidecar.group.beside_group import NAMES, BesideGroup
from tuner.campaign.options import CampaignOptions


@pytest.fixture
def beside(tmp_path: Path) -> BesideGroup:
    return BesideGroup(tmp_path)


async def test_each_put_reaches_all_proxies_and_generations_are_written(beside: BesideGroup) -> None:
    await beside.start()
    await beside.until_generation(4)
    assert beside.numbers == [0, 1, 2, 3]
    puts = [[put["weights"] for put in proxy.puts] for proxy in beside.proxies.values()]
    assert puts[0] == puts[1] == puts[2]
    assert beside.history.campaigns()[0].target == " ".join(NAMES)


async def test_samples_of_all_proxies_fill_one_window(beside: BesideGroup) -> None:
    await beside.start()
    await beside.step()  # the first put
    await beside.step(2)
    assert beside.sidecar.progress().samples == 6, "two of each of three"


async def test_samples_of_versions_that_the_group_did_not_agree_on_are_discarded(beside: BesideGroup) -> None:
    await beside.start()
    await beside.step()
    beside.b.serve(5)
    for row in beside.b.ring:
        row["weights_version"] = 1  # routed before the put
    await beside.step()
    assert beside.sidecar.progress().samples == 0


async def test_a_put_that_one_proxy_does_not_get_is_undone_at_the_others(beside: BesideGroup) -> None:
    await beside.start()
    await beside.until_generation(2)
    before, versions = beside.weights, [proxy.version for proxy in beside.proxies.values()]
    put, calls = beside.b._put, list[int]()

    def break_down(body: dict[str, object]) -> httpx.Response:
        calls.append(1)
        raise httpx.ConnectError("connection refused")

    beside.b._put = break_down  # type: ignore[method-assign]
    while not calls:
        await beside.step(2)
    assert beside.weights == before, "all have the weights of before"
    assert beside.a.version == versions[0] + 2, "put and undone"
    assert beside.group.undone_puts == 1
    beside.b._put = put  # type: ignore[method-assign]
    await beside.until_generation(4)
    assert len(beside.weights) == 1
    assert beside.events[0] == "restart"
    assert beside.numbers == [0, 1, 2, 3]


async def test_a_put_whose_answer_was_lost_is_undone_at_that_proxy_too(beside: BesideGroup) -> None:
    await beside.start()
    await beside.until_generation(2)
    before = beside.weights
    beside.b.deaf = True
    undone = beside.group.undone_puts
    while beside.group.undone_puts == undone:
        await beside.step(2)
    assert beside.weights == before or beside.b.weights != before[0], "its answer to the undoing is lost as well"
    assert [beside.a.weights] == before
    beside.b.deaf = False
    await beside.until_generation(4)
    assert len(beside.weights) == 1
    assert "foreign" not in beside.events


async def test_a_proxy_that_restarts_gets_the_weights_of_the_group_before_its_samples_count(
    beside: BesideGroup,
) -> None:
    await beside.start()
    await beside.until_generation(2)
    offspring = dict(beside.a.weights)
    beside.b.restart()
    await beside.step(4)
    assert beside.weights == [offspring]
    assert beside.sidecar.progress().samples == 0, "nothing of before counts"
    assert beside.events == ["restart"]
    await beside.until_generation(4)
    assert beside.numbers == [0, 1, 2, 3]


async def test_a_proxy_with_weights_of_an_earlier_process_is_brought_to_the_group(beside: BesideGroup) -> None:
    await beside.start()
    await beside.until_generation(2)
    beside.b.set({"w_rtt": 1.1}, by="gorgo tune, campaign 1, process 1")
    await beside.step()
    await beside.step()
    assert len(beside.weights) == 1
    assert beside.weights[0]["w_rtt"] != 1.1
    assert "foreign" not in beside.events


async def test_weights_of_an_operator_at_one_proxy_become_those_of_all(beside: BesideGroup) -> None:
    await beside.start()
    await beside.until_generation(2)
    beside.b.set({"w_rtt": 1.5}, by="operator")
    await beside.step()
    assert [one["w_rtt"] for one in beside.weights] == [1.5]
    assert beside.sidecar.campaign.incumbent["w_rtt"] == 1.5
    assert beside.events == ["foreign"]
    assert "operator at http://b" in beside.history.events()[0].reason


async def test_weights_outside_the_box_at_one_proxy_end_the_campaign_at_all(tmp_path: Path) -> None:
    beside = BesideGroup(tmp_path, allow_out_of_range={"w_queue": (0.05, 0.9)})
    await beside.start()
    await beside.until_generation(2)
    beside.b.set({"w_rtt": 50.0}, by="operator")
    await beside.step()
    assert beside.sidecar.stopped is not None
    assert await beside.sidecar.finish()
    assert [one["w_rtt"] for one in beside.weights] == [50.0]


async def test_one_frozen_proxy_pauses_the_campaign(beside: BesideGroup) -> None:
    await beside.start()
    await beside.until_generation(2)
    beside.b.frozen = {"reason": "held-out week"}
    puts = len(beside.a.puts)
    for _ in range(5):
        await beside.step(4)
    assert len(beside.a.puts) == puts
    assert beside.sidecar.progress().trouble == "frozen: held-out week (http://b)"
    beside.b.frozen = None
    await beside.until_generation(3)


async def test_without_one_proxy_nothing_is_put_and_no_sample_is_lost_meanwhile(tmp_path: Path) -> None:
    beside = BesideGroup(tmp_path, replace(PAPER, window=40))
    await beside.start()
    await beside.step()
    await beside.step(1)
    beside.b.down = True
    puts = len(beside.a.puts)
    for _ in range(3):
        await beside.step(1)
    assert len(beside.a.puts) == puts
    assert "http://b" in str(beside.sidecar.progress().trouble)
    beside.b.down = False
    await beside.step()
    assert beside.sidecar.progress().samples == 12, "four at each of three"
    assert not any("missing" in line for line in beside.complaints)


async def test_a_proxy_out_of_reach_for_longer_than_the_discard_takes_the_candidate_from_the_others(
    beside: BesideGroup,
) -> None:
    await beside.start()
    await beside.until_generation(2)
    incumbent = {**DEFAULTS, **beside.sidecar.campaign.incumbent}
    assert beside.weights != [incumbent], "a candidate is in force"
    beside.b.down = True
    await beside.step(1, seconds=PAPER.discard_s + 1)
    assert [beside.a.weights, beside.proxies[NAMES[2]].weights] == [incumbent, incumbent]
    assert beside.events == ["rollback"]
    beside.b.down = False
    await beside.step(1)
    await beside.step(1)
    assert beside.weights == [incumbent]
    await beside.until_generation(4)
    assert beside.numbers == [0, 1, 2, 3]


async def test_harm_is_rolled_back_where_it_can_be_though_one_proxy_is_missed(tmp_path: Path) -> None:
    options = CampaignOptions(window=12, hop=6, warm_up_s=0.0, rest_blocks=0.0, max_generations=4)
    beside = BesideGroup(tmp_path, options)
    await beside.start()
    while beside.sidecar.campaign.trial is None or beside.sidecar.campaign.trial.arm == "incumbent":
        await beside.step(4)
    start = {**DEFAULTS, **beside.sidecar.campaign.incumbent}
    for proxy in beside.proxies.values():
        proxy.serve(8)
        for row in list(proxy.ring)[-8:]:
            row["e2e_s"] = 90.0

    def break_down(body: dict[str, object]) -> httpx.Response:
        raise httpx.ConnectError("connection refused")

    put = beside.b._put
    beside.b._put = break_down  # type: ignore[method-assign]
    await beside.step()
    assert "rollback" in beside.events
    assert (beside.a.weights, beside.b.weights == start) == (start, False)
    beside.b._put = put  # type: ignore[method-assign]
    await beside.step()
    await beside.step()
    assert beside.weights == [start]


async def test_the_guard_counts_errors_over_all_proxies(tmp_path: Path) -> None:
    options = CampaignOptions(window=40, hop=20, warm_up_s=0.0, rest_blocks=0.0, hard_errors=0.05)
    beside = BesideGroup(tmp_path, options)
    await beside.start()
    while beside.sidecar.campaign.trial is None or beside.sidecar.campaign.trial.arm == "incumbent":
        await beside.step(4)
    for proxy in beside.proxies.values():  # one at each: the guard of one proxy needs two
        proxy.serve(7)
        proxy.ring[-1]["status"] = 503
    await beside.step()
    reasons = [event.reason for event in beside.history.events() if event.kind == "rollback"]
    assert reasons == ["2 of the last 20 requests failed"]


async def test_a_killed_sidecar_is_continued_by_another_process(beside: BesideGroup) -> None:
    await beside.start()
    await beside.until_generation(3)
    beside.b.set({"w_rtt": 1.1}, by="gorgo tune, campaign 1, process 1")  # killed between two calls of one put
    await beside.start()
    assert beside.said[-1] == "resumes campaign 1, generation 3"
    await beside.until_generation(6)
    assert beside.numbers == [0, 1, 2, 3, 4, 5]
    assert beside.events == [], "no restart of a proxy, and no weights of others"
    assert len(beside.weights) == 1


async def test_an_ended_process_leaves_the_incumbent_at_all_that_answer(beside: BesideGroup) -> None:
    await beside.start()
    await beside.until_generation(2)
    incumbent = {**DEFAULTS, **beside.sidecar.campaign.incumbent}
    beside.b.down = True
    assert not await beside.sidecar.finish()
    assert beside.a.weights == incumbent
    assert "may be in force still" in beside.complaints[-1]


async def test_a_campaign_at_its_end_freezes_all(tmp_path: Path) -> None:
    beside = BesideGroup(tmp_path, replace(PAPER, max_generations=2, freeze_at_end=True))
    await beside.start()
    while beside.sidecar.stopped is None:
        await beside.step(2)
    assert [proxy.frozen for proxy in beside.proxies.values()] == [{"reason": "2 generations"}] * 3
    assert len(beside.weights) == 1


async def test_proxies_with_different_weights_start_no_campaign(beside: BesideGroup, tmp_path: Path) -> None:
    beside.b.set({"w_rtt": 1.5}, by="operator")
    with pytest.raises(WeightsError, match=r"w_rtt is 0\.5 at http://a, 1\.5 at http://b.*initial_weights"):
        await beside.start()
    (tmp_path / "other").mkdir()
    named = BesideGroup(tmp_path / "other", start={"w_rtt": 1.0})
    named.b.set({"w_rtt": 1.5}, by="operator")
    await named.start()
    await named.step()
    assert [one["w_rtt"] for one in named.weights] == [1.0]


async def test_one_proxy_under_two_addresses_is_refused(beside: BesideGroup) -> None:
    beside.b.boot_id = beside.a.boot_id
    with pytest.raises(ProxyRefused, match="http://a and http://b are one proxy"):
        await beside.start()


async def test_clocks_of_proxies_do_not_move_a_block(tmp_path: Path) -> None:
    beside = BesideGroup(tmp_path, CampaignOptions(window=12, hop=6, warm_up_s=0.0, rest_blocks=0.0))
    serve = beside.b.serve

    def five_seconds_off(count: int, ttft_ms: float = 400.0) -> None:
        serve(count, ttft_ms)
        for row in list(beside.b.ring)[-count:] if count else []:
            row["finished_s"] += 5.0

    beside.b.serve = five_seconds_off  # type: ignore[method-assign]
    answer = beside.b._samples
    beside.b._samples = lambda after: answer(after) | {"now_s": 105.0 + beside.b.seq}  # type: ignore[method-assign]
    await beside.start()
    await beside.step(1)
    arrived = []
    delivered = await beside.group.read_new()
    assert delivered[0].samples == ()
    for proxy in beside.proxies.values():
        proxy.serve(1)
    (result,) = await beside.group.read_new()
    arrived = [sample.arrived_s for sample in result.samples]
    assert arrived == [beside.now - 1.0] * 3


async def test_the_metrics_of_a_group_count_its_proxies(beside: BesideGroup) -> None:
    await beside.start()
    await beside.step(1)
    beside.b.down = True
    await beside.step(1)
    value = beside.metrics.registry.get_sample_value
    states = {state: value("gorgo_tuner_proxies", {"state": state}) for state in ("in_step", "unreachable")}
    assert states == {"in_step": 2, "unreachable": 1}
    assert value("gorgo_tuner_weights_version", {"proxy": "http://a"}) == beside.a.version
