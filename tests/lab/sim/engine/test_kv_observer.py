"""The reported blocks of both kinds of cache against the caches' own contents."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, Literal, get_args

import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from gorgo.lab.sim.engine.engines import Engine, make_engine
from gorgo.lab.sim.engine.kv_cache import KvCache
from gorgo.lab.sim.engine.request import EngineRequest
from gorgo.lab.sim.engine.vllm.block_pool import BlockPool
from tests.lab.sim.profiles import round_profile

Kind = Literal["sglang", "vllm"]
KINDS = get_args(Kind)


class Twin:
    """A mirror of a cache from its reports alone: copies of each block, and the whole prefix of each."""

    def __init__(self, block_bytes: int) -> None:
        self.block_bytes = block_bytes
        self.copies: Counter[int] = Counter()
        self.prefixes: dict[int, bytes] = {}
        self.calls: list[str] = []

    def stored(self, hashes: Sequence[int], parent: int | None, items: bytes) -> None:
        assert len(items) == len(hashes) * self.block_bytes, "the items are those of the blocks"
        assert hashes, "an empty report is none"
        prefix = b"" if parent is None else self.prefixes[parent]
        for place, one in enumerate(hashes):
            prefix += items[place * self.block_bytes : (place + 1) * self.block_bytes]
            assert self.prefixes.setdefault(one, prefix) == prefix, "a hash names one prefix"
            self.copies[one] += 1
        self.calls.append(f"stored {prefix.decode()}")

    def removed(self, hashes: Sequence[int]) -> None:
        for one in hashes:
            assert self.copies[one] > 0, "only what is cached is removed"
            self.copies[one] -= 1
        self.calls.append(f"removed {len(hashes)}")

    def cleared(self) -> None:
        self.copies.clear()
        self.calls.append("cleared")

    def contents(self) -> Counter[bytes]:
        """Return the copies of each prefix that ends with a cached block."""
        return Counter({self.prefixes[one]: count for one, count in self.copies.items() if count})


def cached_prefixes(engine: Engine[Any], keys: set[bytes], block_bytes: int) -> Counter[bytes]:
    """Return the same, of the cache itself: every prefix of `keys`, which are all keys that it has been given."""
    prefixes = {key[:end] for key in keys for end in range(block_bytes, len(key) + 1, block_bytes)}
    if isinstance(engine.cache, BlockPool):
        copies = engine.cache._copies
        return Counter(
            {
                prefix: len(found)
                for prefix in prefixes
                if (found := copies.get(engine.cache.contents(prefix)[-1])) is not None
            }
        )
    assert isinstance(engine.cache, KvCache)
    return Counter({prefix: 1 for prefix in prefixes if engine.cache.match(prefix).items == len(prefix)})


def engine_of(kind: Kind, *, tokens: int = 40, block_tokens: int = 4) -> Engine[EngineRequest]:
    profile = round_profile(kv_tokens=tokens, chunk_tokens=8, max_running_requests=3)
    profile = replace(profile, scheduler=kind, block_tokens=block_tokens)
    return make_engine(profile, item_bytes=1)


def observed(kind: Kind, **options: int) -> tuple[Engine[EngineRequest], Twin]:
    engine = engine_of(kind, **options)
    twin = Twin(engine.cache.event_tokens)
    engine.cache.report_to(twin)
    return engine, twin


def request(prompt: str, output: str = "") -> EngineRequest:
    """A letter is a token; the last token of an answer is never cached."""
    return EngineRequest(
        prompt.encode(), prompt_tokens=len(prompt), output_tokens=len(output) + 1, output_key=output.encode()
    )


def serve(engine: Engine[EngineRequest], *requests: EngineRequest) -> None:
    for one in requests:
        engine.submit(one, now=0.0)
    for _ in run(engine):
        pass


def run(engine: Engine[EngineRequest]) -> Iterator[None]:
    now = 0.0
    while (step := engine.start_step(now=now)) is not None:
        now = step.ends_s
        yield
        engine.finish_step(step)
        yield


def test_an_engine_of_sglangs_kind_reports_a_prompt_after_its_whole_prefill() -> None:
    engine, twin = observed("sglang")
    engine.submit(request("a" * 12 + "b"), now=0.0)
    steps = run(engine)
    for _ in range(3):  # Eight of its 13 tokens, and the rest under way.
        next(steps)
        assert twin.calls == []
    next(steps)
    assert twin.calls == ["stored aaaaaaaaaaaa"]


def test_an_engine_of_vllms_kind_reports_a_block_when_its_last_token_is_scheduled() -> None:
    engine, twin = observed("vllm")
    engine.submit(request("a" * 12 + "b"), now=0.0)
    steps = run(engine)
    next(steps)
    assert twin.calls == ["stored aaaaaaaa"]
    next(steps)
    next(steps)
    assert twin.calls == ["stored aaaaaaaa", "stored aaaaaaaaaaaa"]


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_generated_is_reported_behind_the_prompt(kind: Kind) -> None:
    engine, twin = observed(kind)
    serve(engine, request("abcdef", "ghij"))
    assert twin.contents() == Counter([b"abcd", b"abcdefgh"])


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_evicted_is_reported_as_removed_and_a_flush_as_cleared(kind: Kind) -> None:
    engine, twin = observed(kind, tokens=16)
    serve(engine, request("a" * 8))
    assert set(twin.contents()) == {b"aaaa", b"aaaaaaaa"}
    serve(engine, request("b" * 14))
    assert set(twin.contents()) == {b"bbbb", b"bbbbbbbb", b"bbbbbbbbbbbb"}
    assert engine.flush()
    assert twin.calls[-1] == "cleared"


def test_two_copies_of_a_block_are_stored_and_removed_one_by_one() -> None:
    """Both prompts of whole blocks compute the last one again: a copy each."""
    engine, twin = observed("vllm", tokens=16)
    serve(engine, request("a" * 8))
    serve(engine, request("a" * 8))
    assert twin.contents() == Counter({b"aaaa": 1, b"aaaaaaaa": 2})


@pytest.mark.parametrize("kind", KINDS)
def test_a_block_of_a_trace_is_one_item(kind: Kind) -> None:
    profile = replace(round_profile(kv_tokens=4096, chunk_tokens=2048, max_running_requests=2), scheduler=kind)
    engine: Engine[EngineRequest] = make_engine(profile, item_bytes=8, item_tokens=512)
    twin = Twin(8)
    engine.cache.report_to(twin)
    serve(engine, EngineRequest(b"block--1block--2", prompt_tokens=1100, output_tokens=1))
    assert (engine.cache.event_tokens, twin.calls) == (512, ["stored block--1block--2"])


@pytest.mark.parametrize("kind", KINDS)
def test_an_engine_that_caches_nothing_reports_nothing(kind: Kind) -> None:
    profile = replace(round_profile(kv_tokens=64, chunk_tokens=8), scheduler=kind, block_tokens=4, prefix_cache=False)
    engine: Engine[EngineRequest] = make_engine(profile, item_bytes=1)
    twin = Twin(4)
    engine.cache.report_to(twin)
    serve(engine, request("a" * 12))
    assert twin.calls == []


REQUESTS = st.lists(
    st.tuples(
        st.text("ab", min_size=1, max_size=18),
        st.text("c", max_size=5),
        st.integers(0, 3),  # steps until the next one
        st.booleans(),  # aborted then
    ),
    max_size=25,
)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(kind=st.sampled_from(KINDS), requests=REQUESTS, flush=st.booleans(), block_tokens=st.sampled_from([1, 3, 4]))
def test_the_reports_are_the_contents_of_the_cache_at_every_step(
    kind: Kind, requests: list[tuple[str, str, int, bool]], flush: bool, block_tokens: int
) -> None:
    engine, twin = observed(kind, tokens=36, block_tokens=block_tokens)
    keys: set[bytes] = set()
    steps = run(engine)
    for prompt, output, advance, aborted in requests:
        one = request(prompt, output)
        keys.add(one.key + one.output_key)
        engine.submit(one, now=0.0)
        for _ in range(2 * advance):
            if next(steps, "idle") == "idle":
                steps = run(engine)
            assert twin.contents() == cached_prefixes(engine, keys, block_tokens)
        if aborted:
            engine.abort(one)
        if flush:
            engine.flush()
        assert twin.contents() == cached_prefixes(engine, keys, block_tokens)
    event(f"{kind}: " + ("removals" if any(call.startswith("removed") for call in twin.calls) else "no removals"))
    for _ in steps:
        assert twin.contents() == cached_prefixes(engine, keys, block_tokens)
