"""Who gets memory for a body, and whose upload makes way."""

from __future__ import annotations

import random

from gorgo.core.limits import GRACE_S, SLOW_BYTES_PER_S, Buffer, BufferBudget

LATER_S = 2 * GRACE_S


def uploads(budget: BufferBudget, client: str, sizes: list[int]) -> list[Buffer]:
    """Uploads since 0.0, each with its reservation."""
    found = []
    for size in sizes:
        buffer = budget.new_buffer(client, now=0.0)
        assert budget.reserve(buffer, size, now=0.0)
        buffer.on_evict = lambda: None
        found.append(buffer)
    return found


def test_one_client_leaves_half_and_two_leave_a_third() -> None:
    budget = BufferBudget(120)
    a, b = budget.new_buffer("a", now=0.0), budget.new_buffer("b", now=0.0)
    assert not budget.reserve(a, 61, now=0.0)
    assert budget.reserve(a, 60, now=0.0)
    assert budget.reserve(b, 30, now=0.0)
    assert not budget.reserve(b, 31, now=0.0)
    budget.close(a)
    assert budget.reserve(b, 60, now=0.0)
    assert budget.used_bytes == 60


def test_slow_upload_of_another_makes_way_after_the_grace() -> None:
    budget = BufferBudget(120)
    (slow,) = uploads(budget, "a", [60])
    other = budget.new_buffer("b", now=0.0)
    assert not budget.reserve(other, 60, now=GRACE_S / 2)
    assert budget.client_bytes("a") == 60
    assert budget.reserve(other, 60, now=GRACE_S)
    assert slow.evicted
    assert budget.used_bytes == 60


def test_slow_uploads_of_the_same_client_make_way_and_no_more_than_needed() -> None:
    budget = BufferBudget(120)
    buffers = uploads(budget, "a", [20, 20, 20])
    for number, buffer in enumerate(buffers):
        buffer.received(1000 * (3 - number), now=GRACE_S)
    late = budget.new_buffer("a", now=LATER_S)
    assert budget.reserve(late, 20, now=LATER_S)
    assert [buffer.evicted for buffer in buffers] == [False, False, True]


def test_spare_reservation_makes_way_at_once_and_before_a_slow_upload() -> None:
    budget = BufferBudget(120)
    (slow,) = uploads(budget, "a", [30])
    (spare,) = uploads(budget, "answers", [20])
    spare.spare = True
    late = budget.new_buffer("b", now=0.0)
    assert budget.reserve(late, 40, now=0.0)
    assert (slow.evicted, spare.evicted) == (False, True)
    (spare,) = uploads(budget, "answers", [5])
    spare.spare = True
    assert budget.reserve(late, 45, now=LATER_S)
    assert (slow.evicted, spare.evicted) == (False, True)


def test_spare_reservation_evicts_none() -> None:
    budget = BufferBudget(120)
    uploads(budget, "a", [60])
    (spare,) = uploads(budget, "answers", [20])
    spare.spare = True
    assert not budget.reserve(spare, 40, now=LATER_S)
    assert budget.used_bytes == 80


def test_burst_that_turns_into_a_drip_is_slow() -> None:
    (buffer,) = uploads(BufferBudget(1000), "a", [1])
    buffer.received(30 * 2**20, now=0.5)
    assert not buffer.is_evictable(GRACE_S)
    buffer.received(1, now=4.0)
    buffer.received(1, now=8.0)
    assert buffer.rate(9.0) < 2
    assert buffer.is_evictable(9.0)


def test_steady_upload_above_the_rate_is_never_slow() -> None:
    (buffer,) = uploads(BufferBudget(1000), "a", [1])
    for tenth in range(1, 200):
        now = tenth / 10
        buffer.received(int(SLOW_BYTES_PER_S * 0.12), now=now)
        assert not buffer.is_evictable(now + 0.05)


def test_uploads_that_would_not_suffice_are_not_evicted() -> None:
    budget = BufferBudget(120)
    (slow,) = uploads(budget, "a", [20])
    complete = budget.new_buffer("b", now=0.0)
    assert budget.reserve(complete, 50, now=0.0)
    assert not budget.reserve(budget.new_buffer("c", now=0.0), 60, now=LATER_S)
    assert not slow.evicted


def test_complete_body_is_not_evicted() -> None:
    budget = BufferBudget(120)
    (buffer,) = uploads(budget, "a", [60])
    buffer.on_evict = None
    assert not budget.reserve(budget.new_buffer("b", now=0.0), 60, now=LATER_S)
    assert not buffer.evicted


def test_sums_are_those_of_the_open_reservations_whatever_happens() -> None:
    chance = random.Random(4)
    budget = BufferBudget(1000)
    buffers: list[Buffer] = []
    for step in range(3000):
        now = step / 10
        kind = chance.random()
        if kind < 0.3:
            buffers.append(budget.new_buffer(chance.choice("abc"), now=now))
        elif buffers:
            buffer = chance.choice(buffers)
            if kind < 0.6:
                buffer.on_evict = (lambda: None) if chance.random() < 0.5 else None
                budget.reserve(buffer, chance.randrange(300), now=now)
            elif kind < 0.7:
                buffer.received(chance.randrange(SLOW_BYTES_PER_S), now=now)
            else:
                budget.close(buffer)
        budget.check()
        assert budget.used_bytes <= budget.limit_bytes
    for buffer in buffers:
        budget.close(buffer)
    assert (budget.used_bytes, len(budget)) == (0, 0)
