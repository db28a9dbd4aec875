"""The routes of the page on the admin listener: sign-in, sign-out, page, assets, updates.

Owns the handlers (`Page`), the sessions of browsers (`Sessions`), and the updates as server-sent events
(`LiveUpdates`). Leaves the markup to `document`.

The sign-in form takes the admin token and starts a session. Its cookie is valid for these routes alone, so no page of
another origin can change anything. Programs send the token itself, as to every admin route.
"""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import Awaitable, Callable, Mapping
from hashlib import sha256
from importlib.resources import files
from time import monotonic
from urllib.parse import parse_qs

from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Route

from gorgo import formatting
from gorgo.core.lru import Lru
from gorgo.live.admin.calls import TokenCheck, count_of, json_response
from gorgo.live.admin.page.charts import Html
from gorgo.live.admin.page.document import ROOT, Writer, login_page, off_page, status_page
from gorgo.live.admin.page.snapshot import gather_snapshot
from gorgo.live.event_loop import Clock
from gorgo.live.http.errors import HttpError, Message, Receive, Send, send_error
from gorgo.live.state import LiveState

# Sessions of the page: a browser cannot send a bearer token by itself, so a cookie stands for it.
#
# The cookie allows the page alone. HTTP Basic would send the token with every request to this origin, cross-site ones
# included, without a way to sign out. The token is not the cookie: a session expires and is worthless elsewhere.


#: Length of a session: a shift.
SESSION_S = 12 * 3600.0
#: Sessions at once; one more ends the oldest.
SESSIONS = 64


class Sessions:
    """The sessions of one process; a restart ends them.

    Parameters
    ----------
    clock:
        When a session is over.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        #: End of each session by the hash of its key: the time of a lookup says nothing about a key.
        self._ends = Lru[bytes, float](SESSIONS)

    def __len__(self) -> int:
        return len(self._ends)

    def open(self) -> str:
        """Return the key of a new session, for a client that has shown the token."""
        key = secrets.token_urlsafe(32)
        self._ends.put(_hash(key), self._clock() + SESSION_S)
        return key

    def holds(self, key: str | None) -> bool:
        """Return whether `key` is of a valid session."""
        if key is None:
            return False
        end_s = self._ends.get(_hash(key))
        return end_s is not None and self._clock() < end_s

    def end(self, key: str | None) -> None:
        """End a session."""
        if key is not None:
            self._ends.pop(_hash(key), None)


def _hash(key: str) -> bytes:
    return sha256(key.encode()).digest()


# The updates of the page as server-sent events: changed parts, once a second.
#
# Theory of operation. Nothing runs without a listener. Each listener has a loop that reads the parts, sends those that
# differ from its last ones, and waits. The parts are rendered once per interval for all listeners. A new or returning
# browser starts with all parts, so there is no replay and no queue. One that does not read is cut at the write
# deadline and delays no other. Each round ends with a `tick`, which is also the heartbeat.


#: Interval of updates.
INTERVAL_S = 1.0
#: Write deadline, s; a browser that does not read for longer is asleep.
WRITE_TIMEOUT_S = 10.0
#: Open pages at most; each costs a copy of changed parts.
LISTENERS = 8
#: Delay after which a browser reconnects, ms.
_RETRY_MS = 2000

#: A clock time, and the parts of that time.
TakeSnapshot = tuple[str, Mapping[str, Html]]


class LiveUpdates:
    """The updates of one proxy.

    Parameters
    ----------
    take_snapshot:
        Renders the parts.
    closing:
        Ends every stream.
    interval_s, patience_s, listeners:
        The bounds above.
    clock:
        Seconds, from anywhere.
    """

    def __init__(
        self,
        take_snapshot: Callable[[], Awaitable[TakeSnapshot]],
        closing: asyncio.Event,
        *,
        interval_s: float = INTERVAL_S,
        patience_s: float = WRITE_TIMEOUT_S,
        listeners: int = LISTENERS,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        self._take_snapshot = take_snapshot
        #: One snapshot at a time, shared by all listeners.
        self._turn = asyncio.Lock()
        self._closing = closing
        self._most = listeners
        self._clock = clock
        self._made: tuple[float, TakeSnapshot] | None = None
        self.interval_s = interval_s
        self.write_timeout_s = patience_s
        #: Streams that are open.
        self.listeners = 0

    async def now(self) -> TakeSnapshot:
        """Return the parts, at most an interval old."""
        async with self._turn:
            if self._made is None or self._clock() - self._made[0] >= 0.9 * self.interval_s:
                self._made = self._clock(), await self._take_snapshot()
            return self._made[1]

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Serve one listener until its end."""
        if self.listeners >= self._most:
            retry = ((b"retry-after", b"10"),)
            error = HttpError(503, "too_many_listeners", f"{self._most} pages are open", headers=retry)
            await send_error(send, error)
            return
        self.listeners += 1
        disconnected = asyncio.create_task(_until_disconnected(receive))
        closing = asyncio.create_task(self._closing.wait())
        try:
            await self._stream(scope, send, disconnected, closing)
        finally:
            self.listeners -= 1
            disconnected.cancel()
            closing.cancel()

    async def _stream(
        self, scope: Message, send: Send, disconnected: asyncio.Task[None], closing: asyncio.Task[bool]
    ) -> None:
        sent: dict[str, Html] = {}
        try:
            await self._start(send)
            while not disconnected.done() and not closing.done():
                await self._write(send, self._news(sent, await self.now()))
                await asyncio.wait(
                    (disconnected, closing), timeout=self.interval_s, return_when=asyncio.FIRST_COMPLETED
                )
            if not disconnected.done():
                async with asyncio.timeout(self.write_timeout_s):
                    await send({"type": "http.response.body", "body": b"event: end\ndata: \n\n", "more_body": False})
        except TimeoutError:
            _cut(scope)

    def _news(self, sent: dict[str, Html], snapshot: TakeSnapshot) -> bytes:
        """Return the events of parts that differ from `sent`, and update it."""
        at, parts = snapshot
        events = []
        for name, html in parts.items():
            if sent.get(name) != html:
                sent[name] = html
                events.append(f"event: part\ndata: {json.dumps({'name': name, 'html': html})}\n\n")
        events.append(f"event: tick\ndata: {at}\n\n")
        return "".join(events).encode()

    async def _start(self, send: Send) -> None:
        headers = [
            (b"content-type", b"text/event-stream; charset=utf-8"),
            (b"cache-control", b"no-store"),
            # Without it nginx buffers events.
            (b"x-accel-buffering", b"no"),
            (b"x-content-type-options", b"nosniff"),
        ]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await self._write(send, b"retry: %d\n\n" % _RETRY_MS)

    async def _write(self, send: Send, body: bytes) -> None:
        async with asyncio.timeout(self.write_timeout_s):
            await send({"type": "http.response.body", "body": body, "more_body": True})


async def _until_disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _cut(scope: Message) -> None:
    """Reset the connection: an orderly end would wait for the same client to read."""
    abort = scope.get("state", {}).get("abort")
    if abort is not None:
        abort()


COOKIE = "gorgo_session"
#: A token and the name of its field.
MAX_FORM_BYTES = 4096
#: Bounds of `?every=`, s.
EVERY_S = (2, 3600)

#: Only resources of this origin: no inline script or style, no frame, no form to another origin.
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; form-action 'self'; "
    "base-uri 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "content-security-policy": _POLICY,
    "x-frame-options": "DENY",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-store",
}
_ASSETS = {"page.css": "text/css", "page.js": "text/javascript", "icon.svg": "image/svg+xml"}

Handler = Callable[[Request], Awaitable[Response]]


class Page:
    """The handlers of one running proxy.

    Parameters
    ----------
    state:
        What is shown.
    token:
        Opens a session; without one nothing does.
    refuse:
        Raises `HttpError` for a request that does not bear the token, a wrong one late.
    closing:
        Ends the updates when it is set.
    """

    def __init__(
        self,
        state: LiveState,
        token: TokenCheck,
        refuse: Callable[[Request], Awaitable[None]],
        closing: asyncio.Event,
    ) -> None:
        self._state = state
        self._refuse = refuse
        self._token = token
        self._sessions = None if token.token is None else Sessions(lambda: state.routing.clock())
        self._writer = Writer()
        self.live = LiveUpdates(self._take_snapshot, closing)

    def routes(self) -> list[Route]:
        table: list[tuple[str, str, Handler]] = [
            ("GET", "/", self.to_page),
            ("GET", ROOT, self.page),
            ("GET", f"{ROOT}/login", self.login_form),
            ("POST", f"{ROOT}/login", self.login),
            ("POST", f"{ROOT}/logout", self.logout),
            ("GET", f"{ROOT}/events", self.events),
            ("GET", "/admin/status", self.status),
        ]
        routes = [Route(path, handler, methods=[method]) for method, path, handler in table]
        return routes + [Route(f"{ROOT}/{name}", _asset(name, kind)) for name, kind in _ASSETS.items()]

    async def to_page(self, request: Request) -> Response:  # noqa: ARG002 - a handler's signature
        return _to(ROOT)

    async def page(self, request: Request) -> Response:
        if self._sessions is None:
            return _html(off_page("GORGO_ADMIN_TOKEN"), 401)
        if not self._signed_in(request):
            return _to(f"{ROOT}/login")
        every_s = count_of(request, "every", 0)
        if every_s and not EVERY_S[0] <= every_s <= EVERY_S[1]:
            raise HttpError(400, "invalid_request", f"every: expected {EVERY_S[0]} to {EVERY_S[1]} seconds")
        status = await gather_snapshot(self._state)
        return _html(status_page(status, await self._writer.write(status), every_s=every_s or None))

    async def login_form(self, request: Request) -> Response:
        if self._sessions is None:
            return _html(off_page("GORGO_ADMIN_TOKEN"), 401)
        return _to(ROOT) if self._signed_in(request) else _html(login_page())

    async def login(self, request: Request) -> Response:
        token = await _token_of(request)
        if self._sessions is None:
            return _html(off_page("GORGO_ADMIN_TOKEN"), 401)
        if not self._token.is_right(token):
            await self._token.refuse()
            return _html(login_page(wrong=True), 403)
        key, answer = self._sessions.open(), _to(ROOT)
        secure = "https" in (request.url.scheme, request.headers.get("x-forwarded-proto"))
        answer.set_cookie(
            COOKIE, key, max_age=int(SESSION_S), path=ROOT, secure=secure, httponly=True, samesite="strict"
        )
        return answer

    async def logout(self, request: Request) -> Response:
        if self._sessions is not None:
            self._sessions.end(request.cookies.get(COOKIE))
        answer = _to(f"{ROOT}/login")
        answer.delete_cookie(COOKIE, path=ROOT, httponly=True, samesite="strict")
        return answer

    async def events(self, request: Request) -> Response:
        if not self._signed_in(request):
            await self._refuse(request)
        return _Streamed(self.live)

    async def status(self, request: Request) -> Response:
        await self._refuse(request)
        return json_response((await gather_snapshot(self._state)).as_dict())

    def _signed_in(self, request: Request) -> bool:
        return self._sessions is not None and self._sessions.holds(request.cookies.get(COOKIE))

    async def _take_snapshot(self) -> TakeSnapshot:
        status = await gather_snapshot(self._state)
        return f"{formatting.clock(status.now)} UTC", await self._writer.write(status)


class _Streamed(Response):
    """A Starlette response that sends itself."""

    def __init__(self, live: LiveUpdates) -> None:
        self._live = live
        self.background = None

    async def __call__(self, scope: object, receive: object, send: object) -> None:
        await self._live(scope, receive, send)  # type: ignore[arg-type]


def _asset(name: str, kind: str) -> Handler:
    async def asset(request: Request) -> Response:  # noqa: ARG001 - a handler's signature
        content = (files("gorgo.live.admin.page") / name).read_bytes()
        return Response(content, media_type=kind, headers=HEADERS)

    return asset


def _html(text: str, status: int = 200) -> Response:
    return Response(text, status, media_type="text/html", headers=HEADERS)


def _to(path: str) -> RedirectResponse:
    """Return a redirect to a GET."""
    return RedirectResponse(path, 303, headers=HEADERS)


async def _token_of(request: Request) -> bytes:
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > MAX_FORM_BYTES:
            raise HttpError(413, "request_too_large", f"the form is larger than {MAX_FORM_BYTES} bytes")
    try:
        fields = parse_qs(body.decode("latin-1"), max_num_fields=4)
    except ValueError:
        raise HttpError(400, "invalid_request", "expected a form with the field token") from None
    return fields.get("token", [""])[0].encode()
