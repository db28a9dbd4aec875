"""How old a scraped signal may be, by what policies declare."""

from __future__ import annotations

import numpy as np
import pytest

from gorgo.core.policy.interface import (
    USUAL_SCRAPE_S,
    Candidates,
    Policy,
    scrape_interval_s,
    signal_ages,
    slow_signals,
)
from gorgo.core.policy.weights import Weights
from gorgo.policies.registry import POLICIES, make_policy
from tests.policies.table import request, table

#: Columns that change from scrape to scrape; sizes of pools and slots do not.
SCRAPED = ("running_requests", "queued_requests", "used_tokens", "sampled_s")


class Watched:
    """The fleet's columns, with those of scrapes that were read."""

    def __init__(self, columns: object) -> None:
        self._columns = columns
        self.read: set[str] = set()

    def __getattr__(self, name: str) -> object:
        if name in SCRAPED:
            self.read.add(name)
        return getattr(self._columns, name)


def read_by(policy: Policy) -> set[str]:
    made = table(3, running_requests=[1, 2, 3], queued_requests=[0, 1, 2], used_tokens=[5, 6, 7], cached=[64, 0, 0])
    watched = Watched(made.columns)
    candidates = Candidates(made.slots, made.names, watched, made.matched_tokens, 640, is_all=True)  # type: ignore[arg-type]
    policy.choose(request(), candidates, Weights.of(policy.weight_specs), np.random.default_rng(0))
    return watched.read


@pytest.mark.parametrize("name", POLICIES)
def test_a_policy_declares_an_age_of_every_scraped_signal_that_it_reads(name: str) -> None:
    policy = make_policy(name)
    assert read_by(policy) <= signal_ages(policy).keys()


def test_the_least_age_of_policy_and_shadow_counts_and_a_setting_goes_before() -> None:
    plain, fresh = make_policy("round-robin"), make_policy("load-prefix")
    assert scrape_interval_s(None, plain) == scrape_interval_s(None, plain, None) == USUAL_SCRAPE_S
    assert scrape_interval_s(None, make_policy("least-load")) == USUAL_SCRAPE_S
    assert scrape_interval_s(None, plain, fresh) == scrape_interval_s(None, fresh) == 1.0
    assert scrape_interval_s(30.0, fresh) == 30.0


def test_signals_that_a_setting_makes_too_old_are_named() -> None:
    fresh = make_policy("predicted-latency")
    assert slow_signals(30.0, fresh) == {"queued_requests": 1.0, "used_tokens": 1.0}
    assert slow_signals(1.0, fresh) == slow_signals(600.0, make_policy("random")) == {}
