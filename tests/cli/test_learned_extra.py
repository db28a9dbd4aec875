"""What the command line says of boosted trees without their extra: no other model takes their place unsaid."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from gorgo.cli.app import app
from gorgo.core.policy.weights import Weights
from gorgo.core.router import Router
from gorgo.errors import MissingExtra
from gorgo.lab.sim.simulation import Simulation
from gorgo.policies.registry import make_policy
from tests.core.routers import specs
from tests.lab.sim.fleets import three_regions

CONFIG = """\
proxy: {{region: here, {policy}, bind: "127.0.0.1:0", admin_bind: "127.0.0.1:0"}}
regions: [{{name: here}}]
replicas: [{{name: a, region: here, url: "http://127.0.0.1:1"}}]
"""
SAID = "boosted trees need the extra: pip install 'gorgo-router[learned]'"


@pytest.fixture(autouse=True)
def _without_lightgbm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gorgo.learning.models.trees.find_spec", lambda _: None)


@pytest.mark.parametrize("command", ["check", "serve"])
@pytest.mark.parametrize(
    ("policy", "key"),
    [("policy: predicted-latency", "proxy.policy"), ("shadow_policy: predicted-latency", "proxy.shadow_policy")],
)
def test_check_and_serve_name_the_key_and_the_extra(tmp_path: Path, command: str, policy: str, key: str) -> None:
    config = tmp_path / "regions.yaml"
    config.write_text(CONFIG.format(policy=policy))
    result = CliRunner().invoke(app, [command, "--config", str(config)], env={"GORGO_ADMIN_TOKEN": "t" * 32})
    assert result.exit_code == 2
    assert f"{key} (line 1): predicted-latency: {SAID}" in result.output


def test_check_of_a_file_for_another_machine_says_nothing_of_packages(tmp_path: Path) -> None:
    config = tmp_path / "regions.yaml"
    config.write_text(CONFIG.format(policy="policy: predicted-latency"))
    result = CliRunner().invoke(app, ["check", "--no-files", "--config", str(config)])
    assert result.exit_code == 0, result.output


def test_a_router_refuses_the_policy_at_its_start_and_at_a_change() -> None:
    with pytest.raises(MissingExtra, match=r"gorgo-router\[learned\]"):
        Router(specs("a"), make_policy("predicted-latency"), rng=np.random.default_rng(0), boot_id="boot")
    router = Router(specs("a"), make_policy("gorgo-ms"), rng=np.random.default_rng(0), boot_id="boot")
    trees = make_policy("predicted-latency")
    with pytest.raises(MissingExtra):
        router.settings.set_policy(trees, Weights.of(trees.weight_specs), now=0.0)
    assert router.settings.policy.name == "gorgo-ms"


def test_a_simulation_refuses_it_before_its_first_request() -> None:
    with pytest.raises(MissingExtra, match=r"gorgo-router\[learned\]"):
        Simulation(three_regions(), make_policy("predicted-latency"), seed=0)
