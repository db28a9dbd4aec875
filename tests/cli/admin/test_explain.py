"""`gorgo explain`: the lines of a decision, and of the list."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import httpx
import numpy as np
import pytest
from typer.testing import CliRunner

from gorgo.cli import app
from gorgo.cli.admin.explain import _sample
from tests.live.admin.page.made import decision, sample

NASTY = "[bold]\x1b[2J"


@pytest.fixture
def explained(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Returns the lines for an answer of the proxy."""

    def lines(answer: Mapping[str, Any], *words: str) -> list[str]:
        content = json.dumps(answer).encode()
        monkeypatch.setattr(httpx, "request", lambda *_, **__: httpx.Response(200, content=content))
        done = CliRunner().invoke(app, ["explain", *words])
        assert done.exit_code == 0, done.output
        return done.stdout.splitlines()

    return lines


def shown(*decisions: Any, ended: Any = None) -> dict[str, Any]:
    rows = [one.as_dict() for one in decisions]
    return {"request_id": "r1", "decisions": rows, "sample": None if ended is None else asdict(ended)}


def test_candidates_are_in_the_order_of_cost_after_the_chosen_one(explained: Any) -> None:
    names = ("a", "b", "c", "d")
    cost = np.array([40.0, 20.0, np.nan, 30.0])
    made = decision(candidates=names, row=3, terms={"rtt": cost, "queue": cost * 2}, cost=cost)
    lines = explained(shown(made), "r1")
    table = [line.split() for line in lines if line[:1] in "* " and line.strip()]
    assert table[0] == ["candidate", "rtt", "queue", "cost,", "ms"]
    assert [row[-4] for row in table[1:]] == ["d", "b", "a", "c"]
    assert table[1] == ["*", "d", "30.0", "60.0", "30.0"]
    assert table[4][1:] == ["-", "-", "-"]


def test_predicted_times_and_headroom_of_every_candidate_and_the_objectives_are_shown(explained: Any) -> None:
    made = decision(
        candidates=("a", "b"),
        row=1,
        terms={"headroom": np.array([101.0, 0.0])},
        cost=np.array([101.0, 0.0]),
        estimates={
            "ttft": np.array([0.3, 0.15]),
            "tpot": np.array([0.02, np.nan]),
            "headroom_ttft": np.array([-0.1, 0.05]),
            "headroom_tpot": np.array([0.03, 0.03]),
        },
        slo_ttft_s=0.2,
        slo_tpot_s=0.05,
    )
    lines = explained(shown(made), "r1")
    assert "objectives: TTFT 200 ms, TPOT 50.0 ms" in lines
    (header,) = [line for line in lines if line.split()[:1] == ["candidate"]]
    assert header.split()[4:] == [
        *("predicted", "TTFT,", "ms", "predicted", "TPOT,", "ms"),
        *("TTFT", "headroom,", "ms", "TPOT", "headroom,", "ms"),
    ]
    (chosen,) = [line.split() for line in lines if line.startswith("*")]
    (other,) = [line.split() for line in lines if line.split()[:1] == ["a"]]
    assert chosen[-4:] == ["150.0", "-", "50.0", "30.0"]
    assert other[-4:] == ["300.0", "20.0", "-100.0", "30.0"]
    assert "objectives: none" in explained(shown(decision()), "r1")


def test_rule_that_decided_is_named(explained: Any) -> None:
    costs = decision()
    assert explained(shown(costs), "r1")[0].endswith(f", the lowest cost of {costs.policy}")
    bare = decision(terms={}, cost=None)
    assert explained(shown(bare), "r1")[0].endswith(f", by {bare.policy}, which has no cost")
    other = decision(fallback="no_match")
    assert explained(shown(other), "r1")[0].endswith(f", by the fallback no_match of {other.policy}")


def test_each_attempt_and_each_excluded_replica_has_its_line(explained: Any) -> None:
    first, second = decision("r1"), decision("r1", attempt=2, excluded={"us-0": "tried", "ap-0": "draining"})
    lines = explained(shown(first, second), "r1")
    assert sum(line.startswith("r1") for line in lines) == 2
    assert any(line.startswith("r1, attempt 2: ") for line in lines)
    assert [line for line in lines if line.startswith("excluded")] == [
        "excluded: ap-0 (draining)",
        "excluded: us-0 (tried)",
    ]


def test_source_of_the_cached_tokens_and_the_size_of_a_sampled_fleet_are_named(explained: Any) -> None:
    lines = explained(shown(decision(cache_source="push", sampled_from=12_345)), "r1")
    assert "prompt: 100 tokens, 50 estimated cached there (source push), 60 at most on a candidate" in lines
    assert "a sample of 12,345 eligible replicas" in lines
    assert not any("sample" in line for line in explained(shown(decision()), "r1"))


def test_ended_request_has_what_was_observed_and_an_open_one_says_so(explained: Any) -> None:
    assert explained(shown(decision()), "r1")[-1] == "the request has not ended"
    ended = explained(shown(decision(), ended=sample(ttft_ms=95.9, status=200)), "r1")
    assert ended[-2].startswith("observed TTFT: 95.9 ms")
    assert ended[-1].startswith("status 200, ")


def test_list_says_of_each_row_how_it_ended(explained: Any) -> None:
    row = {
        "request_id": "r",
        "attempt": 1,
        "client": None,
        "model": None,
        "decided_s": 0.0,
        "policy": "gorgo-ms",
        "replica": "a",
        "fallback": None,
        "cache_source": "events",
        "predicted_ttft_ms": 30.0,
        "ttft_ms": None,
        "status": None,
        "followed": False,
    }
    rows = [row, row | {"followed": True, "attempt": 2}, row | {"status": 503, "request_id": NASTY}]
    lines = explained({"now_s": 0.0, "decisions": rows})
    assert [line.split()[-1] for line in lines[1:]] == ["open", "retried", "503"]
    assert "events" in lines[1].split()
    assert lines[2].startswith("r #2 ")
    assert lines[3].startswith("[bold]?[2J ")


def test_the_slowest_request_of_a_client_is_looked_for_and_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[str] = []
    answers = [{"now_s": 0.0, "decisions": [{"request_id": "r/1"}]}, shown(decision("r/1"))]

    def request(_method: str, address: str, **_: Any) -> httpx.Response:
        called.append(address.partition("9090")[2])
        return httpx.Response(200, json=answers[len(called) - 1])

    monkeypatch.setattr(httpx, "request", request)
    done = CliRunner().invoke(app, ["explain", "--slowest", "--client", "team a"])
    assert done.exit_code == 0, done.output
    assert called == ["/admin/decisions?limit=1&order=slowest&client=team+a", "/admin/decisions/r%2F1"]
    assert done.stdout.startswith("r/1: ")


def test_a_client_without_a_request_is_said_and_an_id_has_no_client_beside_it(explained: Any) -> None:
    assert explained({"now_s": 0.0, "decisions": []}, "--client", "a") == ["no such request is stored"]
    refused = CliRunner().invoke(app, ["explain", "r1", "--slowest"])
    assert refused.exit_code == 2
    assert "expected no REQUEST_ID" in refused.stderr


def test_words_of_clients_move_nothing_on_the_terminal(explained: Any) -> None:
    lines = explained(shown(decision(NASTY, terms={NASTY: np.array([1.0, 2.0])})), "r1")
    assert lines[0].startswith("[bold]?[2J: ")
    assert not any("\x1b" in line for line in lines)


def test_an_answer_that_went_on_at_another_replica_is_said() -> None:
    sample = {"ttft_parts_ms": None, "cached_tokens": None, "ttft_ms": 12.0, "status": 200, "e2e_s": 1.0, "retries": 0}
    assert _sample({**sample, "continued": 1}).endswith("; its answer broke off and went on elsewhere: 1")
    assert "went on" not in _sample(sample)
