"""Requests of any kind over a socket: an answer below 500 or the replica's own, and a proxy that goes on."""

from __future__ import annotations

import asyncio
import json
import logging
from random import Random

import pytest

from gorgo.live.request.parse import INFERENCE_ROUTES
from tests.proxy.conftest import Start
from tests.proxy.fakes import answer, chat
from tests.proxy.fuzz.mutate import EXAMPLES, SPLINTERS, mutated, odd_body, odd_value
from tests.proxy.raw import connected

ADMIN = (
    ("PUT", "/admin/weights"),
    ("PUT", "/admin/policy"),
    ("POST", "/admin/freeze"),
    ("POST", "/admin/unfreeze"),
    ("POST", "/admin/flush"),
    ("POST", "/admin/replicas/r0/drain"),
    ("GET", "/admin/samples"),
)
ADMIN_KEYS = (
    "weights",
    "policy",
    "version",
    "expected_version",
    "allow_out_of_range",
    "reason",
    "by",
    "replica",
    "drain",
    "",
)


def no_fault(caplog: pytest.LogCaptureFixture) -> None:
    ours = [record for record in caplog.records if record.name.startswith(("gorgo", "asyncio"))]
    assert [record for record in ours if record.levelno >= logging.ERROR] == []


async def test_body_of_any_kind_is_passed_on_or_refused(start: Start, caplog: pytest.LogCaptureFixture) -> None:
    fleet = await start.fleet([answer(200)])
    chance = Random("bodies")
    for _ in range(EXAMPLES * 2):
        route, body = chance.choice(INFERENCE_ROUTES), odd_body(chance)
        response = await fleet.client.post(route, content=body)
        assert response.status_code in (200, 400, 404), body
        if response.status_code == 200:
            assert fleet.replicas[0].seen[-1].body == body
        else:
            assert response.json()["error"]["code"]
    await fleet.idle()
    no_fault(caplog)


async def test_bytes_of_any_kind_are_answered_or_cut(start: Start, caplog: pytest.LogCaptureFixture) -> None:
    fleet = await start.fleet([answer(200)], header_timeout_s=0.05, body_timeout_s=0.05)
    chance = Random("bytes")
    body = chat()
    good = b"POST /v1/chat/completions HTTP/1.1\r\nhost: g\r\nx-request-id: a\r\ncontent-type: application/json\r\n"
    good += b"content-length: %d\r\nconnection: close\r\n\r\n%b" % (len(body), body)
    for _ in range(EXAMPLES):
        request = mutated(chance, good)
        async with connected(fleet.addresses.data) as client:
            client.writer.write(request)
            try:
                said = await client.head() if request else b""
            except (asyncio.IncompleteReadError, ConnectionError):
                said = b""  # cut
        assert not said or 200 <= int(said.split()[1]) < 505, request
    assert (await fleet.client.post("/v1/chat/completions", content=body)).status_code == 200
    await fleet.idle()
    no_fault(caplog)


async def test_header_of_any_kind_is_no_fault(start: Start, caplog: pytest.LogCaptureFixture) -> None:
    fleet = await start.fleet([answer(200)])
    chance = Random("headers")
    names = [b"x-request-id", b"content-type", b"x-session-id", b"authorization", b"expect", b"te", b"connection"]
    names += [b"accept-encoding", b"x-gorgo-priority", b"x-slo-ttft-ms", b"x-llm-d-slo-ttft-ms", b"cookie"]
    names += [b"x-gorgo-prefix-len"]
    values = [splinter for splinter in SPLINTERS if not {0, 10, 13} & set(splinter)][:20]
    for _ in range(EXAMPLES):
        lines = b"".join(b"%b: %b\r\n" % (chance.choice(names), chance.choice(values).strip()) for _ in range(3))
        size = len(chat())
        async with connected(fleet.addresses.data) as client:
            client.writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nhost: g\r\n%b" % lines)
            client.writer.write(b"connection: close\r\ncontent-length: %d\r\n\r\n%b" % (size, chat()))
            said = await client.rest()
        status = int(said.split()[1])
        assert 200 <= status < 500, (lines, said)
    await fleet.idle()
    no_fault(caplog)


async def test_admin_body_of_any_kind_is_taken_or_refused(start: Start, caplog: pytest.LogCaptureFixture) -> None:
    fleet = await start.fleet([answer(200)])
    chance = Random("admin")
    for _ in range(EXAMPLES * 2):
        method, path = chance.choice(ADMIN)
        fields = {key: odd_value(chance) for key in chance.sample(ADMIN_KEYS, chance.randrange(4))}
        text = json.dumps(fields).encode()
        body = mutated(chance, text) if chance.random() < 0.3 else text
        response = await fleet.admin.request(method, path, content=body)
        assert response.status_code in (200, 400, 404, 405, 409, 413, 415), (path, body, response.text)
    await asyncio.sleep(0)
    assert (await fleet.client.get("/health")).status_code == 200
    no_fault(caplog)
