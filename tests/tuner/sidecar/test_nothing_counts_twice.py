"""Whatever happens to proxy, network and sidecar: a sample counts once, for weights that this process has put."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from tests.tuner.sidecar.fake_proxy import Beside, FakeProxy
from tuner.campaign.machine import Campaign
from tuner.campaign.options import CampaignOptions
from tuner.objective import TunerSample
from tuner.sidecar import bootstrap

MEASURED: list[tuple[str | None, int, int]] = []


class Watched(Campaign):
    """Writes down what it measures."""

    def _measure(self, samples: list[TunerSample], now: float) -> None:
        MEASURED.extend((self.cursor.boot_id, sample.seq, sample.weights_version) for sample in samples)
        super()._measure(samples, now)


WHAT = st.sampled_from(
    [
        *["serve"] * 3,
        "burst",
        "proxy restarts",
        "killed",
        "somebody puts",
        "cut",
        "mended",
        "deaf",
        "hears",
        "freeze",
        "unfreeze",
    ]
)


@pytest.mark.parametrize("mode", ["paper", "switchback"])
@given(happenings=st.lists(WHAT, min_size=5, max_size=40), page=st.integers(1, 30))
@settings(max_examples=6, phases=[Phase.generate])
def test_a_sample_counts_once_whatever_happens(mode: str, happenings: Sequence[str], page: int) -> None:
    MEASURED.clear()
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(bootstrap, "Campaign", Watched)
        asyncio.run(live_through(mode, happenings, page, Path(folder)))


async def live_through(mode: str, happenings: Sequence[str], page: int, folder: Path) -> None:
    proxy = FakeProxy(stored=60, page=page)
    options = CampaignOptions(
        mode=mode,  # type: ignore[arg-type]  # hypothesis has checked less
        window=8,
        hop=4,
        warm_up_s=0.0,
        block_s=4.0,
        discard_s=0.0,
        min_block_samples=2,
        pairs=2,
    )
    beside = Beside(proxy, folder, options)
    await beside.start()
    for happening in happenings:
        if happening == "killed" and not proxy.down:
            await beside.start()
        happens(proxy, happening)
        await beside.step()
    proxy.down = proxy.deaf = False
    proxy.frozen = None
    for _ in range(400):
        await beside.step(6, seconds=30.0)
        if len(beside.numbers) > 2:
            break
    seen = [(boot, seq) for boot, seq, _ in MEASURED]
    assert len(seen) == len(set(seen)), "counted twice"
    ours = {(put["boot"], put["version"]) for put in proxy.puts}
    assert {(boot, version) for boot, _, version in MEASURED} <= ours
    numbers = beside.numbers
    assert numbers == list(range(len(numbers))), "generations go on without holes or repeats"
    assert len(numbers) >= 2, "and the campaign has not stuck"


def happens(proxy: FakeProxy, what: str) -> None:
    match what:
        case "serve":
            proxy.serve(5)
        case "burst":
            proxy.serve(100)  # more than the ring keeps
        case "proxy restarts":
            proxy.restart()
        case "cut" | "mended":
            proxy.down = what == "cut"
        case "deaf" | "hears":
            proxy.deaf = what == "deaf"
        case "freeze" | "unfreeze":
            proxy.frozen = {"reason": "r"} if what == "freeze" else None
        case "somebody puts":
            proxy.set({"w_rtt": 0.7}, by="operator")
