"""The live herd: its fleet, and the cells of a row. What starts processes is tested where the demo is."""

from __future__ import annotations

from pathlib import Path

import pytest

from gorgo.config.load import load_config
from gorgo.lab.datasets import load_requests
from gorgo.lab.demo import run
from gorgo.lab.demo.run import DEMO_LAYOUT, FleetLayout
from gorgo.lab.results import ResultRow, Spread
from gorgo.lab.simulate.fleet import fleet_of
from gorgo.policies.registry import POLICIES as REGISTERED
from tests.bench.herd import _HEADER, LAYOUT, POLICIES, SESSIONS, SPEED, TRACE, cells_of


@pytest.mark.parametrize(("layout", "replicas", "tokens_per_s"), [(LAYOUT, 8, 48_591.0), (DEMO_LAYOUT, 3, None)])
def test_a_layout_is_a_fleet_that_the_proxy_and_the_engines_read(
    tmp_path: Path, layout: FleetLayout, replicas: int, tokens_per_s: float | None
) -> None:
    path = tmp_path / "regions.yaml"
    run._write_config(
        path,
        "lmetric",
        3,
        layout,
        {name: f"http://127.0.0.1:{9000 + place}" for place, name in enumerate(layout.replicas)},
    )
    config = load_config(path)
    fleet = fleet_of(config, source=path)
    assert (config.proxy.policy, config.simulation.seed, len(fleet.replicas)) == ("lmetric", 3, replicas)
    assert {one.spec.prefill_tokens_per_s for one in fleet.replicas} == {tokens_per_s}
    assert {one.profile.name for one in fleet.replicas} == {layout.profile}
    assert {one.region: one.link.rtt_s for one in fleet.replicas} == {
        region: rtt_ms / 1e3 for region, rtt_ms in layout.round_trip_ms.items()
    }


def test_the_trace_at_its_speed_is_a_request_per_0_4_s_and_each_policy_is_registered() -> None:
    requests = load_requests(TRACE)
    assert len({request.user for request in requests}) == SESSIONS
    assert requests[-1].timestamp_s / len(requests) / SPEED == pytest.approx(0.4, rel=0.1)
    assert set(POLICIES) <= set(REGISTERED)


def test_a_row_has_a_cell_per_column_and_unknown_ones_are_a_dash() -> None:
    known = ResultRow(
        trace="herd", time_scale=0.25, policy="lmetric", weights={}, seed=0, source="live", n=9, errors=1,
        ttft_ms=Spread(100.4, 90.0, 200.0, 300.0), e2e_s=Spread(1.0, 1.0, 2.345, 3.0), itl_ms=Spread(), cache_hit=0.75,
        cache_hit_estimated=None, share={"a": 0.25, "b": 0.75}, prediction_error_ms=Spread(), slip_ms_p95=3.21,
    )  # fmt: skip
    assert cells_of(known) == ("lmetric", "9", "1", "100", "90", "200", "300", "2.35", "75.0", "75", "3.2")
    assert len(cells_of(known)) == len(_HEADER)
