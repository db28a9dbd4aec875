"""The live campaign on a simulated fleet."""

from __future__ import annotations

from dataclasses import asdict
from functools import cache
from typing import cast

import pytest

from gorgo.errors import WeightsError
from gorgo.lab.simulate import run_once
from tests.tuner.offline.small import small_job
from tuner.campaign.machine import Campaign
from tuner.campaign.options import CampaignOptions
from tuner.offline import CampaignRun, simulate_campaign, simulated_campaign

QUICK = {"warm_up_s": 5.0, "window": 24, "hop": 8}


@cache
def paper(seed: int = 0) -> CampaignRun:
    options = CampaignOptions(mode="paper", max_generations=6, **QUICK)  # type: ignore[arg-type]
    return simulate_campaign(small_job(), options, seed=seed)


def test_one_seed_gives_one_run() -> None:
    one, other = paper(), paper(seed=1)
    assert one == paper.__wrapped__()
    assert [row.weights for row in one.generations] != [row.weights for row in other.generations]


def test_every_request_is_served_and_routed_by_the_weights_of_its_generation() -> None:
    run = paper()
    assert run.row.n == len(run.records) == 150
    assert run.row.errors == 0
    versions = {record.weights_version for record in run.records}
    assert {row.weights_version for row in run.generations} <= versions
    assert [row.number for row in run.generations] == list(range(len(run.generations)))


def test_what_is_left_at_the_end_is_the_last_accepted_weight_set() -> None:
    run = paper()
    assert run.stopped == "6 generations"
    accepted = [row.weights for row in run.generations if row.accepted]
    assert run.weights == accepted[-1]


def test_switchback_takes_turns_and_stays_without_evidence() -> None:
    options = CampaignOptions(block_s=4.0, rest_blocks=0.0, discard_s=1.0, min_block_samples=3, pairs=6, **QUICK)  # type: ignore[arg-type]
    run = simulate_campaign(small_job(), options)
    assert len({record.weights_version for record in run.records}) >= 4
    assert run.weights == {"w_rtt": 0.5, "w_queue": 0.1}


def test_a_campaign_without_a_proposal_changes_nothing_for_the_clients() -> None:
    options = CampaignOptions(warm_up_s=10_000.0)
    left_alone = simulate_campaign(small_job(), options)
    watched = [asdict(record) | {"weights_version": None} for record in left_alone.records]
    plain = run_once(small_job(keep_requests=True)).requests or ()
    assert watched == [asdict(record) | {"weights_version": None} for record in plain]


def test_a_start_outside_the_box_is_refused_unless_the_box_is_wider() -> None:
    options = CampaignOptions(mode="paper", max_generations=1, **QUICK)  # type: ignore[arg-type]
    job = small_job(weights={"w_queue": 0.001})
    with pytest.raises(WeightsError, match=r"'w_queue' is 0.001; expected a number in \[0.05, 0.5\]"):
        simulate_campaign(job, options)
    run = simulate_campaign(job, options, box={"w_queue": (0.0005, 0.5)})
    assert run.generations[0].weights["w_queue"] == 0.001


def test_a_simulated_sidecar_polls_each_second_for_a_thousand_samples() -> None:
    assert (simulated_campaign.POLL_S, simulated_campaign.BATCH) == (1.0, 1000)


def test_the_first_poll_is_at_the_start() -> None:
    assert simulated_campaign.CampaignDriver(cast(Campaign, None)).next_s == 0.0
