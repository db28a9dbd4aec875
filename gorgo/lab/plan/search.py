"""The search for the cheapest fleets: in order of their price, with bounds first and a simulation of what is left.

Owns the order, and what need not be simulated. Leaves the bounds and the simulation to callables.

Theory of operation. Fleets are counts of each kind. They come from a heap in the order of their price, each once, so
the first one that serves is the cheapest but for its egress, and the search ends when the next price is above the cost
of what it has found. A fleet is not simulated if a lower bound excludes it, or if one with at least as many replicas of
each kind has failed clearly. The latter is no theorem: a replica more can spread a prefix over more caches. So a fleet
that failed by less than `CLEARLY` excludes no other.

Far below the cheapest fleet that serves, nearly all fail. So before a fleet itself, larger ones are simulated: if one
fails, all within it have. How much larger they are is halved by each that does not.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from math import inf

from gorgo.lab.plan.settings import Kind

Counts = tuple[int, ...]
#: Attained share below the objective beyond which smaller fleets are taken to fail too.
CLEARLY = 0.02
#: Replicas by which the first simulated fleet is larger than the cheapest that no bound excludes.
FIRST_STEP = 4
#: Fleets that the search goes through at most, some seconds of it; a larger space needs smaller quotas.
FLEETS_MAX = 2_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """A fleet that was simulated.

    Parameters
    ----------
    counts:
        Replicas of each kind.
    price, egress:
        Of an hour: of the replicas, and of what they send.
    attained:
        Share of the requests that meet their objective, for the clients of each region.
    objective:
        The share that is wanted, likewise.
    quantiles:
        For each region's clients the time of a first token and of an answer within which the wanted share is, and the
        time per token; None where the share has none. In ms, s and ms.
    """

    counts: Counts
    price: float
    egress: float
    attained: tuple[float, ...]
    objective: tuple[float, ...]
    quantiles: tuple[tuple[float | None, float | None, float | None], ...] = ()

    @property
    def cost(self) -> float:
        return self.price + self.egress

    @property
    def margin(self) -> float:
        """Return the least distance of a region's share to its objective; negative where one is missed."""
        return min(share - wanted for share, wanted in zip(self.attained, self.objective, strict=True))

    @property
    def serves(self) -> bool:
        return self.margin >= 0


@dataclass(frozen=True, slots=True)
class FleetSearch:
    """What the search has found and done.

    Parameters
    ----------
    serving:
        Fleets that serve, cheapest first.
    measured:
        All that were simulated, in order of price.
    excluded, dominated:
        Fleets that a bound, or a larger fleet that failed, made it skip.
    is_complete:
        False if it ended at its most simulations or fleets, so that a cheaper one than the last may have been missed.
    """

    serving: tuple[Measured, ...]
    measured: tuple[Measured, ...]
    excluded: int
    dominated: int
    is_complete: bool

    @classmethod
    def of(
        cls, measured: Mapping[Counts, Measured], wanted: int, excluded: int, dominated: int, *, is_complete: bool
    ) -> FleetSearch:
        by_price = sorted(measured.values(), key=lambda one: (one.price, one.counts))
        return cls(tuple(_serving(by_price)[:wanted]), tuple(by_price), excluded, dominated, is_complete)


def fleets_by_price(kinds: Sequence[Kind]) -> Iterator[tuple[float, Counts]]:
    """Yield every fleet of at least one replica with its price, cheapest first, each once.

    Example
    -------
    >>> from gorgo.lab.sim.engine.profiles import find_profile
    >>> h100 = Kind(region="us", accelerator="h100", profile=find_profile("1xH100-Llama-3.1-8B"),
    ...             profile_name="", price_per_hour=2.0, quota=2, rtt_s=0.0)
    >>> list(fleets_by_price([h100]))
    [(2.0, (1,)), (4.0, (2,))]
    """
    heap: list[tuple[float, int, Counts, int]] = [(0.0, 0, (0,) * len(kinds), 0)]
    while heap:
        price, size, counts, first = heappop(heap)
        if size:
            yield price, counts
        # Only kinds from the last one on are added, so each fleet has one way to be made.
        for kind_index in range(first, len(kinds)):
            if counts[kind_index] < kinds[kind_index].quota:
                more = (*counts[:kind_index], counts[kind_index] + 1, *counts[kind_index + 1 :])
                exact = sum(kind.price_per_hour * count for kind, count in zip(kinds, more, strict=True))
                heappush(heap, (exact, size + 1, more, kind_index))


def search(
    kinds: Sequence[Kind],
    measure: Callable[[Sequence[Counts]], Iterable[Measured]],
    *,
    excludes: Callable[[Counts], bool],
    wanted: int = 1,
    at_once: int = 1,
    most: int = 400,
) -> FleetSearch:
    """Return the cheapest fleets that serve.

    Parameters
    ----------
    measure:
        Simulates fleets, and returns them in any order.
    excludes:
        Whether a lower bound says that a fleet cannot serve.
    wanted:
        Serving fleets to find.
    at_once:
        Fleets that are simulated at a time.
    most:
        Simulations after which the search ends.
    """
    measured: dict[Counts, Measured] = {}
    failed: list[Counts] = []
    excluded = dominated = 0
    limit, is_complete, step = inf, True, FIRST_STEP
    for rank, (price, counts) in enumerate(fleets_by_price(kinds)):
        if price > limit:
            break
        if rank >= FLEETS_MAX:
            is_complete = False
            break
        if excludes(counts):
            excluded += 1
            continue
        while counts not in measured and not any(_within(counts, larger) for larger in failed):
            probes = _probes(counts, kinds, step, at_once, measured)
            if len(measured) + len(probes) > most:
                return FleetSearch.of(measured, wanted, excluded, dominated, is_complete=False)
            for one in measure(probes):
                measured[one.counts] = one
            clear = [probe for probe in probes if measured[probe].margin < -CLEARLY]
            failed = [one for one in failed if not any(_within(one, larger) for larger in clear)] + clear
            step = step if len(clear) == len(probes) else step // 2
            limit = _limit(measured.values(), wanted)
        dominated += counts not in measured
    return FleetSearch.of(measured, wanted, excluded, dominated, is_complete=is_complete)


def _probes(
    counts: Counts, kinds: Sequence[Kind], step: int, at_once: int, measured: Container[Counts]
) -> Sequence[Counts]:
    """Return fleets to simulate: larger ones by up to `step` replicas, that are not simulated yet; at last itself."""
    fleets: list[Counts] = []
    while True:
        larger = _larger(counts, kinds, step)
        if larger not in measured and larger not in fleets:
            fleets.append(larger)
        if not step or len(fleets) == at_once:
            return fleets or (counts,)
        step //= 2


def _larger(counts: Counts, kinds: Sequence[Kind], step: int) -> Counts:
    """Return the fleet with `step` replicas more, each of the kind with the fewest, as far as quotas allow."""
    more = list(counts)
    for _ in range(step):
        free = [kind_index for kind_index, kind in enumerate(kinds) if more[kind_index] < kind.quota]
        if not free:
            break
        more[min(free, key=more.__getitem__)] += 1
    return tuple(more)


def _serving(measured: Iterable[Measured]) -> list[Measured]:
    return sorted((one for one in measured if one.serves), key=_order)


def _limit(measured: Iterable[Measured], wanted: int) -> float:
    """Return the price beyond which no fleet is among the cheapest; a replica costs no less for its egress."""
    serving = _serving(measured)
    return serving[wanted - 1].cost if len(serving) >= wanted else inf


def _order(one: Measured) -> tuple[float, int, Counts]:
    return one.cost, sum(one.counts), one.counts


def _within(counts: Counts, larger: Counts) -> bool:
    return all(count <= other for count, other in zip(counts, larger, strict=True))
