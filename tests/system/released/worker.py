"""The authors' package `gorgo-lb` behind a pipe: one JSON line per call, one per answer.

Run by the Python of its own environment, because its module has the name of this project's. It imports nothing of this
project. Where their code draws at random, the answer has everything that a draw could give.
"""

from __future__ import annotations

import json
import sys
from importlib import import_module
from itertools import permutations
from types import SimpleNamespace
from typing import Any

Case = dict[str, Any]


def policies(cases: list[Case]) -> list[Case]:
    """Every replica that a policy may choose, its fallback, and the scores where it has them."""
    return [_decided(case) for case in cases]


def tries(cases: list[list[list[Any]]]) -> list[list[dict[str, int]]]:
    """The matches of each list of operations."""
    return [_matches(operations) for operations in cases]


def searches(cases: list[Case]) -> list[list[Case]]:
    """The steps of each evolution strategy, with its draws."""
    return [_steps(case) for case in cases]


def campaigns(cases: list[Case]) -> list[list[Case]]:
    """The events of each online tuner."""
    return [_events(case) for case in cases]


def _decided(case: Case) -> Case:
    base = import_module("gorgo.policy.base")
    snapshots = {
        url: base.ReplicaSnapshot(
            num_running_reqs=row["running"],
            num_queue_reqs=row["queued"],
            num_used_tokens=row["used"],
            latency=row["latency_s"],
            network_rtt=row["rtt_s"],
        )
        for url, row in case["reports"].items()
    }
    context = base.RouteContext(
        replica_urls=case["urls"],
        metrics=snapshots,
        endpoints_queued_tokens=case["in_flight_tokens"],
        endpoints_queued_uncached_tokens={},
        endpoints_inflight_requests=case["in_flight_requests"],
        radix_trie=SimpleNamespace(cached_prefix_lengths=lambda _, urls: {url: case["cached"][url] for url in urls}),
        token_ids=case["token_ids"],
        request_tokens=case["prompt_tokens"],
        hyperparameters={"defaults": case["weights"], "per_target": {}},
        affinity_key=case["session"],
    )
    decide = base.get_policy(case["policy"]).fn
    draws = _Draws()
    for name in ("gorgo.policy.base", "gorgo.policy.lb_aibrix"):
        vars(import_module(name))["random"] = draws
    found, decision = set(), decide(context)
    if draws.pairs:
        found = {_with_pair(decide, context, draws, pair) for pair in permutations(draws.pairs, 2)}
    else:
        found = set(draws.choices or [decision.target])
    return {"targets": sorted(found), "fallback": decision.fallback_reason, "scores": decision.scores}


class _Draws:
    """In place of `random`: notes what it could choose from."""

    def __init__(self) -> None:
        self.choices: list[str] = []
        self.pairs: list[str] = []
        self.pair: tuple[str, ...] | None = None

    def choice(self, values: list[str]) -> str:
        self.choices = list(values)
        return values[0]

    def sample(self, values: list[str], count: int) -> list[str]:
        self.pairs = list(values)
        return list(self.pair or values[:count])


def _with_pair(decide: Any, context: Any, draws: _Draws, pair: tuple[str, ...]) -> str:
    draws.pair = pair
    return str(decide(context).target)


def _matches(operations: list[list[Any]]) -> list[dict[str, int]]:
    trie, found = import_module("gorgo.radix_trie").RadixTrie(), []
    for name, *values in operations:
        if name == "match":
            found.append(trie.cached_prefix_lengths(*values))
        else:
            getattr(trie, name)(*values)
    return found


def _steps(case: Case) -> list[Case]:
    ranges = {name: tuple(bounds) for name, bounds in case["ranges"].items()}
    search = import_module("gorgo.tuner").GaussianESTuner(case["start"], ranges, seed=case["seed"], **case["options"])
    search.report(search.propose(), case["scores"][0])
    draws, gauss = list[float](), search._rng.gauss

    def noted(mean: float, deviation: float) -> float:
        draws.append(gauss(mean, deviation))
        return draws[-1]

    search._rng.gauss = noted
    steps = []
    for score in case["scores"][1:]:
        candidate = search.propose()
        if candidate is None:
            break
        accepted = search.report(candidate, score)
        steps.append(
            {
                "draws": draws[-len(ranges) :],
                "candidate": candidate,
                "accepted": accepted,
                "sigma": search.sigma,
                "best": search.best_params,
            }
        )
    return steps


def _events(case: Case) -> list[Case]:
    events: list[Case] = []
    tuner = import_module("gorgo.tuner").OnlineTuner(
        window_size=case["window"], hop_size=case["hop"], on_event=events.append
    )
    fault = tuner.configure({"hyperparam_ranges": case["ranges"]}, active_policy="gorgo-2d")
    assert fault is None, fault
    samples: list[Case] = []
    store: Any = {"defaults": {}, "per_target": {}}
    for ttft_s in case["ttft_s"]:
        samples.append({"ttft_seconds": ttft_s, "total_seconds": ttft_s})
        store = tuner.on_sample(samples, store, policy="gorgo-2d") or store
    return [{name: event[name] for name in ("total_samples", "score", "accepted", "candidate")} for event in events]


CALLS: dict[str, Any] = {call.__name__: call for call in (policies, tries, searches, campaigns)}


def main() -> None:
    for line in sys.stdin:
        name, cases = json.loads(line)
        sys.stdout.write(json.dumps(CALLS[name](cases)) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
