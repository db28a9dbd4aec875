"""List and watch without a server: pages, events, bookmarks, 410, failures and their pauses."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gorgo.fleet_sources.documents import Document, ObjectError, mapping, object_name, text
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
