"""`gorgo status` and `gorgo explain`: what they print of a status, of a decision, of the list, and how wide."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, replace
from io import StringIO
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from rich.console import Console
from typer.testing import CliRunner, Result

from gorgo.cli import app
from gorgo.cli.admin import status as status_watch
from gorgo.cli.admin.call import CallError
from gorgo.cli.admin.explain import _sample
from gorgo.cli.admin.status import CANDIDATES_SHOWN, FLEET, VERSIONS_SHOWN, WIDE, status_view
from gorgo.core.scaling import WantedReplicas
from gorgo.formatting import ms
from gorgo.live.admin.page.snapshot import Alert, DecisionStatus
from gorgo.live.control.state_file import Frozen
from gorgo.live.telemetry.counters import ClientRow
from gorgo.live.telemetry.health import RecentStats
from tests.live.admin.page.made import change, decision, peer, row, sample, source, status, store, view

# --- `gorgo status`: what it prints of a status, how wide, and how it watches.


NASTY = "[bold]\x1b[2J\x07x"


def printed(shown: Mapping[str, Any], *, width: int = WIDE) -> str:
    console = Console(width=width, record=True, file=StringIO())
    console.print(status_view(shown, width=width))
    return console.export_text()


def look(**changes: Any) -> dict[str, Any]:
    """As it comes over HTTP."""
    made: dict[str, Any] = json.loads(json.dumps(status(**changes).as_dict()))
    return made


def test_everything_an_operator_asks_is_there() -> None:
    ill = row(view("eu-0", region="far", state="ejected", ejected_by="probes", ejected_for_s=4.0, in_state_for_s=75.0))
    text = printed(look(regions={"near": [row(view())], "far": [ill]}, alerts=[Alert("bad", "eu-0 is ejected: it")]))
    lines = text.splitlines()
    assert lines[1] == "! eu-0 is ejected: it"
    assert any(line.split()[:3] == ["near", "us-0", "ready"] for line in lines)
    assert any(line.split()[:5] == ["far", "eu-0", "ejected", "75", "s"] for line in lines)
    assert any(line.split()[:5] == ["r1", "*", "us-0", "2.0", "30.0"] for line in lines)
    assert any("eu-0" in line and "115" in line for line in lines)
    assert lines[-1] == "policy gorgo-ms m_rtt=1, version 1, not frozen"


def same(line: str, words: str) -> None:
    """But for the space between columns."""
    assert " ".join(line.split()) == words


#: A replica with another number in every column.
BUSY = view(
    rtt_ms=2.04,
    probe_age_s=3.0,
    in_flight_requests=4,
    in_flight_tokens=4005,
    queued_prefill_tokens=1506,
    backlog_s=0.2507,
    running_requests=8,
    queued_requests=9,
    used_tokens=250,
    kv_capacity_tokens=1000,
    scrape_age_s=10.0,
    index_tokens=12_345,
    prefill_tokens_per_s=11_500.0,
)


def test_each_column_of_the_fleet_is_what_its_head_says() -> None:
    text = printed(look(regions={"near": [row(BUSY, (sample(), sample(ttft_ms=80.0, status=500)))]}))
    head, line = (next(one for one in text.splitlines() if word in one) for word in ("prefill/s", "us-0     ready"))
    same(
        head,
        "region replica state rtt ms age open tokens to prefill work ms running queued kv age cached prefill/s tpot ms "
        "n p50 ms p95 ms hit failed",
    )
    same(line, "near us-0 ready 2.0 3 s 4 4,005 1,506 251 8 9 25 % 10 s 12.3k 11.5k - 2 100 118 40 % 1")


def test_a_narrow_terminal_has_the_columns_that_matter_most() -> None:
    text = printed(look(regions={"near": [row(BUSY, (sample(),))]}), width=WIDE - 1)
    head, line = (next(one for one in text.splitlines() if word in one) for word in ("rtt ms", "us-0     ready"))
    same(head, "region replica state rtt ms open to prefill work ms queued n p95 ms failed")
    same(line, "near us-0 ready 2.0 4 1,506 251 9 1 120 0")


@pytest.mark.parametrize(
    ("changes", "kv"),
    [
        ({"used_tokens": None}, "-"),
        ({"kv_capacity_tokens": None}, "-"),
        ({"kv_capacity_tokens": 0}, "-"),
        ({"used_tokens": 0}, "0 %"),
    ],
)
def test_a_share_of_a_pool_needs_both_sizes(changes: dict[str, Any], kv: str) -> None:
    known = {"used_tokens": 250, "kv_capacity_tokens": 1000} | changes
    head, line = (
        next(one for one in printed(look(regions={"near": [row(view(**known))]})).splitlines() if word in one)
        for word in ("prefill/s", "us-0     ready")
    )
    # Columns of numbers end where their heads end.
    end = head.index(" kv ") + len(" kv")
    assert line[:end].endswith(f" {kv}")


def test_the_figures_are_those_of_the_last_minutes() -> None:
    samples = tuple(sample(ttft_ms=float(ms)) for ms in range(100, 1100, 100))
    shown = look(
        stats=RecentStats.of((*samples, sample(status=503))),
        span_s=240.0,
        in_flight=5,
        queued=6,
        up_s=7300.0,
    )
    shown["recent_stats"]["per_s"] = 2.345
    first, _, third, *_ = printed(shown).splitlines()
    assert first == "GORGO near, 13:46:40 UTC, up for 2.0 h"
    # Of ten good ones of 100 to 1,000 ms, predicted at 100 ms each.
    p50, p95, error = (ms(shown["recent_stats"][name]) for name in ("ttft_ms_p50", "ttft_ms_p95", "error_ms_p50"))
    assert third == (
        "11 requests in 4 min (2.3/s), 1 failed; 5 in flight, 6 queued; "
        f"TTFT median {p50} ms, p95 {p95} ms; 40 % of prompts in cache (50 % estimated); "
        f"median prediction error {error} ms"
    )
    shown["recent_stats"]["per_s"] = None
    assert "11 requests in 4 min, 1 failed;" in printed(shown)


def test_what_no_request_has_shown_yet_is_left_out_of_the_sentence() -> None:
    shown = look(stats=RecentStats.of(()), span_s=12.0, in_flight=1, queued=0)
    assert "\nno request finished in 12 s; 1 in flight, 0 queued\n" in printed(shown)


def test_last_minute_of_each_client_is_a_line() -> None:
    clients = [ClientRow("team-a", 12, 45_678, 0), ClientRow("team\x1b-b", 3, 90, 2)]
    lines = printed(look(clients=clients)).splitlines()
    start = next(place for place, line in enumerate(lines) if line.startswith("client "))
    assert lines[start].split() == ["client", "requests/min", "tokens/min", "429/min"]
    assert [line.split() for line in lines[start + 2 : start + 4]] == [
        ["team-a", "12", "45.7k", "0"],
        ["team?-b", "3", "90", "2"],
    ]
    assert "tokens/min" not in printed(look())


def test_each_fleet_source_is_a_line_and_so_is_each_object_without_a_replica() -> None:
    rows = [
        source(replicas=1, problem_count=1, problems=["qwen-1: no \x1bregion"]),
        source("dns", kind="dns", up=False, error="no answer within 5 s", age_s=None, replicas=0),
    ]
    text = printed(look(fleet_sources=rows))
    assert (
        "\nsource qwen (pods): up, 1 replica, last answer 2 s ago\n"
        "  no replica of qwen-1: no ?region\n"
        "source dns (dns): down: no answer within 5 s, 0 replicas, no answer yet\n"
    ) in text
    older = look()
    del older["fleet_sources"]
    assert "source " not in printed(older)


def test_the_wanted_replicas_of_each_region_and_model_are_a_line() -> None:
    row = WantedReplicas(
        region="eu",
        model="m\x1b",
        wanted=1,
        needed=1,
        replicas=3,
        work=0.1,
        expected_work=0.1,
        attainment=0.5,
        expected_attainment=1.0,
        correction=0.0,
        backlog_s=0.0,
    )
    assert "\nwanted in eu (m?): 1 replica, 3 serve, 50 % in time\n" in printed(look(scaling=[row]))
    older = look()
    del older["scaling"]
    assert "wanted in" not in printed(older)


def test_the_store_of_several_routers_is_a_line_and_so_is_each_peer() -> None:
    text = printed(
        look(store=store(peer("eu\x1b-2/1a"), peer(counts=False, age_s=30.0, differences={"key": "another key"})))
    )
    assert (
        "\nrouter eu-1/4f of group qwen: reports to 1 other for 60 s\n"
        "  eu?-2/1a: last report 0 s ago\n"
        "  eu-2/1a: last report 30 s ago, its load counts no longer; another key\n"
    ) in text
    assert "of group" not in printed(look())


def test_answers_that_broke_off_are_a_line_and_without_one_there_is_none() -> None:
    streams = {"continued": {"stalled": 2, "moved": 7}, "not_continued": {"memory": 1}}
    lines = printed(look(streams=streams)).splitlines()
    expected = "answers that broke off: 9 went on elsewhere (7 moved, 2 stalled), 1 ended with an error (1 memory)"
    assert [line.strip() for line in lines if "broke off" in line] == [expected]
    older = look()
    del older["streams"]
    for shown in (older, look()):
        assert "broke off" not in printed(shown)


def test_a_decision_tells_what_was_predicted_and_what_came_of_it() -> None:
    """On a wide terminal all of it, on a narrow one the two times."""
    many = decision(
        "a" * 21,
        attempt=2,
        candidates=("us-0", "eu-0", "ap-0"),
        terms={"rtt": np.array([2.04, 95.0, 1234.5])},
        cost=np.array([99.96, 115.5, -0.25]),
        prompt_tokens=200,
        estimated_cached_tokens=50,
        predicted_ttft_s=0.1,
    )
    made = [
        DecisionStatus(many, None, sample(ttft_ms=95.9, predicted_ttft_ms=100.0), followed=False),
        DecisionStatus(decision("b" * 20), None, None, followed=True),
        DecisionStatus(decision("c", prompt_tokens=0), None, None, followed=False),
        DecisionStatus(decision("d"), None, None, followed=False),
    ]

    def table(width: int) -> list[str]:
        lines = printed(look(decisions=made), width=width).splitlines()
        start = next(number for number, line in enumerate(lines) if line.startswith("request "))
        return [" ".join(line.split()) for line in lines[start : start + 9]]

    assert table(WIDE)[0] == "request candidate rtt prefill cost cached predicted observed off status"
    assert table(WIDE)[2:] == [
        f"{'a' * 19}… #2 * us-0 2.0 - 100.0 25 % 100 96 -4.1 200",
        "ap-0 1,234 - -0.2",
        "eu-0 95.0 - 116",
        f"{'b' * 20} * us-0 2.0 30.0 32.0 50 % 100 - - retried",
        "eu-0 95.0 20.0 115",
        "c * us-0 2.0 30.0 32.0 - 100 - - open",
        "eu-0 95.0 20.0 115",
    ]
    assert table(WIDE - 1)[0] == "request candidate rtt prefill cost predicted observed"
    assert table(WIDE - 1)[2] == f"{'a' * 19}… #2 * us-0 2.0 - 100.0 100 96"


def test_a_version_tells_its_weights_and_where_they_came_from() -> None:
    history = [
        change(3, weights={"a": 0.5, "b": 2.0}, source="tuner", by="me", reason="better"),
        change(4, weights={}, source="file"),
    ]
    lines = [" ".join(line.split()) for line in printed(look(history=history)).splitlines()]
    assert "3 2026-05-01 12:03:04 gorgo-ms a 0.5, b 2 me (tuner) better" in lines
    assert "4 2026-05-01 12:03:04 gorgo-ms file" in lines


def test_calm_fleet_says_so() -> None:
    assert "the one replica is ready" in printed(look())
    assert "all 2 replicas are ready" in printed(look(regions={"near": [row(view("a")), row(view("b"))]}))


def test_regions_are_named_once() -> None:
    text = printed(look(regions={"near": [row(view("a")), row(view("b"))]}))
    assert text.count("near") == 2  # the headline has it too


@pytest.mark.parametrize("width", [80, 110, WIDE, 240])
def test_terminal_is_never_asked_for_more_than_it_has(width: int) -> None:
    text = printed(look(), width=width)
    assert max(map(len, text.splitlines())) <= width
    heads = next(line for line in text.splitlines() if "replica" in line and "state" in line).split()
    assert ("prefill/s" in heads) == (width >= WIDE)


def test_terminal_of_80_columns_cuts_no_name_and_no_figure() -> None:
    """It cut heads and names of several columns; those that matter less are left out instead."""
    near = row(replace(BUSY, name="us-ashburn-0", region="us-ashburn", queued_prefill_tokens=98_765), (sample(),))
    far = view("eu-frankfurt-0", region="eu-frankfurt", state="ejected", ejected_by="probes", in_state_for_s=75.0)
    made = decision(terms={f"term-{number}": np.array([1.0, 2.0]) for number in range(9)})
    shown = look(
        regions={"us-ashburn": [near], "eu-frankfurt": [row(far)]},
        decisions=[DecisionStatus(made, None, None, followed=False)],
    )
    text = printed(shown, width=80)
    assert "…" not in text
    heads = next(line for line in text.splitlines() if line.startswith("region"))
    assert heads.split() == ["region", "replica", "state", "rtt", "ms", "open", "n", "p95", "ms", "failed"]
    assert any(line.split()[:2] == ["eu-frankfurt", "eu-frankfurt-0"] for line in text.splitlines())
    assert any("term-0" in line and "cost" in line and "observed" in line for line in text.splitlines())


def test_wide_table_fits_with_long_names() -> None:
    long = row(view("eu-frankfurt-0", region="eu-frankfurt", state="draining", in_state_for_s=7300.0))
    text = printed(look(regions={"eu-frankfurt": [long]}))
    assert "…" not in text
    assert all(name in text for name, _, _ in FLEET)


def test_unknown_is_a_dash() -> None:
    blank = view(rtt_ms=None, probe_age_s=None, running_requests=None, queued_requests=None, used_tokens=None)
    line = next(one for one in printed(look(regions={"near": [row(blank)]})).splitlines() if "us-0" in one)
    assert line.split().count("-") >= 5


def test_words_of_others_neither_style_nor_move_anything() -> None:
    made = DecisionStatus(decision(NASTY, terms={NASTY: np.array([1.0, 2.0])}), None, None, followed=False)
    shown = look(
        region=NASTY,
        alerts=[Alert("bad", NASTY)],
        regions={NASTY: [row(view(NASTY, region=NASTY))]},
        decisions=[made],
        history=[change(reason=NASTY, by=NASTY)],
        frozen=Frozen("2026-05-01T00:00:00", NASTY, NASTY),
    )
    text = printed(shown, width=240)
    assert "\x1b" not in text
    assert "\x07" not in text
    assert text.count("[bold]?[2J?x") >= 9


def test_chosen_candidate_stands_first_however_many_there_are() -> None:
    many = 2 * CANDIDATES_SHOWN
    names = tuple(f"c{n}" for n in range(many))
    costs = np.arange(float(many))
    made = decision(candidates=names, row=many - 1, terms={"rtt": costs}, cost=costs)
    lines = printed(look(decisions=[DecisionStatus(made, None, sample(), followed=False)])).splitlines()
    shown = [line for line in lines if f" {names[-1]} " in line or any(f"  {name} " in line for name in names[:-1])]
    assert f"* {names[-1]}" in shown[0]
    assert len(shown) == CANDIDATES_SHOWN


def test_policy_without_a_cost_shows_its_candidates_all_the_same() -> None:
    made = decision(terms={}, cost=None, predicted_ttft_s=None)
    assert "* us-0" in printed(look(decisions=[DecisionStatus(made, None, None, followed=True)]))
    assert "retried" in printed(look(decisions=[DecisionStatus(made, None, None, followed=True)]))


def test_a_proxy_without_decisions_has_no_table_of_them() -> None:
    assert "candidate" not in printed(look(decisions=[]))


def test_newest_versions_stand_first() -> None:
    lines = printed(look(history=[change(n) for n in range(1, 20)])).splitlines()
    versions = [int(line.split()[0]) for line in lines if "2026-05-01 12:03:04" in line]
    assert versions == list(range(19, 19 - VERSIONS_SHOWN, -1))


# -- watching
@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any] | BaseException]:
    """What the proxy answers, one look after another; Ctrl-C after the last."""
    answers: list[dict[str, Any] | BaseException] = []

    def ask(*arguments: Any) -> dict[str, Any]:
        answer = answers.pop(0) if answers else KeyboardInterrupt()
        if isinstance(answer, BaseException):
            raise answer
        return answer

    monkeypatch.setattr(status_watch, "call_admin", ask)
    monkeypatch.setattr(status_watch, "request_admin", ask)
    monkeypatch.setattr(status_watch, "INTERVAL_S", 0.0)
    return answers


def test_watching_goes_on_while_the_proxy_is_away_and_ends_by_ctrl_c(
    looks: list[dict[str, Any] | BaseException],
) -> None:
    looks += [look(version=1), CallError("nobody there"), look(version=2)]
    result = CliRunner().invoke(app, ["status", "--watch"])
    assert result.exit_code == 0
    assert result.stdout.index("version 1") < result.stdout.index("nobody there") < result.stdout.index("version 2")


def test_watching_as_json_is_a_line_per_look(looks: list[dict[str, Any] | BaseException]) -> None:
    looks += [look(), CallError("nobody there")]
    result = CliRunner().invoke(app, ["status", "--watch", "--json"])
    first, second = (json.loads(line) for line in result.stdout.splitlines())
    assert first["routing"]["version"] == 1
    assert second == {"failure": "nobody there"}


# --- `gorgo explain`: the lines of a decision, and of the list.


NASTY_EXPLAIN = "[bold]\x1b[2J"


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
    rows = [row, row | {"followed": True, "attempt": 2}, row | {"status": 503, "request_id": NASTY_EXPLAIN}]
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
    lines = explained(shown(decision(NASTY_EXPLAIN, terms={NASTY_EXPLAIN: np.array([1.0, 2.0])})), "r1")
    assert lines[0].startswith("[bold]?[2J: ")
    assert not any("\x1b" in line for line in lines)


def test_an_answer_that_went_on_at_another_replica_is_said() -> None:
    sample = {"ttft_parts_ms": None, "cached_tokens": None, "ttft_ms": 12.0, "status": 200, "e2e_s": 1.0, "retries": 0}
    assert _sample({**sample, "continued": 1}).endswith("; its answer broke off and went on elsewhere: 1")
    assert "went on" not in _sample(sample)


# --- What the commands make of an answer that is not a proxy's of this version: words, never a traceback.


LEFT_OUT = "left out"
PINNED = {
    "policy": "gorgo",
    "weights": {},
    "version": 1,
    "out_of_range": [],
    "durable": True,
    "frozen": {"since": "now", "by": None, "reason": None},
}


@pytest.fixture
def answered(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Sets what every call gets."""

    def answer(text: str | bytes) -> None:
        content = text if isinstance(text, bytes) else text.encode()
        monkeypatch.setattr(httpx, "request", lambda *_, **__: httpx.Response(200, content=content))

    return answer


@pytest.mark.parametrize(
    "words",
    [
        ["status"],
        ["status", "--json"],
        ["freeze"],
        ["freeze", "--json"],
        ["unfreeze"],
        ["rank"],
        ["drain", "a"],
        ["set", "m_rtt=1"],
        ["policy"],
        ["policy", "gorgo"],
        ["explain"],
        ["explain", "id", "--json"],
        ["reload"],
    ],
    ids=" ".join,
)
def test_other_answer_is_reported_with_the_question_whether_it_is_the_address(answered: Any, words: list[str]) -> None:
    for text in ('{"a": NaN}', "[]", "[" * 100_000, b"\xff"):
        answered(text)
        result = CliRunner().invoke(app, [*words, "--url", "http://127.0.0.1:9090"])
        assert (result.exit_code, result.stdout) == (1, ""), text[:9]
        assert result.stderr.startswith("gorgo: http://127.0.0.1:9090")
        assert "?" in result.stderr


@pytest.mark.parametrize(
    "wrong",
    [{"weights": []}, {"weights": {"w": "x"}}, {"durable": LEFT_OUT}, {"frozen": None}, {"out_of_range": LEFT_OUT}],
)
def test_what_cannot_be_exported_leaves_no_file(answered: Any, tmp_path: Path, wrong: Mapping[str, Any]) -> None:
    answered(json.dumps({key: value for key, value in {**PINNED, **wrong}.items() if value != LEFT_OUT}))
    result = CliRunner().invoke(app, ["freeze", "--export", str(tmp_path / "found.json")])
    assert result.exit_code == 1
    assert "unexpected answer" in result.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("samples", [None, 5, [1], ["x"], [{}], [{"seq": "x"}]])
def test_samples_that_are_none_are_told(answered: Any, samples: Any) -> None:
    answered(json.dumps({"boot_id": "b", "last_seq": 9, "samples": samples}))
    result = CliRunner().invoke(app, ["rank"])
    assert result.exit_code == 1
    assert "unexpected answer" in result.stderr


A, B, C = "http://a:9090", "http://b:9090", "http://c:9090"
ALL = ["--url", A, "--url", B, "--url", C]


class Fleet:
    """Proxies by address, each with weights and a freeze; those of `down` do not answer."""

    def __init__(self) -> None:
        self.weights = {url: {"w_rtt": 0.5, "w_queue": 0.1} for url in (A, B, C)}
        self.frozen: dict[str, dict[str, Any] | None] = dict.fromkeys(self.weights)
        self.bodies: list[dict[str, Any]] = []
        self.down: set[str] = set()
        self.volatile: set[str] = set()

    def request(self, method: str, address: str, *, json: dict[str, Any] | None, **_: Any) -> httpx.Response:
        url = next(url for url in self.weights if address.startswith(url))
        if url in self.down:
            raise httpx.ConnectError("connection refused")
        if address.endswith("/admin/model"):
            return httpx.Response(404)
        return httpx.Response(200, json=self.answer(method, url, address.removeprefix(url), json or {}))

    def answer(self, method: str, url: str, path: str, body: dict[str, Any]) -> dict[str, Any]:
        if path == "/admin/status":
            shown: dict[str, Any] = status().as_dict()
            routing = {"policy": "gorgo", "weights": self.weights[url], "frozen": self.frozen[url]}
            return shown | {"routing": shown["routing"] | routing}
        assert (method, path) in (("POST", "/admin/freeze"), ("POST", "/admin/unfreeze"))
        self.bodies.append(body)
        self.weights[url] = body.get("weights") or self.weights[url]
        if self.frozen[url] is None:
            self.frozen[url] = {"since": "now", "by": body["by"], "reason": body["reason"]}
        if path == "/admin/unfreeze":
            self.frozen[url] = None
        shown = {"policy": "gorgo", "version": 1, "weights": self.weights[url], "frozen": self.frozen[url]}
        return shown | {"out_of_range": [], "durable": url not in self.volatile}


@pytest.fixture
def fleet(monkeypatch: pytest.MonkeyPatch) -> Fleet:
    fleet = Fleet()
    monkeypatch.setattr(httpx, "request", fleet.request)
    monkeypatch.setenv("LOGNAME", "eve")
    return fleet


def run(*words: str) -> Result:
    return CliRunner().invoke(app, list(words))


def test_a_freeze_gives_all_proxies_the_weights_of_the_first(fleet: Fleet) -> None:
    fleet.weights[B] = {"w_rtt": 0.7, "w_queue": 0.1}  # put by a tuner between two calls
    result = run("freeze", *ALL, "--reason", "held-out week")
    assert result.exit_code == 0, result.output
    assert fleet.weights[A] == fleet.weights[B] == fleet.weights[C]
    assert "weights" not in fleet.bodies[0], "those in force"
    assert fleet.bodies[1]["policy"] == "gorgo"
    frozen = "policy gorgo w_rtt=0.5 w_queue=0.1, version 1, frozen since now by eve: held-out week"
    assert result.stdout.splitlines() == [f"{url}: {frozen}" for url in (A, B, C)]


def test_weights_of_a_file_go_to_all_and_are_exported_once(fleet: Fleet, tmp_path: Path) -> None:
    file, out = tmp_path / "found.json", tmp_path / "out.json"
    file.write_text(json.dumps({"gorgo_weights": 1, "policy": "gorgo", "weights": {"w_rtt": 0.2, "w_queue": 0.3}}))
    result = run("freeze", *ALL, "--weights", str(file), "--export", str(out))
    assert result.exit_code == 0, result.output
    assert [body["weights"] for body in fleet.bodies] == [{"w_rtt": 0.2, "w_queue": 0.3}] * 3
    assert json.loads(out.read_text())["weights"] == {"w_rtt": 0.2, "w_queue": 0.3}


@pytest.mark.parametrize("down", [A, B])
def test_a_proxy_without_an_answer_keeps_the_others_from_nothing_and_is_named(fleet: Fleet, down: str) -> None:
    fleet.down = {down}
    result = run("freeze", *ALL)
    assert result.exit_code == 1
    assert [url for url in fleet.frozen if fleet.frozen[url]] == [url for url in (A, B, C) if url != down]
    said = result.stderr.splitlines()
    assert said[0].startswith(f"gorgo: {down}/admin/freeze: connection refused")
    assert said[1:] == ["gorgo: 1 of 3 proxies failed; the command can be repeated"]
    fleet.down = set()
    assert run("freeze", *ALL).exit_code == 0
    assert all(fleet.frozen.values())


def test_a_freeze_of_what_is_frozen_says_that_its_reason_was_not_taken(fleet: Fleet) -> None:
    assert run("freeze", "--url", B, "--reason", "before").exit_code == 0
    result = run("freeze", *ALL, "--reason", "after")
    assert result.exit_code == 0
    assert result.stderr == (
        f"gorgo: {B} was frozen before with these weights: its freeze stays, and this reason was not taken\n"
    )
    assert fleet.frozen[B] == {"since": "now", "by": "eve", "reason": "before"}
    assert run("freeze", "--url", B).stderr == "", "no reason was given"


def test_a_freeze_that_ends_with_its_process_names_the_proxy(fleet: Fleet) -> None:
    fleet.volatile = {B}
    said = run("freeze", *ALL).stderr
    assert said == f"gorgo: {B} runs without --state: the freeze ends with its process\n"


def test_an_unfreeze_reaches_all(fleet: Fleet) -> None:
    assert run("freeze", *ALL).exit_code == 0
    result = run("unfreeze", *ALL, "--json")
    assert result.exit_code == 0, result.output
    assert list(json.loads(result.stdout)) == [A, B, C]
    assert not any(fleet.frozen.values())


def test_the_status_of_several_proxies_ends_with_what_differs(fleet: Fleet) -> None:
    same = run("status", *ALL)
    assert same.exit_code == 0, same.output
    lines = same.stdout.splitlines()
    assert [line for line in lines if line.startswith("http")] == [f"{url}:" for url in (A, B, C)]
    assert lines[-1] == "3 proxies: the same weights, not frozen"
    assert run("freeze", "--url", B).exit_code == 0
    fleet.weights[C] = {"w_rtt": 0.7, "w_queue": 0.1}
    differing = run("status", *ALL).stdout.splitlines()[-1]
    assert differing == f"3 proxies: ! other weights at {C} than at {A}, ! frozen at {B} alone"
    assert list(json.loads(run("status", *ALL, "--json").stdout)) == [A, B, C]


def test_a_status_with_one_proxy_down_shows_the_others_and_fails(fleet: Fleet) -> None:
    fleet.down = {A}
    result = run("status", *ALL)
    assert result.exit_code == 1
    assert result.stdout.splitlines()[-1] == "2 proxies: the same weights, not frozen"
    assert f"{A}/admin/status: connection refused" in result.stderr
    fleet.down = {A, B, C}
    none = run("status", *ALL, "--json")
    assert (none.exit_code, none.stdout) == (1, "")


def test_one_proxy_at_a_time_is_watched() -> None:
    refused = run("status", "--watch", *ALL)
    assert refused.exit_code == 2
    assert "--watch: expected one --url" in " ".join(refused.stderr.replace("│", " ").split())
