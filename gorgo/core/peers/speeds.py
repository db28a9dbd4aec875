"""Learned prefill speeds of a group: which of the own to report, and priors from those of all peers.

Owns the samples of each peer and their sums. A replica's own factor learns from its own samples (`core.latency`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from gorgo.core.fleet.replica import Replica
from gorgo.core.latency.prefill_speed import STEADY_TRUST_S
from gorgo.core.peers.records import LearnedSpeed

#: Every so many reports have all learned speeds, the others those that changed.
_ALL_SPEEDS = 50
_US = 1e6


@dataclass(slots=True)
class PeerSpeeds:
    """Samples of peers, in whole microseconds: sums stay exact."""

    _reported: dict[str, tuple[float, float]] = field(default_factory=dict)
    _samples: dict[str, dict[str, tuple[int, int]]] = field(default_factory=dict)
    _sums: dict[str, tuple[int, int]] = field(default_factory=dict)

    def own(self, replicas: Mapping[str, Replica], *, seq: int) -> Iterable[LearnedSpeed]:
        """Yield the own samples that changed since a report had them, or all in some reports."""
        reported, all_of_them = self._reported, seq % _ALL_SPEEDS == 0
        for name, replica in replicas.items():
            samples = replica.prefill_queue.speed.samples
            if samples[1] > 0.0 and (all_of_them or reported.get(name) != samples):
                reported[name] = samples
                # A first token may be sooner than a round trip; a report has no negative time.
                yield LearnedSpeed(name, max(0.0, samples[0]), samples[1])

    def take_samples(self, router: str, speeds: Iterable[LearnedSpeed], replicas: Mapping[str, Replica]) -> None:
        """Start the learned factors from the samples of all peers, with their weight beside the prior's."""
        samples = self._samples.setdefault(router, {})
        for speed in speeds:
            replica = replicas.get(speed.replica)
            sample = round(speed.spent_s * _US), round(speed.prior_s * _US)
            if replica is None or samples.get(speed.replica) == sample:
                continue
            self._add(speed.replica, sample, instead_of=samples.get(speed.replica, (0, 0)))
            samples[speed.replica] = sample
            spent_us, prior_us = self._sums[speed.replica]
            reported = None if replica.prior.known else replica.reported_speed.factor
            start = 1.0 if reported is None else reported
            trusted = (spent_us / _US + STEADY_TRUST_S * start) / (prior_us / _US + STEADY_TRUST_S)
            replica.prefill_queue.set_speed_prior(trusted)

    def forget(self, router: str) -> None:
        """Drop the samples of a router."""
        for name, sample in self._samples.pop(router, {}).items():
            self._add(name, (0, 0), instead_of=sample)

    def _add(self, name: str, sample: tuple[int, int], *, instead_of: tuple[int, int]) -> None:
        spent_us, prior_us = self._sums.get(name, (0, 0))
        self._sums[name] = spent_us + sample[0] - instead_of[0], prior_us + sample[1] - instead_of[1]
