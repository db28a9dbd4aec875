"""What is kept of one request and its answer, so that another replica can go on with it where the stream breaks off.

Owns the memory for both, which is given up where something else needs it, and the answer so far as an engine can go on
with it. Leaves the next attempt to the exchange, and texts and counts to `gorgo.core.continuation`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from gorgo.core.continuation import (
    CHAT,
    COMPLETIONS,
    Continuation,
    NotContinuableError,
    PartialAnswer,
    Seam,
    as_chat,
    half_character,
    read_answer,
    refusal,
    shows_usage,
)
from gorgo.core.messages.request import Outcome
from gorgo.core.numeric import parse_json
from gorgo.core.stream import UsageReader
from gorgo.engines.base import TOKENIZE_PATH, continuation_of, read_tokens, template_body, tokenize_body
from gorgo.live.http.body import RequestBuffer
from gorgo.live.http.headers import Header
from gorgo.live.request.parse import ParsedRequest
from gorgo.live.state import LiveState
from gorgo.live.upstream.client import UpstreamError
from gorgo.live.upstream.target import Target
from gorgo.proxy.exchange.passage import Passage

#: A request of this size is retained beside its answer without a reservation, as the ends of each answer are.
UNRESERVED_BYTES = 4096
#: For an engine's count of the tokens of an answer, s: milliseconds on one that is well, and the client waits.
TOKENIZE_TIMEOUT_S = 1.0


@dataclass(slots=True)
class BrokenAnswer:
    """An answer that broke off, or is about to go on elsewhere, after the client had a part of it."""

    #: The request as the client sent it, and what the client has of its answer.
    body: Mapping[str, Any]
    answer: PartialAnswer
    #: Those that could go on with it.
    replicas: frozenset[str]
    reason: str
    #: When its last event came (monotonic s).
    last_s: float
    #: Of the attempt that goes on with it.
    seam: Seam | None = None


class RetainedAnswer:
    """The request and the answer so far of one exchange, from the first token on.

    Parameters
    ----------
    state:
        The running proxy.
    route, request:
        Its path, and the request.
    buffer:
        Of the request, in which the memory is reserved.
    """

    __slots__ = ("_buffer", "_given_up", "_request", "_route", "_state", "broken", "passage", "running")

    def __init__(self, state: LiveState, route: str, request: ParsedRequest, buffer: RequestBuffer) -> None:
        self._state = state
        self._route = route
        self._request = request
        self._buffer = buffer
        #: Has the stream, as long as there is memory for it; and the answer once that has broken off.
        self.passage: Passage | None = None
        self.broken: BrokenAnswer | None = None
        #: The passage of its part that runs.
        self.running: Passage | None = None
        #: Why what was retained is no longer.
        self._given_up: str | None = None

    # -- memory

    def reserve_for(self, passage: Passage) -> bool:
        """Retain the request, and what `passage` passes of its answer; False: there is no memory for it."""
        if len(self._request.body) > UNRESERVED_BYTES and not self.reserve(0):
            self._given_up = "memory"
            return False
        self.passage = passage
        self._buffer.release_body()
        return True

    def reserve(self, answer_bytes: int) -> bool:
        """Reserve memory for the request, what came of its answer before, and so much of this part; False if refused.

        A part before counts as its text, which is what is left of it.
        """
        before = 0 if self.broken is None else len(self.broken.answer.text)
        return self._buffer.keep(len(self._request.body) + before + answer_bytes, self.drop)

    def drop(self, why: str = "memory") -> None:
        """Give the memory up: the answer is not continued if it breaks off."""
        self._given_up = why
        for passage in (self.passage, self.running):
            if passage is not None:
                passage.give_up()
        self.passage, self._request.body = None, b""

    def leave_stream(self) -> None:
        """Forget the part that ran: the answer goes on without it."""
        if self.running is not None:
            self.running.release()
            self.running.tail = UsageReader()  # its answer has been read
            self.running = None

    def release(self) -> None:
        """Forget the answer at the end of the exchange."""
        if self.passage is not None:
            self.passage.release()
        if self.running is not None and self.running is not self.passage:
            self.running.release()
        self.passage = self.running = self.broken = None

    # -- the answer so far

    def replicas(self, body: Mapping[str, Any] | None = None) -> frozenset[str]:
        """Return the replicas whose kind of engine can go on with an answer, that to `body` if it has been read."""
        targets = self._state.replicas.targets
        hows = {name: continuation_of(each.dialect, self._route) for name, each in targets.items()}
        if body is not None and Continuation.AS_CHAT in hows.values() and as_chat(body) is None:
            hows = {name: None if how is Continuation.AS_CHAT else how for name, how in hows.items()}
        return frozenset(name for name, how in hows.items() if how is not None)

    def break_off(self, reason: str) -> BrokenAnswer | None:
        """Return the answer so far, if another replica can go on with it."""
        passage, broken = self.passage, self.broken
        if passage is None:
            return None
        if broken is not None:
            assert broken.seam is not None, "the rest has begun"
            able = self.replicas(broken.body)
            try:
                answer = broken.seam.answer()
            except NotContinuableError:
                return None
            return replace(broken, answer=answer, replicas=able, reason=reason, seam=None)
        stream = self._read(passage.sent_stream)
        able = frozenset[str]() if stream is None else self.replicas(stream[0])
        return None if stream is None or not able else BrokenAnswer(*stream, able, reason, passage.gaps.last_s)

    def why_not(self) -> str:
        """Return why the answer cannot be read, as the metrics have it."""
        passage = self.passage
        if passage is None:
            return self._given_up or "request"
        return "memory" if passage.sent_stream is None else "request"

    def _read(self, stream: bytes | None) -> tuple[Mapping[str, Any], PartialAnswer] | None:
        """Return the request and the answer so far; `None` if it cannot be continued."""
        try:
            body = parse_json(self._request.body)
            if stream is None or refusal(self._route, body) is not None:
                return None
            return body, read_answer(self._route, stream)
        except (NotContinuableError, ValueError, RecursionError):
            return None

    @property
    def shows_usage(self) -> bool:
        """Whether the client asked for the counts of its answer."""
        try:
            return self._route in (CHAT, COMPLETIONS) and shows_usage(parse_json(self._request.body))
        except (ValueError, RecursionError):
            return False

    def of_whole(self, outcome: Outcome) -> Outcome:
        """Return the outcome with the counts of the whole answer, where it is that of its last part."""
        if self.broken is None:
            return outcome
        before = self.broken.answer.tokens
        prompt, output = outcome.prompt_tokens, outcome.output_tokens
        return replace(
            outcome,
            prompt_tokens=None if prompt is None else max(0, prompt - before),
            output_tokens=None if output is None else output + before,
        )


async def as_read(
    answer: PartialAnswer,
    target: Target,
    headers: Sequence[Header],
    model: str | None,
    *,
    route: str,
    how: Continuation,
) -> PartialAnswer:
    """Return the answer as the engine that goes on reads it: its tokens counted, and the white space it trims.

    What the engine does not say stays as it was.
    """

    async def tokens(body: bytes) -> list[Any] | None:
        try:
            return read_tokens(
                *await target.upstream.fetch(TOKENIZE_PATH, headers, body=body, timeout_s=TOKENIZE_TIMEOUT_S)
            )
        except UpstreamError:
            return None

    # What an engine that was asked before this one trims is its own.
    half = half_character(answer.text)
    answer = replace(answer, again=half)
    space = answer.known[len(answer.known.rstrip()) :]
    if space and how is not Continuation.LAST_MESSAGE and how.route(route) == CHAT:
        whole = await tokens(template_body(model, space))
        if whole is not None and whole == await tokens(template_body(model, "")):
            answer = replace(answer, again=half + len(space))
    if answer.exact and not answer.again:
        return answer
    counted = await tokens(tokenize_body(model, answer.known))
    if counted is None or len(counted) > len(answer.known.encode(errors="replace")) + 1:
        return answer  # no token has less than a byte, but for one that begins a text
    return replace(answer, tokens=len(counted) if answer.again else max(answer.tokens, len(counted)))
