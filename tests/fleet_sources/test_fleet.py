"""The sources of one proxy, and list and watch without a server: results, failures, first sync, pages, events,
pauses.
"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gorgo.config.fleet import FleetSourceConfig, ReplicaConfig
from gorgo.config.model import Config, ProxyConfig, RegionConfig
from gorgo.fleet_sources.entries import MAX_REPLICAS, Found, FoundReplica, ReplicaState
from gorgo.fleet_sources.fleet import FIRST_SYNC_S, MAX_SHOWN, FoundFleet
from gorgo.fleet_sources.kubernetes import Document, ObjectError, mapping, object_name, text
from gorgo.fleet_sources.list_watch import (
    FIRST_PAUSE_S,
    LONGEST_PAUSE_S,
    SOUND_WATCH_S,
    ListPage,
    ListWatch,
    OpenWatch,
    Pause,
    Step,
)
from tests.fleet_sources.documents import bookmark, event, page, status_event

# --- The sources of one proxy: results, failures, first sync, changes of the configuration, and what is shown.


ONE = FleetSourceConfig(name="one", kind="dns", host="one.llm", port=1)
PODS = FleetSourceConfig(name="one", kind="pods", selector={"app": "engine"}, port=1)
TWO = replace(ONE, name="two")
A = ReplicaConfig(name="a", region="here", url="http://10.0.0.1:1")
B = ReplicaConfig(name="b", region="here", url="http://10.0.0.2:1")


def found(*entries: ReplicaConfig) -> Found:
    return Found(tuple(FoundReplica(entry) for entry in entries))


def config(*sources: FleetSourceConfig) -> Config:
    return Config(proxy=ProxyConfig(region="here"), regions=(RegionConfig(name="here"),), fleet_sources=sources)


def test_result_is_a_change_once() -> None:
    fleet = FoundFleet([ONE])
    changes: list[int] = []
    fleet.on_change = lambda: changes.append(1)
    assert fleet.apply_result("one", found(A), now=1.0) is not None
    assert fleet.apply_result("one", found(A), now=2.0) is None
    assert (len(changes), fleet.sources["one"].answered_s) == (1, 2.0)
    assert fleet.merged(config(ONE)).replicas == (A,)
    assert fleet.origin == {"a": "one"}


@pytest.mark.parametrize(
    "host",
    [
        *("169.254.169.254", "127.0.0.1", "127.8.9.1", "[::1]", "[fe80::1]", "[::ffff:169.254.169.254]"),
        *("0.0.0.0", "[::]", "255.255.255.255", "224.0.0.1", "[ff02::1]"),
    ],
)
def test_replica_at_an_address_of_the_own_machine_or_of_none_is_refused(host: str) -> None:
    for source in (ONE, PODS):
        fleet = FoundFleet([source])
        state = fleet.apply_result("one", found(A, replace(B, url=f"http://{host}:1")), now=1.0)
        assert state is not None
        assert host.strip("[]") in state.rejected["b"]
        assert fleet.merged(config(source)).replicas == (A,)


@pytest.mark.parametrize(
    "host",
    [
        # Other spellings that resolvers read as 127.0.0.1 or 169.254.169.254.
        *("localhost", "engine.localhost", "127.1", "2130706433", "0x7f000001", "0177.0.0.1", "a.0x7f"),
        *("[64:ff9b::a9fe:a9fe]", "[2002:7f00:1::]", "[::127.0.0.1]"),
        # Services of clouds for their machines, at addresses of networks.
        *("[fd00:ec2::254]", "100.100.100.200", "168.63.129.16"),
        *("0.1.2.3", "240.0.0.1"),
    ],
)
def test_other_spellings_of_such_addresses_are_refused_where_a_name_may_be_too(host: str) -> None:
    fleet = FoundFleet([ONE])
    state = fleet.apply_result("one", found(A, replace(B, url=f"http://{host}:1")), now=1.0)
    assert state is not None
    assert "b" in state.rejected
    assert fleet.merged(config(ONE)).replicas == (A,)


@pytest.mark.parametrize(
    "host", ["engine-0.engines.llm", "10.0.0.5", "[fd00::5]", "100.64.0.7", "e2e", "0xdead.beef.llm"]
)
def test_usual_addresses_and_names_are_accepted(host: str) -> None:
    fleet = FoundFleet([ONE])
    near = replace(A, url=f"http://{host}:1")
    fleet.apply_result("one", found(near), now=1.0)
    (merged,) = fleet.merged(config(ONE)).replicas
    assert (merged.name, merged.url) == (near.name, near.url)


@pytest.mark.parametrize("host", ["169.254.169.254", "127.0.0.1", "[::1]"])
def test_local_addresses_are_accepted_where_the_source_allows_them(host: str) -> None:
    local = replace(PODS, local_addresses=True)
    fleet = FoundFleet([local])
    near, nobody = replace(A, url=f"http://{host}:1"), replace(B, url="http://0.0.0.0:1")
    fleet.apply_result("one", found(near, nobody), now=1.0)
    assert fleet.merged(config(local)).replicas == (near,)


def test_a_pod_has_an_address_and_a_name_in_dns_may_have_a_name() -> None:
    named = replace(A, url="http://metadata.internal:1")
    for source, urls in ((PODS, []), (ONE, [named.url])):
        fleet = FoundFleet([source])
        fleet.apply_result("one", found(named), now=1.0)
        assert [each.url for each in fleet.merged(config(source)).replicas] == urls


def test_empty_first_result_is_one() -> None:
    fleet = FoundFleet([ONE])
    assert fleet.apply_result("one", Found(), now=1.0) is not None
    assert fleet.sources["one"].synced


def test_source_that_fails_is_down_until_it_succeeds_and_its_replicas_stay() -> None:
    fleet = FoundFleet([ONE])
    fleet.apply_result("one", found(A), now=1.0)
    assert fleet.fail("one", "refused", now=2.0)
    assert not fleet.fail("one", "refused", now=3.0)
    assert fleet.merged(config(ONE)).replicas == (A,)
    (row,) = fleet.as_rows(5.0)
    assert (row["up"], row["error"], row["age_s"], row["replicas"]) == (False, "refused", 4.0, 1)
    assert fleet.succeed("one", now=6.0)
    assert not fleet.succeed("one", now=7.0)
    assert fleet.sources["one"].up


def test_first_result_is_waited_for_until_it_is_late() -> None:
    fleet = FoundFleet([ONE, TWO], now=10.0)
    fleet.apply_result("one", Found(), now=11.0)
    assert fleet.pending(12.0) == ["two"]
    assert fleet.pending(10.0 + FIRST_SYNC_S) == []


def test_other_configuration_keeps_the_replicas_until_its_first_result() -> None:
    fleet = FoundFleet([ONE, TWO])
    fleet.apply_result("one", found(A), now=1.0)
    fleet.apply_result("two", found(B), now=1.0)
    changed = replace(ONE, port=2)
    fleet.configure([changed], now=5.0)
    assert fleet.merged(config(changed)).replicas == (A,)
    assert not fleet.sources["one"].synced
    assert fleet.apply_result("two", found(B), now=6.0) is None
    assert not fleet.fail("two", "late", now=6.0)
    assert not fleet.succeed("two", now=6.0)
    fleet.apply_result("one", found(B), now=7.0)
    assert fleet.merged(config(changed)).replicas == (B,)


def test_same_configuration_changes_nothing() -> None:
    fleet = FoundFleet([ONE])
    fleet.apply_result("one", found(A), now=1.0)
    fleet.configure([ONE, TWO], now=5.0)
    assert fleet.sources["one"].synced
    assert fleet.pending(6.0) == ["two"]


def test_problems_are_listed_to_a_bound_and_counted() -> None:
    fleet = FoundFleet([ONE])
    bad = {f"p{n:03}": "bad" for n in range(MAX_SHOWN + 5)}
    fleet.apply_result("one", Found((FoundReplica(replace(A, region="mars")),), bad), now=1.0)
    fleet.merged(config(ONE))
    (row,) = fleet.as_rows(1.0)
    assert row["problem_count"] == MAX_SHOWN + 6
    assert row["problems"][0] == "a: its region 'mars' is not one of `regions`"
    assert len(row["problems"]) == MAX_SHOWN


def test_too_many_replicas_are_a_failure() -> None:
    fleet = FoundFleet([ONE])
    fleet.apply_result("one", found(A), now=1.0)
    many = found(*(replace(A, name=f"a{n}") for n in range(MAX_REPLICAS + 1)))
    assert fleet.apply_result("one", many, now=2.0) is None
    assert fleet.sources["one"].error == "10001 replicas; expected at most 10000"
    assert list(fleet.sources["one"].entries) == ["a"]


def test_replica_that_was_not_ready_joins_when_it_is() -> None:
    fleet = FoundFleet([ONE])
    fleet.apply_result("one", Found((FoundReplica(A, ReplicaState.NOT_READY),)), now=1.0)
    assert fleet.merged(config(ONE)).replicas == ()
    fleet.apply_result("one", found(A), now=2.0)
    fleet.apply_result("one", Found((FoundReplica(A, ReplicaState.NOT_READY),)), now=3.0)
    assert fleet.merged(config(ONE)).replicas == (replace(A, draining=True),)


def test_a_replica_that_announces_its_end_is_named_once_it_does_and_no_longer_when_it_is_gone() -> None:
    fleet = FoundFleet([ONE])
    for state, stopping in ((ReplicaState.READY, []), (ReplicaState.NOT_READY, []), (ReplicaState.STOPPING, ["a"])):
        assert fleet.apply_result("one", Found((FoundReplica(A, state), FoundReplica(B))), now=1.0) is not None
        fleet.merged(config(ONE))
        assert fleet.stopping() == stopping
    assert fleet.apply_result("one", Found((FoundReplica(A, ReplicaState.STOPPING), FoundReplica(B))), now=2.0) is None
    fleet.apply_result("one", found(B), now=3.0)
    fleet.merged(config(ONE))
    assert fleet.stopping() == []


def test_replica_that_comes_into_an_unknown_region_stays_as_it_was_and_is_named() -> None:
    fleet = FoundFleet([ONE])
    fleet.apply_result("one", found(A, B), now=1.0)
    assert fleet.merged(config(ONE)).replicas == (A, B)
    mistyped = [replace(each, region="heer") for each in (A, B)]
    fleet.apply_result("one", found(*mistyped), now=2.0)
    for _ in range(2):  # a reload of the file merges again
        assert fleet.merged(config(ONE)).replicas == (A, B)
    (row,) = fleet.as_rows(3.0)
    assert (row["replicas"], row["problem_count"]) == (2, 2)
    assert row["problems"][0] == "a: its region 'heer' is not one of `regions`: it stays as it was, in 'here'"
    # It still drains and leaves as its source says.
    not_ready = Found((FoundReplica(mistyped[0], ReplicaState.NOT_READY),))
    fleet.apply_result("one", not_ready, now=4.0)
    assert fleet.merged(config(ONE)).replicas == (replace(A, draining=True),)
    fleet.apply_result("one", found(A), now=5.0)
    assert fleet.merged(config(ONE)).replicas == (A,)
    assert fleet.refused == {}


def test_replica_of_an_unknown_region_is_not_the_one_of_another_address() -> None:
    fleet = FoundFleet([ONE])
    fleet.apply_result("one", found(A), now=1.0)
    fleet.merged(config(ONE))
    fleet.apply_result("one", found(replace(A, url=B.url, region="heer")), now=2.0)
    assert fleet.merged(config(ONE)).replicas == ()


# --- List and watch without a server: pages, events, bookmarks, 410, failures and their pauses.


def thing(name: str, value: str = "", *, version: str = "1") -> dict[str, Any]:
    return {"metadata": {"name": name, "resourceVersion": version}, "spec": {"value": value}}


def read_thing(document: Document) -> str:
    value = text(mapping(document, "spec"), "value")
    if value == "bad":
        raise ObjectError(f"thing {object_name(document)}: bad")
    return value


def listed(*items: dict[str, Any], version: str = "10") -> ListWatch[str]:
    collection = ListWatch(read_thing)
    collection.on_page(page(list(items), version=version))
    return collection


def step_after_pause(collection: ListWatch[str]) -> Step:
    step = collection.next_step(0.0)
    assert isinstance(step, Pause), step
    return collection.next_step(0.0)


def test_collection_is_listed_in_pages_and_counts_when_the_last_is_in() -> None:
    collection = ListWatch(read_thing)
    assert collection.next_step(0.5) == ListPage("")
    collection.on_page(page([thing("a", "1")], token="more"))
    assert (collection.objects, collection.synced) == ({}, False)
    assert collection.next_step(0.5) == ListPage("more")
    collection.on_page(page([thing("b", "2")], version="12"))
    assert (collection.objects, collection.synced) == ({"a": "1", "b": "2"}, True)
    assert collection.next_step(0.5) == OpenWatch("12")


def test_watch_goes_on_at_the_version_of_the_last_event_or_bookmark() -> None:
    collection = listed(thing("a", "1"))
    assert collection.on_line(event("ADDED", thing("b", "2", version="11")))
    assert collection.on_line(event("MODIFIED", thing("a", "3", version="14")))
    assert collection.objects == {"a": "3", "b": "2"}
    assert collection.next_step(0.0) == OpenWatch("14")
    assert collection.on_line(bookmark("20"))
    assert collection.on_line(event("DELETED", thing("a", "3", version="21")))
    assert collection.objects == {"b": "2"}
    collection.on_end(SOUND_WATCH_S)
    assert collection.next_step(0.0) == OpenWatch("21")


def test_only_a_change_of_what_matters_is_one() -> None:
    collection = listed(thing("a", "1"))
    before = collection.revision
    collection.on_line(event("MODIFIED", thing("a", "1", version="11")))
    collection.on_line(bookmark("12"))
    collection.on_line(event("DELETED", thing("unknown", version="13")))
    assert collection.revision == before
    collection.on_line(event("MODIFIED", thing("a", "2", version="14")))
    assert collection.revision == before + 1


@pytest.mark.parametrize("at", ["event", "status"])
def test_expired_version_is_listed_anew_and_the_objects_stay_meanwhile(at: str) -> None:
    collection = listed(thing("a", "1"), thing("b", "1"))
    if at == "event":
        assert not collection.on_line(status_event(410, "Expired"))
    else:
        collection.on_status(410, "too old")
    assert collection.error is None
    assert step_after_pause(collection) == ListPage("")
    assert collection.objects == {"a": "1", "b": "1"}
    collection.on_page(page([thing("b", "1"), thing("c", "1")], version="90"))
    assert collection.objects == {"b": "1", "c": "1"}
    assert collection.next_step(0.0) == OpenWatch("90")


def test_expired_token_of_a_page_starts_the_list_again() -> None:
    collection = ListWatch(read_thing)
    collection.on_page(page([thing("a", "1")], token="more"))
    collection.on_status(410, "the token expired")
    assert step_after_pause(collection) == ListPage("")
    collection.on_page(page([thing("b", "2")]))
    assert collection.objects == {"b": "2"}


def test_failures_pause_twice_as_long_each_to_a_bound_and_a_sound_watch_ends_that() -> None:
    collection = listed()
    pauses = []
    for _ in range(12):
        collection.on_failure("no answer")
        step = collection.next_step(0.999)
        assert isinstance(step, Pause)
        pauses.append(step.seconds)
        assert collection.next_step(0.0) == OpenWatch("10")
    assert pauses[0] == pytest.approx(FIRST_PAUSE_S, rel=0.01)
    assert pauses[1] == pytest.approx(2 * FIRST_PAUSE_S, rel=0.01)
    assert pauses[-1] == pytest.approx(LONGEST_PAUSE_S, rel=0.01)
    collection.on_line(bookmark("11"))
    collection.on_failure("no answer")
    assert collection.next_step(0.0) == Pause(FIRST_PAUSE_S / 2)


def test_server_that_is_down_takes_nothing_away_and_is_named_until_it_answers() -> None:
    collection = listed(thing("a", "1"))
    collection.on_failure("connection refused")
    assert (collection.objects, collection.error) == ({"a": "1"}, "connection refused")
    collection.next_step(0.0)
    collection.on_watch_open()
    assert collection.error is None


def test_watch_that_ends_at_once_is_no_fast_loop() -> None:
    collection = listed()
    collection.on_end(0.0)
    assert isinstance(collection.next_step(0.0), Pause)
    assert collection.next_step(0.0) == OpenWatch("10")


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b"{",
        b"[]",
        b'{"type": "ADDED"}',
        b'{"type": "ADDED", "object": {"metadata": {}}}',
        b"\xff\xfe",
        b"[" * 9000,
    ],
)
def test_line_that_is_no_event_needs_a_new_list(line: bytes) -> None:
    collection = listed(thing("a", "1"))
    assert not collection.on_line(line)
    assert collection.error == "an event that the watch API does not have"
    assert step_after_pause(collection) == ListPage("")
    assert collection.objects == {"a": "1"}


def test_other_error_events_go_on_at_the_same_version() -> None:
    collection = listed()
    assert not collection.on_line(status_event(500, "InternalError"))
    assert collection.error == "status 500: InternalError it is"
    assert step_after_pause(collection) == OpenWatch("10")


@pytest.mark.parametrize("body", [b"<html>", b"{}", b'{"items": {}}', b'{"items": []}'])
def test_list_that_is_none_is_a_failure(body: bytes) -> None:
    collection = listed(thing("a", "1"))
    collection.on_status(410, "")
    collection.on_page(body)
    assert collection.error is not None
    assert collection.objects == {"a": "1"}


def test_object_that_cannot_be_read_is_named_and_the_others_count() -> None:
    collection = listed(thing("a", "1"), thing("b", "bad"))
    assert (collection.objects, collection.rejected) == ({"a": "1"}, {"b": "thing b: bad"})
    collection.on_line(event("MODIFIED", thing("a", "bad", version="11")))
    collection.on_line(event("MODIFIED", thing("b", "2", version="12")))
    assert (collection.objects, collection.rejected) == ({"b": "2"}, {"a": "thing a: bad"})
    collection.on_line(event("DELETED", thing("a", "bad", version="13")))
    assert collection.rejected == {}


def test_collection_beyond_its_bound_is_an_error_and_does_not_grow() -> None:
    collection = ListWatch(read_thing, max_objects=2)
    collection.on_page(page([thing("a"), thing("b")]))
    assert not collection.on_line(event("ADDED", thing("c", version="11")))
    assert collection.error == "more than 2 objects; expected a narrower selector"
    assert list(collection.objects) == ["a", "b"]
    assert step_after_pause(collection) == ListPage("")
    collection.on_page(page([thing("a"), thing("b"), thing("c")], token="more"))
    assert collection.error == "more than 2 objects; expected a narrower selector"
    assert step_after_pause(collection) == ListPage("")


CHANGES = st.lists(
    st.tuples(st.sampled_from("abcd"), st.sampled_from(["1", "2", "bad", None]), st.integers(0, 9)), max_size=30
)


@given(CHANGES)
def test_objects_are_those_of_the_server_after_any_events_cuts_and_expiries(
    changes: list[tuple[str, str | None, int]],
) -> None:
    """A naive server: what it has now is what the collection has, whichever of its events came by a list."""
    server: dict[str, str] = {}
    collection = ListWatch(read_thing)
    version = 10

    def listing() -> bytes:
        return page([thing(name, value) for name, value in server.items()], version=str(version))

    collection.on_page(listing())
    for name, value, chance in changes:
        version += 1
        kind = "DELETED" if value is None else "MODIFIED" if name in server else "ADDED"
        old = server.pop(name, "1") if value is None else value
        if value is not None:
            server[name] = value
        line = event(kind, thing(name, old, version=str(version)))
        if chance == 0:  # the server forgets its history: the event is lost and comes by the list
            collection.on_status(410, "")
            assert isinstance(collection.next_step(0.0), Pause)
            assert collection.next_step(0.0) == ListPage("")
            collection.on_page(listing())
            continue
        if chance == 1:  # the connection breaks before the event, and the watch goes on where it was
            collection.on_failure("cut")
            assert isinstance(collection.next_step(0.0), Pause)
            assert isinstance(collection.next_step(0.0), OpenWatch)
        assert collection.on_line(line)
    assert collection.objects == {name: value for name, value in server.items() if value != "bad"}
    assert set(collection.rejected) == {name for name, value in server.items() if value == "bad"}


@given(
    st.recursive(
        st.none() | st.integers() | st.text(max_size=5),
        lambda inner: (
            st.lists(inner)
            | st.dictionaries(
                st.sampled_from(["metadata", "items", "type", "object", "name", "resourceVersion", "continue", "code"]),
                inner,
            )
        ),
        max_leaves=20,
    )
)
def test_no_document_raises(document: object) -> None:
    body = json.dumps(document).encode()
    collection = listed(thing("a", "1"))
    collection.on_line(body)
    collection.on_page(body)
