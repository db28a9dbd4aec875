"""Which samples count, and when the weights in force are known well enough."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tuner.campaign.applied_weights import AppliedWeights
from tuner.campaign.options import CampaignOptions
from tuner.objective import TunerSample

SAMPLE = TunerSample(1, 0.0, "a", 5, 400.0, 2.0, 12.0, 200)


def footing(*, version: int | None = 5, **options: float) -> AppliedWeights:
    """Windows of four samples; `version` came into force at 100 s."""
    made = AppliedWeights(CampaignOptions(window=4, hop=2, **options))  # type: ignore[arg-type]
    made.requested()
    if version is not None:
        made.on_applied(version, now=100.0)
    return made


def of(*versions: int) -> list[TunerSample]:
    return [replace(SAMPLE, weights_version=version) for version in versions]


def test_every_order_has_a_ticket_of_its_own_and_leaves_what_is_in_force_unknown() -> None:
    made = footing()
    assert (made.ticket, made.version) == (1, 5)
    assert made.requested() == made.ticket == 2
    assert made.version is None
    made.warm(of(5, 5, 5, 5))
    assert not made.ready(now=1e9)


def test_samples_count_from_the_first_version_that_was_put() -> None:
    assert not footing(version=None).known
    assert footing(version=None).counted(of(5, 6)) == []
    made = footing()
    made.requested()
    assert made.known, "what was put before is in force still"
    made.on_applied(8, now=200.0)
    assert made.counted(of(4, 5, 6, 8)) == of(5, 6, 8)


def test_only_what_is_in_force_is_warmed_by() -> None:
    made = footing()
    made.warm(of(4, 5, 5, 6))
    assert len(made.recent) == 2


def test_another_run_of_the_proxy_leaves_nothing_known() -> None:
    made = footing()
    made.warm(of(5, 5))
    made.restarted()
    assert (made.known, len(made.recent), made.counted(of(5))) == (False, 0, [])
    made.requested()
    made.on_applied(2, now=300.0)
    assert made.counted(of(1, 2, 3)) == of(2, 3)


@pytest.mark.parametrize(
    ("samples", "now", "ready", "ready_s"),
    [(4, 159.9, False, 160.0), (4, 160.0, True, 160.0), (3, 160.0, False, None), (5, 170.0, True, 160.0)],
)
def test_it_is_ready_after_the_warm_up_with_a_full_window(
    samples: int, now: float, ready: bool, ready_s: float | None
) -> None:
    made = footing(warm_up_s=60.0)
    made.warm(of(*[5] * samples))
    assert (made.ready(now), made.ready_s()) == (ready, ready_s)


def test_nothing_is_ready_while_an_answer_is_awaited() -> None:
    made = footing()
    made.warm(of(5, 5, 5, 5))
    made.requested()
    assert (made.ready(now=1e9), made.ready_s()) == (False, None)


@pytest.mark.parametrize(
    ("ttft_ms", "saturated"),
    [
        ([100.0, 100.0, 100.0, 5001.0], False),  # a quarter is not more than a quarter
        ([100.0, 100.0, 5001.0, 5001.0], True),
        ([100.0, 100.0, 5000.0, 5000.0], False),
        ([100.0, 100.0, None, None], True),
        ([5001.0, 5001.0, 5001.0], False),  # a window that is not full says nothing
    ],
)
def test_a_fleet_is_saturated_when_too_many_first_tokens_take_too_long(
    ttft_ms: list[float | None], saturated: bool
) -> None:
    made = footing()
    made.warm(replace(SAMPLE, ttft_ms=one) for one in ttft_ms)
    assert made.saturated() == saturated
