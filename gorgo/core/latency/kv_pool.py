"""How long a request waits for KV memory on a replica: by what is in flight there, and by how long answers hold theirs.

Owns the demand on one replica's KV pool (`KvDemand`). The columns have its result; the wait is the policy's sum.

Theory of operation. A continuous-batching engine lets a request run when its prompt fits into the pool beside those that
run; SGLang adds a part of the answer, and vLLM preempts when answers outgrow the pool. So while more is in flight than
the pool has, the last ones wait until others have ended. What is in flight are the distinct blocks of all prompts, since
a shared prefix is there once, and a usual answer for each. Cached blocks that no request uses are evicted first, and
count for nothing. In steady state a full pool of C tokens frees C / S of them per second, S the time for which a token is
held. So what is short by so many tokens waits so many times S / C, and nobody waits while all fits.

S is learned from answers that completed: from the begin of the prefill to the end, weighted by tokens. A first token of a
request that had to wait for memory says nothing of the prefill speed.
"""

from __future__ import annotations

from math import inf

from gorgo.core.messages.request import RouteRequest

#: Of a pool: with less of it in flight by the sum of prompts, nobody waits, and shared blocks need not be told apart.
CROWDED = 0.5
#: Answers after which one weighs 1 / e: a part of a batch.
MEMORY = 10.0
_BLOCK_BYTES = 8


class KvDemand:
    """What requests in flight take of the KV pool of one replica.

    Example
    -------
    >>> from gorgo.core.messages.request import RouteRequest
    >>> demand = KvDemand()
    >>> for name in (b"aaaaaaaaleft.own", b"aaaaaaaarightown"):  # two prompts of two blocks, of which they share the first
    ...     demand.add(name.decode(), RouteRequest(name.decode(), 0.0, 1000, name, 500.0, 0))
    >>> demand.tokens(500.0), demand.free_tokens(2000.0, 500.0)
    (1500.0, 500.0)
    """

    __slots__ = ("_answers", "_blocks", "_counts", "_held", "_held_s", "_output_tokens", "_prompt_tokens", "_requests")

    def __init__(self) -> None:
        self._requests: dict[str, RouteRequest] = {}
        self._prompt_tokens = 0
        #: Blocks of all prompts, and how many prompts have each; `None` until the pool is crowded.
        self._blocks = 0
        self._counts: dict[bytes, int] | None = None
        #: Decayed sums over answers: count, output tokens, tokens held, and these times how long.
        self._answers = self._output_tokens = self._held = self._held_s = 0.0

    def add(self, key: str, request: RouteRequest) -> None:
        """Count a dispatched request."""
        self._requests[key] = request
        self._prompt_tokens += request.prompt_tokens
        self._blocks += len(request.blocks) // _BLOCK_BYTES
        if self._counts is not None:
            _count(self._counts, request.blocks)

    def remove(self, key: str) -> None:
        """Count a request no longer; a key that is not there is ignored."""
        request = self._requests.pop(key, None)
        if request is None:
            return
        self._prompt_tokens -= request.prompt_tokens
        self._blocks -= len(request.blocks) // _BLOCK_BYTES
        if not self._requests:
            self._counts = None
        elif self._counts is not None:
            _uncount(self._counts, request.blocks)

    def learn(self, held_s: float, *, prompt_tokens: float, output_tokens: int) -> None:
        """Record a whole answer: so many tokens of its own prompt, and its answer, were held for so long."""
        left, tokens = 1.0 - 1.0 / MEMORY, prompt_tokens + output_tokens
        self._answers = self._answers * left + 1.0
        self._output_tokens = self._output_tokens * left + output_tokens
        self._held = self._held * left + tokens
        self._held_s = self._held_s * left + tokens * held_s

    @property
    def output_tokens(self) -> float:
        """Tokens of a usual answer; 0 before the first."""
        return self._output_tokens / self._answers if self._answers else 0.0

    @property
    def hold_s(self) -> float:
        """Time for which a token is held, s; 0 before the first answer."""
        return self._held_s / self._held if self._held else 0.0

    def free_tokens(self, capacity_tokens: float, block_tokens: float) -> float:
        """Return the tokens that are left for the prompt of one more, negative where some wait for memory.

        They are infinite while few are in flight, and in a pool of unknown size (NaN).
        """
        answers = self.output_tokens * (len(self._requests) + 1)
        if not self._prompt_tokens + answers > CROWDED * capacity_tokens:
            return inf
        return capacity_tokens - answers - self.tokens(block_tokens)

    def tokens(self, block_tokens: float) -> float:
        """Return the tokens of all prompts, those of a shared block once."""
        counts = self._counts
        if counts is None:
            counts = self._counts = {}
            for request in self._requests.values():
                _count(counts, request.blocks)
        return self._prompt_tokens - (self._blocks - len(counts)) * block_tokens

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


def _count(counts: dict[bytes, int], blocks: bytes) -> None:
    for start in range(0, len(blocks), _BLOCK_BYTES):
        block = blocks[start : start + _BLOCK_BYTES]
        counts[block] = counts.get(block, 0) + 1


def _uncount(counts: dict[bytes, int], blocks: bytes) -> None:
    for start in range(0, len(blocks), _BLOCK_BYTES):
        block = blocks[start : start + _BLOCK_BYTES]
        left = counts[block] - 1
        if left:
            counts[block] = left
        else:
            del counts[block]
