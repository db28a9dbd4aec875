"""The rules of `gorgo diagnose`: each fault by the least evidence that shows it, and what is just not enough."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from gorgo.cli.diagnose import _Answer, _probe_facts, _with_blocks
from gorgo.cli.diagnosis import FAULTS, Finding, diagnose
from gorgo.cli.evidence import (
    Evidence,
    HeadFacts,
    KvFacts,
    LoggedFacts,
    ProbeFacts,
    ReplicaFacts,
    RoutedReplica,
    RouterFacts,
    SampleFacts,
    TunerFacts,
)
from gorgo.core.messages.kv_events import BlocksStored, KvTier
from gorgo.core.prompt.fingerprint import HEADS, PromptHeads
from tests.documents import DOCS, code, rows_of

PROBE = ProbeFacts(prompt_tokens=1000, cached_tokens_cold=0, cached_tokens_warm=992, answered=2)


def a_replica(name: str = "a", **more: Any) -> ReplicaFacts:
    facts: dict[str, Any] = {"region": "eu", "url": f"http://{name}:1", "engine": "sglang", "found_engine": "sglang"}
    facts |= {"models": ("m",), "probe": PROBE, "version": "1", "cached_flag": "--cache-report"}
    return ReplicaFacts(name=name, **(facts | more))


def routed(name: str = "a", **more: Any) -> RoutedReplica:
    facts: dict[str, Any] = {"region": "eu", "eligible": True, "ready_since_s": 0.0, "draining_for_s": None}
    facts |= {"rtt_ms": 20.0, "attempts": 30, "restarts": 0, "in_flight": 0, "prefill_slowdown": 1.0}
    facts |= {"prefill_tokens_per_s": 10_000.0, "decode_slowdown": None, "reports_unused": None}
    return RoutedReplica(name=name, **(facts | more))


def samples(replica: str = "a", *, count: int = 30, gap_s: float = 1.0, **more: Any) -> tuple[SampleFacts, ...]:
    facts: dict[str, Any] = {"status": 200, "input_tokens": 1000, "output_tokens": 9, "cached_tokens": 0, "ttft_s": 0.1}
    return tuple(
        SampleFacts(finished_s=100 + number * gap_s, replica=replica, **(facts | more)) for number in range(count)
    )


def a_router(*replicas: RoutedReplica, **more: Any) -> RouterFacts:
    return RouterFacts(up_s=3600.0, replicas=replicas, **more)


def seen(*replicas: ReplicaFacts, **more: Any) -> list[str]:
    return [finding.fault for finding in diagnose(Evidence(replicas=replicas, **more))]


def logged(count: int, status: int, *, gap_s: float = 1.0) -> tuple[LoggedFacts, ...]:
    return tuple(
        LoggedFacts(received_s=n * gap_s, client="c", model="m", prompt=(7,), status=status, replica="a")
        for n in range(count)
    )


HEAD: dict[str, Any] = {"model": "m", "client": None, "compared": 4, "parted": 4, "at_byte": 12}
KV = KvFacts(configured="tcp://a:1", endpoint="tcp://a:1", messages=3, block_tokens=16, first_hash=7, first_tokens=b"1")

#: The evidence of each fault, and what is just none.
SHOWN: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "config-refused": ({"config_error": "line 3"}, {}),
    "replica-unreachable": ({"replicas": (a_replica(error="refused"),)}, {"replicas": (a_replica(),)}),
    "key-refused": ({"replicas": (a_replica(error="answered 401", status=401),)}, {}),
    "url-wrong": ({"replicas": (a_replica(error="answered 302", status=302),)}, {}),
    "model-not-served": (
        {"replicas": (a_replica(configured_models=("other",)),)},
        {"replicas": (a_replica(configured_models=("m",)), a_replica("b", configured_models=("x",), models=()))},
    ),
    "wrong-engine-kind": (
        {"replicas": (a_replica(engine="vllm"),)},
        {"replicas": (a_replica(engine="auto"), a_replica("b", found_engine=None))},
    ),
    "one-engine-twice": (
        {"replicas": (a_replica(), a_replica("b", probe=replace(PROBE, cached_tokens_cold=990)))},
        {
            "replicas": (
                a_replica(prompt_tokens_total=1e6),
                a_replica("b", probe=replace(PROBE, cached_tokens_cold=990), prompt_tokens_total=5e6),
            )
        },
    ),
    "several-addresses": ({"replicas": (a_replica(addresses="its name has 2"),)}, {}),
    "versions-differ": (
        {"replicas": (a_replica(), a_replica("b"), a_replica("c", version="2"))},
        {"replicas": (a_replica(), a_replica("b", models=("n",), version="2"))},
    ),
    "contexts-differ": (
        {"replicas": (a_replica(context_tokens={"m": 8192}), a_replica("b", context_tokens={"m": 4096}))},
        {"replicas": (a_replica(context_tokens={"m": 8192}), a_replica("b", context_tokens={"n": 4096}))},
    ),
    "region-wrong": (
        {"router": a_router(routed(rtt_ms=2.0), routed("b", rtt_ms=90.0))},
        {"router": a_router(routed(rtt_ms=2.0), routed("b", rtt_ms=25.0), routed("c", region="us", rtt_ms=90.0))},
    ),
    "clock-off": ({"replicas": (a_replica(clock_ahead_s=-60.0),)}, {"replicas": (a_replica(clock_ahead_s=-4.0),)}),
    "certificate-expires": (
        {"replicas": (a_replica(certificate_left_s=1e6),)},
        {"replicas": (a_replica(certificate_left_s=2e6),)},
    ),
    "stream-buffered": (
        {"replicas": (a_replica(probe=replace(PROBE, streams=((0.08, 0.001), (0.07, 0.0), (0.09, 0.0)))),)},
        {
            "replicas": (
                a_replica(probe=replace(PROBE, streams=((0.08, 0.001), (0.01, 0.0), (0.09, 0.0)))),
                a_replica("b", probe=replace(PROBE, streams=((0.01, 0.0),))),
                a_replica("c", probe=replace(PROBE, streams=((0.07, 0.0),) * 2)),
            )
        },
    ),
    "keep-alive-short": (
        {
            "replicas": (a_replica(closes_idle_s=5.0),),
            "router": a_router(routed(), samples=samples(count=5, gap_s=9.0)),
        },
        {
            "replicas": (a_replica(closes_idle_s=5.0),),
            "router": a_router(routed(rtt_ms=1.0), samples=samples(count=5, gap_s=9.0)),
        },
    ),
    "prompts-part-early": (
        {"router": a_router(heads=(HeadFacts(**HEAD),))},
        {"router": a_router(heads=(HeadFacts(**HEAD | {"compared": 9}), HeadFacts(**HEAD | {"at_byte": 300})))},
    ),
    "herd": (
        {"router": a_router(routed(), routed("b"), samples=samples(ttft_s=4.0))},
        {"router": a_router(routed(), routed("b", ready_since_s=1e9), samples=samples(ttft_s=4.0))},
    ),
    "prefix-caching-off": (
        {"replicas": (a_replica(probe=replace(PROBE, cached_tokens_warm=0)),)},
        {"replicas": (a_replica(probe=replace(PROBE, cached_tokens_warm=0, answered=1)),)},
    ),
    "cached-tokens-not-reported": (
        {"replicas": (a_replica(probe=replace(PROBE, cached_tokens_warm=None)),)},
        {"replicas": (a_replica(probe=replace(PROBE, cached_tokens_warm=None), cached_flag=None),)},
    ),
    "usage-not-requested": (
        {"replicas": (a_replica(),), "router": a_router(routed(), samples=samples(output_tokens=None))},
        {
            "replicas": (a_replica(requests_usage=True),),
            "router": a_router(routed(), samples=samples(output_tokens=None)),
        },
    ),
    "template-differs": (
        {
            "replicas": (
                a_replica(probe=replace(PROBE, counted_tokens=990, plain_tokens=980, counted_plain_tokens=980)),
            )
        },
        {"replicas": (a_replica(probe=replace(PROBE, counted_tokens=1000)),)},
    ),
    "tokenizer-differs": ({"replicas": (a_replica(probe=replace(PROBE, counted_tokens=990)),)}, {}),
    "kv-events-off": (
        {"replicas": (a_replica(kv=KvFacts(configured="auto", announced=False)),)},
        {"replicas": (a_replica(kv=KV), a_replica("b"))},
    ),
    "kv-events-interface": (
        {"replicas": (a_replica(kv=replace(KV, connect_error="refused", bound="tcp://127.0.0.1:1")),)},
        {},
    ),
    "kv-events-unreachable": ({"replicas": (a_replica(kv=replace(KV, connect_error="refused")),)}, {}),
    "kv-events-silent": (
        {"replicas": (a_replica(kv=KvFacts(configured="tcp://a:1", endpoint="tcp://a:1")),)},
        {"replicas": (a_replica(kv=KvFacts(configured="tcp://a:1", endpoint="tcp://a:1"), probe=None),)},
    ),
    "reports-unused": ({"unused_reports": ("replicas[0].kv_events: history",)}, {}),
    "block-sizes-differ": (
        {"replicas": (a_replica(kv=KV), a_replica("b", kv=KV), a_replica("c", kv=replace(KV, block_tokens=32)))},
        {"replicas": (a_replica(kv=KV), a_replica("b", kv=replace(KV, block_tokens=32), models=("n",)))},
    ),
    "salts-differ": ({"replicas": (a_replica(kv=KV), a_replica("b", kv=replace(KV, salt="t", first_hash=8)))}, {}),
    "hash-seeds-differ": (
        {"replicas": (a_replica(kv=KV), a_replica("b", kv=KV), a_replica("c", kv=replace(KV, first_hash=8)))},
        {"replicas": (a_replica(kv=KV), a_replica("b", kv=replace(KV, first_hash=8)))},
    ),
    "scrapes-slow": ({"slow_scrapes": ("30 s",)}, {}),
    "metrics-off": ({"replicas": (a_replica(metrics_status=404),)}, {"replicas": (a_replica(metrics_status=200),)}),
    "prior-wrong": (
        {
            "replicas": (a_replica(has_prefill_prior=True), a_replica("b", has_prefill_prior=True)),
            "router": a_router(routed(prefill_slowdown=3.5), routed("b", prefill_slowdown=4.0)),
        },
        {
            "replicas": (a_replica(has_prefill_prior=True),),
            "router": a_router(routed(prefill_slowdown=2.4), routed("b", prefill_slowdown=9.0, attempts=3)),
        },
    ),
    "replica-slow": (
        {
            "replicas": (a_replica(has_prefill_prior=True), a_replica("b", has_prefill_prior=True)),
            "router": a_router(routed(prefill_slowdown=3.5), routed("b")),
        },
        {"router": a_router(routed(decode_slowdown=1.4), routed("b", decode_slowdown=2.3, attempts=8))},
    ),
    "engine-restarts": ({"router": a_router(routed(restarts=3))}, {"router": a_router(routed(restarts=2))}),
    "quota-sheds": (
        {"router": a_router(requests=200.0, rejects={"client_rate": 5.0})},
        {"router": a_router(requests=2000.0, rejects={"client_rate": 5.0, "queue_full": 900.0})},
    ),
    "client-retries": ({"log": logged(10, 500)}, {"log": (*logged(30, 200), *logged(9, 500))}),
    "drain-forgotten": (
        {"router": a_router(routed(draining_for_s=4000.0))},
        {"router": a_router(routed(draining_for_s=4000.0, in_flight=1), routed("b", draining_for_s=3000.0))},
    ),
    "file-limit-low": (
        {"router": a_router(open_files=20.0, most_files=1024.0), "max_in_flight": 4096},
        {"router": a_router(open_files=20.0, most_files=1024.0), "max_in_flight": 400},
    ),
    "tuner-blind": (
        {"tuner": TunerFacts(polls=50.0, failed_polls=9.0)},
        {"tuner": TunerFacts(polls=50.0, failed_polls=2.0, samples=100.0, lost_samples=5.0)},
    ),
    "request-log-lost": ({"router": a_router(log_lines_lost=1.0)}, {}),
    "edit-waits": ({"router": a_router(waiting=("proxy.bind",))}, {}),
}


@pytest.mark.parametrize("fault", SHOWN)
def test_a_fault_is_found_by_its_evidence_alone(fault: str) -> None:
    findings = diagnose(Evidence(**SHOWN[fault][0]))
    assert {finding.fault for finding in findings} == {fault}


@pytest.mark.parametrize("fault", SHOWN)
def test_what_is_not_enough_is_no_fault(fault: str) -> None:
    assert diagnose(Evidence(**SHOWN[fault][1])) == []


def test_every_fault_has_a_case_here() -> None:
    assert set(SHOWN) == set(FAULTS)


def test_the_worst_stands_first_and_what_it_explains_is_left_out() -> None:
    off = replace(KV, connect_error="refused")
    down = a_replica("b", error="refused", kv=off, metrics_status=503, models=())
    assert seen(a_replica(clock_ahead_s=60.0), down) == ["replica-unreachable", "clock-off"]


def test_tokens_that_come_together_are_held_back_if_those_of_a_sibling_do_not() -> None:
    fast, slow = replace(PROBE, streams=((0.0, 0.0),) * 3), replace(PROBE, streams=((0.0, 0.06),))
    assert seen(a_replica(probe=slow), a_replica("b", probe=fast)) == ["stream-buffered"]
    assert seen(a_replica(probe=slow), a_replica("b", probe=replace(fast, streams=fast.streams[:2]))) == []
    assert seen(a_replica(probe=slow), a_replica("b", probe=fast, models=("n",))) == []
    assert seen(a_replica(probe=replace(PROBE, has_length=True))) == ["stream-buffered"]


def test_one_fault_at_many_places_is_one_finding() -> None:
    rows = [a_replica(f"r{number}", metrics_status=404, metrics_flag="--enable-metrics") for number in range(6)]
    (finding,) = diagnose(Evidence(replicas=tuple(rows)))
    assert finding.place == "r0, r1, r2, r3 and 2 more"
    assert finding.evidence.startswith("r0: its /metrics answers 404")


def test_if_all_clocks_agree_that_of_the_router_is_off() -> None:
    (finding,) = diagnose(Evidence(replicas=(a_replica(clock_ahead_s=60.0), a_replica("b", clock_ahead_s=61.0))))
    assert (finding.place, finding.evidence) == ("router", "all replicas agree, and this machine is 60 s behind them")


def test_a_replica_without_events_beside_others_with_them_has_a_finding_if_the_policy_reads_them() -> None:
    both = (a_replica(kv=KV), a_replica("b"))
    assert seen(*both, reads_events=True) == ["kv-events-off"]
    assert seen(*both) == []


def test_a_finding_has_the_section_of_its_fault() -> None:
    (finding,) = diagnose(Evidence(config_error="line 3"))
    assert isinstance(finding, Finding)
    assert finding.anchor == FAULTS["config-refused"]


def test_the_runbook_links_every_fault_and_the_page_explains_it() -> None:
    linked = {
        name: section.partition("(#")[2].rstrip(")")
        for names, section in rows_of((DOCS / "runbook.md").read_text(), "finding", "section")
        for name in code(names)
    }
    assert linked == dict(FAULTS)
    explained = rows_of((DOCS / "diagnose.md").read_text(), "fault", "what shows it")
    assert [code(fault) for fault, _ in explained] == [[name] for name in FAULTS]


# -- where prompts part

SYSTEM = b" You answer the questions of pilots about the weather at the airport of their next landing. " * 3


def test_prompts_part_at_the_byte_of_an_id_before_what_they_share() -> None:
    heads = PromptHeads()
    for number in range(4):
        heads.add("m", "c", b"Today is 2026-11-%02d." % (11 * number) + SYSTEM)
    (row,) = heads.parted()
    assert (row.compared, row.parted, row.at_byte) == (3, 3, len(b"Today is 2026-11-"))


@pytest.mark.parametrize(
    "texts",
    [
        [SYSTEM + b"first question", SYSTEM + b"another question, and a longer one"],
        [bytes([65 + n]) * 400 for n in range(4)],
        [b"ab" * 300, b"b" + b"ab" * 300],
        [SYSTEM, SYSTEM],
    ],
    ids=["at their end", "nothing shared", "a pattern", "equal"],
)
def test_prompts_that_do_not_go_on_alike_do_not_part_early(texts: list[bytes]) -> None:
    heads = PromptHeads()
    for text in texts:
        heads.add("m", None, text)
    assert heads.parted() == []


def test_clients_and_models_are_compared_apart_and_the_oldest_head_makes_room() -> None:
    heads = PromptHeads()
    for number in range(2 * HEADS):
        heads.add("m", f"c{number}", b"%04d" % number + SYSTEM)
    assert heads.parted() == []
    heads.add("m", "c0", b"x" + SYSTEM)
    assert heads.parted() == []


# -- which block of the events is that of the common prompt


def stored(tokens: bytes, number: int) -> BlocksStored:
    return BlocksStored(hashes=(number,), parent=None, tokens=tokens, block_tokens=2, tier=KvTier.GPU)


def test_the_block_of_the_common_prompt_is_found_among_those_of_other_requests() -> None:
    common = b"8 bytes!"
    kv = {
        "a": (KV, [stored(b"another1", 1), stored(common, 2)]),
        "b": (KV, [stored(common, 3), stored(b"another2", 4)]),
        "c": (KV, [stored(b"another3", 5)]),
    }
    found = _with_blocks(kv)
    assert [found[name].first_tokens for name in "abc"] == [common, common, KV.first_tokens]
    assert [found[name].first_hash for name in "ab"] == [2, 3]


def test_repetition_that_found_its_place_in_the_cache_taken_is_no_cache_that_is_off() -> None:
    """Two repetitions came at once to a server that keeps one prompt a slot, and one of them got the other's slot."""
    cold, missed, hit = (_Answer(900, cached, 0.1, 0.1, False) for cached in (0, 0, 896))
    asked_twice = a_replica(probe=_probe_facts(cold, missed, (), ProbeFacts()))
    asked_again = a_replica(probe=_probe_facts(cold, missed, (hit,), ProbeFacts()))
    assert seen(asked_twice) == ["prefix-caching-off"]
    assert seen(asked_again) == []


def test_an_engine_under_two_names_has_shown_its_cache_and_another_one_has_not() -> None:
    taken = replace(PROBE, cached_tokens_warm=0)
    first, second = a_replica("a", probe=taken), a_replica("b", probe=replace(PROBE, cached_tokens_cold=990))
    assert seen(first, second) == ["one-engine-twice"]
    other = a_replica("c", probe=taken)
    findings = diagnose(Evidence(replicas=(first, second, other)))
    assert [(finding.fault, finding.place) for finding in findings if finding.fault == "prefix-caching-off"] == [
        ("prefix-caching-off", "c")
    ]
