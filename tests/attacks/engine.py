"""A hostile engine: raw bytes on sockets, each connection in a thread, so that it takes nothing of the proxy's time."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from contextlib import suppress

MIB = 1024 * 1024
OK = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}"
STREAM = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
_END = b'data: {"choices":[{"delta":{"content":"a"},"finish_reason":"stop"}]}\n\ndata: [DONE]\n\n'


def plain(body: bytes, kind: bytes = b"text/plain") -> bytes:
    """Return a whole answer."""
    return b"HTTP/1.1 200 OK\r\ncontent-type: %b\r\ncontent-length: %d\r\n\r\n%b" % (kind, len(body), body)


def chunks(data: bytes, size: int) -> bytes:
    """Return a body of chunks of one size, and its end."""
    parts = (data[start : start + size] for start in range(0, len(data), size))
    return b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in parts) + b"0\r\n\r\n"


def event_streams(size: int) -> dict[str, bytes]:
    """Return answers of about `size` bytes by name."""
    first = b'data: {"choices":[{"delta":{"content":"a"}}]}\n\n'

    def of(unit: bytes, begin: bytes = b"") -> bytes:
        return STREAM + chunks(begin + unit * (size // len(unit)) + _END, 16 * 1024)

    return {
        "events of nothing, before a token": of(b"data:{}\n\n"),
        "lines of nothing, before a token": of(b"data:\n"),
        "comments, before a token": of(b":\n"),
        "events of nothing, after a token": of(b"data:{}\n\n", first),
        "blank lines, after a token": of(b"\n", first),
        "events of usage, after a token": of(b'data:{"usage":{}}\n\n', first),
        "one line, after a token": of(b"x", first),
        "floats in an event, before a token": of(b"1e9,", b"data: ["),
        "chunks of one byte, after a token": STREAM + chunks(first + b"x" * min(size, 4 * MIB), 1),
    }


def metrics_texts(size: int) -> dict[str, bytes]:
    """Return metrics of about `size` bytes by name."""
    gauge = b"vllm:num_requests_running"

    def of(unit: bytes, begin: bytes = b"", end: bytes = b"") -> bytes:
        return plain(begin + unit * (size // len(unit)) + end)

    return {
        "a label without a value": plain(b"vllm:cache_config_info{" + b"a" * 25_000 + b"} 1\n"),
        "labels of all bytes": of(b'a="b",', b"vllm:cache_config_info{", b"} 1\n"),
        "lines of one gauge": of(gauge + b'{engine="0"} 1\n'),
        "lines of labels": of(b"vllm:cache_config_info{" + b'a="b",' * 1000 + b"} 1\n"),
        "empty lines": of(b"\n"),
        "a number of all digits": of(b"9", gauge + b" ", b"\n"),
    }


def json_answers(size: int) -> dict[str, bytes]:
    """Return lists of models of about `size` bytes by name."""
    kind = b"application/json"
    return {
        "floats for models": plain(b'{"data":[' + b"1e9," * (size // 4) + b"1]}", kind),
        "models of one letter": plain(b'{"data":[' + b'{"id":"a"},' * (size // 11) + b"1]}", kind),
    }


class HostileEngine:
    """Answers of one engine by path; a path without one gets `OK`. `flood` says what follows each answer to a POST."""

    def __init__(self) -> None:
        self.answers: dict[str, bytes] = {}
        self.post = OK
        #: Sent over and over instead of an answer to a POST until it is set.
        self.flood: bytes | None = None
        self.closed = threading.Event()
        self._socket = socket.create_server(("127.0.0.1", 0), backlog=128)
        self.port: int = self._socket.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self.closed.set()
        self._socket.close()

    def _accept(self) -> None:
        while not self.closed.is_set():
            try:
                connection, _ = self._socket.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with suppress(OSError, ValueError), connection, connection.makefile("rb") as lines:
            while start := lines.readline():
                length = 0
                while (line := lines.readline()) not in (b"\r\n", b""):
                    if line.lower().startswith(b"content-length:"):
                        length = int(line.split(b":")[1])
                while length > 0:
                    length -= len(lines.read(min(length, MIB))) or length
                self._answer(connection.sendall, start)

    def _answer(self, send: Callable[[bytes], object], start: bytes) -> None:
        method, path, _ = start.split(b" ")
        if method == b"POST":
            while self.flood is not None and not self.closed.is_set():
                send(self.flood)
            send(self.post)
        else:
            send(self.answers.get(path.decode(), OK))
