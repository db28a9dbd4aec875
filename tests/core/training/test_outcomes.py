from __future__ import annotations

from math import nan

import numpy as np
import pytest

from gorgo.core.training.outcomes import OutcomeRing, OutcomeRow, TrainingRows
from gorgo.errors import ConfigError

NAMES = ("prompt_tokens", "rtt_s")


def filled(rows: int, *, capacity: int = 8) -> OutcomeRing:
    """Row n was dispatched at second n and has n and -n as features."""
    ring = OutcomeRing(NAMES, capacity)
    for number in range(rows):
        row = OutcomeRow(
            float(number), ttft_s=0.5, e2e_s=1.0, prompt_tokens=7.0, slot=number % 3, censored=number % 2 == 1,
            tpot_s=0.01, output_tokens=4.0, cached_tokens=nan, group=-number,
        )  # fmt: skip
        ring.append(np.array([number, -number], dtype=np.float32), row)
    return ring


@pytest.mark.parametrize("rows", [0, 1, 7, 8, 9, 29])
def test_a_reader_gets_every_stored_row_once_in_order(rows: int) -> None:
    ring, read = filled(rows), []
    ring.check()
    seq = 0
    while seq < ring.next_seq:
        part = ring.since(seq, limit=3)
        read += part.dispatched_s.tolist()
        seq = part.first_seq + len(part)
    assert read == list(range(max(0, rows - 8), rows))
    assert (ring.next_seq, ring.first_seq, len(ring)) == (rows, max(0, rows - 8), min(rows, 8))


def test_a_reader_that_lags_finds_the_gap_and_one_that_is_ahead_gets_nothing() -> None:
    ring = filled(20)
    assert ring.since(3).first_seq == 12
    late = ring.since(99)
    assert (len(late), late.first_seq) == (0, 20)


def test_rows_that_were_read_do_not_change_with_the_ring() -> None:
    ring = filled(8)
    rows = ring.since(0)
    ring.append(np.zeros(2), OutcomeRow(9.0, 0.1, 0.2, 3.0, slot=0, censored=False))
    assert rows.dispatched_s[0] == 0.0
    assert rows.features[5].tolist() == [5.0, -5.0]
    assert (rows.slots[5], rows.censored[5], rows.groups[5], rows.output_tokens[5]) == (2, True, -5, 4.0)
    assert np.isnan(rows.cached_tokens).all()


def test_parts_of_rows_can_be_selected_and_joined() -> None:
    rows = filled(6).since(0)
    later = rows.select(slice(4, None))
    assert (later.first_seq, later.dispatched_s.tolist()) == (4, [4.0, 5.0])
    joined = TrainingRows.concat([later, rows.select(np.array([0, 2])), rows.select(rows.censored)])
    assert joined.dispatched_s.tolist() == [4.0, 5.0, 0.0, 2.0, 1.0, 3.0, 5.0]
    assert joined.features[:, 1].tolist() == [-4.0, -5.0, 0.0, -2.0, -1.0, -3.0, -5.0]


def test_parts_of_other_features_are_not_joined() -> None:
    with pytest.raises(AssertionError, match="the same features"):
        TrainingRows.concat([filled(2).since(0), TrainingRows.empty(("rtt_s", "prompt_tokens"))])


@pytest.mark.parametrize("later", [0, 3, 9])
@pytest.mark.parametrize("saved", [0, 5, 8])
def test_outcomes_of_a_former_process_come_before_those_since(saved: int, later: int) -> None:
    before = filled(20 + saved).since(20)
    ring = filled(later)
    since = ring.since(0).dispatched_s.tolist()
    ring.restore(before)
    ring.check()
    expected = [*before.dispatched_s.tolist(), *since][-8:]
    assert ring.since(0).dispatched_s.tolist() == expected
    assert ring.next_seq == before.first_seq + len(before) + min(later, 8)
    ring.append(np.zeros(2), OutcomeRow(99.0, 0.1, 0.2, 3.0, slot=0, censored=False, unstreamed=True))
    newest = ring.since(ring.next_seq - 1)
    assert (newest.dispatched_s.tolist(), newest.unstreamed.tolist()) == ([99.0], [True])


def test_outcomes_of_other_features_are_refused() -> None:
    with pytest.raises(ConfigError, match="outcomes of features rtt_s; expected prompt_tokens, rtt_s"):
        filled(3).restore(TrainingRows.empty(("rtt_s",), 2))
