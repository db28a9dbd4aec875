"""results.json and history.json, checked. Keys that are not known are left alone: newer files have more of them."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, cast

from gorgo.apps.report.reading import Place, read_json, shown
from gorgo.apps.report.runs import ReportGeneration
from gorgo.apps.results import ResultRow, Spread
from gorgo.errors import ReportError

SOURCES = ("simulated", "live")


def read_results(path: Path) -> list[ResultRow]:
    """Every row. Raises `ReportError` naming file, row, key and expectation."""
    return [_row(Place.of(f"{path}, row {number}", value)) for number, value in enumerate(_list(path), start=1)]


def read_history(path: Path) -> tuple[ReportGeneration, ...]:
    """The generations of a tuning campaign, in order. Raises `ReportError`."""
    rows = _list(path, under="generations")
    return tuple(_generation(Place.of(f"{path}, generation {number}", row)) for number, row in enumerate(rows, start=1))


def _list(path: Path, under: str | None = None) -> list[object]:
    value = read_json(path)
    if under is not None and isinstance(value, dict):
        value = value.get(under)
    if not isinstance(value, list):
        raise ReportError(f"{path}: {shown(value)}; expected a list of objects")
    return value


def _row(place: Place) -> ResultRow:
    time_scale = place.number("time_scale")
    if time_scale <= 0:
        place.fail("time_scale", "a number greater than 0")
    source = place.text("source")
    if source not in SOURCES:
        place.fail("source", f"one of {', '.join(SOURCES)}")
    return ResultRow(
        trace=place.text("trace"),
        time_scale=time_scale,
        policy=place.maybe_text("policy"),
        weights=None if place.values.get("weights") is None else place.numbers("weights"),
        seed=place.count("seed"),
        source=cast(Literal["simulated", "live"], source),
        n=place.count("n"),
        errors=place.count("errors"),
        ttft_ms=_spread(place, "ttft_ms"),
        e2e_s=_spread(place, "e2e_s"),
        itl_ms=_spread(place, "itl_ms"),
        cache_hit=_fraction(place, "cache_hit"),
        cache_hit_estimated=place.maybe_number("cache_hit_estimated"),
        share=place.numbers("share"),
        prediction_error_ms=_spread(place, "prediction_error_ms", p99=False),
        slip_ms_p95=place.maybe_number("slip_ms_p95"),
    )


def _spread(place: Place, key: str, *, p99: bool = True) -> Spread:
    inside = place.inner(key)
    expected = "a number, at least 0, or null"
    values = {name: inside.maybe_number(name, expected=expected) for name in ("mean", "p50", "p95")}
    values["p99"] = inside.maybe_number("p99", expected=expected) if p99 else None
    for name, value in values.items():
        if value is not None and value < 0:
            inside.fail(name, expected)
    return Spread(**values)


def _fraction(place: Place, key: str) -> float | None:
    value = place.maybe_number(key)
    if value is not None and not 0 <= value <= 1:
        place.fail(key, "a fraction from 0 to 1, or null")
    return value


def _generation(place: Place) -> ReportGeneration:
    accepted = place.values.get("accepted")
    if not isinstance(accepted, bool):
        place.fail("accepted", "true or false")
    return ReportGeneration(
        number=place.count("number"),
        weights=place.numbers("weights"),
        sigma=place.maybe_number("sigma"),
        objective_ms=place.maybe_number("objective_ms"),
        incumbent_objective_ms=place.maybe_number("incumbent_objective_ms"),
        accepted=accepted,
        reason=place.maybe_text("reason") or "",
    )
