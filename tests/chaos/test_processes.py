"""Real processes under faults: all invariants hold, with the proxy and with Envoy and a picker in its place."""

from __future__ import annotations

import asyncio
import random
import re
import time
from pathlib import Path

import pytest
from rich.console import Console

from tests.chaos.failing import FastFailure
from tests.chaos.fast_failures import MIDDLE, START, WRONG_PATH
from tests.chaos.fast_failures import measure_all as measure_failures
from tests.chaos.faults import HistorySeen, read_history
from tests.chaos.invariants import LOST_FIRST, Run, judge_run, starved_s, tally
from tests.chaos.picker_faults import (
    CLOSED,
    FULL,
    KILLED,
    OPEN,
    RESTART,
    SLOW,
    STALLED,
    STOPPED,
    Row,
    Seen,
    measure,
    measure_all,
    rows_of,
)
from tests.chaos.picker_faults import SHORT as SHORT_FAULTS
from tests.chaos.questions import CUT_OFF, OF_ENVOY, Ending, draw_questions, judge_behind_envoy
from tests.chaos.report import print_report
from tests.chaos.restarts import measure as measure_restarts
from tests.chaos.run import BRIEF, SHORT, Plan, run_chaos
from tests.chaos.run import SHORT as SHORT_CHAOS
from tests.chaos.sidecar_kills import admin_listener, sidecar, start_forks
from tests.chaos.test_invariants import LEAK
from tests.documents import ROOT
from tests.picker.envoy.envoy import needs_envoy
from tests.tuner.sidecar.fake_proxy import FakeProxy
from tuner.history import History

# --- Real processes, every kind of fault that fits, and all invariants: a quarter of a minute, and a minute.


#: `make chaos-short` draws another one each time.
SEED = 11
#: Thirteen kinds of fault of the fourteen, the sidecar killed in the middle (`test_parts.py`).
BRIEF_SEED = 43


@pytest.mark.system
@pytest.mark.timeout(300)
async def test_a_quarter_of_a_minute_of_chaos_breaks_nothing(tmp_path: Path) -> None:
    run = await judged(BRIEF, BRIEF_SEED, tmp_path)
    # A slow machine has time for fewer faults, as each waits for the processes of the one before.
    assert len({each.planned.kind for each in run.applied}) >= 9


@pytest.mark.system
@pytest.mark.timeout(300)
async def test_a_minute_of_chaos_breaks_nothing(tmp_path: Path) -> None:
    await judged(SHORT, SEED, tmp_path)


@pytest.mark.system
@pytest.mark.timeout(300)
async def test_a_minute_of_chaos_breaks_nothing_on_the_http_of_stock_libraries(tmp_path: Path) -> None:
    await judged(SHORT, SEED, tmp_path, plain=True)


async def judged(
    plan: Plan, seed: int, folder: Path, *, behind_envoy: bool = False, plain: bool = False, workers: bool = False
) -> Run:
    """A run in which nothing is violated, and all is judged but memory; what it found is printed where that fails."""
    run = await run_chaos(plan, seed, folder, behind_envoy=behind_envoy, plain=plain, workers=workers)
    findings = judge_run(run)
    if plain:  # hypercorn waits 75 s with a connection that its client has closed
        findings = [finding for finding in findings if finding.name != LEAK]
    print_report(run, findings, Console(width=150))
    starved = starved_s(run)
    slow = f", on a machine that took {starved:.2f} s for half of the answers to a look" if starved else ""
    judged = len(findings) - 1
    assert tally(findings) == f"{judged} of {judged} judged invariants hold; 1 not judged (memory flat)", (
        f"see the report{slow}"
    )
    return run


@pytest.mark.system
@pytest.mark.timeout(300)
async def test_a_minute_of_chaos_on_two_processes_breaks_nothing(tmp_path: Path) -> None:
    await judged(SHORT, SEED, tmp_path, workers=True)


@pytest.mark.system
@pytest.mark.timeout(1200)
async def test_twenty_successors_take_over_under_load_without_a_failed_request(tmp_path: Path) -> None:
    found = await measure_restarts(tmp_path, restarts=20, rate=200.0, streams=200)
    assert not found.failures, found.as_text()
    assert len(found.restarts_s) == 20
    assert found.least_open >= 190, "a stream that has ended is opened again"
    assert found.requests > 20 * 200


# --- The same faults with Envoy and a picker in the place of the proxy, and the picker's own: stalled, killed, slow.


@needs_envoy
@pytest.mark.system
@pytest.mark.timeout(400)
async def test_a_minute_of_chaos_behind_envoy_breaks_nothing(tmp_path: Path) -> None:
    await judged(SHORT_CHAOS, SEED, tmp_path, behind_envoy=True)


@needs_envoy
@pytest.mark.system
@pytest.mark.timeout(300)
async def test_an_envoy_that_fails_open_answers_every_request_while_its_picker_is_stalled_killed_or_slow(
    tmp_path: Path,
) -> None:
    rows = await measure_all(SHORT_FAULTS, tmp_path)
    assert errors(rows, OPEN, (STALLED, KILLED, SLOW)) == 0
    # Closed, it answers none without a picker, and all again soon after it is back.
    while_killed = [
        row for row in rows if (row.fault, row.fails) == (KILLED, CLOSED) and 0 < row.to_s <= SHORT_FAULTS.fault_s
    ]
    assert {status for row in while_killed for status in row.statuses} == {500}
    assert all(row.errors == row.requests for row in while_killed if row.from_s > 0)
    assert errors(rows, CLOSED, (SLOW,)) == 0


@needs_envoy
@pytest.mark.system
@pytest.mark.timeout(400)
async def test_no_request_of_600_is_lost_while_the_picker_stops_and_starts_again_five_times_over(
    tmp_path: Path,
) -> None:
    lost = []
    for number in range(5):
        rows = await measure(STOPPED, RESTART, tmp_path / str(number), modes=(OPEN,))
        assert sum(row.requests for row in rows) == 600
        lost.append(sum(row.errors for row in rows))
    assert lost == [0, 0, 0, 0, 0]


def errors(rows: list[Row], fails: str, faults: tuple[str, ...]) -> int:
    return sum(row.errors for row in rows if row.fails == fails and row.fault in faults)


def test_latency_is_counted_beyond_that_of_before_the_fault() -> None:
    times = [(-1.0, 0.010), (-0.5, 0.012), (0.5, 0.060), (1.0, 0.072), (3.0, None)]
    seen = [Seen(at_s, first_s, 200 if first_s else 500, first_s is not None) for at_s, first_s in times]
    before, first, second, *_ = rows_of(SLOW, OPEN, seen, FULL)
    assert (before.requests, before.errors) == (2, 0)
    assert first.added_ms_p50 == pytest.approx(55.0)
    assert first.added_ms_most == pytest.approx(61.0)
    assert (second.requests, second.errors, second.statuses, second.added_ms_p50) == (1, 1, [500], None)


def test_an_answer_that_is_cut_behind_envoy_is_judged_by_what_came() -> None:
    question = next(
        each for each in draw_questions(7, seconds=30, per_s=4) if each.stream and each.route != "/generate"
    )
    delta = '{"delta": {"content": "%s"}}' if "chat" in question.route else '{"text": "%s"}'
    right = f'data: {{"id": "a", "choices": [{delta % question.text[:4]}]}}\n\ndata: {{"id'.encode()
    verdict = judge_behind_envoy(question, 200, right, "cut")
    assert (verdict.ending, verdict.code, verdict.content) == (Ending.CUT, CUT_OFF, 1)
    ended = right.rpartition(b"data: ")[0] + b"data: [DONE]\n\n"
    wrong = right.replace(question.text[:4].encode(), b"@@@@")
    assert judge_behind_envoy(question, 200, wrong, "cut").ending is Ending.WRONG
    assert judge_behind_envoy(question, 200, ended, "cut").ending is Ending.CUT
    assert judge_behind_envoy(question, 503, b"no healthy upstream", None).code == OF_ENVOY
    assert judge_behind_envoy(question, 502, b"", "cut").ending is Ending.REFUSED


# --- Real processes: what a replica that fails fast costs is no more than its first requests.


@pytest.mark.timeout(120)
@pytest.mark.system
async def test_a_replica_that_refuses_everything_costs_no_more_than_its_first_requests(tmp_path: Path) -> None:
    (row,) = await measure_failures(
        [(FastFailure.NOT_FOUND.value, START)], lanes=1, tree=ROOT, folder=tmp_path, failing_s=5.0
    )
    assert row.requests > 10
    assert row.sent >= 1
    assert row.lost <= LOST_FIRST


@pytest.mark.system
@pytest.mark.timeout(600)
async def test_no_kind_of_fast_failure_costs_more_than_its_first_requests(tmp_path: Path) -> None:
    faults = [WRONG_PATH, *(each.value for each in FastFailure)]
    wanted = [(fault, begins) for fault in faults for begins in (START, MIDDLE)]
    rows = await measure_failures(wanted, lanes=6, tree=ROOT, folder=tmp_path, failing_s=20.0)
    assert [(row.fault, row.begins) for row in rows] == wanted
    assert [row for row in rows if row.lost > LOST_FIRST] == []
    # On a busy machine a probe may come before the first request, and then it costs none.
    assert sum(row.sent > 0 for row in rows) > len(rows) / 2, rows


# --- The sidecar killed at any moment, in its first migration as in mid-transaction: the history is always usable.


#: `make test-system` kills more often.
KILLS, KILLS_LONG = 10, 200
#: Lives last up to so many times what the first one took to its third generation.
LIVES = 2.0
PATIENCE_S = 60.0


async def killed_at_random(folder: Path, kills: int, seed: int) -> None:
    chance, file = random.Random(seed), folder / "history.sqlite3"
    async with admin_listener(FakeProxy()) as url:
        longest_s = LIVES * await usual_life_s(folder / "usual")
        seen = HistorySeen()
        for _ in range(kills):
            process = await asyncio.to_thread(sidecar, url, folder)
            await asyncio.sleep(chance.uniform(0.0, longest_s))
            acknowledged = {*seen.rows, *rows_now(file)}
            process.kill()
            await asyncio.to_thread(process.join)
            process.close()
            seen = read_history(file)
            assert seen.fault in (None, "OperationalError: no such table: generation"), seen.fault
            assert acknowledged <= set(seen.rows), "rows that were there before the kill"
        await goes_on(url, folder, len(seen.rows))
    in_order(folder, kills)


async def usual_life_s(folder: Path) -> float:
    """What three generations take from nothing, here and now, with a database of their own."""
    folder.mkdir()
    async with admin_listener(FakeProxy()) as url:
        await asyncio.to_thread(start_forks)
        return await goes_on(url, folder, 0)


def rows_now(file: Path) -> list[tuple[object, ...]]:
    """Beside the sidecar that writes."""
    return read_history(file).rows if file.exists() else []


async def goes_on(url: str, folder: Path, rows: int) -> float:
    """One more sidecar: goes on with the campaign and ends in order. Answers what three generations took, s."""
    process = await asyncio.to_thread(sidecar, url, folder)
    began_s = time.monotonic()
    while len(rows_now(folder / "history.sqlite3")) < rows + 3:
        assert time.monotonic() < began_s + PATIENCE_S, (folder / "tune.log").read_text()[-2000:]
        await asyncio.sleep(0.01)
    took_s = time.monotonic() - began_s
    process.terminate()
    await asyncio.to_thread(process.join, PATIENCE_S)
    assert process.exitcode == 0
    process.close()
    return took_s


def in_order(folder: Path, kills: int) -> None:
    """One campaign has all generations, without a gap; those that a kill left before their first are empty."""
    rows = read_history(folder / "history.sqlite3").rows
    assert [number for _, _, number, _ in rows] == list(range(len(rows)))
    assert len({campaign for _, campaign, _, _ in rows}) == 1
    history = History(f"sqlite:///{folder}/history.sqlite3")
    policy, best = history.weights_of("best")
    history.close()
    assert (policy, set(best)) == ("gorgo", {"w_rtt", "w_queue"})
    said = (folder / "tune.log").read_text()
    assert "Traceback" not in said
    assert len(re.findall(r"resumes campaign", said)) > kills / 3, "most were killed at work, not at their start"


@pytest.mark.system
async def test_ten_kills_at_any_moment_leave_a_history_that_goes_on(tmp_path: Path) -> None:
    await killed_at_random(tmp_path, KILLS, seed=3)


@pytest.mark.system
@pytest.mark.timeout(600)
async def test_two_hundred_kills_at_any_moment_leave_a_history_that_goes_on(tmp_path: Path) -> None:
    await killed_at_random(tmp_path, KILLS_LONG, seed=4)
