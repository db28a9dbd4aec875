"""The proxy's own answers to one request."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from gorgo.live.http.errors import HttpError, Message
from gorgo.live.request.record import RequestRecord
from gorgo.policies.registry import make_policy
from gorgo.proxy.exchange.exchange import ClientResponse


async def test_a_response_that_is_an_error_is_finished_and_nothing_follows_it() -> None:
    sent: list[Message] = []

    async def send(message: Message) -> None:
        sent.append(message)

    rejected: list[str] = []
    state: Any = SimpleNamespace(
        telemetry=SimpleNamespace(metrics=SimpleNamespace(rejected=rejected.append)),
        routing=SimpleNamespace(router=SimpleNamespace(settings=SimpleNamespace(policy=make_policy("nearest")))),
    )
    record = RequestRecord(state.routing, state.telemetry, 0.0)
    response = ClientResponse(state, send, "r", record)
    await response.send_error(HttpError(503, "no_replica", "no replica is eligible"))
    assert response.writer.finished is True
    await response.abort()
    assert [message["status"] for message in sent if "status" in message] == [503]
    assert (rejected, record.status, record.code) == (["no_replica"], 503, "no_replica")
    assert {(b"x-request-id", b"r"), (b"x-gorgo-policy", b"nearest")} <= set(sent[0]["headers"])
