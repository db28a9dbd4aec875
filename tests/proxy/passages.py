"""Passages of responses outside of an exchange."""

from __future__ import annotations

from collections.abc import Callable

from gorgo.core.limits import BufferBudget
from gorgo.live.http.body import RequestBuffer, ResettableTimeout
from gorgo.proxy.exchange.relay import Passage, ResponseWriter


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
        own_headers=(),
        chunk_limit_s=chunk_limit_s,
        strip_usage=strip_usage,
        on_content=on_content,
        on_commit=lambda: None,
    )
