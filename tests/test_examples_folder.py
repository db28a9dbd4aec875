"""The files of `examples/`, and the page for people who come from other routers, name what there is."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from gorgo.cli.tune.options import read_settings
from gorgo.config.load import load_config
from gorgo.live.http.headers import SESSION_HEADERS
from gorgo.live.request_options import SLO_HEADERS
from gorgo.policies.registry import POLICIES
from tests.cli.test_processes import fleet, output
from tests.documents import ROOT, code, tables

EXAMPLES = ROOT / "examples"
FLEETS = sorted(EXAMPLES.glob("two-*.yaml"))


@pytest.mark.parametrize("path", FLEETS, ids=lambda path: path.name)
def test_a_fleet_of_the_examples_is_valid(path: Path) -> None:
    assert len(load_config(path).replicas) >= 2


def test_the_settings_of_the_example_are_those_of_a_tuner() -> None:
    assert read_settings(EXAMPLES / "tune.yaml").pairs == 30


def test_the_client_of_the_examples_prints_the_replica_and_the_answer(tmp_path: Path) -> None:
    script = (EXAMPLES / "client.py").read_text()
    with fleet(tmp_path) as (url, _, _, _):
        replaced = script.replace("http://127.0.0.1:8080", url)
        assert replaced != script
        first, answer = output([sys.executable, "-c", replaced]).splitlines()
    assert first == "replica us-ashburn-0 in us-ashburn"
    assert len(answer) == 8 * 4  # eight tokens of four bytes


def test_every_example_is_listed_with_its_purpose() -> None:
    listed = re.findall(r"^- \[([^\]]+)\]\(\1\): .+$", (EXAMPLES / "README.md").read_text(), re.MULTILINE)
    assert sorted(listed) == sorted(path.name for path in EXAMPLES.iterdir() if path.name != "README.md")


def _ours() -> Iterator[str]:
    """Names of the second column of each table, which are the project's own; the first table has commands there."""
    overview, *of_routers = tables((ROOT / "docs/migrating.md").read_text())
    assert overview[0][:2] == ["You run", "Start with"]
    assert len(of_routers) == 7
    for columns, rows in of_routers:
        assert columns[1:] == ["GORGO", "What is different"]
        for row in rows:
            yield from code(row[1])


def test_every_name_of_ours_beside_another_router_s_is_in_the_reference() -> None:
    reference = code((ROOT / "docs/reference.md").read_text())
    sources = {name.removeprefix("fleet_sources[].") for name in reference if name.startswith("fleet_sources[].")}
    known = {*reference, *sources, *POLICIES}
    known |= {name.decode() for name in (*SESSION_HEADERS, *SLO_HEADERS)}
    known |= {"regions.yaml", "tau", "${NAME}", "GORGO_ADMIN_TOKEN"}
    ours = list(_ours())
    assert len(ours) > 40
    assert [name for name in ours if name not in known] == []
