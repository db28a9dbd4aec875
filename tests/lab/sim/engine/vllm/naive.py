"""A vLLM-like scheduler written the long way: one object per block, contents as tuples of tokens, no arithmetic.

The twin of `gorgo.lab.sim.engine.vllm` in tests. Time is the number of the step.
"""

from __future__ import annotations

from dataclasses import dataclass, field

Content = tuple[int, ...]


@dataclass(eq=False)
class NaiveBlock:
    content: Content | None = None
    holders: int = 0


@dataclass(eq=False)
class NaiveRequest:
    name: int
    prompt: Content
    output: Content
    emitted: int = 0
    computed: int = 0
    cached: int | None = None
    blocks: list[NaiveBlock] = field(default_factory=list)

    @property
    def tokens(self) -> Content:
        """All tokens so far."""
        return self.prompt + self.output[: self.emitted]


@dataclass
class NaiveStep:
    """Tokens computed by request, tokens generated, requests preempted: by name, in order."""

    computed: list[tuple[int, int]]
    emitted: list[int]
    preempted: list[int]


class NaiveVllm:
    def __init__(self, *, blocks: int, block_tokens: int, budget: int, most: int, caching: bool = True) -> None:
        self.size, self.budget, self.most, self.caching = block_tokens, budget, most, caching
        self.free = [NaiveBlock() for _ in range(blocks)]
        self.blocks = list(self.free)
        #: Cached blocks in the order in which they got their content.
        self.known: list[NaiveBlock] = []
        self.waiting: list[NaiveRequest] = []
        self.running: list[NaiveRequest] = []
        self.evicted = 0

    def step(self) -> NaiveStep:
        budget, computed, preempted = self.budget, [], []
        place = 0
        while place < len(self.running) and budget > 0:
            request = self.running[place]
            wanted = min(len(request.tokens) - request.computed, budget)
            while not self._compute(request, wanted):
                victim = self.running.pop()
                self._free(victim)
                victim.computed = 0
                self.waiting.insert(0, victim)
                preempted.append(victim.name)
                if victim is request:
                    break
            if request not in self.running:
                break
            computed.append((request, wanted))
            budget -= wanted
            place += 1
        while budget > 0 and not preempted and self.waiting and len(self.running) < self.most:
            request = self.waiting[0]
            found = self._find(request.tokens)
            taken = sum(block.holders == 0 for block in found)
            if self._count(len(request.tokens)) - len(found) + taken > len(self.free):
                break
            for block in found:
                if block.holders == 0:
                    self.free.remove(block)
                block.holders += 1
            request.blocks = list(found)
            request.computed = len(found) * self.size
            if request.cached is None:
                request.cached = request.computed
            wanted = min(len(request.tokens) - request.computed, budget)
            assert self._compute(request, wanted)
            self.running.append(self.waiting.pop(0))
            computed.append((request, wanted))
            budget -= wanted
        emitted = []
        for request, _ in computed:
            if request.computed == len(request.tokens):
                request.emitted += 1
                emitted.append(request.name)
                if request.emitted == len(request.output):
                    self.running.remove(request)
                    self._free(request)
        return NaiveStep([(request.name, wanted) for request, wanted in computed], emitted, preempted)

    def abort(self, request: NaiveRequest) -> None:
        if request in self.waiting:
            self.waiting.remove(request)
        elif request in self.running:
            self.running.remove(request)
            self._free(request)

    def _count(self, tokens: int) -> int:
        return len(range(0, tokens, self.size))

    def _find(self, tokens: Content) -> list[NaiveBlock]:
        found: list[NaiveBlock] = []
        for end in range(self.size, len(tokens), self.size):  # Never all tokens: the last is computed.
            same = [block for block in self.known if block.content == tokens[:end]]
            if not same:
                break
            found.append(same[0])
        return found

    def _compute(self, request: NaiveRequest, wanted: int) -> bool:
        missing = self._count(request.computed + wanted) - len(request.blocks)
        if missing > len(self.free):
            return False
        for _ in range(missing):
            block = self.free.pop(0)
            if block in self.known:
                self.known.remove(block)
                self.evicted += self.size
            block.content, block.holders = None, 1
            request.blocks.append(block)
        request.computed += wanted
        for place, block in enumerate(request.blocks):
            end = (place + 1) * self.size
            if self.caching and block.content is None and end <= request.computed:
                block.content = request.tokens[:end]
                self.known.append(block)
        return True

    def _free(self, request: NaiveRequest) -> None:
        blank = [block for block in request.blocks if block.content is None]
        for block in request.blocks[::-1]:
            block.holders -= 1
            if block.holders == 0 and block not in blank:
                self.free.append(block)
        self.free[:0] = blank
        request.blocks = []
