"""`gorgo tune`, `history` and `tune-offline`: which proxies, what is printed of a history, and the weights file."""

from __future__ import annotations

import asyncio
import inspect
import json
import shutil
import socket
import sqlite3
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner, Result

from gorgo.cli import app
from gorgo.cli import tune as tune_command
from gorgo.cli.admin import call as group
from gorgo.cli.policies import compose_policy
from gorgo.cli.tune import Changes, TuneSettings, addresses_of, tune
from gorgo.config.load import load_config
from gorgo.errors import TraceError
from tuner.campaign.options import CampaignOptions
from tuner.history import History
from tuner.offline.search import SearchOptions
from tuner.optimizers.registry import OPTIMIZERS
from tuner.sidecar import SidecarOptions

# --- `gorgo history`: what the tuner did, as a table and as JSON.


KEYS = [field.name for field in fields(TuneSettings)]
ASSET = Path(__file__).parents[1] / "tuner" / "history" / "assets" / "schema-0002.sqlite3"


@pytest.fixture
def database(tmp_path: Path) -> str:
    shutil.copyfile(ASSET, tmp_path / "history.sqlite3")
    return f"sqlite:///{tmp_path}/history.sqlite3"


def run(*words: str | Path) -> Result:
    return CliRunner().invoke(app, [str(word) for word in words])


def test_history_shows_each_generation_with_what_became_of_it(database: str) -> None:
    result = run("history", "--database", database)
    assert result.exit_code == 0
    lines = result.stdout.splitlines()
    assert lines[0].startswith("campaign 1: gorgo on http://127.0.0.1:9090")
    taken = [line for line in lines if "w_rtt=" in line]
    assert ["yes" in line for line in taken] == [True, True, False]
    assert "freeze: by hand" in lines[-1]


def test_history_as_json_has_the_rows_and_out_gives_the_report_its_file(database: str, tmp_path: Path) -> None:
    result = run("history", "--database", database, "--json", "--out", tmp_path)
    shown = json.loads(result.stdout)
    assert [row["accepted"] for row in shown["generations"]] == [True, True, False]
    written = json.loads((tmp_path / "history.json").read_text())
    assert [row["weights"] for row in written] == [row["weights"] for row in shown["generations"]]


def test_an_empty_history_says_how_to_begin(tmp_path: Path) -> None:
    result = run("history", "--database", f"sqlite:///{tmp_path}/new.sqlite3")
    assert result.exit_code == 0
    assert "gorgo tune" in result.stdout


def test_a_database_that_is_none_is_one_line_on_stderr(tmp_path: Path) -> None:
    result = run("history", "--database", "nonsense")
    assert result.exit_code == 1
    assert "expected sqlite:///FILE" in result.stderr
    assert result.stdout == ""


def test_history_plots_to_a_file_and_knows_which_kinds_there_are(database: str, tmp_path: Path) -> None:
    assert run("history", "--database", database, "--plot", tmp_path / "h.svg").exit_code == 0
    assert "w_rtt" in (tmp_path / "h.svg").read_text()
    refused = run("history", "--database", database, "--plot", tmp_path / "h.doc")
    assert refused.exit_code == 2
    assert ".svg, .png, .pdf" in refused.stderr


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--mode", "guarded"], "expected one of switchback, paper"),
        (["--algorithm", "gradient"], "expected one of es, es-probes, es-published, es-released, cma, random, fixed"),
        (["--metrics-bind", "9091"], "expected host:port"),
        (["--settings", "missing.yaml"], "cannot be read"),
    ],
)
def test_options_of_tune_that_cannot_be_are_told_with_what_is_expected(words: list[str], message: str) -> None:
    refused = run("tune", *words)
    assert refused.exit_code == 2
    assert message in " ".join(refused.stderr.replace("│", " ").split())


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{hop: 9, window: 8}", "expected no more"),
        ("{alpha: .nan}", "expected a finite number"),
        ("{block_s: .inf}", "expected a finite number"),
        ("{bounds: {w_rtt: 1}}", "bounds.w_rtt (line 1): 1; expected a list"),
        ("{bounds: {w_rtt: [1, 2, 3]}}", "bounds.w_rtt (line 1): a list"),
        ("{initial_weights: {w_rtt: much}}", "initial_weights.w_rtt (line 1): 'much'; expected a number"),
        ("{guard: 1}", "guard (line 1): 1; expected true or false"),
        ("{poll_s: 0.01}", "poll_s (line 1): 0.01; expected a number of at least 0.05"),
        ("pairs: 3\nhops: 9\n", f"hops (line 2): unknown key (did you mean 'hop'?); expected one of {', '.join(KEYS)}"),
        ("", "null; expected a mapping"),
    ],
)
def test_settings_that_cannot_be_are_refused_with_what_is_expected(text: str, message: str, tmp_path: Path) -> None:
    file = tmp_path / "tune.yaml"
    file.write_text(text)
    refused = run("tune", "--settings", file)
    assert refused.exit_code == 2
    assert message in " ".join(refused.stderr.split())


def test_a_dry_run_has_no_initial_weights(tmp_path: Path) -> None:
    file = tmp_path / "tune.yaml"
    file.write_text("initial_weights: {w_rtt: 1}")
    refused = run("tune", "--dry-run", "--settings", file)
    assert refused.exit_code == 2
    assert "leave out initial_weights" in " ".join(refused.stderr.replace("│", " ").split())


def test_tune_without_a_database_ends_at_once(tmp_path: Path) -> None:
    refused = run("tune", "--database", f"sqlite:///{tmp_path}/nowhere/history.sqlite3")
    assert refused.exit_code == 1
    assert "there is no folder" in refused.stderr


def test_tune_without_a_proxy_gives_up_and_says_which_setting_bounds_the_wait(tmp_path: Path) -> None:
    with socket.socket() as taken:  # bound and not listening: refused
        taken.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
        (tmp_path / "tune.yaml").write_text("proxy_wait_s: 0.2")
        words = ("--url", url, "--database", f"sqlite:///{tmp_path}/h.sqlite3", "--settings", tmp_path / "tune.yaml")
        refused = run("tune", *words)
    assert refused.exit_code == 1
    first, *_, last = refused.stderr.splitlines()
    assert "waiting for the proxy, at most another 0 s" in first
    assert last.startswith(f"gorgo: GET {url}/admin/weights: ConnectError")
    assert last.endswith("no proxy for 0.2 s: is --url right? (setting proxy_wait_s)")
    assert TuneSettings().proxy_wait_s == 60.0


def test_the_defaults_of_options_and_settings_are_those_of_the_campaign() -> None:
    defaults = {name: one.default for name, one in inspect.signature(tune).parameters.items()}
    defaults |= {field.name: field.default for field in fields(TuneSettings)}
    ours = {field.name: field.default for field in fields(CampaignOptions)}
    same = set(defaults) & set(ours)
    assert {"mode", "window", "hop", "block_s", "discard_s", "rest_blocks", "alpha", "guard", "max_generations"} <= same
    assert {name: defaults[name] for name in same} == {name: ours[name] for name in same}
    assert TuneSettings().held_out_seeds == SearchOptions().held_out_seeds
    assert tuple(OPTIMIZERS) == tune_command.ALGORITHMS


def test_freeze_takes_its_weights_from_the_history_and_leaves_an_event_there(
    database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[dict[str, Any]] = []

    def call(method: str, url: str, path: str, token: str | None, body: dict[str, Any]) -> dict[str, Any]:
        asked.append(body)
        frozen = {"since": "now", "by": "me", "reason": body["reason"]}
        return {**body, "version": 9, "frozen": frozen, "out_of_range": [], "durable": True}

    monkeypatch.setattr(group, "request_admin", call)
    result = run("freeze", "--weights", "best", "--database", database, "--reason", "held-out week")
    assert result.exit_code == 0, result.output
    assert asked[0]["policy"] == "gorgo"
    assert asked[0]["weights"] == {"w_rtt": 0.276, "w_queue": 0.5}
    assert asked[0]["allow_out_of_range"] is False
    assert "held-out week" in run("history", "--database", database).stdout
    campaign = run("freeze", "--weights", "0", "--campaign", "1", "--database", database)
    assert campaign.exit_code == 0, campaign.output
    other = run("freeze", "--weights", "best", "--campaign", "5", "--database", database)
    assert other.exit_code == 1
    assert "campaign 5 has none" in other.stderr
    alone = run("freeze", "--campaign", "1")
    assert alone.exit_code == 2
    assert "expected --weights best or a generation's number" in " ".join(alone.stderr.split())
    missing = run("freeze", "--weights", "77", "--database", database)
    assert missing.exit_code == 1
    assert "no generation '77'" in missing.stderr


@pytest.mark.parametrize(
    ("column", "value", "message"),
    [
        ("generation.weights", '{"w_rtt": 1e6, "w_queue": 0.5}', "w_rtt"),
        ("generation.weights", '{"w_rtt": -1, "w_queue": 0.5}', "w_rtt"),
        ("generation.weights", '{"w_rtt": NaN, "w_queue": 0.5}', "expected numbers by name"),
        ("generation.weights", '{"__class__": 0.5}', "__class__"),
        ("campaign.policy", "os.system", "os.system"),
        ("campaign.policy", "x" * 10_000_000, "expected a name"),
        ("generation.accepted", "yes", "no generation"),
    ],
    ids=["beyond the bounds", "negative", "NaN", "no weight", "no policy", "a huge name", "no truth value"],
)
def test_a_history_that_somebody_forged_sets_no_weights(
    database: str, monkeypatch: pytest.MonkeyPatch, column: str, value: str, message: str
) -> None:
    def call(*_: object) -> dict[str, Any]:
        raise AssertionError("the proxy was called")

    monkeypatch.setattr(group, "request_admin", call)
    table, name = column.split(".")
    with sqlite3.connect(database.removeprefix("sqlite:///")) as connection:
        connection.execute(f"UPDATE {table} SET {name} = ?", (value,))
    connection.close()
    refused = run("freeze", "--weights", "best", "--database", database)
    assert refused.exit_code in (1, 2)
    assert message in refused.stderr
    assert len(refused.stderr) < 1000
    assert "Traceback" not in refused.stderr


def forge(database: str, reason: str) -> None:
    with sqlite3.connect(database.removeprefix("sqlite:///")) as connection:
        connection.execute("UPDATE generation SET reason = ?", (reason,))
        connection.execute("UPDATE campaign SET target = ?", (reason,))
    connection.close()


def test_texts_of_a_forged_history_are_cut_and_obeyed_by_no_terminal(database: str) -> None:
    forge(database, "\x1b[31m\n\u202e<script>" * 500)
    shown = CliRunner().invoke(app, ["history", "--database", database], color=True)
    assert shown.exit_code == 0
    assert "\x1b" not in shown.stdout
    assert "\u202e" not in shown.stdout
    assert len(shown.stdout.splitlines()) < 10
    assert len(shown.stdout) < 5_000


def test_a_text_that_no_program_of_ours_writes_is_damage(database: str) -> None:
    forge(database, "x" * 1_000_000)
    refused = run("history", "--database", database)
    assert refused.exit_code == 1
    assert "the file is damaged" in refused.stderr
    assert len(refused.stderr) < 1000


@pytest.mark.parametrize("in_order", [True, False])
def test_a_live_tuner_gets_every_option_that_was_given(
    in_order: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[SidecarOptions] = []

    async def run_sidecar(options: SidecarOptions, _reporter: object, _stop: object) -> bool:
        started.append(options)
        return in_order

    monkeypatch.setattr("tuner.sidecar.run_sidecar", run_sidecar)
    monkeypatch.setenv("GORGO_ADMIN_TOKEN", "t")
    words = "--url http://h:1 --database sqlite:///x --algorithm cma --seed 3 --new"
    file = tmp_path / "tune.yaml"
    file.write_text(
        "{initial_weights: {w_rtt: 0.7}, bounds: {w_rtt: [0.01, 9]},"
        " tune_lambda: true, poll_s: 2, proxy_wait_s: 9, pairs: 7, guard: false}"
    )
    assert run("tune", *words.split(), "--metrics-bind", "127.0.0.1:0", "--settings", file).exit_code == (
        0 if in_order else 1
    )
    assert started == [
        SidecarOptions(
            url="http://h:1",
            token="t",
            database="sqlite:///x",
            algorithm="cma",
            campaign=CampaignOptions(pairs=7, guard=False),
            start={"w_rtt": 0.7},
            allow_out_of_range={"w_rtt": (0.01, 9.0)},
            tune_lambda=True,
            seed=3,
            new_campaign=True,
            poll_s=2.0,
            proxy_wait_s=9.0,
            metrics_bind=("127.0.0.1", 0),
        )
    ]


def test_a_decision_log_is_the_campaign_s_filter_under_the_policy_that_is_tuned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[SidecarOptions] = []

    async def run_sidecar(options: SidecarOptions, _reporter: object, _stop: object) -> bool:
        started.append(options)
        return True

    monkeypatch.setattr("tuner.sidecar.run_sidecar", run_sidecar)
    file = tmp_path / "tune.yaml"
    file.write_text(f"decision_log: {tmp_path / 'none.jsonl'}")
    assert run("tune", "--url", "http://h:1", "--settings", file).exit_code == 0
    (options,) = started
    assert options.log_filter is not None
    with pytest.raises(TraceError, match=r"none\.jsonl: No such file or directory; expected an outcome log"):
        options.log_filter("gorgo")


# --- `gorgo tune --every-address`: the proxies behind one name, and the end of a tuner whose proxies have changed.


NAMES = {"pods": ["10.0.0.2", "10.0.0.1", "fd00::1"], "one": ["10.0.0.9"]}


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[str]]:
    """A name server of the test's."""
    known = {name: list(addresses) for name, addresses in NAMES.items()}

    def look_up(host: str, port: int, **_: object) -> list[Any]:
        if host not in known:
            raise socket.gaierror("unknown name")
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port)) for address in known[host] for _ in "ab"]

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    return known


def test_a_name_is_all_of_its_addresses_once_and_in_a_stable_order(names: dict[str, list[str]]) -> None:
    expected = ["http://10.0.0.1:9090", "http://10.0.0.2:9090", "http://[fd00::1]:9090", "http://10.0.0.9:80"]
    assert addresses_of(["http://pods:9090", "http://one", "http://one:80"]) == expected
    with pytest.raises(typer.BadParameter, match=r"--url http://none:1: expected a name with addresses: unknown name"):
        addresses_of(["http://none:1"])


async def test_other_addresses_end_the_tuner_and_a_name_server_that_is_down_does_not(
    names: dict[str, list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tune_command, "RESOLVE_S", 0.0)
    urls, stop = ["http://pods:9090"], asyncio.Event()
    pods = names.pop("pods")
    before = [f"http://{'[' + each + ']' if ':' in each else each}:9090" for each in pods]
    async with Changes(urls, before, stop) as changes:
        for _ in range(5):
            await asyncio.to_thread(lambda: None)
        assert not stop.is_set()
        names["pods"] = pods[::-1]
        for _ in range(5):
            await asyncio.to_thread(lambda: None)
        assert not stop.is_set(), "another order of the same"
        names["pods"] = pods[1:]
        await asyncio.wait_for(stop.wait(), 5)
        assert changes.found


# --- `gorgo tune-offline`: from a recorded window to a weights file.


REGIONS = Path(__file__).parents[2] / "regions.yaml"
WINDOW = ("chat-small", "--limit", "60", "--max-output", "16", "--policy", "gorgo", "--config", REGIONS)
FEW = ("--max-generations", "2", "--seeds", "1", "--jobs", "1")


def run_tune_offline(tmp_path: Path, *words: str | Path) -> Result:
    database = f"sqlite:///{tmp_path}/history.sqlite3"
    return CliRunner().invoke(app, ["tune-offline", "--database", database, *(str(word) for word in words)])


def test_a_search_leaves_rows_and_a_weights_file_that_serve_takes(tmp_path: Path) -> None:
    (tmp_path / "fleet.json").write_text(json.dumps({"replicas": [{"name": "ap-seoul-0", "prefill_slowdown": 1.5}]}))
    settings, out = tmp_path / "few.yaml", tmp_path / "found.json"
    settings.write_text("held_out_seeds: 2\n")
    result = run_tune_offline(
        tmp_path,
        *WINDOW,
        *FEW,
        "--settings",
        tmp_path / "few.yaml",
        "--out",
        out,
        "--fleet",
        tmp_path / "fleet.json",
        "--json",
    )
    assert result.exit_code == 0, result.stderr
    shown = json.loads(result.stdout)
    assert [row["mode"] for row in shown["generations"]] == ["twin"] * 3
    policy, weights = compose_policy(load_config(REGIONS), source=REGIONS, weights_file=out)
    assert (policy.name, dict(weights)) == ("gorgo", shown["weights"])
    assert json.loads(out.read_text())["evidence"]["window"]["calibrated"] is True
    history = History(f"sqlite:///{tmp_path}/history.sqlite3")
    (campaign,) = history.campaigns()
    assert (campaign.target, len(history.generations())) == ("twin of chat-small.jsonl.gz", 3)
    assert campaign.outcome is not None
    assert shown["reason"] in campaign.outcome
    history.close()


def test_a_rehearsal_is_the_live_campaign_along_the_window(tmp_path: Path) -> None:
    (tmp_path / "tune.yaml").write_text("{window: 16, hop: 8, warm_up_s: 1}\n")
    paper = ("--rehearse", "paper", "--settings", tmp_path / "tune.yaml", "--max-generations", "2")
    result = run_tune_offline(tmp_path, *WINDOW, *paper)
    assert result.exit_code == 0, result.stderr
    assert "the start" in result.stdout
    assert "the run as a whole: p95 TTFT" in result.stdout
    history = History(f"sqlite:///{tmp_path}/history.sqlite3")
    assert [row.mode for row in history.generations()][:2] == ["paper", "paper"]
    history.close()
    shown = json.loads(run_tune_offline(tmp_path, *WINDOW, *paper, "--json").stdout)
    assert (shown["row"]["policy"], shown["rollbacks"]) == ("gorgo", 0)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((), "Missing argument"),
        (("chat-small", "--rehearse", "guarded"), "'guarded' is not one of"),
        (("no-such-trace",), "No such file"),
        ((*WINDOW, "--settings", "{initial_weights: {w_queue: 9}}"), "'w_queue' is 9.0; expected a number in"),
        ((*WINDOW, "--settings", "{held_out_seeds: 1}"), "held_out_seeds (line 1): 1; expected a number of at least 2"),
        ((*WINDOW, "--fleet", "missing.json"), "cannot be read"),
    ],
)
def test_what_cannot_be_is_said_before_anything_runs(tmp_path: Path, words: tuple[str, ...], said: str) -> None:
    file = tmp_path / "tune.yaml"
    if words[-2:-1] == ("--settings",):
        file.write_text(words[-1])
        words = (*words[:-1], str(file))
    result = run_tune_offline(tmp_path, "--config", REGIONS, *words)
    assert result.exit_code in (1, 2)
    assert said in " ".join(result.stderr.split())
    assert not (tmp_path / "history.sqlite3").exists()


def test_a_named_fleet_takes_the_place_of_the_replicas(tmp_path: Path) -> None:
    few = ("--max-generations", "1", "--seeds", "1", "--limit", "30", "--jobs", "1", "--json")
    found = [
        run_tune_offline(tmp_path, "chat-small", "--config", REGIONS, *few, *fleet)
        for fleet in ((), ("--fleet", "small-model"))
    ]
    assert [result.exit_code for result in found] == [0, 0], found[1].stderr
    slow, fast = (json.loads(result.stdout)["generations"][0]["objective_ms"] for result in found)
    assert fast < slow
