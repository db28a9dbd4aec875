from __future__ import annotations

from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gorgo.core.busy_clock import BusyClock


def clock_with(*line: tuple[str, float, float], seen: bool = True) -> BusyClock:
    """Whose line is (key, arrival, prior) each."""
    clock = BusyClock()
    for key, arrives_s, prior_s in line:
        clock.dispatched(key, arrives_s=arrives_s, prior_s=prior_s, seen=seen)
    return clock


def test_an_idle_replica_is_free_and_owes_nothing() -> None:
    clock = BusyClock()
    assert (clock.free_at_s, clock.due_s, clock.waiting_s) == (-inf, inf, 0.0)


def test_each_dispatch_adds_its_prefill_behind_what_is_there() -> None:
    clock = clock_with(("a", 10.0, 1.0), ("b", 10.5, 0.5))
    assert (clock.free_at_s, clock.waiting_s, clock.due_s) == (11.5, 1.5, 11.0)


def test_an_idle_gap_is_not_work() -> None:
    clock = clock_with(("a", 10.0, 1.0))
    clock.first_token("a", engine_s=11.005)
    clock.dispatched("b", arrives_s=20.0, prior_s=0.5, seen=True)
    assert clock.free_at_s == pytest.approx(20.5)


def test_a_first_token_sets_the_clock_to_what_still_waits() -> None:
    clock = clock_with(("a", 10.0, 1.0), ("b", 10.0, 0.5), ("c", 10.0, 0.25))
    clock.first_token("a", engine_s=10.705)
    assert clock.free_at_s == pytest.approx(10.705 + 0.75 * clock.speed.factor)
    assert clock.due_s == pytest.approx(10.705 + 0.5 * clock.speed.factor)


def test_a_first_token_out_of_line_leaves_the_older_ones_waiting() -> None:
    clock = clock_with(("a", 10.0, 1.0), ("b", 10.0, 0.5))
    clock.first_token("b", engine_s=10.6)
    assert clock.waiting_s == 1.0
    assert clock.due_s == pytest.approx(11.6)


def test_a_first_token_told_twice_or_of_a_stranger_changes_nothing() -> None:
    clock = clock_with(("a", 10.0, 1.0), ("b", 10.0, 0.5))
    clock.first_token("a", engine_s=11.0)
    before = (clock.free_at_s, clock.due_s, clock.waiting_s, clock.speed.last_s)
    clock.first_token("a", engine_s=12.0)
    clock.left("never", engine_s=12.0)
    assert (clock.free_at_s, clock.due_s, clock.waiting_s, clock.speed.last_s) == before


def test_who_leaves_from_the_middle_takes_its_prefill_along() -> None:
    clock = clock_with(("a", 10.0, 1.0), ("b", 10.0, 0.5), ("c", 10.0, 0.25))
    clock.left("b", engine_s=10.3)
    assert (clock.free_at_s, clock.due_s, clock.waiting_s) == (11.25, 11.0, 1.25)


def test_the_engine_has_spent_on_the_first_in_line_what_passed_until_it_left() -> None:
    clock = clock_with(("a", 10.0, 1.0), ("b", 10.0, 0.5))
    clock.left("a", engine_s=10.75)
    assert (clock.free_at_s, clock.due_s) == (11.25, 11.25)


def test_the_next_in_line_inherits_how_late_a_stuck_replica_is() -> None:
    clock = clock_with(("a", 10.0, 1.0), ("b", 10.0, 0.5))
    clock.left("a", engine_s=19.0)
    assert clock.due_s == 11.5


def test_an_answer_in_one_piece_is_in_line_until_its_prefill_should_be_over() -> None:
    clock = clock_with(("whole", 10.0, 1.0), seen=False)
    assert (clock.free_at_s, clock.due_s) == (11.0, inf)
    clock.dispatched("b", arrives_s=10.5, prior_s=0.5, seen=True)
    assert (clock.free_at_s, clock.due_s, len(clock)) == (11.5, inf, 2)
    clock.dispatched("c", arrives_s=11.25, prior_s=0.5, seen=True)
    assert (clock.free_at_s, clock.due_s, len(clock)) == (12.0, 11.5, 2)


def test_an_answer_in_one_piece_was_prefilled_before_a_later_one_s_first_token() -> None:
    clock = clock_with(("whole", 10.0, 1.0), seen=False)
    clock.dispatched("b", arrives_s=10.0, prior_s=0.5, seen=True)
    clock.first_token("b", engine_s=10.9)
    assert len(clock) == 0
    assert clock.free_at_s == 10.9


def test_the_end_of_an_answer_in_one_piece_teaches_no_speed() -> None:
    clock = clock_with(("whole", 10.0, 1.0), seen=False)
    clock.left("whole", engine_s=60.0)
    assert clock.speed.factor == 1.0
    assert clock.free_at_s <= 60.0


moves = st.lists(
    st.tuples(
        st.sampled_from(("dispatched", "dispatched", "first_token", "left")),
        st.integers(0, 12),
        st.floats(0, 3),
        st.booleans(),
    ),
    max_size=60,
)


@given(moves=moves)
def test_the_clock_is_idle_again_when_all_have_ended_in_any_order(
    moves: list[tuple[str, int, float, bool]],
) -> None:
    clock, now, known = BusyClock(), 100.0, 0
    keys: list[str] = []
    for move, number, step_s, seen in moves:
        now += step_s
        if move == "dispatched":
            known += 1
            keys.append(f"k{known}")
            clock.dispatched(keys[-1], arrives_s=now + 0.05, prior_s=step_s / 2, seen=seen)
        elif move == "first_token":
            clock.first_token(f"k{number}", engine_s=now - 0.05)
        else:
            clock.left(f"k{number}", engine_s=now + 0.05)
        clock.check()
    for key in keys:
        clock.left(key, engine_s=now + 0.05)
        clock.check()
    assert len(clock) == 0
    assert (clock.due_s, clock.waiting_s) == (inf, 0.0)
    assert clock.free_at_s <= now + 0.05 + 1e-9
