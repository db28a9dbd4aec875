"""Every comparison, by group.

Loads are those of the simulated fleets: medium load, below the rate at which queues grow without end.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from gorgo.apps.cache_sources.comparison import CacheComparison, CacheTarget, CacheVariant
from gorgo.apps.cache_sources.fleets import LLAMA_13B, CacheFleet
from gorgo.apps.cache_sources.measure import SOURCES, Source
from gorgo.apps.cache_sources.traffic import ChatTraffic, ContextTraffic, ConversationKind, ConversationTraffic, Traffic
from gorgo.apps.claims.engine_targets import FILTERS, FLEETS, SHAPES
from gorgo.apps.datasets import own_block_tokens
from gorgo.sim.faults.report_kinds import BadReports, RouterRestart
from gorgo.sim.kv_events.path import PathFaults

#: Parts of each KV pool.
POOLS = (1.0, 0.25, 1 / 16)
#: Replicas of the sweep.
REPLICAS = (2, 4, 8, 16)
_LABELS: dict[Source, str] = {
    "unbounded": "history, unbounded",
    "bounded": "history, bounded",
    "cached_tokens": "history and cached_tokens",
    "push": "push",
    "events": "events",
    "exact": "exact caches",
}
ROUND_ROBIN = CacheVariant(label="round-robin", policy="round-robin")
_SOURCES = tuple(CacheVariant(label=label, policy="gorgo-ms", source=source) for source, label in _LABELS.items())
_HISTORY, _EVENTS, _EXACT = _LABELS["cached_tokens"], _LABELS["events"], _LABELS["exact"]
_CHAT = ChatTraffic(name="ART-Chat-like", trace="art-chat-apr5", requests=2400)
#: Questions on contexts of 10k tokens; one pool of an H100 has room for 45.
_CONTEXTS = ContextTraffic(
    name="RAG, 10k tokens", contexts=288, context_tokens=10_000, popularity=0.7, requests=2400, rate_per_s=8.0
)
_H100 = CacheFleet(name="8xH100", profile="1xH100-Llama-3.1-8B", replicas=8)
_A100 = CacheFleet(name="8xA100", profile=LLAMA_13B.name, replicas=8, vllm=True)
#: Times of the faults, s: reports are lost, then the path is cut, then the router starts again.
LOST_S, CUT_S, RESTART_S = (60.0, 80.0), (110.0, 130.0), 160.0


def comparisons() -> list[CacheComparison]:
    """Return every comparison."""
    assert _LABELS.keys() == SOURCES.keys()
    return [*_sources(), *_workloads(), *_faults(), *_replicas(), *_conversations(), *_override()]


def _sources() -> Iterator[CacheComparison]:
    """Sources side by side: events within 2 % of exact caches, and never behind the history."""
    # At their own load the chats would have queues without end on the smallest pools.
    slower = replace(_CHAT, name=f"{_CHAT.name}, 0.4 of its load", load=0.4)
    loads: tuple[tuple[CacheFleet, tuple[Traffic, ...]], ...] = (
        (CacheFleet(name="sglang"), (_CHAT, _CHAT, slower)),
        (_H100, (_CONTEXTS,) * len(POOLS)),
    )
    for fleet, traffics in loads:
        for share, traffic in zip(POOLS, traffics, strict=True):
            yield CacheComparison(
                group="sources",
                fleet=replace(fleet, pool_share=share),
                traffic=traffic,
                variants=_SOURCES,
                targets=(
                    CacheTarget(of=_EVENTS, against=_EXACT, figure="p95 TTFT", at_most=1.02),
                    CacheTarget(of=_EVENTS, against=_EXACT, figure="hit", at_least=0.98),
                    CacheTarget(of=_EVENTS, against=_HISTORY, figure="p95 TTFT", at_most=1.0),
                    CacheTarget(of=_EVENTS, against=_HISTORY, figure="mean TTFT", at_most=1.0),
                ),
            )


def _workloads() -> Iterator[CacheComparison]:
    """Every shape on engines of both kinds: with events never behind the history alone."""
    for fleet in FLEETS:
        for trace, time_scale in SHAPES.items():
            yield CacheComparison(
                group="workloads",
                fleet=CacheFleet(name=fleet),
                traffic=ChatTraffic(
                    name=f"{trace}, load {1 / time_scale:.2g}",
                    trace=trace,
                    requests=700,
                    load=1 / time_scale,
                    block_tokens=own_block_tokens(trace),
                    filters=FILTERS,
                ),
                variants=[variant for variant in _SOURCES if variant.label in (_HISTORY, _EVENTS)],
                targets=[
                    CacheTarget(of=_EVENTS, against=_HISTORY, figure=figure, at_most=1.0)
                    for figure in ("p95 TTFT", "p95 E2E")
                ],
            )


def _faults() -> Iterator[CacheComparison]:
    """Phantom and missed tokens over time, while reports fail and the router restarts."""
    yield CacheComparison(
        group="faults",
        fleet=replace(_H100, pool_share=0.25),
        traffic=replace(_CONTEXTS, requests=1760),
        variants=[variant for variant in _SOURCES if variant.source in ("cached_tokens", "push", "events")],
        faults=(
            BadReports(None, PathFaults(lost=0.5, doubled=0.1, reordered=0.1), *LOST_S),
            BadReports(None, PathFaults(cut=True), *CUT_S),
            RouterRestart(RESTART_S),
        ),
        by_time=True,
        marks={LOST_S[0]: "half of the reports lost", CUT_S[0]: "reports cut", RESTART_S: "router restarts"},
    )


def _replicas() -> Iterator[CacheComparison]:
    """As many contexts per replica at each size of the fleet: round robin finds fewer of them the larger it is."""
    for count in REPLICAS:
        yield CacheComparison(
            group="replicas",
            fleet=CacheFleet(name=f"{count}xL40S", profile="1xL40S-Llama-3.1-8B", replicas=count),
            traffic=ContextTraffic(
                name=f"RAG, {16 * count} contexts",
                contexts=16 * count,
                context_tokens=10_000,
                requests=200 * count,
                rate_per_s=0.7 * count,
            ),
            variants=(
                ROUND_ROBIN,
                *[variant for variant in _SOURCES if variant.source in ("cached_tokens", "push", "events")],
            ),
        )


def _conversations() -> Iterator[CacheComparison]:
    """Ranvier's routes by depth mode, on conversations of three kinds."""
    rates: dict[ConversationKind, float] = {"branching": 0.4, "continued": 1.5, "resumed": 1.5}
    for kind, starts_per_s in rates.items():
        yield CacheComparison(
            group="depths",
            fleet=_A100,
            traffic=ConversationTraffic(kind=kind, requests=2400, starts_per_s=starts_per_s),
            variants=(
                ROUND_ROBIN,
                CacheVariant(label="multi-depth, single", policy="multi-depth", weights=(("depths", 0.0),)),
                CacheVariant(label="multi-depth", policy="multi-depth"),
                CacheVariant(label="longest prefix, exact caches", policy="prefix-cache-in-flight", source="exact"),
                CacheVariant(label="gorgo-ms, events", policy="gorgo-ms", source="events"),
            ),
            targets=[
                CacheTarget(of=label, against=ROUND_ROBIN.label, figure=figure)
                for label in ("multi-depth, single", "multi-depth", "gorgo-ms, events")
                for figure in ("mean TTFT", "p99 TTFT")
            ],
        )


def _override() -> Iterator[CacheComparison]:
    """Most traffic behind one system prompt: the override trades hits for the tail."""
    off, on = "override off", "override on"
    yield CacheComparison(
        group="override",
        fleet=_A100,
        traffic=ContextTraffic(
            name="80 % behind one system prompt",
            contexts=40,
            context_tokens=2000,
            first_share=0.8,
            question_tokens=300,
            requests=2400,
            rate_per_s=5.0,
            block_tokens=16,
        ),
        variants=(
            ROUND_ROBIN,
            CacheVariant(label=off, policy="multi-depth", weights=(("override", 0.0),)),
            CacheVariant(label=on, policy="multi-depth"),
            CacheVariant(label="gorgo-ms, events", policy="gorgo-ms", source="events"),
        ),
        targets=[
            CacheTarget(of=on, against=off, figure="p99 TTFT"),
            CacheTarget(of=on, against=off, figure="hit"),
        ],
    )
