"""What a start loads, and what the command line says where an extra is not installed."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import urllib.request
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from gorgo.cli.app import app
from gorgo.core.policy.weights import Weights
from gorgo.core.router import Router
from gorgo.errors import MissingExtra
from gorgo.lab.sim.simulation import Simulation
from gorgo.live import extras
from gorgo.policies.registry import make_policy
from tests.cli.test_processes import TOKEN, running
from tests.core.routers import specs
from tests.lab.sim.fleets import three_regions
from tests.live.kv_events.feeding import needs_zmq

# --- What a start loads: neither the laboratory, nor what no key of the configuration asks for.


CONFIG = """\
proxy: {region: here, bind: "127.0.0.1:0", admin_bind: "127.0.0.1:0"}
regions: [{name: here}]
replicas: [{name: a, region: here, url: "http://127.0.0.1:9"}]
"""
#: Own modules that `gorgo serve` loads at most; the bound falls where modules are merged.
MOST = 200
LABORATORY = ("gorgo.lab", "gorgo.lab.sim", "tuner")
UNCONFIGURED = (
    *("gorgo.learning", "gorgo.live.training", "gorgo.live.tokens", "gorgo.live.kv_events", "gorgo.live.peer_store"),
    *("gorgo.policies.learned", "gorgo.policies.published", "gorgo.live.fleet_sources.kubernetes"),
    *("zmq", "redis", "tokenizers", "lightgbm", "dns", "opentelemetry", "sqlalchemy", "cma", "joblib", "aiohttp"),
    *("rich", "pygments", "click"),  # of httpx's own command line
)
#: Of the proxy's process alone, or of other commands.
NOT_FOR_A_CHECK = ("gorgo.proxy", "gorgo.live.state", "httpx", "starlette", "hypercorn", "prometheus_client", "rich")
_PROGRAM = """
import atexit, sys
from pathlib import Path
written = Path(sys.argv.pop(1))
loaded = lambda: [name for name, module in sys.modules.items() if module is not None]
atexit.register(lambda: written.write_text("\\n".join(loaded())))
from gorgo.cli import main
main()
"""


def loaded(folder: Path, words: list[str], *, until: str | None = None, code: int = 0) -> set[str]:
    """Return the modules that `gorgo` has loaded when it ends with `code`: by itself, or after a line with `until`."""
    written = folder / "modules"
    command = [sys.executable, "-c", _PROGRAM, str(written), *words]
    environ = os.environ | {"GORGO_ADMIN_TOKEN": "token-of-the-test" * 2}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environ
    ) as process:
        if until is not None:
            assert process.stdout is not None
            assert until in process.stdout.readline()
            process.send_signal(signal.SIGTERM)
        process.communicate(timeout=120)
    assert process.returncode == code
    return set(written.read_text().split())


def below(modules: set[str], *packages: str) -> list[str]:
    """Return the modules that are one of the packages, or in it."""
    return sorted(name for name in modules if f"{name}.".startswith(tuple(f"{each}." for each in packages)))


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("start") / "regions.yaml"
    path.write_text(CONFIG)
    return path


@pytest.fixture(scope="module")
def served(config: Path) -> set[str]:
    return loaded(config.parent, ["serve", "--config", str(config)], until="listening")


def test_serve_loads_nothing_of_the_laboratory_and_few_modules(served: set[str]) -> None:
    assert "gorgo.proxy.server" in served
    assert below(served, *LABORATORY) == []
    assert len(below(served, "gorgo")) <= MOST


def test_serve_loads_nothing_that_is_not_configured(served: set[str]) -> None:
    assert below(served, *UNCONFIGURED) == []
    own = ["gorgo.policies", "gorgo.policies.gorgo_ms", "gorgo.policies.registry"]
    assert below(served, "gorgo.policies") == own


def test_check_loads_no_server(config: Path) -> None:
    checked = loaded(config.parent, ["check", "--config", str(config)])
    assert "gorgo.cli.validation" in checked
    assert below(checked, *LABORATORY, *UNCONFIGURED, *NOT_FOR_A_CHECK) == []


def test_a_policy_that_learns_loads_its_training(config: Path) -> None:
    words = ["serve", "--config", str(config)]
    learning = loaded(config.parent, [*words, "--policy", "gorgo-residual"], until="listening")
    assert {"gorgo.learning.model_file", "gorgo.live.training.service"} <= learning
    assert below(learning, *LABORATORY) == []


def test_the_tuner_beside_a_proxy_loads_no_simulator(tmp_path: Path) -> None:
    settings = tmp_path / "tune.yaml"
    settings.write_text("proxy_wait_s: 0.1")
    database = f"sqlite:///{tmp_path / 'tuner.db'}"
    words = ["tune", "--url", "http://127.0.0.1:9", "--database", database, "--settings", str(settings)]
    tuning = loaded(tmp_path, words, code=1)
    assert "tuner.sidecar.loop" in tuning
    assert below(tuning, "gorgo.lab.sim", "gorgo.lab.simulate", "tuner.offline", "joblib") == []


# --- `gorgo serve` over `gorgo engine --kv-events` as processes, and what the command line says without pyzmq.


CONFIG_KV_EVENTS = """\
proxy: {{region: here, policy: sticky-least-loaded, bind: "127.0.0.1:0", admin_bind: "127.0.0.1:0"}}
regions: [{{name: here}}]
models: [{{name: m, tokenizer: simulated}}]
replicas:
  - {{name: a, region: here, url: "{a}", engine: auto, models: [m], kv_events: auto}}
  - {{name: b, region: here, url: "{b}", engine: auto, models: [m], kv_events: auto}}
simulation: {{rtt_ms: {{here: 1}}}}
"""
ENGINE = r"gorgo engine . listening on (http://127\.0\.0\.1:\d+)"
SERVE = r"gorgo serve listening on (http://\S+) \(admin (http://\S+)\)"


def test_without_pyzmq_check_names_the_key_and_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extras, "find_spec", lambda _: None)
    config = tmp_path / "regions.yaml"
    config.write_text(CONFIG_KV_EVENTS.format(a="http://127.0.0.1:1", b="http://127.0.0.1:2"))
    result = CliRunner().invoke(app, ["check", "--config", str(config)], env={"GORGO_ADMIN_TOKEN": TOKEN})
    assert result.exit_code == 2
    assert (
        "replicas[0].kv_events (line 5): KV events need the extra: pip install 'gorgo-router[events]'" in result.output
    )
    assert "replicas[1].kv_events (line 6)" in result.output


@pytest.mark.parametrize("endpoint", ["5557", "tcp://127.0.0.1", "ipc:///tmp/x", "http://127.0.0.1:5557"])
def test_an_address_that_is_none_is_a_usage_error(endpoint: str, tmp_path: Path) -> None:
    config = tmp_path / "regions.yaml"
    config.write_text(CONFIG_KV_EVENTS.format(a="http://127.0.0.1:1", b="http://127.0.0.1:2"))
    words = ["engine", "--replica", "a", "--config", str(config), "--kv-events", endpoint]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 2
    assert "--kv-events: expected tcp://host:port" in result.output


def asked(url: str, body: object | None = None) -> tuple[Any, Any]:
    data = None if body is None else json.dumps(body).encode()
    headers = {"content-type": "application/json", "authorization": f"Bearer {TOKEN}"}
    with urllib.request.urlopen(urllib.request.Request(url, data, headers), timeout=20) as answer:
        return json.loads(answer.read()), answer.headers


@pytest.mark.system
@needs_zmq
def test_serve_over_two_engines_decides_by_their_events(tmp_path: Path) -> None:
    config = tmp_path / "regions.yaml"
    config.write_text(CONFIG_KV_EVENTS.format(a="http://127.0.0.1:1", b="http://127.0.0.1:2"))
    with ExitStack() as processes:
        urls = {}
        for name in ("a", "b"):
            words = ("engine", "--replica", name, "--config", config, "--port", "0", "--kv-events", "tcp://127.0.0.1:0")
            said, _ = processes.enter_context(running(ENGINE, *words))
            urls[name] = said[1]
        config.write_text(CONFIG_KV_EVENTS.format(**urls))
        said, _ = processes.enter_context(running(SERVE, "serve", "--config", config))
        body = {"model": "m", "prompt": "".join(f"{number:04d}" for number in range(512)), "max_tokens": 1}
        sources, replicas = [], set()
        for _ in range(50):
            _, headers = asked(f"{said[1]}/v1/completions", body)
            found, _ = asked(f"{said[2]}/admin/decisions/{headers['x-request-id']}")
            decision = found["decisions"][-1]
            sources.append(decision["cache_source"])
            replicas.add(decision["replica"])
            if sources[-1] == "events":
                break
        assert sources[-1] == "events", sources
        assert decision["estimated_cached_tokens"] >= 512 - 16
        assert re.fullmatch("[ab]", decision["replica"])
        assert len(replicas) == 1, "the prompt is on one of them"


# --- What the command line says of boosted trees without their extra: no other model takes their place unsaid.


CONFIG_LEARNED_EXTRA = """\
proxy: {{region: here, {policy}, bind: "127.0.0.1:0", admin_bind: "127.0.0.1:0"}}
regions: [{{name: here}}]
replicas: [{{name: a, region: here, url: "http://127.0.0.1:1"}}]
"""
SAID = "boosted trees need the extra: pip install 'gorgo-router[learned]'"


@pytest.fixture
def _without_lightgbm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gorgo.learning.trees.find_spec", lambda _: None)


@pytest.mark.usefixtures("_without_lightgbm")
@pytest.mark.parametrize("command", ["check", "serve"])
@pytest.mark.parametrize(
    ("policy", "key"),
    [("policy: predicted-latency", "proxy.policy"), ("shadow_policy: predicted-latency", "proxy.shadow_policy")],
)
def test_check_and_serve_name_the_key_and_the_extra(tmp_path: Path, command: str, policy: str, key: str) -> None:
    config = tmp_path / "regions.yaml"
    config.write_text(CONFIG_LEARNED_EXTRA.format(policy=policy))
    result = CliRunner().invoke(app, [command, "--config", str(config)], env={"GORGO_ADMIN_TOKEN": "t" * 32})
    assert result.exit_code == 2
    assert f"{key} (line 1): predicted-latency: {SAID}" in result.output


@pytest.mark.usefixtures("_without_lightgbm")
def test_check_of_a_file_for_another_machine_says_nothing_of_packages(tmp_path: Path) -> None:
    config = tmp_path / "regions.yaml"
    config.write_text(CONFIG_LEARNED_EXTRA.format(policy="policy: predicted-latency"))
    result = CliRunner().invoke(app, ["check", "--no-files", "--config", str(config)])
    assert result.exit_code == 0, result.output


@pytest.mark.usefixtures("_without_lightgbm")
def test_a_router_refuses_the_policy_at_its_start_and_at_a_change() -> None:
    with pytest.raises(MissingExtra, match=r"gorgo-router\[learned\]"):
        Router(specs("a"), make_policy("predicted-latency"), rng=np.random.default_rng(0), boot_id="boot")
    router = Router(specs("a"), make_policy("gorgo-ms"), rng=np.random.default_rng(0), boot_id="boot")
    trees = make_policy("predicted-latency")
    with pytest.raises(MissingExtra):
        router.settings.set_policy(trees, Weights.of(trees.weight_specs), now=0.0)
    assert router.settings.policy.name == "gorgo-ms"


@pytest.mark.usefixtures("_without_lightgbm")
def test_a_simulation_refuses_it_before_its_first_request() -> None:
    with pytest.raises(MissingExtra, match=r"gorgo-router\[learned\]"):
        Simulation(three_regions(), make_policy("predicted-latency"), seed=0)
