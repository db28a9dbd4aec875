"""The order of those who wait: priority, turns between clients, shortest first; against a naive twin."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from gorgo.core.admission.queue import MAX_CLIENTS, FairQueue, QueuedRequest
from gorgo.core.dispatch.in_flight import RequestState
from gorgo.core.messages.request import RouteRequest


def held(name: str, prefill_s: float = 1.0, *, client: str | None = None, priority: int = 0) -> QueuedRequest:
    request = RouteRequest(name, 0.0, 1, b"", 64.0, 0, client=client, priority=priority)
    return QueuedRequest(RequestState(request), prefill_s, enqueued_s=0.0)


def order(room: FairQueue) -> list[str]:
    return [waiting.request_id for waiting in room]


def filled(*waiting: QueuedRequest) -> FairQueue:
    room = FairQueue()
    for one in waiting:
        room.add(one)
    return room


def test_shortest_goes_first_and_equals_by_arrival() -> None:
    room = filled(held("long", 3.0), held("short", 1.0), held("later", 1.0))
    assert order(room) == ["short", "later", "long"]


def test_priority_goes_before_everything_else() -> None:
    room = filled(held("low", 0.1, priority=-1), held("normal", 9.0), held("high", 99.0, priority=1))
    assert order(room) == ["high", "normal", "low"]


def test_a_client_with_many_does_not_delay_one_with_a_single_request() -> None:
    many = [held(f"many-{number}", 1.0, client="many") for number in range(10)]
    room = filled(*many, held("single", 1.0, client="single"))
    assert order(room).index("single") <= 1


def test_who_has_been_served_goes_behind() -> None:
    first, second = held("a1", 1.0, client="a"), held("a2", 1.0, client="a")
    room = filled(first, second, held("b1", 1.5, client="b"))
    room.pop(first)
    assert order(room) == ["b1", "a2"]


def test_nobody_saves_up_by_staying_away() -> None:
    """`b` comes when `a` has been served for long: it does not get all of that time first."""
    room = filled(*(held(f"a{number}", 1.0, client="a") for number in range(20)))
    for _ in range(10):
        room.pop(next(iter(room)))
    for number in range(10):
        room.add(held(f"b{number}", 1.0, client="b"))
    assert sum(name.startswith("b") for name in order(room)[:10]) <= 6


def test_turns_are_by_prefill_not_by_requests() -> None:
    long = [held(f"long-{number}", 4.0, client="long") for number in range(4)]
    short = [held(f"short-{number}", 1.0, client="short") for number in range(16)]
    room, served = filled(*long, *short), {"long": 0.0, "short": 0.0}
    for _ in range(10):
        one = next(iter(room))
        served[one.state.request.client or ""] += one.prefill_s
        room.pop(one)
    assert abs(served["long"] - served["short"]) <= 4.0


def test_a_client_that_was_served_is_behind_until_the_others_have_caught_up() -> None:
    """`a` has had 3 s while `b` waited: its next one is behind the three of `b`, and the fourth came before it."""
    served = held("a1", 3.0, client="a")
    room = filled(served, *(held(f"b{number}", 1.0, client="b") for number in range(5)))
    room.pop(served)
    room.add(held("a2", 0.5, client="a"))
    assert order(room) == ["b0", "b1", "b2", "b3", "a2", "b4"]


def test_a_removed_request_is_not_charged() -> None:
    gone = held("a1", 3.0, client="a")
    room = filled(gone, held("a2", 0.5, client="a"), held("b1", 0.25, client="b"), held("b2", 1.0, client="b"))
    room.remove(gone)
    assert order(room) == ["a2", "b1", "b2"]
    assert room.prefill_s == 1.75


def test_an_empty_queue_has_no_debts() -> None:
    one = held("a1", 9.0, client="a")
    room = filled(one, held("b1", 1.0, client="b"))
    room.pop(one)
    room.pop(next(iter(room)))
    assert (len(room), room.prefill_s) == (0, 0.0)
    room.add(held("b2", 1.0, client="b"))
    room.add(held("a2", 1.0, client="a"))
    room.pop(next(iter(room)))
    assert order(room) == ["a2"]


def test_a_queue_finds_its_requests_by_id() -> None:
    one, other = held("one"), held("other")
    room = filled(one, other)
    assert ("one" in room, "gone" in room, len(room)) == (True, False, 2)
    assert (room.get("one"), room.get("gone")) == (one, None)
    room.remove(one)
    assert ("one" in room, room.get("one"), order(room)) == (False, None, ["other"])


def test_turns_are_taken_within_each_priority_and_charged_over_all() -> None:
    """2 s at the high priority leave `a` behind at the normal one."""
    high = held("a-high", 2.0, client="a", priority=1)
    room = filled(high, held("a1", 1.0, client="a"), held("b1", 1.0, client="b"), held("b2", 1.5, client="b"))
    room.pop(high)
    assert order(room) == ["b1", "b2", "a1"]


def test_clients_that_came_and_went_are_forgotten_while_another_waits() -> None:
    room = filled(held("waits", client="waits", priority=-1))
    for number in range(MAX_CLIENTS + 100):
        one = held(str(number), client=f"client-{number}")
        room.add(one)
        room.pop(one)
    assert len(room._virtual_s) <= MAX_CLIENTS + 1
    for number in range(100):
        one = held(str(number), client=f"new-{number}")
        room.add(one)
        room.remove(one)
    assert len(room._virtual_s) <= MAX_CLIENTS + 1


moves = st.lists(
    st.tuples(
        st.sampled_from(["add", "serve", "remove"]),
        st.integers(-1, 1),
        st.sampled_from(["a", "b", None]),
        st.floats(0.01, 5),
        st.integers(0, 30),
    ),
    max_size=60,
)


@given(moves=moves)
def test_every_walk_sees_each_once_by_priority_and_within_a_client_shortest_first(
    moves: list[tuple[str, int, str | None, float, int]],
) -> None:
    room, twin = FairQueue(), []
    for number, (move, priority, client, prefill_s, place) in enumerate(moves):
        if move == "add":
            twin.append(held(str(number), prefill_s, client=client, priority=priority))
            room.add(twin[-1])
        elif twin:
            one = twin.pop(place % len(twin))
            (room.pop if move == "serve" else room.remove)(one)
        room.check()
        walk = list(room)
        assert sorted(map(id, walk)) == sorted(map(id, twin))
        assert [-one.state.request.priority for one in walk] == sorted(-one.state.request.priority for one in walk)
        for line in {(one.state.request.priority, one.state.request.client) for one in walk}:
            mine = [one for one in walk if (one.state.request.priority, one.state.request.client) == line]
            assert mine == sorted(mine, key=lambda one: (one.prefill_s, one.number))
