"""`terraform/roll.py` with programs in the place of terraform and the AWS CLI, which write down how they are called."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.documents import ROOT

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
