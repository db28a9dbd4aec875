"""Every bound where nothing is configured, as the reference states it."""

from __future__ import annotations

from dataclasses import asdict

from gorgo.core.limits import ClientLimits, HedgeLimits, OutlierLimits, OverloadLimits, RouterLimits
from gorgo.core.messages.request import RouteRequest


def test_bounds_are_those_of_the_design() -> None:
    assert {name: value for name, value in asdict(RouterLimits()).items() if not isinstance(value, dict)} == {
        "max_attempts": 3,
        "continuations": 2,
        "max_routes": 100_000,
        "route_ttl_s": 3600.0,
        "max_in_flight": 4096,
        "stale_after_s": 90.0,
        "rtt_ewma_alpha": 0.3,
        "max_index_blocks": 4_000_000,
        "block_tokens": 64.0,
        "max_decisions": 1000,
        "max_samples": 10_000,
        "panic_threshold": 0.5,
        "retry_budget_ratio": 0.2,
        "retry_budget_minimum": 20,
        "retry_budget_window_s": 10.0,
        "slow_start_s": 0.0,
        "region_window_s": 30.0,
        "fallbacks": 0,
        "sampled_replicas": 128,
    }
    assert OutlierLimits() == OutlierLimits(failures=3, base_s=5.0, max_s=60.0)


def test_queueing_and_hedging_are_off_by_default() -> None:
    assert asdict(OverloadLimits()) == {
        "queue_enabled": False,
        "queue_every_policy": False,
        "queue_max_requests": 1000,
        "max_backlog_s": 0.2,
        "max_concurrency_per_replica": None,
        "slo_ttft_s": None,
        "slo_e2e_s": None,
        "shed_on_objective": False,
        "infeasible_max_wait_s": 0.3,
        "no_replica_wait_s": 0.0,
    }
    assert asdict(HedgeLimits()) == {
        "budget_ratio": 0.0,
        "budget_minimum": 0,
        "window_s": 300.0,
        "delay_s": 0.5,
        "grace_s": 0.1,
    }
    assert not RouterLimits().clients.has_limits
    assert ClientLimits() == ClientLimits(None, None, None)


def test_a_request_may_go_anywhere_without_a_deadline_by_default() -> None:
    request = RouteRequest("r", 0.0, 1, b"", 64.0, 0)
    assert (request.model, request.session_id, request.pinned_replica, request.client, request.regions) == (None,) * 5
    assert (request.slo_ttft_s, request.priority, request.body_bytes) == (None, 0, 0)
    assert request.streamed
    assert request.idempotent
