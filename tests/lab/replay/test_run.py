from __future__ import annotations

import asyncio
import io

import pytest
from rich.console import Console

from gorgo.lab.replay.run import ReplayProgress
from gorgo.lab.replay.summary import ReplayRecord, Tally


@pytest.mark.parametrize("terminal", [True, False])
async def test_progress_ends_with_what_was_done(terminal: bool) -> None:
    out, tally = io.StringIO(), Tally()
    progress = ReplayProgress(tally, 2, "gorgo", Console(file=out, force_terminal=terminal, width=160))
    async with progress.displayed():
        await asyncio.sleep(0)
        tally.add(ReplayRecord(id="r", scheduled_s=0, sent_s=0, input_tokens=1, ttft_ms=100.0, e2e_s=1.0))
        tally.add(ReplayRecord(id="r", scheduled_s=0, sent_s=0, input_tokens=1, error="timeout: x"))
    said = out.getvalue()
    assert "gorgo" in said
    assert "2/2" in said
    assert "0 in flight, 1 errors, TTFT p95 100 ms" in said


async def test_without_a_first_token_there_is_no_p95() -> None:
    assert ReplayProgress(Tally(), 2, "x").status() == "0 in flight, 0 errors, TTFT p95 -"
