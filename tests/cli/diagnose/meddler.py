"""What a test puts between the router and a real engine, so that one thing is silently wrong.

`Meddler` passes HTTP on and changes what its `Faults` say. `KvRelay` passes KV events on and changes their blocks.
"""

from __future__ import annotations

import asyncio
import json
import ssl
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from email.utils import formatdate
from hashlib import blake2b
from time import time
from typing import Any

import aiohttp
import zmq
from aiohttp import web
from msgspec import msgpack


@dataclass(frozen=True, kw_only=True)
class Faults:
    """What is wrong; by default nothing."""

    #: Of the usage: no report of cached tokens, a report of none, and a count that is so many too high, in chats alone.
    no_cached: bool = False
    zero_cached: bool = False
    more_tokens: int = 0
    chat_alone: bool = False
    #: Answers are read whole before they go on.
    buffered: bool = False
    clock_s: float = 0.0
    version: str | None = None
    context: int | None = None
    model: str | None = None
    no_kv_events: bool = False
    #: Time before each answer, and after which an idle connection is closed.
    delay_s: float = 0.0
    idle_s: float = 75.0
    #: By path.
    statuses: Mapping[str, int] = field(default_factory=dict)
    key: str | None = None
    #: A prompt with this text is answered 500.
    poison: str | None = None
    tls: ssl.SSLContext | None = None


class Meddler:
    """A reverse proxy of one engine."""

    def __init__(self, url: str, faults: Faults) -> None:
        self._url = url
        self._faults = faults
        self._session = aiohttp.ClientSession(auto_decompress=False)

    async def close(self, _: web.Application) -> None:
        await self._session.close()

    async def handle(self, request: web.Request) -> web.StreamResponse:
        faults = self._faults
        body = await request.read()
        status = faults.statuses.get(request.path)
        if faults.delay_s:
            await asyncio.sleep(faults.delay_s)
        if faults.key is not None and request.headers.get("authorization") != f"Bearer {faults.key}":
            status = 401
        if faults.poison is not None and faults.poison.encode() in body:
            status = 500
        if status is not None:
            return web.json_response({"error": {"message": "as the test says"}}, status=status)
        headers = {key: value for key, value in request.headers.items() if key.lower() in ("content-type", "accept")}
        async with self._session.request(
            request.method, self._url + request.path_qs, data=body, headers=headers
        ) as answer:
            sent = {"content-type": answer.headers.get("content-type", "text/plain")}
            sent["date"] = formatdate(time() + faults.clock_s, usegmt=True)
            is_stream = "event-stream" in sent["content-type"]
            if not is_stream:
                whole = self._changed(request.path, await answer.read())
                return web.Response(body=whole, status=answer.status, headers=sent)
            response = web.StreamResponse(status=answer.status, headers=sent)
            await response.prepare(request)
            held = []
            async for line in answer.content:
                changed = self._line(request.path, line)
                if faults.buffered:
                    held.append(changed)
                else:
                    await response.write(changed)
            if held:
                await response.write(b"".join(held))
            await response.write_eof()
            return response

    def _line(self, path: str, line: bytes) -> bytes:
        if not line.startswith(b"data: {"):
            return line
        return b"data: " + self._changed(path, line.removeprefix(b"data: ").rstrip()) + b"\n"

    def _changed(self, path: str, body: bytes) -> bytes:
        try:
            found = json.loads(body)
        except ValueError:
            return body
        faults = self._faults
        if isinstance(found, dict):
            usage = found.get("usage")
            if isinstance(usage, dict):
                self._change_usage(path, usage)
            if path == "/v1/models":
                for row in found["data"]:
                    row |= {} if faults.context is None else {"max_model_len": faults.context}
                    row |= {} if faults.model is None else {"id": faults.model}
            if path in ("/server_info", "/get_server_info", "/version"):
                found |= {} if faults.version is None else {"version": faults.version}
                found |= {"kv_events": None} if faults.no_kv_events else {}
        return json.dumps(found).encode()

    def _change_usage(self, path: str, usage: dict[str, Any]) -> None:
        faults = self._faults
        if faults.no_cached:
            usage.pop("prompt_tokens_details", None)
        elif faults.zero_cached:
            usage["prompt_tokens_details"] = {"cached_tokens": 0}
        if faults.more_tokens and not (faults.chat_alone and "chat" not in path):
            usage["prompt_tokens"] += faults.more_tokens


@contextmanager
def meddling(url: str, faults: Faults) -> Iterator[str]:
    """The address of a meddler before `url`; it runs in a thread of its own."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()

    async def start() -> tuple[web.AppRunner, str]:
        app, meddler = web.Application(), Meddler(url, faults)
        app.router.add_route("*", "/{path:.*}", meddler.handle)
        app.on_cleanup.append(meddler.close)
        runner = web.AppRunner(app, keepalive_timeout=faults.idle_s, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0, ssl_context=faults.tls).start()
        scheme = "http" if faults.tls is None else "https"
        return runner, f"{scheme}://127.0.0.1:{runner.addresses[0][1]}"

    runner, address = asyncio.run_coroutine_threadsafe(start(), loop).result(20)
    try:
        yield address
    finally:
        asyncio.run_coroutine_threadsafe(runner.cleanup(), loop).result(20)
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


@contextmanager
def relaying(endpoint: str | None, change: str = "nothing") -> Iterator[str]:
    """The address of a publisher of the events of `endpoint`, their blocks changed; of none of them without one."""
    context = zmq.Context()
    out = context.socket(zmq.PUB)
    port = out.bind_to_random_port("tcp://127.0.0.1")
    stop = threading.Event()

    def run() -> None:
        came = context.socket(zmq.SUB)
        came.setsockopt(zmq.SUBSCRIBE, b"")
        if endpoint is not None:
            came.connect(endpoint)
        while not stop.is_set():
            if came.poll(50):
                frames = came.recv_multipart()
                out.send_multipart([*frames[:-1], _changed_message(frames[-1], change)])
        came.close(linger=0)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        yield f"tcp://127.0.0.1:{port}"
    finally:
        stop.set()
        thread.join()
        context.destroy(linger=0)


def _changed_message(message: bytes, change: str) -> bytes:
    sent, events, *more = msgpack.decode(message)
    for event in events:
        if event["type"] != "BlockStored":
            continue
        if change in ("seeded", "another seed"):
            tokens, size = event["token_ids"], event["block_size"]
            key = b"other" if change == "another seed" else b"one"
            blocks = [repr(tokens[place : place + size]).encode() for place in range(0, len(tokens), size)]
            event["block_hashes"] = [
                int.from_bytes(blake2b(block, key=key, digest_size=7).digest(), "big") for block in blocks
            ]
            event["parent_block_hash"] = None
        elif change == "blocks":
            event["block_hashes"] = event["block_hashes"][1::2]
            event["block_size"] *= 2
            event["token_ids"] = event["token_ids"][: event["block_size"] * len(event["block_hashes"])]
        elif change == "salt":
            event["extra_keys"] = [["tenant-7"], *[None] * (len(event["block_hashes"]) - 1)]
    return msgpack.encode([sent, [each for each in events if each.get("block_hashes") != []], *more])
