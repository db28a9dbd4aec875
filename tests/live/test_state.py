"""How a proxy is wired from its configuration."""

from __future__ import annotations

import ssl
from typing import Any

import pytest

from gorgo.config.model import Config, OverloadConfig, ProxyConfig, RegionConfig, ReplicaConfig
from gorgo.config.router_settings import router_limits
from gorgo.live.build import build_live
from gorgo.live.state import LiveState
from gorgo.policies.registry import make_policy
from tests.proxy.conftest import QUIET, system_tls

CONFIG = Config(
    proxy=QUIET,
    regions=(RegionConfig(name="here"),),
    replicas=(ReplicaConfig(name="a", region="here", url="https://127.0.0.1:1"),),
)


async def built(config: Config = CONFIG, **options: Any) -> LiveState:
    state = build_live(config, policy=make_policy("round-robin"), weights=None, environ={}, key=1, seed=1, **options)
    await state.aclose()
    return state


async def test_replicas_must_show_a_certificate_of_the_system_s_authorities_by_default(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    monkeypatch.setattr(ssl, "create_default_context", lambda: made)
    assert (await built()).replicas.tls is made


async def test_a_context_that_is_given_is_the_one_of_replicas_without_files() -> None:
    assert (await built(tls=system_tls())).replicas.tls is system_tls()


@pytest.mark.parametrize(("variable", "internal"), [({}, False), ({"GORGO_INTERNAL_ROUTES": "1"}, True)])
async def test_internal_routes_are_there_for_those_who_ask(variable: dict[str, str], internal: bool) -> None:
    policy = make_policy("round-robin")
    state = build_live(CONFIG, policy=policy, weights=None, environ=variable, key=1, seed=1, tls=system_tls())
    await state.aclose()
    assert state.internal_routes is internal


@pytest.mark.parametrize(
    ("proxy", "stale_after_s"),
    [
        ({"probe_interval_s": 5.0, "scrape_interval_s": 30.0}, 90.0),
        ({"probe_interval_s": 40.0, "scrape_interval_s": 30.0}, 120.0),
    ],
)
def test_what_is_known_is_stale_after_three_of_the_longer_interval(
    proxy: dict[str, float], stale_after_s: float
) -> None:
    limits = router_limits(Config(proxy=ProxyConfig(region="here", **proxy), regions=CONFIG.regions, replicas=()))  # type: ignore[arg-type]
    assert limits.stale_after_s == stale_after_s
    assert limits.region_window_s == proxy["probe_interval_s"]


def test_milliseconds_of_the_file_are_seconds_of_the_router() -> None:
    file = OverloadConfig(
        max_backlog_ms=1500.0,
        slo_ttft_ms=2000.0,
        slo_e2e_ms=9000.0,
        no_replica_wait_s=4.0,
        queue_max_requests=17,
    )
    limits = router_limits(Config(proxy=QUIET, regions=CONFIG.regions, replicas=(), overload=file))
    found = limits.overload
    assert (found.max_backlog_s, found.slo_ttft_s, found.slo_e2e_s) == (1.5, 2.0, 9.0)
    assert (found.no_replica_wait_s, found.queue_max_requests) == (4.0, 17)
    unset = router_limits(CONFIG).overload
    assert (unset.slo_ttft_s, unset.slo_e2e_s) == (None, None)
