"""What the GORGO paper measured: its tables as data, by window and policy, and where each figure is printed.

Owns the numbers. One run each, on hired machines: the paper found two hosts of one kind 20 % apart. What is not in the
paper but in a later note of its authors says so.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass

from gorgo.apps.demo.options import PAPER, RANDOM

#: Learned by the authors' tuner from (0.5, 0.1), and held fixed on the held-out windows.
LEARNED: Mapping[str, float] = {"w_rtt": 0.276, "w_queue": 0.5}
AFFINITY = "simple-session-affinity"


@dataclass(frozen=True, slots=True)
class RunStats:
    """Figures of one policy on one window: TTFT and TPOT in ms, E2E in s. `tpot_ms` is the median over requests."""

    ttft_ms_p50: float
    ttft_ms_p95: float
    ttft_ms_p99: float
    e2e_s_p50: float
    e2e_s_p95: float
    e2e_s_p99: float
    tpot_ms: float

    def values(self) -> tuple[float, ...]:
        """Return the seven figures in the order of `FIGURE_NAMES`."""
        return astuple(self)


FIGURE_NAMES = ("TTFT p50", "TTFT p95", "TTFT p99", "E2E p50", "E2E p95", "E2E p99", "TPOT")
#: Places of the two figures of the paper's claims.
P95 = (FIGURE_NAMES.index("TTFT p95"), FIGURE_NAMES.index("E2E p95"))


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedWindow:
    """One window of table 2, and the shape that is like it."""

    name: str
    trace: str
    time_scale: float
    stats: Mapping[str, RunStats]


def _window(name: str, trace: str, time_scale: float, rows: Mapping[str, Sequence[float]]) -> PublishedWindow:
    return PublishedWindow(name=name, trace=trace, time_scale=time_scale, stats=_stats(rows))


def _stats(rows: Mapping[str, Sequence[float]]) -> Mapping[str, RunStats]:
    return {policy: RunStats(*row) for policy, row in rows.items()}


#: Table 2. The column that the paper calls ITL is 1 / 127 of the typical E2E less TTFT, so a mean per request.
WINDOWS: Sequence[PublishedWindow] = (
    _window(
        "April 5",
        "art-chat-apr5",
        1.0,
        {
            PAPER: (673, 2514, 4473, 3.04, 8.91, 17.54, 17.6),
            AFFINITY: (712, 2428, 5190, 3.48, 18.27, 22.61, 20.2),
            "least-load": (763, 2447, 4349, 3.63, 13.69, 17.57, 21.7),
            "least-request": (968, 3970, 7012, 4.37, 16.62, 20.81, 25.2),
            "prefix-cache": (1477, 6784, 9613, 13.14, 22.63, 26.81, 82.3),
        },
    ),
    _window(
        "April 6",
        "art-chat-apr6",
        2.0,
        {
            PAPER: (491, 1584, 2222, 1.80, 3.28, 4.37, 9.0),
            AFFINITY: (627, 1875, 3056, 2.01, 4.75, 7.34, 10.3),
            "least-load": (616, 1818, 2885, 2.17, 4.06, 5.78, 10.7),
            "least-request": (634, 1852, 2484, 2.08, 3.99, 5.23, 9.9),
            "prefix-cache": (574, 1798, 2750, 2.07, 4.95, 10.34, 10.6),
        },
    ),
    _window(
        "April 7",
        "art-chat-apr7",
        3.0,
        {
            PAPER: (398, 1417, 2061, 1.74, 3.36, 6.81, 9.3),
            AFFINITY: (457, 1522, 2402, 1.74, 3.92, 7.12, 9.3),
            "least-load": (495, 1669, 2368, 1.95, 4.07, 6.22, 10.0),
            "least-request": (527, 1759, 2578, 1.98, 4.44, 7.85, 10.0),
            "prefix-cache": (533, 1861, 2872, 2.20, 12.00, 20.04, 11.8),
        },
    ),
)

#: Table 3, the load sweep on April 7: p95 TTFT in ms and p95 E2E in s, by policy and time scale.
LOAD_SWEEP: Mapping[str, Mapping[float, tuple[float, float]]] = {
    PAPER: {1.0: (8260, 15.76), 2.0: (1822, 5.65), 3.0: (1378, 3.25)},
    AFFINITY: {1.0: (1835, 17.94), 2.0: (1707, 15.50), 3.0: (1556, 4.04)},
    "least-request": {1.0: (6138, 18.62), 2.0: (4361, 16.85), 3.0: (1805, 4.92)},
}
#: Table 5, another run of April 7 at this time scale.
HALF_LOAD: Mapping[str, RunStats] = _stats(
    {
        PAPER: (586, 1891, 3431, 2.38, 7.10, 12.58, 13.4),
        AFFINITY: (512, 1684, 2455, 2.19, 14.66, 17.19, 12.2),
        "least-load": (633, 2158, 3753, 2.69, 10.39, 16.19, 15.5),
        "least-request": (915, 4806, 7114, 3.77, 17.27, 19.61, 19.7),
        "prefix-cache": (1474, 8243, 12167, 7.67, 22.14, 26.66, 45.7),
    }
)
HALF_LOAD_TIME_SCALE = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenLoopStats:
    """A row of table 6: requests completed in half an hour with 32 of them open, and TTFT in seconds."""

    completed: int
    ttft_s_p50: float
    ttft_s_p95: float
    ttft_s_p99: float
    ttft_s_max: float


def _open(*values: float) -> OpenLoopStats:
    completed, *ttft_s = values
    return OpenLoopStats(
        completed=int(completed),
        **dict(zip(("ttft_s_p50", "ttft_s_p95", "ttft_s_p99", "ttft_s_max"), ttft_s, strict=True)),
    )


PAPER_ONLINE, PAPER_FIXED = f"{PAPER} (online)", f"{PAPER} (fixed)"
#: Table 6 as the paper prints it (appendix C): WildChat-4.8M. The paper's policy loses, and the paper says so.
WILDCHAT_PRINTED: Mapping[str, OpenLoopStats] = {
    AFFINITY: _open(20_447, 0.416, 1.025, 1.712, 7.75),
    "least-request": _open(20_517, 0.480, 1.036, 1.731, 110.45),
    RANDOM: _open(20_436, 0.416, 1.077, 1.796, 15.82),
    "prefix-cache": _open(20_504, 0.497, 1.186, 2.588, 10.63),
    "least-load": _open(20_484, 0.532, 1.217, 2.535, 8.28),
    PAPER_ONLINE: _open(20_473, 0.541, 1.325, 2.654, 7.05),
    PAPER_FIXED: _open(20_462, 0.709, 1.932, 3.969, 60.18),
}
#: Not in the paper: the authors' rerun of WildChat at time scale 2 on three H100, from their public note of 27 July
#: 2026, and the weights of the paper's policy there. The note calls the cost model of table 6 superseded.
WILDCHAT: Mapping[str, RunStats] = _stats(
    {
        PAPER: (215, 506, 728, 1.55, 2.42, 2.98, 10.1),
        RANDOM: (244, 611, 1166, 1.38, 2.51, 4.04, 8.4),
    }
)
#: The same note at time scale 1, p95 TTFT in ms: the paper's policy loses.
WILDCHAT_FULL_LOAD: Mapping[str, float] = {PAPER: 1194, RANDOM: 572}
WILDCHAT_WEIGHTS: Mapping[str, float] = {"w_rtt": 2.0, "w_queue": 0.104}
WILDCHAT_TIME_SCALE = 2.0
#: Table 7, reward hacking on a window of April 2: the paper's policy with these weights sends all to the nearest
#: replica. The paper says of that window only that it has 3,071 requests.
HACKED: Mapping[str, RunStats] = _stats(
    {
        PAPER: (180, 1072, 1810, 2.05, 12.49, 16.63, 14.1),
        AFFINITY: (268, 1715, 2947, 1.74, 3.88, 5.90, 10.8),
        "least-load": (278, 1669, 2665, 1.69, 3.89, 8.94, 10.1),
        "least-request": (274, 1285, 1902, 1.37, 2.61, 3.34, 8.6),
        RANDOM: (283, 1456, 2124, 1.40, 2.92, 4.24, 8.5),
        "prefix-cache": (288, 1468, 2374, 1.56, 3.59, 7.12, 9.4),
    }
)
HACKED_WEIGHTS: Mapping[str, float] = {"w_rtt": 0.23, "w_queue": 0.0}

RERUN = "authors' note of 27 July 2026"


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedValue:
    """One printed number: the table or note, its row (a policy) and its column (a window or load, and the figure)."""

    table: str
    row: str
    column: str
    value: float


def published_values() -> Iterator[PublishedValue]:
    """Yield every figure of this module with the place where it is printed."""
    for window in WINDOWS:
        yield from _placed("table 2", window.stats, f"{window.name}, ")
    for policy, loads in LOAD_SWEEP.items():
        for time_scale, values in loads.items():
            for name, value in zip((FIGURE_NAMES[place] for place in P95), values, strict=True):
                yield PublishedValue(
                    table="table 3", row=policy, column=f"time scale {time_scale:g}, {name}", value=value
                )
    yield from _placed("table 5", HALF_LOAD)
    for policy, stats in WILDCHAT_PRINTED.items():
        for name, value in zip(
            ("completed", "TTFT p50", "TTFT p95", "TTFT p99", "TTFT max"), astuple(stats), strict=True
        ):
            yield PublishedValue(table="table 6", row=policy, column=name, value=value)
    yield from _placed(RERUN, WILDCHAT, "time scale 2, ")
    for policy, value in WILDCHAT_FULL_LOAD.items():
        yield PublishedValue(table=RERUN, row=policy, column="time scale 1, TTFT p95", value=value)
    yield from _placed("table 7", HACKED)


def _placed(table: str, rows: Mapping[str, RunStats], before: str = "") -> Iterator[PublishedValue]:
    for policy, stats in rows.items():
        for name, value in zip(FIGURE_NAMES, stats.values(), strict=True):
            yield PublishedValue(table=table, row=policy, column=before + name, value=value)
