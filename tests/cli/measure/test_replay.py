"""What commands that measure hand to the programs behind them, and what they print of the answer."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from gorgo.cli import app
from gorgo.config.load import load_config
from gorgo.errors import ConfigError
from gorgo.lab.demo import DemoOptions
from gorgo.lab.replay_client import ReplayOptions, ReplayReport
from gorgo.lab.results import ResultRow
from gorgo.lab.sim.engine.profiles import EngineProfile, find_profile, read_profile
from gorgo.lab.sim.fleet import fleet_of, limits_of, with_queue_for_all
from gorgo.lab.simulate import SimJob, SimulatedRun, SimulateOptions
from gorgo.lab.simulate.job import Goodput
from gorgo.lab.traces import TraceFilters
from gorgo.policies.registry import make_policy
from tests.lab.test_calibrate import served, written
from tests.lab.test_results import row

REGIONS = Path(__file__).parents[3] / "regions.yaml"
#: Every filter, and what it stands for.
FILTERS = (
    *("--limit", "7", "--max-input", "1000", "--max-output", "9", "--spread", "3", "--seed", "5"),
    *("--start", "2026-04-02T00:00", "--end", "2026-04-02T01:00"),
)
FILTERED = TraceFilters(
    limit=7, max_input=1000, max_output=9, spread_s=3.0, seed=5, start_s=86_400.0, end_s=90_000.0, from_zero=True
)


@pytest.fixture
def _no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("GORGO_CONFIG", "GORGO_API_KEY"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """Unlike the defaults in everything that a run takes of it."""
    text = REGIONS.read_text()
    for old, new in (
        ("probe_interval_s: 30.0", "probe_interval_s: 7.0"),
        ("# scrape_interval_s: 1.0 ", "scrape_interval_s: 11.0 "),
        ("max_attempts: 3", "max_attempts: 2"),
        ("queue_max_requests: 1000", "queue_max_requests: 99"),
        ("# weights: {lambda: 0.2}", "weights: {lambda: 0.2}"),
        ("us-ashburn: 2,", "us-ashburn: 3,"),
    ):
        assert old in text
        text = text.replace(old, new, 1)
    (tmp_path / "regions.yaml").write_text(text)
    return tmp_path / "regions.yaml"


def run(*words: str | Path) -> Result:
    return CliRunner().invoke(app, [str(word) for word in words])


class Program:
    """Stands for what a command starts: keeps what it was asked, gives a fixed answer."""

    def __init__(self, answer: Any) -> None:
        self.asked: list[Any] = []
        self.options: list[dict[str, Any]] = []
        self._answer = answer

    def __call__(self, asked: Any, **options: Any) -> Any:
        self.asked.append(asked)
        self.options.append(options)
        return self._answer


# -- simulate
def simulated(monkeypatch: pytest.MonkeyPatch, *rows: ResultRow) -> Program:
    program = Program(list(rows or [row("gorgo-ms")]))
    monkeypatch.setattr("gorgo.lab.simulate.simulate_command", program)
    return program


@pytest.mark.usefixtures("_no_environment")
def test_simulate_hands_on_every_option(config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = simulated(monkeypatch)
    file = tmp_path / "weights.json"
    file.write_text('{"policy": "gorgo", "weights": {"w_rtt": 0.75}}')
    result = run(
        *("simulate", "my-trace", *FILTERS, "--config", config, "--weights", file, "--out", tmp_path / "out"),
        *("--policy", "gorgo", "--policy", "random", "--policy", "gorgo", "--load", "0.5", "--load", "2"),
        *("--seeds", "3", "--scenario", "bursts", "--shadow", "gorgo-ms", "--jobs", "2"),
    )
    assert result.exit_code == 0, result.output
    loaded = load_config(config)
    assert program.asked == [
        SimulateOptions(
            job=SimJob(
                trace="my-trace",
                policy="gorgo",
                fleet=fleet_of(loaded, source=config),
                filters=FILTERED,
                scenario="bursts",
                limits=with_queue_for_all(limits_of(loaded), enabled=False),
                probe_interval_s=7.0,
                scrape_interval_s=11.0,
                shadow="gorgo-ms",
            ),
            policies=("gorgo", "random"),
            weights={
                "gorgo-ms": {"m_rtt": 1.0, "m_queue": 1.0, "lambda": 0.2, "delta": 25.0, "eta": 800.0},
                "gorgo": {"w_rtt": 0.75, "w_queue": 0.1},
            },
            time_scales=[2.0, 0.5],
            seeds=range(5, 8),
            out=tmp_path / "out",
            n_jobs=2,
        )
    ]
    assert (loaded.limits.max_attempts, program.asked[0].job.limits.overload.queue_max_requests) == (2, 99)


@pytest.mark.usefixtures("_no_environment")
def test_simulate_by_default_runs_every_policy_once_on_all_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    program = simulated(monkeypatch)
    assert run("simulate", "my-trace", "--config", REGIONS).exit_code == 0
    loaded = load_config(REGIONS)
    assert program.asked == [
        SimulateOptions(
            job=SimJob(
                trace="my-trace",
                policy="gorgo-ms",
                fleet=fleet_of(loaded, source=REGIONS),
                limits=with_queue_for_all(limits_of(loaded), enabled=False),
            ),
            weights={"gorgo-ms": {spec.name: spec.default for spec in make_policy("gorgo-ms").weight_specs}},
            time_scales=[1.0],
            seeds=range(1),
        )
    ]
    assert program.asked[0].policies == (
        *("gorgo-ms", "gorgo", "least-load", "least-request", "prefix-cache", "simple-session-affinity", "random"),
    )


@pytest.mark.usefixtures("_no_environment")
@pytest.mark.parametrize("errors", [(0, 0), (0, 1)])
def test_requests_that_fail_in_a_simulation_are_a_result(
    errors: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [row("gorgo-ms", errors=count) for count in errors]
    simulated(monkeypatch, *rows)
    result = run("simulate", "my-trace", "--config", REGIONS, "--json")
    assert result.exit_code == 0
    assert [one["errors"] for one in json.loads(result.stdout)] == list(errors)


@pytest.mark.usefixtures("_no_environment")
def test_a_pipe_gets_a_table_as_wide_as_the_longest_row(monkeypatch: pytest.MonkeyPatch) -> None:
    names = [f"replica-{number}" for number in range(12)]
    simulated(monkeypatch, row("simple-session-affinity", share=dict.fromkeys(names, 1 / 12)))
    said = run("simulate", "my-trace", "--policy", "simple-session-affinity", "--config", REGIONS).stdout
    assert "8/8/8/8/8/8/8/8/8/8/8/8" in said


# -- overload
def overloaded(monkeypatch: pytest.MonkeyPatch) -> list[SimJob]:
    """Jobs that were asked for, of a fleet that is served well from time scale 1 on."""
    searched: list[SimJob] = []

    def runs(jobs: list[SimJob], **_options: Any) -> Iterator[SimulatedRun]:
        searched.extend(jobs)
        for job in jobs:
            good = 1.0 if job.time_scale >= 1.0 else 0.5
            yield SimulatedRun(job, row(job.policy), goodput=Goodput(1, good, good, 0.0, 0.0, 0.0))

    monkeypatch.setattr("gorgo.lab.simulate.overload.run_many", runs)
    return searched


@pytest.mark.usefixtures("_no_environment")
def test_overload_by_default_has_two_seconds_to_the_first_token_and_ten_to_the_last(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    searched = overloaded(monkeypatch)
    assert run("overload", "my-trace", "--config", REGIONS).exit_code == 0
    *_, queued = searched
    assert queued.limits is not None
    overload = limits_of(load_config(REGIONS)).overload
    assert queued.limits.overload == replace(overload, queue_enabled=True, slo_e2e_s=10.0)
    assert (queued.slo_ttft_ms, queued.policy, queued.scenario, queued.seed) == (2000.0, "gorgo-ms", "steady", 0)
    assert queued.filters == TraceFilters()


@pytest.mark.usefixtures("_no_environment")
def test_overload_hands_on_every_option(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    searched = overloaded(monkeypatch)
    text = (
        config.read_text()
        .replace("# slo_ttft_ms: 2000 ", "slo_ttft_ms: 700 ")
        .replace("# slo_e2e_ms: 10000", "slo_e2e_ms: 9000")
    )
    config.write_text(text)
    words = [word for word in FILTERS if word not in FILTERS[-4:]]
    result = run("overload", "my-trace", *words, "--config", config, "--policy", "gorgo", "--load", "2")
    assert result.exit_code == 0, result.output
    loaded = load_config(config)
    *search, at_once, queued = searched

    def alike(job: SimJob) -> SimJob:
        return replace(job, limits=None, time_scale=1.0, slo_ttft_ms=None)

    wanted = SimJob(
        trace="my-trace",
        policy="gorgo",
        fleet=fleet_of(loaded, source=config),
        filters=replace(FILTERED, start_s=0.0, end_s=None, from_zero=False),
        seed=5,
        probe_interval_s=7.0,
        scrape_interval_s=11.0,
    )
    assert search
    assert [alike(job) for job in search] == [wanted] * len(search)
    assert [alike(job) for job in (at_once, queued)] == [wanted] * 2
    assert {job.slo_ttft_ms for job in search} == {None}
    assert [(job.time_scale, job.slo_ttft_ms) for job in (at_once, queued)] == [(0.5, None), (0.5, 700.0)]
    assert at_once.limits is not None
    assert queued.limits is not None
    assert {job.limits.overload.queue_enabled for job in search if job.limits is not None} == {False}
    assert at_once.limits.overload == replace(limits_of(loaded).overload, queue_enabled=False)
    assert queued.limits == limits_of(loaded)
    assert (queued.limits.overload.queue_enabled, queued.limits.overload.slo_e2e_s) == (True, 9.0)


# -- replay
def replayed(monkeypatch: pytest.MonkeyPatch, warning: str | None = None, **errors: int) -> Program:
    answer = ReplayReport(row=row(errors=sum(errors.values()), failures=errors), wall_s=1.0, warning=warning)
    program = Program(answer)
    monkeypatch.setattr("gorgo.lab.replay.replay_command", program)
    return program


@pytest.mark.usefixtures("_no_environment")
def test_replay_hands_on_every_option(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = replayed(monkeypatch)
    monkeypatch.setenv("GORGO_API_KEY", " k ")
    result = run(
        *("replay", "my-trace", *FILTERS, "--url", "http://router", "--time-scale", "2", "--model", "m"),
        *("--out", tmp_path),
    )
    assert result.exit_code == 0, result.output
    assert program.asked == [
        ReplayOptions(
            trace=Path("my-trace"),
            url="http://router",
            filters=FILTERED,
            time_scale=2.0,
            out=tmp_path,
            model="m",
            api_key="k",
        )
    ]


@pytest.mark.usefixtures("_no_environment")
def test_replay_by_default_keeps_all_of_a_trace_and_asks_the_router_of_this_machine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    program = replayed(monkeypatch)
    assert run("replay", "my-trace").exit_code == 0
    assert program.asked == [ReplayOptions(trace=Path("my-trace"))]
    assert program.asked[0].show_progress


@pytest.mark.usefixtures("_no_environment")
def test_replay_prints_the_row_and_why_requests_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    causes = {"no answer in time": 2, "unheard of": 3}
    replayed(monkeypatch, "all share one key", **causes)
    result = run("replay", "my-trace", "--json")
    assert result.exit_code == 1
    assert json.loads(result.stdout) == [row(errors=5, failures=causes).as_json()]
    assert result.stderr.splitlines() == [
        "gorgo: 3 of 300: unheard of",
        "gorgo: 2 of 300: no answer in time; a lower --load or more replicas",
        "gorgo: all share one key",
    ]
    assert "50/30/20" in run("replay", "my-trace").stdout


@pytest.mark.usefixtures("_no_environment")
def test_a_pipe_gets_all_shares_of_a_replay(monkeypatch: pytest.MonkeyPatch) -> None:
    shares = dict.fromkeys((f"replica-{number}" for number in range(8)), 1 / 8)
    answer = ReplayReport(row=row("simple-session-affinity", share=shares), wall_s=1.0)
    monkeypatch.setattr("gorgo.lab.replay.replay_command", Program(answer))
    assert "12/12/12/12/12/12/12/12" in run("replay", "my-trace").stdout


# -- demo
@pytest.mark.usefixtures("_no_environment")
def test_demo_hands_on_every_option(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = Program([row("random"), row("gorgo", errors=1)])
    monkeypatch.setattr("gorgo.lab.demo.run_demo", program)
    (tmp_path / "mine").touch()
    result = run(
        *(
            "demo",
            "--trace",
            tmp_path / "mine",
            "--limit",
            "7",
            "--max-input",
            "900",
            "--policy",
            "random",
            "--policy",
            "gorgo",
            "--load",
            "0.5",
        ),
        *("--out", tmp_path, "--json"),
    )
    assert result.exit_code == 1, result.output
    assert program.asked == [
        DemoOptions(
            policies=("random", "gorgo"),
            trace=tmp_path / "mine",
            filters=TraceFilters(limit=7, max_input=900),
            time_scale=2.0,
            out=tmp_path,
        )
    ]
    assert [one["policy"] for one in json.loads(result.stdout)] == ["random", "gorgo"]
    assert run("demo", "--tune").exit_code == 1
    assert program.asked[1] == DemoOptions(tune=True)


@pytest.mark.usefixtures("_no_environment")
def test_demo_says_why_requests_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    long = row("gorgo", n=300, errors=2, failures={"prompt over the engine's 32,768 tokens": 2})
    monkeypatch.setattr("gorgo.lab.demo.run_demo", Program([row("random"), long]))
    result = run("demo")
    assert result.exit_code == 1
    assert result.stderr.splitlines() == [
        "gorgo: gorgo: 2 of 300: prompt over the engine's 32,768 tokens; --max-input leaves them out"
    ]


@pytest.mark.usefixtures("_no_environment")
def test_a_policy_without_weights_cannot_be_tuned(monkeypatch: pytest.MonkeyPatch) -> None:
    program = Program([])
    monkeypatch.setattr("gorgo.lab.demo.run_demo", program)
    result = run("demo", "--tune", "--policy", "random")
    assert (result.exit_code, program.asked) == (2, [])
    assert "random has no weight that a tuner may move" in " ".join(result.stderr.replace("│", " ").split())
    assert run("demo", "--policy", "random").exit_code == 0


@pytest.mark.usefixtures("_no_environment")
def test_a_replayed_request_that_is_not_complete_after_ten_minutes_is_an_error_unless_said() -> None:
    options = ReplayOptions(trace=Path("t"))
    assert (options.request_timeout_s, options.max_in_flight) == (600.0, 2048)


# --- `gorgo calibrate` through its command line, and the profile file that it writes.


LLAMA = find_profile("1xH100-Llama-3.1-8B")


def test_log_becomes_a_profile_file_that_a_simulation_takes(tmp_path: Path) -> None:
    log = written(tmp_path / "log", served(LLAMA, requests=1500, interval_s=0.5, seed=2))
    with log.open("a") as cut:
        cut.write('{"received_s": 1')
    out = tmp_path / "measured.json"
    result = run("calibrate", "--request-log", log, "--out", out)
    assert result.exit_code == 0, result.output
    assert result.stderr == f"gorgo: {log}: 1 line was cut off by a full disk or a killed process and is skipped\n"
    assert "capacity:\n  prefill_tokens_per_s: " in result.output
    assert "KV pool: not measured" in result.output
    config = tmp_path / "regions.yaml"
    config.write_text(REGIONS.read_text().replace("profile: 2xL40S-Qwen3.5-35B-A3B-FP8-fitted", f"profile: {out}"))
    profile = fleet_of(load_config(config), source=config).replicas[0].profile
    assert profile == read_profile(out)
    assert profile.name == "measured"
    assert profile.prefill_tokens_per_s == pytest.approx(LLAMA.prefill_tokens_per_s, rel=0.1)
    assert run("check", "--config", config).exit_code == 0


def test_json_has_the_profile_the_priors_and_the_errors(tmp_path: Path) -> None:
    log = written(tmp_path / "log", served(LLAMA, requests=1500, interval_s=0.5, seed=2))
    document = json.loads(run("calibrate", "--request-log", log, "--replica", "near", "--json").output)
    assert set(document) == {"profile", "capacity", "errors"}
    assert document["errors"]["prefill"]["points"] >= 5


@pytest.mark.parametrize("words", [(), ("--url", "http://127.0.0.1:1", "--request-log", "log")])
def test_either_an_engine_or_a_log_is_expected(words: tuple[str, ...]) -> None:
    result = run("calibrate", *words)
    assert result.exit_code == 2
    assert "--url, --request-log: expected one of the two" in result.output


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"prefill_tokens_per_s": 0}, "profile.prefill_tokens_per_s: 0; expected a number above 0"),
        ({"hit_share": 1.5}, "profile.hit_share: 1.5; expected a number from 0 to 1"),
        ({"kv_tokens": 0}, "profile.kv_tokens: 0; expected a whole number from 1"),
        ({"kv_tokens": True}, "profile.kv_tokens: true; expected a whole number from 1"),
        ({"decode_kv_s": float("nan")}, "profile.decode_kv_s: NaN; expected a number from 0"),
        ({"name": 7}, "profile.name: 7; expected text"),
        ({"scheduler": "tgi"}, 'profile.scheduler: "tgi"; expected one of sglang, vllm'),
        ({"prefix_cache": 0}, "profile.prefix_cache: 0; expected true or false"),
        (
            {"scheduler": "vllm", "chunk_tokens": 100},
            r"profile.chunk_tokens: 100; expected at least max_running_requests \(256\) with vLLM",
        ),
        (
            {"scheduler": "vllm", "kv_tokens": 9},
            r"profile.kv_tokens: 9; expected at least block_tokens \(16\) with vLLM",
        ),
        ({"slot_cache": True}, 'profile.slot_cache: true; expected false, or "scheduler": "vllm"'),
        ({"kv_token": 7}, r"profile.kv_token: unknown key \(did you mean 'kv_tokens'\?\)"),
    ],
)
def test_wrong_profile_file_is_an_error_with_the_key(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    path = tmp_path / "profile.json"
    path.write_text(json.dumps({"profile": asdict(LLAMA) | changes}))
    with pytest.raises(ConfigError, match=message):
        read_profile(path)


@pytest.mark.parametrize("text", ["", "[]", '{"profile": 7}', "[" * 100_000, " " * 70_000])
def test_what_is_no_profile_file_is_an_error_with_its_name(tmp_path: Path, text: str) -> None:
    path = tmp_path / "profile.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"profile\.json: .*expected"):
        read_profile(path)
    config = tmp_path / "regions.yaml"
    config.write_text(REGIONS.read_text().replace("profile: 2xL40S-Qwen3.5-35B-A3B-FP8-fitted", f"profile: {path}"))
    checked = run("check", "--config", config)
    assert checked.exit_code == 2
    assert "simulation.profile (line" in checked.output


def test_missing_constant_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    path.write_text(json.dumps({"profile": {"name": "x"}}))
    with pytest.raises(ConfigError, match=r"profile\.prefill_base_s: missing; expected a value"):
        read_profile(path)


def test_a_profile_file_has_every_field(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    path.write_text(json.dumps({"profile": asdict(LLAMA)}))
    found: EngineProfile = read_profile(path)
    assert found == LLAMA
