"""The data of the pictures: hits and TTFT over the size of a fleet and by depth mode, faults over time, delays.

Owns which groups have which picture. Every point is a mean over seeds; its bar goes from the least seed to the most.
Drawing is `learned_routers.drawing`'s.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np

from gorgo.apps.cache_sources.comparison import STATS, CacheComparison, Runs
from gorgo.apps.cache_sources.measure import CacheRun, CacheSlice
from gorgo.apps.learned_routers.pictures import Picture, PicturePanel, PicturePoint

#: Value of a run, or `None`.
Value = Callable[[CacheRun], float | None]

_BY_SIZE: dict[str, Value] = {
    "hit, %": lambda run: None if run.row.cache_hit is None else 100 * run.row.cache_hit,
    "p95 TTFT, ms": lambda run: STATS["p95 TTFT"](run.row),
    "bytes of reports a request": lambda run: run.bytes_per_request,
}
_CURVES: dict[str, Callable[[CacheSlice], float]] = {
    "phantom, % of estimated": lambda part: 100 * part.phantom,
    "missed, % of cached": lambda part: 100 * part.missed,
    "hit, %": lambda part: 100 * part.hit,
}
_BY_MODE: dict[str, Value] = {
    "mean TTFT, ms": lambda run: STATS["mean TTFT"](run.row),
    "hit, %": _BY_SIZE["hit, %"],
}
_QUANTILES = ("p50", "p95", "p99")


def pictures(chosen: Sequence[CacheComparison], runs: Runs, seeds: Sequence[int]) -> list[Picture]:
    """Return the pictures of the comparisons that were run."""
    found = []
    if sizes := [one for one in chosen if one.group == "replicas"]:
        found.append(Picture("replicas", [_by_size(sizes, runs, seeds, *figure) for figure in _BY_SIZE.items()]))
    if kinds := [one for one in chosen if one.group == "depths"]:
        found.append(Picture("depths", [_by_traffic(kinds, runs, seeds, *figure) for figure in _BY_MODE.items()]))
    found += [
        Picture(one.group, [_curve(one, runs, seeds, *figure) for figure in _CURVES.items()])
        for one in chosen
        if one.by_time
    ]
    if panels := list(_delays(chosen, runs, seeds)):
        found.append(Picture("delays", panels))
    return found


def _by_size(
    sizes: Sequence[CacheComparison], runs: Runs, seeds: Sequence[int], title: str, value: Value
) -> PicturePanel:
    curves: dict[str, list[PicturePoint]] = {}
    for one in sizes:
        for variant in one.variants:
            known = [found for run in one.runs_of(variant, runs, seeds) if (found := value(run)) is not None]
            if known:
                curves.setdefault(variant.label, []).append(PicturePoint.of(float(one.fleet.replicas), known))
    return PicturePanel(title, "replicas", "lines", curves, {})


def _by_traffic(
    kinds: Sequence[CacheComparison], runs: Runs, seeds: Sequence[int], title: str, value: Value
) -> PicturePanel:
    bars: dict[str, list[PicturePoint]] = {}
    for one in kinds:
        for variant in one.variants:
            known = [found for run in one.runs_of(variant, runs, seeds) if (found := value(run)) is not None]
            bars.setdefault(variant.label, []).append(PicturePoint.of(one.traffic.name.split()[0], known))
    return PicturePanel(title, kinds[0].fleet.name, "bars", bars, {})


def _curve(
    one: CacheComparison, runs: Runs, seeds: Sequence[int], title: str, value: Callable[[CacheSlice], float]
) -> PicturePanel:
    curves = {
        variant.label: [
            PicturePoint.of(slices[0].begins_s, [value(part) for part in slices])
            for slices in zip(*(run.slices for run in one.runs_of(variant, runs, seeds)), strict=False)
        ]
        for variant in one.variants
    }
    return PicturePanel(title, "seconds", "lines", curves, {}, dict(one.marks))


def _delays(chosen: Sequence[CacheComparison], runs: Runs, seeds: Sequence[int]) -> Iterator[PicturePanel]:
    """Yield a panel per fleet of several regions: quantiles of the time until an eviction is known."""
    for one in chosen:
        curves: dict[str, list[PicturePoint]] = {}
        for variant in one.variants:
            if variant.source not in ("push", "events") or one.by_time:
                continue
            found = one.runs_of(variant, runs, seeds)
            for region in found[0].eviction_delays_ms:
                by_seed = [run.eviction_delays_ms[region] for run in found if region in run.eviction_delays_ms]
                curves[f"{variant.label}, {region}"] = [
                    PicturePoint.of(name, values)
                    for name, values in zip(_QUANTILES, np.transpose(by_seed).tolist(), strict=True)
                ]
        if one.group == "sources" and curves:
            yield PicturePanel("evictions known after, ms", one.title, "bars", curves, {})
