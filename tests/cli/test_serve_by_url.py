"""`gorgo serve --replica`, with real processes: engines of this package, and no file."""

from __future__ import annotations

import contextlib
import json
import signal
import urllib.request
from collections.abc import Iterator
from pathlib import Path

from typer.testing import CliRunner

from gorgo.cli import app
from gorgo.config.load import parse_config
from tests.cli.test_processes import ROOT, gorgo, output, running, stopped

LISTENS = r"gorgo serve listening on (http://\S+) \(admin (http://\S+)\)"
ANYWHERE = ("--bind", "127.0.0.1:0", "--admin-bind", "127.0.0.1:0")


@contextlib.contextmanager
def engine(*words: str) -> Iterator[str]:
    """The URL of a simulated engine next to the proxy."""
    config = ("--replica", "us-ashburn-0", "--config", ROOT / "regions.yaml", "--port", "0")
    with running(r"gorgo engine us-ashburn-0 listening on (http://\S+)", "engine", *config, *words) as (said, _):
        yield said[1]


def chat(url: str, model: str) -> tuple[str, dict[str, object]]:
    """The replica of the answer, and the answer."""
    body = {"model": model, "messages": [{"role": "user", "content": "hello"}], "max_tokens": 2}
    request = urllib.request.Request(
        f"{url}/v1/chat/completions", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=30) as response:
        return response.headers["x-gorgo-replica"], json.load(response)


def test_two_urls_are_a_fleet_whose_engines_and_models_are_found(tmp_path: Path) -> None:
    with contextlib.ExitStack() as stack:
        near = stack.enter_context(engine())
        far = stack.enter_context(engine())
        words = ("serve", "--replica", near, "--replica", f"eu={far}", *ANYWHERE)
        said, proxy = stack.enter_context(running(LISTENS, *words))
        assert chat(said[1], "gorgo-sim")[0] in ("local-0", "eu-0")
        with urllib.request.urlopen(f"{said[1]}/v1/models", timeout=30) as response:
            assert [row["id"] for row in json.load(response)["data"]] == ["gorgo-sim"]
        shown = json.loads(output(gorgo("status", "--json", "--url", said[2])))
        assert [(row["name"], row["region"], row["engine"]["name"]) for row in shown["replicas"]] == [
            ("local-0", "local", "sglang"),
            ("eu-0", "eu", "sglang"),
        ]
        assert all(row["max_running_requests"] for row in shown["replicas"])
        assert "local-0, eu-0: sglang 0.5" in output(gorgo("status", "--url", said[2]))
        assert stopped(proxy, signal.SIGTERM) == 0


def test_an_adapter_is_found_where_an_engine_has_it_loaded(tmp_path: Path) -> None:
    text = (ROOT / "regions.yaml").read_text().replace("[gorgo-sim]       #", "[gorgo-sim, sql] #")
    (tmp_path / "regions.yaml").write_text(text)
    with contextlib.ExitStack() as stack:
        without = stack.enter_context(engine())
        loaded = stack.enter_context(engine("--config", str(tmp_path / "regions.yaml")))
        words = ("serve", "--replica", without, "--replica", loaded, "--policy", "round-robin", *ANYWHERE)
        said, _ = stack.enter_context(running(LISTENS, *words))
        assert {chat(said[1], "sql")[0] for _ in range(4)} == {"local-1"}
        assert {chat(said[1], "gorgo-sim:sql")[0] for _ in range(4)} == {"local-1"}
        assert {chat(said[1], "gorgo-sim")[0] for _ in range(4)} == {"local-0", "local-1"}


def test_the_printed_configuration_is_the_file_to_go_on_with() -> None:
    words = ("--replica", "http://a:30000", "--replica", "eu=http://b:30000", "--policy", "nearest", "--print-config")
    config = parse_config(output(gorgo("serve", *words)).encode())
    assert [replica.name for replica in config.replicas] == ["local-0", "eu-0"]
    assert config.proxy.policy == "nearest"


def test_options_that_exclude_each_other_and_wrong_urls_are_usage_errors() -> None:
    for words, said in (
        (["--replica", "http://a", "--config", "regions.yaml"], "--config and --replica: expected one of them"),
        (["--config", "none.yaml"], "expected a regions.yaml file, or gorgo serve --replica URL"),
        (["--engine", "vllm"], "--engine: expected --replica beside it"),
        (["--replica", "a:30000"], "expected URL or REGION=URL"),
        (["--replica", "http://a", "--engine", "tgi"], "replicas[0].engine"),
    ):
        done = CliRunner().invoke(app, ["serve", *words])
        assert done.exit_code == 2, words
        assert said in done.stderr, done.stderr
