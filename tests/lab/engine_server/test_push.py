"""The mirror of a cache beside the caches of both kinds of simulated engine."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gorgo.core.prefix.kv_source import chain_hashes
from gorgo.lab.engine_server.push import CacheMirror
from gorgo.lab.sim.engine.engines import Engine, make_engine
from gorgo.lab.sim.engine.request import EngineRequest
from tests.lab.engine_server.conftest import QUICK

PROMPT = b"".join(b"%04d" % number for number in range(64))


def test_block_with_two_copies_is_evicted_with_the_second_one() -> None:
    mirror = CacheMirror(block_tokens=1)
    mirror.stored([7], None, b"aaaa")
    mirror.stored([7], None, b"aaaa")
    mirror.removed([7])
    assert (len(mirror.blocks()), len(mirror.take_evicted())) == (1, 0)
    mirror.removed([7])
    assert (len(mirror.blocks()), len(mirror.take_evicted())) == (0, 1)


def test_block_stored_again_before_the_push_is_not_evicted() -> None:
    mirror = CacheMirror(block_tokens=1)
    mirror.stored([7], None, b"aaaa")
    mirror.removed([7])
    mirror.stored([7], None, b"aaaa")
    assert (len(mirror.blocks()), len(mirror.take_evicted())) == (1, 0)


def test_block_behind_an_unknown_one_is_left_out() -> None:
    mirror = CacheMirror(block_tokens=1)
    mirror.stored([8], 7, b"bbbb")
    mirror.removed([8, 9])
    assert (len(mirror.blocks()), len(mirror.take_evicted())) == (0, 0)


def test_cleared_cache_has_no_evictions_and_needs_a_whole_push() -> None:
    mirror = CacheMirror(block_tokens=1)
    mirror.stored([7], None, b"aaaa")
    mirror.cleared()
    assert (len(mirror.blocks()), len(mirror.take_evicted()), mirror.was_cleared) == (0, 0, True)


@pytest.mark.parametrize("scheduler", ["sglang", "vllm"])
def test_mirror_of_an_engine_has_the_own_hashes_of_its_prompt(scheduler: str) -> None:
    engine: Engine[EngineRequest] = make_engine(replace(QUICK, scheduler=scheduler))  # type: ignore[arg-type]
    size = engine.cache.event_tokens
    mirror = CacheMirror(block_tokens=size)
    engine.cache.report_to(mirror)
    engine.submit(EngineRequest(PROMPT, prompt_tokens=64, output_tokens=2), now=0.0)
    now = 0.0
    while (step := engine.start_step(now=now)) is not None:
        engine.finish_step(step)
        now = step.ends_s
    expected = chain_hashes(PROMPT, block_tokens=size)
    assert set(expected) <= set(mirror.blocks().tolist())
    assert len(expected) > 0
    engine.flush()
    assert len(mirror.blocks()) == 0
