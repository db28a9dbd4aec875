"""How long a request waits for KV memory on a replica: by what is in flight there, and by how long answers hold theirs.

Owns the demand on one replica's KV pool (`KvDemand`). The policy adds the wait to the work before a request.

Theory of operation. A continuous-batching engine lets a request run when its prompt fits into the pool beside those
that run; SGLang counts a part of the answer too, and vLLM preempts when answers outgrow the pool. So while more is in
flight than the pool has, the last ones wait until others have ended. What is in flight are the distinct blocks of all
prompts, since a shared prefix is there once, and a usual answer for each. Cached blocks that no request uses are
evicted first, and count for nothing. A full pool of C tokens frees C / S of them per second, S the time for which a
token is held. So a request for which so many tokens are short waits so many times S / C, and nobody waits while all
fits.

S is learned from answers that completed: from the begin of the prefill to the end, weighted by tokens.
"""

from __future__ import annotations

from gorgo.core.messages.request import RouteRequest

#: Of a pool: with less of it in flight by the sum of prompts and answers, no wait is looked for.
CROWDED = 0.5
#: Answers after which one weighs 1 / e: a part of a batch.
MEMORY = 10.0
#: Size of the hash of a block.
_BYTES = 8


class KvDemand:
    """What requests in flight take of the KV pool of one replica.

    Example
    -------
    >>> from gorgo.core.messages.request import RouteRequest
    >>> demand = KvDemand()
    >>> one = RouteRequest("one", 0.0, 1000, b"the sameleft own", 500.0, 0)
    >>> two = RouteRequest("two", 0.0, 1000, b"the samerightown", 500.0, 0)
    >>> demand.add("one", one, 1000)  # two prompts of two blocks, of which they share the first
    >>> demand.add("two", two, 500)
    >>> demand.short_tokens(one, 1600), demand.short_tokens(None, 1400)
    (0.0, 100.0)
    """

    __slots__ = (
        "_answers",
        "_blocks",
        "_counts",
        "_held",
        "_held_s",
        "_output",
        "_prompt_tokens",
        "_requests",
        "_waiting",
    )

    def __init__(self) -> None:
        self._requests: dict[str, RouteRequest] = {}
        #: Uncached tokens of those that have no first token.
        self._waiting: dict[str, float] = {}
        self._prompt_tokens = 0
        #: Blocks of all prompts, and how many prompts have each; `None` until a wait is looked for.
        self._blocks = 0
        self._counts: dict[bytes, int] | None = None
        #: Decayed sums over answers: count, output tokens, tokens held, and these times how long.
        self._answers = self._output = self._held = self._held_s = 0.0

    def add(self, key: str, request: RouteRequest, uncached_tokens: float) -> None:
        """Count a dispatched request."""
        self._requests[key] = request
        self._waiting[key] = uncached_tokens
        self._prompt_tokens += request.prompt_tokens
        self._blocks += len(request.blocks) // _BYTES
        if self._counts is not None:
            _count(self._counts, request.blocks)

    def on_first_token(self, key: str) -> None:
        """Count a request as running."""
        self._waiting.pop(key, None)

    def remove(self, key: str) -> None:
        """Count a request no longer; a key that is not there is ignored."""
        request = self._requests.pop(key, None)
        if request is None:
            return
        self._waiting.pop(key, None)
        self._prompt_tokens -= request.prompt_tokens
        self._blocks -= len(request.blocks) // _BYTES
        if not self._requests:
            self._counts = None
        elif self._counts is not None:
            _uncount(self._counts, request.blocks)

    def learn(self, held_s: float, *, prompt_tokens: float, output_tokens: int) -> None:
        """Record a whole answer: so many tokens of its own prompt, and its answer, were held for so long."""
        left, tokens = 1.0 - 1.0 / MEMORY, prompt_tokens + output_tokens
        self._answers = self._answers * left + 1.0
        self._output = self._output * left + output_tokens
        self._held = self._held * left + tokens
        self._held_s = self._held_s * left + tokens * held_s

    @property
    def output_tokens(self) -> float:
        """Tokens of a usual answer; 0 before the first."""
        return self._output / self._answers if self._answers else 0.0

    def is_crowded(self, capacity_tokens: float) -> bool:
        """Return whether a request may have to wait; never in a pool of unknown size (NaN)."""
        return self._prompt_tokens + self.output_tokens * len(self._requests) > CROWDED * capacity_tokens

    def short_tokens(self, request: RouteRequest | None, capacity_tokens: float) -> float:
        """Return the tokens that others have to free before one more may run, or all in flight; 0 where all fit."""
        more = (
            self._prompt_tokens + self.output_tokens * (len(self._requests) + (request is not None)) - capacity_tokens
        )
        if request is not None:
            more += request.prompt_tokens
        if not more > 0.0:
            return 0.0
        usual = next(iter(self._requests.values()), None)
        if usual is None:
            return 0.0  # it is alone
        return max(0.0, more - self._shared_blocks(request) * usual.block_tokens)

    def wait_s(self, request: RouteRequest | None, uncached_tokens: float, capacity_tokens: float) -> float:
        """Return how long that takes, s; 0 before the first answer."""
        short = self.short_tokens(request, capacity_tokens)
        if not short or not self._held:
            return 0.0
        # Those that run have their memory.
        in_line = len(self._waiting) + (request is not None)
        waiting = sum(self._waiting.values()) + uncached_tokens + self.output_tokens * in_line
        return min(short, waiting) / capacity_tokens * (self._held_s / self._held)

    def _shared_blocks(self, request: RouteRequest | None) -> int:
        """Return how many blocks are there for more than one prompt, each as often as it need not be there again."""
        counts = self._counts
        if counts is None:
            counts = self._counts = {}
            for each in self._requests.values():
                _count(counts, each.blocks)
        shared = self._blocks - len(counts)
        return shared if request is None else shared + _leading(counts, request.blocks)

    def check(self) -> None:
        """Assert every invariant; for tests."""
        requests = self._requests.values()
        assert self._prompt_tokens == sum(request.prompt_tokens for request in requests)
        if self._counts is not None:
            counts: dict[bytes, int] = {}
            for request in requests:
                _count(counts, request.blocks)
            assert counts == self._counts
            assert self._blocks == sum(counts.values())
        assert self._waiting.keys() <= self._requests.keys()


def _count(counts: dict[bytes, int], blocks: bytes) -> None:
    for start in range(0, len(blocks), _BYTES):
        block = blocks[start : start + _BYTES]
        counts[block] = counts.get(block, 0) + 1


def _uncount(counts: dict[bytes, int], blocks: bytes) -> None:
    for start in range(0, len(blocks), _BYTES):
        block = blocks[start : start + _BYTES]
        left = counts[block] - 1
        if left:
            counts[block] = left
        else:
            del counts[block]


def _leading(counts: dict[bytes, int], blocks: bytes) -> int:
    """Return how many leading blocks are there: each hash stands for all blocks before it too."""
    low, high = 0, len(blocks) // _BYTES
    while low < high:
        middle = (low + high + 1) // 2
        if blocks[(middle - 1) * _BYTES : middle * _BYTES] in counts:
            low = middle
        else:
            high = middle - 1
    return low
