from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gorgo.errors import ReportError
from gorgo.lab import rank
from gorgo.lab.rank import MAX_LINE_BYTES, MAX_RANK, MAX_TTFT_MS, average_ranks, rank_table, read_rows, spearman


def row(rank: Any = 1, ttft_ms: Any = 100.0, **more: Any) -> dict[str, Any]:
    return {"shadow_rank": rank, "ttft_ms": ttft_ms, "shadow_policy": "gorgo-ms", "policy": "random"} | more


def test_times_are_summed_up_by_rank() -> None:
    table = rank_table([row(2, 300.0), row(1, 100.0), row(1, 200.0), row(2, 500.0), row(3, 50.0)])
    assert [(one.rank, one.n, one.ttft_ms_mean, one.ttft_ms_p50) for one in table.rows] == [
        (1, 2, 150.0, 150.0),
        (2, 2, 400.0, 400.0),
        (3, 1, 50.0, 50.0),
    ]
    assert (table.n, table.left_out, table.shadow, table.policies) == (5, 0, "gorgo-ms", {"random": 5})


@pytest.mark.parametrize(
    "useless",
    [
        row(None),
        row(0),
        row(True),
        row("1"),
        row(10**30),
        row(ttft_ms=None),
        row(ttft_ms=float("nan")),
        row(ttft_ms=10**400),
        row(ttft_ms=-1),
        row(status=502),
        row(error="reset"),
        row(retries=1),
        {},
    ],
)
def test_what_tells_nothing_of_an_order_is_left_out_and_counted(useless: dict[str, Any]) -> None:
    table = rank_table([row(), useless, row(status=200, error=None, retries=0)])
    assert (table.n, table.left_out) == (2, 1)


@pytest.mark.parametrize(
    "useful", [row(MAX_RANK), row(ttft_ms=0), row(ttft_ms=MAX_TTFT_MS), row(status=None), row(retries=None)]
)
def test_what_lies_at_a_bound_counts(useful: dict[str, Any]) -> None:
    assert (rank_table([useful]).n, rank_table([useful]).left_out) == (1, 0)


@pytest.mark.parametrize("useless", [row(MAX_RANK + 1), row(ttft_ms=2 * MAX_TTFT_MS), row(ttft_ms=True)])
def test_what_lies_beyond_a_bound_does_not(useless: dict[str, Any]) -> None:
    assert (rank_table([useless]).n, rank_table([useless]).left_out) == (0, 1)


def test_percentiles_lie_between_neighbours() -> None:
    (found,) = rank_table([row(2, float(ms)) for ms in (40, 10, 30, 20)]).rows
    assert (found.ttft_ms_mean, found.ttft_ms_p50, found.ttft_ms_p95) == pytest.approx((25.0, 25.0, 38.5))


def test_a_request_without_a_policy_was_routed_by_an_unknown_one() -> None:
    assert rank_table([row(policy=None), row()]).policies == {"unknown": 1, "random": 1}


def test_only_requests_of_the_policy_asked_for_count() -> None:
    table = rank_table([row(), row(policy="gorgo"), row(3, policy="gorgo")], policy="gorgo")
    assert (table.n, table.left_out, table.policies) == (2, 1, {"gorgo": 2})


def test_of_two_shadows_the_last_one_counts() -> None:
    table = rank_table([row(1, shadow_policy="nearest"), row(2), row(3)])
    assert (table.shadow, table.n, table.left_out) == ("gorgo-ms", 2, 1)


def test_rho_is_one_for_times_that_grow_with_the_rank_and_minus_one_for_the_reverse() -> None:
    assert rank_table([row(rank, 10.0**rank) for rank in range(1, 6)]).rho == 1.0
    assert rank_table([row(rank, -float(rank) + 9) for rank in range(1, 6)]).rho == -1.0


def test_rho_with_ties_is_that_of_averaged_places() -> None:
    """Worked by hand: places (1.5, 1.5, 3.5, 3.5) and (1, 3, 2, 4): covariance 2, spreads 4 and 5."""
    found = spearman(np.array([1.0, 1, 2, 2]), np.array([10.0, 30, 20, 40]))
    assert found == pytest.approx(2 / np.sqrt(4 * 5))
    assert average_ranks(np.array([1.0, 1, 2, 2])).tolist() == [1.5, 1.5, 3.5, 3.5]


def test_there_is_no_rho_where_nothing_differs_and_no_interval_for_few() -> None:
    assert rank_table([]).rho is None
    assert rank_table([row(), row()]).rho is None
    few = rank_table([row(1, 1.0), row(2, 2.0), row(2, 1.0)])
    assert few.rho is not None
    assert few.rho_low is None


@pytest.mark.parametrize(("n", "known"), [(9, False), (10, True)])
def test_an_interval_needs_ten_requests(n: int, known: bool) -> None:
    table = rank_table([row(1 + turn % 2, float(turn)) for turn in range(n)])
    assert table.rho is not None
    assert (table.rho_low is not None) == (table.rho_high is not None) == known


def test_the_interval_is_fisher_s_with_the_variance_of_bonett_and_wright() -> None:
    """Worked by hand: nine of eleven in order and the last two exchanged.

    Two places are off by one: rho is 1 - 6 * 2 / (11 * 120), the variance of its z is (1 + rho^2 / 2) / 8.
    """
    table = rank_table([row(rank, float(ms)) for rank, ms in enumerate([*range(1, 10), 11, 10], start=1)])
    rho = 1 - 12 / 1320
    half = 1.959964 * np.sqrt((1 + rho**2 / 2) / 8)
    assert (table.rho, table.rho_low, table.rho_high) == pytest.approx(
        (rho, np.tanh(np.arctanh(rho) - half), np.tanh(np.arctanh(rho) + half))
    )
    surely = rank_table([row(rank, float(rank)) for rank in range(1, 11)])
    assert (surely.rho, surely.rho_low, surely.rho_high) == (1.0, 1.0, 1.0)


def test_the_interval_covers_the_truth_about_as_often_as_it_says() -> None:
    """Pairs whose Spearman's rho is known: of a bivariate normal, 6 / pi * asin(r / 2)."""
    rng, r, covered = np.random.default_rng(5), 0.5, 0
    truth = 6 / np.pi * np.arcsin(r / 2)
    for _ in range(300):
        one = rng.normal(size=40)
        other = r * one + np.sqrt(1 - r * r) * rng.normal(size=40)
        places = average_ranks(one).astype(int).tolist()
        table = rank_table(row(place, float(ms)) for place, ms in zip(places, other + 10, strict=True))
        assert table.rho_low is not None
        assert table.rho_high is not None
        covered += table.rho_low <= truth <= table.rho_high
    assert 0.92 <= covered / 300 <= 0.98


def test_a_file_is_read_line_by_line(tmp_path: Path) -> None:
    path = tmp_path / "samples.jsonl"
    path.write_text("\n".join(json.dumps(row(place)) for place in (1, 2)) + "\n\n")
    assert [one["shadow_rank"] for one in read_rows(path)] == [1, 2]


def test_lines_are_bounded_in_length_and_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "samples.jsonl"
    monkeypatch.setattr(rank, "MAX_ROWS", 2)
    monkeypatch.setattr(rank, "MAX_LINE_BYTES", 3)
    path.write_text("{}\n{}\n")
    assert list(read_rows(path)) == [{}, {}]
    path.write_text("{}\n{}\n{}\n")
    with pytest.raises(ReportError, match="more than 2 lines"):
        list(read_rows(path))
    path.write_text("{}\n {}\n")
    with pytest.raises(ReportError, match="line 2 is longer than 3 bytes"):
        list(read_rows(path))


@pytest.mark.parametrize(
    ("text", "expected"),
    [("{}\n[]\n", "line 2: expected a JSON object"), ("\xff", "line 1"), ("{" * MAX_LINE_BYTES + "{", "longer than")],
)
def test_a_line_that_is_no_request_is_named(tmp_path: Path, text: str, expected: str) -> None:
    path = tmp_path / "samples.jsonl"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(ReportError, match=expected):
        list(read_rows(path))
