from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from gorgo.cli import app


def run(*words: str) -> Result:
    return CliRunner().invoke(app, ["datasets", *words])


def test_traces_stand_side_by_side_and_unknown_is_a_dash() -> None:
    lines = run("describe", "art-chat-sample", "chat-small").stdout.splitlines()
    rows = {line[:23].strip(): line[23:].split() for line in lines}
    assert rows[""] == ["art-chat-sample", "chat-small"]
    assert rows["requests"] == ["48", "211"]
    assert rows["distinct users"] == ["5", "-"]
    assert rows["block reuse, intra-user"][1] == "-"
    assert len({len(line) for line in lines}) == 1


def test_json_has_one_object_a_trace_and_null_for_unknown() -> None:
    known, unknown = json.loads(run("describe", "art-chat-sample", "chat-small", "--json").stdout)
    assert (known["trace"], known["users"]) == ("art-chat-sample", 5)
    assert unknown["users"] is None
    assert unknown["turns_mean"] is None


def test_filters_cut_the_window_of_a_shape() -> None:
    (own,) = json.loads(run("describe", "art-chat-apr5", "--end", "60", "--max-input", "2000", "--json").stdout)
    assert own["duration_s"] < 60
    assert own["input_p95"] <= 2000


def test_list_says_what_is_here_what_is_made_and_what_is_elsewhere_with_licences() -> None:
    found = {one["name"]: one for one in json.loads(run("list", "--json").stdout)}
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
    result = run("describe", str(request_log(tmp_path / "requests.jsonl")), "--json")
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
    result = run("describe", str(log), "--block-tokens", str(block_tokens))
    assert result.exit_code != 0
    assert f"{log}: a request log is read in blocks of 512 tokens" in result.stderr


def test_other_files_of_gorgo_are_named_with_what_reads_them(tmp_path: Path) -> None:
    packed = tmp_path / "requests.jsonl.gz"
    packed.write_bytes(gzip.compress(request_log(tmp_path / "requests.jsonl").read_bytes()))
    assert "compressed request log; expected the file unpacked" in run("describe", str(packed)).stderr
    outcomes = tmp_path / "outcomes.jsonl"
    outcomes.write_text('{"gorgo_outcome_log": 1, "boot_id": "boot", "started_s": 0.0}\n')
    assert "outcome log; expected a trace (`gorgo learn` reads outcomes)" in run("describe", str(outcomes)).stderr
