"""`gorgo report --minute`: which part grew, where and behind whose load, by a made log; and the page of a real one."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from gorgo.cli import app
from gorgo.errors import ReportError
from gorgo.lab.report.minute import TwinRow, minute_page, slow_minute
from gorgo.lab.request_log import LoggedRequest, read_logged_requests
from tests.documents import ROOT

START_S = 1_775_405_700.0  # 2026-04-05T16:15 UTC
HASH = "00000000000000aa"


def logged(
    at_s: float, *, client: str = "chat", replica: str = "near-0", queue_s: float = 0.0, **more: Any
) -> LoggedRequest:
    """A request whose network, prefill and decoding are always alike."""
    ttft_s = 0.3 + queue_s
    row = LoggedRequest(
        received_s=START_S + at_s,
        model="m",
        input_tokens=2000,
        output_tokens=100,
        text_bytes=8000,
        status=200,
        hashes=(170,),
        block_bytes=2048,
        replica=replica,
        cached_tokens=500,
        attempts=1,
        ttft_s=ttft_s,
        e2e_s=ttft_s + 1.0,
        client=client,
        ttft_parts_s=(0.01, 0.0, 0.09, queue_s, 0.2, 0.0),
    )
    return replace(row, **more)


USUAL = [logged(-3000.0 + 30 * number, replica=f"near-{number % 2}") for number in range(100)]


def minute(rows: Sequence[LoggedRequest]) -> Any:
    return slow_minute(sorted([*USUAL, *rows], key=lambda row: row.received_s), START_S)


def flood() -> list[LoggedRequest]:
    """A client's long prompts at one replica, and those of another client that wait behind them."""
    batch = [logged(5.0 + 0.1 * n, client="batch", queue_s=n, cached_tokens=0, input_tokens=20_000) for n in range(10)]
    return batch + [logged(7.0 + n, queue_s=9.0 - n) for n in range(6)] + [logged(8.0, replica="near-1")]


def test_a_flood_is_named_by_its_part_its_replica_and_its_client() -> None:
    found = minute(flood())
    assert found.verdict.startswith("Queue took ")
    assert ", at near-0, for 9" in found.verdict
    assert found.verdict.endswith(" % behind requests of batch.")
    blame = {row.name: row.blame for row in found.clients}
    assert blame["batch"] > 0.8
    assert blame["batch"] + blame["chat"] == pytest.approx(1.0)
    near = {row.name: row for row in found.replicas}
    assert (near["near-0"].requests, near["near-1"].requests) == (16, 1)
    assert near["near-0"].most_at_once > 5 > near["near-1"].most_at_once
    assert near["near-0"].usual_requests == pytest.approx(1.0, rel=0.1)


def test_waits_at_the_router_are_behind_requests_of_all_replicas() -> None:
    ahead = [logged(1.0 + n, client="batch", replica="near-1", ttft_s=30.0, e2e_s=31.0) for n in range(3)]
    waiting = [logged(10.0 + n, ttft_parts_s=(5.0, 0.0, 0.09, 0.0, 0.2, 0.0), ttft_s=5.3) for n in range(9)]
    found = minute([*ahead, *waiting])
    assert found.verdict.startswith("Router took ")
    assert max(found.clients, key=lambda row: row.blame or 0.0).name == "batch"


def test_a_slow_network_blames_no_client() -> None:
    slow = [logged(n, ttft_s=1.3, e2e_s=2.3, ttft_parts_s=(0.01, 0.0, 1.09, 0.0, 0.2, 0.0)) for n in range(20)]
    assert minute(slow).verdict == "Network took 1,000 ms longer per request than in the hour before, at near-0."


def test_a_usual_minute_says_so() -> None:
    assert minute([logged(float(n)) for n in range(10)]).verdict == "No part took longer than in the hour before."


def test_without_an_hour_before_nothing_is_compared() -> None:
    found = slow_minute([logged(1.0), logged(2.0)], START_S)
    assert found.verdict.startswith("There is no usual minute to compare it with")
    assert "<td>-</td>" in minute_page(found)


def test_requests_of_older_logs_have_no_parts_and_are_counted() -> None:
    old = [replace(logged(float(n)), ttft_parts_s=()) for n in range(3)]
    found = minute(old)
    assert sum(row.requests for row in found.replicas) == 3
    assert all(row.minute_s is None for row in found.parts[:-1])


def test_a_minute_without_requests_is_refused_with_the_times_of_the_log() -> None:
    with pytest.raises(ReportError, match=r"expected a minute between .* UTC, which the log has"):
        slow_minute(USUAL, START_S + 7200.0)


def test_names_of_clients_are_text_on_the_page() -> None:
    page = minute_page(minute([logged(1.0, client="<script>")]), [TwinRow("oracle", 1, 0.1, 0.2)])
    assert "<script>" not in page
    assert "&lt;script&gt;" in page
    assert "oracle, simulated" in page


def written(path: Path, rows: Sequence[LoggedRequest]) -> Path:
    lines: list[dict[str, Any]] = [{"gorgo_request_log": 1, "boot_id": "b", "started_s": 0.0, "block_bytes": 2048}]
    names = ("received_s", "model", "client", "input_tokens", "output_tokens", "text_bytes", "status", "replica")
    more = ("cached_tokens", "attempts", "queued_s", "ttft_s", "e2e_s")
    for row in rows:
        line: dict[str, Any] = {name: getattr(row, name) for name in (*names, *more)}
        lines.append(line | {"ttft_parts_s": list(row.ttft_parts_s), "boundaries": [], "block_hashes": [HASH]})
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_the_command_writes_the_page_with_the_policy_and_the_oracle_beside_it(tmp_path: Path) -> None:
    log = written(tmp_path / "requests.jsonl", sorted([*USUAL, *flood()], key=lambda row: row.received_s))
    assert len(read_logged_requests(log)) == 117
    words = ["report", str(log), "--minute", "2026-04-05T16:15", "--config", str(ROOT / "regions.yaml")]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output
    said, path = done.output.strip().splitlines()
    assert said.startswith("Queue took ")
    page = Path(path).read_text()
    for words_of_page in (
        "gorgo-ms, simulated",
        "oracle, simulated",
        "as it was",
        "Whose load",
        "The slowest requests",
    ):
        assert words_of_page in page
    assert "<script" not in page


def test_a_time_that_is_none_is_a_usage_error(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["report", str(tmp_path), "--minute", "noon"])
    assert done.exit_code == 2
    assert "expected a date and time" in done.output
