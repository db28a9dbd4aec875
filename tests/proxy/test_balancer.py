"""nginx of packaging/compose.two.yaml before two proxies: one that stops or dies costs no request."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest

from tests.proxy.conftest import Running, Start, config_for, until
from tests.proxy.fakes import DONE, chat, delta, hang, stream

CONFIGURATION = (Path(__file__).parents[2] / "packaging/balancer.conf").read_text()
CHAT = "/v1/chat/completions"
NGINX = shutil.which("nginx")

needs_nginx = pytest.mark.skipif(NGINX is None, reason="needs nginx")


@asynccontextmanager
async def balanced(proxies: list[Running], folder: Path) -> AsyncIterator[httpx.AsyncClient]:
    """nginx with the file, its names and folders replaced by those of the test."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    first, second = (proxy.addresses.data_url.removeprefix("http://") for proxy in proxies)
    text = CONFIGURATION.replace("listen 8080;", f"listen 127.0.0.1:{port};").replace("/tmp/", f"{folder}/")
    text = text.replace("server proxy:8080", f"server {first}").replace("server proxy-2:8080", f"server {second}")
    assert len(re.findall(r"server 127\.0\.0\.1:\d+ ", text)) == 2
    (folder / "nginx.conf").write_text(text.replace("worker_processes auto;", "worker_processes 1;"))
    user = "user root;" if os.geteuid() == 0 else ""
    command = (str(NGINX), "-p", str(folder), "-c", str(folder / "nginx.conf"), "-g", f"daemon off; {user}")
    with (folder / "log").open("wb") as log:
        process = await asyncio.create_subprocess_exec(*command, stderr=log)
    try:
        await until(lambda: _listens(port) or process.returncode is not None)
        assert process.returncode is None, (folder / "log").read_text()
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=20, trust_env=False) as client:
            yield client
    finally:
        if process.returncode is None:
            process.terminate()
        await process.wait()


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def test_no_prompt_and_no_answer_is_written_to_a_file() -> None:
    found = dict(re.findall(r"^ +(\w+) (\S+);", CONFIGURATION, re.MULTILINE))
    assert found["client_body_buffer_size"] == found["client_max_body_size"]
    assert (found["proxy_buffering"], found["proxy_max_temp_file_size"]) == ("off", "0")


@needs_nginx
async def test_large_prompt_leaves_no_temporary_file_of_nginx(start: Start, tmp_path: Path) -> None:
    replica = await start.replica(stream(delta("x"), DONE))
    proxies = [await start.proxy(config_for([replica]), [replica]) for _ in range(2)]
    async with balanced(proxies, tmp_path) as client:
        answer = await client.post(CHAT, content=chat(stream=True, user="x" * 4_000_000))
    assert answer.status_code == 200
    assert "buffered to a temporary file" not in (tmp_path / "log").read_text()


@needs_nginx
async def test_proxy_that_stops_costs_no_request_and_its_streams_end_whole(start: Start, tmp_path: Path) -> None:
    # Each has one stream, so that further requests go to both in turn.
    slow = await start.replica(hang(delta("x"), rest=(delta("y"), DONE)))
    quick = await start.replica(hang(delta("x"), rest=(delta("y"), DONE)), stream(DONE))
    stopping = await start.proxy(config_for([slow]), [slow])
    other = await start.proxy(config_for([quick]), [quick])
    async with balanced([stopping, other], tmp_path) as client:
        streams = [asyncio.create_task(client.post(CHAT, content=chat(stream=True))) for _ in range(2)]
        await until(lambda: len(stopping.state.exchanges) == len(other.state.exchanges) == 1)
        stopping.shutdown.set()
        await until(lambda: stopping.state.stopping)
        answers = [await client.post(CHAT, content=chat(stream=True)) for _ in range(8)]
        assert {answer.status_code for answer in answers} == {200}
        assert stopping.state.telemetry.metrics.registry.get_sample_value("gorgo_rejects_total", {"reason": "stopping"})
        slow.release.set()
        quick.release.set()
        ended = await asyncio.gather(*streams)
        assert [answer.status_code for answer in ended] == [200, 200]
        assert all(answer.text.endswith("data: [DONE]\n\n") for answer in ended)


@needs_nginx
async def test_proxy_that_is_not_there_costs_no_request(start: Start, tmp_path: Path) -> None:
    a, b = await start.replica(stream(delta("a"), DONE)), await start.replica(stream(delta("b"), DONE))
    first, second = await start.proxy(config_for([a]), [a]), await start.proxy(config_for([b]), [b])
    async with balanced([first, second], tmp_path) as client:
        await first.stop()
        answers = [await client.post(CHAT, content=chat(stream=True)) for _ in range(6)]
        assert {answer.status_code for answer in answers} == {200}
        assert all('"b"' in answer.text for answer in answers)


@needs_nginx
async def test_events_of_a_stream_come_one_by_one(start: Start, tmp_path: Path) -> None:
    slow = await start.replica(hang(delta("first"), rest=(DONE,)))
    proxies = [await start.proxy(config_for([slow]), [slow]) for _ in range(2)]
    async with (
        balanced(proxies, tmp_path) as client,
        client.stream("POST", CHAT, content=chat(stream=True)) as running,
    ):
        lines = running.aiter_lines()
        async with asyncio.timeout(5):
            assert "first" in await anext(lines)
        slow.release.set()
        assert "data: [DONE]" in [line async for line in lines]
