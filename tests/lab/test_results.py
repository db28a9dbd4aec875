from __future__ import annotations

import errno
import io
import json
import os
import re
from dataclasses import astuple
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from gorgo.lab.result_table import COLUMNS, DEFAULT, results_table
from gorgo.lab.results import ResultRow, Spread, rows_as_json, write_results


def row(policy: str | None = "gorgo", **changes: Any) -> ResultRow:
    values: dict[str, Any] = {
        "trace": "t.jsonl",
        "time_scale": 1.0,
        "policy": policy,
        "weights": {"w_rtt": 0.5},
        "seed": 0,
        "source": "live",
        "n": 300,
        "errors": 0,
        "ttft_ms": Spread(500.0, 400.0, 12_345.0, 23_456.0),
        "e2e_s": Spread(2.0, 1.5, 12.25, 20.0),
        "itl_ms": Spread(10.0, 9.0, 110.0, 200.0),
        "cache_hit": 0.789,
        "cache_hit_estimated": 0.8,
        "share": {"ashburn-0": 0.5, "frankfurt-0": 0.3, "seoul-0": 0.2},
        "prediction_error_ms": Spread(),
        "slip_ms_p95": 0.5,
    }
    return ResultRow(**{**values, **changes})


def shown(*rows: ResultRow, styled: bool = False) -> str:
    out = io.StringIO()
    Console(file=out, width=80, force_terminal=styled, color_system="standard" if styled else None).print(
        results_table(rows)
    )
    return out.getvalue()


def test_a_row_has_exactly_the_keys_of_the_contract() -> None:
    keys = (
        "trace time_scale policy weights seed source n errors ttft_ms e2e_s itl_ms cache_hit cache_hit_estimated share "
        "prediction_error_ms slip_ms_p95 planned failures tpot_ms e2e_per_token_ms tokens_per_s goodput "
        "prediction_error_ratio preemptions queue setting digest"
    )
    made = row().as_json()
    assert list(made) == keys.split()
    assert list(made["ttft_ms"]) == list(made["e2e_s"]) == list(made["itl_ms"]) == ["mean", "p50", "p95", "p99"]
    assert list(made["prediction_error_ms"]) == ["mean", "p50", "p95"]


def test_what_is_unknown_is_null_in_json_and_a_dash_in_the_table() -> None:
    unknown = row(None, cache_hit=None, cache_hit_estimated=None, ttft_ms=Spread.of([]), share={}, weights=None)
    assert json.loads(rows_as_json([unknown]))[0]["ttft_ms"] == {"mean": None, "p50": None, "p95": None, "p99": None}
    assert "-" in shown(unknown)


def test_the_table_fits_eighty_characters_uncut() -> None:
    text = shown(row(), row("simple-session-affinity"))
    assert "…" not in text
    assert "simple-session-affinity" in text
    assert "50/30/20" in text
    assert max(map(len, text.splitlines())) <= 80


def test_a_table_shows_each_measure_in_its_unit_and_shares_in_the_order_of_their_names() -> None:
    one = row(errors=3, itl_ms=Spread(1.0, 2.0, 110.4, 4.0), cache_hit=0.7895, cache_hit_estimated=0.8)
    other = row(None, share={"seoul-0": 1.0}, cache_hit=None, e2e_s=Spread())
    assert shown(one, other).splitlines() == [
        "           TTFT              E2E       ITL  hit                ",
        "            p50   p95   p99  p50   p95 p95 real estim. share   ",
        "policy err   ms    ms    ms    s     s  ms    %      % %       ",
        "───────────────────────────────────────────────────────────────",
        "gorgo    3  400 12345 23456 1.50 12.25 110 79.0   80.0 50/30/20",
        "-        0  400 12345 23456    -     - 110    -   80.0 0/0/100 ",
        "",
        "hit: share of prompt tokens found in cache, as engines report it and as the ",
        "router estimated; share: ashburn-0 / frankfurt-0 / seoul-0",
    ]


def test_columns_are_chosen_by_name_and_neighbours_name_their_measure_once() -> None:
    one = row(tpot_ms=Spread(9.5, 9.0, 11.0, 12.0), goodput=0.5, prediction_error_ratio=0.12, preemptions=3)
    out = io.StringIO()
    names = ("ttft-mean", "tpot-p95", "tpot-p99", "goodput", "mape", "preemptions", "tokens-per-s")
    Console(file=out, width=100).print(results_table([one], columns=names))
    assert [line.rstrip() for line in out.getvalue().splitlines()] == [
        "       TTFT TPOT      good- pred. pre-    out",
        "       mean  p95  p99   put error emp- tokens share",
        "policy   ms   ms   ms     %     %  ted     /s %",
        "──────────────────────────────────────────────────────",
        "gorgo   500 11.0 12.0  50.0    12    3      - 50/30/20",
        "",
        "share: ashburn-0 / frankfurt-0 / seoul-0",
    ]


def test_every_default_column_exists_and_every_measure_has_its_four_parts() -> None:
    assert set(DEFAULT) <= set(COLUMNS)
    for measure in ("ttft", "e2e", "itl", "tpot", "e2e-per-token"):
        assert {f"{measure}-{part}" for part in ("mean", "p50", "p95", "p99")} <= set(COLUMNS)


def bold(*rows: ResultRow, baselines: tuple[str, ...] = ()) -> list[list[str]]:
    """By row what is bold in it."""
    out = io.StringIO()
    Console(file=out, width=80, force_terminal=True, color_system="standard").print(
        results_table(rows, baselines=baselines)
    )
    body = out.getvalue().partition("─\n")[2].splitlines()[: len(rows)]
    return [re.findall(r"\x1b\[1m(.*?)\x1b", line) for line in body]


def test_the_best_of_each_measure_is_bold_and_baselines_do_not_compete() -> None:
    one = row("a", ttft_ms=Spread(1.0, 111.0, 500.0, 700.0), cache_hit=0.8, errors=0, cache_hit_estimated=0.1)
    other = row("b", ttft_ms=Spread(1.0, 222.0, 400.0, 700.0), e2e_s=Spread(9.0, 1.0, 2.0, 9.0), errors=9)
    limit = row("oracle", ttft_ms=Spread(0.0, 1.0, 400.0, 1.0), cache_hit=1.0, e2e_s=Spread(9.0, 1.0, 2.0, 9.0))
    blank = row("c", ttft_ms=Spread(), e2e_s=Spread(), itl_ms=Spread(), cache_hit=None, cache_hit_estimated=None)
    # Equal figures are both the best.
    assert bold(one, other, limit, blank, baselines=("oracle", "floor")) == [
        ["111", "700", "110", "80.0"],
        ["400", "700", "1.00", "2.00", "110"],
        [],
        [],
    ]
    # One that knows a measure is the best of none.
    assert bold(one, blank) == [[], []]
    assert bold(one, limit, baselines=("oracle",)) == [[], []]
    assert bold(one) == [[]]


def test_results_json_is_a_list_of_rows(tmp_path: Path) -> None:
    write_results(tmp_path / "made", [row(), row("random")])
    read = json.loads((tmp_path / "made" / "results.json").read_text())
    assert [each["policy"] for each in read] == ["gorgo", "random"]


def test_a_spread_is_of_its_values() -> None:
    assert Spread.of([1.0, 2.0, 3.0]) == Spread(2.0, 2.0, 2.9, 2.98)
    # A quantile of 102 values lies between two neighbours, whatever their order: 101 steps, 95.95 of them below p95.
    spread = Spread.of([*range(50, 101), *range(50), 500])
    assert astuple(spread) == pytest.approx((5550 / 102, 50.5, 95.95, 99.99))
    assert Spread.of([7.0]) == Spread(7.0, 7.0, 7.0, 7.0)


def test_results_that_cannot_be_written_leave_those_that_were_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_results(tmp_path, [row()])
    before = (tmp_path / "results.json").read_bytes()
    monkeypatch.setattr(os, "fsync", full_disk)
    with pytest.raises(OSError, match="No space left"):
        write_results(tmp_path, [row("random")])
    assert (tmp_path / "results.json").read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["results.json"]


def full_disk(_descriptor: int) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")
