"""Plain manifests of Kubernetes and systemd units against the code: ports, probes, time to drain, rights."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from gorgo import __version__
from gorgo.config.load import parse_config
from gorgo.config.model import Config, LimitsConfig, ProxyConfig
from gorgo.fleet_sources.kubernetes import read_pool
from gorgo.live.listener.sockets import BACKLOG
from gorgo.live.process import CLOSE_S
from gorgo.live.telemetry.metric_table import LABELS, METRICS
from gorgo.proxy.server import PUBLIC_ROUTES
from tests.packaging.chart import CHART, MANIFESTS, NO_DIGEST, documents
from tests.packaging.commands import parsed
from tests.packaging.conftest import ROOT
from tests.packaging.containerfile import stages

# --- The plain manifests of Kubernetes against the code: ports, probes, time to drain, rights, configuration.
#
# They are what the chart makes of its defaults, which test_chart.py compares; schemas are there too.


TEXT = (MANIFESTS / "gorgo.yaml").read_text()
#: By kind and name.
OBJECTS: dict[tuple[str, str], dict[str, Any]] = {
    (found["kind"], found["metadata"]["name"]): found for found in documents(TEXT)
}
POD: dict[str, Any] = OBJECTS["Deployment", "gorgo"]["spec"]["template"]["spec"]
(CONTAINER,) = POD["containers"]
_, IMAGE = stages((ROOT / "packaging/Containerfile").read_text())


def config() -> Config:
    return parse_config(OBJECTS["ConfigMap", "gorgo"]["data"]["regions.yaml"].encode(), environ={})


def test_objects_are_those_of_a_proxy_in_one_namespace() -> None:
    assert {kind for kind, _ in OBJECTS} == {
        "ServiceAccount",
        "Role",
        "RoleBinding",
        "ConfigMap",
        "Service",
        "Deployment",
        "PodDisruptionBudget",
        "NetworkPolicy",
    }
    assert {found["metadata"]["namespace"] for found in OBJECTS.values()} == {"llm"}


def test_command_line_is_one_of_gorgo_and_its_files_are_mounted() -> None:
    name, values = parsed(CONTAINER["args"])
    assert name == "serve"
    mounts = {mount["mountPath"]: mount for mount in CONTAINER["volumeMounts"]}
    assert str(values["config"].parent) in mounts
    assert mounts[str(values["state"].parent)].get("readOnly") is not True
    (token,) = (one["value"] for one in CONTAINER["env"] if one["name"] == "GORGO_ADMIN_TOKEN_FILE")
    assert token.rsplit("/", 1)[0] in mounts
    volumes = {volume["name"] for volume in POD["volumes"]}
    assert {mount["name"] for mount in mounts.values()} == volumes


def test_configuration_is_valid_and_listens_where_the_services_lead() -> None:
    found = config()
    ports = {port["name"]: port["containerPort"] for port in CONTAINER["ports"]}
    assert found.proxy.bind == f"0.0.0.0:{ports['http']}"
    assert found.proxy.admin_bind == f"0.0.0.0:{ports['admin']}"
    services = [OBJECTS["Service", name]["spec"] for name in ("gorgo", "gorgo-admin")]
    assert [[port["targetPort"] for port in spec["ports"]] for spec in services] == [["http"], ["admin"]]
    labels = OBJECTS["Deployment", "gorgo"]["spec"]["template"]["metadata"]["labels"]
    for spec in (*services, OBJECTS["PodDisruptionBudget", "gorgo"]["spec"]["selector"].get("matchLabels", {})):
        selector = spec.get("selector", spec)
        assert selector.items() <= labels.items()


def test_probes_are_routes_that_need_no_key() -> None:
    probed = {CONTAINER[f"{kind}Probe"]["httpGet"]["path"] for kind in ("startup", "liveness", "readiness")}
    assert probed == {"/health", "/ready"} <= set(PUBLIC_ROUTES)
    assert CONTAINER["livenessProbe"]["httpGet"]["path"] == "/health", "dead replicas are no reason to restart"


def test_pod_has_the_time_that_its_streams_have_after_its_load_balancers_know() -> None:
    program, seconds = CONTAINER["lifecycle"]["preStop"]["exec"]["command"]
    assert program == "sleep"
    readiness = CONTAINER["readinessProbe"]
    assert float(seconds) >= readiness["periodSeconds"] * readiness["failureThreshold"]
    needed = float(seconds) + LimitsConfig().shutdown_grace_s + 4 * CLOSE_S
    assert POD["terminationGracePeriodSeconds"] >= needed


def test_process_has_no_more_rights_than_its_image_needs() -> None:
    (user,) = [instruction.rest for instruction in IMAGE if instruction.word == "USER"]
    context, own = POD["securityContext"], CONTAINER["securityContext"]
    assert user == f"{context['runAsUser']}:{context['runAsGroup']}"
    assert context["runAsNonRoot"] is own["readOnlyRootFilesystem"] is True
    assert (own["allowPrivilegeEscalation"], own["capabilities"]) == (False, {"drop": ["ALL"]})
    assert context["seccompProfile"] == {"type": "RuntimeDefault"}
    assert POD["automountServiceAccountToken"] is True, "the sources in the configuration need it"


def test_image_is_taken_by_digest() -> None:
    assert re.fullmatch(rf"[\w./-]+@{NO_DIGEST}", CONTAINER["image"])


def test_role_has_what_the_sources_of_the_configuration_request() -> None:
    (source,) = config().fleet_sources
    assert source.kind == "pods"
    (rule,) = OBJECTS["Role", f"gorgo-{source.name}"]["rules"]
    assert rule == {"apiGroups": [""], "resources": ["pods"], "verbs": ["list", "watch"]}
    binding = OBJECTS["RoleBinding", f"gorgo-{source.name}"]
    assert binding["roleRef"]["name"] == f"gorgo-{source.name}"
    assert binding["subjects"] == [{"kind": "ServiceAccount", "name": POD["serviceAccountName"], "namespace": "llm"}]


def test_admin_listener_is_for_no_pod_of_the_namespace_which_has_the_engines_too() -> None:
    assert OBJECTS["NetworkPolicy", "gorgo"]["spec"]["ingress"] == [{"ports": [{"port": "http"}]}]
    assert config().proxy.metrics_listener == "admin"


def test_autoscaler_reads_a_metric_that_the_proxy_has_with_its_labels() -> None:
    (scaler,) = documents((MANIFESTS / "autoscaler.yaml").read_text())
    metrics = [row["pods"]["metric"] for row in scaler["spec"]["metrics"]]
    specs = {spec.name: spec for spec in METRICS}
    (resource,) = [label.values for label in LABELS if label.label == "resource"]
    assert all(specs[metric["name"]].labels == ("resource",) for metric in metrics)
    assert {metric["selector"]["matchLabels"]["resource"] for metric in metrics} == set(resource)
    assert scaler["spec"]["scaleTargetRef"]["name"] == "gorgo"


def test_service_monitor_reads_metrics_with_a_token_that_is_good_for_them_alone() -> None:
    (monitor,) = documents((MANIFESTS / "servicemonitor.yaml").read_text())
    (endpoint,) = monitor["spec"]["endpoints"]
    assert (endpoint["port"], endpoint["path"]) == ("admin", "/metrics")
    secrets = {volume["name"]: volume["secret"]["secretName"] for volume in POD["volumes"] if "secret" in volume}
    assert endpoint["authorization"]["credentials"] == {"name": secrets["metrics"], "key": "token"}
    assert secrets["metrics"] != secrets["admin"]
    labels = OBJECTS["Service", "gorgo-admin"]["metadata"]["labels"]
    assert monitor["spec"]["selector"]["matchLabels"].items() <= labels.items()


@pytest.mark.parametrize("key", ["version", "appVersion"])
def test_chart_has_the_version_of_the_package(key: str) -> None:
    assert yaml.safe_load((CHART / "Chart.yaml").read_text())[key] == __version__


# --- The plain manifests of the picker against the code: ports, probes, time to drain, the pool and its rights.


#: By kind.
OBJECTS_PICKER_MANIFEST: dict[str, list[dict[str, Any]]] = {}
for found in documents((MANIFESTS / "picker.yaml").read_text()):
    OBJECTS_PICKER_MANIFEST.setdefault(found["kind"], []).append(found)
(DEPLOYMENT,) = OBJECTS_PICKER_MANIFEST["Deployment"]
POD_PICKER_MANIFEST: dict[str, Any] = DEPLOYMENT["spec"]["template"]["spec"]
(CONTAINER_PICKER_MANIFEST,) = POD_PICKER_MANIFEST["containers"]
PORTS = {port["name"]: port["containerPort"] for port in CONTAINER_PICKER_MANIFEST["ports"]}
CONFIG = parse_config(OBJECTS_PICKER_MANIFEST["ConfigMap"][0]["data"]["regions.yaml"].encode(), environ={})


def test_gateway_finds_the_picker_by_the_pool_and_the_picker_its_replicas() -> None:
    (route,), (pool,) = OBJECTS_PICKER_MANIFEST["HTTPRoute"], OBJECTS_PICKER_MANIFEST["InferencePool"]
    (backend,) = route["spec"]["rules"][0]["backendRefs"]
    assert (backend["kind"], backend["name"]) == ("InferencePool", pool["metadata"]["name"])
    reference = pool["spec"]["endpointPickerRef"]
    (service,) = [each for each in OBJECTS_PICKER_MANIFEST["Service"] if each["metadata"]["name"] == reference["name"]]
    (port,) = service["spec"]["ports"]
    assert (port["port"], port["targetPort"]) == (reference["port"]["number"], "grpc")
    assert service["spec"]["selector"].items() <= DEPLOYMENT["spec"]["template"]["metadata"]["labels"].items()
    (source,) = CONFIG.fleet_sources
    assert source.pool == read_pool(pool).name
    assert dict(read_pool(pool).selector) == {"app": "engine"}


def test_command_line_is_one_of_gorgo_and_it_listens_where_the_service_leads() -> None:
    name, values = parsed(CONTAINER_PICKER_MANIFEST["args"])
    assert name == "picker"
    assert str(values["config"].parent) in {mount["mountPath"] for mount in CONTAINER_PICKER_MANIFEST["volumeMounts"]}
    assert CONFIG.picker.bind == f"0.0.0.0:{PORTS['grpc']}"


def test_rights_are_those_of_the_pool_and_its_pods() -> None:
    (role,) = OBJECTS_PICKER_MANIFEST["Role"]
    (source,) = CONFIG.fleet_sources
    pods, pools = role["rules"]
    assert pods == {"apiGroups": [""], "resources": ["pods"], "verbs": ["list", "watch"]}
    assert (pools["resources"], pools["resourceNames"]) == (["inferencepools"], [source.pool])
    assert POD_PICKER_MANIFEST["automountServiceAccountToken"] is True


def test_kubelet_probes_the_health_service_where_the_picker_listens() -> None:
    probes = {kind: CONTAINER_PICKER_MANIFEST[f"{kind}Probe"]["grpc"] for kind in ("startup", "liveness", "readiness")}
    assert {probe["port"] for probe in probes.values()} == {PORTS["grpc"]}
    assert {kind: probe["service"] for kind, probe in probes.items()} == {
        "startup": "liveness",
        "liveness": "liveness",
        "readiness": "readiness",
    }


def test_pod_has_the_time_that_replies_have_after_gateways_know() -> None:
    _, seconds = CONTAINER_PICKER_MANIFEST["lifecycle"]["preStop"]["exec"]["command"]
    needed = float(seconds) + LimitsConfig().shutdown_grace_s + 4 * CLOSE_S
    assert POD_PICKER_MANIFEST["terminationGracePeriodSeconds"] >= needed


def test_admin_listener_is_for_no_pod_and_the_other_for_gateways() -> None:
    (policy,) = OBJECTS_PICKER_MANIFEST["NetworkPolicy"]
    assert policy["spec"]["ingress"] == [{"ports": [{"port": "grpc"}]}]
    assert CONFIG.proxy.admin_bind == f"0.0.0.0:{PORTS['admin']}"


# --- The systemd units for machines that were set up by hand.


FOLDER = ROOT / "packaging/systemd"
UNITS = {path.name: path.read_text() for path in sorted(FOLDER.glob("*.service"))}
TEMPLATES = ROOT / "terraform/modules/core/templates"
#: Of 10, by `systemd-analyze security`: what is left is the network, which both are for.
EXPOSURE = 1.5
#: Lines that say how far a process is shut in.
_CONFINING = re.compile(
    r"^(?:Protect|Private|Restrict|NoNew|Capability|SystemCallArch|Lock|UMask|StateDirectoryMode).*", re.M
)


def setting(unit: str, key: str) -> list[str]:
    return re.findall(rf"^{key}=(.*)$", UNITS[unit], re.MULTILINE)


def calls(unit: str) -> list[list[str]]:
    """Words after `gorgo` of every line that calls it, with what systemd puts in for its variables."""
    lines = [line for key in ("ExecStartPre", "ExecStart") for line in setting(unit, key)]
    state = f"/var/lib/{setting(unit, 'StateDirectory')[0]}"
    words = [shlex.split(line.replace("${STATE_DIRECTORY}", state)) for line in lines]
    assert all(line[0] == "/opt/gorgo/bin/gorgo" for line in words)
    return [line[1:] for line in words]


def test_both_programs_that_go_on_have_a_unit() -> None:
    started = {name: parsed(calls(name)[-1])[0] for name in UNITS}
    assert started == {"gorgo.service": "serve", "gorgo-tuner.service": "tune"}


def test_every_call_is_one_that_the_command_line_takes() -> None:
    values = [parsed(words) for name in UNITS for words in calls(name)]
    by_command = dict(values)
    assert by_command["check"]["config"] == by_command["serve"]["config"] == Path("/etc/gorgo/regions.yaml")
    assert by_command["serve"]["state"] == Path("/var/lib/gorgo/state.json")
    assert by_command["tune"]["database"] == "sqlite:////var/lib/gorgo-tuner/history.sqlite3"
    assert by_command["tune"]["url"] == ["http://127.0.0.1:9090"]


def test_tokens_are_credentials_and_in_no_environment_file() -> None:
    for name in UNITS:
        assert setting(name, "LoadCredential") == ["admin-token:/etc/gorgo/admin-token"], name
        assert "GORGO_ADMIN_TOKEN_FILE=%d/admin-token" in setting(name, "Environment")[0], name


def test_streams_may_finish_before_they_are_killed() -> None:
    (stop_s,) = setting("gorgo.service", "TimeoutStopSec")
    assert float(stop_s) >= LimitsConfig().shutdown_grace_s + 10
    assert int(setting("gorgo.service", "LimitNOFILE")[0]) >= 2 * LimitsConfig().max_in_flight + 1024


def test_both_come_back_and_are_nobody_in_particular() -> None:
    for name, again in (("gorgo.service", "always"), ("gorgo-tuner.service", "on-failure")):
        assert setting(name, "DynamicUser") == ["yes"], name
        assert setting(name, "Restart") == [again], name
        assert setting(name, "StartLimitIntervalSec") == ["0"], name


def test_the_socket_has_the_address_and_name_that_the_service_takes() -> None:
    unit = (FOLDER / "gorgo.socket").read_text()
    found = dict(line.split("=", 1) for line in unit.splitlines() if "=" in line and not line.startswith("#"))
    assert found["ListenStream"] == ProxyConfig(region="here").bind
    assert found["Service"] in UNITS
    assert (found["FileDescriptorName"], int(found["Backlog"])) == ("data", BACKLOG)


@pytest.mark.parametrize("name", sorted(UNITS))
def test_they_are_shut_in_at_least_as_far_as_terraform_s(name: str) -> None:
    theirs = set(_CONFINING.findall((TEMPLATES / f"{name}.tftpl").read_text()))
    assert len(theirs) > 10
    assert theirs <= set(_CONFINING.findall(UNITS[name]))


def analyzed(*words: str, folder: Path) -> subprocess.CompletedProcess[str]:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("UNIT VERIFICATION SKIPPED: there is no systemd-analyze")
    return subprocess.run(["systemd-analyze", *words], cwd=folder, capture_output=True, text=True, check=False)


def test_systemd_accepts_them(tmp_path: Path) -> None:
    folder = tmp_path / "etc/systemd/system"
    folder.mkdir(parents=True)
    for name in ("basic", "multi-user", "network-online", "shutdown", "sysinit"):
        (folder / f"{name}.target").write_text("[Unit]\n")
    for name, text in UNITS.items():
        (folder / name).write_text(text)
    for program in ("opt/gorgo/bin/gorgo", "bin/kill"):
        (tmp_path / program).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / program).write_text("#!/bin/sh\n")
        (tmp_path / program).chmod(0o755)
    verify = ("verify", "--man=no", "--generators=no", f"--root={tmp_path}")
    done = analyzed(*verify, *UNITS, folder=folder)
    assert (done.returncode, done.stderr) == (0, "")


def test_systemd_finds_little_that_they_could_reach() -> None:
    for name in UNITS:
        done = analyzed(
            "security", "--offline=true", "--no-pager", f"--threshold={EXPOSURE * 10:g}", name, folder=FOLDER
        )
        if "unrecognized option" in done.stderr:
            pytest.skip("UNIT SECURITY CHECK SKIPPED: needs systemd 250 or later")
        assert done.returncode == 0, done.stdout + done.stderr
