"""Real processes: what a replica that fails fast costs is no more than its first requests."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.chaos.failing import FastFailure
from tests.chaos.fast_failures import MIDDLE, START, WRONG_PATH, measure_all
from tests.chaos.losses import LOST_FIRST
from tests.documents import ROOT


@pytest.mark.timeout(120)
@pytest.mark.system
async def test_a_replica_that_refuses_everything_costs_no_more_than_its_first_requests(tmp_path: Path) -> None:
    (row,) = await measure_all(
        [(FastFailure.NOT_FOUND.value, START)], lanes=1, tree=ROOT, folder=tmp_path, failing_s=5.0
    )
    assert row.requests > 10
    assert row.sent >= 1
    assert row.lost <= LOST_FIRST


@pytest.mark.system
@pytest.mark.timeout(600)
async def test_no_kind_of_fast_failure_costs_more_than_its_first_requests(tmp_path: Path) -> None:
    faults = [WRONG_PATH, *(each.value for each in FastFailure)]
    wanted = [(fault, begins) for fault in faults for begins in (START, MIDDLE)]
    rows = await measure_all(wanted, lanes=6, tree=ROOT, folder=tmp_path, failing_s=20.0)
    assert [(row.fault, row.begins) for row in rows] == wanted
    assert [row for row in rows if row.lost > LOST_FIRST or not row.sent] == []
