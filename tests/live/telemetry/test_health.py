"""Ejections and readmissions reach the log."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import cast

import pytest

from gorgo.core.messages.actions import HealthChanged, RegionChanged, ReplicaRestarted
from gorgo.live.telemetry.health import HealthLog
from gorgo.live.telemetry.metrics import Metrics
from tests.proxy.conftest import Start, until
from tests.proxy.fakes import DONE, answer, chat, delta, stream


def told(caplog: pytest.LogCaptureFixture) -> list[tuple[str, str]]:
    return [(record.getMessage(), record.fields["replica"]) for record in caplog.records if "_" in record.getMessage()]  # type: ignore[attr-defined]


def test_each_fleet_event_is_one_line_and_only_a_loss_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "gorgo")
    counted: list[tuple[str, str]] = []
    metrics = SimpleNamespace(replica_restarted=lambda *labels: counted.append(labels))
    health_log = HealthLog(cast(Metrics, metrics))
    for state in ("ejected", "half_open", "healthy"):
        health_log(HealthChanged("a", state))
    health_log(ReplicaRestarted("a", "near"))
    assert told(caplog) == [
        ("replica_ejected", "a"),
        ("replica_on_trial", "a"),
        ("replica_readmitted", "a"),
        ("replica_restarted", "a"),
    ]
    assert [record.levelname for record in caplog.records] == ["WARNING", "INFO", "INFO", "WARNING"]
    assert counted == [("a", "near")]


def test_ejection_is_logged_with_its_cause_its_words_and_its_time(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "gorgo")
    HealthLog(cast(Metrics, None))(HealthChanged("a", "ejected", "attempts", "status 500 after 0.1 s: no memory", 5.0))
    (record,) = caplog.records
    fields = {"replica": "a", "by": "attempts", "why": "status 500 after 0.1 s: no memory", "for_s": 5.0}
    assert getattr(record, "fields", None) == fields


def test_region_that_is_lost_and_back_is_logged_with_its_name(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "gorgo")
    health_log = HealthLog(cast(Metrics, SimpleNamespace()))
    for reachable in (False, True):
        health_log(RegionChanged("far", reachable=reachable))
    names = [(record.getMessage(), record.fields["region"]) for record in caplog.records]  # type: ignore[attr-defined]
    assert names == [("region_unreachable", "far"), ("region_reachable", "far")]
    assert [record.levelname for record in caplog.records] == ["WARNING", "INFO"]


async def test_an_ejection_is_in_the_log_of_a_running_proxy(start: Start, caplog: pytest.LogCaptureFixture) -> None:
    good = [stream(delta("good"), DONE)]
    fleet = await start.fleet([answer(500)], good, good)
    for _ in range(9):
        response = await fleet.client.post("/v1/chat/completions", content=chat(stream=True))
        assert response.status_code == 200
    await until(lambda: ("replica_ejected", "r0") in told(caplog))
