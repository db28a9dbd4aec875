"""A replica's answer that comes from an iterator, for the fakes of `ResponseSource`."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import asynccontextmanager


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
