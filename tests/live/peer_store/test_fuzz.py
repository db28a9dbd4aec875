"""Random and mutated reports from a store: nothing ends, and no replica looks less loaded than by the own counts."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from redis.asyncio import Redis

from gorgo.core.latency.prefill import shares_of_columns
from gorgo.core.peers.codec import decode_report, encode_report
from gorgo.core.peers.records import (
    LearnedSpeed,
    PeerReport,
    PeerStatus,
    PrefixMarks,
    ReplicaLoad,
    SharedAnswer,
    SharedCacheReport,
    StartedPrefill,
)
from gorgo.core.router import Router
from gorgo.errors import BadReport, OtherFormat
from gorgo.live.peer_store.connection import StoreNames
from gorgo.live.peer_store.streams import ReportReader
from gorgo.live.telemetry.counters import PeerCounts
from gorgo.policies.registry import make_policy
from tests import fuzz
from tests.core.routers import PROMPT, a_request, dispatched, submitted, timed

PEER = "eu-2/run1"
NAMES = StoreNames("g", b"key")
REPORT = PeerReport(
    PEER,
    3,
    "key",
    loads=(ReplicaLoad("a", 3, 3000, 2, 2000, 1500, 1.25, 0.5), ReplicaLoad("b", 1, 10)),
    prefixes=(PrefixMarks("a", "m", (1, 2), PROMPT[:16]), PrefixMarks("b", None, (), PROMPT[8:24], "evicted")),
    cache_reports=(SharedCacheReport("a", None, 512.0, 100.0),),
    answers=(SharedAnswer("a", PROMPT[:8], 256, 128),),
    prefills=(StartedPrefill("a", 1.5), StartedPrefill("b", 0.25)),
    speeds=(LearnedSpeed("a", 3.5, 2.0),),
    status=PeerStatus("gorgo-ms", 4, True, "12", ("b",), ("a",)),
)
TEXT = encode_report(REPORT)
#: Values at the bounds and beyond, mostly of the kind that was there.
NUMBERS = [0, 1, 5, 500, 86_400, 2**40, -1, 2**41, 2**70, -0.5, 0.5, 1e5, 1e300]
TEXTS = ["", "a", "b", "\x00", "Q59fIKyru84=", "eu-3"]
OTHERS: list[Any] = [None, True, False, [], {}, [[[]]], "Infinity", 0]
#: Columns that a peer may only add to.
ADDED = (
    *("in_flight_requests", "in_flight_tokens", "queued_prefill_tokens", "decoding_requests"),
    *("drained_at_s", "head_due_s", "waiting_prefill_s"),
)


@dataclass
class ListedEntries:
    """A store with these entries in the stream of one peer, and nothing else."""

    entries: list[tuple[bytes, dict[bytes, bytes]]] = field(default_factory=list)
    members: list[bytes] = field(default_factory=lambda: [NAMES.listed(PEER).encode()])

    def pipeline(self, *, transaction: bool) -> ListedEntries:
        return self

    def time(self) -> None: ...

    def zrevrangebyscore(self, *words: Any, **more: Any) -> None: ...

    async def execute(self, *, raise_on_error: bool) -> list[Any]:
        return [(1_700_000_000, 0), self.members]

    async def xread(self, streams: Mapping[str, str], **more: Any) -> list[Any]:
        taken, self.entries = self.entries, []
        return [[next(iter(streams)).encode(), taken]] if taken else []


def mutated(rng: random.Random) -> bytes:
    """A report with some bytes changed, or with some values replaced by others."""
    if rng.random() < 0.3:
        text = bytearray(TEXT)
        for _ in range(rng.randint(1, 6)):
            place = rng.randrange(len(text))
            text[place : place + rng.randint(0, 3)] = rng.randbytes(rng.randint(0, 3))
        return bytes(text)
    fields = json.loads(TEXT)
    fields[2] = rng.randrange(2**40)
    for _ in range(rng.randint(1, 4)):
        inner: Any = fields
        while isinstance(inner, list) and inner:
            place = rng.randrange(len(inner))
            if not isinstance(inner[place], list) or rng.random() < 0.02:
                kind = OTHERS if rng.random() < 0.1 else NUMBERS if isinstance(inner[place], int | float) else TEXTS
                inner[place] = deepcopy(rng.choice(kind))  # a list of its own, which a later change may enter
                break
            inner = inner[place]
    return json.dumps(fields).encode()


def loaded_router() -> Router:
    """A router among peers, with own load on one of two replicas."""
    router = Router([timed("a"), timed("b")], make_policy("gorgo-ms"), rng=np.random.default_rng(0), boot_id="run")
    for name in ("a", "b"):
        router.replicas.on_probe(name, 0.01, now=0.0)
    router.peers.join("eu-1/run1", key_id="key")
    for number in range(3):
        action = submitted(router, a_request(f"r{number}", prompt_tokens=2000, pinned_replica="a"), now=0.0)
        attempt_id = dispatched(action).attempt_id
        if number == 0:
            router.on_first_token(attempt_id, now=2.0)
    return router


async def apply(router: Router, entries: list[bytes], counts: PeerCounts) -> None:
    def apply_report(report: PeerReport, age_s: float) -> None:
        router.peers.on_report(report, now=2.0, age_s=age_s)

    client = ListedEntries(
        [(b"1700000000000-%d" % at, {b"report": NAMES.sealed(PEER, text)}) for at, text in enumerate(entries, 1)]
    )
    reader = ReportReader(
        cast("Redis", client),
        NAMES,
        "eu-1/run1",
        counts,
        lambda: 2.0,
        apply_report,
    )
    await reader.read()


def assert_no_less_loaded(router: Router) -> None:
    exchange = router.peers.exchange
    assert exchange is not None
    router.check()
    exchange.check()
    own, added = exchange.loads.columns, exchange.loads.added_to_own(now=2.0)
    for name in ADDED:
        before, after = getattr(own, name), getattr(added, name)
        assert np.all((after >= before) | np.isnan(before)), name
    shares, alone = (
        shares_of_columns(each.prefill_share, each.prefill_share_s, 2.0)
        for each in (own, loaded_router().peers.exchange.loads.columns)  # type: ignore[union-attr]
    )
    assert np.all(shares >= alone), "peers only add prefills"
    assert own.in_flight_requests[0] == 3.0


@pytest.mark.parametrize("seed", range(20))
async def test_mutated_reports_end_nothing_and_make_no_replica_look_idle(seed: int) -> None:
    rng = random.Random(seed)
    router, counts = loaded_router(), PeerCounts()
    for _ in range(6):
        await apply(router, [mutated(rng) for _ in range(10)], counts)
        assert_no_less_loaded(router)
    reports = counts.reports
    assert reports["malformed"] > 0
    assert reports["read"] > 0
    assert sum(reports[name] for name in ("malformed", "foreign", "other_format", "read")) == 60
    # It still routes, and where it would.
    dispatched(submitted(router, a_request("after"), now=2.0))


def test_cases_of_chance_of_entries_and_members_delay_nothing_and_only_the_group_s_are_parsed() -> None:
    rng, good = random.Random(4), NAMES.sealed(PEER, TEXT)
    listed, sound, forged = NAMES.listed(PEER).encode(), 0, 0

    def damaged(text: bytes) -> bytes:
        changed = bytearray(text)
        for _ in range(rng.randint(1, 4)):
            place = rng.randrange(len(changed))
            changed[place : place + rng.randint(0, 3)] = rng.randbytes(rng.randint(0, 3))
        return bytes(changed)

    def case() -> None:
        nonlocal sound, forged
        entry, name = damaged(good), damaged(listed)
        assert NAMES.opened(PEER, entry) is None or entry == good
        assert NAMES.opened("eu-3/run1", good) is None
        assert NAMES.read_listed(name) is None or name == listed
        forged += entry != good
        text = NAMES.opened(PEER, NAMES.sealed(PEER, mutated(rng)))
        assert text is not None
        try:
            report = decode_report(text)
        except (BadReport, OtherFormat):
            return
        sound += 1
        assert decode_report(encode_report(report)).router == report.router

    for _ in range(fuzz.CASES):
        fuzz.timed(case)
    assert forged > fuzz.CASES * 0.8
    assert sound > fuzz.CASES // 20


@settings(max_examples=60, deadline=None)
@given(st.lists(st.binary(max_size=200), max_size=8), st.lists(st.binary(max_size=300), max_size=3))
async def test_random_bytes_as_reports_and_as_members_end_nothing(entries: list[bytes], members: list[bytes]) -> None:
    router, counts = loaded_router(), PeerCounts()
    await apply(router, entries, counts)
    assert_no_less_loaded(router)
    assert counts.reports["read"] == 0
    client = ListedEntries(members=members)
    reader = ReportReader(cast("Redis", client), NAMES, "eu-1/run1", counts, lambda: 2.0, lambda *_: None)
    reader.caught_up.set()
    await reader._find_members()


async def test_a_peer_that_claims_speed_is_bounded_and_load_cannot_be_taken_back_below_none() -> None:
    router, counts = loaded_router(), PeerCounts()
    fast = PeerReport(PEER, 1, "key", loads=(ReplicaLoad("a", 5),), speeds=(LearnedSpeed("a", 0.0, 86_400.0),))
    await apply(router, [encode_report(fast), encode_report(PeerReport(PEER, 2, "key"))], counts)
    assert_no_less_loaded(router)
    (a, _) = router.view.snapshots(now=2.0)
    assert a.prefill_slowdown >= 0.1
