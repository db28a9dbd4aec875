"""Processor time per event of an Envoy whose answers are searched for the engine's counts of tokens, in two ways.

The printed configuration reads them by a script; Envoy's own filter `sse_to_metadata` is in its place beside it. Both
as ratios to the plain Envoy of the same round: 64 endless streams, interleaved rounds. Envoy has core 1, engine and
load core 0. Two minutes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from statistics import median
from typing import Any
from unittest.mock import patch

from gorgo.picker.envoy import Json, typed
from tests.bench.behind_envoy import bench, targets
from tests.bench.relay.report import aligned, cpu_us
from tests.bench.relay.targets import Launch, Place

ROUNDS = 8
_SCRIPT = "envoy.filters.http.lua"
_COUNTS = ("prompt_tokens", "completion_tokens")


def run() -> None:
    """Print medians and spreads of the rounds."""
    launches = {
        targets.PLAIN: targets.plain,
        "without": partial(_launch, lambda _: []),
        "sse_to_metadata": partial(_launch, lambda _: [sse_to_metadata()]),
        "script": partial(_launch, lambda script: [script]),
    }
    plan = replace(bench.SHORT, rounds=ROUNDS, scale=0.5)
    runs = dict(bench.interleaved(plan, ROUNDS, launches, ("events",)))
    measure = cpu_us("events", "tokens")
    found = {name: [measure(runs, name, number) or 0.0 for number in range(ROUNDS)] for name in launches}
    lines = [["CPU per event", "us, median", "of plain, median (least, most)"]]
    for name, values in found.items():
        ratios = [value / plain for value, plain in zip(values, found[targets.PLAIN], strict=True)]
        lines.append([name, f"{median(values):.1f}", f"{median(ratios):.2f} ({min(ratios):.2f}, {max(ratios):.2f})"])
    print(aligned(lines))


def sse_to_metadata() -> Json:
    """Return Envoy's own filter, for the counts that it can read."""
    rules = [{"rule": {"selectors": [{"key": "usage"}, {"key": key}], "on_present": _present(key)}} for key in _COUNTS]
    parser = {
        "name": "envoy.content_parsers.json",
        "typed_config": typed("content_parsers.json.v3.JsonContentParser", rules=rules),
    }
    response = {"max_event_size": 65_536, "content_parser": parser}
    config = typed("filters.http.sse_to_metadata.v3.SseToMetadata", response_rules=response)
    return {"name": "envoy.filters.http.sse_to_metadata", "typed_config": config}


def _present(key: str) -> Json:
    return {"metadata_namespace": "usage", "key": key, "type": "NUMBER"}


def _launch(instead: Callable[[Json], list[Json]], place: Place) -> Launch:
    """Launch an Envoy with a picker whose filter of counts is another one."""
    printed = targets.printed_envoy

    def changed(*arguments: Any) -> dict[str, Any]:
        whole = printed(*arguments)
        manager = whole["static_resources"]["listeners"][0]["filter_chains"][0]["filters"][0]["typed_config"]
        filters = manager["http_filters"]
        (script,) = [each for each in filters if each["name"] == _SCRIPT]
        manager["http_filters"] = [each for each in filters[:-1] if each is not script] + instead(script) + filters[-1:]
        return whole

    with patch.object(targets, "printed_envoy", changed):
        return targets.picker()(place)
