"""What is said of a replica, what an operator is told first, and whole pages against stored ones."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gorgo.config.fleet import ReplicaConfig
from gorgo.core.dispatch.in_flight import PoisonPrompt
from gorgo.core.fleet.snapshot import ReplicaSnapshot
from gorgo.core.scaling import WantedReplicas
from gorgo.live.admin.page.charts import joined
from gorgo.live.admin.page.document import Writer, login_page, off_page, status_page
from gorgo.live.admin.page.snapshot import Alert, DecisionStatus, Snapshot, alerts, condition_of
from gorgo.live.control.state_file import Frozen
from gorgo.live.telemetry.health import RecentStats, ttft_series
from tests.live.admin.page.made import NOW, change, decision, peer, row, sample, source, status, store, view

# --- What is said of a replica, and what an operator is told first.


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


# --- Whole pages against stored ones: every label, unit, hint, class and place of what an operator reads.
#
# A page is stored with one element on a line. After a change of the page, write them again and read the difference:
#
#     python -m tests.live.admin.page.test_stored_pages


STORED = Path(__file__).parent / "stored"


def empty() -> Snapshot:
    """A proxy that has just started: no replica is known well, nothing was routed."""
    return status(
        alerts=[Alert("bad", "No replica can serve a request: the fleet is empty")],
        stats=RecentStats.of([]),
        span_s=0.0,
        up_s=0.0,
        ttft_series=ttft_series([], now=NOW, up_s=0.0),
        regions={"near": [row(blank())], "far": [row(view("eu-0")), row(view("eu-1"))]},
        policy="random",
        weights={},
        bounds={},
        history=[change(policy="random", weights={})],
        decisions=(),
    )


def blank() -> ReplicaSnapshot:
    return view(rtt_ms=None, running_requests=None, queued_requests=None, used_tokens=None, probe_age_s=None)


WANTED = (
    WantedReplicas(
        region="near",
        model="llama",
        wanted=5,
        needed=4,
        replicas=3,
        work=1.8,
        expected_work=2.4,
        attainment=0.941,
        expected_attainment=0.987,
        correction=0.01,
        backlog_s=12.0,
    ),
    WantedReplicas(
        region="far",
        model=None,
        wanted=1,
        needed=1,
        replicas=1,
        work=0.0,
        expected_work=0.0,
        attainment=None,
        expected_attainment=None,
        correction=0.0,
        backlog_s=0.0,
    ),
)


def busy() -> Snapshot:
    """A proxy with a bad day, of which every sentence of the page has something to say."""
    samples = [
        sample(n, finished_s=NOW - 11.0 * n, ttft_ms=100.0 * n, status=502 if n % 4 == 0 else 200) for n in range(1, 13)
    ]
    full = view(
        models=("m1", "m2"),
        in_flight_requests=2,
        in_flight_tokens=34_567,
        queued_prefill_tokens=1_234,
        backlog_s=0.25,
        running_requests=3,
        queued_requests=4,
        used_tokens=300,
        kv_capacity_tokens=1000,
        scrape_age_s=5.0,
        index_tokens=2_345_678,
        prefill_slowdown=1.5,
        parallel_prefills=1,
        prefill_tokens_per_s=9_876.0,
        probe_age_s=3.0,
    )
    ill = view("eu-0", region="far", state="ejected", ejected_by="probes", ejected_for_s=4.0, in_state_for_s=75.0)
    draining = view("us-1", state="draining", in_flight_requests=1)
    trips = ((NOW - 30.0, 0.090), (NOW - 20.0, None), (NOW - 10.0, 0.110), (NOW, 0.100))
    weights = {"m_rtt": 2.0, "m_queue": 0.25, "m_prefill": 8.0, "fixed": 1.0}
    return status(
        alerts=[Alert("bad", "eu-0 is ejected"), Alert("warn", "2 requests wait")],
        queued=2,
        stats=RecentStats.of(samples),
        ttft_series=ttft_series(samples, now=NOW, up_s=3000.0),
        regions={
            "near": [row(full, tuple(samples), trips), row(draining)],
            "far": [row(ill, trips=((NOW, None), (NOW, None)))],
        },
        unreachable_regions=frozenset({"far"}),
        version=9,
        weights=weights,
        bounds={"m_rtt": (0.25, 4.0), "m_queue": (0.25, 4.0), "m_prefill": (0.25, 4.0), "fixed": (1.0, 1.0)},
        frozen=Frozen("2026-05-01T12:00:00.000+00:00", "weekend", "mara"),
        history=[
            *(change(n) for n in range(1, 8)),
            change(8, policy="gorgo", weights={"w": 0.5}, by="mara", reason="slow path"),
            change(9, weights=weights | {"m_queue": 1.0}, source="config"),
            change(10, weights=weights, by="mara"),
        ],
        decisions=decisions(),
        scaling=WANTED,
        fleet_sources=[
            source("<qwen>", problem_count=7, problems=[f"qwen-{n}: no region" for n in range(7)]),
            source("dns", kind="dns", up=False, error="Name or service not known", age_s=75.0, replicas=1),
            source("pool", kind="inference-pool", up=False, synced=False, age_s=None, replicas=0),
        ],
        store=store(
            peer(),
            peer("eu-3/<b>", age_s=3.0, counts=False, differences={"policy": "policy gorgo, here gorgo-ms"}),
            peer("eu-4/9c", counts=False, differences={"format": "its reports have records of another version"}),
            joined=False,
            fault="full",
            error="OutOfMemoryError: maxmemory",
        ),
    )


def decisions() -> list[DecisionStatus]:
    """One of each kind."""
    terms = {f"term{n}": np.array([1.0 + n, 200.0 * n, np.nan if n else -1.0, 0.0]) for n in range(7)}
    costs = decision(
        "costs",
        attempt=2,
        candidates=("us-0", "eu-0", "ap-0", "sa-0"),
        terms=terms,
        cost=np.array([28.0, 4200.0, np.nan, 28.0]),
        excluded={"x-1": "ejected", "x-0": "draining"},
        prompt_tokens=12_000,
        estimated_cached_tokens=9_000,
        best_cached_tokens=9_001,
    )
    slow = sample(
        ttft_ms=700.0,
        e2e_s=2.345,
        output_tokens=1_700,
        cached_tokens=9_500,
        retries=2,
        hedged=True,
        status=503,
        ttft_parts_ms={"router": 1.0, "network": 95.0},
    )
    silent = sample(ttft_ms=None, cached_tokens=None, output_tokens=None, status=499)
    many = decision(
        "many",
        candidates=tuple(f"c{n}" for n in range(18)),
        row=17,
        terms={"rtt": np.arange(18.0)},
        cost=np.arange(18.0),
        prompt_tokens=0,
        best_cached_tokens=50,
    )
    return [
        DecisionStatus(costs, "near", slow, followed=False),
        DecisionStatus(decision("cancelled"), "near", silent, followed=False),
        DecisionStatus(decision("without", terms={}, cost=None, predicted_ttft_s=None), None, sample(), followed=False),
        DecisionStatus(decision("unbalanced", fallback="unbalanced"), "near", None, followed=False),
        DecisionStatus(decision("failed"), "near", None, followed=True),
        DecisionStatus(many, "near", sample(ttft_ms=350.0), followed=False),
        DecisionStatus(decision("late"), "near", sample(ttft_ms=351.0, status=500), followed=False),
    ]


def page_of(shown: Snapshot, *, every_s: int | None = None) -> str:
    return status_page(shown, {name: joined(part(shown)) for name, part in Writer().parts.items()}, every_s=every_s)


PAGES: dict[str, Callable[[], str]] = {
    "calm": lambda: page_of(status()),
    "empty": lambda: page_of(empty(), every_s=10),
    "busy": lambda: page_of(busy()),
    "durable": lambda: page_of(status(frozen=Frozen("2026-05-01T12:00:00.000+00:00"), durable=True)),
    "login": login_page,
    "wrong_token": lambda: login_page(wrong=True),
    "off": lambda: off_page("TOKEN"),
}


def lines_of(name: str) -> list[str]:
    return PAGES[name]().replace("<", "\n<").strip().splitlines()


@pytest.mark.parametrize("name", PAGES)
def test_a_page_is_as_it_is_stored(name: str) -> None:
    assert lines_of(name) == (STORED / f"{name}.html").read_text(encoding="utf-8").splitlines()


if __name__ == "__main__":
    for name in PAGES:
        (STORED / f"{name}.html").write_text("\n".join(lines_of(name)) + "\n", encoding="utf-8")
