"""The real Prometheus scrapes a proxy and a tuner at work, and has an answer to each question of the dashboard.

Needs `prometheus` and `promtool` (the distribution's package prometheus), and `terraform` for the configuration that it
renders.
"""

from __future__ import annotations

import json
import math
import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from gorgo.lab.demo.run import MODEL, DemoFleet, running_fleet
from tests.observability.promql import FOLDER, INTERVAL, Target, alert_targets, alerts, dashboard_targets
from tests.system.prometheus_process import SCRAPE_S, prometheus, promtool, wait_until
from tests.terraform.workspace import Workspace

__all__ = ["promtool"]

RULES_TEST = Path(__file__).parents[1] / "observability/rules_test.yml"
PACKAGED = Path(__file__).parents[2] / "packaging/prometheus.yml"
#: A minute holds the whole replay, so that a rate over it is of all that happened.
WINDOW = "1m"
#: Panels that need client keys, or a store between routers.
WITHOUT_KEYS_AND_STORE = {
    "429 by client",
    "Store and other routers",
    "Reports",
    "Bytes of reports",
    "Store: failures, entries left out, time of a write",
}
_ANSWER_S, _REPLAY_S = 60.0, 180.0


@dataclass(frozen=True, slots=True)
class Observed:
    """Processes that are scraped, and who scrapes them."""

    fleet: DemoFleet
    tuner_url: str
    prometheus_url: str
    #: When the replay was, s since 1970.
    began_s: float
    ended_s: float

    def ask(self, query: str) -> list[dict[str, Any]]:
        """The series that answer a query, without those that are no number."""
        answer = httpx.get(f"{self.prometheus_url}/api/v1/query", params={"query": query}, timeout=10, trust_env=False)
        assert answer.status_code == 200, (query, answer.text)
        found: list[dict[str, Any]] = answer.json()["data"]["result"]
        return [series for series in found if not math.isnan(float(series["value"][1]))]

    def ask_replay(self, query: str) -> list[dict[str, Any]]:
        """The series that answer a query at any moment of the replay."""
        params: dict[str, str | float] = {"query": query, "start": self.began_s, "end": self.ended_s, "step": SCRAPE_S}
        answer = httpx.get(f"{self.prometheus_url}/api/v1/query_range", params=params, timeout=10, trust_env=False)
        assert answer.status_code == 200, (query, answer.text)
        found: list[dict[str, Any]] = answer.json()["data"]["result"]
        return [series for series in found if not all(math.isnan(float(value)) for _, value in series["values"])]


@pytest.fixture(scope="module")
def observed(promtool: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Observed]:
    """Three simulated engines, a proxy, a tuner that moves, Prometheus; a short trace has been replayed."""
    folder = tmp_path_factory.mktemp("observed")
    with running_fleet("gorgo-ms", folder=folder, seed=0) as fleet:
        tuner_url = _start_tuner(fleet, folder)
        with prometheus(folder, {"gorgo": f"{fleet.url}/metrics", "gorgo-tuner": tuner_url}) as url:
            began_s = time.time()
            fleet.processes.start("replay", ["replay", "chat-small", "--url", fleet.url, "--model", MODEL])
            fleet.processes.wait("replay", timeout_s=_REPLAY_S)
            yield Observed(fleet, tuner_url, url, began_s, time.time())
            fleet.processes.check_alive()


def _start_tuner(fleet: DemoFleet, folder: Path) -> str:
    settings = folder / "tune.yaml"
    settings.write_text("{window: 16, hop: 4, warm_up_s: 1, poll_s: 0.5}\n")
    words = ["tune", "--url", fleet.admin_url, "--mode", "paper", "--settings", str(settings)]
    words += ["--metrics-bind", "127.0.0.1:0", "--database", f"sqlite:///{folder}/history.sqlite3"]
    fleet.processes.start("tune", words)
    return fleet.processes.wait_for_line("tune", r"metrics on (http://\S+)")[1]


def check(promtool: str, *words: str, text: str | None = None, cwd: Path | None = None) -> None:
    done = subprocess.run([promtool, *words], input=text, capture_output=True, text=True, cwd=cwd, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    if words[:2] == ("check", "metrics"):
        assert done.stdout + done.stderr == "", "not even advice"


def test_both_processes_are_scraped_without_a_complaint(observed: Observed) -> None:
    answer = httpx.get(f"{observed.prometheus_url}/api/v1/targets", timeout=10, trust_env=False).json()
    targets = {target["labels"]["job"]: target for target in answer["data"]["activeTargets"]}
    assert {job: (target["health"], target["lastError"]) for job, target in targets.items()} == {
        "gorgo": ("up", ""),
        "gorgo-tuner": ("up", ""),
    }


def test_expositions_are_as_prometheus_wants_them(observed: Observed, promtool: str) -> None:
    for url in (f"{observed.fleet.url}/metrics", observed.tuner_url):
        check(promtool, "check", "metrics", text=httpx.get(url, timeout=10, trust_env=False).text)


def test_every_query_of_the_dashboard_has_an_answer_with_the_labels_of_its_legend(observed: Observed) -> None:
    unanswered = {target.title for target in dashboard_targets() if not _is_answered(observed, target)}
    assert unanswered <= WITHOUT_KEYS_AND_STORE


def _is_answered(observed: Observed, target: Target) -> bool:
    found = observed.ask_replay(re.sub(r"\$(instance|region|model)\b", ".*", target.expr.replace(INTERVAL, WINDOW)))
    wanted = set(re.findall(r"\{\{(\w+)\}\}", target.legend))
    return bool(found) and all(wanted <= set(series["metric"]) for series in found)


def test_parts_of_the_ttft_add_up_in_prometheus_too(observed: Observed) -> None:
    (spent,) = observed.ask("sum(gorgo_ttft_component_seconds_total)")
    (whole,) = observed.ask("sum(gorgo_ttft_seconds_sum)")
    assert float(spent["value"][1]) == pytest.approx(float(whole["value"][1]), rel=1e-6)
    parts = {
        series["metric"]["part"]: float(series["value"][1])
        for series in observed.ask("sum by (part) (gorgo_ttft_component_seconds_total)")
    }
    assert parts["network"] > 0
    assert parts["prefill"] > 0


def test_alerts_are_loaded_and_quiet(observed: Observed) -> None:
    answer = httpx.get(f"{observed.prometheus_url}/api/v1/rules", timeout=10, trust_env=False).json()
    (group,) = answer["data"]["groups"]
    assert {rule["name"] for rule in group["rules"]} == {rule["alert"] for rule in alerts()}
    wait_until(lambda: _healths(observed) == {"ok"}, _ANSWER_S)
    firing = {
        alert["labels"]["alertname"]
        for rule in _rules(observed)
        for alert in rule["alerts"]
        if alert["state"] == "firing"
    }
    assert firing <= {"GorgoTunerRolledBack"}, "a tuner on a demo's trace may have to"


def _rules(observed: Observed) -> list[dict[str, Any]]:
    answer = httpx.get(f"{observed.prometheus_url}/api/v1/rules", timeout=10, trust_env=False).json()
    rules: list[dict[str, Any]] = answer["data"]["groups"][0]["rules"]
    return rules


def _healths(observed: Observed) -> set[str]:
    return {rule["health"] for rule in _rules(observed)}


def test_every_alert_is_a_query_that_prometheus_takes(observed: Observed) -> None:
    for target in alert_targets():
        observed.ask(target.expr)


def test_alerts_fire_when_they_should_and_only_then(promtool: str, tmp_path: Path) -> None:
    for file in (FOLDER / "gorgo-rules.yml", RULES_TEST):
        shutil.copy(file, tmp_path)
    check(promtool, "check", "rules", "gorgo-rules.yml", cwd=tmp_path)
    check(promtool, "test", "rules", RULES_TEST.name, cwd=tmp_path)


def test_configuration_that_terraform_renders_is_one(promtool: str, tmp_path: Path) -> None:
    if shutil.which("terraform") is None:
        pytest.skip("PROMETHEUS TESTS SKIPPED in part: no terraform to render the scrape configuration with")
    rendered = Workspace.copied(tmp_path / "copy").rendered()["observability"]
    for name, text in rendered.items():
        (tmp_path / name).write_text(text)
    check(promtool, "check", "config", "prometheus.yml", cwd=tmp_path)
    json.loads(rendered["gorgo-dashboard.json"])


def test_configuration_of_the_compose_file_is_one(promtool: str, tmp_path: Path) -> None:
    shutil.copy(PACKAGED, tmp_path)
    shutil.copy(FOLDER / "gorgo-rules.yml", tmp_path)
    check(promtool, "check", "config", "--syntax-only", PACKAGED.name, cwd=tmp_path)
