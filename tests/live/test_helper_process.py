"""A helper process is replaced whatever ends or stops it, its job is done again, and each wait for it has a bound."""

from __future__ import annotations

import asyncio
import gc
import io
import os
import pickle
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from gorgo.live import helper_process
from gorgo.live.helper_process import PIECE_BYTES, HelperFailed, HelperProcess, HelperTooSlow
from gorgo.live.helper_worker import Work, do_jobs, frame, pickled
from tests.proxy.conftest import until

NICENESS = 3


@asynccontextmanager
async def helper(*, timeout_s: float = 60.0, again: bool = True) -> AsyncIterator[HelperProcess]:
    found = HelperProcess(
        "tests.live.helper_jobs", niceness=NICENESS, timeout_s=timeout_s, first="prepared", again=again
    )
    try:
        yield found
    finally:
        await found.aclose()


async def does(found: HelperProcess, word: bytes, path: Path = Path("none")) -> list[Any]:
    return [answer async for answer in found.answers(word, os.fsencode(path))]


def pid_of(found: HelperProcess) -> int:
    assert found.pid is not None
    return found.pid


def ended(pid: int) -> bool:
    return not Path(f"/proc/{pid}").exists()


async def test_one_process_does_all_jobs_and_starts_with_the_first() -> None:
    async with helper() as found:
        assert found.pid is None
        assert await does(found, b"a") == [("prepared", found.pid), b"a"]
        first = pid_of(found)
        both = await asyncio.gather(does(found, b"b"), does(found, b""))
        assert list(both) == [[("prepared", first), b"b"], [("prepared", first), b""]]
    assert ended(first)


async def test_a_job_larger_than_any_buffer_comes_back_as_it_was() -> None:
    body = os.urandom(3 * PIECE_BYTES + 1)
    async with helper() as found:
        assert (await does(found, body))[1] == body


async def test_the_job_after_a_kill_is_done_by_a_new_process() -> None:
    async with helper() as found:
        await does(found, b"a")
        killed = pid_of(found)
        os.kill(killed, signal.SIGKILL)
        assert (await does(found, b"b"))[1] == b"b"
        assert pid_of(found) != killed


async def test_a_job_in_whose_course_the_process_is_killed_is_done_again_and_no_answer_comes_twice(
    tmp_path: Path,
) -> None:
    async with helper() as found:
        answers = await does(found, b"killed", tmp_path / "begun")
        assert len(answers) == 2
        assert answers[1] == b"killed"


async def test_a_stopped_process_is_replaced_long_before_the_timeout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(helper_process, "CHECK_S", 0.4)
    async with helper() as found, asyncio.timeout(50):
        answers = await does(found, b"stopped", tmp_path / "begun")
        assert answers[1] == b"stopped"
        stopped = answers[0][1]
        assert pid_of(found) != stopped
        assert ended(stopped)


@pytest.mark.system
async def test_a_process_that_was_stopped_between_two_jobs_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(helper_process, "CHECK_S", 0.4)
    async with helper() as found, asyncio.timeout(50):
        await does(found, b"a")
        stopped = pid_of(found)
        os.kill(stopped, signal.SIGSTOP)
        assert (await does(found, os.urandom(2 * PIECE_BYTES)))[0][1] != stopped
        assert ended(stopped)


async def test_a_job_that_ends_every_process_fails_after_two(caplog: pytest.LogCaptureFixture) -> None:
    async with helper() as found:
        with pytest.raises(HelperFailed, match=r"^ended$"):
            await does(found, b"always killed")
        assert found.pid is None
        logged = [record for record in caplog.records if record.message == "helper_process_failed"]
        assert len(logged) == 1
        assert (await does(found, b"a"))[1] == b"a"


async def test_a_process_that_computes_for_too_long_is_ended() -> None:
    async with helper(timeout_s=2.0) as found:
        with pytest.raises(HelperTooSlow, match=r"had no answer within 2 s"):
            await does(found, b"computes")
        assert found.pid is None


async def test_a_helper_with_a_state_of_its_own_leaves_the_next_job_to_its_owner() -> None:
    async with helper(again=False) as found:
        await does(found, b"a")
        os.kill(pid_of(found), signal.SIGKILL)
        with pytest.raises(HelperFailed, match=r"^ended$"):
            await does(found, b"b")


async def test_a_process_that_cannot_be_started_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.executable", "/nowhere/python")
    async with helper() as found:
        with pytest.raises(HelperFailed, match=r"could not be started: .*nowhere"):
            await does(found, b"a")


async def test_a_cancelled_job_ends_its_process_and_leaves_nothing_to_the_next() -> None:
    async with helper() as found:
        await does(found, b"a")
        first = pid_of(found)
        job = asyncio.create_task(does(found, b"computes"))
        await asyncio.sleep(0)
        job.cancel()
        await asyncio.gather(job, return_exceptions=True)
        assert ended(first)
        assert (await does(found, b"b"))[1] == b"b"


async def test_a_job_whose_answers_are_not_read_leaves_no_pipe_open(tmp_path: Path) -> None:
    async with helper() as found:
        await does(found, b"a")  # what the event loop opens with its first process stays
    gc.collect()  # what other tests have left would be closed in between
    before = open_files()
    async with helper() as found, aclosing(found.answers(b"many answers", os.fsencode(tmp_path / "begun"))) as answers:
        await anext(answers)
        await until((tmp_path / "begun").exists)
    await asyncio.sleep(0)  # transports close their files in the next turn
    assert open_files() <= before


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


async def test_no_process_starts_once_the_helper_is_closed(tmp_path: Path) -> None:
    async with helper() as found:
        await does(found, b"a")
        job = asyncio.create_task(does(found, b"computes", tmp_path / "begun"))
        await asyncio.sleep(0)
        await found.aclose()
        with pytest.raises(HelperFailed):
            await job
        with pytest.raises(HelperFailed, match="has been closed"):
            await does(found, b"a")
        assert found.pid is None


async def test_the_process_gives_way_once_it_has_started() -> None:
    own = os.getpriority(os.PRIO_PROCESS, 0)
    async with helper() as found:
        assert (await does(found, b"niceness"))[-1] == (own, min(19, own + NICENESS))


async def test_the_process_has_no_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GORGO_ADMIN_TOKEN", "token-of-the-tests")
    async with helper() as found:
        await does(found, b"a")
        assert b"token-of-the-tests" not in Path(f"/proc/{found.pid}/environ").read_bytes()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
async def test_signals_that_stop_the_proxy_leave_its_helper_alone(number: int) -> None:
    async with helper() as found:
        await does(found, b"a")
        first = pid_of(found)
        os.kill(first, number)
        assert await does(found, b"b") == [("prepared", first), b"b"]


def _twice(first: int) -> Work:
    def work(part: bytes) -> Iterator[object]:
        yield first * len(part)
        yield None

    return work


def test_the_worker_ends_at_the_end_of_its_input_within_a_frame_too() -> None:
    job = frame(b"abc")
    expected = (frame(pickled(6)) + frame(pickled(None)) + frame(b"")) * 2
    for cut in range(len(job)):
        answers = io.BytesIO()
        do_jobs(_twice, 1, io.BytesIO(frame(pickle.dumps((0, 2))) + job + job + job[:cut]), answers)
        assert answers.getvalue() == expected
    answers = io.BytesIO()
    do_jobs(_twice, 1, io.BytesIO(b""), answers)
    assert answers.getvalue() == b""
