"""One request in the simulated engine, from its first token to its last byte: a class per kind of answer.

Owns what is sent when a token comes. `Served` is both the request that the engine model steps and the stream that the
pieces of its response arrive at; subclasses say how a token looks. A streamed response is written straight to the
connection's transport by whoever delivers it, with no task in between: its handler sends the headers and waits for the
end.
"""

from __future__ import annotations

import asyncio
import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any

from gorgo.apps.engine_server import shapes
from gorgo.apps.engine_server.job import CHAT, COMPLETIONS, EMBEDDINGS, GENERATE, Job
from gorgo.apps.engine_server.text import TOKEN_BYTES, Tape, cache_key, token_count, vector
from gorgo.sim.engine.request import EngineRequest

#: A client that leaves this much unread is cut off: some 20,000 events, more than an answer has.
_MAX_UNREAD_BYTES = 4 * 1024 * 1024

#: Finish reason of every answer: it has all requested tokens.
_FINISH = "length"
#: Arrives in place of a piece where a fault resets the connection.
_RESET = b"reset"

Send = Callable[["Served", bytes, float], None]


class Served(EngineRequest, ABC):
    """A request and its response.

    Parameters
    ----------
    job, rid, model_name, created:
        The parsed body, the id, and fields of the answer.
    tape:
        Source of the answer's text.
    send:
        Takes a piece of the response and the time at which it leaves the engine; `deliver` is called at its arrival.
    transport, chunked:
        The client's connection, and whether each piece is framed as an HTTP chunk (not for an HTTP/1.0 client).
    """

    def __init__(
        self,
        job: Job,
        *,
        rid: str,
        model_name: str,
        created: int,
        tape: Tape,
        send: Send,
        transport: asyncio.Transport,
        chunked: bool = True,
    ) -> None:
        self._tape = tape
        self._text_start = tape.start(job.text)
        super().__init__(
            cache_key(job.text),
            prompt_tokens=token_count(job.text),
            output_tokens=job.output_tokens,
            output_key=tape.text(self._text_start, job.output_tokens),
        )
        self.job = job
        self.rid = rid
        self.head: Mapping[str, Any] = {"id": rid, "created": created, "model": model_name}
        self.transport = transport
        #: When the latest piece arrives; infinite for a response that hangs.
        self.last_arrival_s = 0.0
        #: The first piece is there, the last one is there.
        self.started: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.hangs_at: int | None = None
        self.resets_at: int | None = None
        self._send = send
        self._frame: Callable[[bytes], bytes] = shapes.frame if chunked else bytes
        self._opened = False
        self._pending: list[bytes] = []
        self._last_piece: bytes | None = None
        self._prepare()

    def _prepare(self) -> None:
        """Prepare the parts that are the same for every token."""

    @abstractmethod
    def emit(self, now: float) -> None:
        """The engine made one token more at `now`."""

    @abstractmethod
    def deliver(self, piece: bytes) -> None:
        """A piece of the response arrives."""

    def close(self) -> None:
        """Stop sending: the response is complete, or its client disconnected."""
        self.last_arrival_s = float("inf")
        self._opened = False

    @property
    def usage(self) -> dict[str, Any]:
        return shapes.usage(
            prompt_tokens=self.prompt_tokens, output_tokens=self.emitted, cached_tokens=self.cached_tokens
        )

    @property
    def text(self) -> str:
        """The answer so far."""
        return self._tape.text(self._text_start, self.emitted).decode("ascii")

    def meta_info(self, now: float, finish: str | None) -> dict[str, Any]:
        """SGLang's account of a generation."""
        meta: dict[str, Any] = {
            "id": self.rid,
            "finish_reason": None if finish is None else {"type": finish, "length": self.emitted},
            "prompt_tokens": self.prompt_tokens,
            "weight_version": "default",
            "completion_tokens": self.emitted,
            "cached_tokens": self.cached_tokens,
        }
        if finish is not None:
            meta["e2e_latency"] = now - self.submitted_s
        return meta

    def generated(self, now: float, finish: str | None) -> dict[str, Any]:
        """`/generate`'s answer so far."""
        ids = self._tape.ids(self._text_start, self.emitted)
        return {"text": self.text, "output_ids": ids, "meta_info": self.meta_info(now, finish)}

    def _end(self, piece: bytes, now: float) -> None:
        """Send the last piece."""
        self._last_piece = piece
        self._send(self, piece, now)

    def _strike(self, now: float) -> None:
        """Let an injected fault happen where the response has got to."""
        if self.emitted == self.resets_at:
            self._send(self, _RESET, now)
        if self.emitted in (self.hangs_at, self.resets_at):
            self.last_arrival_s = float("inf")


class Streamed(Served):
    """A response in server-sent events, written to the transport as they arrive."""

    def open(self) -> None:
        """Write the arrived pieces after the headers; later pieces are written as they arrive."""
        self._opened = True
        pending, self._pending = self._pending, []
        for piece in pending:
            self.deliver(piece)

    def deliver(self, piece: bytes) -> None:
        transport = self.transport
        if not self._opened:
            self._pending.append(piece)
            if not self.started.done():
                self.started.set_result(None)
        elif transport.is_closing():
            return  # Its handler is about to be cancelled.
        elif piece is _RESET or transport.get_write_buffer_size() > _MAX_UNREAD_BYTES:
            transport.abort()
        else:
            transport.write(piece)
            if piece is self._last_piece and not self.done.done():
                self.done.set_result(None)


class TokenStream(Streamed):
    """Chat and text completions: an event per token, of which only the token differs."""

    def _prepare(self) -> None:
        self._is_chat = self.job.route == CHAT
        make = shapes.chat_token_event if self._is_chat else shapes.completion_token_event
        self._before, self._after = make(self.head)
        #: The same, framed: tokens are all of one length, so that the frame is too.
        gap = b"\0" * TOKEN_BYTES
        framed = self._frame(self._before + gap + self._after)
        self._framed_before, self._framed_after = framed.split(gap)

    def emit(self, now: float) -> None:
        number = self.emitted
        token = self._tape.token(self._text_start, number)
        if 1 < number < self.output_tokens:
            self._send(self, self._framed_before + token + self._framed_after, now)
        else:
            self._emit_edge(token, now)
        if self.hangs_at is not None or self.resets_at is not None:
            self._strike(now)

    def _emit_edge(self, token: bytes, now: float) -> None:
        """The first token comes with the role before it, the last one with all that ends the stream."""
        piece = self._before + token + self._after
        if self.emitted == 1:
            piece = self._opening() + piece
        if self.finished:
            self._end(self._frame(piece + self._closing()), now)
        else:
            self._send(self, self._frame(piece), now)

    def _opening(self) -> bytes:
        if not self._is_chat:
            return b""
        return shapes.event(shapes.chat_chunk(self.head, {"role": "assistant", "content": ""}, None))

    def _closing(self) -> bytes:
        chunk: Callable[..., dict[str, Any]] = shapes.chat_chunk if self._is_chat else shapes.completion_chunk
        closing = shapes.event(chunk(self.head, {} if self._is_chat else "", _FINISH))
        if self.job.include_usage:
            closing += shapes.event(chunk(self.head, None, None, self.usage))
        return closing + shapes.DONE


class GenerateStream(Streamed):
    """SGLang's own `/generate`: every event has the whole answer so far."""

    def emit(self, now: float) -> None:
        if self.finished:
            self._end(self._frame(shapes.event(self.generated(now, _FINISH)) + shapes.DONE), now)
        else:
            self._send(self, self._frame(shapes.event(self.generated(now, None))), now)
        self._strike(now)


class Whole(Served):
    """An answer in one piece, once the last token is there."""

    body = b""

    def emit(self, now: float) -> None:
        if self.hangs_at is not None or self.resets_at is not None:
            self._strike(now)
        if self.finished:
            self._end(json.dumps(self._answer(now)).encode(), now)

    def deliver(self, piece: bytes) -> None:
        if piece is _RESET:
            self.transport.abort()
        elif not self.done.done():
            self.body = piece
            self.done.set_result(None)

    def _answer(self, now: float) -> dict[str, Any]:
        route = self.job.route
        if route == CHAT:
            return shapes.chat_answer(self.head, self.text, _FINISH, self.usage)
        if route == COMPLETIONS:
            return shapes.completion_chunk(self.head, self.text, _FINISH, self.usage)
        if route == GENERATE:
            return self.generated(now, _FINISH)
        assert route == EMBEDDINGS, "every generating route has its answer"
        return shapes.embedding_answer(self.head, vector(self.job.text), self.prompt_tokens)
