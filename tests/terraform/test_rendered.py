"""What machines are told: cloud-init, systemd units, scripts, regions.yaml, and nginx itself with the router's file."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import socket
import ssl
import stat
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from http.client import HTTPSConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import pairwise
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import yaml

from gorgo.cli import app
from gorgo.config.load import load_config
from gorgo.live.peer_store.connection import connection_arguments, group_key
from gorgo.live.replica_secrets import api_key
from tests.ports import free_port
from tests.terraform.workspace import ROOT, Workspace

# --- What machines are told: cloud-init, systemd units, scripts, the router's regions.yaml; by rules written by hand.


#: What a secret would look like if one had got into a text: a name that says so, and a value that is no reference.
SECRET = re.compile(
    r"(?i)(token|secret|password|key)\w*[ =:]+[\"']?(?![$%/\"'(-])[A-Za-z0-9_+/-]{16,}|BEGIN [A-Z ]*KEY|AKIA"
)
#: Before the keys of instances that are in a group.
GROUPED = "grouped-"
#: Units that the distribution has; stubs stand for them.
DISTRIBUTION = (
    "docker.service",
    "basic.target",
    "multi-user.target",
    "network-online.target",
    "shutdown.target",
    "sysinit.target",
    "timers.target",
)


def cloud_init(text: str) -> dict[str, Any]:
    assert text.startswith("#cloud-config\n")
    document = yaml.safe_load(text)
    assert isinstance(document, dict)
    return document


@pytest.fixture(scope="module")
def core(rendered: dict[str, Any]) -> dict[str, Any]:
    return dict(rendered["core"])


@pytest.fixture(scope="module")
def first_boots(core: dict[str, Any], rendered: dict[str, Any]) -> dict[str, str]:
    """First-boot texts: every instance's, alone and in a group, and the router's."""
    alone = {key: one["user_data"] for key, one in core["instances"].items()}
    grouped = {f"{GROUPED}{key}": one["user_data"] for key, one in rendered["pair"]["instances"].items()}
    return alone | grouped | {"router": core["router"]["user_data"]}


@pytest.fixture(scope="module")
def files(first_boots: dict[str, str]) -> dict[str, dict[str, str]]:
    """By machine: text by path."""
    return {
        machine: {one["path"]: one["content"] for one in cloud_init(text)["write_files"]}
        for machine, text in first_boots.items()
    }


def script(files: dict[str, dict[str, str]], machine: str, name: str, folder: Path) -> Path:
    """That script with the machine's folders below `folder`, where a fake `aws` and `systemctl` are on its PATH."""
    text = files[machine][f"/usr/local/sbin/{name}"]
    for place in ("/run/gorgo", "/etc/gorgo"):
        text = text.replace(place, f"{folder}{place}")
        (folder / place[1:]).parent.mkdir(parents=True, exist_ok=True)
    path = folder / name
    path.write_text(text)
    return path


def fake(folder: Path, name: str, text: str) -> None:
    path = folder / "bin" / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(f"#!/bin/bash\n{text}")
    path.chmod(0o755)


def run(path: Path, *arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    environ = os.environ | {"PATH": f"{path.parent / 'bin'}:{os.environ['PATH']}"} | environ
    return subprocess.run(["bash", str(path), *arguments], env=environ, capture_output=True, text=True, check=False)


# -- the router's configuration
def test_the_generated_file_is_accepted_and_says_what_is_started(core: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "regions.yaml").write_text(core["regions_generated"])
    config = load_config(tmp_path / "regions.yaml")
    assert {r.name: r.url for r in config.replicas} == {
        name: f"http://{engine['address']}:{engine['port']}" for name, engine in core["engines"].items()
    }
    assert {r.capacity.max_running_requests for r in config.replicas} == {64}
    assert config.proxy.bind.startswith("127.0.0.1:")
    assert config.proxy.admin_bind.startswith("127.0.0.1:")


def test_gorgo_check_accepts_the_file_that_apply_writes(rendered: dict[str, Any], workspace: Workspace) -> None:
    from typer.testing import CliRunner

    path = workspace.folder / "terraform/written/regions.generated.yaml"
    assert path.read_text() == rendered["core"]["regions_generated"]
    result = CliRunner().invoke(app, ["check", "--config", str(path)], env={"GORGO_ENGINE_KEY": "k"})
    assert result.exit_code == 0, result.output
    assert "3 replicas in 3 regions" in result.output


def test_what_people_wrote_is_kept(core: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "regions.yaml").write_text(core["regions_generated"])
    ours, theirs = load_config(tmp_path / "regions.yaml"), load_config(Path(__file__).parents[2] / "regions.yaml")
    assert (ours.limits, ours.regions, ours.simulation) == (theirs.limits, theirs.regions, theirs.simulation)
    assert ours.proxy.policy == theirs.proxy.policy
    assert [r.name for r in ours.replicas] == [r.name for r in theirs.replicas]


def test_the_engines_key_comes_by_the_name_that_the_script_writes(
    core: dict[str, Any], files: dict[str, dict[str, str]], tmp_path: Path
) -> None:
    (tmp_path / "regions.yaml").write_text(core["regions_generated"])
    (name,) = {r.api_key_env for r in load_config(tmp_path / "regions.yaml").replicas}
    assert f"{name}=%s" in files["router"]["/usr/local/sbin/gorgo-secrets"]
    assert api_key(load_config(tmp_path / "regions.yaml").replicas[0], {str(name): "k" * 20}) == "k" * 20


# -- cloud-init
def test_first_boot_texts_are_cloud_configs_within_the_clouds_limit(first_boots: dict[str, str]) -> None:
    for machine, text in first_boots.items():
        assert set(cloud_init(text)) <= {"users", "write_files", "runcmd"}, machine
        assert len(text.encode()) <= 16384, machine


def test_every_unit_written_is_started_and_every_one_started_is_written(
    first_boots: dict[str, str], files: dict[str, dict[str, str]]
) -> None:
    for machine, text in first_boots.items():
        (enable,) = [line for line in cloud_init(text)["runcmd"] if line[:2] == ["systemctl", "enable"]]
        written = {Path(path).name for path in files[machine] if path.startswith("/etc/systemd/system/")}
        assert {word for word in enable[2:] if not word.startswith("-")} == written, machine


def test_no_text_holds_a_secret(rendered: dict[str, Any]) -> None:
    assert SECRET.search("GORGO_ADMIN_TOKEN=abcdefghijklmnop1234")
    assert SECRET.search("-----BEGIN PRIVATE KEY-----")
    for line in json.dumps(rendered).replace("\\n", "\n").splitlines():
        assert not SECRET.search(line), line


def test_idle_connections_keep_their_window_everywhere(files: dict[str, dict[str, str]]) -> None:
    for machine, texts in files.items():
        assert "net.ipv4.tcp_slow_start_after_idle = 0" in texts["/etc/sysctl.d/90-gorgo.conf"], machine


def test_engines_start_with_what_the_router_needs_of_them(core: dict[str, Any]) -> None:
    for name, words in engine_calls(core).items():
        assert {"--enable-metrics", "--enable-cache-report"} <= set(words), name
        flags = dict(pairwise(words))
        assert (flags["--max-running-requests"], flags["--tp-size"]) == ("64", "2")
        assert (flags["--model-path"], flags["--context-length"]) == ("Qwen/Qwen3.5-35B-A3B-FP8", "32768")
        assert flags["--gpus"] == '"device=0,1"'


def engine_calls(core: dict[str, Any]) -> dict[str, list[str]]:
    """By replica: words of the line that starts its engine."""
    units = {name: core["engine_units"][f"gorgo-engine-{name}.service"] for name in core["engines"]}
    return {name: shlex.split(re.findall(r"^ExecStart=(.*)", unit, re.M)[0]) for name, unit in units.items()}


def test_an_engines_key_is_in_a_file_and_in_no_option_or_variable(
    core: dict[str, Any], files: dict[str, dict[str, str]]
) -> None:
    secrets = files[next(iter(core["instances"]))]["/usr/local/sbin/gorgo-secrets"]
    for name, words in engine_calls(core).items():
        assert "--api-key" not in words, name
        assert not [word for word in words if "KEY" in word or word.startswith("--env")], name
        assert dict(pairwise(words))["--config"] == "/run/gorgo/engine.yaml"
        assert "/run/gorgo/engine.yaml:/run/gorgo/engine.yaml:ro" in words, name
        assert "> /run/gorgo/engine.yaml" in secrets


def test_an_engine_has_a_network_of_its_own_with_one_published_port(core: dict[str, Any]) -> None:
    """The instance metadata service answers within one hop: containers on the host's network are within it."""
    for name, words in engine_calls(core).items():
        engine, flags = core["engines"][name], dict(pairwise(words))
        assert not [word for word in words if word.startswith(("--network", "--net"))], name
        assert flags["--publish"] == f"{engine['address']}:{engine['port']}:{engine['port']}"
        assert (flags["--host"], flags["--port"]) == ("0.0.0.0", str(engine["port"]))
        assert flags["--sysctl"] == "net.ipv4.tcp_slow_start_after_idle=0"  # a network of its own has its own settings
        assert flags["--security-opt"] == "no-new-privileges"
    pool = (ROOT / "terraform/modules/aws/replica_pool/main.tf").read_text()
    assert re.search(r"http_put_response_hop_limit\s*= 1\n", pool)


def test_an_engines_image_is_pinned_by_digest(core: dict[str, Any]) -> None:
    for unit in core["engine_units"].values():
        images = re.findall(r"lmsysorg/sglang\S*", unit)
        assert len(images) == 2
        assert all(re.search(r"@sha256:[0-9a-f]{64}$", image) for image in images)


# -- systemd
def test_systemd_accepts_every_unit(core: dict[str, Any], tmp_path: Path) -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("UNIT VERIFICATION SKIPPED: there is no systemd-analyze")
    units = core["router_units"] | core["engine_units"]
    folder = tmp_path / "etc/systemd/system"
    folder.mkdir(parents=True)
    for name in DISTRIBUTION:
        (folder / name).write_text("[Service]\nExecStart=/bin/true\n" if name.endswith(".service") else "[Unit]\n")
    for name, text in units.items():
        (folder / name).write_text(text)
    programs = {program for text in units.values() for program in re.findall(r"^Exec\w+=[-@+!:]*(\S+)", text, re.M)}
    for program in programs | {"/bin/true"}:
        path = tmp_path / program[1:]
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("#!/bin/sh\n")
        path.chmod(0o755)
    command = ["systemd-analyze", "verify", "--man=no", "--generators=no", f"--root={tmp_path}", *units]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""


def test_gorgos_units_call_commands_and_options_that_exist(core: dict[str, Any]) -> None:
    import typer.main

    commands = getattr(typer.main.get_command(app), "commands", {})
    text = "".join(core["router_units"].values())
    calls = [shlex.split(line) for line in re.findall(r"^Exec\w+=\S+/bin/gorgo (.*)", text, re.MULTILINE)]
    assert sorted(call[0] for call in calls) == ["check", "serve", "tune"]
    for call in calls:
        known = {option for parameter in commands[call[0]].params for option in parameter.opts}
        assert {word for word in call if word.startswith("--")} <= known, call


@pytest.mark.parametrize(
    ("name", "user", "capabilities"),
    [
        ("gorgo.service", "gorgo", ""),
        ("gorgo-tuner.service", "gorgo", ""),
        ("gorgo-tls.service", "nginx", "CAP_NET_BIND_SERVICE"),
    ],
)
def test_what_faces_the_network_runs_as_nobody_in_particular_and_comes_back(
    core: dict[str, Any], name: str, user: str, capabilities: str
) -> None:
    unit = core["router_units"][name]
    confined = set(re.findall(r"^(?:Protect|Private|Restrict|NoNew|Lock|SystemCallArch|UMask).*", unit, re.MULTILINE))
    assert {f"User={user}", f"CapabilityBoundingSet={capabilities}"} <= set(unit.splitlines())
    assert re.search(r"^Restart=(always|on-failure)$", unit, re.MULTILINE)
    proxy = core["router_units"]["gorgo.service"]
    assert confined == set(re.findall(r"^(?:Protect|Private|Restrict|NoNew|Lock|SystemCallArch|UMask).*", proxy, re.M))
    assert len(confined) >= 12


# -- scripts
def test_scripts_are_bash(files: dict[str, dict[str, str]], tmp_path: Path) -> None:
    for machine, texts in files.items():
        for path, text in texts.items():
            if path.startswith("/usr/local/sbin/"):
                done = subprocess.run(["bash", "-n"], input=text, capture_output=True, text=True, check=False)
                assert done.returncode == 0, f"{machine} {path}: {done.stderr}"


SECRETS = {
    "engine-key": "engine-0123456789abcdef",
    "admin-token": "admin-0123456789abcdef",
    "client-keys": "client-0123456789abcdef\nclient-fedcba9876543210",
    "tls-certificate": "certificate",
    "tls-key": "private",
}


@pytest.fixture
def parameters(tmp_path: Path) -> Path:
    """A secret store: a file per name, which the fake `aws` reads."""
    store = tmp_path / "store"
    store.mkdir()
    for name, value in SECRETS.items():
        (store / name).write_text(value)
    fake(tmp_path, "aws", f'while [[ $1 != --name ]]; do shift; done\ncat "{store}/${{2##*/}}"\n')
    return store


def test_secrets_go_into_memory_for_root_alone(
    files: dict[str, dict[str, str]], parameters: Path, tmp_path: Path
) -> None:
    done = run(script(files, "router", "gorgo-secrets", tmp_path))
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    memory = tmp_path / "run/gorgo"
    assert (memory / "router.env").read_text() == (
        "GORGO_ADMIN_TOKEN=admin-0123456789abcdef\nGORGO_ENGINE_KEY=engine-0123456789abcdef\n"
    )
    assert (memory / "tuner.env").read_text() == "GORGO_ADMIN_TOKEN=admin-0123456789abcdef\n"
    assert (memory / "bearer.map").read_text().splitlines() == [
        '"~^(?i:Bearer) +client-0123456789abcdef$" 1;',
        '"~^(?i:Bearer) +client-fedcba9876543210$" 1;',
    ]
    assert (memory / "key.map").read_text().splitlines() == [
        '"~^client-0123456789abcdef$" 1;',
        '"~^client-fedcba9876543210$" 1;',
    ]
    assert {stat.S_IMODE(path.stat().st_mode) for path in memory.iterdir()} == {0o600}
    assert stat.S_IMODE(memory.stat().st_mode) == 0o700


@pytest.mark.parametrize("value", ["short", 'quote"0123456789abcdef', "two\nlines-0123456789abcdef"])
def test_a_secret_that_cannot_stand_in_a_file_is_refused_by_name(
    files: dict[str, dict[str, str]], parameters: Path, tmp_path: Path, value: str
) -> None:
    (parameters / "admin-token").write_text(value)
    done = run(script(files, "router", "gorgo-secrets", tmp_path))
    assert done.returncode != 0
    assert "/gorgo/paper/admin-token: expected 20 to 256" in done.stderr
    assert "0123456789abcdef" not in done.stderr
    assert not (tmp_path / "run/gorgo/router.env").exists()


def test_an_engine_gets_its_key_and_no_other(
    files: dict[str, dict[str, str]], parameters: Path, tmp_path: Path, core: dict[str, Any]
) -> None:
    machine = next(iter(core["instances"]))
    done = run(script(files, machine, "gorgo-secrets", tmp_path))
    assert done.returncode == 0, done.stderr
    assert {path.name for path in (tmp_path / "run/gorgo").iterdir()} == {"engine.yaml"}
    settings = tmp_path / "run/gorgo/engine.yaml"
    assert settings.read_text().splitlines()[-1] == 'api-key: "engine-0123456789abcdef"'
    assert yaml.safe_load(settings.read_text()) == {"api-key": "engine-0123456789abcdef"}
    assert stat.S_IMODE(settings.stat().st_mode) == 0o600
    assert core["secret_names"]["engines"] == ["/gorgo/paper/engine-key"]


CURL = """\
echo "curl ${*: -1}" >> {log}
case "${*: -1}" in
  */30000/health | *:30000/health) test -e {ready} || { touch {ready}; exit 22; } ;;
  */api/token) echo a-token ;;
  */mac) echo 0a:1b:2c:3d:4e:5f ;;
  */interface-id) echo eni-1 ;;
  */placement/region) echo us-east-1 ;;
esac
"""
LINKS = """\
1: lo: <LOOPBACK> mtu 65536 link/loopback 00:00:00:00:00:00
2: ens5: <UP> mtu 9001 link/ether 0a:1b:2c:3d:4e:5f
"""


def test_a_machine_of_a_group_takes_its_address_once_its_engines_answer(
    files: dict[str, dict[str, str]], rendered: dict[str, Any], tmp_path: Path
) -> None:
    machine, one = next(iter(rendered["pair"]["instances"].items()))
    unit = files[GROUPED + machine]["/etc/systemd/system/gorgo-address.service"]
    (arguments,) = re.findall(r"^ExecStart=/usr/local/sbin/gorgo-address (.*)$", unit, re.MULTILINE)
    ports = range(one["first_port"], one["last_port"] + 1)
    assert arguments.split() == [one["address"], *map(str, ports)]
    for engine in one["engines"]:
        port = rendered["pair"]["engines"][engine]["port"]
        text = files[GROUPED + machine][f"/etc/systemd/system/gorgo-engine-{engine}.service"]
        assert f" --publish {port}:{port} " in text, "before it has the address, which the machine is not born with"

    log = tmp_path / "log"
    fake(tmp_path, "curl", CURL.replace("{log}", str(log)).replace("{ready}", str(tmp_path / "ready")))
    fake(tmp_path, "sleep", f'echo "sleep $1" >> {log}\n')
    fake(tmp_path, "aws", f'echo "aws $*" >> {log}\n')
    fake(tmp_path, "ip", f'if [[ $2 == link ]]; then cat <<< "{LINKS}"; else echo "ip $*" >> {log}; fi\n')
    done = run(script(files, GROUPED + machine, "gorgo-address", tmp_path), *arguments.split())
    assert (done.returncode, done.stderr) == (0, "")
    lines = log.read_text().splitlines()
    assert lines[:3] == [
        "curl http://127.0.0.1:30000/health",
        "sleep 5",
        "curl http://127.0.0.1:30000/health",
    ]
    assert lines[-2:] == [
        "aws ec2 assign-private-ip-addresses --region us-east-1 --network-interface-id eni-1"
        f" --private-ip-addresses {one['address']} --allow-reassignment",
        f"ip address replace {one['address']}/32 dev ens5",
    ]
    assert "gorgo-address" not in "".join(files[machine]), "an instance alone has its address from the start"


def test_every_secret_read_is_one_that_the_role_may_read(
    files: dict[str, dict[str, str]], core: dict[str, Any]
) -> None:
    read = set(re.findall(r"fetch (/\S+?)[ )]", files["router"]["/usr/local/sbin/gorgo-secrets"]))
    assert read == set(core["secret_names"]["router"])


def test_a_new_configuration_takes_the_old_ones_place_and_an_equal_one_nothing(
    files: dict[str, dict[str, str]], core: dict[str, Any], tmp_path: Path
) -> None:
    bucket = tmp_path / "bucket"
    bucket.mkdir()
    for name, text in core["configuration"].items():
        (bucket / name).write_text(text)
    fake(tmp_path, "aws", f'cp "{bucket}/${{4##*/}}" "$5"\n')
    fake(tmp_path, "systemctl", f'echo "$@" >> {tmp_path}/told\n')
    path = script(files, "router", "gorgo-configuration", tmp_path)
    told = tmp_path / "told"

    for _ in range(2):
        done = run(path)
        assert (done.returncode, done.stderr) == (0, "")
    assert told.read_text() == "try-reload-or-restart --no-block gorgo-tls.service\n"
    assert (tmp_path / "etc/gorgo/regions.yaml").read_text() == core["regions_generated"]

    (bucket / "regions.yaml").write_text("new")
    assert run(path).returncode == 0
    assert (tmp_path / "etc/gorgo/regions.yaml").read_text() == "new"
    assert len(told.read_text().splitlines()) == 1, "the proxy follows its file by itself"

    (bucket / "regions.yaml").unlink()
    assert run(path).returncode != 0
    assert (tmp_path / "etc/gorgo/regions.yaml").read_text() == "new"


# -- two routers with a store
@pytest.fixture(scope="module")
def pair(rendered: dict[str, Any]) -> dict[str, Any]:
    return dict(rendered["pair"])


@pytest.fixture(scope="module")
def pair_files(pair: dict[str, Any]) -> dict[str, dict[str, str]]:
    boot = pair["router"]["user_data"]
    assert len(boot.encode()) <= 16384
    return {"router": {one["path"]: one["content"] for one in cloud_init(boot)["write_files"]}}


def test_store_is_in_the_configuration_and_its_secrets_in_the_environment_of_the_routers(
    pair: dict[str, Any], pair_files: dict[str, dict[str, str]], parameters: Path, tmp_path: Path
) -> None:
    (parameters / "store-password").write_text("store-0123456789abcdef")
    (parameters / "group-key").write_text("00112233445566778899aabbccddeeff")
    done = run(script(pair_files, "router", "gorgo-secrets", tmp_path))
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    environ = dict(line.split("=", 1) for line in (tmp_path / "run/gorgo/router.env").read_text().splitlines())
    (tmp_path / "regions.yaml").write_text(pair["regions_generated"])
    shared = load_config(tmp_path / "regions.yaml").shared
    assert shared is not None
    assert (shared.url, shared.router) == ("rediss://store.internal:6379/0", None), "the host's name"
    assert connection_arguments(shared, environ)["password"] == "store-0123456789abcdef"
    assert group_key(shared, environ) == 0x00112233445566778899AABBCCDDEEFF
    assert "GROUP" not in (tmp_path / "run/gorgo/tuner.env").read_text()
    read = set(re.findall(r"fetch (/\S+?)[ )]", pair_files["router"]["/usr/local/sbin/gorgo-secrets"]))
    assert read == set(pair["secret_names"]["router"])


@pytest.mark.parametrize(("name", "value"), [("store-password", "with/slash-0123456789"), ("group-key", 32 * "g")])
def test_secret_of_the_store_that_cannot_be_used_is_refused_by_name(
    pair_files: dict[str, dict[str, str]], parameters: Path, tmp_path: Path, name: str, value: str
) -> None:
    (parameters / "store-password").write_text("store-0123456789abcdef")
    (parameters / "group-key").write_text("00112233445566778899aabbccddeeff")
    (parameters / name).write_text(value)
    done = run(script(pair_files, "router", "gorgo-secrets", tmp_path))
    assert done.returncode != 0
    assert f"/gorgo/paper/{name}: expected " in done.stderr
    assert value not in done.stderr
    assert not (tmp_path / "run/gorgo/router.env").exists()


def test_wheel_is_installed_with_the_client_of_the_store(pair_files: dict[str, dict[str, str]]) -> None:
    install = pair_files["router"]["/usr/local/sbin/gorgo-install"]
    assert '"./gorgo_router-0.2.0-py3-none-any.whl[shared]"' in install
    assert "\nredis==" in (ROOT / "requirements.lock").read_text()


# -- TLS and metrics
def test_nginx_passes_on_what_has_a_key_and_metrics_to_those_named(
    files: dict[str, dict[str, str]], core: dict[str, Any]
) -> None:
    conf = files["router"]["/etc/gorgo/nginx.conf"]
    assert re.findall(r"listen (\S+)", conf) == ["443"]
    assert "ssl_protocols TLSv1.2 TLSv1.3;" in conf
    open_routes = set(re.findall(r"location = (\S+) \{ proxy_pass", conf))
    assert open_routes == {"/health", "/ready"}
    guarded = re.findall(
        r"location = (/metrics\S*) \{ (.*?) proxy_pass", conf + core["configuration"]["metrics.nginx.conf"]
    )
    assert {path for path, _ in guarded} == {one["path"] for one in core["scraped"]}
    assert {guard for _, guard in guarded} == {"allow 203.0.113.0/24; deny all;"}
    assert "if ($known = 0) { return 401; }" in conf
    assert conf.count("{") == conf.count("}")


def test_prometheus_scrapes_what_nginx_passes_on(rendered: dict[str, Any]) -> None:
    scrapes = yaml.safe_load(rendered["observability"]["prometheus.yml"])["scrape_configs"]
    assert {one["metrics_path"] for one in scrapes} == {one["path"] for one in rendered["core"]["scraped"]}
    assert {one["scheme"] for one in scrapes} == {"https"}
    assert len({one["job_name"] for one in scrapes}) == len(scrapes) == 5


def test_dashboard_and_alerts_are_those_that_are_tested(rendered: dict[str, Any]) -> None:
    """`tests/observability` holds the two files to the metrics that exist."""
    for name in ("gorgo-dashboard.json", "gorgo-rules.yml"):
        assert rendered["observability"][name] == (ROOT / "terraform/modules/observability" / name).read_text()
    assert yaml.safe_load(rendered["observability"]["prometheus.yml"])["rule_files"] == ["gorgo-rules.yml"]


# --- nginx itself with the router's file: keys, routes, and answers that try to direct it.


KEY = "client-0123456789abcdef"
#: Folders of the router's machine in nginx's file.
PLACES = ("/run/credentials/gorgo-tls.service", "/run/gorgo-tls", "/var/lib/gorgo-tls", "/etc/gorgo")


class Proxy(BaseHTTPRequestHandler):
    """Answers as a proxy whose engine tries to direct nginx."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("X-Accel-Redirect", "/metrics")
        self.send_header("X-Accel-Limit-Rate", "50")
        self.send_header("X-Accel-Buffering", "yes")
        self.send_header("Content-Length", str(len(self.path)))
        self.end_headers()
        self.wfile.write(self.path.encode())

    def log_message(self, format: str, *args: Any) -> None:
        """Write nothing."""


@dataclass(frozen=True, slots=True)
class Front:
    port: int
    authority: Path

    def get(self, path: str, **headers: str) -> tuple[int, bytes]:
        context = ssl.create_default_context(cafile=str(self.authority))
        context.check_hostname = False
        connection = HTTPSConnection("127.0.0.1", self.port, context=context, timeout=10)
        try:
            connection.request("GET", path, headers={name.replace("_", "-"): value for name, value in headers.items()})
            response = connection.getresponse()
            return response.status, response.read()
        finally:
            connection.close()


def made(core: dict[str, Any], folder: Path, port: int, proxy: int) -> Path:
    """Write nginx's file with the machine's folders below `folder`, and what it includes."""
    written = yaml.safe_load(core["router"]["user_data"])["write_files"]
    (text,) = [one["content"] for one in written if one["path"] == "/etc/gorgo/nginx.conf"]
    text = text.replace("listen 443 ssl http2;", f"listen 127.0.0.1:{port} ssl http2;")
    text = text.replace("server 127.0.0.1:8080;", f"server 127.0.0.1:{proxy};")
    text = text.replace("worker_processes auto;", "worker_processes 1;")
    if os.geteuid() == 0:
        text = text.replace("daemon off;", "daemon off;\nuser root;")
    for place in PLACES:
        text = text.replace(place, f"{folder}{place}")
        (folder / place[1:]).mkdir(parents=True)
    secrets = folder / PLACES[0][1:]
    (secrets / "bearer.map").write_text(f'"~^(?i:Bearer) +{KEY}$" 1;\n')
    (secrets / "key.map").write_text(f'"~^{KEY}$" 1;\n')
    (folder / "etc/gorgo/metrics.nginx.conf").write_text(core["configuration"]["metrics.nginx.conf"])
    certified = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-subj", "/CN=x", "-days", "1"]
    certified += ["-keyout", str(secrets / "tls.key"), "-out", str(secrets / "tls.crt")]
    subprocess.run(certified, check=True, capture_output=True)
    (folder / "nginx.conf").write_text(text)
    return folder / "nginx.conf"


@pytest.fixture(scope="module")
def front(rendered: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Front]:
    """nginx before `Proxy`, on ports of their own."""
    nginx = shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin")
    if nginx is None or shutil.which("openssl") is None:
        pytest.skip("NGINX CHECK SKIPPED: needs nginx and openssl")
    folder, port = tmp_path_factory.mktemp("nginx"), free_port()
    proxy = ThreadingHTTPServer(("127.0.0.1", 0), Proxy)
    Thread(target=proxy.serve_forever, daemon=True).start()
    conf = made(rendered["core"], folder, port, proxy.server_port)
    command = [nginx, "-e", "stderr", "-c", str(conf)]
    checked = subprocess.run([*command, "-t", "-q"], capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stderr
    with (folder / "said").open("wb") as said, subprocess.Popen(command, stderr=said) as process:
        try:
            deadline = time.monotonic() + 10
            while not listens(port):
                assert process.poll() is None, (folder / "said").read_text()
                assert time.monotonic() < deadline, (folder / "said").read_text()
            yield Front(port, folder / PLACES[0][1:] / "tls.crt")
        finally:
            process.terminate()
            process.wait(10)
            proxy.shutdown()
            proxy.server_close()


def listens(port: int) -> bool:
    with socket.socket() as probe:
        probe.settimeout(0.1)
        return probe.connect_ex(("127.0.0.1", port)) == 0


@pytest.mark.parametrize(
    "headers",
    [{"authorization": f"Bearer {KEY}"}, {"authorization": f"bearer {KEY}"}, {"x_api_key": KEY}],
    ids=["bearer", "scheme in lower case", "x-api-key"],
)
def test_a_client_s_key_opens(front: Front, headers: dict[str, str]) -> None:
    assert front.get("/v1/models", **headers) == (200, b"/v1/models")


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"authorization": f"Bearer {KEY.upper()}"},
        {"x_api_key": KEY.upper()},
        {"x_api_key": KEY[:-1]},
        {"x_api_key": KEY + "0"},
        {"x_api_key": f"Bearer {KEY}"},
        {"authorization": KEY},
        {"authorization": f"Bearer {KEY} x"},
        {"x_api_key": "~^.*$"},
    ],
)
def test_any_other_spelling_of_a_key_does_not(front: Front, headers: dict[str, str]) -> None:
    assert front.get("/v1/models", **headers)[0] == 401


def test_an_answer_does_not_direct_nginx(front: Front) -> None:
    assert front.get("/v1/" + "x" * 100, x_api_key=KEY) == (200, b"/v1/" + b"x" * 100)
    assert front.get("/health") == (200, b"/health")


@pytest.mark.parametrize(
    "path", ["/metrics", "//metrics", "/%6detrics", "/v1/../metrics", "/metrics?x=1", "/metrics/tuner"]
)
def test_metrics_are_for_their_networks_in_every_spelling(front: Front, path: str) -> None:
    assert front.get(path, x_api_key=KEY)[0] == 403
