"""Ejections and readmissions reach the log."""

from __future__ import annotations

import pytest

from gorgo.proxy.monitor.health_log import HealthLog
from tests.proxy.conftest import Start, until
from tests.proxy.fakes import DONE, answer, chat, delta, stream


def told(caplog: pytest.LogCaptureFixture) -> list[tuple[str, str]]:
    return [(record.getMessage(), record.fields["replica"]) for record in caplog.records if "_" in record.getMessage()]  # type: ignore[attr-defined]


def test_each_change_of_standing_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    standing = HealthLog()
    for now in ("healthy", "ejected", "ejected", "half_open", "healthy", "healthy"):
        standing.log_changes({"a": now, "b": "healthy"})
    assert told(caplog) == [("replica_ejected", "a"), ("replica_on_trial", "a"), ("replica_readmitted", "a")]


def test_a_replica_that_left_and_came_back_starts_in_good_standing(caplog: pytest.LogCaptureFixture) -> None:
    standing = HealthLog()
    for now in ({"a": "ejected"}, {}, {"a": "healthy"}):
        standing.log_changes(now)
    assert told(caplog) == [("replica_ejected", "a")]


async def test_an_ejection_is_in_the_log_of_a_running_proxy(start: Start, caplog: pytest.LogCaptureFixture) -> None:
    good = [stream(delta("good"), DONE)]
    fleet = await start.fleet([answer(500)], good, good)
    for _ in range(9):
        response = await fleet.client.post("/v1/chat/completions", content=chat(stream=True))
        assert response.status_code == 200
    await until(lambda: ("replica_ejected", "r0") in told(caplog))
