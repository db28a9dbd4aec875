"""Engines on real sockets that say a known text in each dialect, and break their answers off at a chosen byte."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

from tests.proxy.integrity.engines import length
from tests.proxy.raw import listening

CHAT, COMPLETIONS, GENERATE, MESSAGES = "/v1/chat/completions", "/v1/completions", "/generate", "/v1/messages"
PROMPT_TOKENS = 7
#: What stands in a text beside its numbers: what a reader of events or of JSON could stumble over.
_ODD = (
    "",
    "é",
    "\U0001f600",
    "\n\n",
    "  ",
    '"error"',
    "data: x",
    "<b>",
    "\\",
    "\u2028",
    "[DONE]",
    '"abort"',
    "\r\n",
    "]}",
)


def pieces_of(seed: int, count: int) -> list[str]:
    """Return the tokens of a text: each has its number, so that none can be doubled or missing unseen."""
    rng = random.Random(seed)
    return [f" {number}{rng.choice(_ODD)}" for number in range(count)]


@dataclass
class Break:
    """How an answer breaks off: after so many bytes of its events, or before the event that has the byte."""

    at: int
    how: str = "reset"


@dataclass
class Manner:
    """How an engine sends."""

    pieces_per_event: int = 1
    line_end: bytes = b"\n"
    #: Bytes of one write; 0 for an event.
    write_bytes: int = 0
    comments: bool = False
    counts_tokens: bool = True
    thinks: int = 0
    calls_tool: bool = False


@dataclass
class Engine:
    """One replica: all engines of a fleet say the same."""

    manner: Manner = field(default_factory=Manner)
    #: Of the next answers to prompts; an answer without one is whole.
    breaks: list[Break] = field(default_factory=list)
    asked: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    port: int = 0
    number: int = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError, asyncio.IncompleteReadError):
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                body = await reader.readexactly(length(head))
                method, path, _ = head.split(b" ", 2)
                if method != b"POST":
                    writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}")
                elif path == b"/tokenize":
                    self._tokenize(writer, json.loads(body))
                else:
                    await self._answer(writer, path.decode(), json.loads(body))
                await writer.drain()

    def _tokenize(self, writer: asyncio.StreamWriter, body: dict[str, Any]) -> None:
        if "messages" in body:
            tokens: list[Any] = [ord(each) for message in body["messages"] for each in message["content"]]
        else:
            tokens = [1] * split(body["prompt"])
        said = json.dumps({"tokens": tokens}).encode()
        status = b"200 OK" if self.manner.counts_tokens else b"404 Not Found"
        writer.write(b"HTTP/1.1 %s\r\ncontent-length: %d\r\n\r\n%s" % (status, len(said), said))

    async def _answer(self, writer: asyncio.StreamWriter, path: str, body: dict[str, Any]) -> None:
        self.asked.append((path, body))
        self.number += 1
        said = Said(path, body, self.manner, f"{id(self)}-{self.number}")
        broken = self.breaks.pop(0) if self.breaks else None
        if not body.get("stream"):
            await self._whole(writer, said, broken)
            return
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
        sent = 0
        for event in said.events():
            if broken is not None and sent + len(event) > broken.at:
                if broken.how in ("error", "abort"):
                    last = said.broken_off() if broken.how == "abort" else said.event({"error": {"code": 500}})
                    await self._write(writer, last + (b"" if path == MESSAGES else said.done()))
                    break
                if broken.how == "eof":
                    break
                await self._write(writer, event[: broken.at - sent])
                await asyncio.sleep(0.001)  # what was written leaves before a reset drops it
                if broken.how == "reset":
                    writer.transport.abort()
                else:
                    writer.close()
                raise ConnectionResetError
            sent += len(event)
            await self._write(writer, event)
        writer.write(b"0\r\n\r\n")

    async def _write(self, writer: asyncio.StreamWriter, event: bytes) -> None:
        size = self.manner.write_bytes or len(event) or 1
        for at in range(0, len(event), size):
            part = event[at : at + size]
            writer.write(b"%x\r\n%s\r\n" % (len(part), part))
            if self.manner.write_bytes:
                await writer.drain()
                await asyncio.sleep(0)

    async def _whole(self, writer: asyncio.StreamWriter, said: Said, broken: Break | None) -> None:
        text = said.whole()
        framed = b"%x\r\n%s\r\n0\r\n\r\n" % (len(text), text)
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ntransfer-encoding: chunked\r\n\r\n")
        if broken is None:
            writer.write(framed)
            return
        writer.write(framed[: broken.at])
        await writer.drain()
        writer.close()
        raise ConnectionResetError


def split(prefix: str) -> int:
    """Return how many pieces a text of an answer has: each begins with a space and a number."""
    at = count = 0
    while (begin := prefix.find(f" {count}", at)) >= 0:
        at, count = begin + len(f" {count}"), count + 1
    return count


class Said:
    """One answer to one request: `text` from what the request says that the client has."""

    def __init__(self, path: str, body: dict[str, Any], manner: Manner, name: str) -> None:
        self._path, self._body, self._manner, self._name = path, body, manner, name
        prompt, prefix = self._asked()
        seed, count = (int(word) for word in prompt.split()[:2])
        whole = "".join(pieces_of(seed, count))
        assert whole.startswith(prefix), (whole[:60], prefix[-60:])
        self._had = split(prefix)
        self._prompt_tokens = PROMPT_TOKENS + self._had
        rest, at = list[str](), 0
        for piece in pieces_of(seed, count):
            if at + len(piece) > len(prefix):
                rest.append(piece[max(0, len(prefix) - at) :])
            at += len(piece)
        sampling = body.get("sampling_params") or {}
        most = body.get("max_tokens") or sampling.get("max_new_tokens") or 10_000
        self._pieces, self._finish, self._extra = rest[:most], "length" if len(rest) >= most else "stop", 0
        if self._finish == "stop":
            self._extra = 1  # the token that says the end
        stop = body.get("stop") or body.get("stop_sequences") or sampling.get("stop")
        self._stop = stop[0] if isinstance(stop, list) and stop else stop
        self._matched = False

    def _asked(self) -> tuple[str, str]:
        body = self._body
        if self._path in (COMPLETIONS, GENERATE):
            prompt, _, prefix = str(body["prompt" if self._path == COMPLETIONS else "text"]).partition("|")
            return prompt, prefix
        messages = body["messages"]
        prefix = messages[-1]["content"] if messages[-1]["role"] == "assistant" else ""
        return str(messages[0]["content"]), prefix

    def groups(self) -> Iterator[tuple[str, int]]:
        """Yield text and tokens so far of each event; what may begin a stop string is held back."""
        text, given = "", 0
        size = self._manner.pieces_per_event
        for at in range(0, len(self._pieces), size):
            for number, piece in enumerate(self._pieces[at : at + size], at + 1):
                text += piece
                if self._stop and (found := text.find(self._stop)) >= 0:
                    self._finish, self._extra, self._matched = "stop", 0, True
                    self._pieces = self._pieces[:number]
                    if found > given:
                        yield text[given:found], number
                    return
            held = (
                next((n for n in range(len(self._stop) - 1, 0, -1) if text.endswith(self._stop[:n])), 0)
                if self._stop
                else 0
            )
            if len(text) - held > given:
                yield text[given : len(text) - held], min(at + size, len(self._pieces))
                given = len(text) - held
        if given < len(text):
            yield text[given:], len(self._pieces)

    def event(self, fields: dict[str, Any]) -> bytes:
        end = self._manner.line_end
        name = f"event: {fields['type']}".encode() + end if self._path == MESSAGES and "type" in fields else b""
        return name + b"data: " + json.dumps(fields, ensure_ascii=self._had % 2 == 0).encode() + 2 * end

    def done(self) -> bytes:
        return (
            self.event({"type": "message_stop"})
            if self._path == MESSAGES
            else b"data: [DONE]" + 2 * self._manner.line_end
        )

    def events(self) -> Iterator[bytes]:
        if self._manner.comments:
            yield b": ping" + 2 * self._manner.line_end
        if self._path == GENERATE:
            yield from self._generated()
        elif self._path == MESSAGES:
            yield from self._message()
        else:
            yield from self._choices()
        yield self.done()

    def usage(self, output: int) -> dict[str, int]:
        return {
            "prompt_tokens": self._prompt_tokens,
            "completion_tokens": output,
            "total_tokens": self._prompt_tokens + output,
        }

    @property
    def output(self) -> int:
        return len(self._pieces) + self._extra

    def _choice(self, delta: dict[str, Any], finish: str | None = None, output: int | None = None) -> bytes:
        is_chat = self._path == CHAT
        stop = self._stop if finish is not None and self._matched else None
        choice: dict[str, Any] = {"index": 0, "logprobs": None, "finish_reason": finish, "stop_reason": stop}
        choice |= {"delta": delta} if is_chat else {"text": delta.get("content", "")}
        fields = {"id": self._name, "object": "chunk", "created": 1, "model": "m", "choices": [choice]}
        options = self._body.get("stream_options") or {}
        if output is not None and options.get("continuous_usage_stats"):
            fields["usage"] = self.usage(output)
        return self.event(fields)

    def _choices(self) -> Iterator[bytes]:
        if self._path == CHAT:
            yield self._choice({"role": "assistant", "content": ""})
            if not self._had:
                for number in range(self._manner.thinks):
                    yield self._choice({"reasoning_content": f"hm {number}"})
        for text, tokens in self.groups():
            yield self._choice({"content": text}, output=tokens)
            if self._manner.comments:
                yield b": ping" + 2 * self._manner.line_end
        if self._manner.calls_tool and self._path == CHAT and self._finish == "stop":
            for number, part in enumerate(('{"a"', ": 1", "}")):
                call = {"index": 0, "function": {"arguments": part}} | ({"id": "c"} if not number else {})
                yield self._choice({"tool_calls": [call]})
            self._finish = "tool_calls"
        yield self._choice({"content": ""}, self._finish, self.output)
        if (self._body.get("stream_options") or {}).get("include_usage"):
            yield self.event(
                {"id": self._name, "object": "chunk", "model": "m", "choices": [], "usage": self.usage(self.output)}
            )

    def _generated(self) -> Iterator[bytes]:
        text, number = "", 0
        for part, number in self.groups():
            text += part
            yield self._meta(text, number, None)
        yield self._meta(text, self.output, {"type": self._finish})
        del number

    def _meta(self, text: str, output: int, finish: Any) -> bytes:
        meta = {
            "id": self._name,
            "prompt_tokens": self._prompt_tokens,
            "completion_tokens": output,
            "finish_reason": finish,
        }
        return self.event({"text": text, "meta_info": meta})

    def _message(self) -> Iterator[bytes]:
        usage = {"input_tokens": self._prompt_tokens, "output_tokens": 0}
        yield self.event({"type": "message_start", "message": {"id": self._name, "role": "assistant", "usage": usage}})
        yield self.event({"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}})
        for text, _ in self.groups():
            delta: dict[str, Any] = {"type": "text_delta", "text": text}
            yield self.event({"type": "content_block_delta", "index": 0, "delta": delta})
        yield self.event({"type": "content_block_stop", "index": 0})
        reason = "max_tokens" if self._finish == "length" else "stop_sequence" if self._matched else "end_turn"
        delta = {"stop_reason": reason, "stop_sequence": self._stop if self._matched else None}
        yield self.event({"type": "message_delta", "delta": delta, "usage": {**usage, "output_tokens": self.output}})

    def broken_off(self) -> bytes:
        """Return the event of an answer that the engine breaks off."""
        if self._path == GENERATE:
            return self._meta("", 0, {"type": "abort", "message": "stopped"})
        if self._path == MESSAGES:
            return self.event({"type": "error", "error": {"type": "api_error", "message": "stopped"}})
        return self._choice({"content": ""}, "abort")

    def whole(self) -> bytes:
        text = "".join(part for part, _ in self.groups())
        if self._path == GENERATE:
            return self._meta(text, self.output, {"type": self._finish})[6:].strip()
        if self._path == MESSAGES:
            usage = {"input_tokens": self._prompt_tokens, "output_tokens": self.output}
            content = [{"type": "text", "text": text}]
            return json.dumps(
                {"type": "message", "content": content, "stop_reason": "end_turn", "usage": usage}
            ).encode()
        message = {"message": {"role": "assistant", "content": text}} if self._path == CHAT else {"text": text}
        choice = {"index": 0, **message, "finish_reason": self._finish}
        return json.dumps({"id": self._name, "choices": [choice], "usage": self.usage(self.output)}).encode()


@asynccontextmanager
async def breaking(manner: Manner) -> AsyncIterator[Engine]:
    """Yields an engine that listens."""
    engine = Engine(manner)
    async with listening(engine.serve) as engine.port:
        yield engine


@dataclass
class Read:
    """What a client makes of one answer."""

    text: str = ""
    calls: str = ""
    thoughts: str = ""
    ids: set[str] = field(default_factory=set)
    reasons: list[str] = field(default_factory=list)
    counts: list[tuple[int, int]] = field(default_factory=list)
    ends: int = 0
    errors: int = 0
    roles: int = 0

    @property
    def is_whole(self) -> bool:
        return not self.errors and self.ends == 1 and len(self.reasons) == 1


def read(route: str, raw: bytes) -> Read:
    """Reads a stream of events as a client does."""
    found = Read()
    text = raw.decode().replace("\r\n", "\n")
    assert text.endswith("\n\n"), text[-80:]
    for block in text.split("\n\n"):
        data = "\n".join(line[5:].removeprefix(" ") for line in block.split("\n") if line.startswith("data:"))
        if data == "[DONE]":
            found.ends += 1
        elif data:
            _take(found, route, json.loads(data))
    return found


def _take(found: Read, route: str, event: dict[str, Any]) -> None:
    if "error" in event:
        found.errors += 1
        return
    if route == GENERATE:
        found.text, meta = event["text"], event["meta_info"]
        found.ids.add(meta["id"])
        if meta["finish_reason"]:
            found.reasons.append(meta["finish_reason"]["type"])
            found.counts.append((meta["prompt_tokens"], meta["completion_tokens"]))
    elif route == MESSAGES:
        kind = event["type"]
        if kind == "message_start":
            found.ids.add(event["message"]["id"])
            found.roles += 1
        elif kind == "content_block_delta":
            found.text += event["delta"]["text"]
        elif kind == "message_delta":
            found.reasons.append(str(event["delta"]["stop_reason"]))
            found.counts.append((event["usage"].get("input_tokens", PROMPT_TOKENS), event["usage"]["output_tokens"]))
        found.ends += kind == "message_stop"
    else:
        found.ids.add(event["id"])
        if not event["choices"]:
            found.counts.append((event["usage"]["prompt_tokens"], event["usage"]["completion_tokens"]))
        for choice in event["choices"]:
            delta = choice.get("delta", {})
            found.text += choice.get("text") or delta.get("content") or ""
            found.thoughts += delta.get("reasoning_content") or ""
            found.calls += "".join(each["function"]["arguments"] for each in delta.get("tool_calls", []))
            found.roles += "role" in delta
            found.reasons += [choice["finish_reason"]] if choice.get("finish_reason") else []


def request(route: str, seed: int, count: int, **more: Any) -> dict[str, Any]:
    """Return a request for a text of `count` pieces."""
    said = f"{seed} {count} |" if route in (COMPLETIONS, GENERATE) else f"{seed} {count}"
    asked: dict[str, Any] = {COMPLETIONS: {"prompt": said}, GENERATE: {"text": said}}.get(
        route, {"messages": [{"role": "user", "content": said}]}
    )
    return {"model": "m", "stream": True, **asked, **more}
