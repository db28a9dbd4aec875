"""A campaign in mode `paper` over given times to first tokens: four requests a second, without a proxy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from gorgo.policies.gorgo import Gorgo
from tuner.campaign.generation import Generation, PutWeights, RecordGeneration, Stop
from tuner.campaign.machine import Campaign
from tuner.campaign.options import CampaignOptions
from tuner.objective import TunerSample
from tuner.optimizers.registry import make_optimizer
from tuner.space import tuned_box

START = {"w_rtt": 0.5, "w_queue": 0.1}
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
