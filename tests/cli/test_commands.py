"""The commands in this process: what they print, with which exit code, options from the environment, policy and
weights.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import typer
import typer.main
from typer.testing import CliRunner, Result

import gorgo
from gorgo.cli import app
from gorgo.cli.app import app as program
from gorgo.cli.policies import compose_policy
from gorgo.cli.tables import table
from gorgo.config.load import load_config
from gorgo.config.values import BUILT_IN
from gorgo.engines.registry import DIALECTS
from gorgo.errors import ConfigError
from gorgo.policies.registry import POLICIES
from tests.documents import commands

# --- The commands in this process: what they print, where, and with which exit code.


REGIONS = Path(__file__).parents[2] / "regions.yaml"
SHAPE = """\
seed = 1
duration_s = 5.0
applications = 2
application_tokens = 1024
application_share = 0.5
conversations = 3
ramp_s = 1.0
turns_mean = 4.0
think_s_min = 0.5
think_s_mean = 0.5
history_median = 2000
history_sigma = 0.5
turn_median = 200
turn_sigma = 0.5
output_median = 50
output_sigma = 0.5
output_max = 64
single_per_s = 1.0
single_median = 500
single_sigma = 0.5
input_max = 8000
"""


@pytest.fixture
def _no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("GORGO_CONFIG", "GORGO_ADMIN_URL", "GORGO_ADMIN_TOKEN", "GORGO_API_KEY"):
        monkeypatch.delenv(name, raising=False)


def run(*words: str | Path) -> Result:
    return CliRunner().invoke(app, [str(word) for word in words])


def refused(*words: str | Path) -> str:
    """What a command that cannot do its work says: exit 2, one message on stderr, nothing on stdout."""
    result = run(*words)
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    assert "Traceback" not in result.stderr
    return result.stderr


@pytest.mark.usefixtures("_no_environment")
@pytest.mark.parametrize("words", [[], ["serve"], ["freeze"], ["datasets"], ["datasets", "describe"]], ids=" ".join)
def test_h_is_help_in_every_command(words: list[str]) -> None:
    short, long = run(*words, "-h"), run(*words, "--help")
    assert (short.exit_code, short.stdout) == (0, long.stdout)
    assert "Usage:" in short.stdout


def paths(command: Any = None, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    yield path
    for name, inner in getattr(command or typer.main.get_command(app), "commands", {}).items():
        yield from paths(inner, (*path, name))


@pytest.mark.usefixtures("_no_environment")
@pytest.mark.parametrize("path", list(paths()), ids=" ".join)
def test_every_command_explains_itself(path: tuple[str, ...]) -> None:
    result = run(*path, "--help")
    assert result.exit_code == 0
    assert " ".join(["gorgo", *path]) in result.output.replace("root", "gorgo")


@pytest.mark.usefixtures("_no_environment")
def test_help_of_replay_says_which_way_load_and_time_scale_go() -> None:
    words = " ".join(run("replay", "--help").output.replace("│", " ").split())
    assert "0.5 is the same trace in twice the time" in words
    assert "2.0 is the same trace in twice the time, half the load" in words


@pytest.mark.usefixtures("_no_environment")
def test_every_command_with_a_time_scale_takes_a_load() -> None:
    options = {path: run(*path, "--help").output for path in paths()}
    assert {path for path, text in options.items() if "--time-scale" in text} == {
        path for path, text in options.items() if "--load " in text and path != ("overload",)
    }


@pytest.mark.usefixtures("_no_environment")
def test_version_is_the_package_s() -> None:
    assert run("--version").stdout == f"gorgo {gorgo.build_version()}\n"


@pytest.mark.usefixtures("_no_environment")
@pytest.mark.parametrize("words", [("nonsense",), ("check", "--nonsense"), ("replay",), ("engine", "--port", "70000")])
def test_bad_usage_is_exit_code_2(words: tuple[str, ...]) -> None:
    assert refused(*words)


INVALID = {
    "unknown key": ("proxy:", "proxxy:", r"proxxy \(line 8\): unknown key \(did you mean 'proxy'\?\)"),
    "bad url": ("http://127.0.0.1:30001", "30001", r"replicas\[1\]\.url \(line \d+\): 30001; expected text"),
    "duplicate name": (
        "name: ap-seoul-0",
        "name: us-ashburn-0",
        r"replicas\[2\]\.name \(line \d+\): \"us-ashburn-0\" is",
    ),
    "negative rtt": (
        "ap-seoul: 180",
        "ap-seoul: -180",
        r"simulation\.rtt_ms\.ap-seoul \(line \d+\): -180; expected a num",
    ),
    "wrong type": (
        "max_attempts: 3",
        "max_attempts: three",
        r"limits\.max_attempts \(line \d+\): 'three'; expected a wh",
    ),
    "unknown policy": (
        "policy: gorgo-ms",
        "policy: grogo",
        r"proxy\.policy \(line 10\): .grogo. is not a known policy",
    ),
    "weight outside": (
        "# weights: {lambda: 0.2}",
        "weights: {lambda: 50}",
        r"proxy\.weights\.lambda \(line \d+\): 50; expected a number in \[0\.1, 1\]",
    ),
    "unknown profile": ("profile: 2x", "profile: 3x", r"profile \(line \d+\): .3xL40S.* is not a known engine profile"),
}


@pytest.mark.usefixtures("_no_environment")
@pytest.mark.parametrize("case", INVALID)
def test_check_refuses_a_bad_regions_file_and_says_where(tmp_path: Path, case: str) -> None:
    old, new, expected = INVALID[case]
    text = REGIONS.read_text()
    assert old in text
    (tmp_path / "regions.yaml").write_text(text.replace(old, new, 1))
    assert re.search(expected, refused("check", "--config", tmp_path / "regions.yaml"))


@pytest.mark.usefixtures("_no_environment")
@pytest.mark.parametrize("text", ["", "{", "- a", "\x00"])
@pytest.mark.parametrize("command", [("check",), ("serve",), ("engine", "--replica", "a")], ids=" ".join)
def test_every_command_with_a_configuration_refuses_what_is_none(
    tmp_path: Path, command: tuple[str, ...], text: str
) -> None:
    (tmp_path / "bad.yaml").write_text(text)
    assert "bad.yaml: 1 error\n  the file (line" in refused(*command, "--config", tmp_path / "bad.yaml")


@pytest.mark.usefixtures("_no_environment")
def test_check_of_the_shipped_file_says_what_is_in_it() -> None:
    result = run("check", "--config", REGIONS)
    assert result.exit_code == 0
    assert result.stdout == f"{REGIONS}: ok, 3 replicas in 3 regions, policy gorgo-ms\n"


@pytest.mark.usefixtures("_no_environment")
def test_check_warns_of_a_url_with_a_path_and_of_one_used_twice(tmp_path: Path) -> None:
    text = re.sub(r"url: http://127\.0\.0\.1:\d+", "url: http://127.0.0.1:30000/v1", REGIONS.read_text(), count=2)
    (tmp_path / "regions.yaml").write_text(text)
    result = run("check", "--config", tmp_path / "regions.yaml")
    assert result.exit_code == 0
    first, *warnings = result.stdout.splitlines()
    assert first.endswith("ok, 3 replicas in 3 regions, policy gorgo-ms")
    path = "http://127.0.0.1:30000/v1 ends in /v1, which the proxy adds itself; write http://127.0.0.1:30000"
    assert warnings[:2] == [f"  warning: replicas[{number}].url: {path}" for number in (0, 1)]
    assert "replicas[1].url: http://127.0.0.1:30000/v1 is that of replicas[0] (" in warnings[2]
    as_json = json.loads(run("check", "--json", "--config", tmp_path / "regions.yaml").stdout)
    assert [f"  warning: {text}" for text in as_json["warnings"]] == warnings


@pytest.mark.usefixtures("_no_environment")
def test_configuration_comes_from_the_environment_too(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("GORGO_CONFIG", str(tmp_path / "elsewhere.yaml"))
    assert "elsewhere.yaml: cannot be read: No such file" in refused("check")


@pytest.mark.usefixtures("_no_environment")
def test_live_check_names_the_replica_that_is_not_there(tmp_path: Path) -> None:
    text = re.sub(r"http://127\.0\.0\.1:\d+", "http://127.0.0.1:1", REGIONS.read_text())
    (tmp_path / "regions.yaml").write_text(text)
    result = run("check", "--live", "--json", "--config", tmp_path / "regions.yaml")
    assert result.exit_code == 1
    replicas = json.loads(result.stdout)["replicas"]
    assert [row["error"] for row in replicas] == ["connection refused"] * 3
    assert "3 of 3 replicas cannot be reached" in result.stderr


@pytest.mark.usefixtures("_no_environment")
def test_policies_are_listed_with_their_weights() -> None:
    listed = run("policies").stdout.splitlines()
    assert [line.split()[0] for line in listed[1:]] == list(POLICIES)
    assert "w_rtt=0.5 [0.05, 200], w_queue=0.1 [0.02, 5]" in listed[1]
    as_json = json.loads(run("policies", "--json").stdout)
    assert [policy["name"] for policy in as_json] == list(POLICIES)
    assert as_json[0]["weights"][0] == {"name": "w_rtt", "default": 0.5, "low": 0.05, "high": 200.0}


@pytest.mark.usefixtures("_no_environment")
def test_status_without_a_proxy_fails_and_asks_the_right_question() -> None:
    result = run("status", "--url", "http://127.0.0.1:1")
    assert result.exit_code == 1
    assert "http://127.0.0.1:1/admin/status" in result.stderr
    assert "is `gorgo serve` running there?" in result.stderr


@pytest.mark.usefixtures("_no_environment")
@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("engine", "--replica", "nobody"), "no replica named 'nobody'; there are: us-ashburn-0,"),
        (("serve", "--policy", "abacus"), '--policy: "abacus" is not a known policy; expected one of gorgo,'),
        (("serve", "--bind", "here"), "expected host:port"),
        (("serve", "--weights", "none.json"), "none.json: cannot be read as weights"),
    ],
)
def test_names_and_addresses_that_are_wrong_are_refused_before_anything_starts(
    words: tuple[str, ...], expected: str
) -> None:
    message = " ".join(refused(*words, "--config", REGIONS).split())
    assert expected in message


@pytest.mark.usefixtures("_no_environment")
@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("replay", "no-such-trace"), "No such file"),
        (("replay", str(REGIONS)), "is not JSON"),
        (("replay", "t", "--start", "1:99"), "'1:99' is no offset"),
        (("replay", "t", "--time-scale", "0"), "--time-scale 0.0: expected a number greater than 0"),
        (("replay", "t", "--time-scale", "nan"), "--time-scale nan"),
        (("replay", "t", "--load", "0"), "--load 0.0: expected a number greater than 0"),
        (("simulate", "t", "--load", "inf"), "--load inf: expected a number greater than 0"),
        (("demo", "--load", "1e-320"), "--load 1e-320: expected"),
        (("demo", "--load", "2", "--time-scale", "2"), "--load, --time-scale: expected one of the two"),
        (("simulate", "t", "--load", "1", "--time-scale", "1"), "--load, --time-scale: expected one of the two"),
        (("replay", "t", "--spread", "inf"), "--spread inf"),
        (("replay", "t", "--limit", "0"), "'--limit'"),
        (("demo", "--policy", "abacus"), "no policy named 'abacus'"),
        (("datasets", "describe", "no-such-trace"), "No such file"),
        (("datasets", "describe", "chat-small", "--start", "2026-03-01"), "before 2026-04-01T00:00, the date of time"),
        (("datasets", "generate", "no-such-shape", "--out", "x"), "No such file"),
    ],
)
def test_traces_and_filters_that_are_wrong_are_refused(words: tuple[str, ...], expected: str) -> None:
    assert expected in refused(*words)


@pytest.mark.usefixtures("_no_environment")
def test_generated_trace_is_the_same_every_time_and_can_be_described(tmp_path: Path) -> None:
    (tmp_path / "shape.toml").write_text(SHAPE)
    for name in ("one.jsonl.gz", "two.jsonl.gz"):
        assert run("datasets", "generate", tmp_path / "shape.toml", "--out", tmp_path / name).exit_code == 0
    assert (tmp_path / "one.jsonl.gz").read_bytes() == (tmp_path / "two.jsonl.gz").read_bytes()
    (figures,) = json.loads(run("datasets", "describe", tmp_path / "one.jsonl.gz", "--json").stdout)
    assert figures["requests"] > 0
    assert "input tokens, p95" in run("datasets", "describe", tmp_path / "one.jsonl.gz").stdout


@pytest.mark.usefixtures("_no_environment")
def test_other_seed_makes_another_trace(tmp_path: Path) -> None:
    (tmp_path / "shape.toml").write_text(SHAPE)
    for seed in ("1", "2"):
        run("datasets", "generate", tmp_path / "shape.toml", "--seed", seed, "--out", tmp_path / f"{seed}.jsonl")
    assert (tmp_path / "1.jsonl").read_bytes() != (tmp_path / "2.jsonl").read_bytes()


@pytest.mark.usefixtures("_no_environment")
def test_datasets_are_listed_as_a_table_and_as_json() -> None:
    names = [one["name"] for one in json.loads(run("datasets", "list", "--json").stdout)]
    assert [line.split()[0] for line in run("datasets", "list").stdout.splitlines()[1:]] == names


@pytest.mark.usefixtures("_no_environment")
def test_help_does_not_pay_for_what_it_does_not_use() -> None:
    heavy = ("numpy", "pydantic", "httpx", "aiohttp", "yaml", "starlette")
    code = f"import sys, gorgo.cli; print([name for name in {heavy} if name in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


@pytest.mark.usefixtures("_no_environment")
def test_named_fleets_are_listed_with_their_engines() -> None:
    shown = run("fleets")
    assert shown.exit_code == 0
    assert "dense-70b" in shown.stdout
    listed = {one["name"]: one for one in json.loads(run("fleets", "--json").stdout)}
    assert [replica["profile"]["scheduler"] for replica in listed["vllm"]["replicas"]] == ["vllm"] * 3
    assert [replica["profile"]["prefix_cache"] for replica in listed["no-prefix-cache"]["replicas"]] == [False] * 3


# --- Every option of every command can come from the environment.


#: Shared by several commands under one name.
SHARED = {"GORGO_CONFIG", "GORGO_ADMIN_URL", "GORGO_DATABASE_URL"}


def test_every_option_of_every_command_is_read_from_a_variable_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, tuple[str, str]] = {}
    for name, command in commands():
        for option in command.params:
            if option.param_type_name != "option" or not name:  # those of `gorgo` itself end the program
                continue
            flag = option.opts[0]
            expected = f"GORGO {name} {flag.removeprefix('--')}".upper().replace("-", "_").replace(" ", "_")
            assert option.envvar in {expected, *SHARED}, (name, flag)
            if option.envvar == expected:
                assert expected not in seen, (name, flag, seen.get(expected))
                seen[expected] = name, flag
            monkeypatch.setenv(option.envvar, "1")
            context = typer.Context(command, info_name=name)
            value, source = option.consume_value(context, {})
            monkeypatch.delenv(option.envvar)
            assert source.name == "ENVIRONMENT", (name, flag)
            assert value in ("1", ["1"]), (name, flag)
    assert len(seen) > 90


def test_a_flag_and_a_repeated_option_come_from_the_environment_and_the_command_line_goes_first() -> None:
    trace = str(Path(__file__).parents[2] / "datasets" / "chat-small.jsonl.gz")
    words = ["simulate", trace, "--limit", "5"]
    env = {"GORGO_SIMULATE_JSON": "1", "GORGO_SIMULATE_POLICY": "nearest random", "GORGO_SIMULATE_SEEDS": "1"}
    done = CliRunner().invoke(program, words, env=env)
    assert done.exit_code == 0, done.output
    assert {row["policy"] for row in json.loads(done.stdout)} >= {"nearest", "random"}
    chosen = CliRunner().invoke(program, [*words, "--policy", "nearest"], env=env)
    assert "random" not in {row["policy"] for row in json.loads(chosen.stdout)}


def test_a_wrong_value_names_the_variable_and_help_shows_it() -> None:
    done = CliRunner().invoke(program, ["tune"], env={"GORGO_TUNE_BUDGET_S": "soon"})
    assert done.exit_code == 2
    assert "GORGO_TUNE_BUDGET_S" in done.output
    assert "GORGO_TUNE_BUDGET_S" in CliRunner().invoke(program, ["tune", "--help"]).output


def test_a_service_of_kubernetes_with_the_name_of_a_command_is_no_option() -> None:
    env = {"GORGO_ENGINE_PORT": "tcp://10.0.0.1:80", "GORGO_ENGINE_PORT_80_TCP": "tcp://10.0.0.1:80"}
    config = str(Path(__file__).parents[2] / "regions.yaml")
    words = ["engine", "--replica", "missing", "--config", config]
    done = CliRunner().invoke(program, words, env=env)
    assert done.exit_code == 2
    assert "no replica named 'missing'" in done.output
    done = CliRunner().invoke(program, words, env={"GORGO_ENGINE_PORT": "eighty"})
    assert "GORGO_ENGINE_PORT" in done.output


# --- Which policy and which weights win.


SOURCE = Path(__file__).parents[2] / "regions.yaml"
SHIPPED = load_config(SOURCE)
#: The published policy: its weights have a box in which nothing is a preference.
CONFIG = replace(SHIPPED, proxy=replace(SHIPPED.proxy, policy="gorgo"))


def weights_file(folder: Path, text: str) -> Path:
    (folder / "weights.json").write_text(text)
    return folder / "weights.json"


def test_configuration_alone_gives_its_policy_and_weights() -> None:
    config = replace(CONFIG, proxy=replace(CONFIG.proxy, weights={"w_rtt": 0.7}))
    policy, weights = compose_policy(config, source=SOURCE)
    assert (policy.name, weights["w_rtt"], weights["w_queue"], weights.version) == ("gorgo", 0.7, 0.1, 1)


def test_other_policy_does_not_inherit_the_weights_of_the_configured_one() -> None:
    policy, weights = compose_policy(CONFIG, source=SOURCE, policy="random")
    assert (policy.name, dict(weights)) == ("random", {})


def test_weights_file_brings_its_policy(tmp_path: Path) -> None:
    file = weights_file(tmp_path, '{"policy": "gorgo", "weights": {"w_queue": 0.2}}')
    policy, weights = compose_policy(CONFIG, source=SOURCE, weights_file=file)
    assert (policy.name, dict(weights)) == ("gorgo", {"w_rtt": 0.5, "w_queue": 0.2})


def test_weights_file_for_another_policy_is_an_error_not_ignored(tmp_path: Path) -> None:
    file = weights_file(tmp_path, '{"policy": "gorgo", "weights": {}}')
    with pytest.raises(ConfigError, match="for the policy 'gorgo', not for 'random'"):
        compose_policy(CONFIG, source=SOURCE, policy="random", weights_file=file)


@pytest.mark.parametrize(
    ("weights", "expected"),
    [({"w_rtt": 900.0}, r"'w_rtt' is 900.0; expected a number in \[0.05, 200\]"), ({"rtt": 1.0}, "'rtt' is unknown")],
)
def test_weights_outside_their_box_name_the_file(weights: dict[str, float], expected: str) -> None:
    config = replace(CONFIG, proxy=replace(CONFIG.proxy, weights=weights))
    with pytest.raises(ConfigError, match=r"regions\.yaml: proxy.policy and proxy.weights: .*" + expected):
        compose_policy(config, source=SOURCE)


def test_weights_file_outside_the_box_is_an_error_unless_it_says_that_it_means_it(tmp_path: Path) -> None:
    file = weights_file(tmp_path, '{"policy": "gorgo", "weights": {"w_rtt": 900}}')
    with pytest.raises(
        ConfigError, match=r"weights\.json: weight 'w_rtt' is 900.0; expected a number in \[0.05, 200\]"
    ):
        compose_policy(CONFIG, source=SOURCE, weights_file=file)
    file = weights_file(tmp_path, '{"policy": "gorgo", "weights": {"w_rtt": 900}, "widened": true}')
    _, weights = compose_policy(CONFIG, source=SOURCE, weights_file=file)
    assert weights["w_rtt"] == 900.0


def test_weights_that_are_not_finite_are_refused(tmp_path: Path) -> None:
    file = weights_file(tmp_path, '{"policy": "gorgo", "weights": {"w_rtt": NaN}}')
    with pytest.raises(ConfigError, match="'w_rtt' is NaN, no number"):
        compose_policy(CONFIG, source=SOURCE, weights_file=file)


def test_every_engine_of_this_package_that_the_configuration_allows_has_a_dialect_and_the_other_way_round() -> None:
    assert set(BUILT_IN) == set(DIALECTS)


@pytest.mark.parametrize(
    ("shadow", "expected"),
    [
        ("nobody", "no policy named 'nobody'"),
        ("random", "'random' has no cost"),
        ("gorgo-ms", "different prefix indexes .*'gorgo' the published one, 'gorgo-ms' the events one"),
    ],
)
def test_a_shadow_that_cannot_go_with_the_policy_names_the_file(shadow: str, expected: str) -> None:
    config = replace(CONFIG, proxy=replace(CONFIG.proxy, shadow_policy=shadow))
    with pytest.raises(ConfigError, match=r"regions\.yaml: proxy.shadow_policy: .*" + expected):
        compose_policy(config, source=SOURCE)


def test_a_shadow_goes_with_another_policy_of_the_command_line() -> None:
    config = replace(CONFIG, proxy=replace(CONFIG.proxy, shadow_policy="gorgo-ms"))
    assert compose_policy(config, source=SOURCE, policy="random")[0].name == "random"


# --- Plain aligned tables.


def test_text_goes_left_numbers_right_and_unknown_is_a_dash() -> None:
    shown = table(["name", "ms", "n"], [["a", 2.04, 12345], ["long", None, 1]])
    assert shown.splitlines() == ["name   ms       n", "a     2.0  12,345", "long    -       1"]


@pytest.mark.parametrize(
    ("cell", "shown"),
    [
        (1000.0, "1,000"),
        (-1000.0, "-1,000"),
        (999.0, "999.0"),
        (1000.5, "1,000.5"),
        (0.0, "0.0"),
        (12345, "12,345"),
        ("12345", "12345"),
        (None, "-"),
    ],
)
def test_a_large_whole_number_has_no_decimals(cell: float | str | None, shown: str) -> None:
    assert table(["x"], [[cell]]).split() == ["x", shown]


def test_a_column_with_a_word_goes_left() -> None:
    assert table(["long head", "n"], [["a", 1], [None, "word"]]).splitlines() == [
        "long head  n",
        "a          1",
        "-          word",
    ]


def test_no_rows_leave_the_header() -> None:
    assert table(["a", "b"], []) == "a  b"
