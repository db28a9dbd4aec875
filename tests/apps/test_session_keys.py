"""The warning of a trace in which most requests have one session key."""

from __future__ import annotations

import pytest

from gorgo.apps.session_keys import is_keyed, largest_share, warning
from gorgo.apps.traces import TraceRequest
from gorgo.apps.traces.text import beginning
from gorgo.policies.registry import POLICIES, make_policy


def test_session_affinity_alone_is_keyed_by_the_session() -> None:
    assert [name for name in POLICIES if is_keyed(make_policy(name))] == ["simple-session-affinity"]


def asked(number: int, text: str) -> TraceRequest:
    return TraceRequest(number, 0.0, 10, 1, (), {"messages": [{"role": "user", "content": text}]})


def test_requests_begin_alike_by_their_first_block_or_by_their_first_256_tokens() -> None:
    ids = [TraceRequest(number, 0.0, 2000, 1, (7, 100 + number)) for number in range(3)]
    assert largest_share(map(beginning, [*ids, TraceRequest(9, 0.0, 2000, 1, (8,))])) == 0.75
    system = "You are a helpful assistant. " * 50
    assert largest_share(map(beginning, [asked(0, system + "a"), asked(1, system + "b")])) == 1.0
    assert largest_share(map(beginning, [asked(0, "a"), asked(1, "b")])) == 0.5
    assert largest_share(map(beginning, [TraceRequest(n, 0.0, 9, 1) for n in range(4)])) == 0.25
    assert largest_share([]) == 0.0


@pytest.mark.parametrize("share", [None, 0.0, 0.5])
def test_keys_that_are_spread_are_nothing_to_warn_of(share: float | None) -> None:
    assert warning("p", share) is None


def test_a_key_of_most_requests_is_warned_of() -> None:
    assert (warning("p", 1.0) or "").startswith(
        "p: no request has a session id and 100% begin with the same tokens: they share one key"
    )
