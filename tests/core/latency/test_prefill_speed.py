from __future__ import annotations

from math import exp

import pytest

from gorgo.core.latency.prefill_speed import MOST_PASSED, SLOWEST, PrefillSpeed


def learned(*tokens: tuple[float, float, float, bool]) -> PrefillSpeed:
    """Of tokens (engine time, arrival, prior, head of the line)."""
    speed = PrefillSpeed()
    for engine_s, arrived_s, prior_s, head in tokens:
        speed.on_first_token(engine_s=engine_s, arrived_s=arrived_s, prior_s=prior_s, head=head)
    return speed


def test_a_replica_is_as_fast_as_its_prior_until_it_shows_otherwise() -> None:
    assert learned().factor == 1.0


def test_the_first_token_of_an_idle_replica_counts_from_the_arrival_less_half_a_step() -> None:
    assert learned((12.005, 10.0, 1.0, True)).factor == pytest.approx((2.0 + 5.0) / (1.0 + 5.0))


def test_a_request_that_was_there_before_the_last_first_token_counts_from_that() -> None:
    speed = learned((11.005, 10.0, 1.0, True), (14.005, 10.5, 1.0, True))
    kept = exp(-0.1)
    assert speed.factor == pytest.approx((1.0 * kept + 3.0 + 5.0) / (1.0 * kept + 1.0 + 5.0))


def test_a_request_that_came_within_half_a_step_of_the_last_first_token_counts_from_its_arrival() -> None:
    speed = learned((11.005, 10.0, 1.0, True), (13.009, 11.004, 1.0, True))
    kept = exp(-0.1)
    assert speed.factor == pytest.approx((1.0 * kept + 1.999 + 5.0) / (1.0 * kept + 1.0 + 5.0))


def test_tokens_that_come_together_count_with_nothing_for_the_later_ones() -> None:
    speed = learned((12.005, 10.0, 1.0, True), (12.005, 10.0, 1.0, True))
    kept = exp(-0.1)
    assert speed.factor == pytest.approx((2.0 * kept + 0.0 + 5.0) / (1.0 * kept + 1.0 + 5.0))


def test_nothing_is_learned_while_an_older_request_has_the_engine() -> None:
    assert learned((12.0, 10.0, 1.0, False)).factor == 1.0


def test_a_short_prompt_that_ends_in_the_last_step_of_a_long_one_hides_no_time() -> None:
    """An engine ends both in one step, and the token of the later one may be read first."""
    speed = learned((40.005, 35.0, 0.1, False), (40.005, 20.0, 20.0, True))
    assert speed.factor == pytest.approx((20.0 + 5.0) / (20.1 + 5.0))


def test_what_passed_an_older_request_counts_with_it() -> None:
    passed = learned((11.0, 10.0, 1.0, True), (13.0, 10.6, 1.0, False), (14.0, 10.5, 2.0, True))
    kept = exp(-0.3)
    assert passed.factor == pytest.approx((0.995 * kept + 3.0 + 5.0) / (1.0 * kept + 3.0 + 5.0))


def test_what_passed_a_request_that_failed_counts_for_no_later_one() -> None:
    speed = learned((12.0, 11.0, 1.0, False), (22.005, 20.0, 2.0, True))
    assert speed.factor == pytest.approx((2.0 + 5.0) / (2.0 + 5.0))


def test_a_stuck_request_may_be_passed_by_so_many() -> None:
    speed = learned(*((10.0 + number, 10.0, 0.5, False) for number in range(MOST_PASSED + 1)))
    assert speed.last_s == 10.0 + MOST_PASSED
    speed.on_first_token(engine_s=100.0, arrived_s=5.0, prior_s=26.0, head=True)
    assert speed.factor == pytest.approx((26.0 + 5.0) / (26.0 + 5.0), rel=1e-3)


def test_work_of_others_before_a_token_that_passed_leaves_the_time_out() -> None:
    speed = PrefillSpeed()
    speed.on_first_token(engine_s=12.0, arrived_s=10.5, prior_s=0.5, head=False, shared_until_s=11.0)
    speed.on_first_token(engine_s=13.0, arrived_s=10.0, prior_s=0.5, head=True)
    assert speed.factor == 1.0


def test_the_factor_stays_within_its_bounds() -> None:
    assert learned((1e6, 10.0, 1.0, True)).factor == 10.0
    assert learned((10.0, 20.0, 100.0, True)).factor == 0.1


def test_a_replica_three_times_slower_is_known_after_some_seconds_of_work_and_forgiven_as_fast() -> None:
    speed, now = PrefillSpeed(), 0.0
    for slowdown, wanted in ((3.0, pytest.approx(2.82, abs=0.02)), (1.0, pytest.approx(1.17, abs=0.02))):
        for _ in range(40):
            arrived_s, now = now, now + 0.5 * slowdown
            speed.on_first_token(engine_s=now + 0.005, arrived_s=arrived_s, prior_s=0.5, head=True)
        assert speed.factor == wanted


@pytest.mark.parametrize(("slowdown", "steady"), [(1.7, True), (2.5, False), (0.6, True), (0.3, False)])
def test_the_quick_average_is_believed_where_noise_does_not_reach(slowdown: float, steady: bool) -> None:
    speed = learned(*((slowdown * second, 0.0, 1.0, True) for second in range(1, 100)))
    halfway = (1.0 + slowdown) / 2
    leans = abs(speed.factor - slowdown) > 0.2 * abs(1.0 - slowdown)
    assert leans == steady
    assert (speed.factor - halfway) * (slowdown - halfway) > 0  # nearer to the truth than to the prior, in both


def test_what_the_engine_tells_is_where_learning_starts_from_and_weighs_as_a_given_prior() -> None:
    speed = learned()
    speed.set_prior(3.0)
    assert speed.factor == 3.0
    speed.on_first_token(engine_s=12.005, arrived_s=10.0, prior_s=1.0, head=True)
    assert speed.factor == pytest.approx((2.0 + 5.0 * 3.0) / (1.0 + 5.0))


@pytest.mark.parametrize(("told", "start"), [(50.0, 10.0), (0.01, 0.1)])
def test_a_reported_speed_is_a_start_within_the_bounds(told: float, start: float) -> None:
    """Then a second of the prior takes a second: the quick average of (1 + 0.5 x start) / 1.5 is far from the start."""
    speed = learned()
    speed.set_prior(told)
    assert speed.factor == start
    speed.on_first_token(engine_s=11.005, arrived_s=10.0, prior_s=1.0, head=True)
    assert speed.factor == pytest.approx((1.0 + 0.5 * start) / 1.5)


@pytest.mark.parametrize(
    ("spent_s", "factor"),
    [
        (5.5, (5.5 + 0.5) / (2.0 + 0.5)),  # quick: 2.4: counts
        (4.45, (4.45 + 5.0) / (2.0 + 5.0)),  # quick: 1.98: the steady one
        (0.76, (0.76 + 5.0) / (2.0 + 5.0)),  # quick: 0.504
        (0.74, (0.74 + 0.5) / (2.0 + 0.5)),  # quick: 0.496: counts
        (4.55, (4.55 + 0.5) / (2.0 + 0.5)),  # quick: 2.02: counts
    ],
)
def test_the_quick_average_counts_beyond_twice_and_below_half_of_the_start(spent_s: float, factor: float) -> None:
    assert learned((10.005 + spent_s, 10.0, 2.0, True)).factor == pytest.approx(factor)


def test_the_quick_average_forgets_twice_as_fast() -> None:
    """Two seconds of the prior each: one that took 10 s, one that took 10 s again."""
    speed = learned((20.005, 10.0, 2.0, True), (30.005, 10.5, 2.0, True))
    kept = exp(-2.0 / 5.0)
    assert speed.factor == pytest.approx((10.0 * kept + 10.0 + 0.5) / (2.0 * kept + 2.0 + 0.5))


def test_telling_does_not_count_again_what_was_learned() -> None:
    speed = learned(*((3.0 * second, 0.0, 1.0, True) for second in range(1, 400)))
    before = speed.factor
    speed.set_prior(3.0)
    assert speed.factor == pytest.approx(before, rel=0.07)
    speed.set_prior(1e6)
    assert speed.factor <= SLOWEST
