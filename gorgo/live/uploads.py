"""Requests whose bodies are being read, by client: open before the Router knows them.

Owns that count and the rejection of one too many. The quota is `core.quotas`'.

Why: a body may take a minute. Without this count a single client's slow bodies would have no bound, and could use up
`limits.max_in_flight`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from gorgo.core.messages.actions import Reject
from gorgo.core.router import Router
from gorgo.live.http.errors import error_of


class UploadCounter:
    """The uploads of one proxy.

    Parameters
    ----------
    router:
        Counts the client's other requests.
    """

    __slots__ = ("_router", "_uploads")

    def __init__(self, router: Router) -> None:
        self._router = router
        self._uploads: Counter[str] = Counter()

    def __len__(self) -> int:
        return self._uploads.total()

    def check(self, client: str | None) -> None:
        """Raise `HttpError` (429) if one more body of `client` is one too many."""
        if client is None:
            return
        excess = self._router.quotas.check(client, coming=self._uploads.get(client, 0))
        if excess is not None:
            raise error_of(Reject("", 429, excess.code, excess.message, excess.retry_after_s))

    @contextmanager
    def track(self, client: str | None) -> Iterator[None]:
        """Count a body of `client` while it is read. Raises `HttpError` (429) if it is one too many."""
        if client is None:
            yield
            return
        self.check(client)
        self._uploads[client] += 1
        try:
            yield
        finally:
            self._uploads[client] -= 1
            if not self._uploads[client]:
                del self._uploads[client]
