"""Comparisons with llm-d's published figures, by group.

Rates are those of the simulated fleets: from a light load to shortly before queues grow without end.
"""

from __future__ import annotations

from collections.abc import Iterator

from gorgo.apps.learned_routers.comparison import PublishedRatio, RouterComparison
from gorgo.apps.learned_routers.workloads import production, production_of_long_turns, scenario, sharegpt
from gorgo.sim.kv_events.reports import CacheReports

PREDICTED, RESIDUAL, OURS = "predicted-latency", "gorgo-residual", "gorgo-ms"
LOAD_PREFIX, TUNED_PREFIX = "load-prefix 1:1:1", "load-prefix 3:2:2"
#: Requests of a run, whose answers are ten times as long as Lodestar's; its first model needs a hundred.
CHATS = 2000
MEAN, P99 = "mean TTFT", "p99 TTFT"
#: Rate of each of llm-d's scenarios on the simulated fleet, 1/s, and of the ShareGPT-like traffic.
RATES = {"A": 30.0, "B": 9.0, "C": 10.0, "D": 4.0}
SHAREGPT_RATE = 60.0
#: Shares of these rates that the curves over the rate have beside the rates themselves.
LADDER = (0.4, 0.7)


def llm_d_comparisons() -> Iterator[RouterComparison]:
    """Yield every comparison."""
    yield from _accuracy()
    yield from _scenarios()
    yield from _production()
    yield from _gates()


def _accuracy() -> Iterator[RouterComparison]:
    """llm-d's ladder in scenario C; the MAPE of each is in the table of means, that of each step in the slices.

    With KV events too: then the cached tokens of a prediction are those that the engine has. In the last step requests
    wait for KV memory, for as long as answers to come take.
    """
    reports: tuple[CacheReports, ...] = ("usage", "events")
    for kind in reports:
        yield RouterComparison(
            group="accuracy",
            fleet="10x2xH100",
            traffic=scenario("C", requests=CHATS, rates_per_s=(4.0, 6.0, 8.0, 10.0)),
            against=OURS,
            variants=(PREDICTED, RESIDUAL),
            stats={"MAPE": None, MEAN: None},
            warm_up=0.5,
            cache_reports=kind,
        )


def _scenarios() -> Iterator[RouterComparison]:
    for share in (1.0, *LADDER):
        traffics = [
            *(scenario(name, requests=CHATS, rates_per_s=(rate * share,)) for name, rate in RATES.items()),
            sharegpt(requests=CHATS, rate_per_s=SHAREGPT_RATE * share),
        ]
        for traffic in traffics:
            yield RouterComparison(
                group="scenarios" if share == 1.0 else "qps",
                fleet="8x1xH100" if traffic.name.startswith("ShareGPT") else "10x2xH100",
                traffic=traffic,
                against=LOAD_PREFIX,
                variants=(PREDICTED, OURS, RESIDUAL, "round-robin"),
                stats={
                    "mean E2E/token": PublishedRatio(
                        text="comparable" if "C" in traffic.name else "better", of=PREDICTED, claim=1.0
                    )
                    if share == 1.0
                    else None,
                    MEAN: None,
                },
            )


def _production() -> Iterator[RouterComparison]:
    """llm-d's table of four; its ratios are to 3:2:2 for E2E and TPOT."""
    texts = {"p50 E2E": 1.48, "p95 E2E": 1.18, "p50 TTFT": 3.48, "p95 TTFT": 1.48, "p50 TPOT": 1.27, "p99 TPOT": 1.19}
    for traffic in (production(requests=CHATS), production_of_long_turns(requests=CHATS)):
        yield RouterComparison(
            group="production",
            fleet="13x8xH200",
            traffic=traffic,
            against=TUNED_PREFIX,
            variants=(PREDICTED, OURS, RESIDUAL, LOAD_PREFIX, "round-robin", "oracle"),
            stats={name: PublishedRatio(text=f"{ratio:g}", of=PREDICTED, claim=ratio) for name, ratio in texts.items()},
        )


def _gates() -> Iterator[RouterComparison]:
    """Each guard of llm-d's left out, where its gates act on most requests."""
    guards = ("no affinity gates", "no load gate", "no exploration", "weighted pick", "model from 1,000 samples")
    training = ("round per 1,000", "logarithms", "linear")
    yield RouterComparison(
        group="gates",
        fleet="10x2xH100",
        traffic=scenario("C", requests=CHATS, rates_per_s=(RATES["C"],)),
        against=PREDICTED,
        variants=tuple(f"predicted-latency, {one}" for one in (*guards, *training)),
        stats={MEAN: None, P99: None, "mean E2E/token": None},
    )
