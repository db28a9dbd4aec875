from __future__ import annotations

import pytest

from gorgo.core.health import EjectionLimits, Health, HealthState


@pytest.fixture
def health() -> Health:
    return Health(EjectionLimits(failures=3, base_s=5.0, max_s=60.0))


def fail(health: Health, times: int, *, now: float) -> None:
    for _ in range(times):
        health.attempt_failed(dispatched_s=now, now=now)


def half_open(health: Health) -> None:
    fail(health, 3, now=0.0)
    health.wake(now=5.0)


def test_three_failures_in_a_row_eject_and_two_do_not(health: Health) -> None:
    fail(health, 2, now=0.0)
    assert health.accepts
    fail(health, 1, now=0.0)
    assert health.state is HealthState.EJECTED
    assert health.wakes_s == 5.0
    assert not health.accepts


def test_a_success_in_between_starts_the_count_again(health: Health) -> None:
    fail(health, 2, now=0.0)
    health.attempt_succeeded(dispatched_s=0.0, now=1.0)
    fail(health, 2, now=2.0)
    assert health.accepts


def test_failed_probes_eject_too(health: Health) -> None:
    assert [health.probe_failed(now=float(now)) for now in range(3)] == [False, False, True]
    assert health.state is HealthState.EJECTED


def test_a_good_probe_does_not_wipe_out_failed_attempts(health: Health) -> None:
    """The server of a broken engine still answers a ping."""
    fail(health, 2, now=0.0)
    health.probe_succeeded(now=1.0)
    fail(health, 1, now=2.0)
    assert health.state is HealthState.EJECTED


def test_the_back_off_doubles_up_to_its_maximum(health: Health) -> None:
    fail(health, 3, now=0.0)
    waits = []
    for _ in range(6):
        assert health.wakes_s is not None
        now = health.wakes_s
        waits.append(now - health.changed_s)
        assert health.wake(now=now)
        fail(health, 1, now=now)
    assert waits == [5, 10, 20, 40, 60, 60]


def test_after_the_back_off_one_trial_at_a_time(health: Health) -> None:
    fail(health, 3, now=0.0)
    assert not health.wake(now=4.9)
    assert health.wake(now=5.0)
    assert health.attempt_started("r/1")
    assert not health.attempt_started("r/2")
    assert not health.accepts
    assert not health.attempt_ended("other/1")
    assert health.attempt_ended("r/1")
    assert health.attempt_started("r/3")


def test_a_good_trial_readmits_and_forgets(health: Health) -> None:
    half_open(health)
    assert health.attempt_succeeded(dispatched_s=5.0, now=6.0)
    assert health.state is HealthState.HEALTHY
    fail(health, 2, now=7.0)
    assert health.accepts


def test_a_good_probe_readmits_on_probation(health: Health) -> None:
    half_open(health)
    assert health.probe_succeeded(now=6.0)
    assert health.accepts
    fail(health, 1, now=7.0)
    assert health.wakes_s == 17.0  # one failure was enough, and the back-off has doubled


def test_a_probe_during_the_back_off_changes_nothing(health: Health) -> None:
    fail(health, 3, now=0.0)
    assert not health.probe_succeeded(now=1.0)
    assert not health.probe_failed(now=1.0)
    assert health.wakes_s == 5.0


def test_streams_cut_together_eject_once(health: Health) -> None:
    fail(health, 100, now=0.0)
    health.wake(now=5.0)
    for _ in range(100):
        health.attempt_failed(dispatched_s=-1.0, now=5.0)
    assert health.state is HealthState.HALF_OPEN
    assert health.ejections == 1


def test_a_success_from_before_the_ejection_does_not_readmit(health: Health) -> None:
    fail(health, 3, now=10.0)
    assert not health.attempt_succeeded(dispatched_s=9.0, now=11.0)
    assert health.state is HealthState.EJECTED


def test_a_success_while_ejected_readmits() -> None:
    """In a panic requests go to ejected replicas as well; one that answers is well again."""
    health = Health(EjectionLimits(failures=1))
    fail(health, 1, now=0.0)
    assert health.attempt_succeeded(dispatched_s=1.0, now=2.0)
    assert health.accepts
    assert health.wakes_s is None
