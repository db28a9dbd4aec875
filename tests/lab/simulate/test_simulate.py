"""`gorgo simulate`: what is run, printed and stored, and the same for programs and notebooks."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import fields, replace
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from gorgo.cli import app
from gorgo.config.load import load_config
from gorgo.core.limits import OverloadLimits, RouterLimits
from gorgo.errors import ConfigError, MissingExtra, TraceError, UnknownPolicy
from gorgo.lab import simulate
from gorgo.lab.replay_client import ReplayRecord
from gorgo.lab.results import ResultRow, Spread
from gorgo.lab.sim.fleet import SimFleet, fleet_of, limits_of, with_queue_for_all
from gorgo.lab.sim.routers import RouterGroup
from gorgo.lab.simulate import SimJob, SimulateOptions, jobs_of, run_once, simulate_command
from gorgo.lab.simulate.compare import ratio_of_rows, ttft_ms_p95
from gorgo.lab.simulate.job import run_digest, setting_of
from gorgo.lab.simulate.simulate import show_rows
from gorgo.lab.traces import TraceFilters
from tests.lab.sim.fleets import three_regions
from tests.lab.test_results import row

REGIONS = Path(__file__).parents[3] / "regions.yaml"


def no_warning(text: str) -> None:
    raise AssertionError(text)


def asked(**options: Any) -> SimulateOptions:
    of_all: dict[str, Any] = {
        "trace": "chat-small",
        "policy": "",
        "fleet": three_regions(),
        "filters": TraceFilters(limit=40),
    }
    of_all |= {one.name: options.pop(one.name) for one in fields(SimJob) if one.name in set(options) - {"weights"}}
    defaults: dict[str, Any] = {"policies": ("gorgo-ms", "random"), "n_jobs": 1, "show_progress": False}
    return SimulateOptions(job=SimJob(**of_all), **{**defaults, **options})


def test_a_row_for_each_scale_policy_and_seed_with_the_baselines_behind() -> None:
    rows = simulate_command(asked(time_scales=(2.0, 1.0), seeds=(3, 4)), warn=no_warning)
    assert [(row.time_scale, row.policy, row.seed) for row in rows] == [
        (scale, policy, seed)
        for scale in (2.0, 1.0)
        for policy in ("gorgo-ms", "random", "oracle", "pinned", "floor")
        for seed in (3, 4)
    ]


def test_files_are_those_of_a_live_replay_one_folder_per_run(tmp_path: Path) -> None:
    rows = simulate_command(asked(out=tmp_path, time_scales=(1.5,)), warn=no_warning)
    assert json.loads((tmp_path / "results.json").read_text()) == [row.as_json() for row in rows]
    folder = tmp_path / "gorgo-ms" / "load-0.666667-seed-0"
    assert json.loads((folder / "results.json").read_text()) == [rows[0].as_json()]
    lines = [json.loads(line) for line in (folder / "requests.jsonl").read_text().splitlines()]
    assert len(lines) == 40
    assert (
        lines[0].keys() - {"estimated_cached_tokens"}
        == ReplayRecord(id="", scheduled_s=0, sent_s=0, input_tokens=1).as_json().keys()
    )
    assert lines[0]["predicted_ttft_ms"] is not None
    assert (tmp_path / "floor" / "load-0.666667-seed-0" / "requests.jsonl").exists()


def test_misspelt_policies_are_told_before_anything_runs(tmp_path: Path) -> None:
    with pytest.raises(UnknownPolicy):
        simulate_command(asked(policies=("gorgo-ms", "gorgo-mss"), out=tmp_path / "out"), warn=no_warning)
    assert not (tmp_path / "out").exists()


def test_every_option_reaches_every_job_and_baselines_have_no_shadow() -> None:
    limits = RouterLimits(max_attempts=2)
    options = asked(
        policies=("gorgo-ms", "oracle", "random"),
        weights={"random": {}, "gorgo-ms": {"lambda": 0.3}},
        time_scales=(2.0, 1.0, 2.0),
        seeds=(3, 4),
        scenario="bursts",
        limits=limits,
        probe_interval_s=7.0,
        scrape_interval_s=11.0,
        shadow="gorgo-ms",
        out=Path("somewhere"),
    )
    weights = {"gorgo-ms": {"lambda": 0.3}, "random": {}}
    shadows = {"gorgo-ms": "gorgo-ms", "random": "gorgo-ms"}
    assert jobs_of(options) == [
        SimJob(
            trace="chat-small",
            policy=policy,
            fleet=three_regions(),
            filters=TraceFilters(limit=40),
            time_scale=time_scale,
            weights=weights.get(policy),
            seed=seed,
            scenario="bursts",
            limits=limits,
            probe_interval_s=7.0,
            scrape_interval_s=11.0,
            shadow=shadows.get(policy),
            keep_requests=True,
        )
        for time_scale in (2.0, 1.0)
        for policy in ("gorgo-ms", "oracle", "random", "pinned", "floor")
        for seed in (3, 4)
    ]
    assert not any(job.keep_requests for job in jobs_of(asked()))


def test_the_router_is_told_of_the_fleet_what_serve_tells_it() -> None:
    config = load_config(REGIONS)
    fleet = fleet_of(config, source=REGIONS)
    assert [(replica.name, replica.link.rtt_s) for replica in fleet.replicas] == [
        ("us-ashburn-0", 0.002),
        ("eu-frankfurt-0", 0.095),
        ("ap-seoul-0", 0.180),
    ]
    assert fleet.replicas[0].spec.kv_capacity_tokens == 983_549
    assert fleet.replicas[0].spec.prefill_tokens_per_s is None
    assert limits_of(config).stale_after_s == 90.0
    assert limits_of(config).block_tokens == 512.0


def test_a_replica_s_own_profile_goes_before_that_of_all() -> None:
    config = load_config(REGIONS)
    fast = "1xH100-Qwen3.5-35B-A3B-FP8"
    simulation = replace(config.simulation, profiles={"ap-seoul-0": fast})
    fleet = fleet_of(replace(config, simulation=simulation), source=REGIONS)
    common = config.simulation.profile
    assert [replica.profile.name for replica in fleet.replicas] == [common, common, fast]


def test_a_region_without_a_round_trip_is_named(tmp_path: Path) -> None:
    text = REGIONS.read_text().replace("ap-seoul: 180", "ap-tokyo: 180")
    (tmp_path / "regions.yaml").write_text(
        text.replace("  - name: ap-seoul\n", "  - name: ap-seoul\n  - name: ap-tokyo\n")
    )
    config = load_config(tmp_path / "regions.yaml")
    with pytest.raises(ConfigError, match=r"simulation\.rtt_ms\.ap-seoul"):
        fleet_of(config, source=tmp_path / "regions.yaml")


# -- the command line

RUN = ["simulate", "chat-small", "--limit", "25", "--jobs", "1", "--config", str(REGIONS)]


def job(**changes: Any) -> SimJob:
    values: dict[str, Any] = {"trace": "chat-small", "policy": "gorgo", "fleet": three_regions()}
    return SimJob(**{**values, **changes})


def digests(one: SimJob, weights: Mapping[str, float] | None = None) -> tuple[str | None, str | None]:
    setting = setting_of(one)
    return setting, run_digest(one, setting, weights)


@pytest.mark.parametrize(
    "changes",
    [
        {"trace": "art-chat-apr5"},
        {"filters": TraceFilters(limit=40)},
        {"fleet": replace(three_regions(), name="another")},
        {"fleet": replace(three_regions(), replicas=three_regions().replicas[:2])},
        {"scenario": "slow-replica"},
        {"limits": RouterLimits()},
        {"limits": RouterLimits(overload=OverloadLimits(queue_enabled=False))},
        {"client_concurrency": 4},
        {"probe_interval_s": 7.0},
        {"slo_ttft_ms": 500.0},
        {"block_tokens": 16},
        {"routers": RouterGroup(count=2)},
        {"closed_loop": True},
        {"warm_s": 5.0},
        {"windows": 2},
    ],
)
def test_whatever_else_determines_a_run_gives_another_setting(changes: dict[str, Any]) -> None:
    assert setting_of(job(**changes)) != setting_of(job())
    assert setting_of(job(**changes)) == setting_of(job(**changes))


@pytest.mark.parametrize("queue", ["on", "off"])
def test_every_row_but_the_floor_has_the_queue_or_none_has(queue: str) -> None:
    words = ["chat-small", "--load", "4", "--limit", "80", "--policy", "gorgo-ms", "--policy", "gorgo", "--jobs", "1"]
    result = CliRunner().invoke(app, ["simulate", *words, "--queue", queue, "--config", str(REGIONS), "--json"])
    assert result.exit_code == 0, result.stderr
    found = {one["policy"]: one["queue"] for one in json.loads(result.stdout)}
    assert found.pop("floor") is None
    assert found == dict.fromkeys(("gorgo-ms", "gorgo", "oracle", "pinned"), queue == "on")


@pytest.mark.parametrize("policy", ["gorgo", "gorgo-ms", "oracle"])
def test_a_queue_under_every_policy_queues_under_each(policy: str) -> None:
    for enabled in (True, False):
        limits = with_queue_for_all(RouterLimits(block_tokens=512.0), enabled=enabled)
        run = run_once(job(policy=policy, filters=TraceFilters(limit=80), time_scale=0.25, limits=limits))
        assert run.goodput is not None
        assert (run.goodput.queued > 0.1, run.row.queue, run.row.errors) == (enabled, enabled, 0)


@pytest.mark.parametrize("changes", [{"policy": "random"}, {"seed": 1}, {"time_scale": 2.0}])
def test_policy_seed_and_scale_give_another_digest_in_the_same_setting(changes: dict[str, Any]) -> None:
    (setting, digest), (other_setting, other) = digests(job()), digests(job(**changes))
    assert setting == other_setting
    assert digest != other
    assert digests(job(), {"w": 1.0})[1] != digests(job(), {"w": 2.0})[1]


def test_a_trace_that_changes_under_its_name_has_another_digest(tmp_path: Path) -> None:
    trace = str(write_trace(tmp_path / "own.jsonl", [100, 200]))
    before = setting_of(job(trace=trace))
    write_trace(tmp_path / "own.jsonl", [100, 2000])
    assert setting_of(job(trace=trace)) not in (before, None)


def test_a_fleet_of_one_engine_has_the_digest_of_one_with_copies_of_it() -> None:
    first = three_regions().replicas[0]
    alike = [replace(first, spec=replace(first.spec, name=f"{number}")) for number in range(3)]
    copies = [deepcopy(each) for each in alike]
    assert setting_of(job(fleet=SimFleet(alike))) == setting_of(job(fleet=SimFleet(copies)))


def test_a_feed_in_memory_has_no_digest() -> None:
    assert digests(job(feed=())) == (None, None)


def test_equal_runs_have_equal_digests_and_rows() -> None:
    first, second = (simulate_command(asked(policies=("gorgo",)), warn=no_warning) for _ in range(2))
    assert first == second
    assert len({one.digest for one in first}) == len(first)
    assert len({one.setting for one in first}) == 1
    assert None not in {one.setting for one in first}


def test_rows_of_a_named_fleet_say_so() -> None:
    result = CliRunner().invoke(app, [*RUN, "--policy", "gorgo", "--fleet", "h100", "--scenario", "bursts", "--json"])
    assert result.exit_code == 0, result.stderr
    assert {row["trace"] for row in json.loads(result.stdout)} == {"chat-small.jsonl.gz (h100, bursts)"}
    unknown = CliRunner().invoke(app, [*RUN, "--fleet", "h1000"])
    assert (unknown.exit_code, "there are: paper, h100," in unknown.stderr) == (2, True)


def test_the_command_shows_the_columns_that_are_named() -> None:
    result = CliRunner().invoke(app, [*RUN, "--policy", "gorgo", "--column", "goodput", "--column", "tpot-mean"])
    assert result.exit_code == 0, result.stderr
    assert "TPOT" in result.stdout
    assert "E2E" not in result.stdout.partition("Engines and network")[0]
    unknown = CliRunner().invoke(app, [*RUN, "--column", "speed"])
    assert unknown.exit_code == 2
    assert "ttft-mean, ttft-p50," in " ".join(unknown.output.split())


def test_the_command_prints_rows_as_json() -> None:
    result = CliRunner().invoke(app, [*RUN, "--policy", "gorgo", "--policy", "random", "--seeds", "2", "--json"])
    assert result.exit_code == 0, result.stderr
    rows = json.loads(result.stdout)
    names = ("gorgo", "random", "oracle", "pinned", "floor")
    assert [row["policy"] for row in rows] == [name for name in names for _ in range(2)]
    assert rows[0]["weights"] == {"w_rtt": 0.5, "w_queue": 0.1}


def test_the_command_takes_weights_for_the_policy_that_they_name(tmp_path: Path) -> None:
    file = tmp_path / "weights.json"
    file.write_text('{"policy": "gorgo-ms", "weights": {"lambda": 0.5}}')
    result = CliRunner().invoke(app, [*RUN, "--policy", "gorgo-ms", "--weights", str(file), "--json"])
    assert result.exit_code == 0, result.stderr
    assert json.loads(result.stdout)[0]["weights"]["lambda"] == 0.5
    result = CliRunner().invoke(app, [*RUN, "--policy", "random", "--weights", str(file)])
    assert result.exit_code == 2
    assert "weights are for the policy 'gorgo-ms'" in result.stderr


def write_trace(path: Path, lengths: list[int], first_block: int | None = None) -> Path:
    """A request per second; each has blocks of its own behind the first."""
    with path.open("w") as file:
        for number, length in enumerate(lengths, start=1):
            own = range(1000 * number, 1000 * number + -(-length // 512) - 1)
            ids = [number if first_block is None else first_block, *own]
            row = {"timestamp": 1000 * number, "input_length": length, "output_length": 4, "hash_ids": ids}
            print(json.dumps(row), file=file)
    return path


def test_the_command_says_why_requests_failed_and_how_to_leave_them_out(tmp_path: Path) -> None:
    trace = str(write_trace(tmp_path / "long.jsonl", [1000] * 6 + [40_000, 50_000]))
    words = ["simulate", trace, "--jobs", "1", "--config", str(REGIONS), "--policy", "gorgo-ms", "--policy", "random"]
    result = CliRunner().invoke(app, [*words, "--out", str(tmp_path / "out")])
    assert result.exit_code == 0, "what fails in a simulation is a result"
    line = "2 of 8: prompt over the engine's 32,768 tokens; --max-input leaves them out"
    assert f"failed, gorgo-ms, random, oracle, pinned: {line}\n" in result.stdout
    rows = json.loads((tmp_path / "out/results.json").read_text())
    assert [row["failures"] for row in rows] == [{"prompt over the engine's 32,768 tokens": 2}] * 4 + [{}]
    result = CliRunner().invoke(app, [*words, "--max-input", "32000"])
    assert result.exit_code == 0
    assert "failed, " not in result.stdout


def write_rows(path: Path, stamps: list[float], *, ids: int = 2) -> str:
    with path.open("w", encoding="utf-8-sig") as file:
        for number, stamp in enumerate(stamps):
            hashes = list(range(number, number + ids))
            row = {"timestamp": stamp, "input_length": 600, "output_length": 4, "hash_ids": hashes}
            print(json.dumps(row), file=file)
    return str(path)


@pytest.mark.parametrize(
    ("stamps", "unit"),
    [
        ([number / 2 for number in range(8)], "look like seconds"),
        ([1_764_390_000_000_000 + 1_000_000 * number for number in range(8)], "look like microseconds"),
        ([500 * number for number in range(8)], None),
    ],
)
def test_time_stamps_in_another_unit_are_warned_of_once(tmp_path: Path, stamps: list[float], unit: str | None) -> None:
    trace = write_rows(tmp_path / "t.jsonl", stamps)
    words = ["--jobs", "1", "--config", str(REGIONS), "--policy", "random", "--policy", "round-robin"]
    for result in (
        CliRunner().invoke(app, ["simulate", trace, *words]),
        CliRunner().invoke(app, ["datasets", "describe", trace]),
    ):
        assert result.exit_code == 0, result.output
        assert result.stderr.count("expected milliseconds") == (unit is not None)
        assert unit is None or unit in result.stderr


def test_blocks_of_another_size_are_read_by_an_option(tmp_path: Path) -> None:
    trace = write_rows(tmp_path / "t.jsonl", [500 * number for number in range(8)], ids=38)
    words = ["simulate", trace, "--jobs", "1", "--config", str(REGIONS), "--policy", "gorgo-ms", "--json"]
    refused = CliRunner().invoke(app, words)
    assert refused.exit_code == 2
    assert "(one per 512 tokens), not 38; --block-tokens names another size" in refused.stderr
    result = CliRunner().invoke(app, [*words, "--block-tokens", "16"])
    assert result.exit_code == 0, result.output
    described = CliRunner().invoke(app, ["datasets", "describe", trace, "--block-tokens", "16", "--json"])
    assert json.loads(described.stdout)[0]["block_reuse"] == pytest.approx(1 - (38 + 7) / (8 * 38))


def test_a_policy_keyed_by_session_is_warned_of_a_trace_that_begins_alike(tmp_path: Path) -> None:
    alike = str(write_trace(tmp_path / "alike.jsonl", [1000] * 6, first_block=77))
    words = ["--jobs", "1", "--config", str(REGIONS), "--seeds", "2", "--json"]
    keyed = ["--policy", "simple-session-affinity", "--policy", "random"]
    result = CliRunner().invoke(app, ["simulate", alike, *words, *keyed])
    assert result.exit_code == 0, result.stderr
    share = "gorgo: simple-session-affinity: no request has a session id and 100% begin with the same tokens"
    assert result.stderr.count(share) == 1
    assert list(json.loads(result.stdout)[0]["share"].values()) == [1.0]
    assert "session id" not in CliRunner().invoke(app, ["simulate", alike, *words, "--policy", "random"]).stderr
    spread = str(write_trace(tmp_path / "spread.jsonl", [1000] * 6))
    assert "session id" not in CliRunner().invoke(app, ["simulate", spread, *words, *keyed]).stderr


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--policy", "best"], "best"),
        (["--scenario", "doom"], "doom"),
        (["--time-scale", "0"], "--time-scale"),
    ],
)
def test_what_is_misspelt_is_bad_usage(words: list[str], said: str) -> None:
    result = CliRunner().invoke(app, [*RUN, *words])
    assert result.exit_code == 2
    assert said in result.stderr


def test_routers_and_what_they_share_reach_every_job() -> None:
    group = RouterGroup(count=4, sharing="store")
    assert {each.routers for each in jobs_of(asked(routers=group))} == {group}


def test_the_command_runs_several_routers(tmp_path: Path) -> None:
    words = ["simulate", "chat-small", "--limit", "20", "--policy", "random", "--jobs", "1", "--config", str(REGIONS)]
    shared = CliRunner().invoke(app, [*words, "--routers", "2", "--sharing", "store", "--json"])
    assert shared.exit_code == 0, shared.output


def test_the_options_of_routers_are_those_of_their_group(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[RouterGroup] = []

    def simulated(options: SimulateOptions, **_: object) -> list[ResultRow]:
        seen.append(options.job.routers)
        return []

    monkeypatch.setattr("gorgo.lab.simulate.simulate_command", simulated)
    words = ["--routers", "3", "--split", "session", "--sharing", "store", "--peer-delay", "250", "--peer-loss", "0.1"]
    done = CliRunner().invoke(app, [*RUN, *words, "--json"])
    assert done.exit_code == 0, done.output
    assert seen == [RouterGroup(count=3, split="session", sharing="store", delay_s=0.25, loss=0.1)]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--sharing", "gossip"], "none, store, local, all"),
        (["--split", "hash"], "random, session, region"),
        (["--peer-loss", "1.5"], "--peer-loss"),
        (["--peer-delay", "-1"], "--peer-delay"),
        (["--split", "region", "--sharing", "all"], "is in one region"),
    ],
)
def test_a_wrong_option_of_routers_is_bad_usage(words: list[str], said: str) -> None:
    wrong = CliRunner().invoke(app, [*RUN, "--routers", "2", *words])
    assert wrong.exit_code == 2
    assert said in wrong.output


POLICIES = ("gorgo", "random", "oracle")


def one(policy: str, seed: int, p95_ms: float | None, *, time_scale: float = 1.0, trace: str = "t") -> ResultRow:
    ttft_ms = Spread() if p95_ms is None else Spread(1.0, p95_ms / 2, p95_ms, p95_ms)
    e2e_s = Spread() if p95_ms is None else Spread(1.0, 1.0, p95_ms / 50, 1.0)
    return row(policy, seed=seed, time_scale=time_scale, trace=trace, ttft_ms=ttft_ms, e2e_s=e2e_s)


def shown(*rows: ResultRow, styled: bool = False) -> str:
    out = StringIO()
    show_rows(rows, POLICIES, Console(file=out, width=120, force_terminal=styled))
    return out.getvalue()


def cells(text: str, policy: str) -> list[list[str]]:
    """Of every line that begins with the policy."""
    return [line.split() for line in text.splitlines() if line.startswith(f"{policy} ") and " / ... " not in line]


def test_each_load_has_a_block_with_means_over_its_seeds() -> None:
    text = shown(
        one("random", 0, 200.0),
        one("gorgo", 0, 100.0),
        one("gorgo", 1, 300.0),
        one("random", 1, 600.0),
        one("gorgo", 4, 80.0, time_scale=2.0),
        one("gorgo", 0, 60.0, trace="u"),
    )
    titles = [line for line in text.splitlines() if " at load " in line]
    assert titles == [
        "t at load 1: 300 requests, means of 2 seeds",
        "t at load 0.5: 300 requests, seed 4",
        "u at load 1: 300 requests, seed 0",
    ]
    # The queue, errors, then p50 and p95 of TTFT: means of 50 and 150, and of 100 and 300 ms.
    assert [line[2:5] for line in cells(text, "gorgo")] == [["0", "100", "200"], ["0", "40", "80"], ["0", "30", "60"]]
    assert [line[2:5] for line in cells(text, "random")][:1] == [["0", "200", "400"]]
    assert text.index("\ngorgo ") < text.index("\nrandom ")


def test_ratios_are_of_the_first_policy_to_each_other_seed_by_seed() -> None:
    """Halves and eighths: their geometric mean is a quarter. Equal ratios have an interval of no width."""
    text = shown(
        *(one("gorgo", seed, 100.0) for seed in (0, 1)),
        *(one("random", seed, p95_ms) for seed, p95_ms in ((0, 200.0), (1, 800.0))),
        *(one("oracle", seed, 50.0) for seed in (0, 1)),
    )
    heads = next(line for line in text.splitlines() if line.startswith("gorgo / ..."))
    assert heads.split("  ")[-1].strip() == "ratio of p95 E2E"
    assert "ratio of p95 TTFT" in heads
    # Half the width is 12.706 standard errors of ln 2, which is the distance of either from their mean.
    low, high = 0.25 * 2.0**-12.706, 0.25 * 2.0**12.706
    assert re.findall(r"random +(\S+) \[(\S+), (\S+)\] +(\S+) \[", text) == [
        ("0.250", f"{low:.3f}", f"{high:.3f}", "0.250")
    ]
    assert "2.000 [2.000, 2.000]" in text
    assert "gorgo's figure / the row's, below 1 is better: mean [95 % interval] over 2 seeds, paired" in text


@pytest.mark.parametrize(
    "rows",
    [
        [one("gorgo", 0, 100.0), one("random", 0, 200.0)],
        [one("gorgo", 0, 100.0), one("gorgo", 1, 100.0)],
    ],
    ids=["one seed", "one policy"],
)
def test_one_seed_or_one_policy_has_no_ratios(rows: list[ResultRow]) -> None:
    assert "gorgo / ..." not in shown(*rows)


def test_a_ratio_that_nobody_knows_is_a_dash_and_one_of_a_single_pair_has_no_interval() -> None:
    text = shown(
        *(one("gorgo", seed, 100.0) for seed in (0, 1)),
        one("random", 0, 200.0),
        one("random", 1, None),
        *(one("oracle", seed, None) for seed in (0, 1)),
    )
    ratios = text[text.index("gorgo / ...") :]
    assert cells(ratios, "random") == [["random", "0.500", "0.500"]]
    assert cells(ratios, "oracle") == [["oracle", "-", "-"]]


def test_oracle_and_floor_do_not_compete_for_the_best() -> None:
    lines = shown(one("gorgo", 0, 100.0), one("random", 0, 200.0), one("oracle", 0, 50.0), styled=True).splitlines()
    bold = {line.split()[0]: "\x1b[1m" in line for line in lines if line.startswith(POLICIES)}
    assert bold["gorgo"]
    assert not any("\x1b[1m" in line for line in lines if line.startswith("oracle "))


# A warm-up, and the disjoint windows of a run.


def test_requests_of_the_warm_up_are_served_and_count_in_no_row() -> None:
    whole, warm = (run_once(job(keep_requests=True, warm_s=warm_s)) for warm_s in (0.0, 2.0))
    assert whole.requests is not None
    assert warm.requests is not None
    behind = [one for one in whole.requests if one.scheduled_s >= 2.0]
    assert list(warm.requests) == behind  # the run is the same
    counted = [one.ttft_ms for one in behind if one.ttft_ms is not None]
    assert 0 < len(counted) < whole.row.n
    assert (warm.row.n, warm.row.ttft_ms) == (len(counted), Spread.of(counted))
    assert warm.row.itl_ms == Spread()  # pooled over the run, so of a part of it unknown
    assert whole.row.itl_ms.p95 is not None


@pytest.mark.parametrize("policy", ["gorgo-ms", "floor"])
def test_windows_are_disjoint_have_every_request_and_a_digest_each(policy: str) -> None:
    run = run_once(job(policy=policy, windows=3, filters=TraceFilters(limit=100)))
    assert [one.window for one in run.result_rows] == [0, 1, 2]
    assert sum(one.n for one in run.result_rows) == run.row.n == 100
    assert all(one.n for one in run.result_rows)
    assert len({one.digest for one in run.result_rows}) == 3
    assert len({one.setting for one in run.result_rows}) == 1
    alone = run_once(job(policy=policy, filters=TraceFilters(limit=100)))
    assert alone.result_rows == (alone.row,)
    assert alone.row.window is None


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"warm_s": 1e6}, "no request comes behind the first 1e\\+06 s; expected a shorter warm-up"),
        ({"windows": 1000}, "no request in one of 1000 windows; expected fewer windows"),
    ],
)
def test_a_part_of_a_run_without_requests_is_an_error(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(TraceError, match=said):
        run_once(job(**changes))


def test_an_interval_is_over_windows_where_rows_have_them_and_over_seeds_where_not() -> None:
    def rows(policy: str, *figures: list[float]) -> list[ResultRow]:
        """A list per seed, with a figure per window."""
        return [
            row(policy, seed=seed, window=window, ttft_ms=Spread(p95=figure))
            for seed, one in enumerate(figures)
            for window, figure in enumerate(one)
        ]

    ones, others = [100.0, 200.0, 300.0], [110.0, 200.0, 270.0]
    single = ratio_of_rows(rows("a", ones), rows("b", others), ttft_ms_p95)
    copied = ratio_of_rows(rows("a", ones, ones, ones), rows("b", others, others, others), ttft_ms_p95)
    assert single is not None
    assert copied is not None
    assert copied.n == single.n == 3
    assert [copied.low, copied.high] == pytest.approx([single.low, single.high])
    seeds = [replace(one, seed=one.window or 0, window=None) for one in rows("a", ones)]
    other_seeds = [replace(one, seed=one.window or 0, window=None) for one in rows("b", others)]
    by_seed = ratio_of_rows(seeds, other_seeds, ttft_ms_p95)
    assert by_seed is not None
    assert by_seed.n == 3
    assert by_seed.value == pytest.approx(single.value)


def test_the_table_names_its_units_its_quantiles_its_survivors_and_a_p99_of_few() -> None:
    rows = [row("a", window=n, n=200, errors=n, seed=seed) for n in range(3) for seed in (0, 1)]
    out = StringIO()
    show_rows(rows, ["a"], Console(file=out, width=120), seed_note="A seed draws nothing.")
    text = out.getvalue()
    assert "t.jsonl at load 1: 600 requests, means of 3 windows of 2 seeds" in text
    assert "latencies are of requests that succeeded: a 1,194 of 1,200" in text
    assert "p99 of 198 requests a window rests on the 2 slowest" in text
    assert "A seed draws nothing.\nQuantiles are interpolated between neighbours (numpy's default), per run" in text
    many = [row("a", n=5000, seed=seed) for seed in (0, 1)]
    out = StringIO()
    show_rows(many, ["a"], Console(file=out, width=120))
    assert "means of 2 seeds" in out.getvalue()
    assert "rests on" not in out.getvalue()
    assert "succeeded" not in out.getvalue()


def test_what_a_seed_varies_is_said_by_the_workload() -> None:
    assert asked(seeds=(0,)).seed_note is None
    note = asked(seeds=(0, 1)).seed_note
    assert note is not None
    assert "the requests are the file's" in note
    spread = asked(seeds=(0, 1), filters=TraceFilters(spread_s=3.0)).seed_note
    assert spread is not None
    assert "scatter" in spread
    assert asked(seeds=(0, 1), trace="art-chat-apr5").seed_note == (
        "A seed draws the requests anew, and the jitter of the network and ties."
    )


@pytest.mark.parametrize(
    ("words", "names"),
    [
        ([], ["random", "oracle", "pinned", "floor"]),
        (["--baseline", "none"], ["random"]),
        (["--baseline", "floor", "--baseline", "oracle"], ["random", "oracle", "floor"]),
    ],
)
def test_rows_of_no_policy_can_be_left_out(words: list[str], names: list[str]) -> None:
    run = ["simulate", "chat-small", "--limit", "10", "--policy", "random", "--config", str(REGIONS), "--jobs", "1"]
    result = CliRunner().invoke(app, [*run, *words])
    assert result.exit_code == 0, result.stderr
    assert [name for name in names if f"\n{name} " in result.stdout] == names
    others = {"oracle", "pinned", "floor"} - set(names)
    assert not any(f"\n{name}" in result.stdout for name in others)


def test_an_unknown_row_of_no_policy_is_named() -> None:
    result = CliRunner().invoke(app, ["simulate", "chat-small", "--baseline", "best", "--config", str(REGIONS)])
    assert result.exit_code == 2
    assert "expected one of: oracle, pinned, floor, none" in result.stderr


# --- The laboratory from a program: the rows of the command, by its defaults, and flat rows for data frames.


def command(*words: str) -> list[dict[str, object]]:
    result = CliRunner().invoke(app, ["simulate", *words, "--config", str(REGIONS), "--jobs", "1", "--json"])
    assert result.exit_code == 0, result.stderr
    found: list[dict[str, object]] = json.loads(result.stdout)
    return found


def as_read(rows: list[ResultRow]) -> list[dict[str, object]]:
    found: list[dict[str, object]] = json.loads(json.dumps([one.as_json() for one in rows]))
    return found


def test_a_program_gets_the_rows_of_the_command_with_its_defaults() -> None:
    made = simulate.run_policies("chat-small", config=REGIONS, n_jobs=1, filters=TraceFilters(limit=30))
    printed = command("chat-small", "--limit", "30")
    # The command names a shipped trace by its file, which the digests of both have.
    assert as_read(made) == [{**one, "trace": "chat-small"} for one in printed]
    assert {one.queue for one in made} == {False, None}


def test_options_of_a_program_are_those_of_the_command() -> None:
    made = simulate.run_policies(
        "chat-small", ["random"], load=[0.5, 1.0], seeds=2, config=REGIONS, fleet="paper", warm_s=1.0, windows=2,
        queue=True, n_jobs=1, filters=TraceFilters(limit=60),
    )  # fmt: skip
    words = "--policy random --load 0.5 --load 1 --seeds 2 --fleet paper --warm 1 --windows 2 --queue on --limit 60"
    assert as_read(made) == [{**one, "trace": "chat-small (paper)"} for one in command("chat-small", *words.split())]


def test_a_fleet_of_one_s_own_and_chosen_seeds_run_without_a_command() -> None:
    rows = simulate.run_policies(
        "chat-small", ["random"], seeds=[7, 9], config=REGIONS, fleet=three_regions(), n_jobs=1,
        filters=TraceFilters(limit=10),
    )  # fmt: skip
    assert [(one.policy, one.seed) for one in rows][:2] == [("random", 7), ("random", 9)]
    with pytest.raises(UnknownPolicy, match="no policy named 'rando'"):
        simulate.run_policies("chat-small", ["rando"], config=REGIONS, n_jobs=1)


def test_flat_rows_have_a_column_per_figure_and_the_load() -> None:
    (flat,) = simulate.flat_rows([row(time_scale=4.0, failures={"timeout": 2})])
    assert flat["load"] == 0.25
    assert flat["ttft_ms_p95"] == 12_345.0
    assert flat["weights_w_rtt"] == 0.5
    assert flat["failures_timeout"] == 2
    assert flat["share_seoul-0"] == 0.2
    assert not any(isinstance(value, dict) for value in flat.values())


def test_a_data_frame_has_a_row_per_run_and_a_column_per_figure() -> None:
    pytest.importorskip("pandas", reason="DATA FRAME TEST SKIPPED: pandas is not installed")
    frame = simulate.data_frame([row(policy="gorgo-ms"), row(policy="random", time_scale=4.0)])
    assert frame["policy"].tolist() == ["gorgo-ms", "random"]
    assert frame["load"].tolist() == [1.0, 0.25]
    assert frame["ttft_ms_p95"].mean() == 12_345.0


def test_without_pandas_a_data_frame_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(MissingExtra, match=r"pip install 'gorgo-router\[notebook\]'"):
        simulate.data_frame([row()])


def test_a_scenario_file_of_one_s_own_is_in_the_name_and_in_the_setting_of_its_rows(tmp_path: Path) -> None:
    path, some = tmp_path / "far.yaml", TraceFilters(limit=20)
    text = (
        "routers: [us-ashburn, eu-frankfurt]\nclients: {ap-seoul: 1}\nnetwork: {tcp_windows: false, rtt_ms: "
        "{us-ashburn: {eu-frankfurt: 95, ap-seoul: 180}, eu-frankfurt: {ap-seoul: 240}}}\n"
        "faults: [{kind: kill, replica: ap-seoul-0, start: 1/2}]\n"
    )
    path.write_text(text)
    arguments: dict[str, Any] = {"config": REGIONS, "n_jobs": 1, "filters": some}
    made = simulate.run_policies("chat-small", ["random"], scenario=path, **arguments)
    words = f"--policy random --limit 20 --scenario {path}"
    printed = command("chat-small", *words.split())
    assert as_read(made) == [{**one, "trace": "chat-small (far, no TCP windows)"} for one in printed]
    path.write_text(text.replace("1/2", "1/4"))
    (other, *_) = simulate.run_policies("chat-small", ["random"], scenario=path, baselines=[], **arguments)
    assert other.setting != made[0].setting
    with pytest.raises(ConfigError, match="3 routers, and a scenario that has 2"):
        simulate.run_policies("chat-small", ["random"], scenario=path, routers=RouterGroup(count=3), **arguments)
