"""Reports between routers of one group: their load per replica, the prefixes that engines confirmed, what they learned.

Owns the records and their bounds. `codec` has the wire form, `exchange` writes and applies them.

Theory of operation. A load is a whole state, so that a lost report changes nothing for longer than the next one takes.
Prefixes, cache reports, answers and started prefills are what happened since the previous report. No record has a time
of day: clocks of hosts differ, so the receiver counts ages from its own receipt.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from gorgo.core.record import record

#: Version of the records; another one is refused.
FORMAT = 2
#: Most replicas of one report: ten thousand, with as many again while a fleet is replaced.
MAX_REPLICAS = 20_000
#: Most prompts, cache reports, answers and marks of one prompt: some seconds of work at 100 ms between reports.
MAX_PREFIXES = 512
MAX_CACHE_REPORTS = 256
MAX_ANSWERS = 512
MAX_MARKS = 96
#: Bytes of a name: of a router, a replica, a model, a policy.
MAX_NAME_BYTES = 256
#: Most of one count: beyond it a sum of many reports would no longer be exact.
MAX_COUNT = 2**40
#: Most seconds of one sum: a day.
MAX_SECONDS = 86_400.0
#: Most seconds of prefills for one replica in one report: with more it is full in any case.
MAX_PREFILL_S = 60.0


#: What a report says of prefixes.
MarkKind = Literal["confirmed", "sent", "withdrawn", "evicted"]
MARK_KINDS: tuple[MarkKind, ...] = ("confirmed", "sent", "withdrawn", "evicted")


@record
class ReplicaLoad:
    """What one router has in flight on one replica."""

    replica: str
    requests: int = 0
    prompt_tokens: int = 0
    #: Of those the requests before their first token, their prompt tokens, and the ones not estimated cached.
    waiting_requests: int = 0
    waiting_tokens: int = 0
    uncached_tokens: int = 0
    #: Prefill left before the last of their first tokens, s.
    prefill_s: float = 0.0
    #: Sum of the times since the first tokens of the others, s.
    decoded_s: float = 0.0


@record
class PrefixMarks:
    """Prefixes on a replica, by default those of one prompt that a first token confirmed.

    `hashes` has 8 bytes per mark, each the hash of a whole prefix, shallow ones first; `blocks` the depth of each.
    Marks that are `sent` are of a prompt that waits for its first token, and `withdrawn` where it has ended before it.
    Those `evicted` are of any prompts that the engine no longer has, oldest first. The last two have no depths.
    """

    replica: str
    model: str | None
    blocks: tuple[int, ...]
    hashes: bytes
    kind: MarkKind = "confirmed"

    @property
    def words(self) -> Sequence[int]:
        """The hashes as numbers."""
        return struct.unpack(f"<{len(self.hashes) // 8}Q", self.hashes)


@record
class SharedCacheReport:
    """An engine's report of cached tokens beside the confirmed prefix: a sample of the share that it finds.

    Of a `core.prefix.residency.CacheReport` what another router can learn from, with the names that it needs. The
    slack stays behind: it says when the report contradicts the reporting router's own index.
    """

    replica: str
    model: str | None
    confirmed_tokens: float
    found_tokens: float


@record
class SharedAnswer:
    """An answer that an engine was left with, by the hash of its prompt's last full block, 8 bytes.

    A `core.prefix.index.GivenAnswer` with its replica and the key under which the receiver stores it.
    """

    replica: str
    prompt: bytes
    prompt_tokens: int
    output_tokens: int


@record
class StartedPrefill:
    """Predicted prefill that one router has sent to a replica since its last report, s."""

    replica: str
    prefill_s: float


@record
class LearnedSpeed:
    """A router's own samples of a replica's prefills: time spent and time by the prior, s, both fading."""

    replica: str
    spent_s: float
    prior_s: float


@record
class PeerStatus:
    """What an operator compares between routers."""

    policy: str = ""
    weights_version: int = 0
    frozen: bool = False
    #: Digest of the learned policy's model.
    model: str | None = None
    draining: tuple[str, ...] = ()
    ejected: tuple[str, ...] = ()


@record
class PeerReport:
    """One report of one router.

    Parameters
    ----------
    router:
        Its name, with its run: another run is another router.
    seq:
        Ascending; a report that is not newer than the last one is ignored.
    key_id:
        Names the fingerprint key: hashes under another key are meaningless.
    """

    router: str
    seq: int
    key_id: str = ""
    loads: tuple[ReplicaLoad, ...] = ()
    prefixes: tuple[PrefixMarks, ...] = ()
    cache_reports: tuple[SharedCacheReport, ...] = ()
    answers: tuple[SharedAnswer, ...] = ()
    prefills: tuple[StartedPrefill, ...] = ()
    speeds: tuple[LearnedSpeed, ...] = ()
    status: PeerStatus = PeerStatus()

    @property
    def load_cells(self) -> NDArray[np.float64]:
        """The loads as whole numbers, a row each in the order of its fields: prefill in us, decoding in ms."""
        rows = [
            (
                load.requests,
                load.prompt_tokens,
                load.waiting_requests,
                load.waiting_tokens,
                load.uncached_tokens,
                round(load.prefill_s * 1e6),
                round(load.decoded_s * 1e3),
            )
            for load in self.loads
        ]
        return np.array(rows, dtype=np.float64).reshape(len(rows), 7)
