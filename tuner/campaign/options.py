"""Options of a campaign, with the reason for each default."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Literal, get_args

from gorgo.errors import TunerError
from tuner.objective import HOP, WINDOW

Mode = Literal["switchback", "paper"]


@dataclass(frozen=True, slots=True, kw_only=True)
class CampaignOptions:
    """How weight sets are compared, what is refused, and when to stop.

    Parameters
    ----------
    mode:
        `switchback`: blocks of minutes in random order and a sequential test; moves only on a significant gain.
        `paper`: rolling windows of mixed versions, as published, without a guard.
    window, hop:
        Samples per window, and between two evaluations of it; the paper's.
    guard:
        Of the switchback: whether E2E, gaps between tokens, errors and concentration can refuse a gain in TTFT.
    audit:
        Whether a start that is not the policy's defaults is compared with them first. Only with the guard.
    warm_up_s:
        After the start, a roll-back or a pause, until caches and queues of earlier weights have mostly passed.
    block_s, discard_s:
        Of the switchback: two minutes are some hundreds of requests; the first 30 s belong to the queues of the block
        before, and late answers to a block are waited for as long.
    rest_blocks:
        Of the switchback: unmeasured blocks of the incumbent before each pair. A candidate costs clients its share of
        the time; with two that is a quarter. An audit has none.
    pairs:
        At most, per candidate: 20 pairs of 2 x 120 s and their rests are 160 minutes.
    harm_pairs:
        From this pair on a candidate that seems worse by more than the margin is given up. After two pairs of three the
        margin is twice as wide, after one nine times.
    futility_pairs:
        From this pair on a candidate that is not ahead is given up; costs power of a percent or less.
    alpha:
        Highest probability of accepting a candidate that is no better, over all its analyses.
    min_block_samples:
        The p95 of fewer is little more than their maximum.
    max_voids:
        Consecutive pairs without enough samples before the campaign waits for traffic.
    margin:
        How much worse p95 E2E and p95 ITL may be than the incumbent's until a candidate is refused: a tenth.
    e2e_margin:
        How much higher p95 E2E may be for a candidate to be accepted: a hundredth, over all accepted ones together.
    max_share:
        Of one replica, unless the incumbent gives it more. Three equal replicas have a third each.
    hard_e2e_factor, hard_e2e_s:
        Running p95 E2E above this many times the incumbent's, or above this many seconds, is rolled back at once. A
        window of 128 varies by a third from chance, not by a factor of 3.
    hard_errors:
        The same for the share of failed requests.
    saturated_ttft_ms, saturated_share:
        The fleet is saturated while more than this share waits longer than this for its first token. No round trip and
        no prefill takes 5 s (24,000 tokens on two L40S take 2): it is a queue, which no weights remove.
    patience_s:
        Saturated for so long: weights other than the defaults are left; with the defaults the campaign stops.
    max_generations, budget_s:
        When to stop whatever happens.
    freeze_at_end:
        Pin the incumbent when the campaign stops.

    Raises `TunerError` for an invalid value.
    """

    mode: Mode = "switchback"
    window: int = WINDOW
    hop: int = HOP
    guard: bool = True
    audit: bool = True
    warm_up_s: float = 60.0
    block_s: float = 120.0
    discard_s: float = 30.0
    rest_blocks: float = 2.0
    pairs: int = 20
    harm_pairs: int = 3
    futility_pairs: int = 8
    alpha: float = 0.05
    min_block_samples: int = 30
    max_voids: int = 5
    margin: float = 0.10
    e2e_margin: float = 0.01
    max_share: float = 0.8
    hard_e2e_factor: float = 3.0
    hard_e2e_s: float | None = None
    hard_errors: float = 0.05
    saturated_ttft_ms: float = 5000.0
    saturated_share: float = 0.25
    patience_s: float = 1800.0
    max_generations: int = 100
    budget_s: float | None = None
    freeze_at_end: bool = False

    def __post_init__(self) -> None:
        if self.mode not in get_args(Mode):
            raise TunerError(f"mode is {self.mode!r}; expected one of {', '.join(get_args(Mode))}")
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, int | float) and not isinstance(value, bool):
                _check(field.name, value)
        if self.discard_s >= self.block_s:
            raise TunerError(f"discard_s is {self.discard_s:g} of blocks of {self.block_s:g} s; expected less")
        if self.hop > self.window:
            raise TunerError(f"hop is {self.hop} of a window of {self.window}; expected no more")

    @property
    def algorithm(self) -> str:
        """Return the optimizer of this mode: the published one takes no probes."""
        return "es-published" if self.mode == "paper" else "es-probes"

    @property
    def guarded(self) -> bool:
        return self.guard and self.mode == "switchback"


#: Times and counts that may be 0; all other numbers must be above it.
_MAY_BE_0 = {"warm_up_s", "discard_s", "rest_blocks", "margin", "e2e_margin"}
#: Shares of something: at most 1.
_SHARES = {"alpha", "max_share", "hard_errors", "saturated_share"}


def _check(name: str, value: float) -> None:
    low_enough = value <= 1 if name in _SHARES else value < float("inf")
    if not low_enough or not (value >= 0 if name in _MAY_BE_0 else value > 0):
        expected = "a share above 0, at most 1" if name in _SHARES else "a finite number above 0"
        raise TunerError(f"{name} is {value!r}; expected {'0 or ' if name in _MAY_BE_0 else ''}{expected}")
