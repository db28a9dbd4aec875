"""Several commands in one round trip."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from redis.asyncio.client import Pipeline


async def execute(pipeline: Pipeline) -> list[Any]:
    """Return the answers. Raises the first error as the store has it; the client's own would quote the command."""
    answers: list[Any] = await pipeline.execute(raise_on_error=False)
    for answer in answers:
        if isinstance(answer, Exception):
            raise answer
    return answers
