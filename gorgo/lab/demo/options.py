"""Options of the demo."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from gorgo.lab.traces import TraceFilters

#: The published policy, the paper's four baselines, and chance.
PUBLISHED: tuple[str, ...] = (
    "gorgo",
    "least-load",
    "least-request",
    "prefix-cache",
    "simple-session-affinity",
    "random",
)
OURS, PAPER, RANDOM = "gorgo-ms", "gorgo", "random"
#: The paper's four, as its authors released them.
BASELINES = tuple(name for name in PUBLISHED if name not in (PAPER, RANDOM))
#: With the readings that are stronger than the released ones: no claim of this project looks better for a weaker one.
#: (`least-load-first-token` is weaker at every load.)
ALL_READINGS = (*BASELINES, "least-request-in-flight", "prefix-cache-in-flight")
#: The default of `gorgo serve`, then the paper's. `random` would take the demo over its three minutes.
DEFAULT_POLICIES: tuple[str, ...] = ("gorgo-ms", *(name for name in PUBLISHED if name != "random"))
#: With `tune`: the one whose weights the paper tunes.
TUNED_POLICIES: tuple[str, ...] = ("gorgo",)


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoOptions:
    """Which policies run on which trace.

    Parameters
    ----------
    policies:
        One fresh fleet each, in this order. Empty: `DEFAULT_POLICIES`, with `tune` `TUNED_POLICIES`.
    trace:
        None: the small trace that comes with the project, with `tune` short chats.
    filters, time_scale:
        As for a replay.
    out:
        Keeps requests, results and process logs there; None: nothing is left behind.
    seed:
        Of the network's jitter, the proxy's ties and the scatter.
    show_progress:
        Progress on stderr.
    tune:
        Three rows of each policy, on fleets of a small model and on short chats: under a `gorgo tune` with blocks of
        seconds, then on the last part of the trace, which it has not seen, by the defaults and by what it found.
    """

    policies: tuple[str, ...] = ()
    trace: Path | None = None
    filters: TraceFilters = field(default_factory=TraceFilters)
    time_scale: float = 1.0
    out: Path | None = None
    seed: int = 0
    show_progress: bool = True
    tune: bool = False

    @property
    def chosen(self) -> tuple[str, ...]:
        return self.policies or (TUNED_POLICIES if self.tune else DEFAULT_POLICIES)
