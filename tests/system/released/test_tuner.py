"""The tuner against the authors' package: their rule step for step, and what mode `paper` does differently."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from gorgo.policies.gorgo import Gorgo
from tests.system.released.differences import TUNER
from tests.system.released.process import Released
from tests.tuner.campaign.driven import START, driven, sample
from tuner.campaign.machine import compared
from tuner.objective import HOP, WINDOW, WindowStats, window_stats
from tuner.optimizers.base import BaseOptimizer
from tuner.optimizers.es import MAX_STEPS, OnePlusOneES, ReleasedES
from tuner.space import LogBox

RUNS = 2400
BOX = LogBox(Gorgo.weight_specs)
RANGES = {spec.name: [spec.low, spec.high] for spec in BOX.specs}


class Draws(np.random.Generator):
    """A generator that gives the draws of the other side."""

    def __init__(self) -> None:
        super().__init__(np.random.PCG64(0))
        self.next: list[float] = []

    def standard_normal(self, *_: Any, **__: Any) -> Any:
        return np.array(self.next)


def stats_of(ttft_ms: float) -> WindowStats:
    return WindowStats(WINDOW, ttft_ms, None, None, 0, None)


@pytest.fixture(scope="module")
def searches(authors: Released) -> list[tuple[list[float], list[dict[str, Any]]]]:
    """Scores and steps of their searches: values that wander, with ties and differences of less than 0.5 %."""
    rng, cases = np.random.default_rng(24), []
    for seed in range(RUNS):
        steps = rng.choice([0.0, 0.002, -0.002, 0.05, -0.05, 0.3, -0.3], MAX_STEPS + 2)
        values = 1.5 * np.exp(np.cumsum(steps))
        cases.append({"start": START, "ranges": RANGES, "seed": seed, "scores": (-values).tolist(), "options": {}})
    found = authors("searches", cases)
    return [([-score for score in case["scores"]], steps) for case, steps in zip(cases, found, strict=True)]


def replayed(
    kind: type[BaseOptimizer], values: list[float], steps: list[dict[str, Any]], *, tolerance: float
) -> Iterator[tuple[dict[str, float], bool, BaseOptimizer]]:
    """Proposal and verdict of each step here, with the draws of theirs."""
    draws = Draws()
    optimizer, best = kind(BOX, START, draws), values[0]
    for step, value in zip(steps, values[1:], strict=False):
        draws.next = step["draws"]
        asked = optimizer.ask()
        accepted, _ = compared(stats_of(value), stats_of(best), tolerance=tolerance)
        optimizer.tell(asked, value, accepted=accepted)
        best = value if accepted else best
        yield asked, accepted, optimizer


def test_the_released_rule_is_theirs_step_for_step(searches: list[tuple[list[float], list[dict[str, Any]]]]) -> None:
    for values, steps in searches:
        assert len(steps) == MAX_STEPS, "one more value was there"
        ours = replayed(ReleasedES, values, steps, tolerance=ReleasedES.tolerance)
        for step, (asked, accepted, optimizer) in zip(steps, ours, strict=True):
            assert asked == pytest.approx(step["candidate"], rel=1e-15)
            assert accepted == step["accepted"]
            assert optimizer.sigma == step["sigma"]
            assert optimizer.incumbent == pytest.approx(step["best"], rel=1e-15)
        assert optimizer.stop() == "16 candidates, as released"


# -- the listed differences


def worse(searches: list[Any]) -> bool:
    """Their verdicts that are wrong here, all by less than 0.5 %."""
    found = 0
    for values, steps in searches:
        best = values[0]
        for step, value in zip(steps, values[1:], strict=False):
            if step["accepted"] and value >= best:
                assert value < best * 1.005
                found += 1
            best = value if step["accepted"] else best
    return found > RUNS


def sizes(searches: list[Any]) -> bool:
    """The first proposals are the same; sigma is not, as soon as a candidate was told."""
    differ = 0
    for values, steps in searches:
        (asked, _, optimizer), *_ = replayed(OnePlusOneES, values, steps[:1], tolerance=ReleasedES.tolerance)
        assert asked == pytest.approx(steps[0]["candidate"], rel=1e-15)
        differ += optimizer.sigma != steps[0]["sigma"]
    return differ == RUNS


def clipped(authors: Released) -> bool:
    """From a corner of the box theirs proposes it again; here never within the draws allowed."""
    corner = {spec.name: spec.high for spec in BOX.specs}
    case = {"start": corner, "ranges": RANGES, "scores": [-1.0] * 9, "options": {}}
    found = authors("searches", [case | {"seed": seed} for seed in range(50)])
    again = sum(step["candidate"] == corner for steps in found for step in steps)
    here = [OnePlusOneES(BOX, corner, np.random.default_rng(seed)).ask() for seed in range(50)]
    return again > 0 and corner not in here


def loops(authors: Released) -> tuple[list[float], list[dict[str, Any]]]:
    ttft_s = np.random.default_rng(5).lognormal(0.0, 0.4, 700).tolist()
    case = {"window": WINDOW, "hop": HOP, "ranges": {"rtt_weight": [0.05, 2.0]}, "ttft_s": ttft_s}
    (events,) = authors("campaigns", [case])
    return ttft_s, events


def rank(authors: Released) -> bool:
    ttft_s, events = loops(authors)
    for event in events:
        end = event["total_samples"]
        window = ttft_s[end - WINDOW : end]
        ours = window_stats(sample(n, value, 1) for n, value in enumerate(window)).ttft_ms_p95
        below, nearest = sorted(window)[120:122]
        assert -event["score"] == nearest
        assert ours is not None
        assert below <= ours / 1e3 <= nearest
    return True


def warmed(authors: Released) -> bool:
    """Four requests a second: the warm-up of 60 s ends with the 240th sample."""
    ttft_s, events = loops(authors)
    (first, _), *_ = driven("es-released", ttft_s).generations
    return events[0]["total_samples"] == WINDOW and first == 240


def polled(authors: Released) -> bool:
    ttft_s, events = loops(authors)
    theirs = np.diff([event["total_samples"] for event in events])
    each, by_five = (
        np.diff([number for number, _ in driven("es-released", ttft_s, poll=poll).generations]) for poll in (1, 5)
    )
    return set(theirs) == {HOP} == set(each) and set(by_five) == {35}


def failed(authors: Released) -> bool:
    """A window of answers with one failure: it is a sample here, and theirs would wait for another answer."""
    found = window_stats([sample(n, 1.0, 1, status=500 if n == 9 else 200) for n in range(WINDOW)])
    return (found.n, found.errors) == (WINDOW, 1)


def test_each_listed_difference_is_there(authors: Released, searches: list[Any]) -> None:
    shown = {
        "worse by 0.5 %": worse(searches),
        "step size": sizes(searches),
        "clipped": clipped(authors),
        "rank": rank(authors),
        "warm-up": warmed(authors),
        "poll": polled(authors),
        "failures": failed(authors),
    }
    assert shown == dict.fromkeys(TUNER, True)
