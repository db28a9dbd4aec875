"""Answers of a replica that fails fast: the bytes of each kind, for each route, streamed or whole.

Pure: a request in, bytes out. Which replica answers so, and when, is the gate's business. Each answer comes at once, so
that a router that counts latency or open requests prefers the replica that gives it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from http import HTTPStatus
from typing import Any

from gorgo.lab.engine_server.job import CHAT, COMPLETIONS, GENERATE
from tests.chaos.questions import MODEL, right_text


class FastFailure(Enum):
    """Kind of failure; the value is its name in tables."""

    UNAUTHORIZED = "401 to everything"
    FORBIDDEN = "403 to everything"
    NOT_FOUND = "404 to everything"
    NOT_ALLOWED = "405 to everything"
    TOO_MANY = "429 for ever"
    UNAVAILABLE = "503 for ever"
    EMPTY = "empty 200"
    NO_TOKEN = "200 without a token"
    ERROR_EVENT = "200 with an error event"
    TRUNCATED = "truncated answers"
    UNFINISHED = "answers without an end"
    ONE_TOKEN = "answers of one token"

    @property
    def status(self) -> HTTPStatus:
        return HTTPStatus(int(self.value[:3])) if self.value[:3].isdigit() else HTTPStatus.OK

    @property
    def on_probes(self) -> bool:
        """Whether GET requests fail too; a replica that fails otherwise still answers its probes."""
        return self.value.endswith("everything")


@dataclass(frozen=True, slots=True)
class Received:
    """A whole request as the gate has read it."""

    method: str
    route: str
    body: Mapping[str, Any]

    @property
    def stream(self) -> bool:
        return bool(self.body.get("stream"))


@dataclass(frozen=True, slots=True)
class Answer:
    """Bytes on the wire, and whether the connection ends after them."""

    data: bytes
    closes: bool = False


def read_request(data: bytes) -> Received | None:
    """Read a request; None as long as a part of it is missing."""
    head, separator, body = data.partition(b"\r\n\r\n")
    if not separator:
        return None
    length = re.search(rb"\r\ncontent-length: *(\d+)", head, re.IGNORECASE)
    if length is not None and len(body) < int(length[1]):
        return None
    method, route, _ = head.split(b"\r\n", 1)[0].decode("ascii").split(" ", 2)
    return Received(method, route, json.loads(body) if body else {})


def answer_to(request: Received, failure: FastFailure) -> Answer:
    """Return the failure's answer to a request."""
    if failure.status is not HTTPStatus.OK:
        return _error(failure.status)
    kind = b"text/event-stream" if request.stream else b"application/json"
    if failure is FastFailure.EMPTY:
        return Answer(_head(200, kind, 0))
    if not request.stream:
        return _whole(request, failure)
    chunks = b"".join(_chunk(b"data: %s\n\n" % each) for each in _events(request, failure))
    if failure is FastFailure.TRUNCATED:
        return Answer(_CHUNKED + chunks[:-9], closes=True)
    return Answer(_CHUNKED + chunks + b"0\r\n\r\n")


def _error(status: HTTPStatus) -> Answer:
    """As FastAPI says it: engines have no more than `detail` for what their server refuses."""
    body = json.dumps({"detail": status.phrase}).encode()
    return Answer(_head(status, b"application/json", len(body)) + body)


def _whole(request: Received, failure: FastFailure) -> Answer:
    document = _REFUSAL if failure is FastFailure.ERROR_EVENT else _final(request, _text(request, failure))
    body = json.dumps(document).encode()
    if failure is FastFailure.TRUNCATED:
        return Answer(_head(200, b"application/json", len(body)) + body[:-9], closes=True)
    if failure is FastFailure.UNFINISHED:
        body = body[:-9]
    return Answer(_head(200, b"application/json", len(body)) + body)


def _events(request: Received, failure: FastFailure) -> Iterable[bytes]:
    if failure is FastFailure.ERROR_EVENT:
        return json.dumps(_REFUSAL).encode(), b"[DONE]"
    text = _text(request, failure)
    token = json.dumps(_piece(request, text, None)).encode()
    if failure in (FastFailure.TRUNCATED, FastFailure.UNFINISHED):
        return (token, token)[: 1 + (failure is FastFailure.TRUNCATED)]
    last = _piece(request, text if request.route == GENERATE else "", "stop")
    if request.route != GENERATE:
        last["usage"] = _usage(int(bool(text)))
    return token, json.dumps(last).encode(), b"[DONE]"


def _text(request: Received, failure: FastFailure) -> str:
    """The first token of the right answer, so that nothing but its length is wrong."""
    return "" if failure is FastFailure.NO_TOKEN else right_text(request.route, request.body, 1)


_REFUSAL = {"error": {"message": "EngineCore died", "type": "InternalServerError", "param": None, "code": 500}}
_RID = "fast"


def _piece(request: Received, text: str, finish: str | None) -> dict[str, Any]:
    """An event of a stream."""
    if request.route == GENERATE:
        return _generated(text, finish)
    choice: dict[str, Any] = {"index": 0, "finish_reason": finish}
    choice |= {"delta": {"role": "assistant", "content": text}} if request.route == CHAT else {"text": text}
    return {"id": _RID, "object": "chunk", "created": 0, "model": MODEL, "choices": [choice]}


def _final(request: Received, text: str) -> dict[str, Any]:
    if request.route == GENERATE:
        return _generated(text, "stop")
    choice: dict[str, Any] = {"index": 0, "finish_reason": "stop"}
    choice |= {"text": text} if request.route == COMPLETIONS else {"message": {"role": "assistant", "content": text}}
    return {"id": _RID, "created": 0, "model": MODEL, "choices": [choice], "usage": _usage(int(bool(text)))}


def _generated(text: str, finish: str | None) -> dict[str, Any]:
    reason = None if finish is None else {"type": finish}
    meta = {"id": _RID, "finish_reason": reason, "prompt_tokens": 1, "completion_tokens": int(bool(text))}
    return {"text": text, "output_ids": [1] if text else [], "meta_info": meta}


def _usage(tokens: int) -> dict[str, int]:
    return {"prompt_tokens": 1, "completion_tokens": tokens, "total_tokens": 1 + tokens}


#: As engines send streams: an error can follow what was sent.
_CHUNKED = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def _head(status: int, kind: bytes, length: int) -> bytes:
    phrase = HTTPStatus(status).phrase.encode()
    return b"HTTP/1.1 %d %s\r\ncontent-type: %s\r\ncontent-length: %d\r\n\r\n" % (status, phrase, kind, length)
