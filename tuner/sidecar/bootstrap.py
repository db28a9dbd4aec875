"""From options to a running sidecar: connect to the proxy, open the history, start or resume a campaign.

Owns the options of `gorgo tune` and what they say of history and leadership, the start, and the wait for the leadership
around it (`lead`). Leaves the ways to become the leader to `tuner.leader`, and a running campaign to
`tuner.sidecar.loop`. Errors that another command line avoids end the program here; later ones do not.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from math import ceil
from pathlib import Path
from typing import Any

import numpy as np
from sqlalchemy.engine import make_url

from gorgo.core.backoff import backoff_s
from gorgo.core.policy.weights import WeightSpec
from gorgo.errors import LeadershipLost, ProxyRefused, ProxyUnreachable, TunerError, WeightsError
from gorgo.policies.registry import make_policy
from tuner.campaign.machine import Campaign, Refutes, load_campaign
from tuner.campaign.options import CampaignOptions
from tuner.history import History
from tuner.leader import AdvisoryLock, FileLock, Leadership, StoreLease
from tuner.objective import SampleCursor
from tuner.optimizers.base import BUDGET
from tuner.optimizers.registry import make_optimizer
from tuner.proxy_client import TIMEOUT_S, ProxyClient, ProxyWeights
from tuner.sidecar.commands import CommandQueue
from tuner.sidecar.group import ProxyGroup
from tuner.sidecar.history_buffer import CampaignStart, HistoryBuffer
from tuner.sidecar.loop import FIRST_BACK_OFF_S, MAX_BACK_OFF_S, Sidecar, always, wait
from tuner.sidecar.metrics import TunerMetrics, listening
from tuner.sidecar.progress import Reporter, shown
from tuner.space import LogBox, searched_box, tuned_box

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
    return {
        campaign.id for campaign in history.campaigns() if campaign.target == target and campaign.finished_s is not None
    }


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


# Waiting for the leadership, and tuning while this process has it.
#
# Theory of operation: a candidate that does not lead is a standby and tries again each second. As the leader it opens
# the campaign from the history, so it resumes what an earlier leader had written. Without the leadership it puts
# nothing more, not even the incumbent: the next leader puts what the history says. A standby whose campaign ended
# meanwhile ends.


#: Between two attempts of a standby.
RETRY_S = 1.0


async def lead(
    leadership: Leadership,
    tune: Callable[[bool], Awaitable[bool]],
    reporter: Reporter,
    metrics: TunerMetrics,
    stop: asyncio.Event,
    *,
    wait: Callable[[asyncio.Event, float], Awaitable[None]],
) -> bool:
    """Call `tune` with each leadership until it ends by itself or `stop` is set; return whether all is in order.

    The argument of `tune` is whether another process may have led before. Raises `TunerError` at once where a second
    candidate cannot wait.
    """
    waited, said = False, ""
    while not stop.is_set():
        reason = await leadership.try_to_lead()
        if reason is not None:
            if not leadership.has_standby:
                raise TunerError(f"{reason}; a standby needs a history in PostgreSQL, or `shared` in --config")
            if reason != said:
                reporter.say(f"standby: {reason}")
            waited, said = True, reason
            await wait(stop, RETRY_S)
            continue
        if waited:
            reporter.say("leader: takes over from the history")
        metrics.leader(True)
        try:
            return await tune(waited)
        except LeadershipLost as lost:
            reporter.complain(f"standby: {lost}; puts nothing more")
            waited, said = True, ""
        finally:
            metrics.leader(False)
            await leadership.release()
    return True


#: Of HTTP: the proxy may be starting.
SERVER_ERROR = 500
#: For a new leader the addresses are right: a proxy that is away comes back.
FOREVER_S = 31_536_000.0
#: Of one call in a group; a loaded proxy answers later than this only when it is in trouble.
MIN_TIMEOUT_S = 1.0


async def run_sidecar(options: SidecarOptions, reporter: Reporter, stop: asyncio.Event) -> bool:
    """Run until the campaign is done or `stop` is set; return whether everything was left in order.

    Raises `ProxyUnreachable` without a proxy, `ProxyRefused` for rejected credentials, `HistoryError` for a database
    that cannot be opened, `WeightsError` and `TunerError` for weights that cannot be tuned, `OSError` for a metrics
    port in use.
    """
    clock = unix_clock()
    history = None if options.dry_run else await asyncio.to_thread(History, options.database)
    metrics = TunerMetrics()
    try:
        with listening(metrics, options.metrics_bind) as port:
            if port is not None and options.metrics_bind is not None:
                reporter.say(f"metrics on http://{options.metrics_bind[0]}:{port}/metrics")
            process = TunerProcess(options, history, reporter, metrics, clock)
            if history is None:
                return await process.tune(stop)
            leadership = leadership_of(options)
            ended = await asyncio.to_thread(ended_campaigns, history, options)

            async def tune(waited: bool) -> bool:
                if waited and (newly := await asyncio.to_thread(ended_campaigns, history, options) - ended):
                    reporter.say(f"campaign {max(newly)} has ended; `gorgo history` shows it")
                    return True
                return await process.tune(stop, leadership, waited=waited)

            return await lead(leadership, tune, reporter, metrics, stop, wait=wait)
    finally:
        if history is not None:
            history.close()


class TunerProcess:
    """One process: a candidate for the leadership, and a sidecar while it leads."""

    def __init__(
        self,
        options: SidecarOptions,
        history: History | None,
        reporter: Reporter,
        metrics: TunerMetrics,
        clock: Callable[[], float],
    ) -> None:
        self._options, self._history, self._reporter = options, history, reporter
        self._metrics, self._clock = metrics, clock

    async def tune(self, stop: asyncio.Event, leadership: Leadership | None = None, *, waited: bool = False) -> bool:
        """Connect, and run a sidecar to its end. Raises `LeadershipLost`."""
        options = replace(self._options, new_campaign=self._options.new_campaign and not waited)
        wait_s = FOREVER_S if waited else options.proxy_wait_s
        async with open_client(options, self._clock) as client:
            in_force = await connect(
                client, self._reporter, stop, wait_s=wait_s, clock=self._clock, leadership=leadership
            )
            if in_force is None:
                return True
            opened = Bootstrap(options, client, in_force, self._history, self._reporter, self._clock, leadership)
            sidecar = await asyncio.to_thread(opened.sidecar, self._metrics)
            return await sidecar.run(stop)


def open_client(options: SidecarOptions, clock: Callable[[], float]) -> ProxyClient | ProxyGroup:
    """Return the client of one proxy, or of several as a group. Raises `TunerError` for an address named twice."""
    urls = options.urls
    if len(urls) == 1:
        return ProxyClient(options.url, options.token)
    # A put and its undoing end within the start of a block that is discarded.
    timeout_s = min(TIMEOUT_S, max(MIN_TIMEOUT_S, options.campaign.discard_s / 3))
    clients = [ProxyClient(url, options.token, timeout_s=timeout_s) for url in urls]
    if len({client.url for client in clients}) < len(clients):
        raise TunerError(f"--url {' --url '.join(urls)}: expected each proxy once")
    return ProxyGroup(clients, clock=clock)


async def connect(
    client: ProxyClient | ProxyGroup,
    reporter: Reporter,
    stop: asyncio.Event,
    *,
    wait_s: float,
    clock: Callable[[], float],
    leadership: Leadership | None = None,
) -> ProxyWeights | None:
    """Wait for the proxy and return its weights; None if `stop` comes first.

    Raises `ProxyRefused` for an answer that waiting does not change, `ProxyUnreachable` after `wait_s`.
    """
    failures, until_s = 0, clock() + wait_s
    while not stop.is_set():
        if leadership is not None:
            await leadership.confirm_leadership()
        try:
            in_force = await client.weights()
            if isinstance(client, ProxyGroup):
                await client.read_new()  # raises for one proxy under two addresses
            return in_force
        except ProxyUnreachable as error:
            said = str(error)
        except ProxyRefused as refusal:
            if refusal.status is None or refusal.status < SERVER_ERROR:
                raise
            said = str(refusal)
        left_s = until_s - clock()
        if left_s <= 0:
            raise ProxyUnreachable(f"{said}; no proxy for {wait_s:g} s: is --url right? (setting proxy_wait_s)")
        reporter.complain(f"{said}; waiting for the proxy, at most another {left_s:.0f} s")
        failures += 1
        await wait(stop, min(backoff_s(failures, first_s=FIRST_BACK_OFF_S, longest_s=MAX_BACK_OFF_S), left_s))
    return None


class Bootstrap:
    """Makes a sidecar from the proxy's first answer. Its methods block: for a thread."""

    def __init__(
        self,
        options: SidecarOptions,
        client: ProxyClient | ProxyGroup,
        in_force: ProxyWeights,
        history: History | None,
        reporter: Reporter,
        clock: Callable[[], float],
        leadership: Leadership | None = None,
    ) -> None:
        self._leadership = leadership
        self._options, self._client, self._found = options, client, in_force
        self._history, self._reporter, self._clock = history, reporter, clock
        self._specs = make_policy(in_force.policy).weight_specs
        published = options.campaign.mode == "paper"
        box = searched_box(in_force.policy, options.allow_out_of_range, published=published)
        self._box = tuned_box(self._specs, tune_lambda=options.tune_lambda, box=box)

    def sidecar(self, metrics: TunerMetrics) -> Sidecar:
        log_filter = self._options.log_filter
        # Before a row is begun: a wrong log begins no campaign.
        refutes = None if log_filter is None else log_filter(self._found.policy)
        unfinished = self._unfinished()
        if unfinished is None:
            campaign, begun = self._new()
            number = 0 if self._history is None else self._begin(self._history, begun)
            version: int | None = self._found.version
            self._reporter.say(f"campaign {number} on {self._found.policy} from {shown(campaign.start)}")
        else:
            number, campaign, begun = unfinished
            version = None
            self._reporter.say(f"resumes campaign {number}, generation {campaign.ledger.number}")
        campaign.refutes = refutes
        name = f"gorgo tune, campaign {number},"
        orders = CommandQueue(name, f"{name} process {os.getpid()}", version)
        if isinstance(self._client, ProxyGroup):
            self._client.belong_to(orders.is_foreign, new=unfinished is None)
            campaign.cursor = SampleCursor()  # the group counts its samples anew in each process
        return Sidecar(
            campaign,
            self._client,
            orders,
            HistoryBuffer(self._history, number, begun, self._reporter.complain, term=self._term(number, unfinished)),
            self._reporter,
            metrics,
            policy=self._found.policy,
            allow_out_of_range=bool(self._options.allow_out_of_range) or _outside(self._specs, campaign.start),
            clock=self._clock,
            poll_s=self._options.poll_s,
            dry_run=self._options.dry_run,
            confirm=always if self._leadership is None else self._leadership.confirm_leadership,
        )

    def _term(self, campaign: int, unfinished: object) -> int | None:
        """Return the term of this leader; None where no other candidate can follow it."""
        if self._history is None or self._leadership is None or not self._leadership.has_standby:
            return None
        return 0 if unfinished is None else self._history.claim(campaign)

    def _unfinished(self) -> tuple[int, Campaign, CampaignStart] | None:
        if self._history is None:
            return None
        saved = self._history.unfinished(target=self._client.url, policy=self._found.policy)
        if saved is None:
            return None
        number, state = saved
        if self._options.new_campaign:
            self._history.end_campaign(number, now_s=self._clock(), outcome="replaced by a new campaign")
            return None
        campaign_row = self._history.campaign(number)
        assert campaign_row is not None, "a state belongs to a campaign"
        begun = CampaignStart(
            started_s=campaign_row.started_s,
            target=campaign_row.target,
            policy=campaign_row.policy,
            options=campaign_row.options,
        )
        try:
            return number, load_campaign(self._box, self._options.campaign, state), begun
        except (TunerError, WeightsError) as error:
            kind = type(error)
            raise kind(f"campaign {number} cannot be resumed: {error}; --new starts another") from error

    def _new(self) -> tuple[Campaign, CampaignStart]:
        options = self._options
        if isinstance(self._client, ProxyGroup):
            self._client.require_one_set(options.start)
        unknown = set(options.start) - set(self._found.values)
        if unknown:
            have = ", ".join(self._found.values) or "none"
            raise WeightsError(f"start: {min(unknown)!r} is no weight of {self._found.policy}; it has: {have}")
        start = {**self._found.values, **options.start}
        seed = secrets.randbits(63) if options.seed is None else options.seed
        optimizer = make_optimizer(
            options.algorithm or options.campaign.algorithm,
            self._box,
            _within(self._box, start),
            np.random.default_rng([seed, 1]),
            budget=max(BUDGET, options.campaign.max_generations),
        )
        rng = np.random.default_rng([seed, 2])
        campaign = Campaign(self._box, optimizer, options.campaign, start=start, rng=rng)
        noted = recorded_options(options, seed)
        begun = CampaignStart(
            started_s=self._clock(), target=self._client.url, policy=self._found.policy, options=noted
        )
        return campaign, begun

    def _begin(self, history: History, begun: CampaignStart) -> int:
        return history.begin_campaign(
            now_s=begun.started_s, target=begun.target, policy=begun.policy, options=begun.options
        )


def unix_clock() -> Callable[[], float]:
    """Return Unix time that only moves forward: a clock set during a campaign must not end a block."""
    began_s, since_s = time.time(), time.monotonic()
    return lambda: began_s + time.monotonic() - since_s


def _within(box: LogBox, start: Mapping[str, float]) -> dict[str, float]:
    return {spec.name: start[spec.name] for spec in box.specs}


def _outside(specs: tuple[WeightSpec, ...], weights: Mapping[str, float]) -> bool:
    """Return whether the proxy needs `allow_out_of_range` for these weights."""
    return any(not spec.low <= weights.get(spec.name, spec.default) <= spec.high for spec in specs)
