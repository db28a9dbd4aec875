"""What a soak is judged by: a good record passes, and every bad one is told."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.soak.ledgers import OF_REQUESTS, Ledgers
from tests.soak.verdict import Soak, violations

MIB = 1 << 20


def ledgers(**options: Any) -> Ledgers:
    given: dict[str, Any] = dict.fromkeys(OF_REQUESTS, 0) | {
        "number": 1,
        "clients": {"a": 0},
        "retries_spent": 0,
        "hedges_spent": 0,
        "hedge_watch": 0,
        "drop_watch": 0,
        "tasks": 10,
        "fds": 20,
        "resident": 100 * MIB,
        "index_blocks": 500,
        "samples": 100,
    }
    return Ledgers(**given | options)


GOOD = Soak(
    fresh=ledgers(),
    warm=ledgers(in_flight=5, tasks=30, fds=40),
    end=ledgers(in_flight=5, tasks=30, fds=40, resident=104 * MIB),
    after=ledgers(fds=26),
    replicas=3,
    shorts=100,
    unsent=0,
    streams=5,
    answered=114,
    expected=114,
    streaming=5,
    streamed_tokens=50,
    wall_s=1.0,
    warm_up_s=0.1,
    cpu_s=0.1,
    exit_code=0,
)


def test_a_good_record_has_no_violation() -> None:
    assert violations(GOOD) == []


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"problems": {"status 502": 3}}, "3 answers: status 502"),
        ({"answered": 113}, "113 whole answers of 114"),
        ({"unsent": 7}, "7 short requests were not sent in time"),
        ({"streaming": 4}, "4 of 5 slow streams"),
        ({"end": ledgers(in_flight=4)}, "the Router counted 4 in flight"),
        ({"end": ledgers(in_flight=5, retries_spent=1)}, "1 retries"),
        ({"end": ledgers(in_flight=5, resident=106 * MIB)}, "memory grew by 6.0%"),
        ({"end": ledgers(in_flight=5, faults="r0: 3 reserved")}, "r0: 3 reserved"),
        ({"after": ledgers(tasks=11)}, "11 tasks when everybody has left, 10 at most"),
        ({"after": ledgers(fds=27)}, "27 open files when everybody has left, 26 at most"),
        ({"after": ledgers(clients={"a": 0, "b": 2})}, "client b is 2"),
        ({"exit_code": 1}, "exit code 1"),
        *(({"after": ledgers(**{name: 1})}, f"{name} is 1") for name in OF_REQUESTS),
    ],
)
def test_each_fault_is_told(change: dict[str, Any], told: str) -> None:
    found = violations(replace(GOOD, **change))
    assert len(found) == 1
    assert found[0].startswith(told)


def test_a_page_or_two_of_a_small_process_is_no_growth() -> None:
    small = replace(GOOD, warm=ledgers(in_flight=5, resident=10 * MIB), end=ledgers(in_flight=5, resident=11 * MIB))
    assert violations(small) == []
