"""Feeds for simulator tests: users who come back with all that was said, and a little more."""

from __future__ import annotations

import numpy as np

from gorgo.lab.sim.workload import SimRequest


def conversations(requests: int, *, every_s: float, seed: int = 0, users: int = 12) -> list[SimRequest]:
    rng = np.random.default_rng(seed)
    said = [b""] * users
    feed = []
    arrival_s = 0.0
    for index in range(requests):
        user = int(rng.integers(users))
        grown = said[user] + rng.bytes(8 * int(rng.integers(1, 9)))
        said[user] = grown if len(grown) <= 8 * 30 else grown[: 8 * 4]
        prompt_tokens = len(said[user]) // 8 * 512 + int(rng.integers(1, 512))
        feed.append(
            SimRequest(
                index=index,
                arrival_s=arrival_s,
                prompt_tokens=prompt_tokens,
                output_tokens=int(rng.integers(1, 120)),
                blocks=said[user],
                prefix_hash=user,
                session_id=f"user {user}",
                body_bytes=4 * prompt_tokens,
            )
        )
        arrival_s += float(rng.exponential(every_s))
    return feed
