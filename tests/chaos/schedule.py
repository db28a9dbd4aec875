"""What breaks, and when: a schedule drawn from a seed.

Owns the kinds of fault and the rule by which they may overlap: one fault at a time per replica, per configuration and
per sidecar; and, the blackout apart, at every moment one replica that nothing is wrong with, nor was a short while ago.
Carrying them out is `faults`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum

import numpy as np

from tests.chaos.failing import FastFailure

#: So long after a fault a replica may still be thought ill: a back-off (5 s), a probe (1 s), and a busy machine.
RECOVERY_S = 6.0
#: Of a process: so long its replica stays away after the fault itself.
START_S = 2.5
#: Starts are tried in steps of this until somebody may be hit.
STEP_S = 0.25
#: Whom faults of no replica hit.
CONFIGURATION, SIDECAR = "configuration", "sidecar"


class Kind(Enum):
    """What goes wrong; the value is the name in the table."""

    KILL = "kill -9 of an engine, cold start later"
    RESTART = "kill -9 of an engine, cold start at once"
    HANG = "hang before the first token"
    RESET = "reset in mid-stream"
    ERRORS = "burst of 500s"
    SLOW = "slow (x3)"
    CUT = "region cut off"
    BLACKOUT = "all regions cut off"
    STALE = "stale metrics"
    REFUSING = "refuses everything"
    BUSY = "busy for ever"
    BAD_ANSWERS = "bad answers at once"
    RELOAD = "regions.yaml rewritten, SIGHUP"
    TUNER = "kill -9 of the sidecar"


VARIANTS: dict[Kind, tuple[str, ...]] = {
    # Connections refused and reset; taken, and what is sent arrives late; not even the SYN is answered.
    Kind.CUT: ("refused", "silent", "dark"),
    Kind.STALE: ("hang", "frozen"),
    Kind.RELOAD: ("leave", "drain", "move", "refused", "limits", "wrong-path"),
    Kind.REFUSING: tuple(each.value for each in FastFailure if each.on_probes),
    Kind.BUSY: tuple(each.value for each in FastFailure if each.status != 200 and not each.on_probes),
    Kind.BAD_ANSWERS: tuple(each.value for each in FastFailure if each.status == 200),
}
#: Kinds and variants during which the replica that they hit cannot be counted on.
_FAST = (Kind.REFUSING, Kind.BUSY, Kind.BAD_ANSWERS)
_ILL = (Kind.KILL, Kind.RESTART, Kind.HANG, Kind.RESET, Kind.ERRORS, Kind.CUT, Kind.BLACKOUT, *_FAST)
_WRONG_PATH = "wrong-path"
_ILL_RELOADS = ("leave", "drain", _WRONG_PATH)


@dataclass(frozen=True, slots=True)
class Planned:
    """One fault, in seconds since the load began. `target` is a replica, or `CONFIGURATION` and `SIDECAR`."""

    kind: Kind
    variant: str
    target: str
    start_s: float
    length_s: float
    #: So long afterwards nothing else happens to its target.
    rest_s: float = RECOVERY_S

    @property
    def end_s(self) -> float:
        return self.start_s + self.length_s

    @property
    def over_s(self) -> float:
        """When something else may happen to its target."""
        return self._back_s + self.rest_s

    @property
    def well_s(self) -> float:
        """From when its replica can be counted on again."""
        return self._back_s + RECOVERY_S

    @property
    def _back_s(self) -> float:
        started = self.kind in (Kind.KILL, Kind.RESTART, Kind.TUNER)
        return self.end_s + (START_S if started else 0.0)

    @property
    def ill(self) -> bool:
        """Whether a replica cannot be counted on while it lasts."""
        return self.kind in _ILL or self.variant in _ILL_RELOADS

    @property
    def fails_fast(self) -> bool:
        """Whether a replica answers at once meanwhile, and wrongly."""
        return self.kind in _FAST or self.variant == _WRONG_PATH

    def takes(self, replicas: Sequence[str]) -> tuple[str, ...]:
        """Whom nothing else may happen to meanwhile."""
        hit = tuple(replicas) if self.kind is Kind.BLACKOUT else (self.target,)
        return (*hit, CONFIGURATION) if self.kind is Kind.RELOAD else hit

    def lays_low(self, replicas: Sequence[str]) -> tuple[str, ...]:
        """Replicas that cannot be counted on meanwhile."""
        return tuple(name for name in replicas if self.ill and name in self.takes(replicas))

    @property
    def name(self) -> str:
        return f"{self.kind.value} ({self.variant})" if self.variant else self.kind.value


class _Book:
    """Until when each is taken, and until when each replica cannot be counted on."""

    def __init__(self, replicas: Sequence[str]) -> None:
        self._taken = dict.fromkeys((*replicas, CONFIGURATION, SIDECAR), 0.0)
        self._ill = dict.fromkeys(replicas, 0.0)

    def targets(self, kind: Kind, variant: str, at_s: float) -> list[str]:
        """Who may be hit then."""
        free = [name for name in self._ill if self._taken[name] <= at_s]
        well = [name for name in self._ill if self._ill[name] <= at_s]
        if kind is Kind.TUNER:
            return [SIDECAR] if self._taken[SIDECAR] <= at_s else []
        if kind is Kind.BLACKOUT:
            return free[:1] if len(free) == len(well) == len(self._ill) else []
        if kind is Kind.RELOAD and self._taken[CONFIGURATION] > at_s:
            return []
        harmless = kind in (Kind.SLOW, Kind.STALE) or (kind is Kind.RELOAD and variant not in _ILL_RELOADS)
        return [name for name in free if harmless or set(well) - {name}]

    def take(self, fault: Planned) -> None:
        self._taken |= dict.fromkeys(fault.takes(list(self._ill)), fault.over_s)
        self._ill |= dict.fromkeys(fault.lays_low(list(self._ill)), fault.well_s)


def draw_schedule(
    rng: np.random.Generator,
    replicas: Sequence[str],
    *,
    seconds: float,
    every_s: float,
    length_s: tuple[float, float],
    rest_s: float = RECOVERY_S,
) -> list[Planned]:
    """Faults that begin and are over within `seconds`, every kind before any comes again.

    Parameters
    ----------
    rng:
        The only source of chance.
    every_s:
        Mean time between two starts; longer where nobody may be hit.
    length_s:
        Shortest and longest.
    rest_s:
        From the end of a fault to the next one of the same target, and to the end of the schedule.
    """
    book, at_s = _Book(replicas), every_s / 2
    planned: list[Planned] = []
    rounds = _rounds(rng)
    left = next(rounds)
    while at_s < seconds:
        fault = _first_possible(book, left, at_s, float(rng.uniform(*length_s)), rest_s, rng)
        if fault is None or fault.over_s > seconds:
            at_s += STEP_S
            continue
        left.remove((fault.kind, fault.variant))
        left = left or next(rounds)
        book.take(fault)
        planned.append(fault)
        at_s += every_s * float(rng.uniform(0.6, 1.4))
    return planned


def _first_possible(
    book: _Book,
    left: Sequence[tuple[Kind, str]],
    at_s: float,
    length_s: float,
    rest_s: float,
    rng: np.random.Generator,
) -> Planned | None:
    for kind, variant in left:
        targets = book.targets(kind, variant, at_s)
        if targets:
            return Planned(kind, variant, targets[int(rng.integers(len(targets)))], at_s, length_s, rest_s)
    return None


def _rounds(rng: np.random.Generator) -> Iterator[list[tuple[Kind, str]]]:
    """All kinds in any order, again and again; variants take turns."""
    offsets = {kind: int(rng.integers(len(variants))) for kind, variants in VARIANTS.items()}
    lap = 0
    while True:
        order = [list(Kind)[int(number)] for number in rng.permutation(len(Kind))]
        named = [(kind, VARIANTS.get(kind, ("",))) for kind in order]
        yield [(kind, variants[(offsets.get(kind, 0) + lap) % len(variants)]) for kind, variants in named]
        lap += 1
