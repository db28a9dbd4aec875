"""Ranvier: routes learned at every message boundary, on conversations of three kinds and behind one system prompt."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from experiments.comparison import ComparisonTarget, VariantComparison
from experiments.fleets import LLAMA_13B, ExperimentFleet
from experiments.pictures import Pictured
from experiments.published import Claim, Published
from experiments.reports import Grid, SystemReport, cached, claims_of, variant_report
from experiments.runner import Runner
from experiments.traffic import ContextTraffic, ConversationKind, ConversationTraffic

NAME, TITLE = "ranvier", "Ranvier"
ROUND_ROBIN, WHOLE, SINGLE, MULTI, OFF, ON, OURS = (
    "round-robin", "multi-depth, whole prompt", "multi-depth, single", "multi-depth", "override off", "override on",
    "gorgo-ms, events",
)  # fmt: skip
_A100 = ExperimentFleet(name="8xA100", profile=LLAMA_13B.name, replicas=8, vllm=True)
#: Conversations that begin, 1/s.
RATES: dict[ConversationKind, float] = {"branching": 0.4, "continued": 1.5, "resumed": 1.5}
#: Published over round robin, as what is left of it: TTFT -33 to -44 %, P99 -60 to -85 %.
AGAINST_ROUND_ROBIN = {"mean TTFT": ("0.56-0.67", "TTFT, -33 to -44 %"), "p99 TTFT": ("0.15-0.40", "P99, -60 to -85 %")}


def _published(row: str, column: str, text: str) -> Published:
    return Published.of("ranvier", "results, 8xA100, 13B", row, column, text, ROUND_ROBIN)


def comparisons() -> list[VariantComparison]:
    """Return routes by depth mode, on conversations of three kinds; and most traffic behind one system prompt."""
    by_mode = [
        ComparisonTarget(of=label, against=ROUND_ROBIN, figure=figure,
                         published=_published("multi-depth", column, text) if label == MULTI else None)
        for label in (WHOLE, SINGLE, MULTI, OURS)
        for figure, (text, column) in AGAINST_ROUND_ROBIN.items()
    ]  # fmt: skip
    # The override trades hits for the tail.
    override = [
        ComparisonTarget(of=ON, against=OFF, figure=figure, published=_published("load override", column, text))
        for figure, text, column in (("p99 TTFT", "0.55", "P99, -45 %"), ("hit", "0.94", "hits, about -5 points"))
    ]
    one_prompt = ContextTraffic(
        name="80 % behind one system prompt", contexts=40, context_tokens=2000, first_share=0.8, question_tokens=300,
        requests=2400, rate_per_s=5.0, block_tokens=16,
    )  # fmt: skip
    modes = (ROUND_ROBIN, WHOLE, SINGLE, MULTI, "longest prefix, exact caches", OURS)
    return [
        *(cached("depths", _A100, ConversationTraffic(kind=kind, requests=2400, starts_per_s=rate_per_s), modes,
                 targets=by_mode, x=kind) for kind, rate_per_s in RATES.items()),
        cached("override", _A100, one_prompt, (ROUND_ROBIN, OFF, ON, OURS), targets=override),
    ]  # fmt: skip


GROUPS = tuple(dict.fromkeys(one.group for one in comparisons()))
PICTURES = {"depths": Pictured("bars", {"mean TTFT, ms": "mean TTFT", "hit": "hit"})}


def report(groups: Sequence[str], grid: Grid, runner: Runner) -> SystemReport:
    return variant_report(comparisons(), groups, grid, runner, PICTURES)


def claims(grid: Grid) -> list[Claim]:
    worse = Claim(
        system=TITLE, on="one run of the post", figure="p99 TTFT, affinity without override / round-robin",
        published=_published("affinity, overloaded", "P99, +84.6 %", "1.846"),
        note="the post does not say on which traffic; override off behind one prompt is the nearest",
    )  # fmt: skip
    one = next(each for each in comparisons() if each.x == "continued").scaled(grid.scale)
    hits = [
        Claim(system=TITLE, on=one.title, figure=f"hits, %, {label}", is_ratio=False,
              published=_published(label, "hit rate, %", text), tasks=[one.task(label, seed) for seed in grid.seeds],
              reproduced=partial(one.mean, label, "hit", grid.seeds, 100))
        for label, text in ((ROUND_ROBIN, "12"), (MULTI, "58-98"))
    ]  # fmt: skip
    return [*claims_of(TITLE, comparisons(), grid, GROUPS), worse, *hits]
