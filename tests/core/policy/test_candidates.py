"""What a policy reads of its candidates: the fleet's own columns where all are candidates, else a row for each."""

from __future__ import annotations

from dataclasses import fields

import numpy as np
import pytest

from gorgo.core.fleet.replica import Columns
from gorgo.core.policy.interface import Candidates

NAMES = tuple(item.name for item in fields(Columns))


def columns() -> Columns:
    """Column n of replica k holds 100 n + k."""
    made = Columns.empty()
    for _ in range(4):
        made.grow()
    for number, name in enumerate(NAMES):
        for slot in range(4):
            getattr(made, name)[slot] = 100 * number + slot
    return made


def candidates(*slots: int) -> Candidates:
    matched = np.array([0.0, 40.0, 80.0, 120.0])
    names = tuple(f"r{slot}" for slot in slots)
    return Candidates(np.array(slots, dtype=np.intp), names, columns(), matched, 200, is_all=slots == (0, 1, 2, 3))


def test_a_column_of_some_replicas_has_their_rows_alone() -> None:
    some = candidates(1, 3)
    expected = {name: [100 * number + 1, 100 * number + 3] for number, name in enumerate(NAMES)}
    assert {name: getattr(some, name).tolist() for name in NAMES} == expected
    assert {name: getattr(some, name).tolist() for name in NAMES} == expected, "and so at the second reading"


def test_a_column_of_all_replicas_is_the_fleet_s_own() -> None:
    everyone = candidates(0, 1, 2, 3)
    assert [name for name in NAMES if getattr(everyone, name) is not getattr(everyone.columns, name)] == []


@pytest.mark.parametrize("slots", [(1, 3), (0, 1, 2, 3), (2,)])
def test_uncached_tokens_are_the_rest_of_the_prompt(slots: tuple[int, ...]) -> None:
    some = candidates(*slots)
    assert len(some) == len(slots)
    assert some.cached_tokens.tolist() == [40.0 * slot for slot in slots]
    assert some.uncached_tokens.tolist() == [200.0 - 40.0 * slot for slot in slots]


def test_a_new_slot_is_empty_and_an_old_one_can_be_emptied() -> None:
    made = Columns.empty()
    made.grow()
    empty = {name: float(getattr(made, name)[0]) for name in NAMES}
    unknown = {name for name, value in empty.items() if value != value}
    assert unknown == {
        *("rtt_s", "running_requests", "queued_requests", "used_tokens", "kv_capacity_tokens", "max_running_requests"),
        *("cwnd_bytes", "rwnd_bytes", "sent_s", "sampled_s", "token_gap_s", "accelerator", "slo_tpot_s"),
        *("uncached_prefill_tokens", "decoding_requests", "first_tokens_s"),
    }
    assert {name: value for name, value in empty.items() if name not in unknown} == {
        **dict.fromkeys(("in_flight_requests", "in_flight_tokens", "queued_prefill_tokens", "waiting_prefill_s"), 0.0),
        **dict.fromkeys(("prefill_base_s", "prefill_token_s", "prefill_kappa_s", "salt", "cache_fill"), 0.0),
        **{"slowdown": 1.0, "connect_round_trips": 1.0},
        **dict.fromkeys(("drained_at_s", "head_began_s"), -np.inf),
        **dict.fromkeys(("shared_s", "head_shared_s", "prefill_share", "prefill_share_s"), 0.0),
        **dict.fromkeys(("head_due_s", "pace_bytes", "burst_bytes"), np.inf),
    }
    full = columns()
    full.clear(2)
    for number, name in enumerate(NAMES):
        assert getattr(full, name)[2] == pytest.approx(empty[name], nan_ok=True)
        assert getattr(full, name)[[0, 1, 3]].tolist() == [100 * number, 100 * number + 1, 100 * number + 3]
