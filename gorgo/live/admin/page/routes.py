"""The routes of the page on the admin listener: sign-in, sign-out, page, assets, updates.

The sign-in form takes the admin token and starts a session. Its cookie is valid for these routes alone, so no page of
another origin can change anything. Programs send the token itself, as to every admin route.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from importlib.resources import files
from urllib.parse import parse_qs

from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Route

from gorgo import formatting
from gorgo.live.admin.bodies import count_of, json_response
from gorgo.live.admin.page.document import ROOT, Writer, login_page, off_page, status_page
from gorgo.live.admin.page.live import LiveUpdates, TakeSnapshot
from gorgo.live.admin.page.sessions import SESSION_S, Sessions
from gorgo.live.admin.page.snapshot import take_snapshot
from gorgo.live.admin.token_check import TokenCheck
from gorgo.live.http.errors import HttpError
from gorgo.live.state import LiveState

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
        status = take_snapshot(self._state)
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
        return json_response(take_snapshot(self._state).as_dict())

    def _signed_in(self, request: Request) -> bool:
        return self._sessions is not None and self._sessions.holds(request.cookies.get(COOKIE))

    async def _take_snapshot(self) -> TakeSnapshot:
        status = take_snapshot(self._state)
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
