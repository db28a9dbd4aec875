"""The outcome log: what it has of each attempt, that it has no text, and that a training reads it."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from gorgo.core.training.features import FEATURES
from gorgo.errors import ConfigError
from gorgo.lab.learn import read_outcomes
from gorgo.live import logs
from gorgo.live.telemetry.outcome_log import open_outcome_log
from tests.proxy.conftest import QUIET, Running, Start, config_for, with_replica
from tests.proxy.fakes import DONE, USAGE, Script, answer, chat, delta, stream

CHAT = "/v1/chat/completions"
GOOD = stream(delta("a"), delta("b"), USAGE, DONE)


async def logging_proxy(start: Start, path: Path, *scripts: list[Script], policy: str = "gorgo-ms") -> Running:
    """A proxy with a log, in front of a replica per list."""
    replicas = [await start.replica(*script) for script in scripts]
    config = with_replica(config_for(replicas, replace(QUIET, policy=policy)), 0, accelerator="H100")
    return await start.proxy(config, replicas, outcome_log=path)


async def test_every_ended_attempt_has_a_line_with_all_candidates_and_no_text(start: Start, tmp_path: Path) -> None:
    path = tmp_path / "outcomes.jsonl"
    fleet = await logging_proxy(start, path, [GOOD, GOOD], [GOOD, GOOD])
    secret = "a prompt that is in no log"
    for _ in range(2):
        await fleet.client.post(CHAT, content=chat(stream=True, messages=[{"role": "user", "content": secret * 50}]))
    await fleet.stop()
    text = path.read_text()
    assert secret not in text
    header, first, second = [json.loads(line) for line in text.splitlines()]
    assert header == {
        "gorgo_outcome_log": 1,
        "boot_id": fleet.state.routing.router.boot_id,
        "started_s": header["started_s"],
    }
    for line in (first, second):
        assert line["candidates"] == ["r0", "r1"]
        assert set(line["features"]) == {*FEATURES, "accelerator=H100", "prior_s"}
        assert len(line["cost"]) == 2
        assert (line["policy"], line["result"], line["censored"]) == ("gorgo-ms", "completed", False)
        assert 0 < line["ttft_s"] <= line["e2e_s"]
        assert (line["output_tokens"], line["prompt_tokens"]) == (2, 12)
    assert first["features"]["accelerator=H100"] == [1.0, 0.0]
    assert second["features"]["cached_tokens"][second["chosen"]] > 0
    assert first["group"] == second["group"] != 0
    assert path.stat().st_mode & 0o777 == 0o600
    counted = fleet.state.telemetry.metrics.registry.get_sample_value(
        "gorgo_outcome_log_lines_total", {"result": "written"}
    )
    assert counted == 2
    rows = read_outcomes(path, ("prompt_tokens", "hit_share", "accelerator=H100", "prior_s")).rows
    assert rows.ttft_s.tolist() == pytest.approx([first["ttft_s"], second["ttft_s"]])


async def test_a_failed_attempt_and_its_retry_have_lines_and_one_answer_in_one_piece_has_no_first_token(
    start: Start, tmp_path: Path
) -> None:
    path = tmp_path / "outcomes.jsonl"
    scripts = [answer(500), answer(200)], [GOOD, answer(200)]
    fleet = await logging_proxy(start, path, *scripts, policy="round-robin")
    assert (await fleet.client.post(CHAT, content=chat(stream=True))).status_code == 200
    assert (await fleet.client.post(CHAT, content=chat())).status_code == 200
    await fleet.stop()
    lines = [json.loads(line) for line in path.read_text().splitlines()[1:]]
    results = Counter((line["result"], line["censored"]) for line in lines)
    assert results == {("failed_before_content", True): 1, ("completed", False): 2}
    (whole,) = (line for line in lines if line["unstreamed"])
    assert (whole["ttft_s"], whole["e2e_s"] > 0.0) == (None, True)
    found = read_outcomes(path, ("prompt_tokens", "streamed"))
    assert (len(found.rows), found.left_out) == (3, 0)
    assert found.rows.unstreamed.tolist() == [line["unstreamed"] for line in lines]
    assert found.rows.ttft_s[found.rows.unstreamed].tolist() == [whole["e2e_s"]]


def test_a_wrong_path_is_refused_at_the_start(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot write an outcome log: No such file or directory; expected a file"):
        open_outcome_log(tmp_path / "no" / "log", boot_id="b", clock=lambda: 0.0, count=lambda *_: None)


async def test_a_full_disk_is_logged_and_routing_goes_on(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(logs, "FLUSH_S", 0.01)
    path = tmp_path / "outcomes.jsonl"
    fleet = await logging_proxy(start, path, [GOOD, GOOD])

    def fail(descriptor: int, data: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("gorgo.live.logs.os.write", fail)
    for _ in range(2):
        assert (await fleet.client.post(CHAT, content=chat(stream=True))).status_code == 200
    await fleet.stop()
    monkeypatch.undo()
    assert [record.getMessage() for record in caplog.records].count("outcome_log_failed") == 1
    counted = fleet.state.telemetry.metrics.registry.get_sample_value(
        "gorgo_outcome_log_lines_total", {"result": "failed"}
    )
    assert counted == 2
