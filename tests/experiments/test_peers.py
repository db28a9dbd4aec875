"""Settings that nobody tuned on, Dynamo's simulator and other routers: what is made for them, without running them."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import yaml

from experiments.aiperf import Aiperf, replay_records, trace_lines
from experiments.comparison import MEASURES
from experiments.environments import Environment, InstallError
from experiments.reports import Grid
from experiments.rules import DynamoKv
from experiments.runner import Runner
from experiments.systems import dynamo, live, live_engines, perturbed
from experiments.systems.policies import RIVALS, all_targets
from experiments.windows import PolicyTask, Workload, drawn
from gorgo.config.load import load_config
from gorgo.errors import GorgoError
from gorgo.lab.prompt_text import body_of
from gorgo.lab.sim.engine.profiles import PROFILES
from gorgo.lab.simulate.run import policy_of
from gorgo.lab.traces import TraceFilters, TraceRequest
from tests.bench.relay.targets import Launch, Place, UnavailableError
from tests.experiments.rows import row
from tests.policies.table import choose, table
from tests.system.vllm_server import MAX_MODEL_TOKENS

# --- Settings that nobody tuned on.

#: One of each kind that is drawn fast.
DRAWN = (4, 6)


@pytest.mark.parametrize("number", DRAWN)
def test_a_setting_is_the_same_whenever_it_is_drawn_and_no_profile_s(number: int) -> None:
    first = perturbed.setting(number)
    perturbed.setting.cache_clear()
    assert perturbed.setting(number) == first
    assert first.world is not None
    for replica in first.world.replicas:
        assert replica.profile.prefill_tokens_per_s not in {one.prefill_tokens_per_s for one in PROFILES.values()}
        assert replica.spec.prefill_tokens_per_s in {one.prefill_tokens_per_s for one in PROFILES.values()}
        assert replica.spec.kv_capacity_tokens == replica.profile.kv_tokens >= perturbed.POOL_TOKENS_MIN


@pytest.mark.parametrize("number", DRAWN)
def test_every_prompt_of_a_setting_fits_and_its_load_is_within_what_is_drawn(number: int) -> None:
    workload = perturbed.setting(number)
    assert workload.world is not None
    assert workload.shape is not None
    feed = drawn(workload.shape, 0, perturbed.FILTERS)
    longest = max(request.prompt_tokens + request.output_tokens for request in feed)
    assert longest <= min(min(one.profile.context_tokens, one.profile.kv_tokens) for one in workload.world.replicas)
    span_s = (feed[-1].arrival_s - feed[0].arrival_s) * workload.time_scale
    assert 0.3 <= perturbed.busy_s(feed, workload.world, workload.shape.block_tokens) / span_s <= 0.9


def test_settings_differ_in_fleet_and_traffic() -> None:
    found = [perturbed.setting(number) for number in DRAWN]
    assert len({one.world for one in found}) == len({one.shape for one in found}) == len(DRAWN)
    assert len({one.label for one in found}) == len(DRAWN)


def test_nobody_queues_in_a_setting_and_the_rivals_are_registered() -> None:
    job = PolicyTask(perturbed.setting(6), "gorgo-ms", 0).job()
    assert job.limits is None
    assert [policy_of(name).name for name in perturbed.RIVALS] == list(perturbed.RIVALS)
    assert len(perturbed.RIVALS) == 7
    assert set(perturbed.STATS) <= set(MEASURES)


# --- The claims: rivals, and the queue under every policy or none.


def test_other_routers_rules_are_rivals_in_the_claims() -> None:
    others = {name for target in all_targets(None) if target.group == "rivals" for name in target.others}
    assert others == set(RIVALS) == {"mooncake", "prefix-cache-in-flight", "lmetric", "dualmap"}


@pytest.mark.parametrize("queue", ["on", "off"])
def test_claims_queue_under_every_policy_or_under_none_and_say_so(queue: str) -> None:
    target = next(target for target in all_targets(None) if target.group == "oracle")
    target = target.on(Grid(seeds=(), queue=queue).cut)  # type: ignore[arg-type]
    for task in target.tasks([0]):
        job = task.job()
        assert job.limits is not None
        overload = job.limits.overload
        assert (overload.queue_enabled, overload.queue_every_policy) == (queue == "on", queue == "on")
        assert task.workload.label.endswith(f", queue {queue}")
    served = next(target for target in all_targets(None) if target.group == "oracle")
    assert {task.key() for task in served.tasks([0])}.isdisjoint(task.key() for task in target.tasks([0]))


# --- Dynamo's simulator.

ROWS = [
    {"timestamp": 0, "input_length": 600, "output_length": 9, "hash_ids": [1, 2]},
    {"timestamp": 4000, "input_length": 1024, "output_length": 300, "hash_ids": [1, 3]},
]


@pytest.fixture
def workload(tmp_path: Path) -> Workload:
    file = tmp_path / "trace.jsonl"
    file.write_text("".join(json.dumps(one) + "\n" for one in ROWS))
    filters = TraceFilters(max_output=128)
    return Workload(name="two", traces=(str(file),), filters=filters, time_scale=0.5, world=dynamo.fleet())


def test_dynamo_gets_the_requests_of_our_own_run_at_its_times(workload: Workload) -> None:
    found = [json.loads(line) for line in dynamo.mooncake_lines(workload, 0)]
    assert [(one["timestamp"], one["input_length"], one["output_length"]) for one in found] == [
        (0.0, 600, 9), (2000.0, 1024, 128),
    ]  # fmt: skip
    assert found[1]["hash_ids"] == [1, 3]


def test_dynamo_s_table_has_our_constants_at_each_of_its_points(tmp_path: Path) -> None:
    profile = dynamo.PROFILE
    dynamo.write_table(profile, tmp_path / "engine.npz")
    found = np.load(tmp_path / "engine.npz")
    assert found["prefill_ttft_ms"].tolist() == [
        pytest.approx(1e3 * profile.prefill_s(int(tokens), 0.0)) for tokens in found["prefill_isl"]
    ]
    active, context = 100, 60
    tokens = found["decode_active_kv_tokens"][active]
    batch = tokens / found["decode_context_length"][context]
    step_ms = 1e3 * (profile.decode_base_s + profile.decode_per_request_s * batch + profile.decode_kv_s * tokens)
    assert found["decode_itl"][active, context] == pytest.approx(step_ms)
    assert dynamo.engine_of(profile, tmp_path / "x")["num_gpu_blocks"] * profile.block_tokens <= profile.kv_tokens


def test_without_the_trace_dynamo_is_not_compared() -> None:
    with pytest.raises(GorgoError, match="missing --trace"):
        dynamo.report(dynamo.GROUPS, Grid(seeds=[0]), Runner(None))


def test_ratios_of_the_simulators_are_of_the_same_requests(workload: Workload, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dynamo.ReplayTask, "run", lambda _: dynamo.ReplayRun(stats=dict.fromkeys(dynamo.STATS, 2.0)))
    monkeypatch.setattr(dynamo, "workloads", lambda _: {"two, load 2": workload})
    found = dynamo.report(dynamo.GROUPS, Grid(seeds=[0], trace=workload.traces[0]), Runner(None, n_jobs=1))
    ratios, means = found.sections
    assert [cells[:3] for cells in ratios.rows] == [
        ("two, load 2", way, figure) for way in dynamo.WAYS for figure in dynamo.STATS
    ]
    assert [cells[1:3] for cells in means.rows] == [
        *((world, way) for way in dynamo.WAYS for world in ("Dynamo", "here")),
        ("here", "by gorgo-ms"),
    ]


def test_dynamo_s_rule_adds_what_is_to_prefill_and_what_is_in_flight() -> None:
    found = table(3, cached=[900, 0, 0], queued_prefill_tokens=[500, 0, 0], in_flight_tokens=[0, 100, 0])
    assert choose(DynamoKv(), found).row == 0, "600 tokens, 1,100 and 1,000"
    assert choose(DynamoKv(), table(2, in_flight_tokens=[9, 0])).row == 1


# --- Other routers, live.


def kinds() -> tuple[live.Traffic, ...]:
    return tuple(live.traffics(None))


def place_of(folder: Path, count: int = 8, **about: Any) -> live.LivePlace:
    urls = {f"engine-{number}": f"http://127.0.0.1:{7002 + number}" for number in range(count)}
    return live.LivePlace.before(live_engines.Engines(urls=urls, **about), folder)


def test_the_herd_is_sent_by_two_tools_and_once_more_with_a_killed_engine() -> None:
    names = [one.name for one in live.traffics("conversation.jsonl")]
    assert names == ["herd", "herd, sent by aiperf", "ART-Chat-like", "conversation trace", live.KILLED]
    first, second, *_, last = kinds()
    assert first.requests(0) == second.requests(0) == last.requests(0) != first.requests(1)
    assert [one.name for one in kinds() if one.by_aiperf] == ["herd, sent by aiperf"]
    assert len(first.scaled(0.1).requests(0)) == 18


def test_prompts_for_real_engines_fit_into_their_context() -> None:
    (traffic,) = live.FLEETS["vLLM"].traffics(None)
    assert max(one.input_tokens + one.output_tokens for one in traffic.requests(0)) < MAX_MODEL_TOKENS


def test_own_routers_know_the_engines_by_a_file_that_loads(tmp_path: Path) -> None:
    place = place_of(tmp_path, capacity={"prefill_tokens_per_s": 9_000})
    config = load_config(Path(live.gorgo_serve(place).arguments[-1]))
    assert config.proxy.bind == f"127.0.0.1:{place.port}"
    assert [replica.url for replica in config.replicas] == [f"http://127.0.0.1:{port}" for port in range(7002, 7010)]
    assert {replica.capacity.prefill_tokens_per_s for replica in config.replicas} == {9_000}


def test_litellm_has_a_deployment_for_each_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "_installed", lambda *_: tmp_path)
    live.litellm(place_of(tmp_path, 2))
    found = yaml.safe_load((tmp_path / "litellm.yaml").read_text())
    assert [one["litellm_params"]["api_base"] for one in found["model_list"]] == [
        "http://127.0.0.1:7002/v1", "http://127.0.0.1:7003/v1",
    ]  # fmt: skip


def test_dynamo_s_frontend_finds_its_mockers_and_listens_where_their_tokens_are_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live, "dynamo_environment", lambda: Environment(tmp_path))
    place = place_of(tmp_path, router_port=7001, environment={"NATS_SERVER": "nats://127.0.0.1:4222"})
    launch = live.dynamo_frontend(place)
    assert launch.environment["NATS_SERVER"] == "nats://127.0.0.1:4222"
    words = " ".join(launch.arguments)
    assert "--http-host 127.0.0.1 --http-port 7001" in words
    assert "--router-mode kv --router-min-initial-workers 8" in words


def test_a_frontend_has_a_word_for_each_token_of_a_mocker(tmp_path: Path) -> None:
    folder = live_engines.mocked_model(tmp_path / "model", seed=0)
    words = json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"]
    assert sorted(words.values()) == list(range(2_000))
    assert not list(folder.glob("*.safetensors")), "a mocker computes nothing"


def test_counters_of_an_engine_are_added_up_over_its_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    pages = {"http://worker/metrics": "requests 3", "http://frontend/metrics": "prompt 90\ncached 60\nmade 5"}
    monkeypatch.setattr(httpx, "get", lambda url, **_: httpx.Response(200, text=pages[url]))
    engines = live_engines.Engines(
        urls={"a": "http://frontend"},
        counters=["requests", "prompt", "cached", "made"],
        pages={"a": ["http://worker", "http://frontend"]},
    )
    assert engines.totals() == {"a": [3, 90, 60, 5]}


def test_engines_whose_caches_nothing_empties_start_anew_for_each_router() -> None:
    grid = Grid(seeds=[0, 1])
    assert [task.routers for task in live._tasks("mockers", grid, {"smg"})] == [
        (name,) for name in live.FLEETS["mockers"].routers if name != "smg" for _ in grid.seeds
    ]
    assert [task.routers for task in live._tasks("vLLM", grid, ())] == [tuple(live.FLEETS["vLLM"].routers)] * 2
    assert not list(live._tasks("vLLM", grid, {live.FLEETS["vLLM"].title: "no wheel"}))


def test_a_router_that_ends_is_not_waited_for_and_its_log_says_why(tmp_path: Path) -> None:
    (tmp_path / "log").write_text("ModuleNotFoundError: No module named 'fastapi'\n")
    with subprocess.Popen([sys.executable, "-c", "raise SystemExit(3)"]) as process:
        process.wait()
        with pytest.raises(live.NoAnswerError, match=r"ended with 3; .* its log ends: ModuleNotFoundError"):
            live._wait_until_answering("http://127.0.0.1:1", "LiteLLM", process, tmp_path / "log")


def test_a_router_whose_bodies_are_refused_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "log").write_text("request failed\n")
    refusal = httpx.Response(400, text="Unsupported parameter(s): `no_stop_trim`")
    monkeypatch.setattr(httpx, "post", lambda *_, **__: refusal)
    with (
        subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process,
        pytest.raises(live.NoAnswerError, match="sglang-router refuses every request; at last: 400 Unsupported"),
    ):
        live._wait_until_answering("http://127.0.0.1:1", "sglang-router", process, tmp_path / "log")


def test_what_cannot_be_installed_is_named_and_the_rest_runs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def there(_: Place) -> Launch:
        return Launch(arguments=[], environment={}, version="1")

    def missing(_: Place) -> Launch:
        raise UnavailableError("no such wheel")

    def no_install() -> None:
        raise InstallError("pip ended with 1")

    def run(task: live.LiveTask) -> live.LiveRun:
        rows = [
            live.LiveRow(
                fleet=task.fleet, router=name, version="1", traffic=one.name, row=row(), hit=0.5, share=0.25,
                cpu_ms=1.5, event_us=31.0,
            )
            for name in task.routers
            for one in task.traffics
        ]  # fmt: skip
        return live.LiveRun(rows=[one for one in rows if one.router != "silent"], silent={"silent": "did not answer"})

    routers = ["here", "silent", "elsewhere"]
    fleets = {
        "gorgo engine": replace(live.FLEETS["gorgo engine"], routers=routers),
        "vLLM": replace(live.FLEETS["vLLM"], routers=routers, installed=no_install),
    }
    monkeypatch.setattr(live, "ROUTERS", {"here": there, "silent": there, "elsewhere": missing})
    monkeypatch.setattr(live, "FLEETS", fleets)
    monkeypatch.setattr(live, "aiperf_environment", no_install)
    monkeypatch.setattr(live.LiveTask, "run", run)
    found = live.report(["live", "vllm"], Grid(seeds=[0, 1]), Runner(None, n_jobs=1))
    skipped = {
        "SKIPPED elsewhere: no such wheel",
        "SKIPPED aiperf: pip ended with 1",
        "SKIPPED two real vLLM on the CPU: pip ended with 1",
    }
    assert skipped <= set(capsys.readouterr().err.splitlines())
    assert skipped <= set(found.end.split("\n\n"))
    assert "SKIPPED silent before gorgo engine: did not answer" in found.end
    assert "SKIPPED Dynamo's frontend before gorgo engine: it sends requests to workers of its own" in found.end
    section, empty = found.sections
    assert [cells[:2] for cells in section.rows] == [(one.name, "here") for one in kinds() if not one.by_aiperf]
    assert [cells[8:12] for cells in section.rows] == [("50.0", "25", "1.50", "31")] * 3
    assert len(section.rows[0]) == len(live.HEADER)
    assert not empty.rows
    assert len(found.rows) == 2 * 3


# --- aiperf, which sends what a replay sends.


def test_aiperf_sends_the_bodies_of_a_replay_at_its_times() -> None:
    requests = [TraceRequest(index=4, timestamp_s=2.0, input_tokens=3, output_tokens=7, hash_ids=(1,))]
    (line,) = trace_lines(requests, model="m", time_scale=0.5)
    assert json.loads(line) == {"timestamp": 1000.0, "payload": json.loads(body_of(requests[0], "m"))}


def test_aiperf_s_latencies_count_from_the_scheduled_time_as_those_of_a_replay() -> None:
    requests = [
        TraceRequest(index=place, timestamp_s=time_s, input_tokens=9, output_tokens=7)
        for place, time_s in ((4, 0.0), (5, 2.0))
    ]
    metrics = {
        "time_to_first_token": {"value": 100.0},
        "request_latency": {"value": 900.0},
        "output_sequence_length": {"value": 7.0},
        "usage_prompt_cache_read_tokens": {"value": 3.0},
    }
    late = {"metadata": {"session_num": 1, "request_start_ns": 6_250_000_000}, "metrics": metrics, "error": None}
    failed = {
        "metadata": {"session_num": 0, "request_start_ns": 5_000_000_000},
        "metrics": {},
        "error": {"code": 503, "message": "no worker"},
    }
    second, first = replay_records(Aiperf({}, [late, failed]), requests, time_scale=0.5)
    assert (first.id, first.error, first.ttft_ms) == ("4", "no worker", None)
    assert (second.id, second.scheduled_s, second.slip_s) == ("5", 1.0, 0.25)
    assert second.ttft_ms == pytest.approx(350.0)
    assert second.e2e_s == pytest.approx(1.15)
    assert (second.output_tokens, second.cached_tokens) == (7, 3)
