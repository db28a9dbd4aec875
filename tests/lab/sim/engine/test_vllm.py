"""The model of vLLM's scheduler, and beside it one written the long way."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from gorgo.errors import BadRequest
from gorgo.lab.sim.engine.engines import Engine, make_engine, predict_first_token
from gorgo.lab.sim.engine.prediction import ArrivingRequest
from gorgo.lab.sim.engine.profiles import find_profile
from gorgo.lab.sim.engine.request import EngineRequest, Stage, Step
from gorgo.lab.sim.engine.vllm import SlotPool, VllmModel
from tests.lab.sim.fleets import round_profile

# --- A vLLM-like scheduler written the long way: one object per block, contents as tuples of tokens, no arithmetic.
#
# The twin of `gorgo.lab.sim.engine.vllm` in tests. Time is the number of the step.


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


Model = VllmModel[EngineRequest]


def request(prompt: str, output_tokens: int, output: str = "") -> EngineRequest:
    """One letter is one token here."""
    return EngineRequest(
        prompt.encode(), prompt_tokens=len(prompt), output_tokens=output_tokens, output_key=output.encode()
    )


def engine(
    *, blocks: int = 1000, block_tokens: int = 4, budget: int = 16, running: int = 3, prefix_cache: bool = True
) -> Model:
    profile = replace(
        round_profile(kv_tokens=blocks * block_tokens, chunk_tokens=budget, max_running_requests=running),
        scheduler="vllm",
        block_tokens=block_tokens,
        prefix_cache=prefix_cache,
    )
    return VllmModel(profile, item_bytes=1)


def steps(model: Model, now: float = 0.0) -> Iterator[tuple[Step[EngineRequest], list[EngineRequest]]]:
    """Step until there is nothing left to do."""
    while (step := model.start_step(now=now)) is not None:
        now = step.ends_s
        model.check()
        yield step, model.finish_step(step)
        model.check()


def test_decodes_go_first_and_a_chunk_of_a_prompt_takes_the_rest_of_the_budget() -> None:
    model = engine()
    first, second = request("a" * 10, 4), request("b" * 20, 2)
    model.submit(first, now=0.0)
    model.submit(second, now=0.0)
    seen = [(step.requests, step.chunks, [each.emitted for each in emitted]) for step, emitted in steps(model)]
    both = (first, second)
    assert seen == [(both, (10, 6), [1]), (both, (0, 14), [2, 1]), (both, (), [3, 2]), ((first,), (), [4])]
    assert model.totals.generated_tokens == 6
    assert model.totals.prefill_tokens == 30


def test_a_mixed_step_reads_the_weights_once_and_the_context_of_its_decodes() -> None:
    """20 ms of weights or 10 ms and 1 ms a token, whichever is longer; 1 ms for the decode and its context at 1 ms."""
    profile = round_profile(chunk_tokens=16, decode_kv_s=1e-3, max_running_requests=3)
    model: Model = VllmModel(replace(profile, scheduler="vllm", block_tokens=4), item_bytes=1)
    model.submit(request("a" * 10, 3), now=0.0)
    model.submit(request("b" * 20, 1), now=0.0)
    took_ms = [round((step.ends_s - step.started_s) * 1e3, 6) for step, _ in steps(model)]
    assert took_ms == [10 + 16, 10 + 14 + 1 + 1 + 11, 20 + 1 + 12]


def test_full_blocks_are_found_in_mid_prefill() -> None:
    """Sixteen of 30 tokens are scheduled in the first step; a request that ends there finds them at the next one."""
    model = engine(block_tokens=4, budget=16)
    early, late = request("a" * 30, 1), request("a" * 16 + "b", 1)
    model.submit(early, now=0.0)
    step = model.start_step(now=0.0)
    assert step is not None
    model.finish_step(step)
    model.submit(late, now=step.ends_s)
    assert [each.chunks for each, _ in steps(model, step.ends_s)] == [(14, 1)]
    assert (early.cached_tokens, late.cached_tokens) == (0, 16)


def test_a_sibling_in_the_same_step_finds_the_blocks_that_are_computed_there() -> None:
    model = engine(budget=100)
    early, late = request("a" * 10, 1), request("a" * 10, 1)
    model.submit(early, now=0.0)
    model.submit(late, now=0.0)
    assert [step.chunks for step, _ in steps(model)] == [(10, 2)]
    assert late.cached_tokens == 8


def test_a_prompt_of_whole_blocks_computes_its_last_one_again() -> None:
    model = engine(budget=100)
    for _ in range(2):
        again = request("a" * 12, 1)
        model.submit(again, now=0.0)
        list(steps(model))
    assert again.cached_tokens == 8


def test_what_was_generated_is_found_but_for_the_last_token() -> None:
    """Seven of eight tokens have KV: two of the four-token blocks would need the last one."""
    model = engine(budget=100)
    model.submit(request("abcd", 5, "efghi"), now=0.0)
    list(steps(model))
    longer, shorter = request("abcdefghijkl", 1), request("abcdefgh", 1)
    for turn in (longer, shorter):
        model.submit(turn, now=0.0)
    list(steps(model))
    assert (longer.cached_tokens, shorter.cached_tokens) == (8, 4)


def test_without_a_prefix_cache_nothing_is_found() -> None:
    model = engine(budget=100, prefix_cache=False)
    for _ in range(2):
        again = request("a" * 12, 1)
        model.submit(again, now=0.0)
        list(steps(model))
    assert (again.cached_tokens, model.totals.cached_tokens) == (0, 0)
    assert model.cache.free_tokens == model.cache.capacity_tokens


def test_the_last_one_admitted_is_preempted_and_computes_its_tokens_again() -> None:
    """Five blocks of four: two prompts of seven take four; the ninth tokens need a fifth and a sixth."""
    model = engine(blocks=5, budget=100)
    first, second = request("a" * 7, 6), request("b" * 7, 6, "cccccc")
    model.submit(first, now=0.0)
    model.submit(second, now=0.0)
    seen = [(step.chunks, [each.emitted for each in emitted], step.preempted) for step, emitted in steps(model)]
    assert seen == [
        ((7, 7), [1, 1], ()),
        ((), [2, 2], ()),
        ((), [3], (second,)),  # The first takes the fifth block; nothing is admitted in this step.
        ((), [4], ()),
        ((), [5], ()),
        ((), [6], ()),
        ((1,), [3], ()),  # Nine tokens, of which two full blocks are still cached.
        ((), [4], ()),
        ((), [5], ()),
        ((), [6], ()),
    ]
    assert (model.totals.preemptions, model.totals.generated_tokens) == (1, 12)
    assert (second.cached_tokens, model.totals.cached_tokens) == (0, 0), (
        "cached tokens are those of the first admission"
    )
    assert second.first_token_s == first.first_token_s


def test_the_line_waits_for_blocks_of_the_whole_prompt() -> None:
    """Six blocks: one of two runs; five blocks of prompt do not fit beside it, though its first chunk would."""
    model = engine(blocks=6, budget=8)
    first, second = request("a" * 8, 2), request("b" * 20, 1)
    model.submit(first, now=0.0)
    model.submit(second, now=0.0)
    assert [step.requests for step, _ in steps(model)] == [(first,), (first,), (second,), (second,), (second,)]


def test_blocks_released_without_content_are_taken_before_cached_ones() -> None:
    model = engine(blocks=6, budget=100)
    model.submit(request("a" * 9, 1), now=0.0)  # Two full blocks and a blank one.
    list(steps(model))
    model.submit(request("b" * 16, 1), now=0.0)
    list(steps(model))
    assert model.cache.evicted_tokens_total == 0
    again = request("a" * 9, 1)
    model.submit(again, now=0.0)
    list(steps(model))
    assert again.cached_tokens == 8


def test_the_end_of_the_request_that_was_released_first_is_evicted_first() -> None:
    model = engine(blocks=6, budget=100)
    for letter in "ab":
        model.submit(request(letter * 12, 1), now=0.0)
        list(steps(model))
    model.submit(request("c" * 4, 1), now=0.0)
    list(steps(model))
    found = {letter: len(model.cache.find(model.cache.contents(letter.encode() * 12))) for letter in "abc"}
    assert found == {"a": 2, "b": 3, "c": 1}
    assert model.cache.evicted_tokens_total == 4


def test_a_request_that_can_never_run_is_refused_by_whole_blocks() -> None:
    profile = replace(round_profile(kv_tokens=30, chunk_tokens=16), scheduler="vllm")
    model: Model = VllmModel(profile, item_bytes=1)
    with pytest.raises(BadRequest, match="do not fit the KV pool of 16 tokens"):
        model.submit(request("a" * 16, 1), now=0.0)
    assert model.idle


def test_flush_is_refused_while_something_runs_and_forgets_when_idle() -> None:
    model = engine()
    model.submit(request("a" * 12, 2), now=0.0)
    assert not model.flush()
    list(steps(model))
    assert model.cache.find(model.cache.contents(b"a" * 12))
    assert model.flush()
    assert not model.cache.find(model.cache.contents(b"a" * 12))
    model.check()


def test_part_of_a_prefix_is_found_where_the_profile_says_so() -> None:
    profile = replace(round_profile(chunk_tokens=100), scheduler="vllm", block_tokens=4, hit_share=0.5)
    model: Model = VllmModel(profile, item_bytes=1)
    for _ in range(2):
        again = request("a" * 33, 1)
        model.submit(again, now=0.0)
        list(steps(model))
    assert again.cached_tokens == 16
    model.check()


def test_a_block_of_a_trace_covers_many_blocks_of_the_engine() -> None:
    """Two items of 512 tokens and 100 more: 71 blocks of 16, of which 64 are cached."""
    profile = replace(find_profile("1xH100-Llama-3.1-8B-vLLM"), kv_tokens=16 * 100)
    model: Model = VllmModel(profile, item_bytes=8, item_tokens=512)
    for _ in range(2):
        again = EngineRequest(b"block--1block--2", prompt_tokens=1124, output_tokens=20)
        model.submit(again, now=0.0)
        step = model.start_step(now=0.0)
        assert step is not None
        assert model.used_tokens == 71 * 16
        model.finish_step(step)
        list(steps(model))
    assert again.cached_tokens == 1024
    assert (model.cache.evictable_tokens, model.cache.free_tokens) == (1024, 36 * 16)


@dataclass(frozen=True)
class Arrival:
    before_step: int
    prompt: str
    output: str
    aborted_at: int | None


ARRIVALS = st.lists(
    st.builds(
        Arrival,
        before_step=st.sampled_from([0, 0, 1, 3, 8]),
        prompt=st.builds(
            lambda head, tail: "a" * head + tail, st.integers(0, 14), st.text("ab", min_size=1, max_size=9)
        ),
        output=st.text("ab", min_size=1, max_size=12),
        aborted_at=st.one_of(st.none(), st.none(), st.integers(1, 15)),
    ),
    max_size=12,
)


@settings(max_examples=500, deadline=None)
@given(ARRIVALS, st.integers(9, 18), st.integers(3, 20), st.integers(1, 4), st.booleans())
def test_steps_tokens_and_cache_are_those_of_the_naive_twin(
    arrivals: Sequence[Arrival], blocks: int, budget: int, running: int, caching: bool
) -> None:
    model = engine(blocks=blocks, budget=max(budget, running), running=running, prefix_cache=caching)
    naive = NaiveVllm(blocks=blocks, block_tokens=4, budget=max(budget, running), most=running, caching=caching)
    due = sorted(enumerate(arrivals), key=lambda one: one[1].before_step)
    mine: dict[int, EngineRequest] = {}
    theirs: dict[int, NaiveRequest] = {}
    names: dict[EngineRequest, int] = {}
    number = preemptions = 0
    while due or not model.idle:
        while due and (due[0][1].before_step <= number or model.idle):
            name, arrival = due.pop(0)
            mine[name] = request(arrival.prompt, len(arrival.output), arrival.output)
            names[mine[name]] = name
            model.submit(mine[name], now=0.0)
            prompt, output = tuple(arrival.prompt.encode()), tuple(arrival.output.encode())
            theirs[name] = NaiveRequest(name, prompt, output)
            naive.waiting.append(theirs[name])
        for name in list(mine):
            if arrivals[name].aborted_at == number:
                model.abort(mine[name])
                naive.abort(theirs[name])
        step = model.start_step(now=0.0)
        expected = naive.step()
        number += 1
        if step is None:
            assert expected.computed == []
            continue
        model.check()
        before = model.totals.generated_tokens
        emitted = [names[each] for each in model.finish_step(step)]
        model.check()
        sizes = step.chunks or (0,) * len(step.requests)
        assert [(names[each], size or 1) for each, size in zip(step.requests, sizes, strict=True)] == expected.computed
        assert emitted == expected.emitted
        assert [names[each] for each in step.preempted] == expected.preempted
        assert model.totals.generated_tokens - before == len(emitted)
        assert model.cache.evicted_tokens_total == naive.evicted
        assert model.cache.free_blocks == len(naive.free)
        preemptions += len(expected.preempted)
    for name, each in mine.items():
        assert each.stage in (Stage.FINISHED, Stage.ABORTED)
        if each.admitted_s is not None:
            assert each.cached_tokens == theirs[name].cached
    assert model.totals.preemptions == preemptions
    event("preempted" if preemptions else "never preempted")
    event("evicted" if naive.evicted else "never evicted")


class NaiveSlots:
    """The same rules on texts, of which a letter is a token, with everything looked up anew each time."""

    def __init__(self, *, slots: int, most: int) -> None:
        self.most = most
        self.texts = [""] * slots
        self.busy: set[int] = set()
        #: Slots in the order in which they were given back.
        self.order = list(range(slots))[::-1]
        self.ram: list[str] = []

    def take(self, prompt: str) -> tuple[int, int]:
        idle = [slot for slot in range(len(self.texts)) if slot not in self.busy]
        slot = max(idle, key=lambda one: (common(self.texts[one], prompt), -one))
        text = self.texts[slot]
        if common(text, prompt) > 0.1 * len(prompt):
            is_swapped = common(text, prompt) < 0.5 * len(text)
        else:
            slot = next(one for one in self.order if one in idle)
            text, is_swapped = self.texts[slot], True
        self.texts[slot] = ""
        self.busy.add(slot)
        if is_swapped:
            self.save(text)
            text = self.load(text, prompt)
            self.drop()
        return slot, min(common(text, prompt), len(prompt) - 1)

    def save(self, text: str) -> None:
        if text and not any(kept.startswith(text) for kept in self.ram):
            self.ram = [*(kept for kept in self.ram if not text.startswith(kept)), text]

    def load(self, text: str, prompt: str) -> str:
        """The kept text that beats all before it in both shares."""
        best = text
        for kept in self.ram:
            used, found = common(kept, prompt) / len(kept), common(kept, prompt)
            best_used = common(best, prompt) / len(best) if best else -1.0
            if used >= 0.25 and used > best_used and found > common(best, prompt):
                best = kept
        if best != text:
            self.ram.remove(best)
        return best

    def drop(self) -> None:
        while len(self.ram) > 1 and sum(map(len, [*self.texts, *self.ram])) > self.most:
            self.ram.pop(0)

    def give_back(self, slot: int, text: str) -> None:
        self.busy.remove(slot)
        self.texts[slot] = text
        self.order.remove(slot)
        self.order.append(slot)
        self.drop()


def common(one: str, other: str) -> int:
    return next((n for n, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


@given(
    prompts=st.lists(st.text("ab", min_size=1, max_size=14), min_size=1, max_size=60),
    ends=st.randoms(use_true_random=False),
    slots=st.integers(1, 4),
    most=st.integers(1, 60),
)
@settings(max_examples=300)
def test_any_requests_find_what_a_naive_twin_finds(
    prompts: list[str], ends: random.Random, slots: int, most: int
) -> None:
    twin = NaiveSlots(slots=slots, most=most)
    pool = SlotPool(capacity_tokens=most, item_bytes=1, slots=slots)
    running: dict[int, str] = {}
    for prompt in prompts:
        while running and (len(running) == slots or ends.random() < 0.5):
            slot = ends.choice(sorted(running))
            text = running.pop(slot) + "ab"[: ends.randrange(3)]
            twin.give_back(slot, text)
            pool.release_slot(slot, pool.contents(text.encode()), len(text))
        taken = twin.take(prompt)
        assert pool.take_slot(pool.contents(prompt.encode()), len(prompt)) == taken
        running[taken[0]] = prompt
        pool.check()
        event(f"kept {min(len(twin.ram), 3)}")


def engine_slots(*, pool: int = 1000, slots: int = 2) -> Model:
    profile = round_profile(kv_tokens=pool, chunk_tokens=100, max_running_requests=slots)
    profile = replace(profile, scheduler="vllm", block_tokens=1, slot_cache=True)
    model: Engine[EngineRequest] = make_engine(profile, item_bytes=1)
    assert isinstance(model, VllmModel)
    return model


def ran(model: Model, *prompts: str, output: str = "x") -> list[int]:
    """Run the prompts together; what was cached of each."""
    requests = [
        EngineRequest(prompt.encode(), prompt_tokens=len(prompt), output_tokens=len(output), output_key=output.encode())
        for prompt in prompts
    ]
    for request in requests:
        model.submit(request, now=0.0)
    while (step := model.start_step(now=0.0)) is not None:
        model.check()
        model.finish_step(step)
        model.check()
    return [request.cached_tokens for request in requests]


def test_what_runs_is_not_found_and_what_has_ended_is() -> None:
    model = engine_slots()
    assert ran(model, "a" * 50, "a" * 50) == [0, 0]
    assert ran(model, "a" * 60) == [50]


def test_the_answer_is_found_but_for_its_last_token() -> None:
    model = engine_slots()
    ran(model, "abcdefgh", output="ijkl")
    assert ran(model, "abcdefghijklmn") == [11]


def test_a_prompt_that_lost_its_slot_comes_back_from_host_memory_while_there_is_room() -> None:
    for pool, found in ((1000, 30), (60, 0)):
        model = engine_slots(pool=pool)
        for prompt in ("a" * 30, "b" * 30, "c" * 30, "d" * 30, "e" * 30):
            assert ran(model, prompt) == [0]
        assert ran(model, "a" * 30 + "z") == [found]


def test_a_flushed_engine_finds_nothing() -> None:
    model = engine_slots()
    ran(model, "a" * 30)
    assert model.flush()
    assert ran(model, "a" * 30) == [0]


def test_an_aborted_request_leaves_what_it_computed_in_its_slot() -> None:
    model = engine_slots()
    request = EngineRequest(b"a" * 150, prompt_tokens=150, output_tokens=2)
    model.submit(request, now=0.0)
    step = model.start_step(now=0.0)
    assert step is not None
    model.finish_step(step)
    assert model.abort(request)
    assert ran(model, "a" * 150) == [100]


def test_a_first_token_is_foreseen_on_an_idle_engine() -> None:
    model = engine_slots()
    ran(model, "a" * 50)
    foreseen = predict_first_token(model, [], ArrivingRequest(b"a" * 60, 60, arrives_s=1.0), now=1.0)
    assert foreseen.cached_tokens == 50
