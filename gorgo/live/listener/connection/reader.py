r"""The requests of one connection, from bytes in any pieces. No sockets, no time.

Owns the reader (`RequestReader`), the decoder of chunked bodies (`ChunkedBody`), and the head that the next one may
repeat (`RepeatedHead`). Leaves the check of a head to the code that parses it.

A request is read only after the one before it was answered. Bytes behind it wait: the end of a connection comes behind
them, and an unread connection does not show that its client disconnected. The connection pauses reading at the size of
a head. Behind the last request of a connection nothing is read as another.

A chunked body is decoded strictly, its chunks neither too many nor too small. httptools does not show the bytes between
two chunks, where readers differ: blanks behind the size, lone CRs in an extension, sizes of more than 64 bits, a bare
LF. So they are read here. Trailers are checked as a head is, and dropped.

Example
-------
>>> reader = RequestReader(HeadLimits(1000, 10.0))
>>> reader.receive(b"POST /a HTTP/1.1\r\nhost: g\r\ncontent-length: 3\r\n\r\nab")
>>> reader.next_head().target, reader.read_body(), reader.complete
(b'/a', b'ab', False)
>>> reader.receive(b"cGET /")
>>> reader.read_body(), reader.complete, reader.buffered_bytes
(b'c', True, 5)
"""

from __future__ import annotations

import re
from collections.abc import Callable
from enum import Enum, auto
from hmac import compare_digest
from typing import NoReturn, ParamSpec, TypeVar
from urllib.parse import unquote

from httptools import HttpParserError, HttpParserUpgrade, HttpRequestParser

from gorgo.core.record import mutable_record
from gorgo.live.http.headers import CONTROLS, LENGTH, Header, RequestHeaders
from gorgo.live.listener.heads import HeadLimits

# The head of a request: one reading, or a refusal.
#
# Owns the grammar of heads and the framing of the body behind one. Leaves the bytes of the body to `reader`.
#
# Theory of operation. A request is smuggled where the proxy and the program before it disagree on its end. One
# expression describes each head that the proxy accepts: lines that end with CR LF alone, no folded line, no control
# character, a path as the target, or a URL with the host of the header. httptools then reads the same bytes, strictly,
# and has to agree on the target and on the number of headers. The framing is checked on what httptools returned: one
# length of digits, or chunked as the only coding of HTTP/1.1, and never both. httptools alone accepts eleven of the
# suite's ambiguous forms, h11 thirty-three.


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


@mutable_record
class Head:
    """A head that was accepted.

    `length` is the size of the body; None if it is chunked. Names of `headers` are in lower case; Upgrade is left
    out, which a server may ignore. `persistent`: another request may follow. `expects_continue`: the client waits for
    an interim response before it sends the body. `raw_path`, `path` and `query` are the parts of `target`.
    """

    method: str
    target: bytes
    raw_path: bytes
    path: str
    query: bytes
    version: str
    headers: RequestHeaders
    length: int | None
    persistent: bool
    expects_continue: bool

    @classmethod
    def of(cls, method: str, target: bytes, version: str, headers: RequestHeaders) -> Head:
        raw_path, _, query = target.partition(b"?")
        path = raw_path.decode("ascii")
        path = unquote(path) if "%" in path else path
        # A client of HTTP/1.0 sends one request per connection.
        persistent = version == "1.1"
        return cls(method, target, raw_path, path, query, version, headers, 0, persistent, expects_continue=False)

    def repeated(self, headers: RequestHeaders, length: int) -> Head:
        """Return the head of another request that differs in `headers` and `length`."""
        return Head(
            self.method,
            self.target,
            self.raw_path,
            self.path,
            self.query,
            self.version,
            headers,
            length,
            self.persistent,
            self.expects_continue,
        )


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
    head = Head.of(method.decode("ascii"), path or b"/", version.decode("ascii"), RequestHeaders(fields.headers))
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


# The last head of a connection, to recognise the next one that has the same lines but for the body's length.
#
# Owns that comparison; each head that is not recognised is read in full. The lines have keys of clients, and a load
# balancer's connection serves several of these, so the comparison takes equally long for each content.


#: Digits of a length that is read without a second check; more would be a petabyte.
MAX_DIGITS = 15
_LENGTH = re.compile(rb"\r\ncontent-length: ([0-9]{1,15})\r\n", re.IGNORECASE)
_NAME = b"content-length"


class RepeatedHead:
    """A head that was accepted, with a length in digits."""

    __slots__ = ("_after", "_before", "_head", "_limit", "_place", "_size")

    def __init__(self, head: Head, *, before: bytes, after: bytes, place: int, limit: int) -> None:
        self._head = head
        self._before = before
        self._after = after
        self._size = len(before)
        #: Of the length in the list of headers.
        self._place = place
        self._limit = limit

    @classmethod
    def of(cls, text: bytes, head: Head, *, limit: int) -> RepeatedHead | None:
        """Return the head of the bytes `text` for comparison, if it is one that may be repeated.

        `limit`: bytes of a head, at most.
        """
        match = _LENGTH.search(text)
        if match is None or head.length is None:
            return None
        index = next(index for index, (name, _) in enumerate(head.headers) if name == _NAME)
        before, after = text[: match.start(1)], text[match.end(1) :]
        return cls(head, before=before, after=after, place=index, limit=limit)

    def again(self, text: bytes) -> Head | None:
        """Return the head of `text` if it repeats this one with any length, else `None`."""
        size = self._size
        end = text.find(b"\r\n", size)
        if end < 0:
            return None
        digits = text[size:end]
        if (
            not compare_digest(text[:size], self._before)
            or not compare_digest(text[end:], self._after)
            or not digits.isdigit()
            or len(digits) > MAX_DIGITS
            or len(text) > self._limit
        ):
            return None
        last = self._head
        headers = RequestHeaders(last.headers, last.headers.findings)
        headers[self._place] = (_NAME, digits)
        return last.repeated(headers, int(digits))


P = ParamSpec("P")
R = TypeVar("R")
#: Chunks of one body that may be of any size, and the least mean size beyond: each takes some microseconds, and a read
#: could have ten thousand of one byte.
SMALL_CHUNKS, MEAN_CHUNK_BYTES = 512, 64
#: The line before a chunk, with its extension; extensions are not used by clients.
MAX_LINE_BYTES = 1024
_LINE = re.compile(rb"([0-9A-Fa-f]{1,16})(?:;[^\x00-\x08\x0a-\x1f\x7f]*+)?\r\n")
#: A line whose end is yet to come.
_PARTIAL_LINE = re.compile(rb"(?:[0-9A-Fa-f]{1,16}(?:;[^\x00-\x08\x0a-\x1f\x7f]*+)?\r?)?")
_TRAILERS = re.compile(LINES + rb"\r\n")
#: Trailers that say how long a body is; RFC 9110 forbids them, and readers differ on what they mean.
_FRAMING = re.compile(rb"(?:\A|\n)(?:content-length|transfer-encoding):", re.IGNORECASE)
_BARE_LF = re.compile(rb"(?<!\r)\n")


class RequestReader:
    """Reads requests one after the other.

    `next_head` begins a request, `read_body` continues it until it is `complete`, and `start_next` permits the next.
    After `Refused` or `stop` every further byte is dropped.
    """

    __slots__ = (
        *("_at", "_chunks", "_data", "_last_head", "_left", "_limits", "_persistent", "_scanned", "_stopped"),
        "complete",
    )

    def __init__(self, limits: HeadLimits) -> None:
        self._limits = limits
        #: Received bytes; those before `_at` were read, and those before `_scanned` have no end of a head.
        self._data = b""
        self._at = self._scanned = 0
        self._stopped = False
        #: Bytes of the body that are yet to come, unless it is chunked.
        self._left = 0
        self._chunks: ChunkedBody | None = None
        self._persistent = True
        self._last_head: RepeatedHead | None = None
        #: Whether the current request was read to its end.
        self.complete = False

    @property
    def buffered_bytes(self) -> int:
        """Received bytes that are not read: of an incomplete head, or behind the current request."""
        return len(self._data) - self._at

    def receive(self, data: bytes) -> None:
        if self._stopped:
            return
        if self._at == len(self._data):
            self._data, self._scanned = data, 0
        else:
            self._data, self._scanned = self._data[self._at :] + data, max(0, self._scanned - self._at)
        self._at = 0

    def next_head(self) -> Head | None:
        """Return the next request's head, None if it is incomplete. Raises `Refused`."""
        start = self._at
        end = self._data.find(b"\r\n\r\n", max(start, self._scanned - 3)) + 4
        if end < 4:
            self._check_partial_head()
            return None
        head = self._read_head(self._data[start:end])
        self._at = end
        self._persistent = head.persistent
        if head.length is None:
            self._chunks = ChunkedBody(self._limits)
        else:
            self._left, self._chunks = head.length, None
            if not head.length:
                self._complete()
        return head

    def _read_head(self, text: bytes) -> Head:
        last = self._last_head
        head = None if last is None else last.again(text)
        if head is None:
            head = self._checked(read_head, text, self._limits)
            self._last_head = RepeatedHead.of(text, head, limit=self._limits.size_bytes)
        return head

    def read_body(self) -> bytes:
        """Return the received bytes of the body, and set `complete` behind the last. Raises `Refused`."""
        if self.complete:
            return b""
        data, at = self._data, self._at
        if self._chunks is None:
            part = data if not at and len(data) <= self._left else data[at : at + self._left]
            self._at += len(part)
            self._left -= len(part)
            ended = not self._left
        else:
            part, self._at, ended = self._checked(self._chunks.decode, data, at)
        if ended:
            self._complete()
        return part

    def start_next(self) -> None:
        """Permit the next request; the current one is complete and answered."""
        self.complete = False
        self._scanned = self._at

    def stop(self) -> None:
        """Drop what was received and all that follows."""
        self._stopped = True
        self._last_head = None
        self._data = b""
        self._at = self._scanned = 0

    def _complete(self) -> None:
        self.complete = True
        if not self._persistent:
            self.stop()

    def _check_partial_head(self) -> None:
        """Refuse an incomplete head as soon as it shows that it is none, or too large."""
        data, size = self._data, len(self._data) - self._at
        if not size:
            return
        if data[self._at] <= 0x20:
            self._refuse("no request line")  # as the first byte of a TLS handshake
        if _BARE_LF.search(data, max(self._at, self._scanned)):
            self._refuse("a line end other than CR LF")
        if size > self._limits.size_bytes:
            self._refuse("head or trailers too large", 431)
        self._scanned = len(data)

    def _refuse(self, why: str, status: int = 400) -> NoReturn:
        self.stop()
        raise Refused(why, status)

    def _checked(self, read: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Call `read`; stop at a refusal."""
        try:
            return read(*args, **kwargs)
        except Refused:
            self.stop()
            raise


class _Next(Enum):
    LINE = auto()
    DATA = auto()
    DATA_END = auto()
    TRAILERS = auto()


class ChunkedBody:
    """The decoder of one chunked body."""

    __slots__ = ("_bytes", "_chunks", "_last_line", "_left", "_limits", "_next")

    def __init__(self, limits: HeadLimits) -> None:
        self._limits = limits
        self._next = _Next.LINE
        #: Bytes of the current chunk that are yet to come.
        self._left = 0
        self._chunks = self._bytes = 0
        self._last_line = b""

    def decode(self, data: bytes, at: int) -> tuple[bytes, int, bool]:
        """Return the body's bytes in `data` from `at` on, the position behind them, and whether the body has ended.

        Raises `Refused`. Bytes from the returned position on are needed again, with those that follow.
        """
        parts: list[bytes] = []
        while True:
            match self._next:
                case _Next.DATA:
                    part = data[at : at + self._left]
                    parts.append(part)
                    at += len(part)
                    self._left -= len(part)
                    if self._left:
                        break
                    self._next = _Next.DATA_END
                case _Next.DATA_END:
                    end = data[at : at + 2]
                    if end != b"\r\n":
                        if end not in (b"", b"\r"):
                            raise Refused("a chunk longer than its size")
                        break
                    at += 2
                    self._next = _Next.LINE
                case _Next.LINE:
                    line = _LINE.match(data, at)
                    if line is None:
                        self._check_partial_line(data, at)
                        break
                    at = line.end()
                    self._begin_chunk(line)
                case _Next.TRAILERS:
                    end_at = self._end_of_trailers(data, at)
                    if end_at is None:
                        break
                    return b"".join(parts), end_at, True
        return parts[0] if len(parts) == 1 else b"".join(parts), at, False

    def _begin_chunk(self, line: re.Match[bytes]) -> None:
        if line.end() - line.start() > MAX_LINE_BYTES:
            raise Refused("a long extension of a chunk")
        size = int(line[1], 16)
        if not size:
            self._last_line = line[0]
            self._next = _Next.TRAILERS
            return
        self._chunks += 1
        self._bytes += size
        if self._chunks > SMALL_CHUNKS and self._bytes < self._chunks * MEAN_CHUNK_BYTES:
            raise Refused("many small chunks")
        self._left = size
        self._next = _Next.DATA

    @staticmethod
    def _check_partial_line(data: bytes, at: int) -> None:
        if len(data) - at > MAX_LINE_BYTES or _PARTIAL_LINE.fullmatch(data, at) is None:
            raise Refused("an ambiguous chunk")

    def _end_of_trailers(self, data: bytes, at: int) -> int | None:
        """Return the position behind the trailers; None if they are incomplete."""
        if data.startswith(b"\r\n", at):
            return at + 2
        end = data.find(b"\r\n\r\n", at)
        if end < 0:
            if _BARE_LF.search(data, at):
                raise Refused("a line end other than CR LF")
            if len(self._last_line) + len(data) - at > self._limits.size_bytes:
                raise Refused("head or trailers too large", 431)
            return None
        text = data[at : end + 4]
        check_lines(self._last_line + text)
        check_size(self._last_line + text, self._limits)
        if _TRAILERS.fullmatch(text) is None or _FRAMING.search(text) is not None:
            raise Refused("an ambiguous trailer")
        return end + 4
