"""What is set from outside of a replica's connection, and what no log shows."""

from __future__ import annotations

from dataclasses import fields

from gorgo.live.replica_secrets import ReplicaSecrets
from gorgo.live.upstream.target import Target


def test_the_key_is_in_no_log_and_counts_are_the_target_s_own() -> None:
    assert [field.name for field in fields(Target) if not field.init] == [
        "pushes",
        "kv_events_changed",
        "unused_reports",
        "streams",
        "found_engine",
        "connection_lost",
        "last_failure",
        "unconnected_pings",
        "active",
        "attempts",
        "_drained",
    ]
    assert [field.name for field in fields(Target) if not field.repr] == [
        "pushes",
        "kv_events_changed",
        "connection_lost",
        "_drained",
    ]
    assert [field.name for field in fields(ReplicaSecrets) if field.repr] == []
    assert {field.name: field.default for field in fields(Target) if isinstance(field.default, int | None)} == {
        "request_usage": False,
        "kv_events": None,
        "unused_reports": None,
        "detects_engine": False,
        "found_engine": None,
        "last_failure": None,
        "unconnected_pings": 0,
        "active": 0,
        "attempts": 0,
    }
