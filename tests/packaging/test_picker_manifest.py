"""The plain manifests of the picker against the code: ports, probes, time to drain, the pool and its rights."""

from __future__ import annotations

from typing import Any

from gorgo.config.load import parse_config
from gorgo.config.model import LimitsConfig
from gorgo.fleet_sources.kubernetes import read_pool
from gorgo.live.process import CLOSE_S
from tests.packaging.chart import MANIFESTS, documents
from tests.packaging.commands import parsed

#: By kind.
OBJECTS: dict[str, list[dict[str, Any]]] = {}
for found in documents((MANIFESTS / "picker.yaml").read_text()):
    OBJECTS.setdefault(found["kind"], []).append(found)
(DEPLOYMENT,) = OBJECTS["Deployment"]
POD: dict[str, Any] = DEPLOYMENT["spec"]["template"]["spec"]
(CONTAINER,) = POD["containers"]
PORTS = {port["name"]: port["containerPort"] for port in CONTAINER["ports"]}
CONFIG = parse_config(OBJECTS["ConfigMap"][0]["data"]["regions.yaml"].encode(), environ={})


def test_gateway_finds_the_picker_by_the_pool_and_the_picker_its_replicas() -> None:
    (route,), (pool,) = OBJECTS["HTTPRoute"], OBJECTS["InferencePool"]
    (backend,) = route["spec"]["rules"][0]["backendRefs"]
    assert (backend["kind"], backend["name"]) == ("InferencePool", pool["metadata"]["name"])
    reference = pool["spec"]["endpointPickerRef"]
    (service,) = [each for each in OBJECTS["Service"] if each["metadata"]["name"] == reference["name"]]
    (port,) = service["spec"]["ports"]
    assert (port["port"], port["targetPort"]) == (reference["port"]["number"], "grpc")
    assert service["spec"]["selector"].items() <= DEPLOYMENT["spec"]["template"]["metadata"]["labels"].items()
    (source,) = CONFIG.fleet_sources
    assert source.pool == read_pool(pool).name
    assert dict(read_pool(pool).selector) == {"app": "engine"}


def test_command_line_is_one_of_gorgo_and_it_listens_where_the_service_leads() -> None:
    name, values = parsed(CONTAINER["args"])
    assert name == "picker"
    assert str(values["config"].parent) in {mount["mountPath"] for mount in CONTAINER["volumeMounts"]}
    assert CONFIG.picker.bind == f"0.0.0.0:{PORTS['grpc']}"


def test_rights_are_those_of_the_pool_and_its_pods() -> None:
    (role,) = OBJECTS["Role"]
    (source,) = CONFIG.fleet_sources
    pods, pools = role["rules"]
    assert pods == {"apiGroups": [""], "resources": ["pods"], "verbs": ["list", "watch"]}
    assert (pools["resources"], pools["resourceNames"]) == (["inferencepools"], [source.pool])
    assert POD["automountServiceAccountToken"] is True


def test_kubelet_probes_the_health_service_where_the_picker_listens() -> None:
    probes = {kind: CONTAINER[f"{kind}Probe"]["grpc"] for kind in ("startup", "liveness", "readiness")}
    assert {probe["port"] for probe in probes.values()} == {PORTS["grpc"]}
    assert {kind: probe["service"] for kind, probe in probes.items()} == {
        "startup": "liveness",
        "liveness": "liveness",
        "readiness": "readiness",
    }


def test_pod_has_the_time_that_replies_have_after_gateways_know() -> None:
    _, seconds = CONTAINER["lifecycle"]["preStop"]["exec"]["command"]
    needed = float(seconds) + LimitsConfig().shutdown_grace_s + 4 * CLOSE_S
    assert POD["terminationGracePeriodSeconds"] >= needed


def test_admin_listener_is_for_no_pod_and_the_other_for_gateways() -> None:
    (policy,) = OBJECTS["NetworkPolicy"]
    assert policy["spec"]["ingress"] == [{"ports": [{"port": "grpc"}]}]
    assert CONFIG.proxy.admin_bind == f"0.0.0.0:{PORTS['admin']}"
