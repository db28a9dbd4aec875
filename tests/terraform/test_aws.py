"""The AWS modules against the provider's own schema, a policy scanner, and a cloud that is none (moto)."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from gorgo.config.load import load_config
from tests.system.environments import Environment
from tests.terraform.workspace import ROOT, Workspace

pytestmark = pytest.mark.system


PAPER = "terraform/envs/paper"
PLACES = {"us_ashburn": "us-east-1", "eu_frankfurt": "eu-central-1", "ap_seoul": "ap-northeast-2"}
#: Serves moto on a free loopback port, says which, and ends when its standard input does.
MOTO = """
import sys
from moto.server import ThreadedMotoServer

server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
server.start()
print(server.get_host_and_port()[1], flush=True)
sys.stdin.read()
server.stop()
"""
#: Names images as the public parameters do, which moto lacks; in every region.
IMAGES = """
import sys
import boto3

for region in sys.argv[2:]:
    image = boto3.client("ec2", region_name=region, endpoint_url=sys.argv[1]).describe_images()["Images"][0]["ImageId"]
    ssm = boto3.client("ssm", region_name=region, endpoint_url=sys.argv[1])
    ssm.put_parameter(Name="/test/image", Value=image, Type="String")
"""
#: Prints, as JSON, what is there that costs or stays.
LEFT = """
import json
import sys
import boto3

left = {}
for region in sys.argv[2:]:
    ec2 = boto3.client("ec2", region_name=region, endpoint_url=sys.argv[1])
    left[region] = {
        "instances": [
            i["PrivateIpAddress"] for r in ec2.describe_instances()["Reservations"] for i in r["Instances"]
            if i["State"]["Name"] not in ("terminated", "shutting-down")
        ],
        # moto gives a machine of a launch template 8 GiB more, without a tag, which nothing has or deletes.
        "volumes": [
            v["VolumeId"] for v in ec2.describe_volumes()["Volumes"] if v["Size"] != 8 or v.get("Tags")
        ],
        "addresses": [a["PublicIp"] for a in ec2.describe_addresses()["Addresses"]],
        "gateways": [g["NatGatewayId"] for g in ec2.describe_nat_gateways()["NatGateways"] if g["State"] != "deleted"],
        "networks": [v["VpcId"] for v in ec2.describe_vpcs()["Vpcs"] if not v["IsDefault"]],
        "peerings": [
            p["VpcPeeringConnectionId"] for p in ec2.describe_vpc_peering_connections()["VpcPeeringConnections"]
            if p["Status"]["Code"] != "deleted"
        ],
        "balancers": [
            b["LoadBalancerName"]
            for b in boto3.client("elbv2", region_name=region, endpoint_url=sys.argv[1])
            .describe_load_balancers()["LoadBalancers"]
        ],
        "groups": [
            g["AutoScalingGroupName"]
            for g in boto3.client("autoscaling", region_name=region, endpoint_url=sys.argv[1])
            .describe_auto_scaling_groups()["AutoScalingGroups"]
        ],
        "logs": boto3.client("logs", region_name=region, endpoint_url=sys.argv[1]).describe_log_groups()["logGroups"],
    }
left["roles"] = [r["RoleName"] for r in boto3.client("iam", endpoint_url=sys.argv[1]).list_roles()["Roles"]]
left["buckets"] = [b["Name"] for b in boto3.client("s3", endpoint_url=sys.argv[1]).list_buckets()["Buckets"]]
print(json.dumps(left))
"""


def test_the_lock_file_fits_and_the_configuration_is_valid(aws: Workspace) -> None:
    assert "Success" in aws.terraform("validate", "-no-color", at=PAPER)


def test_the_example_of_a_group_that_follows_the_number_is_valid(aws: Workspace, plugins: Path) -> None:
    example = "terraform/examples/autoscaling_group"
    aws.terraform("init", "-backend=false", f"-plugin-dir={plugins}", at=example)
    assert "Success" in aws.terraform("validate", "-no-color", at=example)


def test_the_papers_fleet_and_each_module_on_a_mocked_provider(aws: Workspace) -> None:
    said = aws.terraform("test", "-no-color", at=PAPER)
    assert re.search(r"Success! \d+ passed, 0 failed", said), said


def test_a_policy_scanner_has_no_finding_without_a_reason(cloud: Environment, tmp_path: Path) -> None:
    folder = Workspace.copied(tmp_path).folder / "terraform"
    command = [str(cloud.folder / "bin" / "checkov"), "--directory", str(folder), "--framework", "terraform"]
    done = subprocess.run(
        [*command, "--skip-download", "--compact", "--output", "json"], capture_output=True, text=True, check=False
    )
    report = json.loads(done.stdout)
    results = report["results"]
    assert results["parsing_errors"] == []
    assert [(one["check_id"], one["resource"], one["file_path"]) for one in results["failed_checks"]] == []
    assert report["summary"]["passed"] > 100, "it looked at something"
    assert all(len(one["check_result"]["suppress_comment"]) > 20 for one in results["skipped_checks"])


class Moto:
    """A cloud on loopback."""

    def __init__(self, environment: Environment, url: str) -> None:
        self.environment, self.url = environment, url

    def run(self, program: str) -> str:
        command = [str(self.environment.python), "-c", program, self.url, *PLACES.values()]
        environ = os.environ | CREDENTIALS
        return subprocess.run(command, env=environ, check=True, capture_output=True, text=True).stdout

    def left(self) -> dict[str, Any]:
        return dict(json.loads(self.run(LEFT)))


#: Made up: moto takes any. The region is for clients of services that have none.
CREDENTIALS = {
    "AWS_ACCESS_KEY_ID": "test",
    "AWS_SECRET_ACCESS_KEY": "test",
    "AWS_EC2_METADATA_DISABLED": "true",
    "AWS_DEFAULT_REGION": "us-east-1",
}


@pytest.fixture
def moto(cloud: Environment) -> Iterator[Moto]:
    command = [str(cloud.python), "-c", MOTO]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=os.environ | CREDENTIALS
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            made = Moto(cloud, f"http://127.0.0.1:{int(process.stdout.readline())}")
            made.run(IMAGES)
            yield made
        finally:
            process.stdin.close()
            process.wait(timeout=30)


def override(url: str) -> str:
    """Each provider pointed at that cloud alone: whatever it would call beside these has nowhere to go."""
    endpoints = "".join(
        f'    {service} = "{url}"\n' for service in ("autoscaling", "ec2", "elbv2", "iam", "s3", "ssm", "sts")
    )
    return "".join(
        f'provider "aws" {{\n  alias = "{alias}"\n  s3_use_path_style = true\n  skip_metadata_api_check = true\n'
        f"  endpoints {{\n{endpoints}  }}\n}}\n"
        for alias in PLACES
    )


@pytest.mark.parametrize(("routers", "spot"), [(1, False), (2, False), (1, True)])
def test_apply_makes_the_papers_fleet_and_destroy_leaves_nothing(
    aws: Workspace, moto: Moto, monkeypatch: pytest.MonkeyPatch, routers: int, spot: bool
) -> None:
    for name, value in CREDENTIALS.items():
        monkeypatch.setenv(name, value)
    paper = aws.folder / PAPER
    (paper / "cloud_override.tf").write_text(override(moto.url))
    (paper / "test.auto.tfvars.json").write_text(
        json.dumps(
            {
                "server_name": "llm.example.org",
                "client_cidrs": ["198.51.100.0/24"],
                "engine_image": f"lmsysorg/sglang@sha256:{'5' * 64}",
                "wheel": "tests/gorgo_router-0.0.0-py3-none-any.whl",
                "router_image_parameter": "/test/image",
                "gpu_image_parameter": "/test/image",
                "routers": routers,
                "spot": spot,
            }
        )
    )
    before = moto.left()

    aws.terraform("apply", "-auto-approve", "-no-color", at=PAPER)
    there = moto.left()
    config = load_config(paper / "generated/regions.generated.yaml")
    hosts = {replica.url.removeprefix("http://").split(":")[0] for replica in config.replicas}
    addresses = {f"10.64.0.{10 + number}" for number in range(routers)}
    found = {ip for place in PLACES.values() for ip in there[place]["instances"]}
    groups = [name for place in PLACES.values() for name in there[place]["groups"]]
    if spot:
        # No machine of moto boots, so none takes its address.
        assert len(groups) == len(hosts)
        # Each router has a second one, of the history.
        volumes = [name for place in PLACES.values() for name in there[place]["volumes"]]
        assert len(volumes) == len(hosts) + 2 * routers
        assert found.isdisjoint(hosts), "the group's machines begin with addresses that are no replica's"
        assert addresses < found
    else:
        assert (found, groups) == (hosts | addresses, [])
    assert there["us-east-1"]["balancers"] == ["gorgo-paper-routers"] * (routers - 1)
    assert len(there["us-east-1"]["peerings"]) == 2
    assert there["buckets"] == ["gorgo-paper-123456789012"]
    assert len(there["roles"]) == len(before["roles"]) + 4

    aws.terraform("destroy", "-auto-approve", "-no-color", at=PAPER)
    assert moto.left() == before
    assert list((paper / "generated").iterdir()) == []


# --- The router's install script, run for real: the wheel and the lock file, from a store that is a folder.


@pytest.fixture
def wheel(tmp_path: Path) -> Path:
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    done = subprocess.run([*command, "-w", str(tmp_path), str(ROOT)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return next(tmp_path.glob("gorgo_router-*.whl"))


def installer(rendered: dict[str, Any], wheel: Path, folder: Path) -> Path:
    """The script with this wheel's hashes in place of the made-up ones, and folders below `folder`."""
    (text,) = [
        one["content"]
        for one in yaml.safe_load(rendered["core"]["router"]["user_data"])["write_files"]
        if one["path"] == "/usr/local/sbin/gorgo-install"
    ]
    for made_up, path in ((b"wheel", wheel), (b"lock", ROOT / "requirements.lock")):
        text = text.replace(hashlib.sha256(made_up).hexdigest(), hashlib.sha256(path.read_bytes()).hexdigest())
    text = text.replace("gorgo_router-0.2.0-py3-none-any.whl", wheel.name).replace("/opt/gorgo", str(folder / "opt"))
    (folder / "gorgo-install").write_text(text)
    (folder / "store").mkdir()
    shutil.copy(wheel, folder / "store")
    shutil.copy(ROOT / "requirements.lock", folder / "store")
    (folder / "bin").mkdir()
    (folder / "bin/aws").write_text(f'#!/bin/bash\ncp "{folder}/store/${{4##*/}}" "$5"\n')
    (folder / "bin/aws").chmod(0o755)
    (folder / "bin/dnf").write_text("#!/bin/bash\n[[ $* == 'install --assumeyes --quiet nginx python3.11' ]]\n")
    (folder / "bin/dnf").chmod(0o755)
    (folder / "bin/python3.11").symlink_to(sys.executable)
    return folder / "gorgo-install"


def run(script: Path) -> subprocess.CompletedProcess[str]:
    environ = os.environ | {"PATH": f"{script.parent / 'bin'}:{os.environ['PATH']}"}
    return subprocess.run(
        ["nice", "-n", "19", "bash", str(script)], env=environ, capture_output=True, text=True, check=False
    )


def test_the_wheel_runs_with_what_the_lock_file_says_and_without_the_developers_tools(
    rendered: dict[str, Any], wheel: Path, tmp_path: Path
) -> None:
    script = installer(rendered, wheel, tmp_path)
    done = run(script)
    assert done.returncode == 0, done.stderr
    programs = tmp_path / "opt/venv/bin"
    version = subprocess.run([programs / "gorgo", "--version"], capture_output=True, text=True, check=True).stdout
    assert wheel.name.split("-")[1] in version
    listed = subprocess.run(
        [programs / "python", "-m", "pip", "list", "--format=freeze"], capture_output=True, text=True, check=True
    ).stdout
    locked = (ROOT / "requirements.lock").read_text()
    installed = [
        line for line in listed.lower().splitlines() if line.split("==")[0] not in ("gorgo-router", "pip", "setuptools")
    ]
    assert len(installed) > 10
    assert [line for line in installed if line.replace("_", "-") not in locked.lower().replace("_", "-")] == []
    assert not {"pytest", "mypy", "ruff"} & {line.split("==")[0] for line in installed}
    assert run(script).returncode == 0, "once more changes nothing"


def test_a_wheel_that_was_changed_on_the_way_is_not_installed(
    rendered: dict[str, Any], wheel: Path, tmp_path: Path
) -> None:
    script = installer(rendered, wheel, tmp_path)
    with (tmp_path / "store" / wheel.name).open("ab") as file:
        file.write(b"more")
    done = run(script)
    assert done.returncode != 0
    assert "FAILED" in done.stdout + done.stderr
    assert not (tmp_path / "opt/venv").exists()
