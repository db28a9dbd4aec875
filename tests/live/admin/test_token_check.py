"""Wrong admin tokens are delayed, logged and counted; the right one passes at once."""

from __future__ import annotations

import asyncio

import httpx
import pytest

from gorgo.live.admin.token_check import FREE, LOG_S, WAITING, WINDOW_S, NoAnswer, TokenCheck
from tests.proxy.conftest import TOKEN, Start
from tests.proxy.fakes import answer


class Guesses:
    """A check of a token at a time that the test sets."""

    def __init__(self) -> None:
        self.now = 0.0
        self.counted = 0
        self.check = TokenCheck("the-right-token", lambda: self.now, self._count)

    def _count(self) -> None:
        self.counted += 1


def test_ten_wrong_tokens_a_minute_are_answered_at_once_and_further_ones_late(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gorgo.live.admin.token_check.DELAY_S", 1.0)
    guesses = Guesses()
    delays = [guesses.check.delay_s() for _ in range(FREE + 2)]
    assert delays == [0.0] * FREE + [1.0, 1.0]
    assert guesses.counted == FREE + 2
    assert guesses.check.is_right(b"the-right-token")
    guesses.now = WINDOW_S + 1
    assert guesses.check.delay_s() == 0.0


def test_without_a_token_nothing_is_right() -> None:
    check = TokenCheck(None, lambda: 0.0, lambda: None)
    assert not check.is_right(b"")
    assert not check.is_right(b"None")


def test_a_line_tells_how_many_were_wrong_and_comes_once_in_a_while(caplog: pytest.LogCaptureFixture) -> None:
    guesses = Guesses()
    for second in range(int(LOG_S) + 1):
        guesses.now = float(second)
        guesses.check.delay_s()
    told = [record.fields for record in caplog.records if record.getMessage() == "admin_refused"]  # type: ignore[attr-defined]
    assert told == [{"wrong_tokens": 1}, {"wrong_tokens": int(LOG_S)}]


async def test_a_few_answers_wait_and_beyond_them_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    guesses = Guesses()
    for _ in range(FREE):
        await guesses.check.refuse()
    monkeypatch.setattr("gorgo.live.admin.token_check.DELAY_S", 3600.0)
    waiting = [asyncio.create_task(guesses.check.refuse()) for _ in range(WAITING)]
    await asyncio.sleep(0)
    with pytest.raises(NoAnswer):
        await guesses.check.refuse()
    assert not any(task.done() for task in waiting)
    for task in waiting:
        task.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)
    again = asyncio.create_task(guesses.check.refuse())
    await asyncio.sleep(0)
    assert not again.done()
    again.cancel()


async def test_a_guess_beyond_those_that_wait_ends_its_connection_unanswered(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    fleet = await start.fleet([answer(200)])
    for _ in range(FREE):
        assert (await fleet.admin.get("/admin/fleet", headers={"authorization": "Bearer guess"})).status_code == 401
    monkeypatch.setattr("gorgo.live.admin.token_check.WAITING", 0)
    with pytest.raises(httpx.TransportError):
        await fleet.admin.get("/admin/fleet", headers={"authorization": "Bearer guess"})
    with pytest.raises(httpx.TransportError):
        await fleet.admin.post("/admin/page/login", content=b"token=guess")
    assert (await fleet.admin.get("/admin/fleet", headers={"authorization": f"Bearer {TOKEN}"})).status_code == 200


async def test_guesses_of_both_kinds_are_counted_and_leave_the_operator_alone(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    fleet = await start.fleet([answer(200)])
    for _ in range(FREE):
        wrong = await fleet.admin.get("/admin/fleet", headers={"authorization": "Bearer guess"})
        assert wrong.status_code == 401
        assert (await fleet.admin.post("/admin/page/login", content=b"token=guess")).status_code == 403
    assert (await fleet.admin.get("/admin/fleet", headers={"authorization": ""})).status_code == 401  # no guess
    assert (await fleet.admin.get("/admin/fleet", headers={"authorization": f"Bearer {TOKEN}"})).status_code == 200
    assert fleet.state.telemetry.metrics.registry.get_sample_value("gorgo_admin_refused_total") == 2 * FREE
