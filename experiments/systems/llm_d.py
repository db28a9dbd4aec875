"""llm-d's predicted latency: boosted trees, on its scenarios and its production run.

A scenario is `num_groups` system prompts with `num_prompts_per_group` users in endless conversations. Groups of this
project are of unequal size (in proportion to 1/n), those of llm-d's generator of equal size. Rates are those of the
simulated fleets: from a light load to shortly before queues grow without end.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from math import exp, inf

from experiments.comparison import VariantComparison
from experiments.pictures import Pictured
from experiments.published import Claim, Published
from experiments.reports import GORGO_MS, MEAN, P99, RESIDUAL, Grid, SystemReport, claims_of, routers, variant_report
from experiments.runner import Runner
from experiments.traffic import PhasedTraffic, one_phase
from gorgo.lab.datasets import GroupsShape
from gorgo.lab.sim.kv_events import CacheReports

NAME, TITLE = "llm-d", "llm-d predicted latency"
PREDICTED = "predicted-latency"
LOAD_PREFIX, TUNED_PREFIX = "load-prefix 1:1:1", "load-prefix 3:2:2"
#: Requests of a run, whose answers are ten times as long as Lodestar's; its first model needs a hundred.
CHATS = 2000
PER_TOKEN = "mean E2E/token"
#: Rate of each of llm-d's scenarios on the simulated fleet, 1/s, and of the ShareGPT-like traffic.
RATES, SHAREGPT, SHAREGPT_RATE = {"A": 30.0, "B": 9.0, "C": 10.0, "D": 4.0}, "ShareGPT-like", 60.0
FLEET = "10x2xH100"
#: Its guards.
GATES = tuple(f"predicted-latency, {one}" for one in (
    "no affinity gates", "no load gate", "no exploration", "weighted pick", "model from 1,000 samples",
    "round per 1,000", "logarithms", "linear",
))  # fmt: skip
#: Shares of these rates that the curves over the rate have beside the rates themselves.
LADDER = (0.4, 0.7)
_CHAT = GroupsShape(
    seed=0, duration_s=1.0, rate_per_s=1.0, groups=6, users=6000, system_median=1000, system_sigma=0.0,
    history_median=0, history_sigma=0.0, turns_mean=50.0, turn_median=30, turn_sigma=0.3, think_s_min=2.0,
    answer_token_s=0.06, output_median=1000, output_sigma=0.3, output_max=4096, input_max=28_000, block_tokens=64,
)  # fmt: skip
_PRODUCTION = replace(
    _CHAT, groups=6, users=300, turn_median=729, turn_sigma=1.6, turns_mean=12.0, output_median=300, output_sigma=1.3,
    output_max=8192, input_max=131_072,
)  # fmt: skip
#: Scenarios: groups, users of each, tokens of a system prompt and of a question.
SCENARIOS = {"A": (6, 1000, 1000, 30), "B": (6, 1000, 1000, 3000), "C": (150, 5, 6000, 1200), "D": (150, 5, 1000, 6200)}
#: The production table's figures of the baselines and of predicted latency, as printed: ratios to weights of 3:2:2.
PRODUCTION = {
    "p50 E2E": ("1.48", "13.42 s", "9.06 s"),
    "p95 E2E": ("1.18", "26.55 s", "22.57 s"),
    "p50 TTFT": ("3.48", "3.38 s", "0.97 s"),
    "p95 TTFT": ("1.48", "16.78 s", "11.34 s"),
    "p50 TPOT": ("1.27", "28 ms", "22 ms"),
    "p99 TPOT": ("1.19", "63 ms", "53 ms"),
}
_TABLE = "table of the production run, Qwen3-480B on 13 x 8xH200"


def scenario(name: str, *, requests: int, rates_per_s: tuple[float, ...]) -> PhasedTraffic:
    """Return one of llm-d's scenarios, at one rate or in steps of equal time."""
    groups, users, system, question = SCENARIOS[name]
    shape = replace(_CHAT, groups=groups, users=groups * users, system_median=system, turn_median=question)
    more = {"max_input": 28_000, "with_outputs": True}
    return one_phase(f"scenario {name}", shape, requests=requests, rates_per_s=rates_per_s, **more)


def sharegpt(*, requests: int, rate_per_s: float) -> PhasedTraffic:
    """Return short prompts without a common prefix, of about ShareGPT's lengths (220 and 200 tokens, assumed)."""
    shape = replace(
        _CHAT, groups=6000, users=6000, system_median=1, turn_median=130, turn_sigma=1.1, turns_mean=1.5,
        output_median=150, output_sigma=0.9, output_max=1024,
    )  # fmt: skip
    return one_phase(SHAREGPT, shape, requests=requests, rates_per_s=(rate_per_s,))


def production(name: str, shape: GroupsShape) -> PhasedTraffic:
    """Return llm-d's production traffic: stages of 1 and 5 requests a second, long tails of prompts and answers."""
    more = {"max_input": 131_072, "with_outputs": True}
    return one_phase(name, shape, requests=CHATS, rates_per_s=(1.0, 5.0) * 4, **more)


#: Few long turns: baselines have first tokens after seconds, as in the published run. Lengths are chosen for that, and
#: for the published end-to-end times of `load-prefix 3:2:2` over its time per token.
LONG_TURNS = replace(
    _PRODUCTION, system_median=4000, turn_median=4000, turn_sigma=1.2, turns_mean=1.3, output_median=330,
    output_sigma=0.5,
)  # fmt: skip
#: As many cached tokens as the published run had, 94 %: users stay for many turns, and its medians are the means.
CACHED_TURNS = replace(
    _PRODUCTION, users=100, system_median=4000, turns_mean=50.0,
    turn_median=_PRODUCTION.turn_median / exp(_PRODUCTION.turn_sigma**2 / 2),
    output_median=_PRODUCTION.output_median / exp(_PRODUCTION.output_sigma**2 / 2),
)  # fmt: skip


def comparisons() -> list[VariantComparison]:
    """Return every comparison.

    Of `accuracy` the MAPE is in the table of means, that of each step in the slices. With KV events the cached tokens
    of a prediction are those that the engine has. In the last step requests wait for KV memory, for as long as answers
    to come take.
    """
    ladder = scenario("C", requests=CHATS, rates_per_s=(4.0, 6.0, 8.0, 10.0))
    at_full_rate = {name: scenario(name, requests=CHATS, rates_per_s=(rate,)) for name, rate in RATES.items()}
    kinds: tuple[CacheReports, ...] = ("usage", "events")
    return [
        *(routers("accuracy", FLEET, ladder, GORGO_MS, (PREDICTED, RESIDUAL), ("MAPE", MEAN), cache_reports=kind)
          for kind in kinds),
        *_scenarios(),
        *_production(),
        # Each guard of llm-d's left out, where its gates act on most requests.
        routers("gates", FLEET, at_full_rate["C"], PREDICTED, GATES, (MEAN, P99, PER_TOKEN)),
        # Scrapes as often as the policy declares, and as seldom as the default; its cold start is the baseline.
        *(routers("fresh", FLEET, traffic, LOAD_PREFIX, (PREDICTED,), (MEAN,), scrape_s=interval_s)
          for traffic in at_full_rate.values() for interval_s in (1.0, 30.0)),
    ]  # fmt: skip


def _scenarios() -> Iterator[VariantComparison]:
    """Every scenario at its full rate, of which the post says better, but for C comparable; and at parts of it."""
    variants = (PREDICTED, GORGO_MS, RESIDUAL, "round-robin")
    for share in (1.0, *LADDER):
        traffics = [scenario(name, requests=CHATS, rates_per_s=(rate * share,)) for name, rate in RATES.items()]
        for traffic in (*traffics, sharegpt(requests=CHATS, rate_per_s=SHAREGPT_RATE * share)):
            text, low, high = ("comparable", 1.0, 1.0) if "C" in traffic.name else ("better", 1.0, inf)
            published = Published(
                document="llm-d", place="figures of the scenarios", row=traffic.name, text=text, low=low, high=high,
                column="E2E per output token over the rate", baseline=LOAD_PREFIX,
            )  # fmt: skip
            group, fleet = "scenarios" if share == 1.0 else "qps", "8x1xH100" if traffic.name == SHAREGPT else FLEET
            found = routers(group, fleet, traffic, LOAD_PREFIX, variants, (PER_TOKEN, MEAN))
            if share == 1.0:
                printed = {(PREDICTED, PER_TOKEN): {"published": published}}
                found = found.with_targets({**printed, (RESIDUAL, PER_TOKEN): {"at_least": 1.0}})
            yield replace(found, family=f"qps-{traffic.name}", x=traffic.rate_per_s)


def _production() -> Iterator[VariantComparison]:
    """llm-d's table of four; its ratios are to 3:2:2 for E2E and TPOT."""
    published = {
        (PREDICTED, figure): Published.of("llm-d", _TABLE, "weights 3:2:2 over predicted latency", figure, text,
                                          f"{theirs} over {own}")
        for figure, (text, theirs, own) in PRODUCTION.items()
    }  # fmt: skip
    claimed = {(RESIDUAL, figure): {"at_least": float(text)} for figure, (text, _, _) in PRODUCTION.items()}
    routed = (PREDICTED, GORGO_MS, RESIDUAL, LOAD_PREFIX, "round-robin", "oracle")
    bounded = tuple(f"{one}, bounded index" for one in (PREDICTED, TUNED_PREFIX))
    for group, name, shape, variants in (
        ("production", "production", _PRODUCTION, routed),
        ("production", "production of long turns", LONG_TURNS, routed),
        ("production-cached", "production of cached turns", CACHED_TURNS, (*routed, *bounded)),
    ):
        traffic = production(name, shape)
        found = routers(group, "13x8xH200", traffic, TUNED_PREFIX, variants, tuple(PRODUCTION), published)
        yield found.with_targets(claimed)


GROUPS = tuple(dict.fromkeys(one.group for one in comparisons()))
_LADDER = Pictured(
    "lines", {"mean E2E per output token, ms": PER_TOKEN, "output tokens/s": "output tokens/s"}, x_label="requests/s"
)
PICTURES = {
    "gates": Pictured("bars", {f"{MEAN}, ms": MEAN, f"{P99}, ms": P99}),
    "accuracy": Pictured("times", {"predicted TTFT, ms": "predicted_ttft_ms", "measured TTFT, ms": "modelled_ttft_ms"}),
    "scenarios": _LADDER,
    "qps": _LADDER,
}


def report(groups: Sequence[str], grid: Grid, runner: Runner) -> SystemReport:
    return variant_report(comparisons(), groups, grid, runner, PICTURES)


def claims(grid: Grid) -> list[Claim]:
    """Return the published figures; those of errors of predicted first tokens stand beside the published 5 %."""
    found, seeds = comparisons(), grid.seeds
    errors = [
        Claim(
            system=TITLE, on=one.title, figure=f"mean error of predicted {column}, %", is_ratio=False,
            published=Published.of("llm-d", "text on accuracy", "all scenarios", f"MAPE of {column}", "5"),
            tasks=[one.task(variant, seed) for seed in seeds for variant in (PREDICTED, RESIDUAL)],
            reproduced=partial(one.mean, PREDICTED, f"{column.lower()}_mean", seeds, 100),
            ours=partial(one.mean, RESIDUAL, f"{column.lower()}_mean", seeds, 100), ours_name=RESIDUAL,
            note="the post says about 5 %, and not on which requests",
        )
        for one in (each.scaled(grid.scale) for each in found if each.group in ("accuracy", "production"))
        for column in ("TTFT", "TPOT")
    ]  # fmt: skip
    service = Claim(
        system=TITLE, on="1 to 1,000 requests a second, 100 pods", figure="prediction service, mean, ms",
        published=Published.of("llm-d", "text on the prediction service", "1-1000 QPS x 100 pods", "mean", "13-16"),
        is_ratio=False, note="the trees are in the router's process: there is no call to a service",
    )  # fmt: skip
    return [*claims_of(TITLE, found, grid, ("scenarios", "production")), *errors, service]
