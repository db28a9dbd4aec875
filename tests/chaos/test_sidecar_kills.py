"""The sidecar killed at any moment, in its first migration as in mid-transaction: the history is always usable."""

from __future__ import annotations

import asyncio
import random
import re
import time
from pathlib import Path

import pytest

from tests.chaos.faults import HistorySeen, read_history
from tests.chaos.sidecar_kills import admin_listener, sidecar, start_forks
from tests.tuner.sidecar.fake_proxy import FakeProxy
from tuner.history import History

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
