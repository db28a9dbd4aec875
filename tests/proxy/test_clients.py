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


async def served(start: Start, folder: Path, *rules: ClientRuleConfig, request_log: Path | None = None) -> Running:
    path = folder / "clients.keys"
    path.write_text("".join(f"{name}:{sha256(key.encode()).hexdigest()}\n" for name, key in KEYS.items()))
    replica = await start.replica(stream(delta("a"), USAGE, DONE))
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
