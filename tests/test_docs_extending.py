"""The examples of the page about extending: offered by its own entry points, and held to the contracts."""

from __future__ import annotations

import importlib
import json
import re
import sys
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import fields
from itertools import product
from math import log
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from gorgo.cli import app
from gorgo.config.load import parse_config
from gorgo.core.messages.request import RouteRequest
from gorgo.core.policy.interface import Candidates
from gorgo.core.policy.weights import WeightSpec
from gorgo.engines import registry as engines
from gorgo.engines.registry import dialect
from gorgo.policies import registry as policies
from gorgo.policies.registry import make_policy
from tests.documents import DOCS, ROOT, blocks, check_gorgo_lines
from tests.engines import test_contract as engine_contract
from tests.engines.scrapes import METRICS
from tests.policies import test_contract as policy_contract
from tests.tuner.optimizers import test_contract as optimizer_contract
from tuner.optimizers import registry as optimizers
from tuner.optimizers.registry import make_optimizer
from tuner.space import LogBox

PAGE = (DOCS / "extending.md").read_text()


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The page's package as pip would leave it, and its folder on the path."""
    site = tmp_path_factory.mktemp("site-packages")
    for path, text in re.findall(r"^```\w+ (extras/\S+)\n(.*?)^```$", PAGE, flags=re.MULTILINE | re.DOTALL):
        (site / path).parent.mkdir(exist_ok=True)
        (site / path).write_text(text)
    info = site / "extras-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: extras\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(_entry_points())
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(site))
        yield site
    for name in [name for name in sys.modules if name.partition(".")[0] == "extras"]:
        del sys.modules[name]
    importlib.invalidate_caches()


def _entry_points() -> str:
    """As the build makes it of pyproject.toml."""
    (table,) = blocks(PAGE, "toml")
    groups = tomllib.loads(table)["project"]["entry-points"]
    lines = [[f"[{group}]", *(f"{name} = {found}" for name, found in rows.items())] for group, rows in groups.items()]
    return "\n".join(line for group in lines for line in group) + "\n"


def cases(module: ModuleType, name: str) -> Iterator[Callable[[], None]]:
    """Every test of a contract suite that is run for each name, for this one, with all of its other parameters."""
    for function in [one for key, one in vars(module).items() if key.startswith("test_")]:
        marks = [mark for mark in getattr(function, "pytestmark", []) if mark.name == "parametrize"]
        shared = getattr(module, "pytestmark", None)
        marks = [*marks, *([shared.mark] if shared is not None else [])]
        if any(mark.args[0] == "name" for mark in marks):
            yield from _calls(function, [mark for mark in marks if mark.args[0] != "name"], name)


def _calls(function: Callable[..., None], marks: list[Any], name: str) -> Iterator[Callable[[], None]]:
    for values in product(*(mark.args[1] for mark in marks)):
        given: dict[str, Any] = {}
        for mark, value in zip(marks, values, strict=True):
            names = mark.args[0]
            given |= {names: value} if isinstance(names, str) else dict(zip(names, value, strict=True))
        yield lambda given=given: function(name=name, **given)  # type: ignore[misc]


def held_to(module: ModuleType, name: str) -> int:
    ran = list(cases(module, name))
    for case in ran:
        case()
    return len(ran)


# The contracts make one of each many times over, so they find it as a line of this repository's registries; looking for
# entry points reads the metadata of all that is installed, each time.


@pytest.mark.usefixtures("installed")
def test_the_policy_of_the_page_keeps_the_contract(monkeypatch: pytest.MonkeyPatch) -> None:
    kind = type(make_policy("least-work"))
    monkeypatch.setattr(policies, "POLICIES", {**policies.POLICIES, "least-work": kind})
    assert held_to(policy_contract, "least-work") >= 8


@pytest.mark.usefixtures("installed")
def test_the_policy_of_the_page_is_listed_and_simulated_by_its_name() -> None:
    listed = CliRunner().invoke(app, ["policies", "--json"])
    assert "least-work" in {row["name"] for row in json.loads(listed.stdout)}
    asked = [
        "simulate",
        "chat-small",
        "--policy",
        "least-work",
        "--policy",
        "random",
        "--limit",
        "60",
        "--jobs",
        "1",
    ]
    ran = CliRunner().invoke(app, [*asked, "--json"])
    rows = {row["policy"]: row for row in json.loads(ran.stdout)}
    assert rows["least-work"]["weights"] == {"ms_per_token": 0.09}
    assert rows["least-work"]["ttft_ms"]["mean"] < rows["random"]["ttft_ms"]["mean"]


def test_the_page_names_everything_that_a_policy_may_read() -> None:
    listed = {
        name for line in re.findall(r"^- (`.*?): ", PAGE, flags=re.MULTILINE) for name in re.findall(r"`(\w+)`", line)
    }
    internal = {"slots", "columns", "matched_tokens", "is_all", "table"}
    assert listed == {name for name in dir(Candidates) if not name.startswith("_")} - internal
    (request,) = re.findall(r"^`request`: (.*?)\.", PAGE, flags=re.MULTILINE)
    assert set(re.findall(r"`(\w+)`", request)) <= {field.name for field in fields(RouteRequest)}


def test_the_engine_of_the_page_keeps_the_contract(installed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines, "DIALECTS", {**engines.DIALECTS, "tgi": type(dialect("tgi"))})
    monkeypatch.setitem(METRICS, "tgi", (installed / "extras/scrape").read_text())
    assert held_to(engine_contract, "tgi") >= 6


def test_the_engine_of_the_page_reads_its_scrape_and_no_other(installed: Path) -> None:
    text = (installed / "extras/scrape").read_text()
    sample = dialect("tgi").read_metrics(text)
    assert (sample.running_requests, sample.queued_requests, sample.used_tokens) == (12.0, 3.0, None)
    for other in METRICS:
        assert dialect(other).read_metrics(text) == type(sample)()


@pytest.mark.usefixtures("installed")
def test_the_engine_of_the_page_may_be_named_in_regions_yaml() -> None:
    text = (ROOT / "regions.yaml").read_bytes().replace(b"engine: sglang", b"engine: tgi", 1)
    assert parse_config(text).replicas[0].engine == "tgi"


@pytest.mark.usefixtures("installed")
def test_the_optimizer_of_the_page_keeps_the_contract(monkeypatch: pytest.MonkeyPatch) -> None:
    kind = type(make_optimizer("coordinate", optimizer_contract.BOX, {}, np.random.default_rng(0)))
    monkeypatch.setitem(optimizers.OPTIMIZERS, "coordinate", kind)
    assert held_to(optimizer_contract, "coordinate") >= 12


@pytest.mark.usefixtures("installed")
def test_the_optimizer_of_the_page_finds_the_bottom_of_a_bowl() -> None:
    best = {"a": 0.2, "b": 4.0}
    box = LogBox(tuple(WeightSpec(name, 1.0, 1e-3, 1e3, "any") for name in best))
    for seed in range(20):
        optimizer = make_optimizer("coordinate", box, {}, np.random.default_rng(seed), budget=80)
        while optimizer.stop() is None:
            weights = optimizer.ask()
            optimizer.tell(weights, sum(log(weights[name] / best[name]) ** 2 for name in best))
        assert all(abs(log(optimizer.incumbent[name] / best[name])) < 0.1 for name in best)


@pytest.mark.usefixtures("installed")
def test_gorgo_tune_takes_the_optimizer_of_the_page_by_its_name() -> None:
    refused = CliRunner().invoke(app, ["tune", "--algorithm", "adam"])
    assert refused.exit_code == 2
    assert "coordinate" in re.sub(r"\W+", " ", refused.stderr)


def test_commands_of_the_page_exist() -> None:
    assert check_gorgo_lines(PAGE) >= 5
