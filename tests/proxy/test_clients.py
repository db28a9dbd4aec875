"""Two clients with a key each, over real sockets: whose request it was is in every record, and the key in none."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from hashlib import sha256
from pathlib import Path

import httpx
import pytest

from gorgo.config.model import ClientRuleConfig, ClientsConfig
from tests.proxy.conftest import Running, Start, config_for, until, with_replica
from tests.proxy.fakes import DONE, chat, delta, event, stream

CHAT = "/v1/chat/completions"
USAGE = event({"choices": [], "usage": {"prompt_tokens": 100, "completion_tokens": 20}})
KEYS = {"team-a": "KEY-OF-TEAM-A", "team-b": "KEY-OF-TEAM-B"}


async def served(
    start: Start, folder: Path, *rules: ClientRuleConfig, request_log: Path | None = None, usage: bytes = USAGE
) -> Running:
    path = folder / "clients.keys"
    path.write_text("".join(f"{name}:{sha256(key.encode()).hexdigest()}\n" for name, key in KEYS.items()))
    replica = await start.replica(stream(delta("a"), usage, DONE))
    config = with_replica(config_for([replica]), 0, models=("m", "n"))
    config = replace(config, clients=ClientsConfig(keys_file=str(path), rules=rules))
    return await start.proxy(config, [replica], request_log=request_log)


async def post(fleet: Running, client: str, **body: object) -> httpx.Response:
    headers = {"authorization": f"Bearer {KEYS[client]}"}
    return await fleet.client.post(CHAT, content=chat(stream=True, **body), headers=headers)


async def test_name_and_model_are_in_each_record_and_the_key_in_none(
    start: Start, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "gorgo")
    fleet = await served(start, tmp_path, request_log=tmp_path / "requests.jsonl")
    asked = [("team-a", "m"), ("team-b", "n"), ("team-a", "n")]
    answers = [await post(fleet, client, model=model) for client, model in asked]
    assert [answer.status_code for answer in answers] == [200, 200, 200]

    lines = [record.fields for record in caplog.records if record.getMessage() == "request"]  # type: ignore[attr-defined]
    assert [(line["client"], line["model"]) for line in lines] == asked
    samples = (await fleet.admin.get("/admin/samples")).json()["samples"]
    assert [(sample["client"], sample["model"]) for sample in samples] == asked
    listed = (await fleet.admin.get("/admin/decisions")).json()["decisions"]
    assert [(row["client"], row["model"]) for row in reversed(listed)] == asked
    one = await fleet.admin.get(f"/admin/decisions/{answers[1].headers['x-request-id']}")
    assert (one.json()["decisions"][0]["client"], one.json()["decisions"][0]["model"]) == ("team-b", "n")
    await until(lambda: len((tmp_path / "requests.jsonl").read_text().splitlines()) == 4)
    _, *written = map(json.loads, (tmp_path / "requests.jsonl").read_text().splitlines())
    assert [(line["client"], line["model"]) for line in written] == asked

    shown = [json.dumps(lines), json.dumps(samples), one.text, (tmp_path / "requests.jsonl").read_text()]
    shown.append((await fleet.admin.get("/admin/status")).text)
    assert not [key for key in KEYS.values() for text in shown if key in text]


async def test_tokens_and_429s_of_each_client_are_metrics_and_in_the_status(start: Start, tmp_path: Path) -> None:
    fleet = await served(start, tmp_path, ClientRuleConfig(name="team-b", requests_per_minute=6.0))
    for client, model, status in (
        ("team-a", "m", 200),
        ("team-a", "n", 200),
        ("team-b", "m", 200),
        ("team-b", "m", 429),
        ("team-a", "canary", 404),
    ):
        assert (await post(fleet, client, model=model)).status_code == status
    text = (await fleet.client.get("/metrics")).text
    lines = {line for line in text.splitlines() if line.startswith("gorgo_client_") and "_created" not in line}
    assert {line for line in lines if "aborts" not in line} == {
        'gorgo_client_requests_total{client="team-a",model="m",status="2xx"} 1.0',
        'gorgo_client_requests_total{client="team-a",model="n",status="2xx"} 1.0',
        'gorgo_client_requests_total{client="team-a",model="other",status="4xx"} 1.0',
        'gorgo_client_requests_total{client="team-b",model="m",status="2xx"} 1.0',
        'gorgo_client_requests_total{client="team-b",model="m",status="4xx"} 1.0',
        'gorgo_client_tokens_total{client="team-a",kind="output",model="m"} 20.0',
        'gorgo_client_tokens_total{client="team-a",kind="output",model="n"} 20.0',
        'gorgo_client_tokens_total{client="team-a",kind="prompt",model="m"} 100.0',
        'gorgo_client_tokens_total{client="team-a",kind="prompt",model="n"} 100.0',
        'gorgo_client_tokens_total{client="team-a",kind="output",model="other"} 0.0',
        'gorgo_client_tokens_total{client="team-a",kind="prompt",model="other"} 0.0',
        'gorgo_client_tokens_total{client="team-b",kind="output",model="m"} 20.0',
        'gorgo_client_tokens_total{client="team-b",kind="prompt",model="m"} 100.0',
        'gorgo_client_rejects_total{client="team-b",reason="client_rate"} 1.0',
    }
    shown = (await fleet.admin.get("/admin/status")).json()["clients"]
    assert shown == [
        {"name": "team-a", "requests": 3, "tokens": 240, "rejected": 0},
        {"name": "team-b", "requests": 2, "tokens": 120, "rejected": 1},
    ]


async def test_a_client_over_its_tokens_per_minute_gets_a_429_with_retry_after_and_others_do_not(
    start: Start, tmp_path: Path
) -> None:
    """The engine reports 120 tokens against 10 at once: it can leave a debt of a minute, at one a second."""
    fleet = await served(start, tmp_path, ClientRuleConfig(name="team-a", tokens_per_minute=60.0))
    assert (await post(fleet, "team-a", model="m")).status_code == 200
    await until(lambda: fleet.state.routing.router.in_flight == 0)
    refused = await post(fleet, "team-a", model="m")
    assert (refused.status_code, refused.json()["error"]["code"]) == (429, "client_tokens")
    assert refused.json()["error"]["message"] == ("this key may use 60 tokens a minute, prompts and answers together")
    assert 50 < int(refused.headers["retry-after"]) <= 60
    assert [(await post(fleet, "team-b", model="m")).status_code for _ in range(3)] == [200, 200, 200]
    rows = {row["name"]: row for row in (await fleet.admin.get("/admin/status")).json()["clients"]}
    assert (rows["team-a"]["rejected"], rows["team-b"]["rejected"], rows["team-b"]["tokens"]) == (1, 0, 360)


async def test_a_client_is_charged_no_more_than_an_answer_can_have(start: Start, tmp_path: Path) -> None:
    """600,000 tokens a minute, 100,000 of them at once; the answer has some hundred bytes, or a limit of ten."""
    lie = event(
        {"choices": [], "usage": {"prompt_tokens": 10**15, "cached_tokens": 10**15, "completion_tokens": 10**15}}
    )
    rule = ClientRuleConfig(name="team-a", tokens_per_minute=600_000.0)
    fleet = await served(start, tmp_path, rule, usage=lie)
    for limit, most in (({}, 5000), ({"max_tokens": 10}, 10)):
        assert (await post(fleet, "team-a", model="m", **limit)).status_code == 200
        await until(lambda: fleet.state.routing.router.in_flight == 0)
        sample = (await fleet.admin.get("/admin/samples")).json()["samples"][-1]
        assert sample["output_tokens"] <= most
        assert sample["cached_tokens"] <= sample["input_tokens"] <= 5000
    assert (await post(fleet, "team-a", model="m")).status_code == 200
