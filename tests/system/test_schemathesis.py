"""A tester of other people, led by the published descriptions, against a real `gorgo serve` with an engine behind it.

It makes requests that the descriptions allow and requests that they do not, and holds each answer against them: no
error of the server's own, no status, type or shape that is not described. The number of examples is bounded and the
seed fixed. Whatever it finds becomes a test in `tests/proxy`.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from tests.system.engine_process import engine_process
from tests.system.environments import Environment, InstallError, schemathesis_environment
from tests.system.router_process import TOKEN, RouterProcess, router_process

#: Of each operation and phase.
EXAMPLES = 25
SEED = 1
#: Longest answer that an example may ask for; the engine takes a second for it. The description has no bound.
MAX_TOKENS = 100
#: An answer that takes longer is a hang.
REQUEST_TIMEOUT_S = 20
TIMEOUT_S = 900
#: Not what is taken and what is refused: of a prompt the engine judges, and of weights the policy in force.
CHECKS = (
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_schema_conformance",
    "missing_required_header",
    "unsupported_method",
)


@pytest.fixture(scope="module")
def schemathesis() -> Environment:
    try:
        return schemathesis_environment()
    except InstallError as error:
        pytest.skip(f"SCHEMATHESIS TESTS SKIPPED: {error}")


@pytest.fixture
def router(tmp_path: Path) -> Iterator[RouterProcess]:
    with engine_process(tmp_path) as url, router_process(tmp_path, {"engine": url}, engine="sglang") as router:
        yield router


@dataclass(frozen=True, slots=True)
class Run:
    """What one run of the tool did."""

    requests: int
    said: str
    status: int


def run(tool: Environment, router: RouterProcess, described: str, url: str, *more: str) -> Run:
    folder = router.folder / described.strip("/").replace("/", "-")
    folder.mkdir()
    document = folder / "openapi.json"
    headers = {"authorization": f"Bearer {TOKEN}"}
    description = httpx.get(url + described, headers=headers, timeout=10).raise_for_status().json()
    description["components"]["schemas"].get("MaxTokens", {})["maximum"] = MAX_TOKENS
    document.write_text(json.dumps(description))
    options = {
        "--url": url,
        "--checks": ",".join(CHECKS),
        "--max-examples": str(EXAMPLES),
        "--seed": str(SEED),
        "--phases": "examples,coverage,fuzzing",
        "--request-timeout": str(REQUEST_TIMEOUT_S),
        "--report": "ndjson",
        "--report-ndjson-path": str(folder / "events.ndjson"),
        "--warnings": "off",
    }
    words = [word for pair in options.items() for word in pair]
    done = subprocess.run(
        [str(tool.folder / "bin" / "schemathesis"), "run", str(document), *words, *more],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    (folder / "said.txt").write_text(done.stdout + done.stderr)
    events = (folder / "events.ndjson").read_text()
    return Run(events.count('"status_code"'), done.stdout[-6000:] + done.stderr[-2000:], done.returncode)


def is_well(router: RouterProcess) -> None:
    """Nothing is reserved any more, the engine is in good standing, and the log tells of no fault of the proxy."""
    assert router.in_flight() == 0
    (row,) = router.admin("/admin/fleet")["replicas"]
    assert row["state"] in ("healthy", "draining")
    lines = [json.loads(line) for line in (router.folder / "router.log").read_text().splitlines()]
    assert [line for line in lines if line["event"] == "internal_error"] == []


def test_requests_of_clients_by_their_description(schemathesis: Environment, router: RouterProcess) -> None:
    done = run(schemathesis, router, "/openapi.json", router.url)
    assert done.status == 0, done.said
    assert done.requests > 10 * EXAMPLES
    is_well(router)


def test_calls_of_operators_by_their_description(schemathesis: Environment, router: RouterProcess) -> None:
    # A stream without an end is no answer to wait for.
    more = ("--header", f"authorization: Bearer {TOKEN}", "--exclude-path", "/admin/page/events")
    done = run(schemathesis, router, "/admin/openapi.json", router.admin_url, *more)
    assert done.status == 0, done.said
    assert done.requests > 10 * EXAMPLES
    is_well(router)
