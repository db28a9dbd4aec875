"""Rows that wait for the history: a database in trouble stops no routing and loses no row.

Rows are written in order, in one transaction with the campaign's state after them. A failed write is repeated at
growing intervals; its error is reported once, and again when it changes. A database that was replaced by an empty one
gets the schema and the campaign's row again.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from gorgo.core.backoff import backoff_s
from gorgo.errors import HistoryError
from tuner.campaign.generation import Generation
from tuner.history import CampaignRow, EventRow, History
from tuner.history.store import TERM

#: Generations and events that wait. Campaigns have some hundreds of rows; a thousand are 1 MB.
MAX_WAITING = 1000
#: Between two attempts. Each may itself wait some seconds for a lock.
FIRST_RETRY_S = 5.0
MAX_RETRY_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class CampaignStart:
    """The first values of a campaign's row."""

    started_s: float
    target: str
    policy: str
    options: Mapping[str, Any]


class HistoryBuffer:
    """The rows of one campaign on their way to the history.

    Parameters
    ----------
    history:
        Open. None in a dry run: nothing is written.
    campaign:
        Its number there.
    beginning:
        Its row, for a database that has lost it.
    complain:
        Called with each new error.
    term:
        Of this process as the leader; None without other candidates.
    """

    def __init__(
        self,
        history: History | None,
        campaign: int,
        beginning: CampaignStart,
        complain: Callable[[str], None],
        *,
        term: int | None = None,
    ) -> None:
        self.campaign = campaign
        self.error: str | None = None
        self._history, self._beginning, self._complain = history, beginning, complain
        self._rows: deque[Generation | EventRow] = deque()
        self._state: Mapping[str, Any] | None = None
        self._term = term
        self._outcome: str | None = None
        self._failures, self._not_before_s = 0, float("-inf")

    @property
    def waiting(self) -> int:
        """Rows that are not in the database yet."""
        return len(self._rows)

    def add(self, record: Generation | EventRow) -> None:
        if self._history is None:
            return
        self._rows.append(record)
        if len(self._rows) > MAX_WAITING:
            lost = self._rows.popleft()
            self._complain(f"the history cannot be written and its buffer is full; this row is lost: {as_line(lost)}")

    def save(self, state: Mapping[str, Any]) -> None:
        """Replace the state to write."""
        marked = state if self._term is None else {**state, TERM: self._term}
        self._state = None if self._history is None else marked

    def end(self, outcome: str) -> None:
        """Record the end of the campaign."""
        self._outcome = None if self._history is None else outcome

    def flush(self, *, now: float, at_once: bool = False) -> bool:
        """Write what waits, unless the last error is too recent; return whether all is written. Blocks.

        Raises `LeadershipLost` if another process has claimed the campaign.
        """
        if not (self._rows or self._state is not None or self._outcome is not None):
            return True
        if now < self._not_before_s and not at_once:
            return False
        try:
            self._write(now)
        except HistoryError as error:
            self._failed(str(error), now)
            return False
        if self.error is not None:
            self._complain("the history is written again")
        self.error, self._failures, self._not_before_s = None, 0, float("-inf")
        self._rows.clear()
        self._state = self._outcome = None
        return True

    def unsaved(self) -> list[str]:
        """Return rows that were never written, as JSON."""
        return [as_line(record) for record in self._rows]

    def _write(self, now: float) -> None:
        assert self._history is not None, "nothing is added without one"
        if self.error is not None:
            self._find_again(self._history)
        self._history.write(
            self.campaign,
            generations=[record for record in self._rows if isinstance(record, Generation)],
            events=[record for record in self._rows if isinstance(record, EventRow)],
            state=self._state,
            outcome=self._outcome,
            now_s=now,
            **({} if self._term is None else {"term": self._term}),
        )

    def _find_again(self, history: History) -> None:
        """Migrate the database, and add this campaign if it is missing there."""
        history.bring_up_to_date()
        campaign = history.campaign(self.campaign)
        if not self._is_mine(campaign):
            begun = self._beginning
            self.campaign = history.begin_campaign(
                now_s=begun.started_s, target=begun.target, policy=begun.policy, options=begun.options
            )
            self._complain(f"the database is another one: this is campaign {self.campaign} there")

    def _is_mine(self, campaign: CampaignRow | None) -> bool:
        begun = self._beginning
        return campaign is not None and (campaign.started_s, campaign.target) == (begun.started_s, begun.target)

    def _failed(self, message: str, now: float) -> None:
        if message != self.error:
            self._complain(f"{message}; routing goes on, {self.waiting} rows wait to be written")
        self.error = message
        self._failures += 1
        self._not_before_s = now + backoff_s(self._failures, first_s=FIRST_RETRY_S, longest_s=MAX_RETRY_S)


def as_line(record: Generation | EventRow) -> str:
    """Return a row as a line of JSON."""
    return json.dumps(asdict(record) | {"weights": None if record.weights is None else dict(record.weights)})
