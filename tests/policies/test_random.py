from __future__ import annotations

from gorgo.policies.random import Random
from tests.policies.table import rows_chosen, table


def test_reaches_every_replica_whatever_its_load() -> None:
    assert rows_chosen(Random(), table(4, in_flight_requests=[9, 0, 0, 500])) == {0, 1, 2, 3}
