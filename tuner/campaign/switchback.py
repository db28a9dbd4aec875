"""Time switchback: two weight sets alternate on the whole fleet, in blocks of minutes and in random order.

Owns the schedule: which arm has the block, which samples belong to it, when it is scored.

Theory of operation: weights change what *other* requests meet, so they cannot be compared per request or per session:
the selfish arm would seem better. All traffic goes to one arm for a block. Blocks come in pairs, one of each arm, and a
coin decides which goes first. Every block has its own weights version; its first request dates its start by the proxy's
clock, and requests in the `discard_s` after that are left out, because they meet the queues of the block before. A pair
is scored `discard_s` after its end, so that slow answers still count; meanwhile the next pair has begun. A pair with
lost samples, or with too few, is void, and drawn again.

Before each pair the incumbent has all traffic for a while: a candidate costs its share of the time, and most candidates
are no better. An audit has no such rest: the suspect is in force anyway.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tuner.campaign.comparison import Abandon, Arm, BlockPair, Guardrail, Outcome, PairComparison, Verdict, pooled
from tuner.campaign.options import CampaignOptions
from tuner.objective import TunerSample, WindowStats, window_stats
from tuner.saved_fields import SavedFields

#: Samples of one block: 150 requests a second for two minutes. More do not change its p95.
MAX_BLOCK_SAMPLES = 20_000


@dataclass(slots=True)
class Block:
    """One arm's block. `version` and `began_s` are unknown until its weights are in force."""

    arm: Arm
    version: int | None = None
    began_s: float | None = None
    first_arrival_s: float | None = None
    samples: list[TunerSample] = field(default_factory=list)

    def add(self, sample: TunerSample) -> None:
        if self.first_arrival_s is None or sample.arrived_s < self.first_arrival_s:
            self.first_arrival_s = sample.arrived_s
        if len(self.samples) < MAX_BLOCK_SAMPLES:
            self.samples.append(sample)

    def stats(self, discard_s: float) -> WindowStats:
        start = (self.first_arrival_s or 0.0) + discard_s
        return window_stats(sample for sample in self.samples if sample.arrived_s >= start)


#: Of a saved state; a comparison has some tens.
MAX_PAIRS = 10_000


class Switchback:
    """A trial by switchback.

    Parameters
    ----------
    options:
        Lengths, number of pairs, error rate.
    rng:
        For the order in each pair, and once for the test's seed.
    reference:
        The incumbent's statistics, for hard bounds until it has blocks. None in an audit.
    audit:
        Whether the offspring is a start that is compared with the defaults.
    e2e_lost:
        As of `PairComparison`.
    """

    def __init__(
        self,
        options: CampaignOptions,
        rng: np.random.Generator,
        reference: WindowStats | None,
        *,
        audit: bool = False,
        e2e_lost: float = 0.0,
    ) -> None:
        self._options, self._rng, self._audit, self._e2e_lost = options, rng, audit, e2e_lost
        self._watch = Guardrail(options, reference) if options.guarded else None
        self._set_seed(int(rng.integers(2**31)))
        self.pairs: list[BlockPair] = []
        self.turn = 0
        self.offspring_version: int | None = None
        self._voids = 0
        self._settling: tuple[list[Block], float] | None = None
        self._open_round()

    @property
    def arm(self) -> Arm:
        return self._block.arm

    def on_applied(self, version: int, *, now: float) -> None:
        self._block.version, self._block.began_s = version, now
        if self.arm == "offspring":
            self.offspring_version = version

    def on_samples(self, samples: Iterable[TunerSample], *, now: float) -> Outcome:
        for sample in samples:
            block = self._block_of(sample)
            if block is None or (self._resting and block is self._block):
                continue
            block.add(sample)
            reason = self._watch.add(sample) if self._watch and block.arm == "offspring" else None
            if reason:
                return self._breached(reason)
        return self.on_time(now=now)

    def on_time(self, *, now: float) -> Outcome:
        outcome = self._settle() if self._settling and now >= self._settling[1] else None
        if outcome is None and self._block.began_s is not None and now >= self._block.began_s + self._length_s:
            self._next_block(now)
        return outcome

    def void(self) -> None:
        if self._watch:
            self._watch.clear()
        self._settling = None
        self._open_round()

    def next_time(self) -> float | None:
        times = [] if self._settling is None else [self._settling[1]]
        if self._block.began_s is not None:
            times.append(self._block.began_s + self._length_s)
        return min(times, default=None)

    def state(self) -> dict[str, Any]:
        return {"seed": self._seed, "pairs": [pair.as_json() for pair in self.pairs]}

    def load(self, state: Mapping[str, Any]) -> None:
        saved = SavedFields(state, "saved switchback")
        self._set_seed(saved.count("seed", most=2**63))
        rows = saved.items("pairs", most=MAX_PAIRS)
        self.pairs = [BlockPair.of(SavedFields(pair, f"{saved.place}.pairs.{at}")) for at, pair in enumerate(rows)]

    # -- schedule

    @property
    def _block(self) -> Block:
        return self._blocks[-1]

    @property
    def _length_s(self) -> float:
        return self._options.block_s * (self._options.rest_blocks if self._resting else 1)

    def _set_seed(self, seed: int) -> None:
        self._seed = seed
        self._judge = PairComparison(self._options, seed, audit=self._audit, e2e_lost=self._e2e_lost)

    def _open_round(self) -> None:
        """Start a rest with a pair after it."""
        if self._audit or not self._options.rest_blocks:
            self._open_pair()
            return
        self._resting = True
        self._open([], "incumbent")

    def _open_pair(self) -> None:
        self._resting = False
        first: Arm = "offspring" if self._rng.random() < 0.5 else "incumbent"
        self._open([], first)

    def _open(self, before: list[Block], arm: Arm) -> None:
        self._blocks = [*before, Block(arm)]
        self.turn += 1

    def _next_block(self, now: float) -> None:
        if self._resting:
            self._open_pair()
            return
        if len(self._blocks) == 1:
            self._open(self._blocks, "incumbent" if self.arm == "offspring" else "offspring")
            return
        self._settling = (self._blocks, now + self._options.discard_s)
        self._open_round()

    def _block_of(self, sample: TunerSample) -> Block | None:
        waiting = self._settling[0] if self._settling else []
        return next((block for block in (*self._blocks, *waiting) if block.version == sample.weights_version), None)

    # -- scores

    def _settle(self) -> Outcome:
        assert self._settling is not None, "called when there is something to settle"
        blocks, self._settling = self._settling[0], None
        scores = {block.arm: block.stats(self._options.discard_s) for block in blocks}
        least = min(score.n for score in scores.values())
        if least < self._options.min_block_samples or any(not score.ttft_ms_p95 for score in scores.values()):
            self._voids += 1
            too_few = f"{least} samples in a block, {self._options.min_block_samples} are needed"
            return Abandon(too_few) if self._voids >= self._options.max_voids else None
        self._voids = 0
        self.pairs.append(BlockPair(scores["incumbent"], scores["offspring"]))
        if self._watch:
            self._watch.reference = pooled([pair.incumbent for pair in self.pairs])
        return self._judge.verdict(self.pairs)

    def _breached(self, reason: str) -> Verdict:
        mine = [block for block in self._blocks if block.arm == "offspring"]
        stats = window_stats(sample for block in mine for sample in block.samples)
        return Verdict(False, reason, stats.ttft_ms_p95, stats=stats, refused=True, breach=True)
