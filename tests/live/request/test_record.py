"""The record of a request before anything is known of it."""

from __future__ import annotations

from dataclasses import asdict

from gorgo.live.request.record import RequestRecord


def test_a_new_record_knows_only_when_its_request_was_received() -> None:
    assert asdict(RequestRecord(7.0)) == {
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
        "trace": None,
        "client": None,
        "ended_s": None,
    }
