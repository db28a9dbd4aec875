"""Why a replica was ejected: in the log, in status, in `explain` and in the client's 502, with no other's prompt."""

from __future__ import annotations

import json
import logging
import re
from typing import Any

import pytest
from aiohttp import web

from gorgo.core.messages.actions import HealthChanged
from tests.proxy.conftest import Start
from tests.proxy.fakes import DONE, Script, answer, chat, delta, reset_after, stream

CHAT = "/v1/chat/completions"
SECRET = "the launch code of client one is swordfish"


def echoing(status: int) -> Script:
    """Fails, and repeats the prompt in its error, with control characters."""

    async def script(request: web.Request, body: bytes) -> web.StreamResponse:
        content = json.loads(body)["messages"][0]["content"]
        message = f"CUDA error: device-side assert\x1b[2J while serving {content}"
        return web.json_response({"error": {"message": message, "type": "server_error"}}, status=status)

    return script


async def ejected(start: Start, *scripts: Script) -> Any:
    fleet = await start.fleet([*scripts], [stream(delta("x"), DONE)])
    for _ in range(8):
        messages = [{"role": "user", "content": SECRET}]
        response = await fleet.client.post(CHAT, content=chat(stream=True, messages=messages))
        assert response.status_code == 200
    return fleet


async def test_log_status_and_explain_say_why_and_for_how_long(start: Start, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "gorgo")
    fleet = await ejected(start, echoing(500))
    (said,) = [record for record in caplog.records if record.getMessage() == "replica_ejected"]
    fields = getattr(said, "fields", {})
    assert (fields["replica"], fields["by"], fields["for_s"]) == ("r0", "attempts", 5.0)
    words = r"status 500 after [0-9.e-]+ s: CUDA error: device-side assert\?\[2J while serving \[\.\.\.\]"
    assert re.fullmatch(words, fields["why"])
    status = (await fleet.admin.get("/admin/status")).json()
    (row,) = [row for row in status["replicas"] if row["name"] == "r0"]
    assert (row["ejected_by"], row["ejected_why"]) == ("attempts", fields["why"])
    assert row["reason"].startswith(f"requests to it failed ({fields['why']}); retried in ")
    assert any(fields["why"] in alert["text"] for alert in status["alerts"])
    decisions = (await fleet.admin.get("/admin/decisions")).json()["decisions"]
    newest = (await fleet.admin.get(f"/admin/decisions/{decisions[0]['request_id']}")).json()["decisions"][0]
    assert newest["excluded"] == {"r0": f"ejected: {fields['why']}"}
    everything = json.dumps([status, newest, caplog.text, (await fleet.admin.get("/admin/page")).text])
    assert "swordfish" not in everything
    assert "launch code" not in everything


async def test_client_s_502_names_each_attempt_with_its_time_and_the_engine_s_text(start: Start) -> None:
    fleet = await start.fleet([echoing(500)], [reset_after()], [answer(502, b'{"detail": "no worker"}')])
    response = await fleet.client.post(CHAT, content=chat(messages=[{"role": "user", "content": SECRET}]))
    assert response.status_code == 502
    message = response.json()["error"]["message"]
    assert message.startswith("no replica could answer (tried 3 replicas): ")
    assert "r0: status 500 after " in message
    assert "CUDA error: device-side assert?[2J while serving [...]" in message
    assert "r1: disconnected after " in message
    assert "r2: status 502 after " in message
    assert message.endswith(" s: no worker")
    assert "swordfish" not in message
    assert "\x1b" not in message


async def test_502_of_another_client_has_nothing_of_the_first_one_s_prompt(start: Start) -> None:
    fleet = await start.fleet([echoing(500)], [reset_after()])
    for prompt in (SECRET, "what is the weather"):
        response = await fleet.client.post(CHAT, content=chat(messages=[{"role": "user", "content": prompt}]))
        assert response.status_code == 502
    assert "swordfish" not in response.text


async def test_error_event_before_any_content_is_the_engine_s_text_too(start: Start) -> None:
    failing = stream(b'data: {"error": {"message": "KV cache is full", "code": 500}}\n\n', DONE)
    fleet = await start.fleet([failing], [reset_after()])
    response = await fleet.client.post(CHAT, content=chat(stream=True))
    assert "r0: status 500 after " in response.json()["error"]["message"]
    assert "KV cache is full" in response.json()["error"]["message"]


async def test_readmitted_replica_has_no_reason_left(start: Start) -> None:
    fleet = await ejected(start, echoing(500))
    router = fleet.state.routing.router
    for _ in range(2):
        router.handle_timer(now=fleet.state.routing.clock() + 60.0)
        router.replicas.on_probe("r0", 0.001, now=fleet.state.routing.clock() + 60.0)
    (view, _) = router.view.snapshots(now=fleet.state.routing.clock())
    assert (view.state, view.ejected_why) == ("healthy", None)
    assert not [event for event in router.fleet_events if isinstance(event, HealthChanged) and event.why]
