"""Terms of leaders: rows of a leader that was replaced are refused."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gorgo.errors import LeadershipLost
from tests.tuner.history.examples import generation
from tuner.history import History


def begun(history: History) -> int:
    return history.begin_campaign(now_s=1.0, target="http://a http://b", policy="gorgo", options={})


def test_each_claim_has_a_higher_term_and_leaves_the_state(history: History) -> None:
    number = begun(history)
    history.write(number, state={"phase": "warming", "term": 0}, now_s=2.0, term=0)
    assert [history.claim(number), history.claim(number)] == [1, 2]
    assert history.unfinished(target="http://a http://b", policy="gorgo") == (number, {"phase": "warming", "term": 2})


def test_a_leader_that_was_replaced_writes_nothing_more(history: History) -> None:
    number = begun(history)
    history.write(number, state={"term": 0}, now_s=2.0, term=0)
    term = history.claim(number)
    with pytest.raises(LeadershipLost, match=f"taken over campaign {number}"):
        history.write(number, generations=[generation()], state={"term": 0}, now_s=3.0, term=0)
    assert history.generations(number) == []
    history.write(number, generations=[generation()], state={"term": term}, now_s=3.0, term=term)
    assert len(history.generations(number)) == 1


def test_an_ended_campaign_takes_no_rows_of_a_leader(history: History) -> None:
    number = begun(history)
    history.write(number, outcome="100 generations", now_s=2.0, term=0)
    with pytest.raises(LeadershipLost):
        history.write(number, generations=[replace(generation(), number=9)], now_s=3.0, term=5)
