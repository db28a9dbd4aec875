"""Every comparison with a published figure, by group; those of llm-d are in `llm_d_groups`.

Loads are those of the simulated fleets: medium load, and shortly before queues grow without end. The papers' rates are
of engines with other costs.
"""

from __future__ import annotations

from collections.abc import Iterator

from gorgo.apps.learned_routers.comparison import PublishedRatio, RouterComparison
from gorgo.apps.learned_routers.llm_d_groups import LOAD_PREFIX, MEAN, OURS, P99, RESIDUAL, llm_d_comparisons
from gorgo.apps.learned_routers.traffic import Traffic
from gorgo.apps.learned_routers.variants import QUEUEING, SHADOWS, TAUS
from gorgo.apps.learned_routers.workloads import (
    fixed_length,
    longer,
    mixed,
    sharing,
    shift,
    shipped,
    traced,
)

HEURISTIC, LODESTAR = "prefix-cache-and-load", "lodestar"
#: Requests of a run: a model is there before the measured half of them.
REQUESTS = 3000
#: Of a long run: half of the requests of Lodestar's shift.
LONG = 10_000
#: Rate of Mooncake's conversation trace on 8 A30, 1/s: at three times that first tokens take minutes.
CONVERSATIONS = 1.0
#: The fleets of Lodestar's evaluation: what it claims of mean and p99, and the load of each kind of traffic, 1/s.
EQUAL, WITHOUT_CACHE, TWO_KINDS = "8xA30", "7xA30-8xV100", "7xL20-8xA30"


def comparisons(conversation: str | None = None) -> list[RouterComparison]:
    """Return every comparison; `conversation` is the file of Mooncake's conversation trace."""
    return [
        *_lodestar(conversation),
        *_long(),
        *_motivation(),
        *_tau(conversation),
        *_shift(),
        *_pools(),
        *_filter(),
        *llm_d_comparisons(),
        *_longer(),
        *_mixed_share(),
        *_shadows(),
        *_scrapes(),
    ]


def _of_lodestar(fleet: str) -> dict[str, PublishedRatio | None]:
    if fleet == EQUAL:
        texts, claims = ("1.02-2.15", "1.07-1.86"), (1.41, 1.47)
    else:
        texts, claims = ("1.25-4.38", "1.32-4.42"), (1.41, 1.47)
    return {
        figure: PublishedRatio(text=text, of=LODESTAR, claim=claim)
        for figure, text, claim in zip((MEAN, P99), texts, claims, strict=True)
    }


def _traffic(fleet: str, conversation: str | None) -> Iterator[Traffic]:
    """Yield the traffic of a fleet, the most telling first."""
    scale = {EQUAL: 1.0, WITHOUT_CACHE: 1.6, TWO_KINDS: 1.9}[fleet]
    yield sharing(0.5, requests=REQUESTS, rate_per_s=6 * scale)
    yield sharing(0.5, requests=REQUESTS, rate_per_s=4 * scale)
    yield shipped("toolagent-like", requests=REQUESTS, rate_per_s=3 * scale)
    yield sharing(0.5, requests=REQUESTS, rate_per_s=10 * scale, output_tokens=1)
    yield sharing(0.1, requests=REQUESTS, rate_per_s=5 * scale)
    yield sharing(0.3, requests=REQUESTS, rate_per_s=5.5 * scale)
    yield sharing(0.7, requests=REQUESTS, rate_per_s=7 * scale)
    yield mixed(requests=REQUESTS, rate_per_s=6 * scale)
    yield shipped("synthetic-like", requests=REQUESTS, rate_per_s=2.5 * scale)
    if conversation is not None:
        yield traced("conversation", conversation, requests=REQUESTS, rate_per_s=CONVERSATIONS * scale)


def _lodestar(conversation: str | None) -> Iterator[RouterComparison]:
    for fleet in (EQUAL, WITHOUT_CACHE, TWO_KINDS):
        for number, traffic in enumerate(_traffic(fleet, conversation)):
            first = number == 0
            yield RouterComparison(
                group="lodestar" if first else "lodestar-more",
                fleet=fleet,
                traffic=traffic,
                against=HEURISTIC,
                variants=(LODESTAR, OURS, RESIDUAL, *([RESIDUAL + QUEUEING] if first else [])),
                stats=_of_lodestar(fleet),
                also=("oracle",) if first else (),
            )


def _long() -> Iterator[RouterComparison]:
    """With ten models in a run, with the guards and as in its published benchmark, which is of prefills alone."""
    for fleet, rate, output_tokens in ((EQUAL, 6.0, None), (TWO_KINDS, 11.4, None), (EQUAL, 10.0, 1)):
        yield RouterComparison(
            group="lodestar-long",
            fleet=fleet,
            traffic=sharing(0.5, requests=LONG, rate_per_s=rate, output_tokens=output_tokens),
            against=HEURISTIC,
            variants=(LODESTAR, "lodestar, as in its benchmark", OURS, RESIDUAL),
            stats=_of_lodestar(fleet),
            also=("oracle",),
        )


def _motivation() -> Iterator[RouterComparison]:
    """One heuristic wins on long prompts and loses on short ones at twice the rate."""
    for tokens, rate, text in ((4000, 5.0, ""), (1000, 10.0, "0.41")):
        yield RouterComparison(
            group="motivation",
            fleet="7xL20",
            traffic=fixed_length(tokens, 0.8, requests=REQUESTS, rate_per_s=rate),
            against="least-request",
            variants=(HEURISTIC, OURS),
            stats={
                MEAN: PublishedRatio(text=text, of=HEURISTIC),
                P99: PublishedRatio(text="0.67" if text else "", of=HEURISTIC),
            },
        )


def _tau(conversation: str | None) -> Iterator[RouterComparison]:
    traffics = [shipped("toolagent-like", requests=REQUESTS, rate_per_s=3.0)]
    if conversation is not None:
        traffics.append(traced("conversation", conversation, requests=REQUESTS, rate_per_s=CONVERSATIONS))
    for traffic in traffics:
        yield RouterComparison(
            group="tau",
            fleet=EQUAL,
            traffic=traffic,
            against="tau 0.5",
            variants=(*(f"tau {tau:g}" for tau in TAUS if tau != 0.5), OURS),
            also=(LODESTAR,),
            stats={MEAN: None},
        )


def _shift() -> Iterator[RouterComparison]:
    yield RouterComparison(
        group="shift",
        fleet=EQUAL,
        traffic=shift(requests=2 * REQUESTS, rates=(3.0, 6.5)),
        against="lodestar, frozen",
        variants=(LODESTAR, "lodestar, offline", RESIDUAL, OURS, HEURISTIC),
        stats={MEAN: None, P99: None},
        warm_up=0.5,
    )


def _pools() -> Iterator[RouterComparison]:
    for against, mean, p99 in (("lodestar, new data only", "2.39", "2.50"), ("lodestar, all data", "1.21", "1.11")):
        yield RouterComparison(
            group="pools",
            fleet=EQUAL,
            traffic=shift(requests=2 * REQUESTS, rates=(3.0, 6.5)),
            against=against,
            variants=(LODESTAR, "lodestar, random replay", "lodestar, linear"),
            stats={MEAN: PublishedRatio(text=mean, of=LODESTAR), P99: PublishedRatio(text=p99, of=LODESTAR)},
            warm_up=0.5,
        )


def _filter() -> Iterator[RouterComparison]:
    """The second rate is the most that is served without a queue that grows: there KV pools are full, as published."""
    for rate in (3.0, 3.3):
        yield RouterComparison(
            group="k-filter",
            fleet=EQUAL,
            traffic=shipped("toolagent-like", requests=REQUESTS, rate_per_s=rate),
            against="lodestar, no K-filter",
            variants=(LODESTAR, RESIDUAL, OURS),
            stats={MEAN: PublishedRatio(text="1.72", of=LODESTAR), P99: PublishedRatio(text="1.78", of=LODESTAR)},
        )


def _longer() -> Iterator[RouterComparison]:
    """Prompts grow from 1k to 8k tokens: what learns is at most a tenth behind the heuristic; each guard left out."""
    guards = ("model from 200 samples", "no range check", "no exploration", "no K-filter", "near best 0.1")
    yield RouterComparison(
        group="guards",
        fleet=EQUAL,
        traffic=longer(requests=2 * REQUESTS, rates=(14.0, 3.0)),
        against=HEURISTIC,
        variants=(
            LODESTAR,
            RESIDUAL,
            OURS,
            *(f"lodestar, {guard}" for guard in guards),
            *(f"gorgo-residual, {guard}" for guard in ("no range check", "no limit")),
        ),
        stats={P99: PublishedRatio(text=">= 0.91", of=LODESTAR, claim=1 / 1.10), MEAN: None},
        warm_up=0.5,
    )


def _mixed_share() -> Iterator[RouterComparison]:
    """The share of each pool, in the table of means, beside that of full knowledge."""
    yield RouterComparison(
        group="oracle",
        fleet=TWO_KINDS,
        traffic=sharing(0.5, requests=REQUESTS, rate_per_s=11.4),
        against="oracle",
        variants=(LODESTAR, RESIDUAL, OURS, HEURISTIC),
        stats={MEAN: None},
    )


def _shadows() -> Iterator[RouterComparison]:
    """Order of replicas: Spearman's rho of each shadow under `random`, in the table of means."""
    first, *others = (f"random, shadow {name}" for name in SHADOWS)
    for fleet, rate in ((EQUAL, 3.0), (TWO_KINDS, 6.0)):
        yield RouterComparison(
            group="shadows",
            fleet=fleet,
            traffic=sharing(0.5, requests=REQUESTS, rate_per_s=rate),
            against=first,
            variants=others,
            stats={},
        )


def _scrapes() -> Iterator[RouterComparison]:
    """Fresh and stale reports of engines over a long path."""
    for interval_s in (0.1, 1.0, 30.0):
        yield RouterComparison(
            group="scrapes",
            fleet="vllm",
            traffic=sharing(0.5, requests=REQUESTS, rate_per_s=8.0),
            against=OURS,
            variants=(LODESTAR, RESIDUAL, LOAD_PREFIX),
            stats={MEAN: None, P99: None},
            scrape_interval_s=interval_s,
        )
