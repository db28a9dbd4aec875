"""Sentences agree with the figures they are made from, however those are dealt out."""

from __future__ import annotations

import re

from hypothesis import given
from hypothesis import strategies as st

from gorgo.apps.report import words
from gorgo.apps.report.runs import Cell, Comparison, ReportGeneration, Run
from gorgo.apps.report.statistics import HIT, TTFT_P95
from gorgo.apps.results import Spread
from tests.apps.report.made import records, row

NAMES = ("gorgo-ms", "gorgo", "prefix-cache", "random")
LOADS = (3.0, 2.0, 1.25, 1.0)

figures = st.lists(
    st.lists(st.integers(100, 9999).map(float), min_size=4, max_size=4, unique=True), min_size=2, max_size=4
)


def loads(table: list[list[float]]) -> dict[float, dict[str, float]]:
    return {time_scale: dict(zip(NAMES, values, strict=True)) for time_scale, values in zip(LOADS, table, strict=False)}


def comparison(policies: dict[str, list[float]], *, time_scale: float = 1.0) -> Comparison:
    """One load; a run per seed with this p95 TTFT in ms."""
    cells = tuple(
        Cell(
            name,
            name,
            tuple(
                Run(row(records([1.0]), name, seed=seed, time_scale=time_scale, ttft_ms=Spread(p95=value)))
                for seed, value in enumerate(values)
            ),
        )
        for name, values in policies.items()
    )
    return Comparison("small.jsonl", "simulated", {time_scale: cells})


@given(figures)
def test_who_is_lowest_and_who_is_lower_where_is_as_in_the_figures(table: list[list[float]]) -> None:
    known = loads(table)
    text = words.best_of(TTFT_P95, known)
    found = re.match(r"(\S+) has the lowest p95 TTFT at (\d) of (\d) loads", text)
    assert found
    subject = found[1]
    won = [time_scale for time_scale, values in known.items() if min(values, key=values.__getitem__) == subject]
    assert (len(won), len(known)) == (int(found[2]), int(found[3]))
    assert all(sum(min(v, key=v.__getitem__) == name for v in known.values()) <= len(won) for name in NAMES)
    losses = {
        float(load): (other, share)
        for load, other, share in re.findall(r"at time_scale (\S+) (\S+) is (\S+) % lower", text)
    }
    told = len(re.findall("at time_scale", text))
    assert set(known) - set(won) == set(losses) or "less than" in text
    assert told == len(known) - len(won)
    for load, (other, share) in losses.items():
        assert other == min(known[load], key=known[load].__getitem__)
        assert abs((1 - known[load][other] / known[load][subject]) * 100 - float(share.replace(",", ""))) <= 0.51


@given(st.permutations(NAMES))
def test_dealing_the_same_figures_to_other_policies_changes_only_the_names(names: list[str]) -> None:
    values = [[210.0, 300.0, 290.0, 900.0], [500.0, 480.0, 700.0, 1200.0], [100.0, 120.0, 130.0, 140.0]]
    renamed = dict(zip(NAMES, names, strict=True))
    plain = words.best_of(TTFT_P95, loads(values))
    dealt = {load: {renamed[name]: value for name, value in row.items()} for load, row in loads(values).items()}
    expected = re.sub("|".join(sorted(NAMES, key=len, reverse=True)), lambda name: renamed[name.group()], plain)
    assert words.best_of(TTFT_P95, dealt) == expected


def test_a_loss_is_told_in_the_words_of_the_headline() -> None:
    told = words.best_of(
        TTFT_P95, {2.0: {"gorgo-ms": 100, "prefix-cache": 125}, 1.0: {"gorgo-ms": 100, "prefix-cache": 96}}
    )
    assert told == (
        "gorgo-ms has the lowest p95 TTFT at 1 of 2 loads (20.0 % below the next best); "
        "at time_scale 1 prefix-cache is 4.0 % lower."
    )


def test_one_load_is_told_with_its_figures_and_a_tie_as_a_tie() -> None:
    assert words.best_of(TTFT_P95, {1.0: {"a": 200, "b": 100, "c": 400}}) == (
        "b has the lowest p95 TTFT at time_scale 1, 100 ms; a follows with 200 ms (100 % higher), "
        "c is last with 400 ms."
    )
    assert words.best_of(TTFT_P95, {1.0: {"a": 100, "b": 100}}) == (
        "a and b share the lowest p95 TTFT at time_scale 1, 100 ms."
    )
    assert words.best_of(TTFT_P95, {1.0: {}}) == "No p95 TTFT is known."


def test_where_more_is_better_the_highest_is_the_best() -> None:
    told = words.best_of(HIT, {2.0: {"a": 50.0, "b": 40.0}, 1.0: {"a": 50.0, "b": 55.0}, 0.5: {"a": 60.0, "b": 50.0}})
    assert told == (
        "a has the highest cache hit at 2 of 3 loads (20.0 to 25.0 % above the next best); "
        "at time_scale 1 b is 10 % higher."
    )


def test_yardsticks_win_nothing() -> None:
    found = words.loads_of(comparison({"gorgo": [200.0], "oracle": [100.0]}), TTFT_P95)
    assert found == {1.0: {"gorgo": 200.0}}


def test_a_difference_is_shown_only_if_its_interval_leaves_out_one() -> None:
    clear = comparison({"gorgo": [80.0, 82.0, 81.0], "prefix-cache": [100.0, 101.0, 102.0]})
    noisy = comparison({"gorgo": [80.0, 130.0, 95.0], "prefix-cache": [100.0, 101.0, 102.0]})
    worse = comparison({"gorgo": [130.0, 131.0, 133.0], "prefix-cache": [100.0, 101.0, 102.0]})
    for found, verdict in (
        (clear, "shown lower at 1 of 1 load, shown higher at 0, not decided at 0"),
        (noisy, "shown lower at 0 of 1 load, shown higher at 0, not decided at 1"),
        (worse, "shown lower at 0 of 1 load, shown higher at 1, not decided at 0"),
    ):
        (sentence,) = words.evidence(found, TTFT_P95, ["gorgo"])
        assert verdict in sentence
        assert "over 3 seeds" in sentence
    assert words.evidence(comparison({"gorgo": [80.0], "prefix-cache": [100.0]}), TTFT_P95, ["gorgo"]) == []


def test_who_leans_on_one_replica_is_named_with_the_replica() -> None:
    made = records([1.0])
    cells = tuple(
        Cell(name, name, (Run(row(made, name, share=share)),))
        for name, share in {"a": {"us": 0.9, "eu": 0.1}, "b": {"us": 0.45, "eu": 0.55}}.items()
    )
    assert words.spread_of_load(Comparison("t", "live", {2.0: cells})) == (
        "a leans most on one replica: 90% of its requests go to us at time_scale 2; "
        "b is the most even, with 55% at most at time_scale 2."
    )


def one(number: int, incumbent_ms: float, *, accepted: bool) -> ReportGeneration:
    return ReportGeneration(number, {"w_rtt": 0.5}, 0.5 / (number + 1), 100.0, incumbent_ms, accepted, "")


def test_tuning_that_made_things_worse_is_told_as_worse() -> None:
    told = words.tuning([one(0, 100.0, accepted=True), one(1, 110.0, accepted=False)])
    assert told == (
        "1 of 2 generations accepted; the incumbent's objective went from 100 ms to 110 ms (10 % higher); "
        "sigma from 0.5 to 0.25."
    )
    assert words.tuning([]) == "The history has no generation."
