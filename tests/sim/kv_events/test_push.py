"""Pushes from an engine to the Router: full sets each five seconds, evictions in between."""

from __future__ import annotations

from functools import partial

import pytest

from gorgo.sim.kv_events.path import PathFaults
from gorgo.sim.kv_events.push import PushFeed
from tests.sim.kv_events.feeds import Kind, Scene

KINDS: tuple[Kind, ...] = ("sglang", "vllm")


def scene(kind: Kind = "sglang", *, items: int = 20) -> tuple[Scene, PushFeed]:
    made = Scene(kind, items=items)
    feed = PushFeed("replica", made.path, made.tokens, made.sink, first_s=0.0)
    feed.attach(made.engine)
    return made, feed


@pytest.mark.parametrize("kind", KINDS)
def test_the_full_set_comes_each_five_seconds(kind: Kind) -> None:
    made, _ = scene(kind)
    made.serve(1.0, "a", "b")
    made.kernel.run(until_s=11.0)
    assert made.sink.calls == [(0.125, "snapshot of 0"), (5.125, "snapshot of 2"), (10.125, "snapshot of 2")]
    assert made.sink.pushed == set(made.tokens.hashes(b"a       b       "))


@pytest.mark.parametrize("kind", KINDS)
def test_evictions_of_100_ms_are_one_push(kind: Kind) -> None:
    made, _ = scene(kind, items=6)
    for number, prompt in enumerate(("ab", "cd", "ef", "gh")):
        made.serve(1.0 + number, *prompt)
    made.serve(6.0, "i", "j")
    made.serve(6.05, "k", "l")
    made.kernel.run(until_s=8.0)
    pushes = [(at_s, kind) for at_s, kind in made.sink.calls if at_s > 5.5]
    assert [at_s for at_s, _ in pushes] == [pytest.approx(6.225)]
    held = {own for key in made.keys for own in made.tokens.hashes(key)[: made.cached_items(key)]}
    assert made.sink.pushed <= held, "no phantom is left"


def test_a_lost_eviction_is_known_with_the_next_full_set() -> None:
    made, _ = scene(items=3)
    made.serve(1.0, "a", "b")
    made.at(5.5, partial(setattr, made.path, "faults", PathFaults(lost=1.0)))
    made.serve(6.0, "c", "d")
    made.at(7.0, partial(setattr, made.path, "faults", PathFaults()))
    made.kernel.run(until_s=9.9)
    assert made.sink.pushed == set(made.tokens.hashes(b"a       b       "))
    made.kernel.run(until_s=10.2)
    assert made.sink.pushed == set(made.tokens.hashes(b"c       d       "))


def test_an_engine_that_is_back_pushes_its_empty_cache() -> None:
    made, feed = scene()
    made.serve(1.0, "a")
    made.at(5.5, lambda: feed.attach(made.new_engine()))
    made.at(6.0, feed.started)
    made.kernel.run(until_s=6.2)
    assert made.sink.calls[-1] == (6.125, "snapshot of 0")


def test_a_flush_is_known_with_the_next_full_set() -> None:
    made, _ = scene()
    made.serve(1.0, "a")
    made.at(5.5, lambda: made.engine.flush())
    made.kernel.run(until_s=10.2)
    assert made.sink.pushed == set()
