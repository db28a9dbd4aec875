"""Requests whose bodies are on their way, by client: they are open before the Router knows them.

Owns that count and the refusal of one too many. How many a client may have open is `core.quotas`'.

Why: a body may take a minute to come. Counted from its end on, the slow ones of a single client would be without a
bound, and could be all that the proxy takes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from gorgo.core.messages.actions import Reject
from gorgo.core.router import Router
from gorgo.proxy.http.errors import error_of


class UploadCounter:
    """Of one proxy.

    Parameters
    ----------
    router:
        Knows what else a client has open.
    """

    __slots__ = ("_bytes", "_router")

    def __init__(self, router: Router) -> None:
        self._router = router
        self._bytes: Counter[str] = Counter()

    def __len__(self) -> int:
        return self._bytes.total()

    @contextmanager
    def track(self, client: str | None) -> Iterator[None]:
        """While a body of `client` comes. Raises `HttpError` (429) before it does if that is one too many."""
        if client is None:
            yield
            return
        excess = self._router.quota_error(client, coming=self._bytes[client])
        if excess is not None:
            raise error_of(Reject("", 429, excess.code, excess.message, excess.retry_after_s))
        self._bytes[client] += 1
        try:
            yield
        finally:
            self._bytes[client] -= 1
            if not self._bytes[client]:
                del self._bytes[client]
