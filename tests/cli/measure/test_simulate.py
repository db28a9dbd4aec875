"""Commands that measure without a server: `simulate`, `overload`, `rank` and `datasets` from the command line."""

from __future__ import annotations

import gzip
import json
from collections.abc import Sequence
from math import floor
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from gorgo.cli import app

# --- `gorgo overload` from the command line, on a fleet and a trace whose figures can be worked out by hand.
#
# One replica without a round trip, and a prompt of one prefill chunk with one output token each second. The replica
# prefills one after the other, so a request that comes every `gap_s` finds `number * (SERVICE_S - gap_s)` of work
# before it, and everything else follows: how many have their first token within two seconds, and so the capacity.


FLEET = """\
proxy: {region: here, policy: gorgo-ms}
regions: [{name: here}]
replicas:
  - name: here-0
    region: here
    url: http://127.0.0.1:30000
    capacity: {kv_tokens: 983549, max_running_requests: 64}
simulation: {rtt_ms: {here: 0}, profile: 2xL40S-Qwen3.5-35B-A3B-FP8-estimate}
"""
TOKENS = 4096
#: One chunk of the profile: its constant, linear and quadratic part.
SERVICE_S = 0.012 + TOKENS / 11_500 + 1.6e-9 * TOKENS**2 / 2
REQUESTS = 100
#: Of 100 requests the 95th must be within two seconds, so its 94 predecessors may leave it 2 s - SERVICE_S of work: a
#: gap of 0.3644 s. From 1, halves are tried up to 1/4, which is too fast, and then geometric means until two are within
#: 5 %: 2^-1.5 (no), 2^-1.25, 2^-1.375 and 2^-1.4375 (yes).
CAPACITY = 2**-1.4375
#: Of 20 requests 19 must be good: a gap of 0.2917 s at least; 2^-1.75 is the least tried that is.
TWENTY = ("--limit", "20", "--load", "3")
CAPACITY_OF_20 = 2**-1.75


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("overload")
    (folder / "regions.yaml").write_text(FLEET)
    rows = [
        {"timestamp": n * 1000, "input_length": TOKENS, "output_length": 1, "hash_ids": list(range(8 * n, 8 * n + 8))}
        for n in range(REQUESTS)
    ]
    (folder / "trace.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def overload(folder: Path, *words: str, trace: str = "trace.jsonl") -> Result:
    """In this process alone: runs in others would cost more to start than to do."""
    words = ("overload", str(folder / trace), "--config", str(folder / "regions.yaml"), *words)
    return CliRunner(env={"LOKY_MAX_CPU_COUNT": "1"}).invoke(app, words)


def configured(folder: Path, overload: str) -> tuple[str, str]:
    """Option for the same fleet with these keys of `overload`."""
    (folder / "other.yaml").write_text(f"{FLEET}overload: {{{overload}}}\n")
    return "--config", str(folder / "other.yaml")


def rows_of(folder: Path, *words: str) -> list[dict[str, Any]]:
    result = overload(folder, *words, "--json")
    assert result.exit_code == 0, result.output
    rows: list[dict[str, Any]] = json.loads(result.stdout)
    return rows


@pytest.fixture(scope="module")
def rows(folder: Path) -> list[dict[str, Any]]:
    return rows_of(folder)


def ttft_s(number: int, gap_s: float) -> float:
    """Of a request sent at once."""
    return SERVICE_S + max(0.0, number * (SERVICE_S - gap_s))


def test_each_load_is_a_multiple_of_the_capacity_found_sent_at_once_and_queued(rows: Sequence[dict[str, Any]]) -> None:
    assert [(row["load"], row["queueing"]) for row in rows] == [
        (load, queueing) for load in (0.7, 1.0, 1.3, 3.0) for queueing in (False, True)
    ]
    assert [row["time_scale"] for row in rows] == pytest.approx([CAPACITY / row["load"] for row in rows])
    assert ttft_s(94, CAPACITY) <= 2.0 < ttft_s(94, CAPACITY / 1.05)


def test_requests_sent_at_once_wait_for_all_before_them(rows: Sequence[dict[str, Any]]) -> None:
    for row in rows[::2]:
        found = row["goodput"]
        each_s = [ttft_s(number, row["time_scale"]) for number in range(REQUESTS)]
        good = sum(one_s <= 2.0 for one_s in each_s)
        assert (found["offered"], found["good"], row["n"]) == (REQUESTS, good / REQUESTS, REQUESTS)
        assert found["per_s"] == pytest.approx(good / (99 * row["time_scale"]))
        assert (found["rejected"], found["queued"], found["hedged"], row["errors"]) == (0.0, 0.0, 0.0, 0)
        # The 95th percentile of 100 lies a twentieth of the way from the 95th to the 96th.
        assert row["ttft_ms"]["p95"] == pytest.approx((0.95 * each_s[94] + 0.05 * each_s[95]) * 1e3)
        assert row["e2e_s"]["p95"] * 1e3 == pytest.approx(row["ttft_ms"]["p95"])


def test_queued_requests_are_served_in_time_or_turned_away(rows: Sequence[dict[str, Any]]) -> None:
    """Beyond capacity the replica is never idle: it serves what fits until two seconds after the last arrival."""
    for row in rows[5::2]:
        found = row["goodput"]
        served = floor((99 * row["time_scale"] + 2.0) / SERVICE_S)
        assert found["good"] == pytest.approx(served / REQUESTS)
        assert found["good"] + found["rejected"] == pytest.approx(1.0)
        assert row["errors"] == REQUESTS - served
        assert 0.0 < found["queued"] < 1.0
        assert row["ttft_ms"]["p99"] <= 2000.0
    assert rows[1]["goodput"] == rows[0]["goodput"]


def test_the_table_says_what_the_json_says(folder: Path) -> None:
    result = overload(folder, *TWENTY, "--load", "0.5")
    assert result.exit_code == 0, result.output
    title, unit, heads, *lines = result.stdout.splitlines()
    assert title == "capacity of gorgo-ms on trace.jsonl: 3.364 of the trace's own load"
    assert unit == "load: a multiple of capacity"
    assert heads.split("  ")[1:3] == ["load", "dispatch"]
    assert [line.replace("at once", "at-once").split() for line in lines] == [
        [
            f"{row['load']:g}",
            "queued" if row["queueing"] else "at-once",
            f"{row['goodput']['good']:.1%}"[:-1],
            f"{row['goodput']['per_s']:.2f}",
            f"{row['goodput']['rejected']:.1%}"[:-1],
            f"{row['goodput']['queued']:.1%}"[:-1],
            f"{row['goodput']['hedged']:.2%}"[:-1],
            f"{row['ttft_ms']['p95']:.0f}",
            f"{row['e2e_s']['p95']:.2f}",
        ]
        for row in rows_of(folder, *TWENTY, "--load", "0.5")
    ]


def test_loads_and_filters_are_those_given(folder: Path) -> None:
    rows = rows_of(folder, *TWENTY, "--load", "0.5")
    assert [(row["load"], row["queueing"], row["n"]) for row in rows] == [
        (load, queueing, 20) for load in (3.0, 0.5) for queueing in (False, True)
    ]
    assert [row["time_scale"] for row in rows[::2]] == pytest.approx([CAPACITY_OF_20 / 3, CAPACITY_OF_20 * 2])


def test_a_deadline_is_of_queued_requests_alone(folder: Path, tmp_path: Path) -> None:
    at_once, queued = rows_of(folder, *TWENTY, *configured(tmp_path, "slo_ttft_ms: 1000"))
    served = floor((19 * at_once["time_scale"] + 1.0) / SERVICE_S)
    assert queued["errors"] == 20 - served
    assert queued["ttft_ms"]["p99"] <= 1000.0
    assert (at_once["errors"], at_once["goodput"]["good"]) == (0, 6 / 20)


def test_requests_in_flight_are_bounded_where_queued(folder: Path, tmp_path: Path) -> None:
    """By default the replica is sent what finds less than 200 ms of work: requests 0, 1 and 2 are not queued."""
    words = ("--limit", "20", "--load", "1")
    assert [number * (SERVICE_S - CAPACITY_OF_20) < 0.2 for number in range(5)] == [True, True, True, False, False]
    found = rows_of(folder, *words, *configured(tmp_path, "slo_ttft_ms: 60000"))
    assert [row["goodput"]["queued"] for row in found] == [0.0, 17 / 20]
    # One at a time: all but the first.
    found = rows_of(folder, *words, *configured(tmp_path, "slo_ttft_ms: 60000, max_concurrency_per_replica: 1"))
    assert [row["goodput"]["queued"] for row in found] == [0.0, 19 / 20]


def test_policy_and_seed_are_those_given(folder: Path) -> None:
    rows = rows_of(folder, "--limit", "20", "--load", "1", "--policy", "random", "--seed", "3")
    assert [(row["policy"], row["seed"], row["trace"]) for row in rows] == [("random", 3, "trace.jsonl")] * 2
    assert rows[0]["time_scale"] == pytest.approx(CAPACITY_OF_20)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--load", "0"], "--load"),
        (["--load", "inf"], "--load inf: expected a finite number"),
        (["--policy", "best"], "no policy named 'best'"),
        (["--max-input", "4095"], "no request is left after the filters"),
        # All three at once are served within two seconds: no load is too high.
        (["--limit", "3"], "95% of requests in time even at load 64: take more requests"),
        (["--config", "nowhere.yaml"], "nowhere.yaml: cannot be read"),
    ],
)
def test_what_cannot_be_done_is_bad_input(folder: Path, words: list[str], said: str) -> None:
    result = overload(folder, *words)
    assert (result.exit_code, result.stdout) == (2, "")
    assert said in result.stderr
    assert "Traceback" not in result.stderr


def test_a_trace_that_no_load_serves_in_time_is_bad_input(folder: Path) -> None:
    """A prompt of 30,000 tokens takes 3.4 s alone."""
    row = {"timestamp": 0, "input_length": 30_000, "output_length": 1, "hash_ids": list(range(59))}
    (folder / "long.jsonl").write_text(json.dumps(row))
    result = overload(folder, trace="long.jsonl")
    assert (result.exit_code, result.stdout) == (2, "")
    assert "at no load are 95% of requests in time: leave out the longest with --max-input" in result.stderr


COLUMNS = ["rank", "n", "mean ms", "p50 ms", "p95 ms"]


def sample(seq: int) -> dict[str, Any]:
    rank = 1 + seq % 3
    return {"seq": seq, "policy": "random", "shadow_policy": "gorgo-ms", "shadow_rank": rank, "ttft_ms": 100.0 * rank}


@pytest.fixture
def log(tmp_path: Path) -> Path:
    path = tmp_path / "samples.jsonl"
    path.write_text("".join(json.dumps(sample(seq)) + "\n" for seq in range(30)))
    return path


def run(*words: str | Path) -> Any:
    return CliRunner().invoke(app, ["rank", *map(str, words)])


def test_a_file_becomes_a_table_and_a_sentence(log: Path) -> None:
    result = run(log)
    assert result.exit_code == 0, result.output
    header, *rows, words = result.stdout.splitlines()
    assert header.split("  ")[0] == "rank"
    assert [line.split() for line in rows] == [[str(rank), "10", *[f"{rank}00.0"] * 3] for rank in (1, 2, 3)]
    assert words.startswith("30 requests routed by random (30), ranked by gorgo-ms")
    assert "Spearman's rho 1.000" in words


def test_json_has_the_same_figures(log: Path) -> None:
    found = json.loads(run(log, "--json").stdout)
    assert (found["n"], found["rho"], found["shadow"]) == (30, 1.0, "gorgo-ms")
    assert found["rows"][1] == {"rank": 2, "n": 10, "ttft_ms_mean": 200.0, "ttft_ms_p50": 200.0, "ttft_ms_p95": 200.0}


def test_a_log_without_ranks_says_what_is_missing(tmp_path: Path) -> None:
    path = tmp_path / "requests.jsonl"
    path.write_text('{"ttft_ms": 5}\n')
    result = run(path)
    assert (result.exit_code, result.stdout) == (1, "")
    assert "no request with a rank among 1; is proxy.shadow_policy set?" in result.stderr


class Proxy:
    """Answers pages of two samples, and one more whenever it is asked."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.asked: list[str] = []
        self.boots = ["boot"]

    def __call__(self, method: str, url: str, path: str, token: str | None, body: object = None) -> dict[str, Any]:
        assert (method, url, token, body) == ("GET", "http://proxy", "secret", None)
        self.asked.append(path)
        after = int(path.split("after=")[1])
        found = [sample(seq) for seq in range(after + 1, min(after + 3, self.count + 1))]
        page = {"boot_id": self.boots.pop(0) if len(self.boots) > 1 else self.boots[0], "first_seq": 1}
        self.count += 1
        return page | {"last_seq": self.count - 1, "samples": found}


def live(monkeypatch: pytest.MonkeyPatch, proxy: Proxy) -> Any:
    monkeypatch.setattr("gorgo.cli.admin.call.call_admin", proxy)
    monkeypatch.setenv("GORGO_ADMIN_TOKEN", "secret")
    return run("--url", "http://proxy", "--json")


@pytest.mark.parametrize(
    ("count", "asked", "n"), [(5, ["0", "2", "4"], 6), (4, ["0", "2"], 4), (1, ["0"], 1), (2, ["0"], 2)]
)
def test_a_proxy_is_read_by_pages_up_to_what_it_had_when_first_asked(
    count: int, asked: list[str], n: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    proxy = Proxy(count)
    result = live(monkeypatch, proxy)
    assert result.exit_code == 0, result.output
    assert [path.split("=")[1] for path in proxy.asked] == asked
    assert json.loads(result.stdout)["n"] == n


def test_a_proxy_that_starts_again_meanwhile_is_no_log(monkeypatch: pytest.MonkeyPatch) -> None:
    proxy = Proxy(5)
    proxy.boots = ["boot", "another"]
    result = live(monkeypatch, proxy)
    assert result.exit_code == 1
    assert "restarted during the reading" in result.stderr


class Endless(Proxy):
    """Has more samples than a reader takes, two to a page."""

    def __init__(self) -> None:
        super().__init__(1000)


def test_a_proxy_with_a_larger_ring_is_read_for_a_hundred_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    proxy = Endless()
    result = live(monkeypatch, proxy)
    assert result.exit_code == 0, result.output
    # The page after the last is asked for, and left.
    assert [path.split("=")[1] for path in proxy.asked] == [str(2 * page) for page in range(101)]
    assert json.loads(result.stdout)["n"] == 200


def run_datasets(*words: str) -> Result:
    return CliRunner().invoke(app, ["datasets", *words])


def test_traces_stand_side_by_side_and_unknown_is_a_dash() -> None:
    lines = run_datasets("describe", "art-chat-sample", "chat-small").stdout.splitlines()
    rows = {line[:23].strip(): line[23:].split() for line in lines}
    assert rows[""] == ["art-chat-sample", "chat-small"]
    assert rows["requests"] == ["48", "211"]
    assert rows["distinct users"] == ["5", "-"]
    assert rows["block reuse, intra-user"][1] == "-"
    assert len({len(line) for line in lines}) == 1


def test_json_has_one_object_a_trace_and_null_for_unknown() -> None:
    known, unknown = json.loads(run_datasets("describe", "art-chat-sample", "chat-small", "--json").stdout)
    assert (known["trace"], known["users"]) == ("art-chat-sample", 5)
    assert unknown["users"] is None
    assert unknown["turns_mean"] is None


def test_filters_cut_the_window_of_a_shape() -> None:
    (own,) = json.loads(
        run_datasets("describe", "art-chat-apr5", "--end", "60", "--max-input", "2000", "--json").stdout
    )
    assert own["duration_s"] < 60
    assert own["input_p95"] <= 2000


def test_list_says_what_is_here_what_is_made_and_what_is_elsewhere_with_licences() -> None:
    found = {one["name"]: one for one in json.loads(run_datasets("list", "--json").stdout)}
    assert found["chat-small"]["kind"] == "shipped"
    assert found["art-chat-apr6"]["kind"] == "generated"
    assert found["mooncake-toolagent"] | {"shape": None} == {
        "name": "mooncake-toolagent",
        "kind": "to fetch",
        "licence": "Apache-2.0",
        "path": None,
        "shape": None,
        "url": "https://raw.githubusercontent.com/kvcache-ai/Mooncake/main/FAST25-release/traces/toolagent_trace.jsonl",
    }
    assert all(one["licence"] for one in found.values())


LOG = (
    {"gorgo_request_log": 1, "boot_id": "boot", "started_s": 0.0, "block_bytes": 2048},
    *(
        {
            "received_s": 100.0 + number,
            "model": "m",
            "input_tokens": 1100,
            "output_tokens": 20,
            "text_bytes": 4400,
            "status": 200,
            "block_hashes": ["00000000000000aa", "00000000000000bb"],
        }
        for number in range(5)
    ),
)


def request_log(path: Path) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in LOG) + '{"received_s": 1')
    return path


def test_a_request_log_is_described_as_a_trace_is_and_lines_that_were_cut_off_are_named(tmp_path: Path) -> None:
    result = run_datasets("describe", str(request_log(tmp_path / "requests.jsonl")), "--json")
    (found,) = json.loads(result.stdout)
    assert (found["requests"], found["duration_s"], found["input_p50"], found["output_mean"]) == (5, 4, 1100, 20)
    assert found["block_reuse"] == 0.8
    assert found["users"] is None
    assert "1 line was cut off" in result.stderr


def test_a_request_log_is_simulated(tmp_path: Path) -> None:
    log = request_log(tmp_path / "requests.jsonl")
    result = CliRunner().invoke(app, ["simulate", str(log), "--policy", "gorgo", "--json"])
    assert result.exit_code == 0, result.output
    assert {row["n"] for row in json.loads(result.stdout) if row["policy"] == "gorgo"} == {5}


@pytest.mark.parametrize("block_tokens", [16, 1024])
def test_a_request_log_has_blocks_of_512_tokens_only(tmp_path: Path, block_tokens: int) -> None:
    log = request_log(tmp_path / "requests.jsonl")
    result = run_datasets("describe", str(log), "--block-tokens", str(block_tokens))
    assert result.exit_code != 0
    assert f"{log}: a request log is read in blocks of 512 tokens" in result.stderr


def test_other_files_of_gorgo_are_named_with_what_reads_them(tmp_path: Path) -> None:
    packed = tmp_path / "requests.jsonl.gz"
    packed.write_bytes(gzip.compress(request_log(tmp_path / "requests.jsonl").read_bytes()))
    assert "compressed request log; expected the file unpacked" in run_datasets("describe", str(packed)).stderr
    outcomes = tmp_path / "outcomes.jsonl"
    outcomes.write_text('{"gorgo_outcome_log": 1, "boot_id": "boot", "started_s": 0.0}\n')
    assert (
        "outcome log; expected a trace (`gorgo learn` reads outcomes)" in run_datasets("describe", str(outcomes)).stderr
    )
