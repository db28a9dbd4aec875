"""The running requests of a simulated engine, and their share of its KV pool.

Owns the transitions from admission to the end and their accounting: a running request has locked its cached prefix, has
private tokens, and a reservation for the rest. `model` decides admission and steps; `kv_cache` is the pool.

Theory of operation. Prompt KV can be hit by others only after the whole prefill, generated tokens only when the request
has ended (the last one, which no step has read, never). What goes into the tree is no longer the request's own, and its
lock moves to the end of it. An end of any kind gives back lock, own tokens and promise.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic

from gorgo.sim.engine.kv_cache import KvCache, Match
from gorgo.sim.engine.request import DECODING, FINISHED, PREFILLING, EngineRequest
from gorgo.sim.engine.steps import RequestT


class Batch(Generic[RequestT]):
    """The running requests of one engine.

    Parameters
    ----------
    cache:
        The engine's pool.
    caching:
        Whether prompts are put into the tree for later requests.
    """

    __slots__ = ("_cache", "_caching", "context_tokens", "decoding", "prefilling")

    def __init__(self, cache: KvCache, *, caching: bool = True) -> None:
        self._cache = cache
        self._caching = caching
        #: Requests in prefill, in order of admission.
        self.prefilling: list[RequestT] = []
        #: Those that have their first token. Insertion order is admission order, so that steps do not depend on hashes.
        self.decoding: dict[RequestT, None] = {}
        #: Context tokens of all decoding requests.
        self.context_tokens = 0

    def __len__(self) -> int:
        return len(self.prefilling) + len(self.decoding)

    def admit(self, request: RequestT, match: Match, *, cached_tokens: int, needed_tokens: int) -> None:
        """Admit a request: `match` is its cached prefix; the rest of the prompt and the output are reserved."""
        request.handle = self._cache.lock(match)
        self._cache.reserve(needed_tokens)
        request.reserved_tokens = needed_tokens
        request.cached_tokens = request.prefilled_tokens = cached_tokens
        request.stage = PREFILLING
        self.prefilling.append(request)

    def allocate(self, request: RequestT, tokens: int) -> None:
        """Take room for so much more of its prompt."""
        self._cache.allocate(tokens)
        request.private_tokens += tokens
        request.reserved_tokens -= tokens

    def advance(self, requests: Sequence[RequestT], iterations: int) -> None:
        """Take room for one token each per decode iteration."""
        if not iterations:
            return
        self._cache.allocate(iterations * len(requests))
        for request in requests:
            request.private_tokens += iterations
            request.reserved_tokens -= iterations
        self.context_tokens += iterations * len(requests)

    def begin_decoding(self, request: RequestT) -> None:
        """The prompt is in the pool: cache it, emit the first token, go on decoding if there is more to come."""
        self.prefilling.remove(request)
        self._cache_prefix(request, request.key, request.prompt_tokens)
        request.stage = DECODING
        request.emitted = 1
        self.decoding[request] = None
        self.context_tokens += request.prompt_tokens
        if request.finished:
            self.finish(request)

    def finish(self, request: RequestT) -> None:
        """It has its last token."""
        if request.output_key:
            self._cache_prefix(request, request.key + request.output_key, _context(request))
        self.leave(request)
        request.stage = FINISHED

    def leave(self, request: RequestT) -> None:
        """Free everything that a running request holds."""
        if request.stage is PREFILLING:
            self.prefilling.remove(request)
        else:
            del self.decoding[request]
            self.context_tokens -= _context(request)
        assert request.handle is not None, "a running request holds a path"
        self._cache.unlock(request.handle)
        self._cache.release(private=request.private_tokens, promised=request.reserved_tokens)
        request.handle = None
        request.private_tokens = request.reserved_tokens = 0

    def check(self) -> None:
        """Assert that the accounts of the pool and of the running requests agree."""
        cache, running = self._cache, [*self.prefilling, *self.decoding]
        assert cache.private_tokens == sum(request.private_tokens for request in running)
        assert cache.reserved_tokens == sum(request.reserved_tokens for request in running)
        assert self.context_tokens == sum(_context(request) for request in self.decoding)
        for request in running:
            node = request.handle
            assert node is not None
            while node.parent is not None:
                assert node.locks > 0, "what a running request holds is locked"
                assert node.parent.children[node.edge[: cache.item_bytes]] is node, "and is in the tree"
                node = node.parent

    def _cache_prefix(self, request: RequestT, key: bytes, tokens: int) -> None:
        """Put the whole items of the first `tokens` of `key` into the tree."""
        cache = self._cache
        assert request.handle is not None, "a running request holds a path"
        items = min(len(key) // cache.item_bytes, tokens // cache.item_tokens) if self._caching else 0
        in_tree = request.handle.end
        if items > in_tree:
            request.handle, _ = cache.insert(key[: items * cache.item_bytes], request.handle)
            request.private_tokens -= (items - in_tree) * cache.item_tokens


def _context(request: EngineRequest) -> int:
    """Return the tokens of a decoding request with KV after this step: each reduces the reservation by one."""
    return request.prompt_tokens + request.output_tokens - request.reserved_tokens
