"""A Prometheus of a test's own, on loopback, with the alerts that ship."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
import yaml

from gorgo.lab.demo.run import Processes
from tests.observability.promql import FOLDER

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
