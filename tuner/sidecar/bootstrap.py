"""From options to a running sidecar: connect to the proxy, open the history, start or resume a campaign.

Errors that another command line avoids end the program here; later ones do not.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from gorgo.core.policy.weights import WeightSpec
from gorgo.errors import ProxyRefused, ProxyUnreachable, TunerError, WeightsError
from gorgo.policies.registry import make_policy
from tuner.campaign.machine import Campaign
from tuner.campaign.options import CampaignOptions
from tuner.campaign.saved import load_campaign
from tuner.history import History
from tuner.optimizers.base import BUDGET
from tuner.optimizers.registry import make_optimizer
from tuner.proxy_client import ProxyClient, ProxyWeights
from tuner.sidecar.commands import CommandQueue
from tuner.sidecar.history_buffer import CampaignStart, HistoryBuffer
from tuner.sidecar.loop import Sidecar, wait
from tuner.sidecar.metrics import TunerMetrics, listening
from tuner.sidecar.observer import FIRST_BACK_OFF_S, MAX_BACK_OFF_S
from tuner.sidecar.progress import Reporter, shown
from tuner.space import LogBox, searched_box, tuned_box

#: Of HTTP: the proxy may be starting.
SERVER_ERROR = 500
#: A proxy of thousands of replicas starts in seconds; after a minute the address is wrong or nothing starts it.
PROXY_WAIT_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SidecarOptions:
    """Options of `gorgo tune` for a running proxy.

    Parameters
    ----------
    url, token:
        Of its admin listener.
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
    metrics_bind:
        Host and port of the sidecar's metrics; None: none.
    """

    url: str
    token: str | None
    database: str
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
    metrics_bind: tuple[str, int] | None = None


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
            async with ProxyClient(options.url, options.token) as client:
                found = await connect(client, reporter, stop, wait_s=options.proxy_wait_s, clock=clock)
                if found is None:
                    return True
                opened = Bootstrap(options, client, found, history, reporter, clock)
                sidecar = await asyncio.to_thread(opened.sidecar, metrics)
                return await sidecar.run(stop)
    finally:
        if history is not None:
            history.close()


async def connect(
    client: ProxyClient, reporter: Reporter, stop: asyncio.Event, *, wait_s: float, clock: Callable[[], float]
) -> ProxyWeights | None:
    """Wait for the proxy and return its weights; None if `stop` comes first.

    Raises `ProxyRefused` for an answer that waiting does not change, `ProxyUnreachable` after `wait_s`.
    """
    delay_s, until_s = FIRST_BACK_OFF_S, clock() + wait_s
    while not stop.is_set():
        try:
            return await client.weights()
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
        await wait(stop, min(delay_s, left_s))
        delay_s = min(2 * delay_s, MAX_BACK_OFF_S)
    return None


class Bootstrap:
    """Makes a sidecar from the proxy's first answer. Its methods block: for a thread."""

    def __init__(
        self,
        options: SidecarOptions,
        client: ProxyClient,
        found: ProxyWeights,
        history: History | None,
        reporter: Reporter,
        clock: Callable[[], float],
    ) -> None:
        self._options, self._client, self._found = options, client, found
        self._history, self._reporter, self._clock = history, reporter, clock
        self._specs = make_policy(found.policy).weight_specs
        published = options.campaign.mode == "paper"
        box = searched_box(found.policy, options.allow_out_of_range, published=published)
        self._box = tuned_box(self._specs, tune_lambda=options.tune_lambda, box=box)

    def sidecar(self, metrics: TunerMetrics) -> Sidecar:
        known = self._unfinished()
        if known is None:
            campaign, begun = self._new()
            number = 0 if self._history is None else self._begin(self._history, begun)
            version: int | None = self._found.version
            self._reporter.say(f"campaign {number} on {self._found.policy} from {shown(campaign.start)}")
        else:
            number, campaign, begun = known
            version = None
            self._reporter.say(f"resumes campaign {number}, generation {campaign.ledger.number}")
        name = f"gorgo tune, campaign {number},"
        orders = CommandQueue(name, f"{name} process {os.getpid()}", version)
        return Sidecar(
            campaign,
            self._client,
            orders,
            HistoryBuffer(self._history, number, begun, self._reporter.complain),
            self._reporter,
            metrics,
            policy=self._found.policy,
            allow_out_of_range=bool(self._options.allow_out_of_range) or _outside(self._specs, campaign.start),
            clock=self._clock,
            poll_s=self._options.poll_s,
            dry_run=self._options.dry_run,
        )

    def _unfinished(self) -> tuple[int, Campaign, CampaignStart] | None:
        if self._history is None:
            return None
        found = self._history.unfinished(target=self._client.url, policy=self._found.policy)
        if found is None:
            return None
        number, state = found
        if self._options.new_campaign:
            self._history.end_campaign(number, now_s=self._clock(), outcome="replaced by a new campaign")
            return None
        row = self._history.campaign(number)
        assert row is not None, "a state belongs to a campaign"
        begun = CampaignStart(started_s=row.started_s, target=row.target, policy=row.policy, options=row.options)
        try:
            return number, load_campaign(self._box, self._options.campaign, state), begun
        except (TunerError, WeightsError) as error:
            kind = type(error)
            raise kind(f"campaign {number} cannot be resumed: {error}; --new starts another") from error

    def _new(self) -> tuple[Campaign, CampaignStart]:
        options = self._options
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
        recorded = _recorded(options, seed)
        begun = CampaignStart(
            started_s=self._clock(), target=self._client.url, policy=self._found.policy, options=recorded
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


def _recorded(options: SidecarOptions, seed: int) -> dict[str, Any]:
    """Return the options for the history, without the token."""
    return {
        "algorithm": options.algorithm or options.campaign.algorithm,
        "start": dict(options.start),
        "bounds": {name: list(bounds) for name, bounds in options.allow_out_of_range.items()},
        "tune_lambda": options.tune_lambda,
        "seed": seed,
        **asdict(options.campaign),
    }
