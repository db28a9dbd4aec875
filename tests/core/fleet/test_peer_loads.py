from __future__ import annotations

from dataclasses import fields

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gorgo.core.fleet.peer_loads import CELLS, FADE_S, MAX_PEERS, PeerLoads
from gorgo.core.fleet.replica import Columns
from gorgo.core.numeric import FEW, Floats


def columns_of(slots: int) -> Columns:
    columns = Columns.empty()
    for _ in range(slots):
        columns.grow()
    return columns


def cells(**values: float) -> Floats:
    return np.array([[values.get(name, 0.0) for name in CELLS]])


def report(loads: PeerLoads, router: str, slot: int, *, now: float = 0.0, **values: float) -> None:
    loads.replace(router, np.array([slot]), cells(**values), now=now)
    loads.check()


def test_no_column_is_lower_than_the_own_one() -> None:
    columns = columns_of(2)
    columns.drained_at_s[0], columns.head_due_s[0] = 7.0, 6.5
    columns.in_flight_requests[0] = 3.0
    loads = PeerLoads("own", columns)
    report(loads, "other", 0, requests=2, prompt_tokens=20, waiting_requests=1, waiting_tokens=9, prefill_us=500_000)
    added = loads.added_to_own(now=1.0)
    tokens = loads.added_to_own(now=1.0).in_flight_tokens - [20.0, 0.0]
    assert (tokens >= 0.0).all()
    assert (tokens < 128.0).all(), "a tie-break below a short prompt"
    for item in fields(Columns):
        own, both = getattr(columns, item.name), getattr(added, item.name)
        known = own == own
        assert (both[known] >= own[known]).all(), item.name


def test_the_prefill_of_others_comes_after_the_own_queue() -> None:
    columns = columns_of(3)
    columns.drained_at_s[:] = [2.0, 0.5, 0.5]
    loads = PeerLoads("own", columns)
    report(loads, "other", 0, prefill_us=1_000_000, now=0.9)
    report(loads, "third", 1, prefill_us=1_000_000, now=0.9)
    drained_s = loads.added_to_own(now=1.0).drained_at_s
    # Behind the own queue; from now, less a tenth of a second that the engine had; untouched.
    assert drained_s.tolist() == pytest.approx([3.0, 1.9, 0.5])


def test_prefill_of_others_before_the_own_queue_counts_once() -> None:
    """They have had the engine since 0.6 s, for a second; then it does half a second of the own."""
    columns = columns_of(1)
    columns.drained_at_s[0] = 2.1
    columns.shared_s[0] = columns.head_shared_s[0] = 1.0
    columns.head_began_s[0] = 0.6
    loads = PeerLoads("own", columns)
    report(loads, "other", 0, prefill_us=800_000, now=0.8)
    at = {now: float(loads.added_to_own(now=now).drained_at_s[0]) for now in (0.8, 1.0, 1.5)}
    assert at == pytest.approx({0.8: 2.1, 1.0: 2.1, 1.5: 2.1})
    report(loads, "other", 0, now=1.1)
    assert loads.added_to_own(now=1.1).drained_at_s.tolist() == pytest.approx([1.6]), "theirs is done before its time"


def test_others_waited_where_a_request_came_or_had_no_first_token_yet() -> None:
    loads = PeerLoads("own", columns_of(2))
    assert loads.waited_until_s(0, now=1.0) == -np.inf
    report(loads, "other", 0, requests=1, waiting_requests=1, prompt_tokens=9, now=1.0)
    assert (loads.waited_until_s(0, now=1.5), loads.waited_until_s(1, now=1.5)) == (1.5, -np.inf)
    report(loads, "other", 0, requests=1, prompt_tokens=9, now=2.0)
    report(loads, "other", 0, requests=1, prompt_tokens=9, now=3.0)
    assert loads.waited_until_s(0, now=3.5) == 2.0
    report(loads, "other", 0, requests=2, prompt_tokens=18, now=4.0)
    assert loads.waited_until_s(0, now=4.5) == 4.0, "one came and had its first token between two reports"
    loads.clear_slots([0])
    assert loads.waited_until_s(0, now=4.5) == -np.inf


def test_a_head_behind_the_prefill_of_others_is_not_late() -> None:
    columns = columns_of(1)
    columns.head_due_s[0] = 1.0
    loads = PeerLoads("own", columns)
    report(loads, "other", 0, prefill_us=750_000)
    assert loads.added_to_own(now=0.5).head_due_s.tolist() == [1.75]


def test_the_ages_of_answers_are_those_of_the_receiver() -> None:
    columns = columns_of(1)
    columns.decoding_requests[0], columns.first_tokens_s[0] = 1.0, 99.0
    loads = PeerLoads("own", columns)
    report(loads, "other", 0, requests=3, waiting_requests=1, decoded_ms=4000.0, now=100.0)
    both = loads.added_to_own(now=101.0)
    assert both.decoding_requests.tolist() == [3.0]
    assert both.first_tokens_s.tolist() == [99.0 + 196.0]


def test_the_own_columns_are_returned_as_they_are_without_a_peer_that_counts() -> None:
    columns = columns_of(1)
    loads = PeerLoads("own", columns)
    assert loads.added_to_own(now=0.0) is columns
    report(loads, "other", 0, requests=1)
    assert loads.added_to_own(now=1.0) is not columns
    assert loads.added_to_own(now=FADE_S) is columns


def test_routers_beyond_the_bound_are_ignored() -> None:
    loads = PeerLoads("own", columns_of(1))
    for number in range(MAX_PEERS + 1):
        loads.replace(f"router-{number}", np.array([0]), cells(requests=1), now=0.0)
    assert loads.requests(0) == MAX_PEERS


def test_the_fraction_of_a_request_is_below_one_and_adds_up_exactly() -> None:
    columns = columns_of(64)
    columns.salt[:] = np.arange(64, dtype=np.uint64) * np.uint64(0x1234_5678_9ABC_DEF1)
    loads = PeerLoads("own", columns)
    report(loads, "other", 0, requests=1)
    fractions = loads.added_to_own(now=0.0).in_flight_requests % 1.0
    assert fractions.max() < 0.5
    assert (fractions * 64 % 1 == 0).all()
    assert len(set(fractions.tolist())) > 16


@given(
    st.lists(
        st.tuples(
            st.sampled_from("pqr"),
            st.lists(st.integers(0, 4), unique=True, max_size=3),
            st.integers(0, 2**40),
            st.floats(0.0, 1.5),
            st.integers(0, 9),
        ),
        max_size=30,
    )
)
def test_the_sums_are_those_of_the_routers_that_count(
    steps: list[tuple[str, list[int], int, float, int]],
) -> None:
    columns, now = columns_of(3), 0.0
    loads = PeerLoads("own", columns)
    for router, wanted, amount, wait_s, kind in steps:
        now += wait_s
        if kind == 0:
            columns.grow()
        elif kind == 1:
            loads.clear_slots([len(columns.salt) - 1])
        elif kind == 2:
            loads.forget(router)
        slots = np.array([slot for slot in wanted if slot < len(columns.salt)], dtype=np.intp)
        loads.replace(router, slots, np.full((len(slots), len(CELLS)), float(amount)), now=now)
        loads.check()
        assert all(now - heard_s < FADE_S for heard_s in loads.routers.values())
        loads.added_to_own(now=now)


@given(st.lists(st.tuples(*[st.floats(-2.0, 5.0)] * 3, st.floats(0.0, 2.0), st.integers(0, 3)), min_size=1, max_size=8))
def test_the_end_of_few_queues_moves_as_that_of_many_does(rows: list[tuple[float, float, float, float, int]]) -> None:
    """Few replicas are computed one by one, many by columns; what is not looked at stands behind them."""
    moved = []
    for count in (len(rows), 3 * FEW):
        columns = columns_of(count)
        columns.drained_at_s[:] = columns.shared_s[:] = columns.head_shared_s[:] = columns.head_began_s[:] = 0.0
        loads = PeerLoads("own", columns)
        for slot, (own_s, began_s, heard_s, shared_s, prefill_s) in enumerate(rows):
            columns.drained_at_s[slot], columns.head_began_s[slot] = own_s, began_s
            columns.shared_s[slot], columns.head_shared_s[slot] = shared_s * 1.5, shared_s
            report(loads, f"other-{slot}", slot, prefill_us=prefill_s * 1e6, now=heard_s)
        moved.append(loads.added_to_own(now=1.0).drained_at_s[: len(rows)].tolist())
    assert moved[0] == moved[1]
