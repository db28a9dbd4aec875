from __future__ import annotations

from tests.proxy.conftest import Start
from tests.proxy.fakes import DONE, ROLE, chat, delta, stream


async def test_stream_passes_byte_for_byte_and_names_its_replica(start: Start) -> None:
    chunks = (b": hello\n\n", ROLE, delta("a"), delta("b"), DONE)
    fleet = await start.fleet([stream(*chunks)])
    body = chat(stream=True)
    response = await fleet.client.post("/v1/chat/completions", content=body)
    assert (response.status_code, response.content) == (200, b"".join(chunks))
    assert response.headers["x-gorgo-replica"] == "r0"
    assert response.headers["x-gorgo-policy"] == "round-robin"
    assert fleet.replicas[0].seen[0].body == body
    await fleet.idle()
