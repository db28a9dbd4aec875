from __future__ import annotations

import asyncio
from typing import Any

import pytest

from gorgo.live.http.timeout import ResettableTimeout


async def forever() -> None:
    await asyncio.get_running_loop().create_future()


async def test_expiry_is_a_timeout_and_leaves_no_cancellation_behind() -> None:
    with pytest.raises(TimeoutError), ResettableTimeout(0.01):
        await forever()
    task = asyncio.current_task()
    assert task is not None
    assert task.cancelling() == 0
    await asyncio.sleep(0)


async def test_deadline_moved_later_is_kept() -> None:
    loop = asyncio.get_running_loop()
    started = loop.time()
    dog = ResettableTimeout(0.01)
    dog.deadline += 0.05
    with pytest.raises(TimeoutError), dog:
        await forever()
    assert loop.time() - started >= 0.05


async def test_deadline_moved_nearer_is_kept() -> None:
    async def guarded() -> None:
        with ResettableTimeout(1000) as dog:
            dog.extend(0.01)
            await forever()

    with pytest.raises(TimeoutError):
        await guarded()


async def test_deadline_moved_before_the_wait_is_kept() -> None:
    loop = asyncio.get_running_loop()
    dog = ResettableTimeout(1000)
    dog.extend(0.01)
    assert dog.deadline <= loop.time() + 0.01
    with pytest.raises(TimeoutError), dog:
        await forever()


async def test_last_moment_counts_only_for_one_that_expired() -> None:
    assert not ResettableTimeout(1000, last=asyncio.get_running_loop().time() - 1.0).timed_out


async def test_last_moment_is_kept_wherever_the_deadline_is_moved_to() -> None:
    loop = asyncio.get_running_loop()
    dog = ResettableTimeout(1000, last=loop.time() + 0.01)
    dog.deadline += 1000
    with pytest.raises(TimeoutError), dog:
        await forever()
    assert dog.timed_out


async def test_expiry_before_the_last_moment_is_not_the_end_of_all_time() -> None:
    dog = ResettableTimeout(0.01, last=asyncio.get_running_loop().time() + 1000)
    with pytest.raises(TimeoutError), dog:
        await forever()
    assert not dog.timed_out


async def test_cancellation_by_another_counts_more_than_expiry() -> None:
    async def guarded() -> None:
        with ResettableTimeout(1000) as dog:
            dog.expired = True
            asyncio.current_task().cancel()  # type: ignore[union-attr]
            await forever()

    task = asyncio.create_task(guarded())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_errors_inside_pass() -> None:
    with pytest.raises(KeyError), ResettableTimeout(1000):
        raise KeyError


async def _moved(dog: ResettableTimeout, by_s: float) -> None:
    dog.deadline += by_s
    await forever()


async def test_each_of_many_timeouts_expires_in_its_own_time() -> None:
    loop = asyncio.get_running_loop()
    started = loop.time()

    async def expired_after(limit_s: float, moved_s: float) -> float:
        dog = ResettableTimeout(limit_s)
        with pytest.raises(TimeoutError), dog:
            await _moved(dog, moved_s)
        return loop.time() - started

    limits = [(0.05, 0.0), (0.01, 0.06), (0.02, 0.0)]
    spent = await asyncio.gather(*(expired_after(*limit) for limit in limits))
    assert all(each >= sum(limit) - 0.002 for each, limit in zip(spent, limits, strict=True))
    assert spent[2] < spent[0] < spent[1]


async def test_timeouts_that_do_not_expire_set_the_timer_of_the_loop_once(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = asyncio.get_running_loop()
    delays: list[float] = []
    call_later = loop.call_later

    def counted(delay: float, *rest: Any) -> asyncio.TimerHandle:
        delays.append(delay)
        return call_later(delay, *rest)

    monkeypatch.setattr("gorgo.live.http.timeout._latest", None)
    monkeypatch.setattr(loop, "call_later", counted, raising=False)
    for number in range(100):
        with ResettableTimeout(1000.0 + number) as dog:
            dog.extend(1000.0 + number)
    assert len(delays) == 1
