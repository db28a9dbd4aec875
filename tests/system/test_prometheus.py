"""The real Prometheus: it answers each question of the dashboard, and each fault raises its alert."""

from __future__ import annotations

import asyncio
import itertools
import json
import math
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from aiohttp import web

from gorgo.lab.demo import MODEL, DemoFleet, Processes, running_fleet
from tests.observability.promql import FOLDER, INTERVAL, Target, alert_targets, alerts, dashboard_targets
from tests.proxy.authority import OPENSSL, needs_openssl
from tests.proxy.fakes import DONE, ROLE, FakeReplica, Script, answer, chat, delta, event, hang, reset_after, running
from tests.terraform.workspace import Workspace

__all__ = ["promtool"]


# --- A Prometheus of a test's own, on loopback, with the alerts that ship.


SCRAPE_S = 1
_LISTENING = r'"address":"(127\.0\.0\.1:[1-9]\d*)",[^\n]*"Listening on"'
_START_S = 30.0


@pytest.fixture(scope="module")
def promtool() -> str:
    found = shutil.which("promtool")
    if found is None or shutil.which("prometheus") is None:
        pytest.skip("PROMETHEUS TESTS SKIPPED: no prometheus and promtool here; apt-get install prometheus")
    return found


@contextmanager
def prometheus(folder: Path, targets: Mapping[str, str]) -> Iterator[str]:
    """Scrape `targets` (job to URL), and yield the URL; stopped by its process. TLS is not verified."""
    jobs = []
    for job, url in targets.items():
        place = httpx.URL(url)
        static = [{"targets": [f"{place.host}:{place.port}"]}]
        jobs.append(
            {
                "job_name": job,
                "scheme": place.scheme,
                "metrics_path": place.path,
                "static_configs": static,
                "tls_config": {"insecure_skip_verify": True},
            }
        )
    shutil.copy(FOLDER / "gorgo-rules.yml", folder)
    config = folder / "prometheus.yml"
    times = {"scrape_interval": f"{SCRAPE_S}s", "evaluation_interval": f"{SCRAPE_S}s"}
    config.write_text(yaml.safe_dump({"global": times, "rule_files": ["gorgo-rules.yml"], "scrape_configs": jobs}))
    with Processes(folder, {}, stop_timeout_s=20.0) as processes:
        command = [str(shutil.which("prometheus")), f"--config.file={config}", f"--storage.tsdb.path={folder}/tsdb"]
        processes.start_command("prometheus", [*command, "--web.listen-address=127.0.0.1:0", "--log.format=json"])
        address = processes.wait_for_line("prometheus", _LISTENING, timeout_s=_START_S)
        url = f"http://{address[1]}"
        wait_until(lambda: httpx.get(f"{url}/-/ready", trust_env=False).status_code == 200, _START_S)
        yield url


def wait_until(condition: Callable[[], bool], limit_s: float) -> None:
    """Poll until it holds; fail after the limit."""
    deadline_s = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline_s, "it did not come to be"
        time.sleep(0.2)


# --- The real Prometheus scrapes a proxy and a tuner at work, and has an answer to each question of the dashboard.
#
# Needs `prometheus` and `promtool` (the distribution's package prometheus), and `terraform` for the configuration that
# it renders.


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


# --- Real routers with one fault each, a real Prometheus: each fault raises its alert within five minutes.
#
# The windows of the rules are minutes, so the test takes four to five. All faults are at once, on three routers.


CHAT = "/v1/chat/completions"
LIMIT_S = 300.0
#: Before the faults.
WELL_S = 20.0
#: Of each router: between two requests of its one client, and how long that client waits for an answer, s.
EVERY_S, PATIENCE_S = 0.1, 4.0
TOKENS = [delta("a") for _ in range(8)]
USAGE = event({"choices": [], "usage": {"prompt_tokens": 12, "completion_tokens": len(TOKENS)}})
#: Between two tokens of a good replica, and of one that decodes slowly, s.
STEP_S, SLOW_STEP_S = 0.01, 0.1
_READY = r"gorgo serve listening on (\S+) "
#: Alert, the label that tells which, and its value.
EXPECTED = {
    ("GorgoOutage", "job", "outage"),
    ("GorgoErrorBudgetFast", "job", "outage"),
    ("GorgoCertificateExpired", "job", "outage"),
    ("GorgoBrokenStreams", "replica", "cut"),
    ("GorgoReplicaOut", "replica", "hung"),
    ("GorgoDecodeSlow", "replica", "slow"),
    ("GorgoCannotWrite", "job", "full"),
}


@needs_openssl
async def test_each_fault_raises_its_alert_within_five_minutes(promtool: str, tmp_path: Path) -> None:
    async with AsyncExitStack() as stack:
        engines = {
            name: await stack.enter_async_context(running(decoding(STEP_S)))
            for name in ("good", "fine", "cut", "hung", "slow", "bad", "other")
        }
        processes = stack.enter_context(Processes(tmp_path, {"PATH": "/usr/bin:/bin"}))
        full = stack.enter_context(small_disk(tmp_path / "disk"))
        urls = {
            "faults": start(
                processes, tmp_path, "faults", {name: engines[name] for name in ("good", "fine", "cut", "hung", "slow")}
            ),
            "outage": start(processes, tmp_path, "outage", {"bad": engines["bad"]}, tls=expired(tmp_path)),
            "full": start(processes, tmp_path, "full", {"other": engines["other"]}, log=full / "requests.jsonl"),
        }
        targets = {job: f"{url}/metrics" for job, url in urls.items()}
        url = await asyncio.to_thread(stack.enter_context, prometheus(tmp_path, targets))
        for router in urls.values():
            await stack.enter_async_context(traffic(router))
        await asyncio.sleep(WELL_S)
        assert await firing(url) <= {("GorgoCertificateExpired", "job", "outage")}

        begun_s = time.monotonic()
        engines["cut"].scripts = [every_fourth(reset_after(ROLE, delta("a"), delta("b")))]
        engines["slow"].scripts = [decoding(SLOW_STEP_S)]
        engines["hung"].scripts, engines["hung"].silent = [hang()], "/ping"
        engines["bad"].scripts = [answer(500, b'{"error": {"message": "no"}}')]
        (full / "others").write_bytes(bytes(free_bytes(full)))
        seen: dict[tuple[str, str, str], float] = {}
        while EXPECTED - set(seen) and time.monotonic() - begun_s < LIMIT_S:
            await asyncio.sleep(1.0)
            for alert in await firing(url):
                seen.setdefault(alert, time.monotonic() - begun_s)
        processes.check_alive()
    after = {alert: round(after_s) for alert, after_s in seen.items()}
    sys.stdout.write(f"alerts by the seconds after their faults: {after}\n")
    assert EXPECTED - set(seen) == set()


def decoding(step_s: float) -> Script:
    """A stream with its usage, a token after another."""

    async def script(request: web.Request, _: bytes) -> web.StreamResponse:
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        for chunk in (ROLE, *TOKENS):
            await response.write(chunk)
            await asyncio.sleep(step_s)
        await response.write(USAGE + DONE)
        await response.write_eof()
        return response

    return script


def every_fourth(broken: Script) -> Script:
    """Three good answers and a broken one: what breaks always is ejected, and then its alert is another."""
    count, good = itertools.count(1), decoding(STEP_S)

    async def script(request: web.Request, body: bytes) -> web.StreamResponse:
        return await (good if next(count) % 4 else broken)(request, body)

    return script


async def firing(url: str) -> set[tuple[str, str, str]]:
    """Return the alerts that fire, each with its job or replica."""
    async with httpx.AsyncClient(trust_env=False) as client:
        found = (await client.get(f"{url}/api/v1/alerts")).json()["data"]["alerts"]
    alerts = [each["labels"] for each in found if each["state"] == "firing"]
    return {
        (labels["alertname"], name, labels[name])
        for labels in alerts
        for name in ("replica", "job")
        if name in labels and not (name == "job" and "replica" in labels)
    }


def start(
    processes: Processes,
    folder: Path,
    job: str,
    engines: Mapping[str, FakeReplica],
    *,
    tls: tuple[Path, Path] | None = None,
    log: Path | None = None,
) -> str:
    """Start one router, and return its URL."""
    rows = "\n".join(f"  - {{name: {name}, region: here, url: '{each.url}'}}" for name, each in engines.items())
    secured = "" if tls is None else f", tls: {{cert: '{tls[0]}', key: '{tls[1]}'}}"
    config = folder / f"{job}.yaml"
    config.write_text(
        f"proxy: {{region: here, bind: '127.0.0.1:0', admin_bind: '127.0.0.1:0', policy: round-robin{secured}}}\n"
        f"regions: [{{name: here}}]\nreplicas:\n{rows}\n"
    )
    more = [] if log is None else ["--request-log", str(log)]
    processes.start(job, ["serve", "--config", str(config), *more])
    return processes.wait_for_line(job, _READY)[1]


@asynccontextmanager
async def traffic(url: str) -> AsyncIterator[None]:
    """Send streamed requests at a steady rate until the end of the block."""
    async with httpx.AsyncClient(base_url=url, verify=False, timeout=PATIENCE_S, trust_env=False) as client:

        async def send() -> None:
            try:
                await client.post(CHAT, content=chat(stream=True), headers={"content-type": "application/json"})
            except httpx.HTTPError:
                return  # what becomes of it is Prometheus' to say

        async def run() -> None:
            async with asyncio.TaskGroup() as requests:
                while True:
                    requests.create_task(send())
                    await asyncio.sleep(EVERY_S)

        task = asyncio.create_task(run())
        try:
            yield
        finally:
            task.cancel()
            await asyncio.wait((task,))


@contextmanager
def small_disk(place: Path) -> Iterator[Path]:
    """A file system of half a megabyte."""
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=512k", "tmpfs", str(place)]
    done = subprocess.run(mount, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"ALERT TEST SKIPPED: a file system of a bounded size needs root: {done.stderr.strip()}")
    try:
        yield place
    finally:
        # The router may still write to it, which is stopped after this.
        subprocess.run(["umount", "--lazy", str(place)], check=True)


def free_bytes(place: Path) -> int:
    found = os.statvfs(place)
    return found.f_bavail * found.f_frsize


def expired(folder: Path) -> tuple[Path, Path]:
    """A certificate that expired in 2020, and its key."""
    assert OPENSSL is not None
    cert, key, settings = folder / "expired.crt", folder / "expired.key", folder / "ca.cnf"
    database = folder / "ca"
    database.mkdir()
    (database / "index.txt").touch()
    (database / "serial").write_text("01\n")
    settings.write_text(
        f"[ca]\ndefault_ca = own\n[own]\ndatabase = {database}/index.txt\nserial = {database}/serial\n"
        f"new_certs_dir = {database}\ndefault_md = sha256\npolicy = any\n[any]\ncommonName = supplied\n"
        "[req]\ndistinguished_name = name\n[name]\n"
    )
    asked = folder / "expired.csr"
    new = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-subj", "/CN=127.0.0.1"]
    request = ["req", "-config", settings, *new, "-keyout", key, "-out", asked]
    times = ["-startdate", "20200101000000Z", "-enddate", "20200201000000Z"]
    signing = ["ca", "-batch", "-config", settings, "-selfsign", "-keyfile", key, "-in", asked, "-out", cert, "-notext"]
    for command in (request, [*signing, *times]):
        subprocess.run([OPENSSL, *map(str, command)], check=True, capture_output=True)
    return cert, key
