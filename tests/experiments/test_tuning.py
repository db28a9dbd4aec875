"""Measurements of the tuner on windows of a few requests."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np

from experiments import runner
from experiments.runner import run_key
from experiments.tuning import Search, TuningTask, Windows


def windows(count: int = 1, draw: int = 0) -> Windows:
    return Windows(shapes=("art-chat-apr5",) * count, draw=draw, limit=40)


def test_windows_follow_one_another_and_share_no_prompt() -> None:
    feed = windows(2).feed()
    first, second = feed[:40], feed[40:]
    assert [request.index for request in feed] == list(range(80))
    arrivals = [request.arrival_s for request in feed]
    assert arrivals == sorted(arrivals)
    blocks = [{bytes(block) for r in part for block in np.frombuffer(r.blocks, "V8")} for part in (first, second)]
    assert blocks[0]
    assert not blocks[0] & blocks[1]
    assert first == windows(1).feed()


def test_what_a_figure_depends_on_is_in_the_key() -> None:
    task = TuningTask(windows=windows(), policy="gorgo")
    others = [
        replace(task, windows=windows(draw=1)),
        replace(task, policy="gorgo-ms"),
        replace(task, campaign=(("mode", "paper"),)),
        replace(task, search=Search(candidates=1, seeds=1, held_out_seeds=1)),
        replace(task, later=(10, (("w_rtt", 1.0),))),
    ]
    assert len({task.key(), *(other.key() for other in others)}) == 6


def test_the_key_changes_with_the_code_of_the_tuner(tmp_path: Path) -> None:
    file = tmp_path / "part.py"
    keys = set()
    for text in ("one = 1\n", "one = 2\n"):
        file.write_text(text)
        runner._code_digest.cache_clear()
        keys.add(run_key("gorgo", ["art-chat-apr5"], [], code=[file]))
    assert len(keys) == 2


def test_weights_put_later_are_in_force_from_then_on() -> None:
    far = (("w_queue", 1e-6), ("w_rtt", 2.0))
    task = TuningTask(windows=windows(), policy="gorgo", after=20)
    put, always = replace(task, later=(20, far)).run(), replace(task, weights=far).run()
    plain = task.run()
    assert put.tail != plain.tail
    assert put.whole != always.whole


def test_a_campaign_and_a_search_are_tasks_too() -> None:
    short = (("hop", 4), ("max_generations", 2), ("mode", "paper"), ("warm_up_s", 1.0), ("window", 8))
    assert TuningTask(windows=windows(), policy="gorgo", campaign=short).run().generations >= 2
    sizes = Search(candidates=1, seeds=1, held_out_seeds=2)
    searched = TuningTask(windows=windows(), policy="gorgo", search=sizes).run()
    assert searched.generations == 2
    assert searched.reasons
