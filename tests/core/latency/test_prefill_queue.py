from __future__ import annotations

from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gorgo.core.latency.prefill import PrefillQueue


def clock_with(*line: tuple[str, float, float], streamed: bool = True) -> PrefillQueue:
    """Whose line is (key, arrival, prior) each."""
    clock = PrefillQueue()
    for key, arrives_s, prior_s in line:
        clock.add(key, arrives_s=arrives_s, prior_s=prior_s, streamed=streamed)
    return clock


def test_an_idle_replica_is_free_and_owes_nothing() -> None:
    clock = PrefillQueue()
    assert (clock.drained_at_s, clock.head_due_s, clock.backlog_s) == (-inf, inf, 0.0)


def test_each_dispatch_adds_its_prefill_behind_what_is_there() -> None:
    clock = clock_with(("a", 10.0, 1.0), ("b", 10.5, 0.5))
    assert (clock.drained_at_s, clock.backlog_s, clock.head_due_s) == (11.5, 1.5, 11.0)


def test_an_idle_gap_is_not_work() -> None:
    clock = clock_with(("a", 10.0, 1.0))
    clock.on_first_token("a", engine_s=11.005)
    clock.add("b", arrives_s=20.0, prior_s=0.5, streamed=True)
    assert clock.drained_at_s == pytest.approx(20.5)


def test_a_first_token_sets_the_clock_to_what_still_waits() -> None:
    clock = clock_with(("a", 10.0, 1.0), ("b", 10.0, 0.5), ("c", 10.0, 0.25))
    clock.on_first_token("a", engine_s=10.705)
    assert clock.drained_at_s == pytest.approx(10.705 + 0.75 * clock.speed.factor)
    assert clock.head_due_s == pytest.approx(10.705 + 0.5 * clock.speed.factor)


def test_a_first_token_out_of_line_leaves_the_older_ones_waiting() -> None:
    clock = clock_with(("a", 10.0, 1.0), ("b", 10.0, 0.5))
    clock.on_first_token("b", engine_s=10.6)
    assert clock.backlog_s == 1.0
    assert clock.head_due_s == pytest.approx(11.6)


def test_a_first_token_told_twice_or_of_a_stranger_changes_nothing() -> None:
    clock = clock_with(("a", 10.0, 1.0), ("b", 10.0, 0.5))
    clock.on_first_token("a", engine_s=11.0)
    before = (clock.drained_at_s, clock.head_due_s, clock.backlog_s, clock.speed.last_s)
    clock.on_first_token("a", engine_s=12.0)
    clock.remove("never", engine_s=12.0)
    assert (clock.drained_at_s, clock.head_due_s, clock.backlog_s, clock.speed.last_s) == before


def test_who_leaves_from_the_middle_takes_its_prefill_along() -> None:
    clock = clock_with(("a", 10.0, 1.0), ("b", 10.0, 0.5), ("c", 10.0, 0.25))
    clock.remove("b", engine_s=10.3)
    assert (clock.drained_at_s, clock.head_due_s, clock.backlog_s) == (11.25, 11.0, 1.25)


def test_the_engine_has_spent_on_the_first_in_line_what_passed_until_it_left() -> None:
    clock = clock_with(("a", 10.0, 1.0), ("b", 10.0, 0.5))
    clock.remove("a", engine_s=10.75)
    assert (clock.drained_at_s, clock.head_due_s) == (11.25, 11.25)


def test_the_next_in_line_inherits_how_late_a_stuck_replica_is() -> None:
    clock = clock_with(("a", 10.0, 1.0), ("b", 10.0, 0.5))
    clock.remove("a", engine_s=19.0)
    assert clock.head_due_s == 11.5


def test_an_answer_in_one_piece_is_in_line_until_its_prefill_should_be_over() -> None:
    clock = clock_with(("whole", 10.0, 1.0), streamed=False)
    assert (clock.drained_at_s, clock.head_due_s) == (11.0, inf)
    clock.add("b", arrives_s=10.5, prior_s=0.5, streamed=True)
    assert (clock.drained_at_s, clock.head_due_s, len(clock)) == (11.5, inf, 2)
    clock.add("c", arrives_s=11.25, prior_s=0.5, streamed=True)
    assert (clock.drained_at_s, clock.head_due_s, len(clock)) == (12.0, 11.5, 2)


def test_an_answer_in_one_piece_was_prefilled_before_a_later_one_s_first_token() -> None:
    clock = clock_with(("whole", 10.0, 1.0), streamed=False)
    clock.add("b", arrives_s=10.0, prior_s=0.5, streamed=True)
    clock.on_first_token("b", engine_s=10.9)
    assert len(clock) == 0
    assert clock.drained_at_s == 10.9


def test_the_end_of_an_answer_in_one_piece_teaches_no_speed() -> None:
    clock = clock_with(("whole", 10.0, 1.0), streamed=False)
    clock.remove("whole", engine_s=60.0)
    assert clock.speed.factor == 1.0
    assert clock.drained_at_s <= 60.0


def slow_clock(factor: float = 2.0) -> PrefillQueue:
    """Of an engine that says that its prefills take so many times their prior."""
    clock = PrefillQueue()
    clock.speed.set_prior(factor)
    return clock


def test_a_prefill_queue_is_as_long_as_its_priors_times_the_learned_factor() -> None:
    """Behind an arrival at 10 s: 2 s for a prior of 1 s, 1 s for one of half a second."""
    clock = slow_clock()
    clock.add("a", arrives_s=10.0, prior_s=1.0, streamed=True)
    clock.add("b", arrives_s=10.0, prior_s=0.5, streamed=True)
    assert (clock.drained_at_s, clock.backlog_s, clock.head_due_s) == (13.0, 3.0, 12.0)


def test_a_request_that_leaves_takes_its_prior_times_the_learned_factor_along() -> None:
    clock = slow_clock()
    for key, prior_s in (("a", 1.0), ("b", 0.5), ("c", 0.25)):
        clock.add(key, arrives_s=10.0, prior_s=prior_s, streamed=True)
    clock.remove("b", engine_s=10.5)  # from the middle: its whole second goes
    assert (clock.drained_at_s, clock.backlog_s, clock.head_due_s) == (12.5, 2.5, 12.0)
    clock.remove("a", engine_s=11.5)  # the first: 1.5 s of its two are spent
    assert (clock.drained_at_s, clock.backlog_s, clock.head_due_s) == (12.0, 0.5, 12.0)


def test_the_first_in_the_prefill_queue_has_spent_its_prior_times_the_learned_factor_at_most() -> None:
    clock = slow_clock()
    clock.add("a", arrives_s=10.0, prior_s=1.0, streamed=True)
    clock.add("b", arrives_s=10.0, prior_s=0.5, streamed=True)
    clock.remove("a", engine_s=60.0)
    assert (clock.drained_at_s, clock.head_due_s) == (13.0, 13.0)


def test_a_first_token_leaves_the_queued_priors_times_the_factor_that_it_taught() -> None:
    """One second where the prior says two, leaning on 5 s of prior: (1 - 0.005 + 5) / (2 + 5)."""
    clock = clock_with(("a", 10.0, 2.0), ("b", 10.0, 1.0))
    clock.on_first_token("a", engine_s=11.0)
    factor = 5.995 / 7.0
    assert clock.speed.factor == pytest.approx(factor)
    assert (clock.drained_at_s, clock.backlog_s) == pytest.approx((11.0 + factor, factor))


def test_a_first_token_out_of_order_says_nothing_of_the_speed() -> None:
    clock = clock_with(("a", 10.0, 1.0), ("b", 10.0, 1.0))
    clock.on_first_token("b", engine_s=13.0)
    assert clock.speed.factor == 1.0


def test_an_empty_prefill_queue_is_an_idle_engine_whatever_was_learned_meanwhile() -> None:
    """A second was added at dispatch and half a second is taken back: what is left is no work."""
    clock = clock_with(("a", 10.0, 1.0))
    clock.speed.set_prior(0.5)
    clock.remove("a", engine_s=10.0)
    assert clock.drained_at_s == 10.0


def test_requests_ahead_in_the_prefill_queue_are_the_streams_before_it() -> None:
    clock = clock_with(("a", 10.0, 1.0))
    clock.add("whole", arrives_s=10.0, prior_s=1.0, streamed=False)
    clock.add("b", arrives_s=10.0, prior_s=1.0, streamed=True)
    clock.add("c", arrives_s=10.0, prior_s=1.0, streamed=True)
    assert [clock.before(key) for key in ("a", "b", "c", "nobody")] == [[], ["a"], ["a", "b"], []]


def test_a_prefill_begins_no_sooner_than_its_request_arrives() -> None:
    """The first has not arrived by the time at which its client leaves: the engine has spent nothing on it."""
    clock = clock_with(("a", 10.0, 1.0), ("b", 10.5, 1.0))
    clock.remove("a", engine_s=9.5)
    assert (clock.drained_at_s, clock.head_due_s) == (11.0, 11.5)


def shared_clock(*line: tuple[str, float, float]) -> PrefillQueue:
    """Whose line is (key, work of other routers before it, prior) each, all there at 10 s."""
    clock = PrefillQueue()
    for key, shared_s, prior_s in line:
        clock.add(key, arrives_s=10.0, prior_s=prior_s, streamed=True, shared_s=shared_s)
    clock.check()
    return clock


def test_while_the_engine_is_at_the_work_of_other_routers_nothing_of_the_own_is_done() -> None:
    clock = shared_clock(("a", 1.0, 0.5))
    assert (clock.drained_at_s, clock.head_due_s, clock.shared_s) == (11.5, 11.5, 1.0)
    assert [clock.left_s(engine_s=at_s) for at_s in (10.0, 10.75, 11.25, 11.5)] == [0.5, 0.5, 0.25, 0.0]
    assert [clock.own_drained_at_s(engine_s=at_s) for at_s in (10.0, 10.75, 11.25)] == [10.5, 11.25, 11.5]


def test_a_first_token_ends_what_was_before_its_request_alone() -> None:
    clock = shared_clock(("a", 1.0, 0.5), ("b", 0.25, 0.5))
    assert clock.drained_at_s == 12.25
    clock.on_first_token("a", engine_s=11.0, shared_until_s=10.5)
    assert (clock.drained_at_s, clock.head_due_s, clock.shared_s) == (11.75, 11.75, 0.25)
    assert clock.left_s(engine_s=11.125) == 0.5


@pytest.mark.parametrize(
    ("gone", "at_s", "shared_s", "drained_at_s"),
    [
        ("a", 10.25, 1.0, 11.75),  # Three quarters of a second of others are left before the second.
        ("a", 11.25, 0.25, 12.0),  # All of that is done, and half of the first.
        ("b", 10.25, 1.0, 11.5),  # Behind the last request nobody waits.
    ],
)
def test_work_of_other_routers_before_a_request_that_leaves_is_before_the_next_one(
    gone: str, at_s: float, shared_s: float, drained_at_s: float
) -> None:
    clock = shared_clock(("a", 1.0, 0.5), ("b", 0.25, 0.5))
    clock.remove(gone, engine_s=at_s)
    clock.check()
    assert (clock.shared_s, clock.drained_at_s) == (shared_s, drained_at_s)


def test_time_that_the_engine_had_for_other_routers_teaches_no_speed() -> None:
    clock = shared_clock(("a", 1.0, 0.5))
    clock.on_first_token("a", engine_s=11.5, shared_until_s=11.0)
    assert clock.speed.factor == 1.0
    clock.add("b", arrives_s=12.0, prior_s=0.5, streamed=True)
    clock.on_first_token("b", engine_s=13.005, shared_until_s=11.0)
    assert clock.speed.factor > 1.0


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
    clock, now, known = PrefillQueue(), 100.0, 0
    keys: list[str] = []
    for move, number, step_s, streamed in moves:
        now += step_s
        if move == "dispatched":
            known += 1
            keys.append(f"k{known}")
            shared_s = step_s / 3 if number > 6 else 0.0
            clock.add(keys[-1], arrives_s=now + 0.05, prior_s=step_s / 2, streamed=streamed, shared_s=shared_s)
        elif move == "first_token":
            clock.on_first_token(f"k{number}", engine_s=now - 0.05)
        else:
            clock.remove(f"k{number}", engine_s=now + 0.05)
        clock.check()
        assert 0.0 <= clock.shared_left_s(engine_s=now) <= clock.shared_s + 1e-9
    for key in keys:
        clock.remove(key, engine_s=now + 0.05)
        clock.check()
    assert len(clock) == 0
    assert (clock.head_due_s, clock.backlog_s) == (inf, 0.0)
    assert clock.drained_at_s <= now + 0.05 + 1e-9
