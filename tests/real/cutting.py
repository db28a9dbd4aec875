"""An engine's answers cut at a chosen byte, the process before two such engines, and what a client reads of it."""

from __future__ import annotations

import asyncio
import json
import re
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from tests.proxy.served import Served, served

TOKENS = 200
COUNTED = "gorgo_streams_continued_total{"
#: Whole answers behind each that is cut: without them half of the last six would break off, and eject the replica.
SHORT_BETWEEN = 3


@dataclass
class Cut:
    """Where the next answer to a prompt breaks off; whoever answers it first has its connection closed there."""

    #: Bytes of the response, head and framing included.
    after: int | None = None

    def take(self) -> int | None:
        after, self.after = self.after, None
        return after


@asynccontextmanager
async def cutting(engine_url: str, cut: Cut) -> AsyncIterator[str]:
    """Yields the URL of a relay before an engine."""
    target = urlsplit(engine_url)
    tasks: set[asyncio.Task[None]] = set()

    async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        from_engine, to_engine = await asyncio.open_connection(target.hostname, target.port)
        left: int | None = None

        async def requests() -> None:
            nonlocal left
            while chunk := await reader.read(65_536):
                if chunk.startswith(b"POST /v1/"):
                    left = cut.take()
                to_engine.write(chunk)
            to_engine.close()

        async def answers() -> None:
            nonlocal left
            while chunk := await from_engine.read(65_536):
                writer.write(chunk if left is None else chunk[:left])
                if left is not None:
                    left -= len(chunk)
                    if left <= 0:
                        break
            writer.close()
            to_engine.close()

        try:
            await asyncio.gather(requests(), answers())
        except ConnectionError:
            pass  # The engine or the proxy has closed it.
        finally:
            writer.close()
            to_engine.close()

    def accepted(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        tasks.add(asyncio.create_task(relay(reader, writer)))

    server = await asyncio.start_server(accepted, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@dataclass
class Answer:
    """One stream, as its client read it."""

    raw: bytes
    text: str = ""
    ids: set[str] = field(default_factory=set)
    reasons: list[str] = field(default_factory=list)
    usages: list[tuple[int, int, int]] = field(default_factory=list)
    errors: int = 0

    @property
    def seams(self) -> int:
        return self.raw.count(b": x-gorgo-continued ")

    @property
    def shape(self) -> tuple[object, ...]:
        """All that a client sees beside the text; ids are different for each answer."""
        return len(self.ids), self.reasons, self.usages, self.errors, self.raw.count(b"data: [DONE]\n\n")


def read(raw: bytes) -> Answer:
    """Reads whole events; half of one is no JSON, and an error here."""
    assert raw.endswith(b"\n\n")
    answer = Answer(raw)
    for part in raw.split(b"\n\n"):
        if not part.startswith(b"data: ") or part == b"data: [DONE]":
            continue
        event: dict[str, Any] = json.loads(part[6:])
        answer.errors += "error" in event
        answer.ids |= {event["id"]} if "id" in event else set()
        if usage := event.get("usage"):
            answer.usages.append((usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]))
        for choice in event.get("choices", []):
            answer.text += choice.get("text") or choice.get("delta", {}).get("content") or ""
            answer.reasons += [choice["finish_reason"]] if choice.get("finish_reason") else []
    return answer


@dataclass
class Bench:
    """The process before two engines, each behind a relay."""

    proxy: Served
    cut: Cut

    async def raw_message(self, *, said: str) -> bytes:
        body = {"model": "tiny", "max_tokens": TOKENS, "messages": [{"role": "user", "content": said}]}
        more = {"temperature": 0, "ignore_eos": True, "stream": True}
        return (await self.proxy.client.post("/v1/messages", json=body | more)).content

    async def ask(self, route: str, *, tokens: int = TOKENS, after: int | None = None) -> Answer:
        said = "tell me of " + " ".join(["ban", "des", "fin"] * 8)
        asked = {"messages": [{"role": "user", "content": said}]} if "chat" in route else {"prompt": said}
        more = {"temperature": 0, "ignore_eos": True, "stream": True, "stream_options": {"include_usage": True}}
        self.cut.after = after
        response = await self.proxy.client.post(route, json={"model": "tiny", "max_tokens": tokens, **asked, **more})
        self.cut.after = None
        assert response.status_code == 200
        return read(response.content)


@asynccontextmanager
async def cut_engines(folder: Path, engine: str, urls: Sequence[str]) -> AsyncIterator[Bench]:
    """`gorgo serve` before engines of the kind `engine`, each behind a relay; they take turns."""
    async with AsyncExitStack() as stack:
        cut = Cut()
        relays = [await stack.enter_async_context(cutting(url, cut)) for url in urls]
        replicas = [
            {"name": f"r{number}", "region": "here", "engine": engine, "url": url} for number, url in enumerate(relays)
        ]
        config = {
            "proxy": {"region": "here", "policy": "round-robin", "probe_interval_s": 30},
            "regions": [{"name": "here"}],
            "simulation": {"rtt_ms": {"here": 1}},
            "replicas": replicas,
        }
        (folder / "regions.yaml").write_text(json.dumps(config))
        yield Bench(await stack.enter_async_context(served(folder)), cut)


def places_of(raw: bytes, count: int, *, most: float = 1.0) -> list[int]:
    """Half of them every few bytes of one event in the middle; half over the whole answer, from its first events on.

    `raw` lacks the head and the frames, so a place in it is an earlier one in the response. `most`: the share of the
    answer in which they lie; an engine that is slow to send puts several tokens into one event, and its answers are
    then shorter.
    """
    half, starts = count // 2, [found.start() for found in re.finditer(b"data: ", raw)]
    starts = starts[: max(12, round(most * len(starts)))]
    middle, behind = starts[len(starts) // 2 : len(starts) // 2 + 2]
    within = [middle + (behind - middle) * number // half for number in range(half)]
    first, last = starts[8], starts[-3]
    return within + [first + (last - first) * number // half for number in range(half)]


async def assert_cut_answers_are_whole(bench: Bench, route: str, *, count: int, most: float = 1.0) -> None:
    """Cuts a greedy answer at `count` places: each is continued once, and at most one in a hundred reads otherwise.

    Raises AssertionError; its message shows where a text begins to differ.
    """
    whole = await bench.ask(route)
    assert (whole.reasons, whole.errors, whole.usages[0][1]) == (["length"], 0, TOKENS)
    kinds: Counter[str] = Counter()
    different: list[tuple[int, str, str]] = []
    seams = 0
    for place in places_of(whole.raw, count, most=most):
        answer = await bench.ask(route, after=place)
        seams += answer.seams
        kinds["failed" if answer.errors else "exact" if answer.text == whole.text else "differs"] += 1
        if not answer.errors:
            assert answer.shape == whole.shape, (place, answer.raw[-1500:].decode(), whole.raw[-700:].decode())
            if answer.text != whole.text:
                at = next(n for n, pair in enumerate(zip(answer.text, whole.text, strict=False)) if len({*pair}) > 1)
                different.append((place, answer.text[at - 20 : at + 20], whole.text[at - 20 : at + 20]))
        for _ in range(SHORT_BETWEEN):
            await bench.ask(route, tokens=4)
    assert (kinds["failed"], seams) == (0, count), (kinds, different)
    assert kinds["differs"] <= count // 100, different
