"""What a client of HTTP/1.0 sees of an answer's end: it has no chunks, so only the connection can tell."""

from __future__ import annotations

import asyncio

from gorgo.config.fleet import ReplicaConfig
from gorgo.config.model import Config, LimitsConfig, RegionConfig
from tests.proxy.conftest import QUIET, Start
from tests.proxy.fakes import chat
from tests.proxy.integrity.engines import Speaker, lying, says
from tests.proxy.raw import connected

ON_BOTH_LOOPS = True

ROUTE = b"/v1/chat/completions"
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ntransfer-encoding: chunked\r\n\r\n"
#: Larger than what is retained of an answer in one piece.
SIZE = 1_100_000
PART = b"%x\r\n%b\r\n" % (SIZE, b" " * SIZE)


async def answer_to_http_1_0(start: Start, speak: Speaker) -> bytes | None:
    """What came; `None` if the connection was reset."""
    async with lying(speak) as engine:
        replica = ReplicaConfig(name="engine", region="here", url=engine.url, engine="openai")
        limits = LimitsConfig(shutdown_grace_s=1.0)
        config = Config(proxy=QUIET, regions=(RegionConfig(name="here"),), replicas=(replica,), limits=limits)
        running = await start.proxy(config, [])
        body = chat()
        async with connected(running.addresses.data) as client:
            client.writer.write(b"POST %b HTTP/1.0\r\ncontent-length: %d\r\n\r\n%b" % (ROUTE, len(body), body))
            try:
                said = await asyncio.wait_for(client.reader.read(), 10)
            except ConnectionResetError:
                said = None
        await running.idle()
        return said


async def test_answer_that_is_cut_is_reset_for_a_client_of_http_1_0(start: Start) -> None:
    assert await answer_to_http_1_0(start, says(HEAD + PART, b"zz\r\n")) is None


async def test_whole_answer_ends_in_order_for_a_client_of_http_1_0(start: Start) -> None:
    said = await answer_to_http_1_0(start, says(HEAD + PART, b"0\r\n\r\n"))
    assert said is not None
    assert said.startswith(b"HTTP/1.1 200 ")
    assert said.partition(b"\r\n\r\n")[2] == b" " * SIZE
