"""Passages of responses outside of an exchange, and answers that come from an iterator."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import asynccontextmanager

from gorgo.core.limits import BufferBudget
from gorgo.live.http.body import RequestBuffer, ResettableTimeout
from gorgo.live.http.headers import EncodedHeaders
from gorgo.proxy.exchange.passage import Passage
from gorgo.proxy.exchange.response import ResponseWriter

# --- Passages of responses outside of an exchange.


def passage_to(
    writer: ResponseWriter,
    timeout: ResettableTimeout,
    *,
    route: str = "/v1/chat/completions",
    chunk_limit_s: float = 1000.0,
    strip_usage: bool = False,
    on_content: Callable[[], None] = lambda: None,
    budget: BufferBudget | None = None,
) -> Passage:
    """Return a passage to `writer` that claims nothing and records nothing."""
    return Passage(
        writer,
        timeout,
        RequestBuffer(BufferBudget(1 << 40) if budget is None else budget, "a"),
        route=route,
        own_headers=EncodedHeaders((), b""),
        chunk_limit_s=chunk_limit_s,
        strip_usage=strip_usage,
        on_content=on_content,
        on_commit=lambda: None,
    )


# --- A replica's answer that comes from an iterator, for the fakes of `ResponseSource`.


class IteratedSource:
    """An answer read once, by `chunks`, by `pipe`, or by both in turn."""

    _iterator: AsyncIterator[bytes] | None = None

    def each(self) -> AsyncIterator[bytes]:
        """Return the answer's chunks."""
        raise NotImplementedError

    @asynccontextmanager
    async def chunks(self) -> AsyncGenerator[AsyncIterator[bytes], None]:
        yield self._rest()

    async def pipe(self, sink: Callable[[bytes], bool]) -> bool:
        async for chunk in self._rest():
            if not sink(chunk):
                return False
        return True

    def take_whole(self, limit: int) -> bytes | None:
        return None

    async def aclose(self) -> None:
        """Close nothing."""

    def _rest(self) -> AsyncIterator[bytes]:
        if self._iterator is None:
            self._iterator = self.each()
        return self._iterator
