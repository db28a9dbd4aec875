"""Tools of other people against `gorgo serve`: a load tool that replays a trace, and a tester led by the
descriptions.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median
from typing import Any

import httpx
import numpy as np
import pytest

from experiments.aiperf import Aiperf, run_aiperf
from gorgo.lab.prompt_text import prompt_text
from gorgo.lab.replay import replay_command
from gorgo.lab.replay_client import ReplayOptions
from tests.system.environments import Environment, InstallError, schemathesis_environment
from tests.system.processes import TOKEN, RouterProcess, engine_process, router_process
from tests.system.tiny_checkpoint import HUB_NAME
from tests.system.vllm_server import VllmServer

# --- A load tool of other people replays a trace through `gorgo serve` over two vLLM, and measures what we measure.
#
# Both tools send prompts of the same sizes at the same times with the same shared prefixes, but with other words in
# each run, so that none finds another's prompts cached. Requests are so far apart that none waits for another, and the
# tools take turns. Latencies of one run, seen by the tool at its end and by the router at its own, must agree, and so
# must what follows from the trace. Latencies of the two tools' own runs must agree where they can: where each tool
# agrees with itself from one run to the next. Where it does not, others use the machine, and the table says so.


REQUESTS = 20
#: Between two requests at least, and as a multiple of what one takes here, so that none waits for another: one that
#: waits is sent to the other engine, where its prefix is not cached. At most, so that all runs end in time.
SPACING_S, SPACING, SPACING_S_MAX = 1.0, 1.5, 8.0
OUTPUT_TOKENS = 16
#: Conversations that share their first three blocks of 512 tokens.
GROUPS = 4
AGREE = 0.05
_TIMEOUT_S = 300
#: Of each tool, taking turns; more only while a run disagrees with what the router saw of it.
RUNS, MOST_RUNS = 2, 4
#: What our replay wrote, a request each.
Records = list[dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Row:
    """One request of the trace."""

    timestamp_ms: int
    input_tokens: int
    hash_ids: tuple[int, ...]


def make_trace(*, words: int, spacing_s: float) -> list[Row]:
    """The same sizes, times and sharing for every `words`; the words differ."""
    rng = np.random.default_rng(0)
    times_ms = np.arange(REQUESTS) * round(spacing_s * 1e3)
    groups, cuts = rng.integers(GROUPS, size=REQUESTS), rng.integers(256, size=REQUESTS)
    first = words * 1_000_000
    return [
        Row(
            int(time_ms),
            4 * 512 - int(cut),
            (*(first + 10 * int(group) + block for block in range(3)), first + 1_000 + n),
        )
        for n, (time_ms, group, cut) in enumerate(zip(times_ms, groups, cuts, strict=True))
    ]


def write_for_us(path: Path, rows: Sequence[Row]) -> Path:
    lines = [
        {
            "timestamp": row.timestamp_ms,
            "input_length": row.input_tokens,
            "output_length": OUTPUT_TOKENS,
            "hash_ids": row.hash_ids,
        }
        for row in rows
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def write_for_aiperf(path: Path, rows: Sequence[Row]) -> Path:
    """With our text, so that prompts have the same tokens; its own text is from its own corpus."""
    lines = [
        {
            "timestamp": row.timestamp_ms,
            "text_input": prompt_text(row.hash_ids, row.input_tokens).decode(),
            "output_length": OUTPUT_TOKENS,
        }
        for row in rows
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


@pytest.fixture
def router(vllm_servers: tuple[VllmServer, VllmServer], tmp_path: Path) -> Iterator[RouterProcess]:
    replicas = {"left": vllm_servers[0].url, "right": vllm_servers[1].url}
    with router_process(tmp_path, replicas, engine="vllm") as router:
        yield router


def test_aiperf_replays_a_trace_without_an_error_and_agrees_with_our_replay(
    aiperf: Environment, router: RouterProcess, hub_cache: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # Engines are slower in their first requests; nobody measures these.
    few = make_trace(words=2 * MOST_RUNS, spacing_s=SPACING_S_MAX)[:4]
    warm = run_ours(router, write_for_us(tmp_path / "warm.jsonl", few), tmp_path / "warm")
    takes_s = median(record["e2e_s"] for record in warm)
    spacing_s = min(SPACING_S_MAX, max(SPACING_S, SPACING * takes_s))
    theirs: list[Aiperf] = []
    ours: list[Records] = []
    for run in range(MOST_RUNS):
        folder = tmp_path / str(run)
        folder.mkdir()
        trace = write_for_aiperf(folder / "theirs.jsonl", make_trace(words=2 * run, spacing_s=spacing_s))
        theirs.append(
            run_aiperf(
                aiperf, router.url, trace, folder / "aiperf", model="tiny", tokenizer=HUB_NAME, hub_cache=hub_cache,
                timeout_s=_TIMEOUT_S, more=["--extra-inputs", "ignore_eos:true"],
            )
        )  # fmt: skip
        seen = {sample["request_id"]: sample for sample in router.samples()}
        trace = write_for_us(folder / "ours.jsonl", make_trace(words=2 * run + 1, spacing_s=spacing_s))
        ours.append(run_ours(router, trace, folder / "replay"))
        assert theirs[-1].summary["error_summary"] == []
        assert len(theirs[-1].requests) == len(ours[-1]) == REQUESTS
        table = compare_counts(theirs[-1], ours[-1]) + compare_views(theirs[-1], seen)
        table += compare_runs(theirs, ours) if run else []
        with capsys.disabled():
            print_table(table)
        disagree = [line.name for line in table if line.must_agree and line.difference > AGREE]
        if run + 1 >= RUNS and not disagree:
            return
    pytest.fail(f"{MOST_RUNS} runs of each disagree, the last ones in {disagree}")


def run_ours(router: RouterProcess, trace: Path, out: Path) -> Records:
    """Our replay's records, none of which failed."""
    report = replay_command(ReplayOptions(trace=trace, url=router.url, out=out, show_progress=False))
    assert report.row.errors == 0
    return [json.loads(line) for line in (out / "requests.jsonl").read_text().splitlines()]


@dataclass(frozen=True, slots=True)
class Line:
    """One figure, measured twice."""

    name: str
    theirs: float
    ours: float
    must_agree: bool = True

    @property
    def difference(self) -> float:
        return abs(self.theirs - self.ours) / self.ours


def compare_counts(theirs: Aiperf, records: Records) -> list[Line]:
    """What follows from the trace, whatever the machine."""
    prompt, cached = (theirs.average(f"usage_prompt_{name}") for name in ("tokens", "cache_read_tokens"))
    span_s = max(record["sent_s"] for record in records) - min(record["sent_s"] for record in records)
    starts_ns = [request["metadata"]["request_start_ns"] for request in theirs.requests]
    return [
        Line("prompt tokens", prompt, mean(record["input_tokens"] for record in records)),
        Line("cached tokens", cached, mean(record["cached_tokens"] for record in records)),
        Line("output tokens", theirs.average("output_sequence_length"), mean(r["output_tokens"] for r in records)),
        Line("seconds from first to last", (max(starts_ns) - min(starts_ns)) / 1e9, span_s),
    ]


def compare_runs(theirs: Sequence[Aiperf], ours: Sequence[Records]) -> list[Line]:
    """Latencies of all runs so far, each measured by its own tool: the median over runs of each run's median.

    Ours count from the scheduled time; aiperf's from the sending, so what ours was late by is taken off.
    """
    pairs = {
        "TTFT ms, other runs": (
            [run.middle("time_to_first_token") for run in theirs],
            [median(record["ttft_ms"] - slip_s(record) * 1e3 for record in run) for run in ours],
        ),
        "E2E ms, other runs": (
            [run.middle("request_latency") for run in theirs],
            [median(record["e2e_s"] - slip_s(record) for record in run) * 1e3 for run in ours],
        ),
    }
    return [
        Line(name, median(one), median(other), must_agree=max(spread(one), spread(other)) <= AGREE)
        for name, (one, other) in pairs.items()
    ]


def slip_s(record: dict[str, Any]) -> float:
    """How late a request was sent."""
    return float(record["sent_s"] - record["scheduled_s"])


def spread(figures: Sequence[float]) -> float:
    """How far runs of one tool are apart."""
    return max(figures) / min(figures) - 1.0


def compare_views(theirs: Aiperf, seen: dict[str, dict[str, Any]]) -> list[Line]:
    """One run, seen by the tool and by the router."""
    samples = [seen[request["metadata"]["x_request_id"]] for request in theirs.requests]
    return [
        Line("TTFT ms, router's view", theirs.average("time_to_first_token"), mean(s["ttft_ms"] for s in samples)),
        Line("E2E ms, router's view", theirs.average("request_latency"), mean(s["e2e_s"] * 1e3 for s in samples)),
    ]


def print_table(table: Sequence[Line]) -> None:
    rows = [f"\n{'':30}{'aiperf':>10}{'ours':>10}{'differ':>9}"]
    for line in table:
        remark = "" if line.must_agree else "  SAYS NOTHING: a tool differs as much from itself"
        rows.append(f"{line.name:30}{line.theirs:10.2f}{line.ours:10.2f}{line.difference:9.1%}{remark}")
    print("\n".join(rows))  # noqa: T201 - the table is what the test is for


# --- A tester of other people, led by the published descriptions, against a real `gorgo serve` with an engine behind
# it.
#
# It makes requests that the descriptions allow and requests that they do not, and holds each answer against them: no
# error of the server's own, no status, type or shape that is not described. The number of examples is bounded and the
# seed fixed. Whatever it finds becomes a test in `tests/proxy`.


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
def router_schemathesis(tmp_path: Path) -> Iterator[RouterProcess]:
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


def test_requests_of_clients_by_their_description(
    schemathesis: Environment, router_schemathesis: RouterProcess
) -> None:
    done = run(schemathesis, router_schemathesis, "/openapi.json", router_schemathesis.url)
    assert done.status == 0, done.said
    assert done.requests > 10 * EXAMPLES
    is_well(router_schemathesis)


def test_calls_of_operators_by_their_description(schemathesis: Environment, router_schemathesis: RouterProcess) -> None:
    # A stream without an end is no answer to wait for.
    more = ("--header", f"authorization: Bearer {TOKEN}", "--exclude-path", "/admin/page/events")
    done = run(schemathesis, router_schemathesis, "/admin/openapi.json", router_schemathesis.admin_url, *more)
    assert done.status == 0, done.said
    assert done.requests > 10 * EXAMPLES
    is_well(router_schemathesis)
