"""One collection of the API followed until cancelled: the steps of `ListWatch`, done over HTTP."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Mapping
from time import monotonic
from typing import Generic, TypeVar

from gorgo.fleet_sources.documents import Document
from gorgo.fleet_sources.list_watch import PAGE_OBJECTS, WATCH_S, ListPage, ListWatch, OpenWatch, Pause
from gorgo.live.fleet_sources.api_client import ApiClient, ApiError

T = TypeVar("T")

#: Of a collection without a selector.
NO_SELECTOR: Mapping[str, str] = {}


class Collection(Generic[T]):
    """One collection.

    Parameters
    ----------
    read:
        Returns the parts of an object that matter.
    path, selector:
        Of the collection; `selector` has `labelSelector` or `fieldSelector`.
    on_progress:
        Called after each step and each line.
    """

    def __init__(
        self,
        client: ApiClient,
        read: Callable[[Document], T],
        path: str,
        on_progress: Callable[[], None],
        selector: Mapping[str, str] = NO_SELECTOR,
        *,
        spread: Callable[[], float] = random.random,
    ) -> None:
        self.state = ListWatch(read)
        self._client = client
        self._path = path
        self._selector = selector
        self._on_progress = on_progress
        self._spread = spread

    async def run(self) -> None:
        """Follow the collection until cancelled."""
        while True:
            step = self.state.next_step(self._spread())
            try:
                if isinstance(step, Pause):
                    await asyncio.sleep(step.seconds)
                    continue
                await (self._list(step) if isinstance(step, ListPage) else self._watch(step))
            except ApiError as error:
                if error.status:
                    self.state.on_status(error.status, str(error))
                else:
                    self.state.on_failure(str(error))
            self._on_progress()

    async def _list(self, step: ListPage) -> None:
        params = {**self._selector, "limit": str(PAGE_OBJECTS)}
        if step.continue_token:
            params["continue"] = step.continue_token
        self.state.on_page(await self._client.page(self._path, params))

    async def _watch(self, step: OpenWatch) -> None:
        started_s = monotonic()
        params = {**self._selector, "watch": "true", "allowWatchBookmarks": "true"}
        params |= {"resourceVersion": step.version, "timeoutSeconds": str(WATCH_S)}
        async with self._client.lines(self._path, params) as lines:
            self.state.on_watch_open()
            self._on_progress()
            try:
                async for line in lines:
                    if not self.state.on_line(line):
                        return
                    self._on_progress()
            except ApiError as error:
                if not error.broken:
                    raise
        # One that broke is not a server that is down: the next request shows that.
        self.state.on_end(monotonic() - started_s)
