"""The plain manifests of Kubernetes against the code: ports, probes, time to drain, rights, configuration.

They are what the chart makes of its defaults, which test_chart.py compares; schemas are there too.
"""

from __future__ import annotations

import re
from typing import Any

import pytest
import yaml

from gorgo import __version__
from gorgo.config.load import parse_config
from gorgo.config.model import Config, LimitsConfig
from gorgo.live.process import CLOSE_S
from gorgo.live.telemetry.metric_table import LABELS, METRICS
from gorgo.proxy.server import PUBLIC_ROUTES
from tests.packaging.chart import CHART, MANIFESTS, NO_DIGEST, documents
from tests.packaging.commands import parsed
from tests.packaging.conftest import ROOT
from tests.packaging.containerfile import stages

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
