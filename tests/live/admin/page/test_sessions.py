"""Sessions: who gets one, when it is over, and how many there are."""

from __future__ import annotations

from gorgo.live.admin.page.sessions import SESSION_S, SESSIONS, Sessions
from gorgo.live.telemetry.probe_history import MAX_PROBES, MAX_REPLICAS, ProbeHistory


def test_a_session_is_valid_for_its_key_alone() -> None:
    sessions = Sessions(lambda: 0.0)
    key = sessions.open()
    assert sessions.holds(key)
    assert not sessions.holds(None)
    assert not sessions.holds("")
    assert not sessions.holds(key + "x")


def test_session_ends_by_itself_and_by_signing_out() -> None:
    now = [0.0]
    sessions = Sessions(lambda: now[0])
    first, second = sessions.open(), sessions.open()
    sessions.end(first)
    sessions.end(first)
    sessions.end(None)
    assert not sessions.holds(first)
    now[0] = SESSION_S - 1
    assert sessions.holds(second)
    now[0] = SESSION_S
    assert not sessions.holds(second)


def test_one_session_too_many_ends_the_oldest() -> None:
    sessions = Sessions(lambda: 0.0)
    keys = [sessions.open() for _ in range(SESSIONS + 1)]
    assert [sessions.holds(key) for key in keys] == [False] + [True] * SESSIONS
    assert len(sessions) == SESSIONS


def test_round_trips_are_bounded_by_replica_and_in_all() -> None:
    trips = ProbeHistory()
    for second in range(MAX_PROBES + 5):
        trips.record("a", 0.001, now=float(second))
    assert (len(trips.for_replica("a")), trips.for_replica("a")[0][0]) == (MAX_PROBES, 5.0)
    for number in range(MAX_REPLICAS - 1):
        trips.record(f"r{number}", None, now=0.0)
    trips.record("a", 0.002, now=1e3)
    trips.record("new", 0.001, now=1e3)
    assert trips.for_replica("r0") == ()  # of whom nothing was heard for longest
    assert trips.for_replica("a")[-1] == (1e3, 0.002)


def test_a_session_lasts_a_shift_and_a_page_has_64() -> None:
    assert (SESSION_S, SESSIONS) == (12 * 60 * 60, 64)
