"""A proxy and its traffic as a few formulas, and a campaign in mode `paper` over given times, in virtual time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import exp, log

import numpy as np

from gorgo.core.policy.weights import WeightSpec
from gorgo.policies.gorgo import Gorgo
from tuner.campaign.generation import Action, Freeze, Generation, PutWeights, RecordGeneration, RollBack, Stop
from tuner.campaign.machine import Campaign
from tuner.campaign.options import CampaignOptions
from tuner.objective import TunerSample
from tuner.optimizers.registry import make_optimizer
from tuner.space import LogBox, tuned_box

# --- A proxy and its traffic as a few formulas: weights in, samples out, in virtual time.
#
# TTFT is log-normal around a median that depends on the weights, times noise that is common to all requests for a
# while (autocorrelated). E2E and the share of the nearest replica depend on the weights too, so that TTFT can be
# gained at their expense.


BOX = LogBox((WeightSpec("w_rtt", 0.5, 0.05, 2.0, "per ms"), WeightSpec("w_queue", 0.1, 0.05, 0.5, "per token")))
START = {"w_rtt": 0.5, "w_queue": 0.1}


@dataclass(frozen=True, slots=True)
class Effect:
    """What weights do: factors on median TTFT and E2E, and the nearest replica's share of the requests."""

    ttft: float = 1.0
    e2e: float = 1.0
    share: float = 0.4


def nothing(weights: Mapping[str, float]) -> Effect:
    return Effect()


class Proxy:
    """Routes `rate` requests a second under the weights last put, each put under a new version."""

    def __init__(
        self,
        effect: Callable[[Mapping[str, float]], Effect] = nothing,
        *,
        seed: int = 0,
        rate: float = 3.0,
        common: float = 0.1,
        ttft_ms: float = 400.0,
    ) -> None:
        self.effect, self.rate, self.common, self.ttft_ms = effect, rate, common, ttft_ms
        self.rng = np.random.default_rng([seed, 99])
        self.boot_id, self.version, self.seq, self.level = "boot-1", 1, 0, 0.0
        self.weights: dict[str, float] = dict(START)
        self.routed: Counter[tuple[float, ...]] = Counter()

    def put(self, values: Mapping[str, float]) -> int:
        self.weights, self.version = dict(values), self.version + 1
        return self.version

    def restart(self) -> None:
        self.boot_id, self.version, self.seq, self.weights = self.boot_id + "x", 1, 0, dict(START)

    def serve(self, start_s: float, seconds: float) -> list[TunerSample]:
        """The requests of this stretch of time, finished."""
        effect = self.effect(self.weights)
        # An Ornstein-Uhlenbeck level with a memory of a minute: traffic that is heavier for a while.
        keep = exp(-seconds / 60)
        self.level = keep * self.level + self.common * (1 - keep**2) ** 0.5 * float(self.rng.standard_normal())
        count = round(self.rate * seconds)
        self.routed[tuple(self.weights[name] for name in START)] += count
        z = self.rng.standard_normal((3, count))
        ttft_ms = (self.ttft_ms * effect.ttft * np.exp(self.level + 0.5 * z[0])).tolist()
        e2e_s = (2.0 * effect.e2e * np.exp(self.level + 0.4 * z[1])).tolist()
        itl_ms = (12.0 * np.exp(0.2 * z[2])).tolist()
        near = (self.rng.random(count) < effect.share).tolist()
        replicas = ["near" if is_near else f"far-{i % 2}" for i, is_near in enumerate(near)]
        first, self.seq = self.seq + 1, self.seq + count
        return [
            TunerSample(
                first + i, start_s + i / self.rate, replicas[i], self.version, ttft_ms[i], e2e_s[i], itl_ms[i], 200
            )
            for i in range(count)
        ]


class Run:
    """A campaign on such a proxy: carries its actions out and writes them down."""

    def __init__(
        self,
        proxy: Proxy,
        options: CampaignOptions | None = None,
        *,
        optimizer: str = "es",
        start: Mapping[str, float] = START,
        box: LogBox = BOX,
        seed: int = 0,
    ) -> None:
        self.proxy, self.now = proxy, 0.0
        options = options or CampaignOptions()
        proposer = make_optimizer(optimizer, box, start, np.random.default_rng([seed, 1]))
        self.campaign = Campaign(box, proposer, options, start=start, rng=np.random.default_rng([seed, 2]))
        self.actions: list[Action] = []
        self.proxy.weights = dict(start)
        self.do(self.campaign.on_start(now=0.0))

    @property
    def rows(self) -> list[Generation]:
        return [action.generation for action in self.actions if isinstance(action, RecordGeneration)]

    @property
    def stopped(self) -> str | None:
        return next((action.reason for action in self.actions if isinstance(action, Stop)), None)

    def do(self, actions: list[Action]) -> None:
        self.actions += actions
        for action in actions:
            if isinstance(action, PutWeights | RollBack):
                version = self.proxy.put(action.values)
                self.do(self.campaign.on_weights_applied(version, ticket=action.ticket, now=self.now))

    def step(self, seconds: float = 5.0) -> None:
        """A stretch of traffic, then one poll."""
        samples = self.proxy.serve(self.now, seconds)
        self.now += seconds
        self.do(self.campaign.on_samples(samples, boot_id=self.proxy.boot_id, now=self.now))
        self.do(self.campaign.on_time(now=self.now))

    def until(self, done: Callable[[], object], *, at_most_s: float = 200_000.0) -> None:
        while not done():
            assert self.now < at_most_s, f"not after {self.now:g} s; last: {self.actions[-3:]}"
            self.step()

    def sentences(self) -> list[str]:
        """What was done, in words."""
        return [sentence(action) for action in self.actions]


def sentence(action: Action) -> str:
    if isinstance(action, PutWeights | RollBack):
        what = "puts" if isinstance(action, PutWeights) else "rolls back to"
        return f"{what} {' '.join(f'{value:.2g}' for value in action.values.values())}: {action.reason}"
    if isinstance(action, RecordGeneration):
        row = action.generation
        return f"records {row.number} {'accepted' if row.accepted else 'rejected'}: {row.reason}"
    if isinstance(action, Freeze):
        return f"freezes {' '.join(f'{value:.2g}' for value in action.values.values())}: {action.reason}"
    return f"stops: {action.reason}" if isinstance(action, Stop) else f"waits until {action.until:g}"


def bowl(weights: Mapping[str, float]) -> Effect:
    """30 % slower per squared factor of e from (0.2, 0.3)."""
    return Effect(ttft=1 + 0.3 * (log(weights["w_rtt"] / 0.2) ** 2 + log(weights["w_queue"] / 0.3) ** 2))


# --- A campaign in mode `paper` over given times to first tokens: four requests a second, without a proxy.


PER_S = 4


@dataclass
class Driven:
    """Generations by the number of samples at which each was recorded, and why the campaign stopped."""

    generations: list[tuple[int, Generation]]
    stopped: str | None = None


def sample(number: int, ttft_s: float, version: int, *, status: int = 200) -> TunerSample:
    """Request `number`, of three replicas in turn."""
    ttft_ms = None if status != 200 else 1e3 * ttft_s
    return TunerSample(number, number / PER_S, "abc"[number % 3], version, ttft_ms, ttft_s, 10.0, status)


def driven(algorithm: str, ttft_s: Sequence[float], *, poll: int = 1) -> Driven:
    """The campaign over one request per time, read by `poll` at once."""
    box, rng = tuned_box(Gorgo.weight_specs), np.random.default_rng(0)
    machine = Campaign(
        box, make_optimizer(algorithm, box, START, rng), CampaignOptions(mode="paper"), start=START, rng=rng
    )
    found, version, unread = Driven([]), 0, list[TunerSample]()
    queue = machine.on_start(now=0.0)
    for number in range(len(ttft_s) + 1):
        now = number / PER_S
        if number:
            unread.append(sample(number, ttft_s[number - 1], version))
        if len(unread) == poll:
            queue += [*machine.on_samples(unread, boot_id="b", now=now), *machine.on_time(now=now)]
            unread = []
        while queue:
            action = queue.pop(0)
            if isinstance(action, PutWeights):
                version += 1
                queue += machine.on_weights_applied(version, ticket=action.ticket, now=now)
            elif isinstance(action, RecordGeneration):
                found.generations.append((number, action.generation))
            elif isinstance(action, Stop):
                found.stopped = action.reason
                return found
    return found
