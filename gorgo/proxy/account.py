"""What one exchange leaves behind: its figures, its log line, and its line in the request log.

Owns the words, and what each event of an exchange means for the figures; when they happen is the exchange's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from gorgo.core.actions import Dispatch
from gorgo.core.request import Ending, Outcome
from gorgo.core.tokens import MAX_NAME
from gorgo.proxy.ask import Ask
from gorgo.proxy.logs import log, log_missing
from gorgo.proxy.state import ProxyState
from gorgo.proxy.target import Target

if TYPE_CHECKING:
    from gorgo.proxy.spans import Trace


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
    #: `None` unless this request is traced.
    trace: Trace | None = None

    def asked(self, state: ProxyState) -> None:
        """The whole body is there."""
        now = state.clock()
        state.metrics.body_read(now - self.received_s)
        if self.trace is not None:
            self.trace.asked(now)

    def began(self, state: ProxyState, dispatch: Dispatch) -> None:
        """An attempt is on its way."""
        self.attempts = dispatch.attempt
        self.replica = dispatch.replica
        state.metrics.dispatched(dispatch.replica, dispatch.region, dispatch.decision)
        if self.trace is not None:
            self.trace.began(dispatch)

    def first_content(self, state: ProxyState, dispatch: Dispatch, *, now: float) -> None:
        """The attempt that is the answer has something to show."""
        self.ttft_s = ttft_s = now - self.received_s
        decision = dispatch.decision
        parts = decision.outlook.split(ttft_s)
        state.metrics.first_content(
            dispatch.replica, dispatch.region, ttft_s, predicted_s=decision.predicted_ttft_s, parts=parts
        )
        if self.trace is not None:
            self.trace.first_content(dispatch, now=now, parts=parts)

    def ended(self, state: ProxyState, ask: Ask, dispatch: Dispatch, outcome: Outcome, target: Target) -> None:
        """An attempt has ended, and what its answer told is learned."""
        if outcome.ending is not Ending.SUPERSEDED:
            self.outcome = outcome
        replica, region = dispatch.replica, dispatch.region
        state.metrics.ended(replica, region, outcome.ending.value)
        if self.trace is not None:
            self.trace.ended(dispatch, outcome, now=state.clock())
        if outcome.ending is Ending.COMPLETED:
            believed = dispatch.decision.believed_cached_tokens
            e2e_s = state.clock() - self.received_s
            state.metrics.completed(replica, region, e2e_s, outcome, believed_cached_tokens=believed)
            if outcome.prompt_tokens is not None:
                # An answer with usage tells whether its engine reports what it had cached.
                missing = target.reports.on_answer(cached_tokens=outcome.cached_tokens, believed_tokens=believed)
                log_missing(replica, missing)
        if outcome.prompt_tokens is not None and ask.prompt.tokens is None:
            state.ratios.learn(ask.route.model, text_bytes=len(ask.prompt.text), prompt_tokens=outcome.prompt_tokens)

    def close(self, state: ProxyState, route: str, request_id: str, *, sent_status: int, gone: bool) -> None:
        """One count, one line in each log. `sent_status` is what the client was sent, 0 for nothing."""
        if gone:
            self.status = 499
            state.metrics.client_gone()
        status = self.status or sent_status or 500
        state.metrics.request(route, state.router.policy.name, status)
        if state.request_log is not None and self.ask is not None:
            self._keep(state, self.ask, status)
        if self.trace is not None:
            self.trace.close(
                status=status, code=self.code, retries=self._retries, hedged=self.hedged, now=state.clock()
            )
        self._log(state, route, request_id, status)

    @property
    def _retries(self) -> int:
        return max(0, self.attempts - 1 - self.hedged)

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
            retries=self._retries,
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
