"""The head of a response, and how its body is framed: a length, chunks, or the end of the connection."""

from __future__ import annotations

from collections.abc import Iterable
from http import HTTPStatus

from gorgo.live.http.headers import Header
from gorgo.live.listener.connection.head import Head

_STATUS_LINES = {status.value: b"HTTP/1.1 %d %b\r\n" % (status, status.phrase.encode()) for status in HTTPStatus}
#: Statuses whose responses have no body, whatever the headers say.
_WITHOUT_BODY = frozenset({204, 304})
#: Headers that say how the response ends; the connection writes the last two itself.
_FRAMING = frozenset({b"content-length", b"connection", b"transfer-encoding"})


class ResponseHead:
    """A head that can be written.

    `length`: of the body, None if it is not declared. `chunked`: the body has chunks. `persistent`: another request may
    follow. `has_body`: bytes of a body are written; for HEAD, 204 and 304 they are not.
    """

    __slots__ = ("chunked", "has_body", "length", "persistent", "text")

    def __init__(
        self, status: int, headers: Iterable[Header], request: Head, *, last: bool, own_headers: bytes
    ) -> None:
        closes = last or not request.persistent
        self.length: int | None = None
        parts: list[bytes] = []
        for name, value in headers:
            lower = name.lower()
            if lower in _FRAMING:
                if lower == b"content-length":
                    self.length = int(value)
                elif lower == b"connection":
                    closes = closes or b"close" in value.lower()
                    continue
                else:
                    continue
            parts += (lower, b": ", value, b"\r\n")
        fields, count = b"".join(parts), len(parts) // 4
        if not fields.count(b"\r\n") == fields.count(b"\n") == fields.count(b"\r") == count or b"\0" in fields:
            raise RuntimeError("a header with a line end or a NUL")
        # Without a length, a client of HTTP/1.0 reads to the end of the connection, which is not persistent.
        self.chunked = self.length is None and status not in _WITHOUT_BODY and request.version == "1.1"
        self.has_body = status not in _WITHOUT_BODY and request.method != "HEAD"
        self.persistent = not closes
        self.text = b"".join(
            (
                _STATUS_LINES.get(status) or b"HTTP/1.1 %d \r\n" % status,
                fields,
                b"transfer-encoding: chunked\r\n" if self.chunked else b"",
                own_headers,
                b"connection: close\r\n\r\n" if closes else b"\r\n",
            )
        )
