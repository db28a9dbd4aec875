"""`gorgo serve` over `gorgo engine --kv-events` as processes, and what the command line says without pyzmq."""

from __future__ import annotations

import json
import re
import urllib.request
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from gorgo.cli.app import app
from gorgo.live import extras
from tests.cli.test_processes import TOKEN, running
from tests.live.kv_events.extra import needs_zmq

CONFIG = """\
proxy: {{region: here, policy: sticky-least-loaded, bind: "127.0.0.1:0", admin_bind: "127.0.0.1:0"}}
regions: [{{name: here}}]
models: [{{name: m, tokenizer: simulated}}]
replicas:
  - {{name: a, region: here, url: "{a}", engine: auto, models: [m], kv_events: auto}}
  - {{name: b, region: here, url: "{b}", engine: auto, models: [m], kv_events: auto}}
simulation: {{rtt_ms: {{here: 1}}}}
"""
ENGINE = r"gorgo engine . listening on (http://127\.0\.0\.1:\d+)"
SERVE = r"gorgo serve listening on (http://\S+) \(admin (http://\S+)\)"


def test_without_pyzmq_check_names_the_key_and_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extras, "find_spec", lambda _: None)
    config = tmp_path / "regions.yaml"
    config.write_text(CONFIG.format(a="http://127.0.0.1:1", b="http://127.0.0.1:2"))
    result = CliRunner().invoke(app, ["check", "--config", str(config)], env={"GORGO_ADMIN_TOKEN": TOKEN})
    assert result.exit_code == 2
    assert (
        "replicas[0].kv_events (line 5): KV events need the extra: pip install 'gorgo-router[events]'" in result.output
    )
    assert "replicas[1].kv_events (line 6)" in result.output


@pytest.mark.parametrize("endpoint", ["5557", "tcp://127.0.0.1", "ipc:///tmp/x", "http://127.0.0.1:5557"])
def test_an_address_that_is_none_is_a_usage_error(endpoint: str, tmp_path: Path) -> None:
    config = tmp_path / "regions.yaml"
    config.write_text(CONFIG.format(a="http://127.0.0.1:1", b="http://127.0.0.1:2"))
    words = ["engine", "--replica", "a", "--config", str(config), "--kv-events", endpoint]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 2
    assert "--kv-events: expected tcp://host:port" in result.output


def asked(url: str, body: object | None = None) -> tuple[Any, Any]:
    data = None if body is None else json.dumps(body).encode()
    headers = {"content-type": "application/json", "authorization": f"Bearer {TOKEN}"}
    with urllib.request.urlopen(urllib.request.Request(url, data, headers), timeout=20) as answer:
        return json.loads(answer.read()), answer.headers


@pytest.mark.system
@needs_zmq
def test_serve_over_two_engines_decides_by_their_events(tmp_path: Path) -> None:
    config = tmp_path / "regions.yaml"
    config.write_text(CONFIG.format(a="http://127.0.0.1:1", b="http://127.0.0.1:2"))
    with ExitStack() as processes:
        urls = {}
        for name in ("a", "b"):
            words = ("engine", "--replica", name, "--config", config, "--port", "0", "--kv-events", "tcp://127.0.0.1:0")
            said, _ = processes.enter_context(running(ENGINE, *words))
            urls[name] = said[1]
        config.write_text(CONFIG.format(**urls))
        said, _ = processes.enter_context(running(SERVE, "serve", "--config", config))
        body = {"model": "m", "prompt": "".join(f"{number:04d}" for number in range(512)), "max_tokens": 1}
        sources, replicas = [], set()
        for _ in range(50):
            _, headers = asked(f"{said[1]}/v1/completions", body)
            found, _ = asked(f"{said[2]}/admin/decisions/{headers['x-request-id']}")
            decision = found["decisions"][-1]
            sources.append(decision["cache_source"])
            replicas.add(decision["replica"])
            if sources[-1] == "events":
                break
        assert sources[-1] == "events", sources
        assert decision["estimated_cached_tokens"] >= 512 - 16
        assert re.fullmatch("[ab]", decision["replica"])
        assert len(replicas) == 1, "the prompt is on one of them"
