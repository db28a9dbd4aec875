"""terraform/ as text: formatted, generated from what it says, pinned, described; and `terraform/roll.py`."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.terraform.workspace import ROOT, Workspace

# --- terraform/ as text: formatted, generated from what it says, pinned, described.


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


# --- `terraform/roll.py` with programs in the place of terraform and the AWS CLI, which write down how they are
# called.


ROLL = ROOT / "terraform/roll.py"
OUTPUTS = {
    "router_target_group_arn": "arn:group",
    "secret_names": {"place": "us-east-1"},
    "router_has_history": True,
    "router_instance_ids": {"gorgo-router": "i-1", "gorgo-router-2": "i-2"},
}
_TERRAFORM = """#!{python}
import json, os, sys
words = sys.argv[2:]
if words[0] == "output":
    print(json.dumps(json.load(open(os.environ["OUTPUTS"]))[words[-1]]))
else:
    open(os.environ["CALLS"], "a").write("terraform " + " ".join(words) + "\\n")
"""
_AWS = """#!{python}
import os, sys
open(os.environ["CALLS"], "a").write("aws " + " ".join(sys.argv[1:]) + "\\n")
sys.exit("i-1" in sys.argv[-1] and os.environ.get("FAILS", "") == "1")
"""


def rolled(folder: Path, outputs: dict[str, object], **environ: str) -> tuple[int, str, list[str]]:
    for name, text in (("terraform", _TERRAFORM), ("aws", _AWS)):
        program = folder / name
        program.write_text(text.format(python=sys.executable))
        program.chmod(0o755)
    (folder / "outputs.json").write_text(json.dumps(outputs))
    calls = folder / "calls"
    calls.touch()
    places = {"PATH": f"{folder}:{os.environ['PATH']}", "OUTPUTS": str(folder / "outputs.json"), "CALLS": str(calls)}
    done = subprocess.run(
        [sys.executable, str(ROLL), "--yes", "--environment", str(folder)],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | places | environ,
    )
    return done.returncode, done.stderr, calls.read_text().splitlines()


def test_each_router_is_in_service_before_the_next_is_replaced(tmp_path: Path) -> None:
    code, _, calls = rolled(tmp_path, OUTPUTS)
    assert code == 0
    assert [call.split()[0] for call in calls] == ["terraform", "aws", "terraform", "aws", "terraform"]
    for call, name in ((calls[0], "gorgo-router"), (calls[2], "gorgo-router-2")):
        assert f'-target=module.router.aws_instance.this["{name}"]' in call
        assert f'-target=module.router.aws_volume_attachment.history["{name}"]' in call
        assert call.count("-target=") == 5
    for call, machine in ((calls[1], "i-1"), (calls[3], "i-2")):
        wait = "aws elbv2 wait target-in-service --region us-east-1 --target-group-arn arn:group"
        assert call == f"{wait} --targets Id={machine}"
    assert "-target" not in calls[4], "the rest"


def test_a_router_that_does_not_come_back_ends_it_before_the_next(tmp_path: Path) -> None:
    code, said, calls = rolled(tmp_path, OUTPUTS, FAILS="1")
    assert code == 1
    assert "aws elbv2 wait ended with 1; the routers after it are as they were" in said
    assert len(calls) == 2


@pytest.mark.parametrize("changed", [{"router_target_group_arn": None}])
def test_one_router_is_not_rolled(changed: dict[str, object], tmp_path: Path) -> None:
    code, said, calls = rolled(tmp_path, OUTPUTS | changed)
    assert (code, calls) == (1, [])
    assert "use `terraform apply`" in said


def test_targets_are_resources_of_the_modules_with_an_instance_per_machine() -> None:
    said = ROLL.read_text()
    for module, constant in (("router", "PARTS"), ("balancer", "BALANCED")):
        (listed,) = re.findall(rf"^{constant} = \((.*)\)$", said, re.MULTILINE)
        text = (ROOT / f"terraform/modules/aws/{module}/main.tf").read_text()
        for kind, name in re.findall(r'"(\w+)\.(\w+)"', listed):
            resource = text.split(f'resource "{kind}" "{name}" {{')[1]
            assert "for_each" in resource.split("\n}")[0], kind
