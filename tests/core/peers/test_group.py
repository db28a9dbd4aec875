"""A Router's membership in a group of peers, on its own."""

from __future__ import annotations

import pytest

from gorgo.core.messages.kv_events import CacheSnapshot
from gorgo.core.peers.records import PeerReport, ReplicaLoad
from gorgo.core.prefix.index import Origin
from tests.core.parts import STATUS, make_parts
from tests.core.prefix_twin import as_blocks
from tests.core.routers import a_request

KEY = "key"


def test_loads_of_peers_count_from_joining_on() -> None:
    parts = make_parts("a", "b")
    exchange = parts.peers.join("me", key_id=KEY)
    assert parts.peers.exchange is exchange
    parts.peers.on_report(PeerReport("other", 1, KEY, (ReplicaLoad("a", requests=3, prompt_tokens=30),)), now=1.0)
    a, b = (parts.fleet.all_loads(now=1.0).in_flight_requests[parts.fleet.member(name).slot] for name in "ab")
    assert (int(a), int(b)) == (3, 0), "with a fraction of the tie-break"
    with pytest.raises(AssertionError, match="once"):
        parts.peers.join("me", key_id=KEY)


def test_a_report_drains_the_queue_and_an_old_one_is_only_the_time() -> None:
    parts = make_parts("a")
    parts.peers.join("me", key_id=KEY)
    report = PeerReport("other", 1, KEY, (ReplicaLoad("a"),))
    parts.peers.on_report(report, now=1.0)
    parts.peers.on_report(report, now=2.0)
    assert (parts.drained_s, parts.recorded_s) == ([1.0], [2.0])


def test_a_report_has_what_is_in_flight_and_the_status() -> None:
    parts = make_parts("a")
    parts.peers.join("me", key_id=KEY)
    parts.dispatch(a_request(prompt_tokens=100), now=0.0)
    report = parts.peers.report(now=0.5)
    assert (report.router, report.status) == ("me", STATUS)
    assert [(load.replica, load.requests, load.prompt_tokens) for load in report.loads] == [("a", 1, 100)]


def test_without_peers_there_is_nothing_to_report_flush_or_check() -> None:
    parts = make_parts("a")
    parts.peers.flush(0)
    parts.peers.check()
    assert parts.peers.evicted_prefixes() == {Origin.PUSH: 0}
    with pytest.raises(AssertionError, match="reports to none"):
        parts.peers.report(now=0.0)
    with pytest.raises(AssertionError, match="hears of none"):
        parts.peers.on_report(PeerReport("other", 1, KEY), now=0.0)


def test_evicted_blocks_of_pushes_count_beside_the_marks_of_peers() -> None:
    parts = make_parts("a")
    parts.feeds.set_max_blocks(2)
    parts.feeds.replace(parts.fleet.member("a").slot, CacheSnapshot("m", 16, [1, 2, 3]), now=0.0)
    assert parts.peers.evicted_prefixes()[Origin.PUSH] == 1


def test_prompts_of_peers_fill_a_cache_as_far_as_they_are_reported() -> None:
    """Half of a pool of eight blocks, and as much of the own: together, and not each alone."""
    mine, other = make_parts("a"), make_parts("a")
    for name, parts in (("me", mine), ("other", other)):
        parts.peers.join(name, key_id=KEY)
        parts.index.set_capacity(0, 8)
    for parts, words in ((other, (1, 2, 3, 4)), (mine, (5, 6, 7, 8))):
        sent = parts.dispatch(a_request(prompt_tokens=256, blocks=as_blocks(words)), now=0.0)
        parts.prefix_updater.on_first_token(parts.open_attempt(sent.attempt_id), now=0.5)
    mine.prefix_updater.update_fills()
    assert mine.fleet.columns.cache_fill.tolist() == [0.5]
    mine.peers.on_report(other.peers.report(now=1.0), now=1.0)
    mine.prefix_updater.update_fills()
    assert mine.fleet.columns.cache_fill.tolist() == [1.0]
