"""Options and result of a replay."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from signal import Signals

from gorgo.lab.results import ResultRow
from gorgo.lab.traces import TraceFilters

#: Requests in flight at once; more wait, which shows as slip. Beyond this one client process measures itself.
MAX_IN_FLIGHT = 2048
#: A proxy with its engines on two busy cores listens after about five seconds.
PORT_WAIT_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayOptions:
    """One replay of one trace against one base URL.

    Parameters
    ----------
    trace:
        Path of the trace.
    url:
        Base URL of any OpenAI-compatible router or engine; `/v1/chat/completions` is added.
    filters:
        Filters of the trace.
    time_scale:
        Multiplies the time between requests; 2.0 = half the load.
    out:
        Folder for `requests.jsonl` and `results.json`; made if needed. None: nothing is written.
    model:
        Model to ask for; None: the first that `GET /v1/models` names.
    api_key:
        Sent as a bearer token.
    port_wait_s:
        How long to wait for a router that does not listen yet.
    request_timeout_s:
        A request that is not complete so long after it was sent is an error.
    closed_loop:
        A session's turn is sent a think time after the end of the answer before it, not at its time in the trace.
    policy, weights:
        For the result row, where the caller knows them; otherwise the policy is read from the responses.
    show_progress:
        Progress on stderr: a bar on a terminal, else a line now and then.
    label:
        Words before the progress.
    """

    trace: Path
    url: str = "http://127.0.0.1:8080"
    filters: TraceFilters = field(default_factory=TraceFilters)
    time_scale: float = 1.0
    out: Path | None = None
    model: str | None = None
    api_key: str | None = None
    port_wait_s: float = PORT_WAIT_S
    request_timeout_s: float = 600.0
    max_in_flight: int = MAX_IN_FLIGHT
    closed_loop: bool = False
    policy: str | None = None
    weights: Mapping[str, float] | None = None
    show_progress: bool = True
    label: str = "replay"


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayReport:
    """Result of a replay: result row, duration, a warning about the trace, and the signal that ended it early."""

    row: ResultRow
    wall_s: float
    warning: str | None = None
    interrupted_by: Signals | None = None

    @property
    def exit_code(self) -> int:
        """0 if every request succeeded, else 1; 128 and the signal's number after an interrupt, as of a shell."""
        if self.interrupted_by is not None:
            return 128 + self.interrupted_by
        return 1 if self.row.errors else 0
