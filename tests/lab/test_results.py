"""Results of runs as they are stored, ranked and shown, causes of failed requests, and child processes."""

from __future__ import annotations

import errno
import io
import json
import os
import re
import signal
import subprocess
import sys
from dataclasses import astuple
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from gorgo.errors import BadRequest, ReportError
from gorgo.lab import progress, rank
from gorgo.lab.failures import MAX_CAUSES, OTHER, cause_of, count_cause, failure_lines
from gorgo.lab.progress import shown_progress
from gorgo.lab.rank import MAX_LINE_BYTES, MAX_RANK, MAX_TTFT_MS, average_ranks, rank_table, read_rows, spearman
from gorgo.lab.results import COLUMNS, DEFAULT, ResultRow, Spread, results_table, rows_as_json, write_results
from gorgo.lab.sim.engine.profiles import PROFILES


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
        "prediction_error_ratio preemptions queue setting digest window"
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


# --- Causes of failed requests, from errors as engines, the proxy, the simulator and the client write them.


PROFILE = next(iter(PROFILES.values()))


def refusal(prompt_tokens: int, output_tokens: int) -> str:
    with pytest.raises(BadRequest) as refused:
        PROFILE.check_size(prompt_tokens, output_tokens)
    return str(refused.value)


@pytest.mark.parametrize("before", ["", 'http 400: {"error": {"message": "'])
def test_a_prompt_over_the_engines_context_is_one_cause_whatever_its_length(before: str) -> None:
    causes = {cause_of(before + refusal(tokens, 1)) for tokens in (33_000, 100_000)}
    assert causes == {"prompt over the engine's 32,768 tokens"}
    assert cause_of(before + refusal(32_000, 5_000)) == "prompt and answer over the engine's 32,768 tokens"


@pytest.mark.parametrize(
    ("error", "cause", "remedy"),
    [
        (
            'http 400: {"error":{"message":"This model\'s maximum context length is 8192 tokens. However, you',
            "prompt and answer over the engine's 8,192 tokens",
            "--max-input",
        ),
        ("9 tokens do not fit the KV pool of 8 tokens.", "over the engine's KV pool of 8 tokens", "--max-input"),
        ("queue_full", "queue of the proxy full", "--load"),
        ('http 429: {"error": {"message": "", "code": "deadline_unreachable"}}', "deadline unreachable", "--load"),
        ("http 429: slow down", "refused for load (429)", "--load"),
        ("http 503: no", "HTTP 503", "gorgo status"),
        ('http 503: {"error": {"code": "no_replica"}}', "no replica could take the request", "gorgo status"),
        ("http 401: no", "key refused", "GORGO_API_KEY"),
        ('http 404: {"error": {"code": "model_not_found"}}', "unknown model", "--model"),
        ("timeout: not complete after 600 s", "no answer in time", "--load"),
        ("timeout", "no answer in time", "--load"),
        ("upstream_timeout", "no answer in time", "--load"),
        ("ClientConnectorError: Cannot connect to host", "connection refused", "is the router up?"),
        ("disconnected", "connection broken", ""),
        ("truncated: the stream ended without [DONE]", "truncated", ""),
        ("no content: the stream ended without any", "no content", ""),
        ("x" * 100, "x" * 80, ""),
    ],
)
def test_an_error_has_its_cause_and_the_cause_its_remedy(error: str, cause: str, remedy: str) -> None:
    assert cause_of(error) == cause
    (line,) = failure_lines({cause: 141}, 1500)
    assert line.startswith(f"141 of 1,500: {cause}")
    assert remedy in line
    assert ("; " in line) == bool(remedy)


def test_the_most_frequent_cause_comes_first() -> None:
    assert [line.split(" of")[0] for line in failure_lines({"a": 1, "b": 7, "c": 7}, 20)] == ["7", "7", "1"]


def test_kinds_of_causes_are_bounded() -> None:
    counts: dict[str, int] = {}
    for number in range(MAX_CAUSES + 5):
        count_cause(counts, f"kind {number}: details")
    count_cause(counts, "kind 0: others")
    assert len(counts) == MAX_CAUSES + 1
    assert (counts[OTHER], counts["kind 0"]) == (5, 2)


def bar_of(total: int | None, *words: str) -> str:
    out = io.StringIO()
    with shown_progress("runs of x", total, Console(file=out, width=200)) as advance:
        for each in words:
            advance(each)
    return out.getvalue()


def test_a_log_has_the_last_run_and_one_line_per_interval(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter((0.0, 3.0, 11.0, 11.0, 12.0))
    monkeypatch.setattr(progress, "monotonic", lambda: next(times))
    assert bar_of(None, "a", "b", "c") == "runs of x: 2 runs, b\n"
    monkeypatch.setattr(progress, "monotonic", lambda: 0.0)
    assert bar_of(3, "a", "b", "") == "runs of x: 3/3 runs done\n"


def test_a_terminal_has_a_bar_with_the_last_run() -> None:
    out = io.StringIO()
    console = Console(file=out, width=120, force_terminal=True)
    with shown_progress("runs of x", 2, console) as advance:
        advance("first")
        advance("second")
    assert "2/2" in out.getvalue()
    assert "second" in out.getvalue()


def row_rank(rank: Any = 1, ttft_ms: Any = 100.0, **more: Any) -> dict[str, Any]:
    return {"shadow_rank": rank, "ttft_ms": ttft_ms, "shadow_policy": "gorgo-ms", "policy": "random"} | more


def test_times_are_summed_up_by_rank() -> None:
    table = rank_table(
        [row_rank(2, 300.0), row_rank(1, 100.0), row_rank(1, 200.0), row_rank(2, 500.0), row_rank(3, 50.0)]
    )
    assert [(one.rank, one.n, one.ttft_ms_mean, one.ttft_ms_p50) for one in table.rows] == [
        (1, 2, 150.0, 150.0),
        (2, 2, 400.0, 400.0),
        (3, 1, 50.0, 50.0),
    ]
    assert (table.n, table.left_out, table.shadow, table.policies) == (5, 0, "gorgo-ms", {"random": 5})


@pytest.mark.parametrize(
    "useless",
    [
        row_rank(None),
        row_rank(0),
        row_rank(True),
        row_rank("1"),
        row_rank(10**30),
        row_rank(ttft_ms=None),
        row_rank(ttft_ms=float("nan")),
        row_rank(ttft_ms=10**400),
        row_rank(ttft_ms=-1),
        row_rank(status=502),
        row_rank(error="reset"),
        row_rank(retries=1),
        {},
    ],
)
def test_what_tells_nothing_of_an_order_is_left_out_and_counted(useless: dict[str, Any]) -> None:
    table = rank_table([row_rank(), useless, row_rank(status=200, error=None, retries=0)])
    assert (table.n, table.left_out) == (2, 1)


@pytest.mark.parametrize(
    "useful",
    [
        row_rank(MAX_RANK),
        row_rank(ttft_ms=0),
        row_rank(ttft_ms=MAX_TTFT_MS),
        row_rank(status=None),
        row_rank(retries=None),
    ],
)
def test_what_lies_at_a_bound_counts(useful: dict[str, Any]) -> None:
    assert (rank_table([useful]).n, rank_table([useful]).left_out) == (1, 0)


@pytest.mark.parametrize("useless", [row_rank(MAX_RANK + 1), row_rank(ttft_ms=2 * MAX_TTFT_MS), row_rank(ttft_ms=True)])
def test_what_lies_beyond_a_bound_does_not(useless: dict[str, Any]) -> None:
    assert (rank_table([useless]).n, rank_table([useless]).left_out) == (0, 1)


def test_percentiles_lie_between_neighbours() -> None:
    (found,) = rank_table([row_rank(2, float(ms)) for ms in (40, 10, 30, 20)]).rows
    assert (found.ttft_ms_mean, found.ttft_ms_p50, found.ttft_ms_p95) == pytest.approx((25.0, 25.0, 38.5))


def test_a_request_without_a_policy_was_routed_by_an_unknown_one() -> None:
    assert rank_table([row_rank(policy=None), row_rank()]).policies == {"unknown": 1, "random": 1}


def test_only_requests_of_the_policy_asked_for_count() -> None:
    table = rank_table([row_rank(), row_rank(policy="gorgo"), row_rank(3, policy="gorgo")], policy="gorgo")
    assert (table.n, table.left_out, table.policies) == (2, 1, {"gorgo": 2})


def test_of_two_shadows_the_last_one_counts() -> None:
    table = rank_table([row_rank(1, shadow_policy="nearest"), row_rank(2), row_rank(3)])
    assert (table.shadow, table.n, table.left_out) == ("gorgo-ms", 2, 1)


def test_rho_is_one_for_times_that_grow_with_the_rank_and_minus_one_for_the_reverse() -> None:
    assert rank_table([row_rank(rank, 10.0**rank) for rank in range(1, 6)]).rho == 1.0
    assert rank_table([row_rank(rank, -float(rank) + 9) for rank in range(1, 6)]).rho == -1.0


def test_rho_with_ties_is_that_of_averaged_places() -> None:
    """Worked by hand: places (1.5, 1.5, 3.5, 3.5) and (1, 3, 2, 4): covariance 2, spreads 4 and 5."""
    found = spearman(np.array([1.0, 1, 2, 2]), np.array([10.0, 30, 20, 40]))
    assert found == pytest.approx(2 / np.sqrt(4 * 5))
    assert average_ranks(np.array([1.0, 1, 2, 2])).tolist() == [1.5, 1.5, 3.5, 3.5]


def test_there_is_no_rho_where_nothing_differs_and_no_interval_for_few() -> None:
    assert rank_table([]).rho is None
    assert rank_table([row_rank(), row_rank()]).rho is None
    few = rank_table([row_rank(1, 1.0), row_rank(2, 2.0), row_rank(2, 1.0)])
    assert few.rho is not None
    assert few.rho_low is None


@pytest.mark.parametrize(("n", "known"), [(9, False), (10, True)])
def test_an_interval_needs_ten_requests(n: int, known: bool) -> None:
    table = rank_table([row_rank(1 + turn % 2, float(turn)) for turn in range(n)])
    assert table.rho is not None
    assert (table.rho_low is not None) == (table.rho_high is not None) == known


def test_the_interval_is_fisher_s_with_the_variance_of_bonett_and_wright() -> None:
    """Worked by hand: nine of eleven in order and the last two exchanged.

    Two places are off by one: rho is 1 - 6 * 2 / (11 * 120), the variance of its z is (1 + rho^2 / 2) / 8.
    """
    table = rank_table([row_rank(rank, float(ms)) for rank, ms in enumerate([*range(1, 10), 11, 10], start=1)])
    rho = 1 - 12 / 1320
    half = 1.959964 * np.sqrt((1 + rho**2 / 2) / 8)
    assert (table.rho, table.rho_low, table.rho_high) == pytest.approx(
        (rho, np.tanh(np.arctanh(rho) - half), np.tanh(np.arctanh(rho) + half))
    )
    surely = rank_table([row_rank(rank, float(rank)) for rank in range(1, 11)])
    assert (surely.rho, surely.rho_low, surely.rho_high) == (1.0, 1.0, 1.0)


def test_the_interval_covers_the_truth_about_as_often_as_it_says() -> None:
    """Pairs whose Spearman's rho is known: of a bivariate normal, 6 / pi * asin(r / 2)."""
    rng, r, covered = np.random.default_rng(5), 0.5, 0
    truth = 6 / np.pi * np.arcsin(r / 2)
    for _ in range(300):
        one = rng.normal(size=40)
        other = r * one + np.sqrt(1 - r * r) * rng.normal(size=40)
        places = average_ranks(one).astype(int).tolist()
        table = rank_table(row_rank(place, float(ms)) for place, ms in zip(places, other + 10, strict=True))
        assert table.rho_low is not None
        assert table.rho_high is not None
        covered += table.rho_low <= truth <= table.rho_high
    assert 0.92 <= covered / 300 <= 0.98


def test_a_file_is_read_line_by_line(tmp_path: Path) -> None:
    path = tmp_path / "samples.jsonl"
    path.write_text("\n".join(json.dumps(row_rank(place)) for place in (1, 2)) + "\n\n")
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


# --- A child process ends when the pipe from its parent does.


ROOT = Path(__file__).parents[2]
IGNORES_SIGTERM = """
import signal, threading
from gorgo.lab import termination
signal.signal(signal.SIGTERM, signal.SIG_IGN)
termination.GRACE_S = 0.05
threading.Thread(target=termination._end_with_parent, daemon=True).start()
print("ready", flush=True)
threading.Event().wait(60)
"""


def ended(process: subprocess.Popen[bytes]) -> int:
    """Return the exit code after the pipe's end; kill the process in any case."""
    try:
        assert process.stdout is not None
        assert process.stdin is not None
        assert process.stdout.readline()
        assert process.poll() is None
        process.stdin.close()
        return process.wait(30)
    finally:
        process.kill()
        process.wait()


def test_an_engine_whose_parent_ends_stops_as_by_sigterm() -> None:
    words = ["engine", "--replica", "us-ashburn-0", "--config", str(ROOT / "regions.yaml"), "--port", "0"]
    command = [sys.executable, "-m", "gorgo.lab.termination", *words]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert ended(process) == 0


def test_a_child_that_ignores_sigterm_is_killed() -> None:
    command = [sys.executable, "-c", IGNORES_SIGTERM]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert ended(process) == -signal.SIGKILL
