"""Time and memory of a routing decision in fleets of 512 to 10,000 replicas, and what events of such a fleet take.

Target: p99 under 2 ms at 10,000. Time is that of the processor for this thread, because the columns of a large fleet
leave the caches and another process is soon charged for it. Each size is measured with all candidates compared and with
a sample (`limits.sampled_replicas`). Retained decisions have a cell per candidate and term.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

import numpy as np

from gorgo.core.fleet.replica import ReplicaSpec
from gorgo.core.latency.ttft import TcpWindows
from gorgo.core.limits import RouterLimits
from gorgo.core.messages.actions import Dispatch
from gorgo.core.messages.request import AttemptResult, EngineSample, OpenConnection, Outcome
from gorgo.core.router import Router
from gorgo.policies.registry import make_policy
from tests.bench.router_submit import BLOCK_TOKENS, hashed_requests

REPLICAS = (512, 1_000, 10_000)
POLICIES = ("gorgo", "gorgo-ms", "least-load", "least-request")
#: More than any fleet here, so that all are compared; and the default.
SAMPLES = (1_000_000, RouterLimits().sampled_replicas)
REQUESTS, WARM, IN_FLIGHT = 1_000, 100, 32
EVENTS = 50
COMPLETED = Outcome(AttemptResult.COMPLETED, 200)


def run() -> None:
    """Print a row per policy and size, and one of events per size."""
    print(
        f"Router.submit, 24,000 tokens, one in four replicas has most of them; us of CPU, {REQUESTS:,} requests a cell"
    )
    print(f"{'policy':<13}  {'replicas':>8}  {'compared':>8}  {'p50':>6}  {'p99':>6}  {'kB a decision':>13}")
    for replicas in REPLICAS:
        for policy in POLICIES:
            router = large_router(policy, replicas)
            for sample in SAMPLES:
                router.settings.set_limits(RouterLimits(sampled_replicas=sample), now=0.0)
                compared, spent_us, size = measure(router)
                p50, p99 = np.percentile(spent_us, [50, 99])
                print(f"{policy:<13}  {replicas:>8,}  {compared:>8,}  {p50:>6.0f}  {p99:>6.0f}  {size / 1e3:>13.0f}")
        print_events(replicas)


def large_router(policy: str, replicas: int) -> Router:
    """Return a Router whose replicas have all been probed and scraped; each fourth has the prompts' shared part."""
    names = [f"replica-{number}" for number in range(replicas)]
    specs = [ReplicaSpec(name, f"region-{number % 8}") for number, name in enumerate(names)]
    router = Router(specs, make_policy(policy), rng=np.random.default_rng(0), boot_id="bench")
    shared = next(hashed_requests())().blocks[: 300 * 8]
    for number, name in enumerate(names):
        router.replicas.on_probe(name, 0.002 * (1 + number % 90), now=0.0)
        router.replicas.on_connection(name, OpenConnection(TcpWindows(), 0.0) if number % 3 else None, now=0.0)
        router.replicas.on_engine_sample(name, a_sample(number), now=0.0)
    for slot in range(0, replicas, 4):
        router.index.confirm(shared, slot)
    assert router.index.match(shared, replicas, block_tokens=BLOCK_TOKENS)[0] == 300 * BLOCK_TOKENS
    return router


def a_sample(number: int) -> EngineSample:
    return EngineSample(
        running_requests=number % 7,
        queued_requests=0.0,
        used_tokens=1000.0 * (number % 11),
        kv_capacity_tokens=500_000,
        prefill_tokens_total=0.0,
    )


def measure(router: Router) -> tuple[int, list[float], int]:
    """Return the candidates of the last decision, the CPU of each submission in us, and the bytes of its columns."""
    spent_us: list[float] = []
    unfinished: deque[str] = deque()
    for number, ask in zip(range(REQUESTS), hashed_requests(), strict=False):
        request = ask()
        start_ns = time.thread_time_ns()
        action, _ = router.submit(request, now=0.0)
        if number >= WARM:
            spent_us.append((time.thread_time_ns() - start_ns) / 1e3)
        assert isinstance(action, Dispatch)
        unfinished.append(action.attempt_id)
        if len(unfinished) > IN_FLIGHT:
            router.on_finish(unfinished.popleft(), COMPLETED, now=0.0)
    for attempt_id in unfinished:
        router.on_finish(attempt_id, COMPLETED, now=0.0)
    (decision,) = router.view.newest_decisions(1)
    columns = [*decision.terms.values(), *([] if decision.cost is None else [decision.cost])]
    return len(decision.candidates), spent_us, sum(column.nbytes for column in columns)


def print_events(replicas: int) -> None:
    """Print the CPU of events that concern one replica, each with the next timer, in us."""
    router = large_router("gorgo-ms", replicas)
    names = iter([f"replica-{number}" for number in range(3 * EVENTS)])
    requests = hashed_requests()

    def probe() -> None:
        router.replicas.on_probe(next(names), 0.01, now=1.0)

    def scrape() -> None:
        router.replicas.on_engine_sample(next(names), a_sample(1), now=1.0)

    def drain_and_submit() -> None:
        router.replicas.drain(next(names), now=1.0)
        action, _ = router.submit(next(requests)(), now=1.0)
        assert isinstance(action, Dispatch)

    each = {"probe": probe, "scrape": scrape, "drain, then a decision": drain_and_submit}
    found = ", ".join(f"{name} {median_us(router, event):,.0f}" for name, event in each.items())
    print(f"events of one replica of {replicas:,}, us of CPU, p50: {found}")


def median_us(router: Router, event: Callable[[], None]) -> float:
    spent: list[float] = []
    for _ in range(EVENTS):
        start_ns = time.thread_time_ns()
        event()
        router.next_timer()
        spent.append((time.thread_time_ns() - start_ns) / 1e3)
    return float(np.median(spent))
