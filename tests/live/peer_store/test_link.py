"""The state of a link: kinds of failure, one log line per change, pauses that grow and have chance in them."""

from __future__ import annotations

import logging

import pytest
from redis import exceptions

from gorgo.live.peer_store.service import FIRST_BACKOFF_S, MAX_BACKOFF_S, StoreLink, fault_of
from gorgo.live.telemetry.peers import PeerCounts, StoreFault

BROKEN = exceptions.ConnectionError("Connection refused")


@pytest.mark.parametrize(
    ("error", "fault"),
    [
        (exceptions.OutOfMemoryError("command not allowed when used memory > 'maxmemory'."), "full"),
        (exceptions.ResponseError("MISCONF Redis is configured to save RDB snapshots"), "full"),
        (exceptions.AuthenticationError("WRONGPASS"), "refused"),
        (exceptions.NoPermissionError("this user has no permissions"), "refused"),
        (exceptions.BusyLoadingError("Redis is loading the dataset in memory"), "not_ready"),
        (exceptions.ReadOnlyError("You can't write against a read only replica."), "not_ready"),
        (exceptions.ClusterDownError("The cluster is down"), "not_ready"),
        (exceptions.TimeoutError("Timeout reading"), "slow"),
        (TimeoutError(), "slow"),
        (BROKEN, "unreachable"),
        (OSError("Network is unreachable"), "unreachable"),
        (exceptions.ResponseError("WRONGTYPE Operation against a key"), "error"),
        (ValueError("of this program"), "error"),
    ],
)
def test_failures_have_a_word(error: Exception, fault: StoreFault) -> None:
    assert fault_of(error) == fault


def test_a_link_is_joined_when_it_was_written_and_read(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="gorgo")
    now, counts = [100.0], PeerCounts()
    link = StoreLink("redis://store", counts, lambda: now[0])
    assert [link.joined, link.fault] == [False, None]
    link.on_success("write")
    assert [link.joined] == [False]
    now[0] = 101.0
    link.on_success("read")
    assert [link.joined, link.since_s] == [True, 101.0]
    now[0] = 105.0
    for direction in ("write", "read", "write"):
        link.on_failure(direction, BROKEN, chance=0.0)
    assert [link.joined, link.fault, link.since_s] == [False, "unreachable", 105.0]
    assert link.error == "ConnectionError: Connection refused"
    link.on_success("write")
    assert [link.joined] == [False]
    link.on_success("read")
    assert [link.joined, link.error] == [True, None]
    assert [record.getMessage() for record in caplog.records] == [
        "peer_store_joined",
        "peer_store_lost",
        "peer_store_joined",
    ]
    assert counts.failures["unreachable"] == 3


def test_pauses_double_up_to_a_bound_and_are_spread() -> None:
    link = StoreLink("redis://store", PeerCounts(), lambda: 0.0)
    pauses = [link.on_failure("read", BROKEN, chance=0.0) for _ in range(12)]
    assert pauses[:3] == [FIRST_BACKOFF_S / 2, FIRST_BACKOFF_S, FIRST_BACKOFF_S * 2]
    assert pauses[-1] == MAX_BACKOFF_S / 2
    assert link.on_failure("read", BROKEN, chance=0.999) < MAX_BACKOFF_S
    link.on_success("read")
    assert link.on_failure("read", BROKEN, chance=0.0) == FIRST_BACKOFF_S / 2
