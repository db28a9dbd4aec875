"""Refusals of what a client sent: their status, and the response in the proxy's form of an error."""

from __future__ import annotations

from gorgo.live.http.errors import error_json

_ERRORS = {
    400: ("Bad Request", "invalid_http", "expected HTTP/1.1, and an unambiguous request"),
    408: ("Request Timeout", "request_timeout", "expected the whole head of the request in time"),
    431: ("Request Header Fields Too Large", "headers_too_large", "the request's head is too large"),
    500: ("Internal Server Error", "internal_error", "internal error of the proxy"),
    501: ("Not Implemented", "transfer_encoding", "expected chunked as the only transfer coding"),
    503: ("Service Unavailable", "buffers_full", "too many heads are incomplete; expected the whole head at once"),
    505: (
        "HTTP Version Not Supported",
        "http_version",
        "expected HTTP/1.1; for HTTP/2, put a load balancer or Envoy in front",
    ),
}


class Refused(Exception):  # noqa: N818 - reads as the fact
    """A request that is not read. After it the connection reads nothing: what follows is not a request."""

    def __init__(self, why: str, status: int = 400) -> None:
        super().__init__(why)
        self.status = status


def refusal(status: int, own_headers: bytes, *, head_only: bool = False) -> bytes:
    """Return the last response of a connection; no text of it repeats what the client sent."""
    phrase, code, message = _ERRORS[status]
    body = b"" if head_only else error_json(status, code, message)
    head = b"HTTP/1.1 %d %b\r\ncontent-type: application/json\r\n" % (status, phrase.encode())
    return head + own_headers + b"connection: close\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body)
