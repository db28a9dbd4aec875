"""`follow.sh` of the example of an autoscaling group, with programs in the place of curl and the AWS CLI."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.terraform.workspace import ROOT

FOLLOW = ROOT / "terraform/examples/autoscaling_group/follow.sh"
#: The members of the group: what AWS says of them, and where they are.
MEMBERS = {"i-new": "InService", "i-old": "InService", "i-loading": "InService", "i-left": "Terminating:Wait"}
STATUS = {
    "scaling": [
        {"region": "us", "model": None, "wanted": 9},
        {"region": "eu", "model": "llama", "wanted": 3},
        {"region": "eu", "model": None, "wanted": 5},
    ]
}
_PROGRAM = """#!{python}
import json, os, sys
words = sys.argv[1:]
known = json.loads(os.environ["KNOWN"])
open(os.environ["CALLS"], "a").write(json.dumps([os.path.basename(sys.argv[0]), *words]) + "\\n")
url = next((word for word in words if word.startswith("http")), "")
if "describe-auto-scaling-groups" in words:
    print("".join(state + "\\t" + name + "\\n" for name, state in known["members"].items()), end="")
elif "describe-instances" in words:
    print("10.0.0." + str(1 + sorted(known["members"]).index(words[words.index("--instance-ids") + 1])))
elif url.endswith("/admin/status"):
    if known["status"] is None:
        sys.exit(22)
    print(json.dumps(known["status"]))
elif url.endswith("/admin/fleet"):
    print(json.dumps({{"replicas": [{{"name": name, "registered": True}} for name in known["registered"]]}}))
elif url.endswith("/v1/models"):
    sys.exit(0 if url.split("//")[1].split(":")[0] in known["answering"] else 7)
elif url.endswith("/metrics"):
    print('sglang:num_running_reqs{{model_name="m"}} ' + str(known["running"]))
"""


def followed(folder: Path, **changes: Any) -> tuple[int, list[list[str]]]:
    """One pass: its exit status, and the calls that change something."""
    if shutil.which("jq") is None:
        pytest.skip("FOLLOW TESTS SKIPPED: there is no `jq` on the PATH")
    known: dict[str, Any] = {
        "members": MEMBERS,
        "status": STATUS,
        "registered": ["i-old", "i-left"],
        "answering": ["10.0.0.3", "10.0.0.4"],  # of i-new and i-old
        "running": 0,
    }
    for name in ("aws", "curl"):
        (folder / name).write_text(_PROGRAM.format(python=sys.executable))
        (folder / name).chmod(0o755)
    calls = folder / "calls"
    calls.touch()
    own = {"GROUP": "engines", "REGION": "eu", "MODEL": "none", "PORT": "30000", "GORGO_ADMIN_TOKEN": "t"}
    places = {"PATH": f"{folder}:{os.environ['PATH']}", "CALLS": str(calls), "KNOWN": json.dumps(known | changes)}
    done = subprocess.run(
        ["bash", str(FOLLOW), "--once"], env=os.environ | own | places, capture_output=True, text=True, check=False
    )
    rows = [json.loads(line) for line in calls.read_text().splitlines()]
    changing = ("set-desired-capacity", "complete-lifecycle-action", "POST", "DELETE")
    return done.returncode, [row for row in rows if any(word in row for word in changing)]


def test_the_group_gets_the_number_of_its_region_and_model(tmp_path: Path) -> None:
    code, calls = followed(tmp_path)
    assert code == 0
    assert calls[0][3:] == ["--auto-scaling-group-name", "engines", "--desired-capacity", "5"]


def test_an_instance_is_registered_once_its_engine_answers_and_removed_before_it_ends(tmp_path: Path) -> None:
    _, calls = followed(tmp_path)
    (added,) = [row for row in calls if "POST" in row]
    assert json.loads(added[-1]) == {"name": "i-new", "region": "eu", "url": "http://10.0.0.3:30000"}
    (removed,) = [row for row in calls if "DELETE" in row]
    assert any(word.endswith("/admin/replicas/i-left") for word in removed)
    assert not [row for row in calls if "complete-lifecycle-action" in row], "its answers are open"


@pytest.mark.parametrize(("running", "ended"), [(2, 0), (0, 1)])
def test_an_instance_ends_when_its_last_answer_has(tmp_path: Path, running: int, ended: int) -> None:
    _, calls = followed(tmp_path, registered=["i-old", "i-new"], running=running)
    found = [row for row in calls if "complete-lifecycle-action" in row]
    assert len(found) == ended
    assert all("i-left" in row for row in found)


@pytest.mark.parametrize("status", [None, {"scaling": []}])
def test_without_a_number_the_size_stays(tmp_path: Path, status: Any) -> None:
    _, calls = followed(tmp_path, status=status)
    assert not [row for row in calls if "set-desired-capacity" in row]
