from __future__ import annotations

import json

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
