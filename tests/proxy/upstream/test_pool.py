"""Which authorities the connections to a replica believe."""

from __future__ import annotations

from pathlib import Path

import pytest

from gorgo.proxy.upstream import client, pool
from gorgo.proxy.upstream.client import UpstreamClient, UpstreamError
from tests.proxy.authority import Authority, engine, needs_openssl
from tests.proxy.conftest import system_tls


@needs_openssl
async def test_connections_opened_from_now_on_use_the_new_context_and_no_earlier_one(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    async with engine(authority.pair("engine"), None) as url:
        upstream = UpstreamClient(url, connections=4, connect_timeout_s=5.0, tls=system_tls())
        with pytest.raises(UpstreamError, match="connect_failed"):
            await upstream.fetch("/health", timeout_s=5.0)
        upstream.set_tls(authority.trusting())
        assert (await upstream.fetch("/health", timeout_s=5.0))[0] == 200
        connectors = upstream._pool._connector, upstream._pool._fresh_connector
        trusting = authority.trusting()
        upstream.set_tls(trusting)
        assert [connector._ssl for connector in connectors] == [trusting, trusting]
        await upstream.aclose()


def test_a_lost_connection_was_stale_within_half_a_second_and_a_small_response_has_four_mebibytes() -> None:
    assert (pool.STALE_S, client.FETCH_LIMIT_BYTES) == (0.5, 4_194_304)
