"""How many a replica may have in flight: learned from how long those stayed that ended."""

from __future__ import annotations

from math import inf

import numpy as np
import pytest

from gorgo.core.batch_bound import LEAST, MEAN_SHARE, BatchBound
from tests.core.routers import COMPLETED, FAILED, dispatched
from tests.core.test_overload import asked, held, holding

GOAL_S = 10.0


def served(bound: BatchBound, ends: int, *, alone_s: float, each_s: float, offered: int = 64) -> list[float]:
    """Ends on an engine on which a request among n stays `alone_s + n * each_s`; the batches that there were."""
    batches = []
    for _ in range(ends):
        batch = min(float(offered), bound.most)
        bound.ended(stayed_s=alone_s + batch * each_s, beside=batch, goal_s=GOAL_S)
        batches.append(batch)
    return batches


def test_a_replica_that_is_fast_enough_has_no_bound() -> None:
    bound = BatchBound()
    served(bound, 200, alone_s=1.0, each_s=0.01)
    assert bound.most == inf


@pytest.mark.parametrize("each_s", [0.1, 0.2, 0.4])
def test_a_bound_converges_to_where_the_mean_stay_is_what_is_wanted(each_s: float) -> None:
    bound = BatchBound()
    batches = served(bound, 600, alone_s=1.0, each_s=each_s)
    right = (MEAN_SHARE * GOAL_S - 1.0) / each_s
    assert np.mean(batches[-100:]) == pytest.approx(max(LEAST, right), rel=0.1)


def test_a_bound_comes_up_again_when_the_engine_is_faster() -> None:
    bound = BatchBound()
    served(bound, 300, alone_s=1.0, each_s=0.4)
    low = bound.most
    served(bound, 600, alone_s=1.0, each_s=0.1)
    assert bound.most >= 3 * low


def test_quiet_times_neither_raise_a_bound_nor_lower_it() -> None:
    bound = BatchBound()
    served(bound, 300, alone_s=1.0, each_s=0.2)
    before = bound.most
    for _ in range(100):
        bound.ended(stayed_s=1.2, beside=2.0, goal_s=GOAL_S)
    assert bound.most == before


def test_no_engine_is_left_with_next_to_nothing() -> None:
    bound = BatchBound()
    for _ in range(100):
        bound.ended(stayed_s=1e3, beside=3.0, goal_s=GOAL_S)
    assert bound.most == LEAST


def ninth_waits(**limits: object) -> bool:
    """Whether the ninth of nine requests has to wait, after nine answers that took a quarter of an hour."""
    router = holding("a", open_in_flight=9, open_work_s=1e9, **limits)
    sent = [dispatched(router.submit(asked(f"first-{n}"), now=0.0)).attempt_id for n in range(9)]
    for attempt in sent:
        router.on_finish(attempt, COMPLETED, now=900.0)
    for n in range(8):
        dispatched(router.submit(asked(f"then-{n}", now=900.0), now=900.0))
    return held(router.submit(asked("last", now=900.0), now=900.0))


def test_with_a_goal_for_answers_a_slow_replica_is_sent_fewer_at_a_time() -> None:
    assert ninth_waits(slo_e2e_s=GOAL_S)
    assert not ninth_waits()


def test_what_fails_says_nothing_of_how_long_an_answer_takes() -> None:
    router = holding("a", slo_e2e_s=GOAL_S)
    attempt = dispatched(router.submit(asked("r"), now=0.0)).attempt_id
    router.on_finish(attempt, FAILED, now=500.0)
    assert router._fleet.members["a"].batch.most == inf
