"""A response of the app's own to a request that the connection has refused meanwhile: dropped, and no fault."""

from __future__ import annotations

import asyncio
import logging
import time

import pytest

from tests.proxy.conftest import Start, until
from tests.proxy.fakes import answer
from tests.proxy.raw import connected

HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: g\r\ntransfer-encoding: chunked\r\n\r\n"


async def test_a_timeout_of_a_body_in_the_moment_of_a_bad_chunk_is_no_fault(
    start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    fleet = await start.fleet([answer(200)], body_timeout_s=0.1)
    async with connected(fleet.addresses.data) as client:
        client.writer.write(HEAD)
        await until(lambda: fleet.state.exchanges)
        client.writer.write(b"1 \r\na\r\n")
        time.sleep(0.12)  # so that the timeout and the chunk are both due when the loop goes on
        said = await client.rest()
    assert said.startswith(b"HTTP/1.1 4")
    assert said.count(b"HTTP/1.1 4") == 1
    await fleet.idle()
    await asyncio.sleep(0)
    assert [record for record in caplog.records if record.levelno >= logging.ERROR] == []
