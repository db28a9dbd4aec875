"""What `gorgo check` says of valid settings that are rarely meant so: unused reports, and scrapes that are too slow."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from gorgo.cli.app import app

CONFIG = """\
proxy: {{region: here, bind: "127.0.0.1:0", admin_bind: "127.0.0.1:0"{proxy}}}
regions: [{{name: here}}]
replicas: [{{name: a, region: here, url: "http://127.0.0.1:1"{replica}}}]
models: [{models}]
"""


def warnings(tmp_path: Path, *, proxy: str = "", replica: str = "", models: str = "") -> list[str]:
    config = tmp_path / "regions.yaml"
    config.write_text(CONFIG.format(proxy=proxy, replica=replica, models=models))
    result = CliRunner().invoke(app, ["check", "--config", str(config), "--no-files", "--json"])
    assert result.exit_code == 0, result.output
    found: list[str] = json.loads(result.output)["warnings"]
    return found


@pytest.mark.parametrize("reports", ["kv_events: auto", "push_token_env: PUSH"])
@pytest.mark.parametrize(
    ("proxy", "replica", "models", "said"),
    [
        ("", "", "", "history: no tokenizer for any model; set models[].tokenizer"),
        ("", ", models: [m]", "", "history: no tokenizer for m; set models[].tokenizer"),
        ("", ", models: [m]", "{name: n, tokenizer: simulated}", "history: no tokenizer for m; set models[].tokenizer"),
        (
            ", policy: lodestar",
            "",
            "{name: m, tokenizer: simulated}",
            "history: policy lodestar reads no reports of caches",
        ),
        (", policy: round-robin", "", "", "history: policy round-robin reads no reports of caches"),
    ],
)
def test_reports_of_caches_that_no_decision_uses_are_named(
    tmp_path: Path, reports: str, proxy: str, replica: str, models: str, said: str
) -> None:
    key = reports.partition(":")[0]
    found = warnings(tmp_path, proxy=proxy, replica=f"{replica}, {reports}", models=models)
    assert f"replicas[0].{key}: {said}" in found


@pytest.mark.parametrize(
    ("replica", "models"),
    [
        (", kv_events: auto, models: [m]", "{name: m, tokenizer: simulated}"),
        (", kv_events: auto, models: [alias]", "{name: m, aliases: [alias], tokenizer: simulated}"),
        (", kv_events: auto", "{name: m, tokenizer: simulated}"),
        ("", ""),
    ],
)
def test_reports_that_decisions_can_use_are_no_matter_for_a_warning(tmp_path: Path, replica: str, models: str) -> None:
    assert warnings(tmp_path, replica=replica, models=models) == []


@pytest.mark.parametrize(
    ("policy", "interval", "said"),
    [
        ("policy: predicted-latency", "30", "predicted-latency needs queued_requests, used_tokens at most 1 s old"),
        ("shadow_policy: predicted-latency, policy: least-load", "5", "predicted-latency needs queued_requests"),
    ],
)
def test_a_scrape_interval_that_is_too_slow_for_the_policy_is_named(
    tmp_path: Path, policy: str, interval: str, said: str
) -> None:
    (found,) = warnings(tmp_path, proxy=f", {policy}, scrape_interval_s: {interval}")
    assert found.startswith(f"proxy.scrape_interval_s: {interval} s is too slow: {said}")


@pytest.mark.parametrize("proxy", [", policy: predicted-latency", ", scrape_interval_s: 600"])
def test_the_default_interval_suits_every_policy_and_others_need_none(tmp_path: Path, proxy: str) -> None:
    assert warnings(tmp_path, proxy=proxy) == []
