"""What sharing costs a Router, in processor time and in calls of functions for one request.

Three Routers in one process take requests in turn: one alone, and two workers that read each other's reports. So
whatever else the machine does meets all of them. Each has sixteen requests open, so that a worker decides beside the
load of the other one. Printed are the sums of submit, first token and end without the rest of a request, and what a
report costs each of both sides for a prompt, with one prompt or eight in a report: medians over the second half of the
requests, after the caches have filled. Calls are the same on any machine, busy or not.
"""

from __future__ import annotations

import json
import sys
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from statistics import median
from time import thread_time_ns

import msgspec
import numpy as np

from gorgo.core.fleet.replica import ReplicaSpec
from gorgo.core.latency.ttft import TcpWindows
from gorgo.core.limits import RouterLimits
from gorgo.core.messages.actions import Dispatch
from gorgo.core.messages.request import AttemptResult, OpenConnection, Outcome, RouteRequest
from gorgo.core.peers.records import PeerReport
from gorgo.core.prompt.fingerprint import Fingerprinter
from gorgo.core.prompt.parse import read_prompt
from gorgo.core.router import Router
from gorgo.policies.registry import make_policy
from tests.bench.relay.wire import request

REQUESTS, CALLED = 2000, 200
_REPLICAS, _KV_TOKENS = 3, 983_549
_BLOCK_TOKENS, _BYTES_PER_TOKEN = 64.0, 4
_VARIANTS = 16
_OPEN = 16
_STEP_S = 0.001
_ENCODE = msgspec.msgpack.Encoder().encode
_DECODE = msgspec.msgpack.Decoder(PeerReport).decode


@dataclass
class Times:
    """Nanoseconds of the processor, or calls: of each request alone and in a group, and of each report."""

    alone: list[int] = field(default_factory=list)
    shared: list[int] = field(default_factory=list)
    written: list[int] = field(default_factory=list)
    read: list[int] = field(default_factory=list)


def prompts(size: int, count: int) -> Iterator[RouteRequest]:
    """Yield requests of `size` bytes: chats of which each differs from one of sixteen in its last message."""
    fingerprint, variants = Fingerprinter(key=1), []
    for variant in range(_VARIANTS):
        before, after = request(size, variant=variant, tokens=128, gap_ms=0, stream=False)
        variants.append((before.partition(b"\r\n\r\n")[2], after))
    for number in range(count):
        before, after = variants[number % _VARIANTS]
        body = json.loads(b"%s%08d%s" % (before, number, after))
        prompt = read_prompt("/v1/chat/completions", body)
        found = fingerprint(prompt)
        ends = [start // _BYTES_PER_TOKEN for start, _ in prompt.message_starts[1:]] + [size // _BYTES_PER_TOKEN]
        yield RouteRequest(
            f"r{number}",
            0.0,
            size // _BYTES_PER_TOKEN,
            found.blocks,
            _BLOCK_TOKENS,
            found.prefix_hash,
            model="bench",
            body_bytes=size,
            boundaries=ends,
        )


def calls(size: int, requests: int, per_report: int) -> Times:
    """Return the calls of functions, those in C too, of what `measure` times."""
    count = 0

    def note(_frame: object, event: str, _argument: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(note)
    try:
        return measure(size, requests, per_report, clock=lambda: count)
    finally:
        sys.setprofile(None)


def measure(size: int, requests: int, per_report: int, clock: Callable[[], int] = thread_time_ns) -> Times:
    """Return the times of requests of `size` bytes, with a report after each `per_report` of them."""
    alone, one, other = _router("alone"), _router("worker-0"), _router("worker-1")
    for router in (one, other):
        router.peers.join(router.boot_id, key_id="key")
    each_open = [(router, deque[tuple[str, RouteRequest]]()) for router in (alone, one, other)]
    times, now = Times(), 1.0
    spent_by = (times.alone, times.shared, list[int]())
    for number, each in enumerate(prompts(size, 2 * requests)):
        now += _STEP_S
        # Of the two workers each has every other request, and the one alone has those of the first.
        for place in (2,) if number % 2 else (0, 1):
            router, opened = each_open[place]
            spent_by[place].append(_serve(router, opened, each, now, clock))
        if number % (2 * per_report) == 2 * per_report - 1:
            for writer, reader in ((other, one), (one, other)):
                begun_ns = clock()
                text = _ENCODE(writer.peers.report(now=now))
                written_ns = clock()
                reader.peers.on_report(_DECODE(text), now=now)
                times.read.append((clock() - written_ns) // per_report)
                times.written.append((written_ns - begun_ns) // per_report)
    return times


def _router(name: str) -> Router:
    specs = [ReplicaSpec(f"replica-{number}", "here", kv_capacity_tokens=_KV_TOKENS) for number in range(_REPLICAS)]
    rng = np.random.default_rng(0)
    router = Router(specs, make_policy("gorgo-ms"), rng=rng, boot_id=name, limits=RouterLimits())
    for spec in specs:
        router.replicas.on_probe(spec.name, 0.001, now=0.0)
        router.replicas.on_connection(spec.name, OpenConnection(TcpWindows(), 0.0), now=0.0)
    return router


def _serve(
    router: Router, opened: deque[tuple[str, RouteRequest]], each: RouteRequest, now: float, clock: Callable[[], int]
) -> int:
    """Return the time of one request's submit, and of the first token and end of one that came before it."""
    begun_ns = clock()
    action, _ = router.submit(each, now=now)
    spent_ns = clock() - begun_ns
    assert isinstance(action, Dispatch), "a replica has room"
    opened.append((action.attempt_id, each))
    if len(opened) <= _OPEN:
        return spent_ns
    attempt_id, before = opened.popleft()
    tokens = before.prompt_tokens
    outcome = Outcome(
        AttemptResult.COMPLETED, 200, prompt_tokens=tokens, cached_tokens=max(0, tokens - 64), output_tokens=8
    )
    begun_ns = clock()
    router.on_first_token(attempt_id, now=now + _STEP_S / 2)
    router.on_finish(attempt_id, outcome, now=now + 0.8 * _STEP_S)
    return spent_ns + clock() - begun_ns


def _middle(spent: list[int]) -> float:
    return median(spent[len(spent) // 2 :])


def run() -> None:
    """Print a row for each size of prompt and of report; the ratio is that of all of it to a Router alone."""
    for unit, take, requests, scale in (("calls", calls, CALLED, 1.0), ("us", measure, REQUESTS, 1e3)):
        print(f"{'prompt':<8}{'a report':>9}{'alone':>8}{'shared':>8}{'written':>9}{'read':>7}{'ratio':>7}   {unit}")
        for size in (500, 90_000):
            for per_report in (1, 8):
                times = take(size, requests, per_report)
                spent = (_middle(each) / scale for each in (times.alone, times.shared, times.written, times.read))
                alone, shared, written, read = spent
                ratio = (shared + written + read) / alone
                print(f"{size:<8}{per_report:>9}{alone:>8.0f}{shared:>8.0f}{written:>9.0f}{read:>7.0f}{ratio:>7.2f}")
