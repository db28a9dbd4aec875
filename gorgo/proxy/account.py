"""What one exchange leaves behind: its log line, its count, and its line in the request log.

Owns the words; the exchange fills in what it learns.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from gorgo.core.request import Ending, Outcome
from gorgo.core.tokens import MAX_NAME
from gorgo.proxy.ask import Ask
from gorgo.proxy.logs import log
from gorgo.proxy.state import ProxyState


@dataclass(slots=True)
class Account:
    """What the log line and the metrics say at the end."""

    received_s: float
    replica: str | None = None
    status: int = 0
    attempts: int = 0
    ttft_s: float | None = None
    outcome: Outcome | None = None
    code: str | None = None
    decision_s: float = 0.0
    ask: Ask | None = None
    #: How long it waited at the proxy, and whether it was sent to a second replica as well.
    held_s: float | None = None
    hedged: bool = False

    def close(self, state: ProxyState, route: str, request_id: str, *, sent_status: int, gone: bool) -> None:
        """One count, one line in each log. `sent_status` is what the client was sent, 0 for nothing."""
        if gone:
            self.status = 499
            state.metrics.client_gone()
        status = self.status or sent_status or 500
        state.metrics.request(route, state.router.policy.name, status)
        if state.request_log is not None and self.ask is not None:
            self._keep(state, self.ask, status)
        self._log(state, route, request_id, status)

    def _log(self, state: ProxyState, route: str, request_id: str, status: int) -> None:
        outcome = self.outcome
        log(
            "request",
            request_id=request_id,
            route=route,
            replica=self.replica,
            status=status,
            code=self.code,
            ttft_ms=None if self.ttft_s is None else round(self.ttft_s * 1e3, 1),
            e2e_s=round(state.clock() - self.received_s, 4),
            prompt_tokens=None if outcome is None else outcome.prompt_tokens,
            cached_tokens=None if outcome is None else outcome.cached_tokens,
            output_tokens=None if outcome is None else outcome.output_tokens,
            retries=max(0, self.attempts - 1 - self.hedged),
            **self._unusual(),
            error=None if outcome is None else outcome.error,
        )

    def _unusual(self) -> dict[str, Any]:
        """What most requests have nothing of, and their lines do not name."""
        unusual: dict[str, Any] = {}
        if self.held_s is not None:
            unusual["held_ms"] = round(self.held_s * 1e3, 1)
        if self.hedged:
            unusual["hedged"] = True
        return unusual

    def _keep(self, state: ProxyState, ask: Ask, status: int) -> None:
        """A line for those who replay this traffic, even if nobody could answer: it was asked."""
        assert state.request_log is not None
        told = self.outcome or Outcome(Ending.CLIENT_GONE)
        model = ask.route.model
        state.request_log.add(
            received_s=self.received_s,
            # A client chooses it, so it can be of any length.
            model=None if model is None or len(model) > MAX_NAME else model,
            input_tokens=ask.route.prompt_tokens if told.prompt_tokens is None else told.prompt_tokens,
            # What was cut short would have been longer.
            output_tokens=told.output_tokens if told.ending is Ending.COMPLETED else None,
            text_bytes=len(ask.prompt.text),
            status=status,
            blocks=ask.route.blocks,
        )
