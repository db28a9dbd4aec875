"""Time of one routing decision: `Router.submit` for a 24k-token prompt, with and without reading and hashing it.

Budgets: at 64 replicas p99 under 100 us without the fingerprint and under 1 ms with it, flat in
the size of the index. Every request is new behind a prefix that one replica in four has cached; its own time alone is
measured, its finish is not. Garbage collection stays on, as in the proxy.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import islice, product

import numpy as np

from gorgo.core.fleet.replica import ReplicaSpec
from gorgo.core.latency.ttft import TcpWindows
from gorgo.core.limits import RouterLimits
from gorgo.core.messages.actions import Dispatch
from gorgo.core.messages.request import AttemptResult, OpenConnection, Outcome, RouteRequest
from gorgo.core.prompt.fingerprint import Fingerprinter
from gorgo.core.prompt.parse import read_prompt
from gorgo.core.router import Router
from gorgo.policies.registry import make_policy

REPLICAS = (3, 64, 512)
INDEXED_BLOCKS = (0, 1_000_000)
POLICIES = ("gorgo", "gorgo-ms")
REQUESTS = 2000
#: Rows are measured in turn, so that what else the machine does meets all of them.
ROUNDS = 10
BLOCK_TOKENS = 64
PROMPT_TOKENS = 24_000
PROMPT_BLOCKS = PROMPT_TOKENS // BLOCK_TOKENS
BODY_BYTES = 4 * PROMPT_TOKENS
#: Blocks of a prompt that others have asked before, and the turns at whose ends they went on in another way: a
#: decision walks one tree node per turn (30 is the mean of a conversation in the GORGO paper's trace).
SHARED_BLOCKS = 300
TURNS = 30
KEY = 1
COMPLETED = Outcome(AttemptResult.COMPLETED, 200)


def run() -> None:
    """Print p50 and p99 of the wall time and p99 of the processor's, us, by size of fleet and index, in turn."""
    print(f"Router.submit, {PROMPT_TOKENS:,} tokens ({PROMPT_BLOCKS} blocks), us; {REQUESTS:,} requests a row")
    print(
        f"{'policy':<8}  {'replicas':>8}  {'indexed blocks':>14}  {'fingerprint':>11}  {'p50':>8}  {'p99':>8}"
        f"  {'p99, of CPU':>11}"
    )
    rows = list(_rows())
    for _ in range(ROUNDS):
        for row in rows:
            row.measure(REQUESTS // ROUNDS)
    for row in rows:
        p50, p99, processor = row.percentiles()
        indexed = f"{row.router.index.stored_blocks:,}" if row.blocks else "0 at start"
        print(
            f"{row.policy:<8}  {row.replicas:>8}  {indexed:>14}  {row.label:>11}  {p50:>8.1f}  {p99:>8.1f}"
            f"  {processor:>11.1f}"
        )


Ask = Callable[[], RouteRequest]


def filled_router(policy: str, replicas: int, blocks: int) -> Router:
    specs = [ReplicaSpec(f"replica-{number}", f"region-{number % 8}") for number in range(replicas)]
    # Twice the blocks wanted, so that nothing is evicted while it is measured what a full index costs.
    limits = RouterLimits(max_index_blocks=max(4_000_000, 2 * blocks))
    router = Router(specs, make_policy(policy), rng=np.random.default_rng(0), boot_id="bench", limits=limits)
    for number, spec in enumerate(specs):
        router.replicas.on_probe(spec.name, 0.002 * (1 + number % 90), now=0.0)
        # Two in three have an idle connection: what a body takes on it is part of the cost in milliseconds.
        router.replicas.on_connection(spec.name, OpenConnection(TcpWindows(), 0.0) if number % 3 else None, now=0.0)
    rng = np.random.default_rng(1)
    shared = _shared_blocks()
    while router.index.stored_blocks < blocks:
        depth = int(rng.integers(TURNS)) * (SHARED_BLOCKS // TURNS)
        prompt = shared[: depth * 8] + rng.bytes((PROMPT_BLOCKS - depth) * 8)
        router.index.confirm(prompt, int(rng.integers(replicas)))
    for slot in range(0, replicas, 4):
        router.index.confirm(shared, slot)
    return router


def _chat(number: int) -> dict[str, object]:
    """A chat of `PROMPT_TOKENS` whose first `SHARED_BLOCKS` are the same in all."""
    history = "shared history, turn by turn. ".ljust(256, ".") * SHARED_BLOCKS
    question = f"question {number} ".ljust(PROMPT_TOKENS * 4 - len(history), "x")
    return {"messages": [{"role": "user", "content": history}, {"role": "user", "content": question}]}


def _shared_blocks() -> bytes:
    prompt = read_prompt("/v1/chat/completions", _chat(0))
    return Fingerprinter(key=KEY)(prompt).blocks[: SHARED_BLOCKS * 8]


def hashed_requests() -> Iterator[Ask]:
    """Requests whose fingerprint is known."""
    rng = np.random.default_rng(3)
    shared = _shared_blocks()
    for number in range(REQUESTS):
        blocks = shared + rng.bytes((PROMPT_BLOCKS - SHARED_BLOCKS) * 8)
        yield partial(
            RouteRequest, f"hashed-{number}", 0.0, PROMPT_TOKENS, blocks, BLOCK_TOKENS, number, body_bytes=BODY_BYTES
        )


def _read_requests() -> Iterator[Ask]:
    """Requests as parsed chat bodies: reading the prompt and its fingerprint are part of what is measured."""
    fingerprinter = Fingerprinter(key=KEY)
    for number in range(REQUESTS):
        yield partial(_read, _chat(number), number, fingerprinter)


def _read(body: object, number: int, fingerprinter: Fingerprinter) -> RouteRequest:
    prompt = read_prompt("/v1/chat/completions", body)
    found = fingerprinter(prompt)
    return RouteRequest(
        f"read-{number}", 0.0, PROMPT_TOKENS, found.blocks, BLOCK_TOKENS, found.prefix_hash, body_bytes=BODY_BYTES
    )


@dataclass
class Row:
    """A Router of one size, its requests, and the time of each `submit` in ns; 32 requests stay in flight."""

    policy: str
    replicas: int
    blocks: int
    label: str
    router: Router
    requests: Iterator[Ask]
    spent_ns: list[int] = field(default_factory=list)
    #: Of this thread: without the time that a busy machine gives to others.
    processor_ns: list[int] = field(default_factory=list)
    open_attempts: deque[str] = field(default_factory=deque)

    def measure(self, count: int) -> None:
        """Submit the next requests; the first tenth of them is warm-up."""
        for number, ask in enumerate(islice(self.requests, count)):
            start, processor_start = time.perf_counter_ns(), time.thread_time_ns()
            action, _ = self.router.submit(ask(), now=0.0)
            processor_ns, spent_ns = time.thread_time_ns() - processor_start, time.perf_counter_ns() - start
            assert isinstance(action, Dispatch)
            if number >= count // 10:
                self.spent_ns.append(spent_ns)
                self.processor_ns.append(processor_ns)
            self.open_attempts.append(action.attempt_id)
            if len(self.open_attempts) > 32:
                self.router.on_finish(self.open_attempts.popleft(), COMPLETED, now=0.0)

    def percentiles(self) -> tuple[float, float, float]:
        """Return p50 and p99 of the wall time, and p99 of the processor's, us."""
        p50, p99 = np.percentile(self.spent_ns, [50, 99]) / 1e3
        return float(p50), float(p99), float(np.percentile(self.processor_ns, 99) / 1e3)


def _rows() -> Iterator[Row]:
    for policy, replicas, blocks in product(POLICIES, REPLICAS, INDEXED_BLOCKS):
        router = filled_router(policy, replicas, blocks)
        yield Row(policy, replicas, blocks, "without", router, hashed_requests())
        yield Row(policy, replicas, blocks, "with", router, _read_requests())
