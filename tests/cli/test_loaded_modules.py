"""What a start loads: neither the laboratory, nor what no key of the configuration asks for."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

CONFIG = """\
proxy: {region: here, bind: "127.0.0.1:0", admin_bind: "127.0.0.1:0"}
regions: [{name: here}]
replicas: [{name: a, region: here, url: "http://127.0.0.1:9"}]
"""
#: Own modules that `gorgo serve` loads at most; the bound falls where modules are merged.
MOST = 330
LABORATORY = ("gorgo.lab", "gorgo.lab.sim", "tuner")
UNCONFIGURED = (
    *("gorgo.learning", "gorgo.live.training", "gorgo.live.tokens", "gorgo.live.kv_events", "gorgo.live.peer_store"),
    *("gorgo.policies.learned", "gorgo.policies.sticky", "gorgo.live.fleet_sources.kubernetes"),
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
