"""Marked secrets go in; everything that comes out is searched for them."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from hashlib import sha256
from pathlib import Path

import pytest

from gorgo.config.model import ClientsConfig
from gorgo.live.control.state_file import StateFile
from gorgo.live.logs import JsonLines
from tests.proxy.conftest import TOKEN, Start, config_for
from tests.proxy.fakes import DONE, USAGE, answer, delta, reset_after, stream

#: Also on the HTTP of `gorgo serve --plain`.
IN_BOTH_FORMS = True

CHAT = "/v1/chat/completions"
PROMPT, CLIENT_KEY, ENGINE_KEY = "MARKED-PROMPT-5f1c", "MARKED-CLIENT-KEY-77aa", "MARKED-ENGINE-KEY-90bb"
WRONG_KEY, HEADER, ANSWER = "MARKED-WRONG-KEY-12cd", "MARKED-HEADER-34ef", "MARKED-ANSWER-56ab"
SECRETS = (PROMPT, CLIENT_KEY, ENGINE_KEY, WRONG_KEY, HEADER, ANSWER, TOKEN)
CLIENT_HASH = sha256(CLIENT_KEY.encode()).hexdigest()


async def test_no_secret_is_in_logs_metrics_decisions_samples_files_or_errors(
    start: Start, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    replicas = [
        await start.replica(
            stream(delta(ANSWER), USAGE, DONE), answer(500, ANSWER.encode()), answer(200, ANSWER.encode())
        ),
        await start.replica(reset_after(), reset_after(delta(ANSWER)), answer(503, ANSWER.encode())),
    ]
    config = config_for(replicas)
    rows = tuple(replace(row, api_key_env="ENGINE") for row in config.replicas)
    keys = tmp_path / "clients.keys"
    keys.write_text(f"team:{CLIENT_HASH}")
    config = replace(config, replicas=rows, clients=ClientsConfig(keys_file=str(keys)))
    fleet = await start.proxy(
        config,
        replicas,
        environ={"ENGINE": ENGINE_KEY},
        state_file=StateFile(tmp_path / "state.json"),
        request_log=tmp_path / "requests.jsonl",
    )
    keys.unlink()  # the one file that may hold a hash of a key
    good = {"authorization": f"Bearer {CLIENT_KEY}", "x-odd": HEADER, "cookie": HEADER, "x-session-id": HEADER}
    wrong = good | {"authorization": f"Bearer {WRONG_KEY}"}
    said: list[str] = []
    for n in range(8):
        for body in (
            json.dumps({"model": "m", "stream": n % 2 == 0, "messages": [{"role": "user", "content": PROMPT}]}),
            f'{{"messages": "{PROMPT}',
            json.dumps({"messages": PROMPT}),
            json.dumps({"model": "m", "messages": [{"role": PROMPT, "content": {PROMPT: 1}}]}),
        ):
            response = await fleet.client.post(CHAT, content=body, headers=good | {"x-request-id": f"id-{n}"})
            # What a replica answers is the client's own; what the proxy says itself is searched.
            said.append(str(response.headers) + (response.text if ANSWER not in response.text else ""))
        for path in (CHAT, "/v1/models", f"/{PROMPT}?key={CLIENT_KEY}"):
            response = await fleet.client.post(path, content=PROMPT, headers=wrong)
            said.append(str(response.headers) + response.text)
    paths = ("/admin/fleet", "/admin/samples", "/admin/weights", "/admin/policy", "/admin/decisions/id-0")
    said.extend([(await fleet.admin.get(path)).text for path in paths])
    said.append((await fleet.admin.get("/admin/fleet", headers={"authorization": f"Bearer {WRONG_KEY}"})).text)
    said.append((await fleet.admin.put("/admin/weights", content=json.dumps({PROMPT: WRONG_KEY})[:-1])).text)
    said.append((await fleet.client.get("/metrics")).text)
    await fleet.idle()
    await fleet.stop()
    await fleet.stop()
    lines = [JsonLines().format(record) for record in caplog.records if record.name.startswith("gorgo")]
    assert sum('"event": "request"' in line for line in lines) >= 32
    files = [path.read_text() for path in tmp_path.iterdir()]
    assert files
    for text in (*said, *lines, *files):
        for secret in (*SECRETS, CLIENT_HASH):
            assert secret not in text, text
    for replica in replicas:
        for seen in replica.seen:
            sent = b" ".join(value for _, value in seen.headers).decode("latin-1")
            assert CLIENT_KEY not in sent
            assert seen.header("authorization") == [f"Bearer {ENGINE_KEY}"]


def test_configuration_and_targets_do_not_show_keys() -> None:
    from gorgo.live.replica_secrets import ReplicaSecrets

    assert repr(ReplicaSecrets("sk-engine", "token-of-a-replica")) == "ReplicaSecrets()"
