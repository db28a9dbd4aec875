"""The chart: rendered by Helm's library with many values, each object checked by the schemas of Kubernetes."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

import pytest

from gorgo.config.load import parse_config
from gorgo.fleet_sources.kubernetes import read_pool
from tests.observability.promql import alerts, dashboard
from tests.packaging.chart import (
    EXTENSIONS,
    MANIFESTS,
    NO_DIGEST,
    OPERATORS,
    REQUIRED,
    ChartError,
    documents,
    extension_errors,
    plain,
    render,
    schema_errors,
    with_values,
)
from tests.packaging.commands import parsed
from tests.system.environments import Environment, InstallError, cloud_environment, kubernetes_environment

pytestmark = pytest.mark.system

#: From the oldest that the chart admits to the newest that the schemas have.
VERSIONS = ("1.27", "1.31", "1.35", "1.37")
POD_SOURCE = {"name": "p", "kind": "pods", "selector": {"app": "x"}, "port": 1, "namespace": "engines"}
SLICES = {"name": "s", "kind": "endpoint-slices", "service": "engines", "node_regions": True}
POOL = {"name": "i", "kind": "inference-pool", "pool": "qwen"}
RESTRICTED = {"name": "m", "allowed_regions": ["local"]}
FAIL_CLOSE = {"enabled": True, "inferencePool": {"failureMode": "FailClose"}}
DNS = {"name": "d", "kind": "dns", "host": "engines", "port": 1}
#: Replicas that follow the routers' number.
SCALED_CONFIG = {"proxy": {"region": "eu"}, "regions": [{"name": "eu"}], "scaling": {"ttft_ms": 2000.0}}
GROUP = {"name": "llama", "kind": "StatefulSet", "namespace": "engines", "model": "meta/llama", "maxReplicas": 8}
BY_KEDA = {"by": "keda", "prometheus": "http://prometheus.monitoring:9090", "groups": [GROUP]}
BY_HPA = {"by": "hpa", "groups": [{"name": "engines", "region": "us", "minReplicas": 2, "maxReplicas": 8}]}
OUTSIDE = {**POD_SOURCE, "name": "o", "api": {"url": "https://elsewhere.example.org"}}

CASES: Mapping[str, Mapping[str, Any]] = {
    "defaults": {},
    "everything": {
        "config": {
            "proxy": {"region": "eu", "policy": "gorgo-ms", "metrics_listener": "data"},
            "regions": [{"name": "eu"}],
            "fleet_sources": [POD_SOURCE, SLICES, POOL, DNS],
            "limits": {"shutdown_grace_s": 300.5, "max_body_bytes": 33554432, "prefix_index_blocks": 4000000},
            "clients": {"keys_file": "/etc/gorgo-keys/clients.keys"},
        },
        "autoscaling": {"enabled": True},
        "serviceMonitor": {"enabled": True, "labels": {"release": "prometheus"}},
        "clientKeys": {"secret": "keys"},
        "engineKeys": {"secret": "engines"},
        "service": {"type": "LoadBalancer", "port": 443, "annotations": {"a": "b"}},
        "networkPolicy": {
            "clients": [{"namespaceSelector": {"matchLabels": {"app": "gateway"}}}],
            "operators": [{"podSelector": {"matchLabels": {"app": "operator"}}}],
            "prometheus": [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}}],
            "egress": [{"ports": [{"port": 53, "protocol": "UDP"}]}],
        },
        "serviceAccount": {"annotations": {"a": "b"}},
        "podAnnotations": {"a": "b"},
        "podLabels": {"team": "llm"},
        "extraEnv": [{"name": "OTEL_EXPORTER_OTLP_HEADERS", "value": "x=y"}],
        "extraVolumes": [{"name": "ca", "configMap": {"name": "ca"}}],
        "extraVolumeMounts": [{"name": "ca", "mountPath": "/etc/ca", "readOnly": True}],
        "tls": {"secret": "serve-tls"},
        "metrics": {"secret": "gorgo-metrics"},
        "prometheusRule": {"enabled": True, "labels": {"release": "prometheus"}},
        "dashboard": {"enabled": True},
        "httpRoute": {"gateway": "inference", "hostnames": ["llm.example.org"]},
        "ingress": {"enabled": True, "host": "llm.example.org", "className": "nginx", "tlsSecret": "host-tls"},
        "tuner": {"enabled": True, "args": ["--mode", "paper"]},
        "imagePullSecrets": [{"name": "pull"}],
        "nodeSelector": {"kubernetes.io/arch": "amd64"},
        "tolerations": [{"operator": "Exists"}],
        "affinity": {"podAntiAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": []}},
        "priorityClassName": "system-cluster-critical",
    },
    "picker": {
        "picker": {
            "enabled": True,
            "tls": {"secret": "picker-tls"},
            "inferencePool": {"name": "qwen", "selector": {"app": "qwen"}, "targetPorts": [8000, 8001]},
            "httpRoute": {
                "gateway": "inference",
                "gatewayNamespace": "gateways",
                "hostnames": ["llm.example.org", "*.example.org"],
                "requestTimeout": "1h",
            },
        },
        "config": {"picker": {"hold_s": 5.0}},
        "shared": {
            "url": "rediss://store.llm:6379/0",
            "group": "qwen",
            "username": "gorgo",
            "secret": "gorgo-store",
            "caSecret": "store-ca",
        },
        "autoscaling": {"enabled": True},
        "networkPolicy": {"prometheus": [{"podSelector": {"matchLabels": {"app": "prometheus"}}}]},
        "serviceMonitor": {"enabled": True},
        "metrics": {"secret": "gorgo-metrics"},
        "tuner": {"enabled": True, "history": {"secret": "history"}},
    },
    "picker alone": {"picker": {"enabled": True, "inferencePool": {"create": False, "name": "theirs"}}},
    "store without a password": {"shared": {"url": "redis://store:6379/0", "secret": "s", "passwordKey": ""}},
    "replicas by keda": {"config": SCALED_CONFIG, "replicaScaling": BY_KEDA},
    "replicas by hpa": {"config": SCALED_CONFIG, "replicaScaling": BY_HPA},
    "nothing": {
        "replicas": 1,
        "config": {
            "fleet_sources": None,
            "replicas": [{"name": "a", "region": "local", "url": "http://engine:30000"}],
        },
        "networkPolicy": {"enabled": False},
        "rbac": {"create": False},
    },
}


@pytest.fixture(scope="module")
def helm() -> Environment:
    try:
        return kubernetes_environment()
    except InstallError as error:
        pytest.skip(f"CHART SKIPPED: {error}")


def rendered(helm: Environment, case: Mapping[str, Any]) -> dict[tuple[str, str], dict[str, Any]]:
    found = documents(*render(helm, with_values(case)).values())
    return {(each["kind"], each["metadata"]["name"]): each for each in found}


def deployment(found: Mapping[tuple[str, str], dict[str, Any]]) -> dict[str, Any]:
    (only,) = (each for (kind, name), each in found.items() if kind == "Deployment" and not name.endswith("-tuner"))
    return only


def configuration(found: Mapping[tuple[str, str], dict[str, Any]]) -> str:
    """Return regions.yaml of the ConfigMap."""
    (text,) = (each["data"]["regions.yaml"] for each in found.values() if "regions.yaml" in each.get("data", {}))
    return str(text)


@pytest.mark.parametrize("name", CASES)
def test_every_object_is_one_by_the_schemas_of_kubernetes(helm: Environment, name: str) -> None:
    found = rendered(helm, CASES[name])
    # The operator's own kinds are no part of Kubernetes.
    own = [each for (kind, _), each in found.items() if kind not in (*OPERATORS, *EXTENSIONS)]
    assert len(own) >= 5
    assert extension_errors(helm, [each for (kind, _), each in found.items() if kind in EXTENSIONS]) == []
    for version in VERSIONS:
        assert schema_errors(helm, version, own) == [], version
    deployment(found)["spec"]["template"]["spec"]["containers"][0]["redOnly"] = True
    (error,) = schema_errors(helm, VERSIONS[-1], own)
    assert "redOnly" in error


@pytest.mark.parametrize("name", CASES)
def test_configuration_in_the_map_is_one_of_gorgo(helm: Environment, name: str) -> None:
    found = rendered(helm, CASES[name])
    config = parse_config(configuration(found).encode(), environ={})
    assert (config.proxy.bind, config.proxy.admin_bind) == ("0.0.0.0:8080", "0.0.0.0:9090")
    if name == "everything":
        assert (config.limits.max_body_bytes, config.limits.prefix_index_blocks) == (33554432, 4000000)


def test_plain_manifests_are_what_the_chart_makes(helm: Environment) -> None:
    for name, text in plain(helm).items():
        assert (MANIFESTS / name).read_text() == text, f"{name}: python -m tests.packaging.chart"


#: Findings that are meant.
MEANT = {
    "CKV_K8S_11": "a processor limit stalls all streams of an event loop at once",
    "CKV_K8S_38": "the fleet sources of the configuration use the token",
}


def test_policy_scanner_finds_in_the_manifests_what_is_meant_and_nothing_else() -> None:
    try:
        scanner = cloud_environment()
    except InstallError as error:
        pytest.skip(f"POLICY SCAN SKIPPED: {error}")
    command = [str(scanner.folder / "bin/checkov"), "--directory", str(MANIFESTS), "--framework", "kubernetes"]
    done = subprocess.run(
        [*command, "--skip-download", "--compact", "--output", "json"], capture_output=True, text=True, check=False
    )
    report = json.loads(done.stdout)
    assert {one["check_id"] for one in report["results"]["failed_checks"]} == set(MEANT)
    assert report["summary"]["passed"] > 80, "it read them"


def test_rights_are_those_of_the_sources_and_no_other(helm: Environment) -> None:
    found = rendered(helm, CASES["everything"])
    rules = {
        name: [(rule["resources"], rule.get("resourceNames"), rule["verbs"]) for rule in each["rules"]]
        for (kind, name), each in found.items()
        if kind in ("Role", "ClusterRole")
    }
    follow = ["list", "watch"]
    assert rules == {
        "gorgo-p": [(["pods"], None, follow)],
        "gorgo-s": [(["endpointslices"], None, follow)],
        "gorgo-i": [(["pods"], None, follow), (["inferencepools"], ["qwen"], follow)],
        "llm-gorgo-nodes": [(["nodes"], None, follow)],
    }
    assert found["Role", "gorgo-p"]["metadata"]["namespace"] == "engines"
    bound = {name for kind, name in found if kind in ("RoleBinding", "ClusterRoleBinding")}
    assert bound == set(rules)


@pytest.mark.parametrize("sources", [[DNS], [OUTSIDE], None])
def test_proxy_without_a_source_in_the_cluster_has_neither_token_nor_rights(
    helm: Environment, sources: list[Any] | None
) -> None:
    replicas = [{"name": "a", "region": "local", "url": "http://engine:30000"}]
    found = rendered(helm, {"config": {"fleet_sources": sources, "replicas": replicas}})
    assert not [kind for kind, _ in found if "Role" in kind]
    assert found["Deployment", "gorgo"]["spec"]["template"]["spec"]["automountServiceAccountToken"] is False


def test_time_to_drain_follows_the_configuration(helm: Environment) -> None:
    found = rendered(helm, {**CASES["everything"], "preStopSeconds": 25})
    pod = found["Deployment", "gorgo"]["spec"]["template"]["spec"]
    assert pod["terminationGracePeriodSeconds"] == 25 + 301 + 10
    assert "replicas" not in found["Deployment", "gorgo"]["spec"], "the autoscaler has the number"


@pytest.mark.parametrize(
    ("values", "place"),
    [
        ({"image": {"digest": ""}}, "/image/digest"),
        ({"image": {"digest": "latest"}}, "/image/digest"),
        ({"admin": {"secret": ""}}, "/admin/secret"),
        ({"config": {"proxy": {"bind": "0.0.0.0:1"}}}, "/config/proxy/bind"),
        ({"replicas": 0}, "/replicas"),
        ({"shared": {"url": "redis://store"}}, "/shared/secret"),
        ({"shared": {"url": "redis://:password@store", "secret": "s"}}, "/shared/url"),
        ({"config": {"shared": {}}}, "/config/shared"),
        ({"picker": {"inferencePool": {"failureMode": "Open"}}}, "/picker/inferencePool/failureMode"),
        ({"imgae": {}}, "imgae"),
        ({"config": {"proxy": {"tls": {}}}}, "/config/proxy/tls"),
        ({"ingress": {"enabled": True}}, "/ingress/host"),
        ({"extraEnv": [{"value": "x"}]}, "/extraEnv/0"),
        ({"serviceMonitor": {"enabled": True}}, "serviceMonitor needs metrics.secret"),
        ({"picker": {"enabled": True}, "clientKeys": {"secret": "keys"}}, "client keys need .*FailClose"),
        ({"picker": {"enabled": True}, "config": {"clients": {"keys_file": "/k"}}}, "client keys need .*FailClose"),
        ({"picker": {"enabled": True}, "config": {"models": [RESTRICTED]}}, "regions of models need .*FailClose"),
        (
            {"picker": {"enabled": True}, "engineKeys": {"secret": "k"}, "networkPolicy": {"clients": [{}]}},
            "keys of engines need .*FailClose",
        ),
        ({"picker": FAIL_CLOSE, "engineKeys": {"secret": "k"}}, "keys of engines need networkPolicy.clients"),
        (
            {"picker": FAIL_CLOSE, "config": {"fleet_sources": [POD_SOURCE | {"replica": {"api_key_env": "K"}}]}},
            "keys of engines need networkPolicy.clients",
        ),
        (
            {"serviceMonitor": {"enabled": True}, "metrics": {"secret": "m"}},
            "serviceMonitor needs networkPolicy.prometheus",
        ),
        ({"replicaScaling": BY_HPA}, "replicaScaling needs config.scaling.ttft_ms"),
        (
            {"config": SCALED_CONFIG, "replicaScaling": {**BY_KEDA, "prometheus": ""}},
            "replicaScaling.prometheus: the address",
        ),
        ({"replicaScaling": {"by": "vpa"}}, "/replicaScaling/by"),
        ({"replicaScaling": {"groups": [{"name": "engines"}]}}, "/replicaScaling/groups/0"),
    ],
)
def test_wrong_value_is_refused_with_its_place(helm: Environment, values: Mapping[str, Any], place: str) -> None:
    with pytest.raises(ChartError, match=place):
        render(helm, with_values(values))


def test_replicas_follow_the_number_itself_at_once_by_keda(helm: Environment) -> None:
    spec = rendered(helm, CASES["replicas by keda"])["ScaledObject", "gorgo-llama"]["spec"]
    assert spec["scaleTargetRef"] == {"apiVersion": "apps/v1", "kind": "StatefulSet", "name": "llama"}
    assert (spec["minReplicaCount"], spec["maxReplicaCount"]) == (1, 8)
    (trigger,) = spec["triggers"]
    assert (trigger["metricType"], trigger["metadata"]["threshold"]) == ("AverageValue", "1")
    # Without a store each router sees its own part of the load.
    assert trigger["metadata"]["query"] == 'sum(gorgo_replicas_wanted{region="eu",model="meta/llama"})'
    behavior = spec["advanced"]["horizontalPodAutoscalerConfig"]["behavior"]
    assert {one["stabilizationWindowSeconds"] for one in behavior.values()} == {0}, "the number has its own hysteresis"


def test_routers_of_one_store_all_say_the_whole_number(helm: Environment) -> None:
    shared = {"url": "redis://store:6379/0", "secret": "s", "passwordKey": ""}
    found = rendered(helm, {**CASES["replicas by keda"], "shared": shared})
    (trigger,) = found["ScaledObject", "gorgo-llama"]["spec"]["triggers"]
    assert trigger["metadata"]["query"].startswith("max(")


def test_replicas_follow_the_number_itself_at_once_by_the_autoscaler_of_kubernetes(helm: Environment) -> None:
    spec = rendered(helm, CASES["replicas by hpa"])["HorizontalPodAutoscaler", "gorgo-engines"]["spec"]
    (metric,) = spec["metrics"]
    assert metric["external"] == {
        "metric": {
            "name": "gorgo_replicas_wanted",
            "selector": {"matchLabels": {"region": "us", "model": "none"}},
        },
        "target": {"type": "AverageValue", "averageValue": "1"},
    }
    assert (spec["minReplicas"], spec["maxReplicas"]) == (2, 8)
    assert {one["stabilizationWindowSeconds"] for one in spec["behavior"].values()} == {0}


def test_image_has_the_digest_that_was_given(helm: Environment) -> None:
    found = rendered(helm, {"image": {"repository": "registry.example.org/gorgo"}})
    (container,) = found["Deployment", "gorgo"]["spec"]["template"]["spec"]["containers"]
    assert container["image"] == f"registry.example.org/gorgo@{NO_DIGEST}"


def test_picker_s_gateway_is_led_over_the_pool_to_the_picker_and_the_picker_to_the_pool(helm: Environment) -> None:
    found = rendered(helm, CASES["picker"])
    route, pool = found["HTTPRoute", "gorgo-picker"], found["InferencePool", "qwen"]
    (backend,) = route["spec"]["rules"][0]["backendRefs"]
    assert backend == {"group": pool["apiVersion"].split("/")[0], "kind": pool["kind"], "name": "qwen"}
    picker = pool["spec"]["endpointPickerRef"]
    (port,) = found[picker["kind"], picker["name"]]["spec"]["ports"]
    assert port == {"name": "grpc", "port": picker["port"]["number"], "targetPort": "grpc", "appProtocol": "http2"}
    config = parse_config(found["ConfigMap", "gorgo-picker"]["data"]["regions.yaml"].encode(), environ={})
    (source,) = config.fleet_sources
    assert (source.kind, source.pool, source.replica.region) == ("inference-pool", "qwen", "local")
    read = read_pool(pool)
    assert (read.selector, read.ports) == ((("app", "qwen"),), (8000, 8001))
    (role,) = (each for (kind, _), each in found.items() if kind == "Role")
    assert [rule.get("resourceNames") for rule in role["rules"]] == [None, ["qwen"]]
    assert picker["failureMode"] == "FailOpen", "a gateway outlives its picker"


def test_client_keys_are_accepted_where_the_gateway_fails_closed(helm: Environment) -> None:
    pool = {"failureMode": "FailClose"}
    values = {"picker": {"enabled": True, "inferencePool": pool}, "clientKeys": {"secret": "keys"}}
    found = rendered(helm, values)
    assert [
        each["spec"]["endpointPickerRef"]["failureMode"] for (kind, _), each in found.items() if kind == "InferencePool"
    ] == ["FailClose"]


def test_keys_of_engines_are_accepted_where_the_gateway_alone_reaches_the_picker(helm: Environment) -> None:
    gateway = [{"podSelector": {"matchLabels": {"app": "gateway"}}}]
    values = {"picker": FAIL_CLOSE, "engineKeys": {"secret": "keys"}, "networkPolicy": {"clients": gateway}}
    (rule,) = rendered(helm, values)["NetworkPolicy", "gorgo-picker"]["spec"]["ingress"]
    assert rule == {"ports": [{"port": "grpc"}], "from": gateway}


def test_extension_with_a_field_that_is_none_is_refused(helm: Environment) -> None:
    found = rendered(helm, CASES["picker"])
    pool, route = found["InferencePool", "qwen"], found["HTTPRoute", "gorgo-picker"]
    pool["spec"]["extensionRef"] = pool["spec"].pop("endpointPickerRef")
    route["spec"]["rules"][0]["timeouts"] = {"request": 600}
    lines = extension_errors(helm, [pool, route])
    assert {line.split()[2] for line in lines} == {"$.spec", "$.spec.rules[0].timeouts.request"}


def test_store_s_secrets_are_references_and_its_url_is_the_configuration_s(helm: Environment) -> None:
    for name in ("picker", "store without a password"):
        found = rendered(helm, CASES[name])
        shared = parse_config(configuration(found).encode(), environ={}).shared
        assert shared is not None
        pod = deployment(found)["spec"]["template"]["spec"]
        references = {
            one["name"]: one["valueFrom"]["secretKeyRef"]
            for one in pod["containers"][0]["env"]
            if "secretKeyRef" in one.get("valueFrom", {})
        }
        assert set(references) == {shared.key_env, shared.password_env} - {None}
        secret = CASES[name]["shared"]["secret"]
        assert references["GORGO_GROUP_KEY"] == {"name": secret, "key": "group-key"}
        mounts = {mount["name"]: mount["mountPath"] for mount in pod["containers"][0]["volumeMounts"]}
        if shared.ca_file is not None:
            assert (mounts["store"], shared.ca_file) == ("/etc/gorgo-store", "/etc/gorgo-store/ca.crt")
        else:
            assert "store" not in mounts


def test_tls_is_the_configuration_s_the_probes_and_the_monitor_s(helm: Environment) -> None:
    found = rendered(helm, CASES["everything"])
    config = parse_config(configuration(found).encode(), environ={})
    pod = deployment(found)["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    mounts = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
    secrets = {volume["name"]: volume["secret"]["secretName"] for volume in pod["volumes"] if "secret" in volume}
    assert config.proxy.tls.cert is not None
    assert config.proxy.tls.key is not None
    for file in (config.proxy.tls.cert, config.proxy.tls.key):
        assert secrets[mounts[file.rpartition("/")[0]]] == "serve-tls"
    assert {container[f"{kind}Probe"]["httpGet"]["scheme"] for kind in ("startup", "liveness", "readiness")} == {
        "HTTPS"
    }
    (endpoint,) = found["ServiceMonitor", "gorgo"]["spec"]["endpoints"]
    assert (endpoint["port"], endpoint["scheme"]) == ("http", "https")


def test_metrics_are_scraped_with_a_token_that_is_good_for_nothing_else(helm: Environment) -> None:
    found = rendered(helm, CASES["picker"])
    (endpoint,) = found["ServiceMonitor", "gorgo-picker"]["spec"]["endpoints"]
    secret = endpoint["authorization"]["credentials"]["name"]
    assert secret == "gorgo-metrics" != REQUIRED["admin"]["secret"]
    pod = deployment(found)["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    mounts = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
    secrets = {volume["name"]: volume["secret"]["secretName"] for volume in pod["volumes"] if "secret" in volume}
    environment = {one["name"]: one.get("value") for one in container["env"]}
    for variable, name in (
        ("GORGO_METRICS_TOKEN_FILE", secret),
        ("GORGO_ADMIN_TOKEN_FILE", REQUIRED["admin"]["secret"]),
    ):
        folder, _, key = environment[variable].rpartition("/")
        assert (secrets[mounts[folder]], key) == (name, "token")


def test_alerts_and_dashboard_are_those_of_the_repository(helm: Environment) -> None:
    found = rendered(helm, CASES["everything"])
    assert found["PrometheusRule", "gorgo"]["spec"]["groups"][0]["rules"] == alerts()
    assert json.loads(found["ConfigMap", "gorgo-dashboard"]["data"]["gorgo-dashboard.json"]) == dashboard()
    assert found["ConfigMap", "gorgo-dashboard"]["metadata"]["labels"]["grafana_dashboard"] == "1"


def test_tuner_finds_every_pod_and_its_history_outlives_its_own(helm: Environment) -> None:
    for case, kind in (("everything", "persistentVolumeClaim"), ("picker", "emptyDir")):
        found = rendered(helm, CASES[case])
        (tuner,) = (each for (kind_, name), each in found.items() if kind_ == "Deployment" and name.endswith("-tuner"))
        pod = tuner["spec"]["template"]["spec"]
        (container,) = pod["containers"]
        name, values = parsed(container["args"])
        assert (name, values["every_address"]) == ("tune", True)
        (url,) = values["url"]
        service = found["Service", urlsplit(url).hostname]
        assert service["spec"]["clusterIP"] == "None", "its name has the address of each pod"
        assert {port["port"] for port in service["spec"]["ports"]} >= {urlsplit(url).port}
        (history,) = (volume for volume in pod["volumes"] if volume["name"] == "history")
        assert kind in history
        assert (tuner["spec"]["replicas"], tuner["spec"]["strategy"]) == (1, {"type": "Recreate"})
        labels = tuner["spec"]["template"]["metadata"]["labels"]
        assert tuner["spec"]["selector"]["matchLabels"].items() <= labels.items()
        routers = deployment(found)["spec"]["selector"]["matchLabels"]
        assert not routers.items() <= labels.items(), "a Service of routers must not lead to the tuner"
    (_, admin) = rendered(helm, CASES["everything"])["NetworkPolicy", "gorgo"]["spec"]["ingress"]
    peers = [peer.get("podSelector", peer.get("namespaceSelector"))["matchLabels"] for peer in admin["from"]]
    assert {"app": "operator"} in peers
    assert {"kubernetes.io/metadata.name": "monitoring"} in peers
    assert any(peer.get("app.kubernetes.io/component") == "tuner" for peer in peers)


def test_ways_of_clients_lead_to_the_service(helm: Environment) -> None:
    found = rendered(helm, CASES["everything"])
    service = found["Service", "gorgo"]
    (port,) = service["spec"]["ports"]
    (backend,) = found["HTTPRoute", "gorgo"]["spec"]["rules"][0]["backendRefs"]
    assert backend == {"kind": "Service", "name": "gorgo", "port": port["port"]}
    (rule,) = found["Ingress", "gorgo"]["spec"]["rules"]
    (path,) = rule["http"]["paths"]
    assert path["backend"]["service"] == {"name": "gorgo", "port": {"number": port["port"]}}


def test_extras_are_the_pod_s(helm: Environment) -> None:
    template = deployment(rendered(helm, CASES["everything"]))["spec"]["template"]
    (container,) = template["spec"]["containers"]
    assert template["metadata"]["labels"]["team"] == "llm"
    assert CASES["everything"]["extraEnv"][0] in container["env"]
    assert CASES["everything"]["extraVolumes"][0] in template["spec"]["volumes"]
    assert CASES["everything"]["extraVolumeMounts"][0] in container["volumeMounts"]


#: Changes of values that the running process does not follow; `live.reload.reloader` has the keys.
RESTARTS: Sequence[Mapping[str, Any]] = (
    {"tls": {"secret": "serve-tls"}},
    {"config": {"proxy": {"tracing": {"endpoint": "http://collector:4318/v1/traces"}}}},
    {"shared": {"url": "redis://a", "secret": "s"}},
    {"picker": {"enabled": True}, "config": {"picker": {"hold_s": 5.0}}},
    {"extraEnv": [{"name": "A", "value": "b"}]},
)


@pytest.mark.parametrize("change", RESTARTS)
def test_each_key_that_needs_a_restart_changes_the_pod(helm: Environment, change: Mapping[str, Any]) -> None:
    before = {"picker": {"enabled": True}} if "picker" in change else {}
    pods = [deployment(rendered(helm, values))["spec"]["template"] for values in (before, change)]
    assert pods[0] != pods[1]
    followed = {"config": {"limits": {"max_in_flight": 7}}}
    assert (
        deployment(rendered(helm, followed))["spec"]["template"] == deployment(rendered(helm, {}))["spec"]["template"]
    )


def test_change_that_needs_a_restart_changes_the_pod(helm: Environment) -> None:
    stores: tuple[dict[str, str], ...] = ({}, {"url": "redis://a", "secret": "s"}, {"url": "redis://b", "secret": "s"})
    pods = [deployment(rendered(helm, {"shared": shared}))["spec"]["template"] for shared in stores]
    annotations = [pod["metadata"].get("annotations") for pod in pods]
    assert annotations[0] is None
    assert annotations[1] != annotations[2]
