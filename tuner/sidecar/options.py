"""Options of `gorgo tune` for running proxies, and what they say of history and leadership."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from math import ceil
from pathlib import Path
from typing import Any

from sqlalchemy.engine import make_url

from tuner.campaign.machine import Refutes
from tuner.campaign.options import CampaignOptions
from tuner.history import History
from tuner.leader import AdvisoryLock, FileLock, Leadership, StoreLease

#: A proxy of thousands of replicas starts in seconds; after a minute the address is wrong or nothing starts it.
PROXY_WAIT_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SidecarOptions:
    """Options of `gorgo tune` for a running proxy.

    Parameters
    ----------
    url, token:
        Of its admin listener.
    further_urls:
        Admin listeners of the other proxies of a group.
    database:
        URL of the history.
    algorithm:
        Name of an optimizer; None: the mode's.
    campaign:
        How weights are compared, and when to stop.
    start:
        Start weights by name; others are as the proxy has them.
    allow_out_of_range:
        Other bounds by name.
    tune_lambda:
        Tune preferences too.
    seed:
        Of proposals and of the order of blocks; None: random.
    new_campaign:
        Start a new campaign instead of resuming.
    dry_run:
        Measure and propose; put nothing, write nothing.
    poll_s:
        Between two polls of the proxy: a small part of a block, and of the time for which the proxy stores samples.
    proxy_wait_s:
        How long to wait for the proxy at the start; later the campaign waits without a bound.
    log_filter:
        Returns, by the policy's name, what a log of decisions says of candidates (`Campaign.refutes`); None: no log.
    metrics_bind:
        Host and port of the sidecar's metrics; None: none.
    lease:
        Of the store, for a history in SQLite; None: a lock file.
    """

    url: str
    token: str | None
    database: str
    further_urls: Sequence[str] = ()
    algorithm: str | None = None
    campaign: CampaignOptions = field(default_factory=CampaignOptions)
    start: Mapping[str, float] = field(default_factory=dict)
    allow_out_of_range: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    tune_lambda: bool = False
    seed: int | None = None
    new_campaign: bool = False
    dry_run: bool = False
    poll_s: float = 1.0
    proxy_wait_s: float = PROXY_WAIT_S
    log_filter: Callable[[str], Refutes] | None = None
    metrics_bind: tuple[str, int] | None = None
    lease: StoreLease | None = None

    @property
    def urls(self) -> list[str]:
        """Return the admin listeners of all proxies, as locks and history name them."""
        return [url.rstrip("/") for url in (self.url, *self.further_urls)]


def leadership_of(options: SidecarOptions) -> Leadership:
    """Return the locks of PostgreSQL, else the lease of the store, else lock files."""
    database = make_url(options.database)
    if database.get_backend_name() == "postgresql":
        return AdvisoryLock(options.database, options.urls)
    if options.lease is not None:
        return options.lease
    assert database.database is not None, "the history is open"
    return FileLock(Path(database.database), options.urls)


def ended_campaigns(history: History, options: SidecarOptions) -> set[int]:
    """Return the numbers of these proxies' campaigns that have ended. Blocks."""
    target = target_of(options.urls)
    return {row.id for row in history.campaigns() if row.target == target and row.finished_s is not None}


def target_of(urls: Sequence[str]) -> str:
    """Return the name of the proxies in the history, whatever their order."""
    return " ".join(sorted(urls))


def recorded_options(options: SidecarOptions, seed: int) -> dict[str, Any]:
    """Return the options for the history, without the token, as they are in force.

    Mode `paper` has no guard, and its rolling windows mix several weight sets; the row says how many.
    """
    campaign = options.campaign
    in_force: dict[str, Any] = {"guard": campaign.guarded, "audit": campaign.guarded and campaign.audit}
    if campaign.mode == "paper":
        in_force["sets_in_window"] = ceil(campaign.window / campaign.hop)
    return {
        "algorithm": options.algorithm or options.campaign.algorithm,
        "start": dict(options.start),
        "bounds": {name: list(bounds) for name, bounds in options.allow_out_of_range.items()},
        "tune_lambda": options.tune_lambda,
        "seed": seed,
        **asdict(campaign),
        **in_force,
    }
