"""The earliest timer of many replicas equals that of a naive twin, whatever is set and removed."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from gorgo.core.fleet.columns import Columns
from gorgo.core.fleet.replica import Replica
from gorgo.core.fleet.spec import ReplicaSpec
from gorgo.core.fleet.timers import FleetTimers
from gorgo.core.limits import OutlierLimits

COUNT = 5


def replicas() -> list[Replica]:
    columns = Columns.empty()
    columns.grow(COUNT)
    return [Replica.create(ReplicaSpec(f"r{slot}", "here"), slot, columns, OutlierLimits()) for slot in range(COUNT)]


moves = st.tuples(st.integers(0, COUNT - 1), st.none() | st.integers(0, 9).map(float)) | st.integers(0, 9).map(float)


@given(st.lists(moves, max_size=200))
def test_the_earliest_is_that_of_a_naive_twin(steps: list[tuple[int, float | None] | float]) -> None:
    fleet, timers = replicas(), FleetTimers()
    twin: dict[int, float] = {}
    for step in steps:
        if isinstance(step, tuple):
            slot, due_s = step
            timers.set(fleet[slot], due_s)
            twin.pop(slot, None)
            if due_s is not None:
                twin[slot] = due_s
        else:
            due = sorted(slot for slot, due_s in twin.items() if due_s <= step)
            assert [replica.slot for replica in timers.pop_due(now=step)] == due
            twin = {slot: due_s for slot, due_s in twin.items() if slot not in due}
        assert timers.next_s == min(twin.values(), default=None)


def test_times_that_were_replaced_take_no_memory() -> None:
    fleet, timers = replicas(), FleetTimers()
    for number in range(10_000):
        timers.set(fleet[number % COUNT], float(number))
    assert len(timers._heap) <= 64 + 2 * COUNT + 1
    assert timers.next_s == 9_995.0
