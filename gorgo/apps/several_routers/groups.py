"""Every run, by group: n routers against one, late reports, a router that is replaced, overload, and many of both."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from gorgo.apps.cache_sources.traffic import ChatTraffic
from gorgo.apps.several_routers.measure import FLEET, RoutersTask
from gorgo.apps.traces import TraceFilters
from gorgo.sim.named_fleets import find_fleet
from gorgo.sim.routers.group import SHARINGS, RouterGroup, Sharing

#: Answers of 128 tokens at most, and prompts of 24,000, as in the tuner's windows.
_FILTERS = TraceFilters(max_input=24_000, max_output=128)
CHAT = ChatTraffic(name="ART-Chat-like", trace="art-chat-apr5", requests=2000, filters=_FILTERS)
#: Its time stamps have whole seconds: requests of one are scattered.
CONVERSATION = ChatTraffic(name="conversation", trace="", requests=1600, filters=replace(_FILTERS, spread_s=3.0))
#: Loads of each, as multiples of its own.
LOADS: Mapping[str, Sequence[float]] = {CHAT.name: (0.5, 1.0), CONVERSATION.name: (0.5, 0.8)}
COUNTS = (2, 4, 8)
#: Of the reports of `multi-depth`, s.
DELAYS_S = (0.005, 0.1, 1.0, 10.0)
#: Rows without a delay of their own, with the bound of each route table: a small one is a tenth of what it would have.
_SMALL_TABLES: Sequence[tuple[str, int, Sharing, int | None]] = (
    ("one", 1, "all", None),
    ("alone", 4, "none", None),
    ("alone, 1,000 routes", 4, "none", 1000),
    ("0.005 s, 1,000 routes", 4, "store", 1000),
)
#: Capacity of the fleet for this traffic, in multiples of its own load, by `gorgo overload`; and the overload.
CAPACITY, OVERLOAD = 1.04, 1.3

#: Columns of n routers.
_SHARED: Mapping[str, Sharing] = {"alone": "none", "store": "store"}

#: Replicas and routers of a large group, and its traffic: as many requests a replica as at half of the load.
LARGE = (512, 100)
_LARGE_REQUESTS = 1500

GROUPS = ("routers", "delay", "replaced", "overload", "large")


@dataclass(frozen=True, slots=True)
class Labelled:
    """A run with the row and the column of its figures."""

    group: str
    row: str
    column: str
    task: RoutersTask


def runs_of(groups: Sequence[str], *, trace: str | None, counts: Sequence[int], seeds: Sequence[int]) -> list[Labelled]:
    """Return the runs of some groups; without the conversation trace where `trace` is `None`."""
    made = {
        "routers": _routers(trace, counts),
        "delay": list(_delay()),
        "replaced": list(_replaced()),
        "overload": list(_overload()),
        "large": list(_large()),
    }
    return [
        replace(each, task=replace(each.task, seed=seed)) for seed in seeds for group in groups for each in made[group]
    ]


def at(traffic: ChatTraffic, load: float) -> ChatTraffic:
    """Return the traffic at a load."""
    return replace(traffic, load=load, name=f"{traffic.name}@{load:g}")


def _routers(trace: str | None, counts: Sequence[int]) -> list[Labelled]:
    traffics = [CHAT] if trace is None else [CHAT, replace(CONVERSATION, trace=trace)]
    found = []
    for traffic in traffics:
        for load in LOADS[traffic.name]:
            chosen = at(traffic, load)
            found.append(_labelled("routers", f"{chosen.name}/1", "one", chosen, 1, "all"))
            for count in counts:
                for column, sharing in _SHARED.items():
                    found.append(_labelled("routers", f"{chosen.name}/{count}", column, chosen, count, sharing))
    return found


def _delay() -> Iterator[Labelled]:
    for row, count, sharing, max_routes in _SMALL_TABLES:
        yield _with_routes(row, count, sharing, max_routes=max_routes)
    for delay_s in DELAYS_S:
        yield _with_routes(f"{delay_s:g} s", 4, "store", delay_s=delay_s)


def _with_routes(
    row: str, count: int, sharing: Sharing, *, max_routes: int | None = None, delay_s: float = DELAYS_S[0]
) -> Labelled:
    group = RouterGroup(count=count, sharing=sharing, delay_s=delay_s)
    task = RoutersTask(policy="multi-depth", traffic=at(CHAT, 0.5), routers=group, max_routes=max_routes)
    return Labelled("delay", row, "figures", task)


def _replaced() -> Iterator[Labelled]:
    traffic = at(CHAT, 0.5)
    rows: Sequence[tuple[str, Sharing, float | None]] = (
        ("not replaced", "none", None),
        ("no store", "none", 0.5),
        ("store", "store", 0.5),
    )
    for row, sharing, share in rows:
        one = _labelled("replaced", row, "one router", traffic, 1, sharing)
        yield replace(one, task=replace(one.task, replaced_after=share, sliced=True))


def _overload() -> Iterator[Labelled]:
    traffic = at(CHAT, round(CAPACITY * OVERLOAD, 3))
    columns: Sequence[tuple[str, int, Sharing]] = (("one", 1, "all"), ("alone", 4, "none"), ("store", 4, "store"))
    for column, count, sharing in columns:
        one = _labelled("overload", f"{OVERLOAD} times capacity", column, traffic, count, sharing)
        yield replace(one, task=replace(one.task, queueing=True))


def _large() -> Iterator[Labelled]:
    replicas, count = LARGE
    own = len(find_fleet(FLEET).replicas)
    traffic = replace(at(CHAT, round(0.5 * replicas / own, 1)), requests=_LARGE_REQUESTS)
    for sharing in SHARINGS[:2]:
        one = _labelled("large", sharing, "figures", traffic, count, sharing)
        yield replace(one, task=replace(one.task, replicas=replicas))


def _labelled(group: str, row: str, column: str, traffic: ChatTraffic, count: int, sharing: Sharing) -> Labelled:
    return Labelled(group, row, column, RoutersTask(traffic=traffic, routers=RouterGroup(count=count, sharing=sharing)))
