"""The chart, rendered by Helm's own library in an environment of its own, and the plain manifests made of it.

python -m tests.packaging.chart      # writes packaging/kubernetes/manifests anew
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from tests.system.environments import Environment, kubernetes_environment

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "packaging/kubernetes"
CHART = FOLDER / "chart"
MANIFESTS = FOLDER / "manifests"
#: To be replaced, as the image's place: no cluster has such an image.
NO_DIGEST = "sha256:" + 64 * "0"
REQUIRED: Mapping[str, Any] = {"image": {"digest": NO_DIGEST}, "admin": {"secret": "gorgo-admin"}}

_RENDER = """
import json, sys
import helm_python
folder, values = sys.argv[1], json.load(sys.stdin)
try:
    with helm_python.Chart.load(folder) as chart:
        chart.validate_schema(values)
        print(json.dumps({"files": chart.render(values, name="gorgo", namespace="llm")}))
except helm_python.HelmError as error:
    print(json.dumps({"error": str(error)}))
"""
_VALIDATE = """
import json, sys
import kubernetes_validate
version = sys.argv[1]
for document in json.load(sys.stdin):
    try:
        kubernetes_validate.validate(document, version, strict=True)
    except Exception as error:
        print(document["kind"], document["metadata"]["name"], *str(error).split())
"""

_VALIDATE_OWN = """
import json, sys
from jsonschema import Draft7Validator
folder = sys.argv[1]
for document in json.load(sys.stdin):
    with open(f"{folder}/{document['kind'].lower()}.json") as file:
        validator = Draft7Validator(json.load(file))
    for error in validator.iter_errors(document):
        print(document["kind"], document["metadata"]["name"], error.json_path, *error.message.split())
"""
#: Kinds that are no part of Kubernetes, by schemas of ours: those of their projects come with their controllers.
EXTENSIONS = ("InferencePool", "HTTPRoute", "ScaledObject")
#: Kinds of the Prometheus operator, which have no schema here.
OPERATORS = ("ServiceMonitor", "PrometheusRule")

METRICS: Mapping[str, Any] = {"metrics": {"secret": "gorgo-metrics"}}

#: Templates of each file of the plain manifests, with the values that turn them on.
PLAIN: Mapping[str, tuple[Sequence[str], Mapping[str, Any]]] = {
    "gorgo.yaml": (
        ("rbac", "configmap", "services", "deployment", "poddisruptionbudget", "networkpolicy"),
        METRICS,
    ),
    "picker.yaml": (
        (
            "rbac",
            "configmap",
            "services",
            "deployment",
            "poddisruptionbudget",
            "networkpolicy",
            "inferencepool",
            "httproute",
        ),
        {"picker": {"enabled": True, "httpRoute": {"gateway": "inference-gateway"}}, **METRICS},
    ),
    "autoscaler.yaml": (("horizontalpodautoscaler",), {"autoscaling": {"enabled": True}}),
    "servicemonitor.yaml": (
        ("servicemonitor",),
        {"serviceMonitor": {"enabled": True}, "networkPolicy": {"enabled": False}, **METRICS},
    ),
}
_HEADS = {
    "gorgo.yaml": (
        "# What the chart beside this folder makes of its defaults, for `kubectl apply`. Replace namespace, image and\n"
        "# digest; make the Secrets first:\n"
        "#   kubectl --namespace llm create secret generic gorgo-admin --from-literal=token=$(openssl rand -hex 32)\n"
        "#   kubectl --namespace llm create secret generic gorgo-metrics --from-literal=token=$(openssl rand -hex 32)\n"
    ),
    "picker.yaml": (
        "# The endpoint picker behind a gateway in place of the proxy. Needs the Gateway API, its Inference Extension\n"
        "# (v1) and a Gateway with the name below. Replace namespace, image and digest; the Secrets as in gorgo.yaml.\n"
    ),
    "autoscaler.yaml": "# Needs an adapter that serves gorgo_saturation_ratio as a metric of pods.\n",
    "servicemonitor.yaml": (
        "# Needs the Prometheus operator, and its pods as peers of the port `admin` in the NetworkPolicy.\n"
    ),
}


class ChartError(Exception):
    """Helm refused chart or values."""


def render(environment: Environment, values: Mapping[str, Any]) -> dict[str, str]:
    """Return the text of each template by its name. Raises `ChartError`."""
    done = _run(environment, _RENDER, values, str(CHART))
    answer = json.loads(done)
    if "error" in answer:
        raise ChartError(answer["error"])
    return {Path(name).stem: text for name, text in answer["files"].items()}


def documents(*texts: str) -> list[dict[str, Any]]:
    return [found for text in texts for found in yaml.safe_load_all(text) if found]


def schema_errors(environment: Environment, version: str, found: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return a line for each document that the schema of its kind refuses, in a version of Kubernetes."""
    return _run(environment, _VALIDATE, found, version).splitlines()


def extension_errors(environment: Environment, found: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return a line for each fault of a document of `EXTENSIONS`."""
    return _run(environment, _VALIDATE_OWN, found, str(Path(__file__).parent / "schemas")).splitlines()


def with_values(*changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return the required values with others, merged as Helm merges them."""
    merged: dict[str, Any] = {}
    for change in (REQUIRED, *changes):
        merged = _merged(merged, change)
    return merged


def plain(environment: Environment) -> dict[str, str]:
    """Return the plain manifests by file."""
    made = {}
    for name, (templates, values) in PLAIN.items():
        files = render(environment, with_values(values))
        parts = (files[template].strip() for template in templates)
        made[name] = _HEADS[name] + "\n---\n".join(parts) + "\n"
    return {name: _without_helm(text) for name, text in made.items()}


def _without_helm(text: str) -> str:
    lines = (line for line in text.splitlines() if "helm.sh/chart:" not in line)
    return "\n".join(line for line in lines if "app.kubernetes.io/managed-by:" not in line) + "\n"


def _merged(base: Mapping[str, Any], change: Mapping[str, Any]) -> dict[str, Any]:
    found = dict(base)
    for key, value in change.items():
        before = found.get(key)
        found[key] = _merged(before, value) if isinstance(before, Mapping) and isinstance(value, Mapping) else value
    return found


def _run(environment: Environment, script: str, data: object, *arguments: str) -> str:
    command = [str(environment.python), "-c", script, *arguments]
    done = subprocess.run(command, input=json.dumps(data), capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


def main() -> None:
    """Write the plain manifests."""
    MANIFESTS.mkdir(exist_ok=True)
    for name, text in plain(kubernetes_environment()).items():
        (MANIFESTS / name).write_text(text)


if __name__ == "__main__":
    main()
