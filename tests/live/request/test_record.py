"""The record of a request before anything is known of it."""

from __future__ import annotations

from dataclasses import fields
from typing import cast

from gorgo.live.request.record import RequestRecord
from gorgo.live.state import Routing, Telemetry


def test_a_new_record_knows_only_when_its_request_was_received() -> None:
    record = RequestRecord(cast(Routing, None), cast(Telemetry, None), 7.0)
    found = {part.name: getattr(record, part.name) for part in fields(record)}
    assert found == {
        "routing": None,
        "telemetry": None,
        "received_s": 7.0,
        "replica": None,
        "status": 0,
        "attempts": 0,
        "ttft_s": None,
        "outcome": None,
        "code": None,
        "cause": None,
        "decision_s": 0.0,
        "request": None,
        "queued_s": None,
        "hedged": False,
        "continued": 0,
        "withdrawn": 0,
        "trace": None,
        "client": None,
        "ended_s": None,
    }
