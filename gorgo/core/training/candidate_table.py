"""The candidates of one decision as numbers, and back: what a log of decisions has of them, without text.

Owns which columns these are. `gorgo.live.telemetry.outcome_log` writes them, `gorgo.lab.decisions` reads them.

Theory of operation. A policy is a function of a request's sizes and the candidates' columns. A table with all columns
lets any such policy choose again, later and elsewhere. Times of the clock are stored as of the decision, so that a
table needs no clock: the candidates made of it are those at time 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields

import numpy as np

from gorgo.core.fleet.replica import Columns
from gorgo.core.messages.request import RouteRequest
from gorgo.core.numeric import Floats
from gorgo.core.policy.interface import Candidates
from gorgo.core.prefix.residency import SharedRuns
from gorgo.core.record import record

#: Cached tokens of the prompt there, which are of the request and no column of the fleet.
CACHED = "cached_tokens"
_FLEET = tuple(item.name for item in fields(Columns) if item.name != "salt")
#: Names of the columns, in the order of a table.
CANDIDATE_COLUMNS = (CACHED, *_FLEET)
#: Columns with a time of the clock.
_TIMES = ("sampled_s", "drained_at_s", "head_due_s", "head_began_s", "prefill_share_s", "sent_s")
_TIME_ROWS = np.array([CANDIDATE_COLUMNS.index(name) for name in _TIMES])
#: The column with the sum of so many such times as the other one says.
_SUM, _COUNT = CANDIDATE_COLUMNS.index("first_tokens_s"), CANDIDATE_COLUMNS.index("decoding_requests")


@record
class CandidateTable:
    """What a policy saw of one decision.

    Parameters
    ----------
    cells:
        A row per column, a cell per candidate; NaN is unknown.
    prompt_tokens, body_bytes, streamed, slo_ttft_s, slo_tpot_s:
        Of the request.
    waited_s:
        From its arrival to the decision.
    found_share, shared:
        As in `Candidates`.
    """

    cells: Floats
    prompt_tokens: int
    body_bytes: int
    streamed: bool
    waited_s: float
    found_share: float
    shared: SharedRuns | None = None
    slo_ttft_s: float | None = None
    slo_tpot_s: float | None = None

    @classmethod
    def of(cls, request: RouteRequest, candidates: Candidates) -> CandidateTable:
        """Return a copy: the fleet changes its columns in place."""
        cells = np.array([candidates.cached_tokens, *(getattr(candidates.table, name) for name in _FLEET)])
        cells[_TIME_ROWS] -= candidates.now
        cells[_SUM] -= cells[_COUNT] * candidates.now
        return cls(
            cells,
            request.prompt_tokens,
            request.body_bytes,
            request.streamed,
            candidates.now - request.received_s,
            candidates.found_share,
            candidates.shared,
            request.slo_ttft_s,
            request.slo_tpot_s,
        )

    def request(self, request_id: str) -> RouteRequest:
        """Return the request as far as it is known: its sizes, and nothing of its prompt."""
        return RouteRequest(
            request_id,
            -self.waited_s,
            self.prompt_tokens,
            b"",
            1.0,
            0,
            streamed=self.streamed,
            body_bytes=self.body_bytes,
            slo_ttft_s=self.slo_ttft_s,
            slo_tpot_s=self.slo_tpot_s,
        )

    def candidates(self, names: Sequence[str]) -> Candidates:
        """Return the candidates, at time 0. Their salts are 0: no policy by hash can choose among them."""
        columns = dict(zip(_FLEET, self.cells[1:], strict=True))
        return Candidates(
            np.arange(len(names)),
            tuple(names),
            Columns(**columns, salt=np.zeros(len(names), dtype=np.uint64)),
            self.cells[0],
            self.prompt_tokens,
            is_all=True,
            shared=self.shared,
            found_share=self.found_share,
        )
