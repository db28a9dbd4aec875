"""When who was turned away is told to come back."""

from __future__ import annotations

from gorgo.core.admission.retry_after import MAX_RETRY_S, MIN_RETRY_S, RetryAfter


def told(times: list[float], *, work_s: float = 2.0) -> list[float]:
    away = RetryAfter()
    return [away.seconds(work_s, now=now) for now in times]


def test_the_first_is_told_how_long_what_is_there_takes() -> None:
    assert told([50.0]) == [2.0]
    assert told([50.0], work_s=0.01) == [MIN_RETRY_S]
    assert told([50.0], work_s=1e4) == [MAX_RETRY_S]


def test_an_overload_that_lasts_is_told_to_last_as_long_again() -> None:
    assert told([float(second) for second in range(100, 110)])[-1] == 9.0
    assert told([float(second) for second in range(100, 500)])[-1] == MAX_RETRY_S


def test_who_is_turned_away_after_the_time_that_was_told_begins_anew() -> None:
    assert told([100.0, 101.0, 102.0, 103.0, 105.5]) == [2.0, 2.0, 2.0, 3.0, 5.5]
    assert told([100.0, 101.0, 102.0, 103.0, 106.1])[-1] == 2.0


def test_an_overload_is_over_after_the_retry_time_not_at_it() -> None:
    assert told([100.0, 102.0, 104.0, 108.0]) == [2.0, 2.0, 4.0, 8.0]
    assert told([100.0, 102.0, 104.0, 108.01]) == [2.0, 2.0, 4.0, 2.0]


def test_more_work_than_the_overload_has_lasted_is_the_retry_time() -> None:
    away = RetryAfter()
    assert [away.seconds(work_s, now=now) for work_s, now in ((5.0, 0.0), (1.5, 4.0), (7.0, 4.5))] == [5.0, 4.0, 7.0]
    assert away.seconds(1.5, now=11.4) == 11.4, "it was told to last until 11.5"


def test_one_now_and_then_is_no_overload() -> None:
    assert set(told([10.0 * turn for turn in range(100)])) == {2.0}


def test_obeying_clients_come_back_ever_less_often_while_it_lasts() -> None:
    away, now, tries = RetryAfter(), 0.0, 0
    while now < 100.0:
        now += away.seconds(1.0, now=now)
        tries += 1
    assert tries < 10
