"""Seeded states of a fleet, for both sides: what the authors' package is called with, and this project's candidates."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from gorgo.core.policy.interface import Candidates
from tests.policies.table import table

#: Prompts that begin with so many tokens are on some replicas; few lengths, so that matches tie.
MATCHES = (0, 0, 512, 1024, 4096)


@dataclass(frozen=True, slots=True)
class State:
    """One request before one fleet. `None` in `running`: no metrics of that replica; in `rtt_s`: no probe."""

    names: list[str]
    running: list[int | None]
    queued: list[int]
    used: list[int]
    rtt_s: list[float | None]
    in_flight_requests: list[int]
    in_flight_tokens: list[int]
    cached: list[int]
    prompt_tokens: int
    w_rtt: float
    w_queue: float

    def case(self, policy: str, *, session: str | None = None, token_ids: list[int] | None = None) -> dict[str, Any]:
        """Return the call of the authors' package."""
        reports = {
            name: {"running": running, "queued": queued, "used": used, "latency_s": 0.5, "rtt_s": rtt_s or 0.0}
            for name, running, queued, used, rtt_s in zip(
                self.names, self.running, self.queued, self.used, self.rtt_s, strict=True
            )
            if running is not None
        }
        weights = {"rtt_weight": self.w_rtt, "queue_weight": self.w_queue, "load_weight": self.w_queue}
        return {
            "policy": policy,
            "urls": self.names,
            "reports": reports,
            "in_flight_tokens": dict(zip(self.names, self.in_flight_tokens, strict=True)),
            "in_flight_requests": dict(zip(self.names, self.in_flight_requests, strict=True)),
            "cached": dict(zip(self.names, self.cached, strict=True)),
            "token_ids": [1] * min(self.prompt_tokens, 1) if token_ids is None else token_ids,
            "prompt_tokens": self.prompt_tokens,
            "weights": weights,
            "session": session,
        }

    def candidates(self) -> Candidates:
        """Return the table that a policy of this project sees."""
        known = [running is not None for running in self.running]

        def reported(values: list[Any]) -> list[float]:
            return [float(value) if here else np.nan for value, here in zip(values, known, strict=True)]

        return table(
            len(self.names),
            names=self.names,
            cached=[float(tokens) for tokens in self.cached],
            prompt_tokens=self.prompt_tokens,
            running_requests=reported(self.running),
            queued_requests=reported(self.queued),
            used_tokens=reported(self.used),
            rtt_s=[np.nan if rtt_s is None else rtt_s for rtt_s in self.rtt_s],
            in_flight_requests=self.in_flight_requests,
            in_flight_tokens=self.in_flight_tokens,
        )


def states(count: int, *, seed: int) -> list[State]:
    """Return states from idle to crowded; every fourth lacks a report or a probe, some have an empty prompt."""
    rng = np.random.default_rng(seed)
    return [_state(rng) for _ in range(count)]


def _state(rng: np.random.Generator) -> State:
    rows = int(rng.integers(1, 9))
    crowd = int(rng.choice([1, 3, 12, 64]))

    def numbers(most: int, *, step: int = 1) -> list[int]:
        values = rng.integers(0, most, rows) * step
        return [int(value) for value in (np.full(rows, values[0]) if rng.random() < 0.2 else values)]

    in_flight = numbers(crowd)
    prompt_tokens = 0 if rng.random() < 0.05 else int(rng.integers(1, 8000))
    running: list[int | None] = list(numbers(crowd))
    rtt_s: list[float | None] = [float(value) for value in rng.choice([0.002, 0.095, 0.18], rows)]
    if rng.random() < 0.25:
        running[int(rng.integers(rows))] = None
    if rng.random() < 0.1:
        rtt_s[int(rng.integers(rows))] = None
    return State(
        names=[f"r{row}" for row in range(rows)],
        running=running,
        queued=numbers(4),
        used=numbers(crowd, step=700),
        rtt_s=rtt_s,
        in_flight_requests=in_flight,
        in_flight_tokens=[requests * int(rng.integers(1, 9)) * 500 for requests in in_flight],
        cached=[min(int(tokens), prompt_tokens) for tokens in rng.choice(MATCHES, rows)],
        prompt_tokens=prompt_tokens,
        w_rtt=float(rng.choice([0.5, 0.276, 2.0])),
        w_queue=float(rng.choice([0.1, 0.5, 0.05])),
    )
