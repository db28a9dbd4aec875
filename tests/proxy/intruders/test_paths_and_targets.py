"""Ways around the table of routes, to a replica of the client's choice, or to where no replica is."""

from __future__ import annotations

import pytest

from gorgo.config.load import parse_config
from gorgo.errors import ConfigError
from gorgo.live.request.parse import INFERENCE_ROUTES
from gorgo.proxy.server import PUBLIC_ROUTES
from tests.proxy.conftest import Start
from tests.proxy.fakes import answer, chat
from tests.proxy.raw import connected

#: Also on the HTTP of `gorgo serve --plain`.
IN_BOTH_FORMS = True

CHAT = "/v1/chat/completions"
PATHS = (
    "/admin/fleet",
    "/admin",
    "/v1/../admin/fleet",
    "/v1/..%2fadmin/fleet",
    "/v1/%2e%2e/admin/fleet",
    "/v1/chat/completions/../../../admin/fleet",
    "//admin/fleet",
    "//v1/chat/completions",
    "/v1//chat/completions",
    "/v1/./chat/completions",
    "/./v1/chat/completions",
    "/v1/chat%2Fcompletions",
    "/v1/%63hat/completions",
    "/%76%31/chat/completions",
    "/v1/chat/completions%00",
    "/v1/chat/completions%20",
    "/v1/chat/completions%3Fx",
    "/v1/chat/completions;x=1",
    "/v1/chat/completions/",
    "/v1/chat/completions#x",
    "/V1/Chat/Completions",
    "/v1\\chat\\completions",
    "/flush_cache",
    "/update_weights",
    "/server_info",
    "/generate/../flush_cache",
)


async def test_no_path_leads_to_the_admin_routes_or_past_the_table(start: Start) -> None:
    fleet = await start.fleet([answer(200)])
    for path in PATHS:
        for method in ("GET", "POST"):
            async with connected(fleet.addresses.data) as client:
                token = "authorization: Bearer let-me-in"
                request = (
                    f"{method} {path} HTTP/1.1\r\nhost: g\r\n{token}\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"
                )
                client.writer.write(request.encode())
                said = await client.rest()
            assert said.startswith(b"HTTP/1.1 404 "), (method, path)
            assert b"not_found" in said
    assert fleet.replicas[0].seen == []


async def test_query_of_a_request_does_not_reach_a_replica(start: Start) -> None:
    fleet = await start.fleet([answer(200)])
    assert (await fleet.client.post(f"{CHAT}?url=http://169.254.169.254/", content=chat())).status_code == 200
    assert [seen.path for seen in fleet.replicas[0].seen] == [CHAT]


async def test_host_of_a_client_does_not_reach_a_replica(start: Start) -> None:
    fleet = await start.fleet([answer(200)])
    headers = {"host": "169.254.169.254", "x-forwarded-host": "other"}
    await fleet.client.post(CHAT, content=chat(), headers=headers)
    assert fleet.replicas[0].seen[0].header("host") == [f"127.0.0.1:{fleet.replicas[0].port}"]


@pytest.mark.parametrize(
    "header",
    [
        "x-gateway-destination-endpoint",
        "X-Gateway-Destination-Endpoint",
        "x-smg-target-worker",
        "x-data-parallel-rank",
        "x-dynamo-worker-instance-id",
        "x-gorgo-replica",
        "x-override-host",
        "x-prefiller-host-port",
        "x-envoy-original-dst-host",
        "x-forwarded-for",
        "x-http-method-override",
        "priority",
        "x_gorgo_replica",
        "X_Override-Rid",
        "content_length",
        "transfer_encoding",
    ],
)
async def test_target_header_of_a_client_picks_nothing_and_goes_nowhere(start: Start, header: str) -> None:
    fleet = await start.fleet([answer(200)], [answer(200)])
    for _ in range(2):
        await fleet.client.post(CHAT, content=chat(), headers={header: "r1"})
    for seen in (*fleet.replicas[0].seen, *fleet.replicas[1].seen):
        assert not seen.header(header.lower())


async def test_admin_without_its_token_tells_and_changes_nothing(start: Start) -> None:
    fleet = await start.fleet([answer(200)])
    version = fleet.state.routing.router.settings.weights.version
    wanted = [
        ("GET", "/admin/fleet"),
        ("GET", "/admin/samples"),
        ("GET", "/admin/decisions/x"),
        ("GET", "/admin/weights"),
    ]
    wanted += [("PUT", "/admin/weights"), ("PUT", "/admin/policy"), ("POST", "/admin/freeze"), ("POST", "/admin/flush")]
    wanted += [("POST", "/admin/unfreeze"), ("POST", "/admin/replicas/r0/drain")]
    for method, path in wanted:
        for given in ("", "Bearer", "Bearer x", "Basic x", "let-me-in"):
            headers = {"authorization": given}
            response = await fleet.admin.request(method, path, headers=headers, content=b"{}")
            assert response.status_code == 401, (method, path, given)
            assert response.json()["error"]["type"] == "authentication_error"
    assert fleet.state.routing.router.settings.weights.version == version
    assert (await fleet.admin.post("/v1/chat/completions", content=chat())).status_code == 404


def test_routes_that_need_no_key_carry_no_prompt() -> None:
    assert not set(PUBLIC_ROUTES) & set(INFERENCE_ROUTES)
    assert "/v1/models" not in PUBLIC_ROUTES


CONFIG = """
proxy: {region: us}
regions: [{name: us}]
replicas: [{name: a, region: us, url: "%s"}]
"""


@pytest.mark.parametrize(
    "url",
    [
        "file:///etc/passwd",
        "unix:///run/engine.sock",
        "http+unix://%2Frun%2Fengine.sock",
        "gopher://10.0.0.1:70",
        "ftp://10.0.0.1",
        "//10.0.0.1",
        "10.0.0.1:30000",
        "http://user:secret@10.0.0.1:30000",
        "http://secret@10.0.0.1:30000",
        "http://10.0.0.1:30000/?to=x",
        "http://10.0.0.1:30000/#x",
        "http://10.0.0.1:30000\\\\@other",
        "http:///x",
        "http://10.0.0.1:0",
        "http://10.0.0.1:99999",
        "http://10.0.0.1\\r\\nx: y",
    ],
)
def test_url_that_is_no_engine_s_is_refused_in_the_configuration(url: str) -> None:
    with pytest.raises(ConfigError) as raised:
        parse_config((CONFIG % url).encode())
    assert "expected an http:// or https:// URL" in str(raised.value)
    assert "secret" not in str(raised.value)
