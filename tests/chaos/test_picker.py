"""The same faults with Envoy and a picker in the place of the proxy, and the picker's own: stalled, killed, slow."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.chaos.picker_faults import (
    CLOSED,
    FULL,
    KILLED,
    OPEN,
    RESTART,
    SHORT,
    SLOW,
    STALLED,
    STOPPED,
    Row,
    Seen,
    measure,
    measure_all,
    rows_of,
)
from tests.chaos.questions import CUT_OFF, OF_ENVOY, Ending, draw_questions, judge_behind_envoy
from tests.chaos.run import SHORT as SHORT_CHAOS
from tests.chaos.test_short import SEED, judged
from tests.picker.envoy.envoy import needs_envoy


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
    rows = await measure_all(SHORT, tmp_path)
    assert errors(rows, OPEN, (STALLED, KILLED, SLOW)) == 0
    # Closed, it answers none without a picker, and all again soon after it is back.
    while_killed = [row for row in rows if (row.fault, row.fails) == (KILLED, CLOSED) and 0 < row.to_s <= SHORT.fault_s]
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
