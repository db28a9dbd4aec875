"""`gorgo plan`: the demand, the bounds, the search, and the questions about the fleet that is chosen."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from gorgo.cli.app import app
from gorgo.config.load import load_config
from gorgo.errors import ConfigError, TraceError
from gorgo.lab.plan import PlanOptions, PlanSettings, make_plan, read_settings, write_plan
from gorgo.lab.plan.demand import Demand, LowerBounds, read_demand
from gorgo.lab.plan.plan import HEADROOM_MAX, World, fleet_of, meets, regions_text
from gorgo.lab.plan.search import Counts, Measured, fleets_by_price, search
from gorgo.lab.plan.settings import Accelerator, ClientGroup, Kind, Objective
from gorgo.lab.sim.engine.profiles import find_profile
from gorgo.lab.sim.fleet import fleet_of as fleet_of_config
from gorgo.lab.sim.records import SimRecord
from gorgo.lab.traces import TraceFilters

PROFILE = "2xL40S-Qwen3.5-35B-A3B-FP8-fitted"
FILTERS = TraceFilters()


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A file with a minute of 40 sessions of two turns."""
    rng = random.Random(5)
    rows = []
    for session in range(40):
        blocks, at_ms = rng.randint(1, 5), rng.randint(0, 50_000)
        ids = [session * 100 + place for place in range(blocks + 2)]
        for turn in (0, 1):
            count = blocks + 2 * turn
            row = {"input_length": 512 * count + 37, "output_length": rng.randint(20, 120), "hash_ids": ids[:count]}
            rows.append({"timestamp": at_ms + turn * 8000, **row})
    path = tmp_path_factory.mktemp("plan") / "minute.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in sorted(rows, key=lambda row: int(str(row["timestamp"])))))
    return str(path)


def kind(region: str = "us", *, price: float = 4.0, quota: int = 2, rtt_s: float = 0.002) -> Kind:
    return Kind(
        region=region,
        accelerator="l40s",
        profile=find_profile(PROFILE),
        profile_name=PROFILE,
        price_per_hour=price,
        quota=quota,
        rtt_s=rtt_s,
    )


def settings(*, quota: int = 2, ttft_ms: float = 2500.0, clients: Sequence[ClientGroup] = ()) -> PlanSettings:
    return PlanSettings(
        router="us",
        rtt_ms={"us": 2.0, "eu": 90.0},
        accelerators={
            "l40s": Accelerator(
                profile=PROFILE, price_per_hour={"us": 4.0, "eu": 3.5}, quota={"us": quota, "eu": quota}
            )
        },
        objective=Objective(ttft_ms=ttft_ms),
        clients=clients or (ClientGroup(region="us", rtt_ms=2.0), ClientGroup(region="eu", rtt_ms=90.0, shift_h=0.02)),
        egress_per_gb={"us": 0.1, "eu": 0.1},
    )


def quiet(_: str) -> None:
    """Show no progress."""


def no_bound(_: Counts) -> bool:
    return False


def options(trace: str, **more: Any) -> PlanOptions:
    own = {"trace": trace, "settings": settings(), "filters": FILTERS, "seeds": 1, "fleets": 1, "n_jobs": 1}
    return PlanOptions(**{**own, **more})


# -- the search
def test_fleets_come_once_each_in_the_order_of_their_price() -> None:
    kinds = [kind("a", price=1.0, quota=3), kind("b", price=2.5, quota=2), kind("c", price=0.0, quota=1)]
    found = list(fleets_by_price(kinds))
    assert [price for price, _ in found] == sorted(price for price, _ in found)
    everything = set(product(range(4), range(3), range(2))) - {(0, 0, 0)}
    assert {counts for _, counts in found} == everything
    assert len(found) == len(everything)


class Attained:
    """A made-up attainment that grows with a fleet, and what was asked for."""

    def __init__(self, kinds: Sequence[Kind], rates: Sequence[float], needed: float, egress: Sequence[float]) -> None:
        self._kinds, self._rates, self._needed, self._egress = kinds, rates, needed, egress
        self.asked: list[Counts] = []

    def of(self, counts: Counts) -> Measured:
        rate = sum(rate * count for rate, count in zip(self._rates, counts, strict=True))
        return Measured(
            counts=counts,
            price=sum(one.price_per_hour * count for one, count in zip(self._kinds, counts, strict=True)),
            egress=sum(one * count for one, count in zip(self._egress, counts, strict=True)),
            attained=(min(1.0, 0.95 * rate / self._needed),),
            objective=(0.95,),
        )

    def __call__(self, fleets: Sequence[Counts]) -> Iterable[Measured]:
        self.asked += fleets
        return [self.of(counts) for counts in fleets]


@pytest.mark.parametrize("seed", range(40))
def test_search_finds_the_cheapest_fleets_of_an_exhaustive_one(seed: int) -> None:
    rng = random.Random(seed)
    kinds = [kind(name, price=rng.choice((1.0, 2.0, 3.5, 5.0)), quota=rng.randint(1, 4)) for name in "abc"]
    rates = [rng.uniform(0.5, 3.0) for _ in kinds]
    world = Attained(kinds, rates, needed=rng.uniform(2.0, 20.0), egress=[rng.uniform(0, 0.4) for _ in kinds])
    found = search(kinds, world, excludes=no_bound, wanted=3, at_once=rng.choice((1, 2, 5)))

    every = [world.of(counts) for _, counts in fleets_by_price(kinds)]
    best = sorted((one for one in every if one.serves), key=lambda one: (one.cost, sum(one.counts), one.counts))[:3]
    assert list(found.serving) == best
    assert found.is_complete
    assert len(world.asked) == len(set(world.asked)), "no fleet is simulated twice"


def test_search_simulates_few_of_the_fleets_that_fail() -> None:
    kinds = [kind(name, price=price, quota=6) for name, price in (("a", 1.0), ("b", 1.1), ("c", 1.3))]
    world = Attained(kinds, (1.0, 1.0, 1.0), needed=11.5, egress=(0.0, 0.0, 0.0))
    found = search(kinds, world, excludes=no_bound)
    cheaper = sum(1 for price, _ in fleets_by_price(kinds) if price < found.serving[0].cost)
    assert cheaper > 200
    assert len(world.asked) < cheaper / 3


def test_search_says_that_it_ended_at_its_bound() -> None:
    kinds = [kind("a", quota=4), kind("b", quota=4)]
    world = Attained(kinds, (1.0, 1.0), needed=7.9, egress=(0.0, 0.0))
    found = search(kinds, world, excludes=no_bound, most=1)
    assert not found.is_complete
    assert len(world.asked) <= 1


# -- the demand
def test_day_of_a_region_is_turned_round_by_its_shift(trace: str) -> None:
    still = read_demand(trace, settings().groups[:1], FILTERS)
    moved = read_demand(trace, [replace(settings().groups[0], shift_h=still.span_s / 3600 / 4)], FILTERS)
    before = sorted((one.arrival_s + still.span_s / 4) % still.span_s for one in still.feed)
    assert [one.arrival_s for one in moved.feed] == pytest.approx(before)
    assert [one.index for one in moved.feed] == list(range(len(still.feed)))


def test_regions_share_no_prefix_and_keep_their_own(trace: str) -> None:
    both = read_demand(trace, settings().groups, FILTERS)
    mine, yours = (
        [one.blocks for one, origin in zip(both.feed, both.origins, strict=True) if origin == place] for place in (0, 1)
    )
    first = {blocks[:8] for blocks in mine if blocks}
    other = {blocks[:8] for blocks in yours if blocks}
    assert first
    assert not first & other
    assert len(first) == len(other)
    assert [one.index for one in both.of(1).feed] == list(range(len(yours)))


def test_growth_is_a_load(trace: str) -> None:
    one, twice = (read_demand(trace, settings().groups, FILTERS, growth=growth) for growth in (1.0, 2.0))
    assert twice.feed[-1].arrival_s == pytest.approx(one.feed[-1].arrival_s / 2)
    assert twice.span_s == pytest.approx(one.span_s / 2)


def test_traces_of_unlike_blocks_are_refused(trace: str) -> None:
    groups = [replace(settings().groups[0], trace="short-chat"), settings().groups[1]]
    with pytest.raises(TraceError, match="expected traces with blocks of one size"):
        read_demand(trace, groups, TraceFilters(limit=5))


# -- the bounds and the simulation
def simulated(wanted: PlanOptions, demand: Demand, kinds: Sequence[Kind], counts: Counts) -> Measured:
    (measured,) = World(wanted, demand, tuple(kinds), quiet).measured([counts])
    return measured


@pytest.mark.parametrize(("ttft_ms", "growth"), [(450.0, 4.0), (700.0, 8.0), (1200.0, 12.0)])
def test_search_finds_what_simulating_every_fleet_finds(trace: str, ttft_ms: float, growth: float) -> None:
    wanted = options(trace, settings=settings(ttft_ms=ttft_ms), growth=growth)
    plan = make_plan(wanted, advance=quiet)
    fleets = [counts for _, counts in fleets_by_price(plan.kinds)]
    every = [simulated(wanted, plan.demand, plan.kinds, counts) for counts in fleets]
    serving = sorted((one for one in every if one.serves), key=lambda one: one.cost)
    assert 0 < len(serving) < len(every)
    bounds = LowerBounds(plan.demand, plan.kinds)
    assert not any(bounds.excludes(one.counts) for one in serving)
    assert plan.chosen is not None
    assert plan.chosen.counts == serving[0].counts


@pytest.mark.parametrize("ttft_ms", [600.0, 1200.0, 2500.0])
@pytest.mark.parametrize("growth", [0.5, 2.0, 4.0])
def test_bounds_are_below_every_fleet_that_serves(ttft_ms: float, growth: float, trace: str) -> None:
    own = settings(ttft_ms=ttft_ms, quota=3)
    demand = read_demand(trace, own.groups, FILTERS, growth=growth)
    kinds = own.kinds()
    bounds = LowerBounds(demand, kinds)
    wanted = options(trace, settings=own)
    for counts in ((1, 0), (0, 1), (1, 1), (2, 1), (3, 3)):
        if simulated(wanted, demand, kinds, counts).serves:
            assert not bounds.excludes(counts)


def test_bounds_exclude_fleets_that_are_too_far_or_too_few(trace: str) -> None:
    near, far = kind("us", quota=2), kind("eu", quota=2, rtt_s=0.09)
    demand = read_demand(trace, settings(ttft_ms=150.0).groups[:1], FILTERS)
    assert LowerBounds(demand, [near, far]).excludes((0, 2))
    busy = read_demand(trace, settings(ttft_ms=2000.0).groups, FILTERS, growth=40.0)
    assert LowerBounds(busy, [near, far]).excludes((1, 0))
    assert not LowerBounds(busy, [kind("us", quota=64)]).excludes((64,))


# -- the questions about the chosen fleet
def test_plan_says_what_less_and_more_would_do(tmp_path: Path, trace: str) -> None:
    plan = make_plan(options(trace), advance=quiet)
    chosen = plan.chosen
    assert chosen is not None
    assert plan.headroom is not None
    assert 1.0 <= plan.headroom <= HEADROOM_MAX
    assert all(min(one.attained) >= 0.95 for one in plan.found.serving)
    assert [len(one) for one in plan.intervals] == [3, 3]
    assert {one.without for one in plan.losses} >= {
        f"one {plan.kinds[n].name}" for n, c in enumerate(chosen.counts) if c
    }
    for loss in plan.losses:
        assert loss.measured is None or loss.measured.cost < chosen.cost
    assert plan.static_peak is None or plan.static_peak > 0
    files = {path.name for path in write_plan(tmp_path, plan, settings())}
    assert files == {"plan.json", "demand.jsonl", "regions.yaml", "terraform.tfvars.json"}
    again = read_demand(str(tmp_path / "demand.jsonl"), [ClientGroup(region="us")], FILTERS)
    assert [(one.prompt_tokens, one.output_tokens, one.blocks) for one in again.feed] == [
        (one.prompt_tokens, one.output_tokens, one.blocks) for one in plan.demand.feed
    ]
    assert json.loads((tmp_path / "plan.json").read_text())["serving"][0]["serves"] is True


def test_regions_file_of_a_fleet_is_the_fleet_that_was_simulated(tmp_path: Path) -> None:
    own = settings()
    path = tmp_path / "regions.yaml"
    path.write_text(regions_text(own.kinds(), (1, 2), own))
    simulated = fleet_of(own.kinds(), (1, 2))
    read = fleet_of_config(load_config(path), source=path)
    assert [(one.name, one.region, one.profile, one.link) for one in read.replicas] == [
        (one.name, one.region, one.profile, one.link) for one in simulated.replicas
    ]


def test_client_s_round_trip_is_in_its_figures() -> None:
    record = SimRecord(id="0", scheduled_s=0.0, sent_s=0.0, input_tokens=1, output_tokens=11, ttft_ms=400.0, e2e_s=1.4)
    near, far = (ClientGroup(region="x", rtt_ms=rtt, objective=Objective(ttft_ms=450.0)) for rtt in (20.0, 90.0))
    assert meets(record, near)
    assert not meets(record, far)
    slow = replace(near, objective=Objective(tpot_ms=99.0))
    assert not meets(record, slow)
    assert meets(record, replace(near, objective=Objective(tpot_ms=101.0, e2e_s=1.5)))
    assert not meets(replace(record, error="status_500"), near)


# -- the file and the command
FILE = f"""
router: us
rtt_ms: {{us: 2, eu: 90}}
clients:
  - {{region: us}}
  - {{region: eu, rtt_ms: 90, shift_h: 0.02}}
accelerators:
  l40s: {{profile: {PROFILE}, price_per_hour: {{us: 4.0, eu: 3.5}}, quota: {{us: 2, eu: 1}}}}
objective: {{ttft_ms: 2500}}
"""


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda text: text.replace("ttft_ms: 2500", "share: 0.9"), "objective: no bound; expected ttft_ms"),
        (lambda text: text.replace("eu: 3.5}", "mars: 3.5}"), "mars: expected a region of rtt_ms"),
        (lambda text: text.replace("quota: {us: 2, eu: 1}", "quota: {us: 2}"), "eu: missing; expected the most"),
        (lambda text: text.replace("quota: {us: 2, eu: 1}", "quota: {us: 0, eu: 0}"), "every quota is 0"),
        (lambda text: text.replace("{region: us}", "{region: eu}"), "region eu twice"),
        (lambda text: text.replace("us: 4.0", "us: -1"), "price_per_hour"),
        (lambda text: text.replace("router: us\n", ""), "router"),
    ],
)
def test_wrong_file_is_refused_with_its_key(tmp_path: Path, change: Callable[[str], str], message: str) -> None:
    path = tmp_path / "plan.yaml"
    path.write_text(change(FILE))
    with pytest.raises(ConfigError, match=r"plan\.yaml") as raised:
        read_settings(path)
    assert message in str(raised.value)


def run(trace: str, tmp_path: Path, *arguments: str) -> Any:
    path = tmp_path / "plan.yaml"
    path.write_text(FILE)
    common = ["plan", trace, "--settings", str(path), "--jobs", "1", "--seeds", "1", "--fleets", "1"]
    return CliRunner().invoke(app, [*common, *arguments])


def test_command_prints_the_fleets_and_writes_the_chosen_one(tmp_path: Path, trace: str) -> None:
    result = run(trace, tmp_path, "--out", str(tmp_path / "out"), "--shift", "eu=0.01")
    assert result.exit_code == 0, result.output
    assert "With less:" in result.stdout
    assert "headroom" in result.stdout
    load_config(tmp_path / "out" / "regions.yaml")
    assert (tmp_path / "out" / "plan.json").exists()


def test_command_fails_where_no_fleet_serves(tmp_path: Path, trace: str) -> None:
    result = run(trace, tmp_path, "--growth", "60")
    assert result.exit_code == 1
    assert "No fleet within the quotas serves the demand" in result.stdout


@pytest.mark.parametrize("shift", ["mars=3", "eu", "eu=soon", "eu=nan"])
def test_wrong_shift_is_a_usage_error(tmp_path: Path, shift: str, trace: str) -> None:
    result = run(trace, tmp_path, "--shift", shift)
    assert result.exit_code == 2
    assert "--shift" in result.output
