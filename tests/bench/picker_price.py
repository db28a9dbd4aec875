"""What a request costs behind Envoy, and what of it no picker in Python could save.

Processor time of a request and requests a second of one core, for answers of several lengths: a plain Envoy, the same
with the picker, and with a picker that decides nothing; the last two also without access log, first tokens and counts.
Interleaved rounds; Envoy and picker have core 1, engine and load core 0. Two minutes.
"""

from __future__ import annotations

from collections.abc import Mapping
from statistics import median
from typing import Any

from tests.bench.behind_envoy import targets
from tests.bench.relay import bench, scenarios
from tests.bench.relay.report import aligned
from tests.bench.relay.scenarios import SMALL, Scenario

ROUNDS = 5
LAUNCHES = {
    targets.PLAIN: targets.plain,
    "picker": targets.picker(),
    "constant picker": targets.picker(constant=True),
    "picker, decision alone": targets.picker(decision_alone=True),
    "constant, decision alone": targets.picker(constant=True, decision_alone=True),
}
#: Tokens of an answer; the first one comes in one piece, the others as streams.
WHOLE, STREAMS = 128, (16, 64)


def run() -> None:
    """Print medians of the rounds."""
    jobs = [("in one piece", _job(WHOLE, stream=False))] + [(f"{n} tokens", _job(n, stream=True)) for n in STREAMS]
    found: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    with bench.running(LAUNCHES) as (relays, load):
        for number in range(ROUNDS):
            for answer, job in jobs:
                for relay in relays if number % 2 == 0 else relays[::-1]:
                    if relay.process is not None:
                        figures = load(relay, Scenario(name=answer, job=job))
                        found.setdefault((answer, relay.name), []).append(figures)
    lines = [["answer", "", "CPU, us", "Envoy", "picker", "of plain", "requests/s of one core"]]
    for (answer, name), rounds in found.items():
        plain = found[answer, targets.PLAIN]
        envoy_us, all_us = _us(rounds, "first_cpu_s"), _us(rounds, "cpu_s")
        of_plain = median(a / b for a, b in zip(all_us, _us(plain, "cpu_s"), strict=True))
        picker_us = median(a - b for a, b in zip(all_us, envoy_us, strict=True))
        cells = [f"{median(all_us):.0f}", f"{median(envoy_us):.0f}", f"{picker_us:.0f}", f"{of_plain:.2f}"]
        lines.append([answer, name, *cells, f"{1e6 / median(all_us):,.0f}"])
        bad = sum(figures["bad"] for figures in rounds)
        if bad:
            print(f"{answer}, {name}: {bad} bad ({rounds[0]['problem']})")
    print(aligned(lines))


def _job(tokens: int, *, stream: bool) -> Mapping[str, Any]:
    job = {"kind": "closed", "seconds": 0.6, "size": SMALL, "tokens": tokens, "stream": stream}
    return {**job, "connections": scenarios.STREAMS if stream else 16, "gap_ms": 10 if stream else 0}


def _us(rounds: list[Mapping[str, Any]], key: str) -> list[float]:
    return [figures[key] / max(1, figures["requests"]) * 1e6 for figures in rounds]
