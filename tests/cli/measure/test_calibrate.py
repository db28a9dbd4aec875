"""`gorgo calibrate` through its command line, and the profile file that it writes."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from gorgo.cli import app
from gorgo.config.load import load_config
from gorgo.errors import ConfigError
from gorgo.lab.profile_file import read_profile
from gorgo.lab.sim.engine.profiles import EngineProfile, find_profile
from gorgo.lab.simulate.fleet import fleet_of
from tests.lab.calibrate.test_run import served, written

REGIONS = Path(__file__).parents[3] / "regions.yaml"
LLAMA = find_profile("1xH100-Llama-3.1-8B")


def run(*words: str | Path) -> Result:
    return CliRunner().invoke(app, [str(word) for word in words])


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
