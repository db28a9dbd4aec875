"""Errors of the proxy's own over a socket: where a body is wrong, and in the form of the route's API."""

from __future__ import annotations

import pytest

from tests.proxy.conftest import Start
from tests.proxy.fakes import answer


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"", "the body is empty; expected a JSON object"),
        (b" \n", "the body is empty; expected a JSON object"),
        (b'{"model": "m",\n "messages": [}', "the body is not JSON: line 2, column 15: Expecting value"),
        (b'{"a": "\xff"}', "the body is not JSON: byte 7 is not utf-8"),
        (b"[]", "expected a JSON object as the body"),
    ],
)
@pytest.mark.parametrize("route", ["/v1/chat/completions", "/v1/messages", "/admin/weights"])
async def test_a_body_that_is_not_json_is_told_where(start: Start, route: str, body: bytes, message: str) -> None:
    fleet = await start.fleet([answer(200)])
    if route.startswith("/admin"):
        response = await fleet.admin.put(route, content=body)
        if not body.strip():
            return  # an empty body is an empty object there
    else:
        response = await fleet.client.post(route, content=body)
    error = response.json()["error"]
    assert (response.status_code, error["message"], error["code"]) == (400, message, "invalid_json")


async def test_errors_of_messages_have_anthropics_form(start: Start) -> None:
    fleet = await start.fleet([answer(503)])
    responses = [
        await fleet.client.post("/v1/messages", content=b"{"),
        await fleet.client.get("/v1/messages"),
        await fleet.client.post("/v1/messages/unknown", content=b"{}"),
        await fleet.client.post("/v1/messages", json={"messages": [{"role": "user", "content": "a"}]}),
    ]
    assert [response.status_code for response in responses] == [400, 405, 404, 503]
    kinds = ["invalid_request_error", "invalid_request_error", "not_found_error", "overloaded_error"]
    assert [response.json()["error"]["type"] for response in responses] == kinds
    for response in responses:
        assert response.json().keys() == {"type", "error"}
        assert response.json()["type"] == "error"
        assert response.json()["error"].keys() == {"type", "message", "code"}
    other = await fleet.client.post("/v1/completions", content=b"{")
    assert other.json()["error"].keys() == {"message", "type", "param", "code"}
