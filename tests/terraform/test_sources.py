"""terraform/ as text: formatted, generated from what it says, pinned, described."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.terraform.workspace import ROOT, Workspace

TERRAFORM = ROOT / "terraform"
SOURCES = sorted(TERRAFORM.rglob("*.tf")) + sorted(TERRAFORM.rglob("*.tftest.hcl"))
PLACES = {"us-ashburn": "us-east-1", "eu-frankfurt": "eu-central-1"}


@pytest.fixture(scope="module")
def generate() -> ModuleType:
    spec = importlib.util.spec_from_file_location("terraform_generate", TERRAFORM / "generate.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def fleet(*homes: str, router: str = "us-ashburn") -> dict[str, Any]:
    regions = [{"name": name} for name in ("us-ashburn", "eu-frankfurt", "eu.frankfurt")]
    return {"proxy": {"region": router}, "regions": regions, "replicas": [{"region": home} for home in homes]}


def test_sources_are_formatted(terraform: None) -> None:
    command = ["terraform", "fmt", "-check", "-recursive", "-diff", str(TERRAFORM)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_sources_are_parsed_by_a_second_parser() -> None:
    hcl2 = pytest.importorskip("hcl2", reason="TERRAFORM PARSE SKIPPED: python-hcl2 is not installed; terraform parses")
    for path in SOURCES:
        assert hcl2.loads(path.read_text()) is not None, path


def test_the_generated_file_is_what_regions_and_places_ask_for() -> None:
    command = [sys.executable, str(TERRAFORM / "generate.py"), "--check"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_generating_writes_and_then_has_nothing_to_write(generate: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "places.yaml").write_text((TERRAFORM / "envs/paper/places.yaml").read_text())
    arguments = ["--environment", str(tmp_path), "--regions", str(ROOT / "regions.yaml")]
    assert generate.main([*arguments, "--check"]) == 1
    assert generate.main(arguments) == 0
    assert generate.main([*arguments, "--check"]) == 0
    (tmp_path / generate.FILE).write_text("# by hand\n")
    assert generate.main([*arguments, "--check"]) == 1


def test_a_region_with_the_router_alone_has_no_replicas_and_no_link_to_itself(generate: ModuleType) -> None:
    text = generate.rendered(fleet("eu-frankfurt"), PLACES)
    assert re.findall(r'^module "(\w+)"', text, re.MULTILINE) == [
        "network_us_ashburn",
        "network_eu_frankfurt",
        "replicas_eu_frankfurt",
        "peering_eu_frankfurt",
        "router",
        "balancer",
        "store",
    ]


def test_a_region_that_is_not_used_costs_nothing(generate: ModuleType) -> None:
    assert "frankfurt" not in generate.rendered(fleet("us-ashburn"), PLACES)


def test_a_region_without_a_place_is_refused_by_name(generate: ModuleType) -> None:
    with pytest.raises(generate.PlaceError, match="no place for eu-frankfurt"):
        generate.rendered(fleet("eu-frankfurt"), {"us-ashburn": "us-east-1"})


def test_regions_that_terraform_cannot_tell_apart_are_refused(generate: ModuleType) -> None:
    with pytest.raises(generate.PlaceError, match=r"eu-frankfurt and eu\.frankfurt"):
        generate.rendered(fleet("eu-frankfurt", "eu.frankfurt"), PLACES | {"eu.frankfurt": "eu-west-1"})


def test_every_variable_and_output_has_a_description_and_every_variable_a_type() -> None:
    for path in sorted(TERRAFORM.rglob("*.tf")):
        for kind, name, body in re.findall(r'^(variable|output) "(\w+)" \{\n(.*?)^\}', path.read_text(), re.M | re.S):
            assert re.search(r"^  description\s*= \"\S", body, re.MULTILINE), f"{path}: {name}"
            assert kind == "output" or re.search(r"^  type\s*= ", body, re.MULTILINE), f"{path}: {name}"


def test_every_variable_of_the_environment_has_a_row_and_every_row_a_variable() -> None:
    found = re.findall(r'^variable "(\w+)"', (TERRAFORM / "envs/paper/variables.tf").read_text(), re.MULTILINE)
    listed = (TERRAFORM / "README.md").read_text().split("## Variables of envs/paper")[1].split("\n## ")[0]
    assert sorted(re.findall(r"^- `(\w+)` \(", listed, re.MULTILINE)) == sorted(found)


def test_the_provider_is_pinned_to_one_version_everywhere() -> None:
    pins = [pin for path in SOURCES for pin in re.findall(r'^\s+version = "(.*)"', path.read_text(), re.MULTILINE)]
    assert len(pins) >= 5
    assert set(pins) == {"5.100.0"}
    assert 'version     = "5.100.0"' in (TERRAFORM / "envs/paper/.terraform.lock.hcl").read_text()


def test_no_module_but_those_of_a_cloud_needs_a_provider() -> None:
    bare = [path for path in SOURCES if path.is_relative_to(TERRAFORM / "modules") and "aws" not in path.parts]
    assert bare
    assert [
        path for path in bare if re.search(r"required_providers|^(resource|data) \"aws", path.read_text(), re.M)
    ] == []


def test_the_cores_own_tests_pass(workspace: Workspace) -> None:
    workspace.terraform("init", "-backend=false", at="terraform/modules/core")
    said = workspace.terraform("test", "-no-color", at="terraform/modules/core")
    assert re.search(r"Success! \d\d passed, 0 failed", said), said
