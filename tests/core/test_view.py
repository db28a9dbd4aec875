"""What is read of a Router, from its parts alone."""

from __future__ import annotations

from gorgo.core.dispatch.in_flight import PoisonPrompts
from gorgo.core.messages.request import EngineSample
from gorgo.core.router_parts import RouterView
from tests.core.parts import Parts, make_parts
from tests.core.routers import PROMPT, a_request


def view_of(parts: Parts) -> RouterView:
    return RouterView(
        parts.fleet,
        parts.table,
        parts.request_filter.slow_start,
        parts.regions,
        parts.index,
        parts.found_shares,
        parts.prefix_updater,
        parts.dispatcher,
        PoisonPrompts(),
    )


def test_a_row_has_the_load_the_ramp_and_the_blocks_of_its_replica() -> None:
    parts = make_parts("a", "b", slow_start_s=7.0)
    view = view_of(parts)
    parts.dispatch(a_request(prompt_tokens=256, blocks=PROMPT), now=0.0)
    parts.request_filter.slow_start.begin(parts.fleet.member("b"), now=0.0)
    a, b = view.snapshots(now=1.0)
    assert (a.name, a.in_flight_requests, a.in_flight_tokens, a.index_blocks) == ("a", 1, 256, len(PROMPT) // 8)
    assert (b.name, b.in_flight_requests, b.slow_start_for_s, b.slow_start_in_flight) == ("b", 0, 6.0, 4)


def test_health_regions_and_models_are_those_of_the_fleet() -> None:
    parts = make_parts("a", "b")
    view, a = view_of(parts), parts.fleet.member("a")
    parts.fleet.list_models(a, ("m",))
    parts.fleet.list_models(parts.fleet.member("b"), ("m", "n"))
    assert (view.lists("m"), view.lists("n"), view.lists("o")) == (True, True, False)
    assert view.models() == {"m": frozenset({"region-of-a", "region-of-b"}), "n": frozenset({"region-of-b"})}
    assert (view.health_states(), view.unreachable_regions) == ({"a": "healthy", "b": "healthy"}, frozenset())
    for second in (1.0, 2.0, 3.0):
        parts.fleet.probed(a, None, now=second)
        parts.regions.probe_failed(a, now=second)
    assert view.health_states() == {"a": "ejected", "b": "healthy"}
    assert view.unreachable_regions == {"region-of-a"}


def test_decisions_are_found_by_request_and_by_age() -> None:
    parts = make_parts("a")
    for name in ("first", "second"):
        parts.dispatch(a_request(name), now=0.0)
    view = view_of(parts)
    assert [each.request_id for each in view.newest_decisions(5)] == ["second", "first"]
    assert [each.request_id for each in view.newest_decisions(1)] == ["second"]
    assert [each.attempt for each in view.decisions("first")] == [1]


def test_reading_changes_nothing() -> None:
    parts = make_parts("a")
    parts.fleet.scraped(parts.fleet.member("a"), EngineSample(running_requests=3), now=0.0)
    view = view_of(parts)
    assert view.snapshots(now=1.0) == view.snapshots(now=1.0)
    assert not parts.drained_s
