"""The head of a request: one reading, or a refusal.

Owns the grammar of heads and the framing of the body behind one. Leaves the bytes of the body to `reader`.

Theory of operation. A request is smuggled where the proxy and the program before it disagree on its end. One expression
describes each head that the proxy accepts: lines that end with CR LF alone, no folded line, no control character, a
path as the target, or a URL with the host of the header. httptools then reads the same bytes, strictly, and has to
agree on the target and on the number of headers. The framing is checked on what httptools returned: one length of
digits, or chunked as the only coding of HTTP/1.1, and never both. httptools alone accepts eleven of the suite's
ambiguous forms, h11 thirty-three.
"""

from __future__ import annotations

import re
from urllib.parse import unquote

from httptools import HttpParserError, HttpParserUpgrade, HttpRequestParser

from gorgo.live.http.headers import CONTROLS, LENGTH, Header, RequestHeaders
from gorgo.live.listener.heads import HeadLimits

#: Header lines of a request, or trailers; clients and load balancers send about 30.
MAX_HEADER_LINES = 128
#: Lines of headers, or of trailers, that have one reading. No quantifier gives back what it took.
LINES = rb"(?:[-!#$%&'*+.^_`|~0-9a-zA-Z]++:[^\x00-\x08\x0a-\x1f\x7f]*+\r\n){0,128}+"
#: A target is a path, or a URL of a client that takes the proxy for a forward proxy (RFC 9112, 3.2.2).
_TARGET = rb"((?:[hH][tT][tT][pP][sS]?://[-.:\[\]~_0-9a-zA-Z]++)?+)((?:/[\x21-\x7e]*+)?+)"
_HEAD = re.compile(rb"([A-Z]{1,20}) (?=[/hH])" + _TARGET + rb" HTTP/(1\.[01])\r\n" + LINES + rb"\r\n")
_REQUEST_LINE = re.compile(rb"\S+ \S+ HTTP/\d\.\d\r\n")
_CODING = re.compile(rb"\r\ntransfer-encoding[ \t]*:", re.IGNORECASE)
_LENGTHS = re.compile(rb"\r\ncontent-length[ \t]*:", re.IGNORECASE)
#: HTTP/2 without TLS begins like this.
_PREFACE = b"PRI * HTTP/2.0\r\n\r\n"


class Refused(Exception):  # noqa: N818 - reads as the fact
    """A request that is not read. After it the connection reads nothing: what follows is not a request."""

    def __init__(self, why: str, status: int = 400) -> None:
        super().__init__(why)
        self.status = status


class Head:
    """A head that was accepted.

    `length` is the size of the body; None if it is chunked. Names of `headers` are in lower case; Upgrade is left
    out, which a server may ignore. `persistent`: another request may follow. `expects_continue`: the client waits for
    an interim response before it sends the body. `raw_path`, `path` and `query` are the parts of `target`.
    """

    __slots__ = (
        *("expects_continue", "headers", "length", "method", "path", "persistent", "query", "raw_path", "target"),
        "version",
    )

    def __init__(self, method: str, target: bytes, version: str, headers: RequestHeaders) -> None:
        self.method = method
        self.target = target
        self.raw_path, _, self.query = target.partition(b"?")
        path = self.raw_path.decode("ascii")
        self.path = unquote(path) if "%" in path else path
        self.version = version
        self.headers = headers
        self.length: int | None = 0
        # A client of HTTP/1.0 sends one request per connection.
        self.persistent = version == "1.1"
        self.expects_continue = False

    def repeated(self, headers: RequestHeaders, length: int) -> Head:
        """Return the head of another request that differs in `headers` and `length`."""
        head = Head(self.method, self.target, self.version, headers)
        head.length = length
        head.persistent = self.persistent
        head.expects_continue = self.expects_continue
        return head


class _Fields:
    """Callbacks of httptools during one head."""

    __slots__ = ("complete", "headers", "target")

    def __init__(self) -> None:
        self.headers: list[Header] = []
        self.target = b""
        self.complete = False

    def on_url(self, url: bytes) -> None:
        self.target += url

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers.append((name.lower(), value.rstrip(b" \t")))

    def on_headers_complete(self) -> None:
        self.complete = True


def read_head(text: bytes, limits: HeadLimits) -> Head:
    """Return the head of the bytes `text`, which end with an empty line. Raises `Refused`."""
    match = _HEAD.fullmatch(text)
    if match is None or len(text) > limits.size_bytes:
        raise _refusal_of(text, limits)
    fields = _Fields()
    try:
        HttpRequestParser(fields).feed_data(text)
    except HttpParserUpgrade:
        pass  # The rest of `text` is empty: no byte was read as another protocol.
    except HttpParserError as error:
        raise _misframed(text, str(error)) from None
    method, address, path, version = match.groups()
    if not fields.complete or fields.target != address + path or len(fields.headers) != text.count(b"\n") - 2:
        raise Refused("two readings of one head")
    head = Head(method.decode("ascii"), path or b"/", version.decode("ascii"), RequestHeaders(fields.headers))
    _interpret(head)
    if address:
        _check_address(address, head.headers)
    return head


def _interpret(head: Head) -> None:
    """Set the framing and the options of a head from its headers."""
    named = dict(head.headers)
    repeated = len(named) != len(head.headers)
    if repeated:
        _check_repeated(head.headers)
    if head.version == "1.1" and b"host" not in named:
        raise Refused("no host")
    _set_framing(head, named.get(b"transfer-encoding"), named.get(b"content-length"))
    if named.get(b"connection", b"keep-alive") != b"keep-alive" or repeated:
        head.persistent = head.persistent and b"close" not in _tokens(head.headers, b"connection")
    if b"expect" in named and head.version == "1.1":
        head.expects_continue = b"100-continue" in _tokens(head.headers, b"expect")
    if b"upgrade" in named:
        head.headers = RequestHeaders(pair for pair in head.headers if pair[0] != b"upgrade")


def _check_address(address: bytes, headers: list[Header]) -> None:
    """Accept the URL of a target whose host is that of the header: a program before the proxy may read either."""
    named = address.partition(b"://")[2].lower()
    if [value.lower() for name, value in headers if name == b"host"] != [named]:
        raise Refused("a target with another host than the header")


def _set_framing(head: Head, coding: bytes | None, length: bytes | None) -> None:
    if coding is not None:
        if length is not None:
            raise Refused("several lengths of one body")
        if head.version != "1.1":
            raise Refused("a transfer coding before HTTP/1.1")
        if coding.lower() != b"chunked":
            raise Refused("a coding other than chunked", 501)
        head.length = None
    elif length is not None:
        if LENGTH.fullmatch(length) is None:
            raise Refused("a length that is not a number")
        head.length = int(length)


def _check_repeated(headers: list[Header]) -> None:
    names = [name for name, _ in headers]
    if names.count(b"content-length") > 1:
        raise Refused("several lengths of one body")
    if names.count(b"transfer-encoding") > 1:
        raise Refused("several transfer codings", 400 if b"content-length" in names else 501)
    if names.count(b"host") > 1:
        raise Refused("several hosts")


def _tokens(headers: list[Header], wanted: bytes) -> set[bytes]:
    """Return the tokens of a header that is a list, from all its lines."""
    return {token.strip(b" \t").lower() for name, value in headers if name == wanted for token in value.split(b",")}


def check_lines(text: bytes) -> None:
    """Accept CR and LF only together, no control character, no folded line. Raises `Refused`."""
    lines = text.count(b"\r\n")
    if text.count(b"\n") != lines or text.count(b"\r") != lines:
        raise Refused("a line end other than CR LF")
    if len(text.translate(None, CONTROLS)) != len(text):
        raise Refused("a control character")
    if b"\r\n " in text or b"\r\n\t" in text:
        raise Refused("a folded line")


def check_size(text: bytes, limits: HeadLimits) -> None:
    """Accept a head, or a last chunk with its trailers, within the limits. Raises `Refused`."""
    if len(text) > limits.size_bytes or text.count(b"\n") - 2 > MAX_HEADER_LINES:
        raise Refused("head or trailers too large", 431)


def _refusal_of(text: bytes, limits: HeadLimits) -> Refused:
    """Return why a head is refused that is too large, or that the expression does not describe."""
    try:
        check_lines(text)
        check_size(text, limits)
    except Refused as refused:
        return refused
    if text == _PREFACE:
        return Refused("HTTP/2", 505)
    if _REQUEST_LINE.match(text) is None:
        return Refused("no request line")
    return _misframed(text, "outside of the grammar of heads")


def _misframed(text: bytes, why: str) -> Refused:
    """Return the refusal of a head that is not read: 501 if a coding alone may be the reason."""
    only_coding = _CODING.search(text) and not _LENGTHS.search(text) and _HEAD.fullmatch(text)
    return Refused(why, 501 if only_coding and b" HTTP/1.1\r\n" in text else 400)
