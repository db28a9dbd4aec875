"""What ends `gorgo tune` before it has begun, and what it waits for."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import httpx
import pytest

from gorgo.errors import ProxyRefused, TunerError, WeightsError
from tests.tuner.sidecar.fake_proxy import Beside, FakeProxy
from tuner.campaign.options import CampaignOptions
from tuner.proxy_client import ProxyClient
from tuner.sidecar import bootstrap
from tuner.sidecar.bootstrap import connect
from tuner.sidecar.progress import Reporter


def client(proxy: FakeProxy) -> ProxyClient:
    return ProxyClient("http://proxy", "t", transport=httpx.MockTransport(proxy.handle))


def quiet(said: list[str]) -> Reporter:
    return Reporter(said.append, said.append)


async def test_a_proxy_that_is_not_there_yet_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    proxy, said, waits = FakeProxy(), [], []  # type: ignore[var-annotated]
    proxy.down = True

    async def wait(_stop: asyncio.Event, seconds: float) -> None:
        waits.append(seconds)
        proxy.broken = 503 if len(waits) < 4 else None
        proxy.down = len(waits) < 3

    monkeypatch.setattr(bootstrap, "wait", wait)
    found = await connect(client(proxy), quiet(said), asyncio.Event())
    assert found is not None
    assert waits == [0.5, 1.0, 2.0, 4.0]
    assert all("waiting for the proxy" in line for line in said)


async def test_the_wait_ends_when_the_process_is_to_end() -> None:
    proxy, stop = FakeProxy(), asyncio.Event()
    proxy.down = True
    stop.set()
    assert await connect(client(proxy), quiet([]), stop) is None


async def test_a_wrong_token_is_no_reason_to_wait() -> None:
    proxy = FakeProxy()
    proxy.broken = 401
    with pytest.raises(ProxyRefused, match="out of order"):
        await connect(client(proxy), quiet([]), asyncio.Event())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"start": {"w_rtt": 50.0}}, r"expected a number in \[0.05, 2\]"),
        ({"start": {"m_rtt": 1.0}}, "no weight of gorgo"),
        ({"widen": {"m_rtt": (0.1, 1.0)}}, "not a weight that is moved"),
        ({"widen": {"w_rtt": (0.0, 1.0)}}, "log space"),
    ],
)
async def test_weights_that_cannot_be_tuned_so_are_refused(
    options: dict[str, Any], message: str, tmp_path: Path
) -> None:
    beside = Beside(FakeProxy(), tmp_path, **options)
    with pytest.raises(WeightsError, match=message):
        await beside.start()
    assert beside.history.campaigns() == []


async def test_an_unfinished_campaign_of_another_mode_is_not_begun_again_in_silence(tmp_path: Path) -> None:
    proxy = FakeProxy()
    beside = Beside(proxy, tmp_path)
    await beside.start()
    await beside.step(4)
    with pytest.raises(TunerError, match=r"campaign 1 cannot go on like this.*--new begins another"):
        await Beside(proxy, tmp_path, CampaignOptions(mode="switchback")).start()


async def test_a_widened_box_is_put_with_the_proxy_s_consent(tmp_path: Path) -> None:
    proxy = FakeProxy()
    beside = Beside(proxy, tmp_path, start={"w_rtt": 5.0}, widen={"w_rtt": (0.05, 10.0)})
    await beside.start()
    await beside.until_generation(1)
    assert proxy.puts[0]["weights"] == {"w_rtt": 5.0, "w_queue": 0.1}
    assert all(put["widen"] for put in proxy.puts)


async def test_the_history_keeps_options_and_seed_and_no_token(tmp_path: Path) -> None:
    beside = Beside(FakeProxy(), tmp_path)
    await beside.start()
    kept = beside.history.campaigns()[0].options
    assert (kept["algorithm"], kept["mode"], kept["seed"]) == ("es", "paper", 1)
    assert "token" not in kept
