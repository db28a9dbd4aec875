"""Lodestar: a network trained on the router's own traffic, on its fleets and kinds of traffic.

Its synthetic traces share 10 to 80 % of each prompt and mix 1k to 8k tokens; its real ones are Mooncake's. Loads are
those of the simulated fleets: medium load, and shortly before queues grow without end. The paper's rates are of engines
with other costs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from experiments.comparison import VariantComparison
from experiments.pictures import Pictured
from experiments.published import Claim, Published
from experiments.reports import GORGO_MS, MEAN, P99, RESIDUAL, Grid, SystemReport, claims_of, routers, variant_report
from experiments.runner import Runner
from experiments.traffic import Phase, PhasedTraffic, ReuseTraffic, one_phase
from experiments.variants import QUEUEING, SHADOWS, TAUS
from gorgo.lab.datasets import GroupsShape, SharingShape, read_shape, shapes
from gorgo.lab.datasets.prefix_shapes import Quantiles

NAME, TITLE = "lodestar", "Lodestar"
HEURISTIC, LODESTAR, BENCHMARK = "prefix-cache-and-load", "lodestar", "lodestar, as in its benchmark"
#: Requests of a run: a model is there before the measured half of them. Of a long run: half of Lodestar's shift.
REQUESTS, LONG = 3000, 10_000
#: Rate of Mooncake's conversation trace on 8 A30, 1/s: at three times that first tokens take minutes.
CONVERSATIONS = 1.0
#: The fleets of its evaluation, and the load of each kind of traffic in multiples of the first one's.
EQUAL, WITHOUT_CACHE, TWO_KINDS = "8xA30", "7xA30-8xV100", "7xL20-8xA30"
SCALES = {EQUAL: 1.0, WITHOUT_CACHE: 1.6, TWO_KINDS: 1.9}
BOTH = (MEAN, P99)
#: What this project's policy has to exceed: the summary's mean and p99.
SUMMARY = {MEAN: 1.41, P99: 1.47}
#: Prompt lengths of synthetic traffic: 1k to 8k tokens, evenly. Shares of a mixed workload.
LENGTHS: Quantiles = ((0.0, 1000.0), (1.0, 8000.0))
MIXED = (0.1, 0.3, 0.5, 0.7)
_SHIFT_RATES = (3.0, 6.5)
#: What its bars have beside the heuristic: Mooncake, its Algorithm 2 and the fewest requests in flight.
BARS = ("mooncake, bounded index", "tau 0.5", "least-request")
#: Row, mean and p99 of its evaluation: of equal GPUs, and of all mixed ones.
EVALUATION = {
    EQUAL: ("8xA30, Llama3-8B", "1.02-2.15", "1.07-1.86"),
    **dict.fromkeys((WITHOUT_CACHE, TWO_KINDS), ("A30 and V100, mixed", "1.25-4.38", "1.32-4.42")),
}
#: Its guards and those of this project's residual.
GUARDS = (
    *(f"lodestar, {guard}" for guard in ("model from 200 samples", "no range check", "no exploration", "no K-filter",
                                         "near best 0.1")),
    "gorgo-residual, no range check", "gorgo-residual, no limit",
)  # fmt: skip
#: Rates of its mixed GPUs, 1/s.
MIXED_RATES = (14.0, 22.0)


# -- traffic


def sharing_shape(share: float, lengths: Quantiles = LENGTHS) -> SharingShape:
    """Return prompts of which `share` is a prefix that ten requests use, forty others apart."""
    return SharingShape(
        seed=0, requests=1, rate_per_s=1.0, input_quantiles=lengths, shared_share=share, new_share=0.1,
        reuse_distance=40, shift_at=0, output_median=90, output_sigma=0.6, output_max=512, block_tokens=64,
    )  # fmt: skip


def sharing(
    share: float, *, requests: int = REQUESTS, rate_per_s: float, output_tokens: int | None = None
) -> PhasedTraffic:
    name, shape = f"{share:.0%} shared" + (", prefill only" if output_tokens == 1 else ""), sharing_shape(share)
    return one_phase(name, shape, requests=requests, rates_per_s=(rate_per_s,), output_tokens=output_tokens)


def mixed(*, requests: int = REQUESTS, rate_per_s: float) -> PhasedTraffic:
    return one_phase("mixed", *map(sharing_shape, MIXED), requests=requests, rates_per_s=(rate_per_s,))


def shipped(name: str, *, rate_per_s: float) -> PhasedTraffic:
    """Return a shipped shape of Mooncake's kind at another rate."""
    shape = read_shape(shapes()[name])
    assert isinstance(shape, SharingShape | GroupsShape)
    title, block_tokens = name.removesuffix("-like"), shape.block_tokens
    return one_phase(title, shape, requests=REQUESTS, rates_per_s=(rate_per_s,), block_tokens=block_tokens)


def _fixed_length(tokens: int, rate_per_s: float) -> PhasedTraffic:
    shape = sharing_shape(0.8, ((0.0, float(tokens)), (1.0, float(tokens))))
    return one_phase(f"{tokens / 1000:g}k tokens, 80% shared", shape, requests=REQUESTS, rates_per_s=(rate_per_s,))


def conversations(file: str, rate_per_s: float) -> PhasedTraffic:
    return one_phase("conversation", file, requests=REQUESTS, rates_per_s=(rate_per_s,))


def shift(name: str, parts: Sequence[SharingShape], rates: Sequence[float], *, requests: int) -> PhasedTraffic:
    """Return traffic that changes at half of its requests."""
    phases = (
        Phase(streams=(part,), requests=requests // 2, rates_per_s=(rate,))
        for part, rate in zip(parts, rates, strict=True)
    )
    return PhasedTraffic(name=name, phases=tuple(phases))


def more_sharing() -> PhasedTraffic:
    """Return 5 % of sharing, then 50 % at another rate."""
    parts = [sharing_shape(0.05), sharing_shape(0.5)]
    return shift("5 to 50 % shared", parts, _SHIFT_RATES, requests=2 * REQUESTS)


def published_shape() -> ReuseTraffic:
    """Return its synthetic traffic as published: 1k to 10k tokens, answers of N(100, 10), even distances of reuse."""
    return ReuseTraffic(
        name="1k to 10k tokens, 5/s", requests=REQUESTS, rate_per_s=5.0, lengths=(1_000, 10_000), output_mean=100.0,
        output_deviation=10.0,
    )  # fmt: skip


def longer_prompts() -> PhasedTraffic:
    parts = [sharing_shape(0.5, ((0.0, tokens), (1.0, tokens))) for tokens in (1000.0, 8000.0)]
    return shift("1k to 8k tokens", parts, (14.0, 3.0), requests=2 * REQUESTS)


def _traffic(fleet: str, conversation: str | None) -> Iterator[PhasedTraffic]:
    """Yield the traffic of a fleet, the most telling first."""
    scale = SCALES[fleet]
    yield sharing(0.5, rate_per_s=6 * scale)
    yield sharing(0.5, rate_per_s=4 * scale)
    yield shipped("toolagent-like", rate_per_s=3 * scale)
    yield sharing(0.5, rate_per_s=10 * scale, output_tokens=1)
    yield sharing(0.1, rate_per_s=5 * scale)
    yield sharing(0.3, rate_per_s=5.5 * scale)
    yield sharing(0.7, rate_per_s=7 * scale)
    yield mixed(rate_per_s=6 * scale)
    yield shipped("synthetic-like", rate_per_s=2.5 * scale)
    if conversation is not None:
        yield conversations(conversation, CONVERSATIONS * scale)


# -- comparisons


def comparisons(conversation: str | None = None) -> list[VariantComparison]:
    """Return every comparison; `conversation` is the file of Mooncake's conversation trace."""
    shadows = [f"random, shadow {name}" for name in SHADOWS]
    tau = [shipped("toolagent-like", rate_per_s=3.0)]
    tau += [] if conversation is None else [conversations(conversation, CONVERSATIONS)]
    taus = (*(f"tau {tau:g}" for tau in TAUS if tau != 0.5), GORGO_MS)
    return [
        *_fleets(conversation),
        # More models in a run, with the guards and as in its published benchmark, which is of prefills alone.
        *(_against_heuristic("lodestar-long", EQUAL, sharing(0.5, requests=LONG, rate_per_s=rate, output_tokens=tokens),
                             (LODESTAR, BENCHMARK)) for rate, tokens in ((6.0, None), (10.0, 1))),
        # One heuristic wins on long prompts and loses on short ones at twice the rate.
        routers("motivation", "7xL20", _fixed_length(4000, 5.0), "least-request", (HEURISTIC, GORGO_MS), BOTH),
        routers("motivation", "7xL20", _fixed_length(1000, 10.0), "least-request", (HEURISTIC, GORGO_MS), BOTH,
                _published("figure 1", "RPS 10, 1k prompts", ("0.41", "1409 ms over 3468 ms"),
                           ("0.67", "6000 ms over 9000 ms"), of=HEURISTIC)),
        *(routers("tau", EQUAL, traffic, "tau 0.5", taus, (MEAN,), also=(LODESTAR,)) for traffic in tau),
        routers("shift", EQUAL, more_sharing(), "lodestar, frozen",
                (LODESTAR, "lodestar, offline", RESIDUAL, HEURISTIC), BOTH),
        # Buffers of the training.
        *(routers("pools", EQUAL, more_sharing(), f"lodestar, {row}",
                  (LODESTAR, "lodestar, random replay", "lodestar, linear"), BOTH,
                  _published("ablation of the replay", row, (mean, row), (p99, row)))
          for row, mean, p99 in (("new data only", "2.39", "2.50"), ("all data", "1.21", "1.11"))),
        # At the most that is served without a queue that grows: there KV pools are full, as published.
        routers("k-filter", EQUAL, shipped("toolagent-like", rate_per_s=3.3), "lodestar, no K-filter",
                (LODESTAR, RESIDUAL), BOTH,
                _published("ablation of the K-filter", "ToolAgent, 12 RPS", ("1.72", "3209 ms over 1865 ms"),
                           ("1.78", "18686 ms over 10528 ms"))),
        # Prompts grow: what learns is at most a tenth behind the heuristic; each guard left out.
        routers("guards", EQUAL, longer_prompts(), HEURISTIC, (LODESTAR, RESIDUAL, *GUARDS), (P99, MEAN))
        .with_targets({(RESIDUAL, P99): {"at_least": 1 / 1.10}, (LODESTAR, P99): {"note": ">= 0.91"}}),
        # Order of replicas: Spearman's rho of each shadow under `random`, in the table of means.
        *(routers("shadows", fleet, sharing(0.5, rate_per_s=rate), shadows[0], shadows[1:])
          for fleet, rate in ((EQUAL, 3.0), (TWO_KINDS, 6.0))),
        # Fresh and stale reports of engines over a long path.
        *(routers("scrapes", "vllm", sharing(0.5, rate_per_s=8.0), GORGO_MS,
                  (LODESTAR, RESIDUAL, "load-prefix 1:1:1"), BOTH, scrape_s=interval_s)
          for interval_s in (0.1, 1.0, 30.0)),
        routers("lodestar-shape", EQUAL, published_shape(), HEURISTIC,
                (LODESTAR, GORGO_MS, RESIDUAL, *BARS), BOTH),
        # Its rates on mixed GPUs, from a light load here to one at which queues grow.
        *(routers("lodestar-rates", TWO_KINDS, sharing(0.5, rate_per_s=rate), HEURISTIC, (LODESTAR, RESIDUAL), BOTH)
          for rate in MIXED_RATES),
        # Its circular dependency: a model learns from decisions of the policy before it, and then changes them.
        routers("circular", EQUAL, sharing(0.5, rate_per_s=6.0),
                "prefix-cache-and-load, shadow lodestar's first model",
                ("lodestar, first model alone", BENCHMARK), BOTH),
    ]  # fmt: skip


def _published(
    place: str, row: str, *printed: tuple[str, str], column_end: str = "", of: str = LODESTAR
) -> dict[tuple[str, str], Published]:
    """Return what was printed of a variant: mean and p99 TTFT, each with its baseline."""
    return {
        (of, figure): Published.of("lodestar", place, row, f"{figure}{column_end}", text, baseline)
        for figure, (text, baseline) in zip(BOTH, printed, strict=True)
    }


def _against_heuristic(
    group: str, fleet: str, traffic: PhasedTraffic, variants: Sequence[str], also: Sequence[str] = ()
) -> VariantComparison:
    """Return variants against the heuristic: mean and p99 of each, beside what was published of the fleet."""
    row, *texts = EVALUATION[fleet]
    published = _published("evaluation", row, *((text, HEURISTIC) for text in texts), column_end=f", over {HEURISTIC}")
    found = routers(group, fleet, traffic, HEURISTIC, variants, BOTH, published, also=also)
    return found.with_targets({(RESIDUAL, figure): {"at_least": value} for figure, value in SUMMARY.items()})


def _fleets(conversation: str | None) -> Iterator[VariantComparison]:
    for fleet in SCALES:
        first, *others = _traffic(fleet, conversation)
        variants = (LODESTAR, GORGO_MS, RESIDUAL, RESIDUAL + QUEUEING, *BARS)
        yield _against_heuristic("lodestar", fleet, first, variants, also=("oracle",))
        for traffic in others:
            if traffic.output_tokens == 1:
                yield _against_heuristic("lodestar-prefill", fleet, traffic, (LODESTAR, RESIDUAL))
            else:
                yield _against_heuristic("lodestar-more", fleet, traffic, (LODESTAR, GORGO_MS, RESIDUAL))


GROUPS = tuple(dict.fromkeys(one.group for one in comparisons()))
_BARS = ("lodestar", "lodestar-more", "lodestar-long", "motivation", "pools", "guards")
_TIMELINES = {"error of predicted TTFT, %": "error_ratio", "mean TTFT, ms": "ttft_ms_mean",
              "hit of the chosen replica, %": "hit", "hit of the replica with most, %": "best_hit"}  # fmt: skip
PICTURES: dict[str, Pictured] = {
    **dict.fromkeys(_BARS, Pictured("bars", {f"{MEAN}, ms": MEAN, f"{P99}, ms": P99})),
    "shift": Pictured("times", _TIMELINES),
    "k-filter": Pictured("times", {f"{MEAN}, ms": "ttft_ms_mean"}),
}


def report(groups: Sequence[str], grid: Grid, runner: Runner) -> SystemReport:
    return variant_report(comparisons(grid.trace), groups, grid, runner, PICTURES)


def claims(grid: Grid) -> list[Claim]:
    compared = ("lodestar", "lodestar-long", "motivation", "pools", "k-filter")
    summary = [
        Claim(system=TITLE, on="all", figure=f"{figure}, {HEURISTIC} / {LODESTAR}",
              published=Published.of("lodestar", "summary", "overall", figure, f"{value:g}", HEURISTIC),
              note="the paper's mean over all of its runs; the fleets are compared one by one")
        for figure, value in SUMMARY.items()
    ]  # fmt: skip
    overhead = [
        Claim(system=TITLE, on="10 to 80 requests a second", figure=f"decision overhead, {column}, ms", is_ratio=False,
              published=Published.of("lodestar", "overhead", "10-80 RPS", column, text), note=note)
        for column, text, note in (
            ("mean", "3", "a network in process has no call to a service to measure"), ("tail", "4.5", "as above"),
        )
    ]  # fmt: skip
    return [*claims_of(TITLE, comparisons(grid.trace), grid, compared), *summary, *overhead]
