"""What is said of a replica, and what an operator is told first."""

from __future__ import annotations

from typing import Any

import pytest

from gorgo.config.fleet import ReplicaConfig
from gorgo.core.dispatch.in_flight import PoisonPrompt
from gorgo.core.fleet.snapshot import ReplicaSnapshot
from gorgo.live.admin.page.recent_stats import RecentStats
from gorgo.live.admin.page.snapshot import Alert, alerts, condition_of
from tests.live.admin.page.made import peer, sample, source, store, view

WELL = RecentStats.of([sample()])


def told(*views: ReplicaSnapshot, stats: RecentStats = WELL, **changes: Any) -> list[Alert]:
    calm: dict[str, Any] = {
        "unreachable_regions": frozenset(),
        "queued": 0,
        "stopping": False,
        "config_refused": False,
        "out_of_range": (),
        "replicas": {},
    }
    return alerts(views or (view(),), stats, **{**calm, **changes})


@pytest.mark.parametrize(
    ("changes", "word", "why"),
    [
        ({}, "ready", None),
        ({"failures_in_a_row": 2}, "failing", "2 failures in a row"),
        (
            {"overdue_requests": 4, "overdue_for_s": 45.3, "overdue": ("r1", "r2", "r3"), "slow_start_for_s": 6.2},
            "overdue",
            "no answer to 4 requests for up to 45 s longer than expected: r1, r2, r3, ...",
        ),
        (
            {"decode_slowdown": 9.96, "tpot_ms": 103.0},
            "slow",
            "decodes 10.0 times slower than the others: 103 ms a token",
        ),
        ({"decode_slowdown": 2.9, "tpot_ms": 30.0}, "ready", None),
        ({"slow_start_for_s": 6.2, "slow_start_in_flight": 9}, "slow start", "at most 9 requests for another 7 s"),
        (
            {"state": "ejected", "ejected_by": "probes", "ejected_for_s": 4.4},
            "ejected",
            "it does not answer probes; retried in 4 s",
        ),
        (
            {"state": "half_open", "ejected_by": "attempts"},
            "on trial",
            "requests to it failed; the next response decides",
        ),
        ({"state": "draining", "in_flight_requests": 3}, "draining", "no new requests, 3 in flight"),
        ({"state": "draining", "failures_in_a_row": 3}, "draining", "no new requests, none in flight"),
    ],
)
def test_every_state_has_its_word_and_its_reason(changes: dict[str, Any], word: str, why: str | None) -> None:
    found = condition_of(view(**changes))
    assert (found.word, found.why) == (word, why)


def test_a_poison_prompt_is_named_by_its_request_its_client_and_its_replicas() -> None:
    prompts = [PoisonPrompt(f"r{number}", "team", None, ("a", "b"), 61.5) for number in range(5)]
    found = told(poison=prompts, now=20.0)
    assert [alert.level for alert in found] == ["bad"] * 4
    assert found[0].text == (
        "a and b went down under the prompt of request r0 of client team: it is answered 502 for another 42 s"
    )
    assert found[-1].text == "2 more prompts under which replicas went down"


def test_a_warning_reads_as_a_sentence() -> None:
    views = view("b", failures_in_a_row=1), view("a", slow_start_for_s=4.2, slow_start_in_flight=23)
    assert [alert.text for alert in told(*views)] == [
        "b: 1 failure in a row",
        "a is warming up: at most 23 requests for another 5 s",
    ]


def test_cause_of_the_last_failure_is_in_the_line_of_a_replica_that_fails() -> None:
    views = (
        view("a", state="ejected", ejected_by="probes", ejected_for_s=4.0),
        view("b", failures_in_a_row=2),
        view("c"),
    )
    causes = {"a": "connection refused", "b": "its name is not in DNS", "c": "timeout"}
    assert [alert.text for alert in told(*views, failures=causes)] == [
        "a is ejected: it does not answer probes (connection refused); retried in 4 s",
        "b: 2 failures in a row (its name is not in DNS)",
    ]


def test_when_all_is_well_nothing_is_said() -> None:
    assert told() == []


def test_what_hurts_requests_comes_before_what_might() -> None:
    found = told(
        view("drained", state="draining", eligible=False),
        view("gone", state="ejected", ejected_by="attempts", ejected_for_s=1.0, eligible=False),
        view("well"),
    )
    assert [(alert.level, alert.text.split(" is ")[0]) for alert in found] == [("bad", "gone"), ("warn", "drained")]


@pytest.mark.parametrize(
    ("refusal", "answers", "url", "remedy"),
    [
        (401, True, "http://w", ": set api_key_env"),
        (403, False, "http://w", ": set api_key_env"),
        (404, False, "http://w/v1", "without /v1: http://w"),
        (404, True, "http://w/v1", "without /v1: http://w"),
        (405, True, "http://w/", "check its url and engine"),
        (404, False, "http://w", "check its url and engine"),
        (404, True, "http://w", "compare the model's name in requests and its models with http://w/v1/models"),
        (400, True, "http://w", "wrong answers 400"),
    ],
)
def test_a_replica_that_refuses_is_the_first_line_with_its_remedy(
    refusal: int, answers: bool, url: str, remedy: str
) -> None:
    found = told(
        view("gone", state="ejected", ejected_by="attempts", eligible=False),
        view("wrong", state="ejected", ejected_by="refusals", eligible=False, refusal=refusal, answers=answers),
        stopping=True,
        replicas={"wrong": ReplicaConfig(name="wrong", region="near", url=url)},
    )
    assert found[0].level == "bad"
    assert found[0].text.startswith(f"wrong answers {refusal}")
    assert remedy in found[0].text


def test_region_that_is_cut_off_is_one_line_and_not_one_per_replica() -> None:
    gone = [view(name, state="ejected", ejected_by="region", eligible=False) for name in ("a", "b")]
    reason = "no replica can serve a request: 2 without an answer to probes"
    (alert, other) = told(*gone, unreachable_regions=frozenset({"near"}), not_ready=reason)
    assert alert.text == "No replica can serve a request: 2 without an answer to probes"
    assert other == Alert("bad", "Region near is unreachable: no replica there answers a probe")


@pytest.mark.parametrize(
    ("changes", "level", "words"),
    [
        ({"stopping": True}, "bad", "stopping"),
        ({"config_refused": True}, "warn", "was refused"),
        ({"queued": 1}, "warn", "1 request is queued"),
        ({"queued": 2}, "warn", "2 requests are queued"),
        ({"out_of_range": ("m_rtt",)}, "warn", "outside the policy's box: m_rtt"),
        ({"stats": RecentStats.of([sample(status=502), sample(2)])}, "bad", "1 of the last 2 requests failed"),
    ],
)
def test_what_is_wrong_with_the_proxy_and_its_traffic_is_said(changes: dict[str, Any], level: str, words: str) -> None:
    (alert,) = told(**changes)
    assert alert.level == level
    assert words in alert.text


def test_a_few_failures_among_many_are_no_alert() -> None:
    assert told(stats=RecentStats.of([sample(status=502), *(sample(n) for n in range(150))])) == []


def test_panic_and_an_unknown_round_trip_are_said() -> None:
    assert [alert.text.split(":")[0] for alert in told(view(panic=True, rtt_ms=None))] == [
        "Too few replicas are healthy",
        "us-0",
    ]


@pytest.mark.parametrize(("failed", "of", "said"), [(1, 100, True), (1, 101, False), (2, 200, True), (1, 1, True)])
def test_one_failure_in_a_hundred_is_an_alert(failed: int, of: int, said: bool) -> None:
    figures = RecentStats.of([sample(n, status=502 if n < failed else 200) for n in range(of)])
    found = [Alert("bad", f"{failed} of the last {of} requests failed")] if said else []
    assert told(stats=figures) == found


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({"state": "ejected", "ejected_by": None}, ("ejected", "it failed; retried in 0 s")),
        (
            {"state": "ejected", "ejected_by": "refusals"},
            ("ejected", "it refuses what other replicas answer; retried in 0 s"),
        ),
        ({"state": "ejected", "ejected_by": "busy"}, ("ejected", "its engine was busy for too long; retried in 0 s")),
        (
            {"state": "ejected", "ejected_by": "region"},
            ("ejected", "its whole region stopped answering; retried in 0 s"),
        ),
        ({"state": "half_open", "ejected_by": None}, ("on trial", "it failed; the next response decides")),
        ({"state": "draining", "in_flight_requests": 1}, ("draining", "no new requests, 1 in flight")),
        ({"slow_start_for_s": 0.0, "slow_start_in_flight": 1}, ("slow start", "at most 1 request for another 0 s")),
        ({"failures_in_a_row": 1, "slow_start_for_s": 3.0}, ("failing", "1 failure in a row")),
    ],
)
def test_what_is_not_known_of_a_replica_is_not_said(changes: dict[str, Any], found: tuple[str, str]) -> None:
    condition = condition_of(view(**changes))
    assert (condition.word, condition.why) == found


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({"state": "ejected"}, [("bad", "us-0 is ejected")]),
        ({"state": "ejected", "rtt_ms": None}, [("bad", "us-0 is ejected")]),
        ({"state": "half_open"}, [("warn", "us-0 is on trial")]),
        ({"state": "draining"}, [("warn", "us-0 is draining")]),
        ({"failures_in_a_row": 1}, [("warn", "us-0")]),
        ({"slow_start_for_s": 1.0}, [("warn", "us-0 is warming up")]),
        ({"rtt_ms": None}, [("warn", "us-0")]),
        ({"rtt_ms": 0.0}, []),
    ],
)
def test_each_state_but_ready_is_a_line(changes: dict[str, Any], found: list[tuple[str, str]]) -> None:
    lines = told(view(**changes), view("well"))
    assert [(alert.level, alert.text.split(":")[0]) for alert in lines] == found


@pytest.mark.parametrize(("state", "lines"), [("ejected", 1), ("half_open", 1), ("draining", 2)])
def test_of_a_region_that_is_cut_off_only_what_somebody_asked_for_is_said(state: str, lines: int) -> None:
    assert len(told(view(state=state), view("well"), unreachable_regions=frozenset({"near"}))) == lines


def test_fleet_source_that_is_down_or_has_wrong_objects_is_a_warning() -> None:
    rows = [
        source(),
        source("a", up=False, error="connection refused", replicas=1),
        source("b", up=False, error="Forbidden", replicas=0),
        source("c", problem_count=2, problems=["c-1: no region", "c-2: no region"]),
    ]
    assert [(alert.level, alert.text) for alert in told(sources=rows)] == [
        ("warn", "Fleet source a is down: connection refused; its 1 replica stays"),
        ("warn", "Fleet source b is down: Forbidden"),
        ("warn", "Fleet source c: no replica of c-1: no region (and 1 more)"),
    ]


def test_a_router_without_its_store_and_one_that_differs_are_warnings() -> None:
    assert told(store=store(peer())) == []
    alone = store(
        peer(differences={"policy": "policy gorgo, here gorgo-ms", "freeze": "frozen, not here"}),
        joined=False,
        fault="full",
        error="OutOfMemoryError: maxmemory",
        for_s=5.0,
    )
    assert [(alert.level, alert.text) for alert in told(store=alone)] == [
        ("warn", "Router eu-1/4f of group qwen: alone for 5 s, the store is full (OutOfMemoryError: maxmemory)"),
        ("warn", "Router eu-2/1a: policy gorgo, here gorgo-ms; frozen, not here"),
    ]


def test_reports_that_are_not_used_and_signals_that_are_too_old_are_warnings() -> None:
    unused = {"no tokenizer for m": ["a", "b", "c", "d", "e"]}
    slow = "proxy.scrape_interval_s: 30 s is too slow: lodestar needs x at most 1 s old"
    found = [alert.text for alert in told(unused=unused, signals=[slow])]
    assert "Reports of caches are not used (a, b, c, d and 1 more): history: no tokenizer for m" in found
    assert slow in found
