"""What a measurement is known by, so that one that was made is not made again.

Owns the key: the task, its traffic, and how the code behaves on the fleet. Theory of operation: most edits of the code
under test change no run, and an hour of runs must not be thrown away for a renamed variable. So the key has no source
in it, but the outcome to the last bit of short runs: 1,200 requests of the task's policy at the highest load, and,
where a tuner is part of the task, a campaign in the same mode or a search of the twin along them. An edit that shows
only later than that, or in weights that no short run visits, is not noticed: remove OUT/runs after one.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, fields
from functools import cache
from typing import Any

from gorgo.apps.simulate import SimJob, run_once
from gorgo.sim.records import SimRecord
from tuner.campaign.options import CampaignOptions
from tuner.evidence.windows import Windows, paper_fleet
from tuner.offline.search import SearchOptions, search_weights
from tuner.offline.simulated_campaign import simulate_campaign
from tuner.offline.verdict import decide

#: Five minutes at the highest load: caches fill, queues build up, and every part of a request's life is met.
SHORT = Windows(shapes=("art-chat-apr5",), draw=0, limit=1200)
#: Of each shape, so that a change of the generator is noticed.
FEED = 200
#: Short enough for several decisions within the short run.
_HASTE: Mapping[str, Any] = {"warm_up_s": 10.0, "block_s": 20.0, "discard_s": 5.0, "rest_blocks": 1.0}


def key_of(task: Any, *, policy: str, shapes: Sequence[str], tuner: str | None) -> str:
    """32 hexadecimal digits.

    Parameters
    ----------
    task:
        A dataclass. Fields that have their default are left out, so that a new field leaves old keys as they are.
    policy, shapes:
        What is run on what.
    tuner:
        A campaign's mode, or `twin`; None where nothing tunes.
    """
    return _digest([_said(task), *(_feed(shape) for shape in shapes), _behaviour(policy, tuner)])


def _said(task: Any) -> str:
    told = {field.name: getattr(task, field.name) for field in fields(task) if not _is_default(task, field)}
    return f"{type(task).__name__} {sorted(told.items())!r}"


def _is_default(task: Any, field: Any) -> bool:
    return field.default is not MISSING and getattr(task, field.name) == field.default


@cache
def _feed(shape: str) -> str:
    feed = Windows(shapes=(shape,), draw=0, limit=FEED).feed()
    return _digest(
        (r.arrival_s, r.prompt_tokens, r.output_tokens, r.blocks, r.prefix_hash, r.session_id, r.body_bytes)
        for r in feed
    )


@cache
def _behaviour(policy: str, tuner: str | None) -> str:
    plain = _records(run_once(_job(policy, keep=True)).requests or ())
    return plain if tuner is None else plain + (_twin(policy) if tuner == "twin" else _campaign(policy, tuner))


def _campaign(policy: str, mode: str) -> str:
    options = CampaignOptions(mode=mode, **_HASTE)  # type: ignore[arg-type]
    run = simulate_campaign(_job(policy), options)
    rows = [(one.weights, one.n, one.objective_ms, one.accepted) for one in run.generations]
    return _digest((rows, run.rollbacks, _records(run.records)))


def _twin(policy: str) -> str:
    options = SearchOptions(candidates=2, seeds=1, held_out_seeds=2)
    job = _job(policy)
    search = search_weights(job, options)
    result = decide(job, search, options)
    figures = [(one.ttft_ms, one.e2e_s) for one in (search.start, search.best, result.before, result.after)]
    return _digest((result.weights, result.moved, search.best.weights, figures))


def _job(policy: str, *, keep: bool = False) -> SimJob:
    return SimJob(trace="short", feed=SHORT.feed(), policy=policy, fleet=paper_fleet(), keep_requests=keep)


def _records(records: Sequence[SimRecord]) -> str:
    return _digest((r.replica, r.error, r.ttft_ms, r.e2e_s) for r in records)


def _digest(parts: Iterable[object]) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(repr(part).encode() + b"\n")
    return digest.hexdigest()[:32]
