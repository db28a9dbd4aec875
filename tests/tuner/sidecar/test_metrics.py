from __future__ import annotations

from pathlib import Path
from urllib.request import urlopen

import pytest

from tests.tuner.sidecar.fake_proxy import Beside, FakeProxy
from tuner.sidecar.metrics import METRICS, Figures, listening


async def test_figures_follow_the_campaign(tmp_path: Path) -> None:
    beside = Beside(FakeProxy(), tmp_path)
    await beside.start()
    await beside.until_generation(4)
    beside.proxy.down = True
    await beside.step()
    value = beside.figures.registry.get_sample_value
    outcomes = [value("gorgo_tuner_generations_total", {"outcome": how}) or 0 for how in ("accepted", "rejected")]
    assert sum(outcomes) == 4
    assert value("gorgo_tuner_polls_total", {"result": "failed"}) == 1
    assert value("gorgo_tuner_samples_total") == beside.sidecar.campaign.inbox.last_seq
    assert value("gorgo_tuner_weight", {"weight": "w_rtt", "set": "in_force"}) == beside.proxy.weights["w_rtt"]
    assert value("gorgo_tuner_sigma") == beside.history.generations()[-1].sigma


def test_they_are_served_until_the_end_and_a_taken_port_is_an_error() -> None:
    with listening(Figures(), ("127.0.0.1", 0)) as port:
        with urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
            text = answer.read().decode()
        assert all(spec.name in text for spec in METRICS)
        assert port is not None
        with pytest.raises(OSError, match="in use"), listening(Figures(), ("127.0.0.1", port)):
            pass
    with pytest.raises(OSError, match="refused"):
        urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10)


def test_without_an_address_nothing_listens() -> None:
    with listening(Figures(), None) as port:
        assert port is None
