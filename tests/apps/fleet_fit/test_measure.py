from __future__ import annotations

from dataclasses import replace

import pytest

from gorgo.apps.fleet_fit.fit import BASE, task_of
from gorgo.apps.fleet_fit.measure import measure, stats_of, three_regions, with_values
from gorgo.apps.fleet_fit.published import LEARNED, WINDOWS
from gorgo.sim.engine.fitted import FLAGS
from gorgo.sim.engine.profiles import find_profile
from gorgo.sim.records import SimRecord

PROFILE = with_values(find_profile(BASE), FLAGS)
TASK = task_of(WINDOWS[0], "gorgo", PROFILE, seed=0, parts=(20, 60))


def a_record(ttft_ms: float, e2e_s: float, output_tokens: int) -> SimRecord:
    return SimRecord(
        id="1", scheduled_s=0.0, sent_s=0.0, input_tokens=9, ttft_ms=ttft_ms, e2e_s=e2e_s, output_tokens=output_tokens
    )


def test_time_per_token_is_the_median_over_requests_of_their_means() -> None:
    records = [a_record(100, 0.1 + 0.9, 91), a_record(200, 0.2 + 1.0, 101), a_record(300, 0.3 + 9.0, 101)]
    stats = stats_of([*records, a_record(400, 0.4, 1)])
    assert stats.tpot_ms == pytest.approx(10.0), "10, 10 and 90 ms; one token has no gap"
    assert [stats.ttft_ms_p50, stats.e2e_s_p50] == pytest.approx([250.0, 1.1])


def test_a_run_is_the_authors_set_up() -> None:
    job = TASK.job()
    assert job.weights == LEARNED
    assert (job.limits, job.time_scale, job.filters.max_input) == (None, 1.0, 24_000)
    assert [replica.region for replica in three_regions(PROFILE).replicas] == ["us-ashburn", "eu-frankfurt", "ap-seoul"]
    assert task_of(WINDOWS[0], "least-load", PROFILE, seed=0).job().weights is None
    assert task_of(WINDOWS[2], "least-load", PROFILE, seed=0).job().time_scale == 3.0


def test_every_answer_ends_at_the_cap_and_the_warm_up_is_not_measured() -> None:
    quiet = task_of(WINDOWS[2], "gorgo", PROFILE, seed=0)
    whole = measure(replace(quiet, warm_up=0, measured=600))
    part = measure(replace(quiet, warm_up=500, measured=100))
    assert part.errors == whole.errors == 0
    assert part.cache_hit > whole.cache_hit, "the first requests find empty caches"
    assert sum(part.share.values()) == pytest.approx(1.0)
    gaps_s = part.stats.e2e_s_p50 - part.stats.ttft_ms_p50 / 1e3
    assert gaps_s / (part.stats.tpot_ms / 1e3) == pytest.approx(127, rel=0.15)


def test_a_task_has_a_key_of_its_own_by_profile_policy_and_part() -> None:
    others = [
        replace(TASK, profile=replace(PROFILE, hit_share=0.5)),
        replace(TASK, policy="random", weights=()),
        replace(TASK, measured=61),
        replace(TASK, seed=1),
    ]
    assert len({task.key() for task in [TASK, *others]}) == 5
    assert replace(TASK).key() == TASK.key()
