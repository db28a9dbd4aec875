"""Comparisons: variants over one feed, capacity, and what is served well beyond it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from math import exp, log, log2, sqrt
from typing import Any

import numpy as np
import pytest

from gorgo.core.limits import RouterLimits
from gorgo.errors import TraceError
from gorgo.lab.prompt_text import body_of
from gorgo.lab.results import ResultRow, Spread
from gorgo.lab.sim.engine.itl import ItlHistogram
from gorgo.lab.sim.records import SimRecord, SimResult
from gorgo.lab.sim.workload import SimRequest
from gorgo.lab.simulate import SimJob, SimulatedRun
from gorgo.lab.simulate.compare import (
    best_of_rows,
    e2e_s_p95,
    mean_interval,
    mean_row,
    ratio_of,
    ratio_of_rows,
    ttft_ms_p95,
)
from gorgo.lab.simulate.feed import feed_of, fingerprinted
from gorgo.lab.simulate.overload import at_once, capacity_scale, overload_rows, with_queue
from gorgo.lab.simulate.run import simulated_run
from gorgo.lab.traces import TraceRequest
from tests.lab.sim.fleets import three_regions


def row(policy: str, seed: int, p95: float | None, *, time_scale: float = 1.0, errors: int = 0) -> ResultRow:
    return ResultRow(
        trace="t",
        time_scale=time_scale,
        policy=policy,
        weights=None,
        seed=seed,
        source="simulated",
        n=10,
        errors=errors,
        ttft_ms=Spread(1.0, 1.0, p95, 3.0),
        e2e_s=Spread(),
        itl_ms=Spread(),
        cache_hit=None if policy == "floor" else 0.5,
        cache_hit_estimated=None,
        share={f"r{seed}": 1.0},
        prediction_error_ms=Spread(),
        slip_ms_p95=0.0,
    )


def test_a_ratio_is_the_geometric_mean_and_its_interval_holds_the_truth_19_times_in_20() -> None:
    rng = np.random.default_rng(0)
    held = 0
    for _ in range(400):
        common = rng.lognormal(6.0, 0.4, 10)
        ours = common * 0.9 * rng.lognormal(0.0, 0.03, 10)
        ratio = ratio_of(list(zip(ours.tolist(), common.tolist(), strict=True)))
        assert ratio is not None
        assert ratio.value == pytest.approx(exp(float(np.log(ours / common).mean())))
        assert ratio.low is not None
        assert ratio.high is not None
        held += ratio.low <= 0.9 <= ratio.high
    assert 365 <= held <= 395


def test_one_pair_has_a_ratio_without_an_interval_and_none_has_none() -> None:
    ratio = ratio_of([(1.0, 2.0)])
    assert ratio is not None
    assert (ratio.value, ratio.low, ratio.high, ratio.n) == (0.5, None, None, 1)
    assert ratio_of([]) is None
    assert ratio_of([(0.0, 1.0)]) is ratio_of([(1.0, 0.0)]) is None


@pytest.mark.parametrize(
    ("n", "t"), [(2, 12.706), (3, 4.303), (4, 3.182), (10, 2.262), (30, 2.045), (31, 2.042), (32, 2.042), (200, 2.042)]
)
def test_an_interval_is_student_s_by_the_number_of_pairs(n: int, t: float) -> None:
    """Logarithms of 1 and -1 in turn: their mean is 0, or 1 / n where one is left over."""
    mean = (n % 2) / n
    ratio = ratio_of([(exp((-1) ** turn), 1.0) for turn in range(n)])
    error = sqrt((n - n * mean**2) / (n - 1) / n)
    assert ratio is not None
    assert ratio.low is not None
    assert ratio.high is not None
    assert (log(ratio.value), log(ratio.low), log(ratio.high)) == pytest.approx(
        (mean, mean - t * error, mean + t * error)
    )


def test_rows_are_paired_by_seed_and_load() -> None:
    ours = [row("a", 1, 100.0), row("a", 2, 50.0), row("a", 1, 7.0, time_scale=2.0), row("a", 9, 1.0)]
    theirs = [row("b", 2, 100.0), row("b", 1, 400.0), row("b", 1, 7.0, time_scale=2.0), row("b", 8, 1.0)]
    ratio = ratio_of_rows(ours, theirs, ttft_ms_p95)
    assert ratio is not None
    assert ratio.n == 3
    assert ratio.value == pytest.approx(exp((log(0.25) + log(0.5)) / 3))
    assert ratio_of_rows(ours, theirs, e2e_s_p95) is None


def test_rows_of_unlike_settings_are_not_paired() -> None:
    ours = [replace(row("a", seed, 50.0), setting="without a queue") for seed in (1, 2)]
    unlike = replace(row("b", 1, 400.0), setting="with a queue")
    unknown = row("b", 1, 400.0)
    like = replace(row("b", 2, 100.0), setting="without a queue")
    assert ratio_of_rows(ours, [unlike, unknown], ttft_ms_p95) is None
    ratio = ratio_of_rows(ours, [unlike, unknown, like], ttft_ms_p95)
    assert ratio is not None
    assert ratio.n == 1
    assert ratio.value == pytest.approx(0.5)


def test_a_mean_row_has_means_of_quantiles_and_sums_of_counts() -> None:
    mean = mean_row([row("a", 1, 100.0, errors=1), row("a", 2, 50.0, errors=2), row("a", 3, None)])
    assert (mean.ttft_ms.p95, mean.ttft_ms.p50, mean.e2e_s.p95) == (75.0, 1.0, None)
    assert (mean.n, mean.errors, mean.seed) == (30, 3, 1)
    assert mean.share == pytest.approx({"r1": 1 / 3, "r2": 1 / 3, "r3": 1 / 3})
    assert mean_row([row("a", 1, 5.0)]) == row("a", 1, 5.0)


def test_a_mean_row_has_the_mean_of_each_measure_over_the_rows_that_know_it() -> None:
    one = replace(
        row("a", 1, 10.0),
        e2e_s=Spread(1.0, 2.0, 3.0, 4.0),
        itl_ms=Spread(5.0, 6.0, 7.0, 8.0),
        cache_hit_estimated=0.5,
        prediction_error_ms=Spread(9.0, 10.0, 11.0),
        slip_ms_p95=1.0,
    )
    other = replace(
        row("a", 2, 30.0),
        e2e_s=Spread(3.0, 4.0, 5.0, 6.0),
        itl_ms=Spread(7.0, 8.0, 9.0, 10.0),
        cache_hit=0.75,
        prediction_error_ms=Spread(11.0, 12.0, 13.0),
        slip_ms_p95=None,
    )
    mean = mean_row([one, other])
    assert mean.ttft_ms == Spread(1.0, 1.0, 20.0, 3.0)
    assert mean.e2e_s == Spread(2.0, 3.0, 4.0, 5.0)
    assert mean.itl_ms == Spread(6.0, 7.0, 8.0, 9.0)
    assert mean.prediction_error_ms == Spread(10.0, 11.0, 12.0)
    assert (mean.cache_hit, mean.cache_hit_estimated, mean.slip_ms_p95) == (0.625, 0.5, 1.0)
    # A replica that one row does not name served nothing there.
    assert mean.share == {"r1": 0.5, "r2": 0.5}


def test_the_best_is_the_least_mean_of_those_that_know_it() -> None:
    groups = {"a": [row("a", 1, 9.0), row("a", 2, 2.0)], "b": [row("b", 1, 5.0)], "c": [row("c", 1, None)]}
    assert best_of_rows(groups, ttft_ms_p95) == "b"
    assert best_of_rows({"c": groups["c"]}, ttft_ms_p95) is None
    assert best_of_rows({"a": [replace(groups["a"][0])]}, lambda row: row.ttft_ms.p50) == "a"


def test_the_interval_of_a_mean_is_student_s_and_one_value_has_none() -> None:
    assert mean_interval([3.0]) == (3.0,)
    assert mean_interval([1.0, 2.0, 3.0]) == pytest.approx((2.0, 2.0 - 4.303 / 3**0.5, 2.0 + 4.303 / 3**0.5))


# --- Capacity, and what is served well beyond it.


def feed(requests: int = 240, *, prompt_tokens: int = 4000) -> list[SimRequest]:
    """Prompts that nobody has asked before, ten a second."""
    rng = np.random.default_rng(5)
    arrivals = np.cumsum(rng.exponential(0.1, requests))
    return [
        SimRequest(
            index=number,
            arrival_s=float(at),
            prompt_tokens=prompt_tokens,
            output_tokens=20,
            blocks=rng.bytes(8 * (prompt_tokens // 512)),
            prefix_hash=number,
        )
        for number, at in enumerate(arrivals)
    ]


def job(**options: object) -> SimJob:
    given: dict[str, object] = {"trace": "made", "policy": "gorgo-ms", "fleet": three_regions(), "feed": feed()}
    return SimJob(**given | options)  # type: ignore[arg-type]


@dataclass
class FakeRuns:
    """Runs of twenty requests of which one fails, and two at a time scale below `least`; given back in reverse."""

    least: float
    jobs: list[SimJob] = field(default_factory=list)

    def __call__(self, jobs: Sequence[SimJob], **_options: object) -> Iterator[SimulatedRun]:
        self.jobs += jobs
        for one in reversed(jobs):
            failed = 1 if one.time_scale >= self.least else 2
            records = [
                SimRecord(id="r", scheduled_s=n, sent_s=n, input_tokens=1, ttft_ms=2000.0 + (n < failed), e2e_s=10.0)
                for n in range(20)
            ]
            yield simulated_run(one, {}, SimResult(records, ItlHistogram(), ended_s=20.0, events=1))


def bounded(**overload: Any) -> RouterLimits:
    return replace(RouterLimits(), overload=replace(RouterLimits().overload, **overload))


def faked(monkeypatch: pytest.MonkeyPatch, *, least: float) -> FakeRuns:
    runs = FakeRuns(least)
    monkeypatch.setattr("gorgo.lab.simulate.overload.run_many", runs)
    return runs


@pytest.mark.parametrize(
    ("least", "capacity", "tried"),
    [
        # Halves or doubles up to one on either side; then geometric means until two are within 5 %.
        (1.0, 1.0, [0, -1, -0.5, -0.25, -0.125, -0.0625]),
        (0.3, 2**-1.6875, [0, -1, -2, -1.5, -1.75, -1.625, -1.6875]),
        (3.0, 2**1.625, [0, 1, 1, 2, 1.5, 1.75, 1.625, 1.5625]),
        (1 / 63, 2**-5.9375, [0, -1, -2, -3, -4, -5, -6, -5.5, -5.75, -5.875, -5.9375]),
        (64.0, 64.0, [0, 1, 2, 3, 4, 5, 6, 5.5, 5.75, 5.875, 5.9375]),
    ],
)
def test_capacity_is_the_least_time_scale_at_which_95_percent_are_good(
    least: float, capacity: float, tried: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = faked(monkeypatch, least=least)
    assert capacity_scale(job(limits=bounded(queue_enabled=True))) == pytest.approx(capacity)
    assert sorted({log2(one.time_scale) for one in runs.jobs}) == pytest.approx(sorted(set(tried)))
    assert all(one.limits == at_once(RouterLimits()) for one in runs.jobs)


@pytest.mark.parametrize(
    ("least", "advice"), [(64.1, "leave out the longest with --max-input"), (1 / 65, "take more requests")]
)
def test_a_capacity_that_no_time_scale_shows_is_an_error_with_advice(
    least: float, advice: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    faked(monkeypatch, least=least)
    with pytest.raises(TraceError, match=advice):
        capacity_scale(job())


def test_a_trace_without_a_request_has_no_capacity() -> None:
    with pytest.raises(TraceError, match="no requests"):
        capacity_scale(job(feed=()))


def test_rows_are_two_per_load_and_queued_ones_alone_have_a_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    runs = faked(monkeypatch, least=1.0)
    rows = overload_rows(job(), capacity=2.0, loads=(4.0, 1.0))
    assert [(row.load, row.time_scale, row.queueing) for row in rows] == [
        (4.0, 0.5, False),
        (4.0, 0.5, True),
        (1.0, 2.0, False),
        (1.0, 2.0, True),
    ]
    assert [row.goodput.good for row in rows] == [0.9, 0.9, 0.95, 0.95]
    assert [row.row.time_scale for row in rows] == [0.5, 0.5, 2.0, 2.0]
    assert [one.slo_ttft_ms for one in runs.jobs] == [None, 2000.0] * 2
    assert [one.limits for one in runs.jobs] == [at_once(RouterLimits()), with_queue(RouterLimits())] * 2


def test_the_configured_deadline_and_goal_go_before_those_of_goodput(monkeypatch: pytest.MonkeyPatch) -> None:
    runs = faked(monkeypatch, least=1.0)
    limits = bounded(queue_enabled=True, slo_ttft_s=0.7, slo_e2e_s=9.0)
    overload_rows(job(limits=limits), capacity=2.0, loads=(1.0,))
    assert [one.slo_ttft_ms for one in runs.jobs] == [None, 700.0]
    assert runs.jobs[1].limits == limits
    assert with_queue(RouterLimits()).overload.slo_e2e_s == 10.0


def test_beyond_capacity_holding_serves_more_in_time_and_as_much_at_three_times_the_load() -> None:
    limits = bounded(max_concurrency_per_replica=20)
    rows = overload_rows(job(limits=limits), capacity=capacity_scale(job()), loads=(0.7, 1.3, 3.0), n_jobs=1)
    found = {(row.load, row.queueing): row.goodput for row in rows}
    # All prompts are alike here, so 1 / 1.3 of them is what the engines can do.
    assert found[1.3, True].good >= 0.97 / 1.3 > found[1.3, False].good + 0.1
    assert found[3.0, True].per_s >= 0.9 * found[1.3, True].per_s
    assert abs(found[0.7, True].good - found[0.7, False].good) <= 0.01
    assert found[3.0, True].rejected > 0.0 == found[0.7, False].rejected


def test_at_once_nothing_is_queued_or_hedged_and_with_a_queue_the_configured_bounds_hold() -> None:
    limits = bounded(queue_enabled=False, max_concurrency_per_replica=7)
    assert with_queue(limits) == bounded(queue_enabled=True, max_concurrency_per_replica=7, slo_e2e_s=10.0)
    assert (at_once(limits).overload.queue_enabled, at_once(limits).hedging.budget_ratio) == (False, 0.0)


def row_feed(index: int, tokens: int, ids: tuple[int, ...], at_s: float = 0.0) -> TraceRequest:
    return TraceRequest(index=index, timestamp_s=at_s, input_tokens=tokens, output_tokens=7, hash_ids=ids)


def test_full_blocks_go_in_by_their_ids_and_the_rest_is_nobody_s() -> None:
    first, second = feed_of([row_feed(0, 1100, (5, 6, 7)), row_feed(1, 1024, (5, 6))])
    assert first.blocks == second.blocks
    assert first.blocks == (5).to_bytes(8, "little") + (6).to_bytes(8, "little")
    assert first.prefix_hash == second.prefix_hash
    assert (first.prompt_tokens, first.output_tokens) == (1100, 7)


def test_ids_wider_than_a_block_s_hash_are_cut_to_it() -> None:
    (request,) = feed_of([row_feed(0, 512, (2**70 + 3,))])
    assert request.blocks == (3).to_bytes(8, "little")


def test_a_body_is_as_large_as_the_one_that_a_replay_sends() -> None:
    request = row_feed(3, 700, (1, 2))
    (simulated,) = feed_of([request])
    assert abs(simulated.body_bytes - len(body_of(request, "model"))) <= 2, "but for the digits of its output's length"


def a_turn(index: int, tokens: int, ids: tuple[int, ...], *, user: str | None = "u", output: int = 200) -> TraceRequest:
    return TraceRequest(
        index=index, timestamp_s=float(index), input_tokens=tokens, output_tokens=output, hash_ids=ids, user=user
    )


def test_an_answer_is_what_the_next_prompt_of_its_conversation_goes_on_with() -> None:
    """1,000 prompt and 200 output tokens are two full blocks; the next prompt says which is the second."""
    rows = [
        a_turn(0, 1000, (1, 9)),
        a_turn(1, 1000, (1, 5), user="another"),
        a_turn(2, 1800, (1, 2, 3, 8)),
        a_turn(3, 2600, (1, 2, 3, 4, 6, 7)),
    ]
    first, other, second, last = feed_of(rows, with_outputs=True)
    assert first.output_blocks == (2).to_bytes(8, "little")
    assert other.output_blocks == b"", "no later prompt of that user"
    assert second.output_blocks == b"", "2,000 tokens have three full blocks, as the prompt has"
    assert last.output_blocks == b"", "no later prompt"
    assert all(request.output_blocks == b"" for request in feed_of(rows)), "a replay generates another text"


def test_an_answer_without_a_known_user_or_without_a_full_block_is_never_cached() -> None:
    rows = [a_turn(0, 1000, (1, 9), user=None), a_turn(1, 400, (7,)), a_turn(2, 1800, (1, 2, 3, 8), user=None)]
    assert [request.output_blocks for request in feed_of(rows, with_outputs=True)] == [b"", b"", b""]


def test_time_scale_stretches_arrivals_once() -> None:
    assert [r.arrival_s for r in feed_of([row_feed(0, 1, (), 0.0), row_feed(1, 1, (), 3.0)], time_scale=2.0)] == [
        0.0,
        6.0,
    ]


def test_rows_that_only_a_body_tells_are_known_by_their_text() -> None:
    body = {"messages": [{"role": "user", "content": "word" * 1200}]}
    longer = {"messages": [{"role": "user", "content": "word" * 1200 + "more" * 900}]}
    rows = [
        TraceRequest(index=n, timestamp_s=0.0, input_tokens=tokens, output_tokens=1, body=each)
        for n, (tokens, each) in enumerate(((1200, body), (2100, longer), (1200, None)))
    ]
    short, long, unknown = feed_of(rows)
    assert len(short.blocks) == 2 * 8
    assert long.blocks.startswith(short.blocks)
    assert short.prefix_hash == long.prefix_hash != unknown.prefix_hash
    assert unknown.blocks == b""


@pytest.mark.parametrize(
    "changes",
    [{"hash_ids": (1, 2)}, {}, {"body": {"messages": [{"role": "user", "content": "word" * 1024}]}}],
    ids=["ids", "nothing", "text"],
)
def test_a_request_keeps_its_place_time_and_lengths(changes: dict[str, Any]) -> None:
    request = TraceRequest(**{"index": 3, "timestamp_s": 5.0, "input_tokens": 1024, "output_tokens": 7} | changes)
    (found,) = feed_of([request], time_scale=0.5)
    assert (found.index, found.arrival_s, found.prompt_tokens, found.output_tokens) == (3, 2.5, 1024, 7)
    assert len(found.blocks) == (0 if not changes else 16)
    assert abs(found.body_bytes - len(body_of(request, "model"))) <= 2
    (seen,) = fingerprinted([request], model="model", key=7, block_bytes=256, time_scale=0.5)
    assert (seen.index, seen.arrival_s, seen.prompt_tokens, seen.output_tokens) == (3, 2.5, 1024, 7)
    assert (len(seen.blocks), seen.body_bytes) == (8 * 1024 // 64, len(body_of(request, "model")))


@pytest.mark.parametrize("ids", [(), (5, 6)], ids=["text", "text and ids"])
def test_ends_of_messages_come_from_the_body_in_proportion_to_its_text(ids: tuple[int, ...]) -> None:
    messages = [{"role": "system", "content": "a" * 100}, {"role": "user", "content": "b" * 300}]
    request = TraceRequest(0, 0.0, 1024, 1, ids, {"messages": messages})
    assert [simulated.boundaries for simulated in feed_of([request])] == [(256, 1024)]
    assert [seen.boundaries for seen in fingerprinted([request], model="m", key=7, block_bytes=256)] == [(25, 100)]


def test_the_last_block_counts_once_it_is_full() -> None:
    rows = [row_feed(n, tokens, tuple(range(9))) for n, tokens in enumerate((511, 512, 1023, 1024))]
    assert [len(request.blocks) // 8 for request in feed_of(rows)] == [0, 1, 1, 2]


@pytest.mark.parametrize(
    "request_",
    [
        row_feed(3, 1100, (5, 6, 7)),
        row_feed(3, 100, (5,)),
        row_feed(3, 700, ()),
        TraceRequest(3, 0.0, 1024, 1, (5, 6), body={"messages": [{"role": "system", "content": "word" * 1024}]}),
    ],
    ids=["ids", "short", "nothing", "text and ids"],
)
def test_affinity_goes_by_the_first_256_tokens_as_in_a_replay(request_: TraceRequest) -> None:
    (simulated,) = feed_of([request_])
    (replayed,) = fingerprinted([request_], model="m", key=7, block_bytes=256)
    assert simulated.prefix_hash == replayed.prefix_hash


def test_bodies_that_differ_after_256_tokens_have_one_hash_whatever_their_ids() -> None:
    rows = [
        TraceRequest(n, 0.0, 600, 1, ids, body={"messages": [{"role": "user", "content": "word" * 300 + end * 300}]})
        for n, (ids, end) in enumerate((((1, 2), "more"), ((3, 4), "less")))
    ]
    first, second = feed_of(rows)
    assert first.prefix_hash == second.prefix_hash


def test_prompts_without_ids_or_text_are_nobody_s_but_their_own() -> None:
    first, second = feed_of([row_feed(0, 600, ()), row_feed(1, 600, ())])
    assert first.prefix_hash != second.prefix_hash
    assert first.blocks == second.blocks == b""


def test_prompts_share_as_many_fingerprinted_blocks_as_they_share_text() -> None:
    one, two = fingerprinted(
        [row_feed(0, 1536, (1, 2, 3)), row_feed(1, 1536, (1, 2, 9))], model="m", key=7, block_bytes=256
    )
    assert one.prompt_tokens == 1536
    assert len(one.blocks) == 8 * 1536 // 64
    assert one.blocks[: 8 * 16] == two.blocks[: 8 * 16]
    assert one.blocks[8 * 16 :] != two.blocks[8 * 16 :]
    assert one.prefix_hash == two.prefix_hash


def test_small_blocks_identify_a_prompt_by_its_first_256_tokens() -> None:
    blocks = tuple(range(100, 120))
    long, short = feed_of([row_feed(0, 320, blocks), row_feed(1, 90, blocks[:6])], block_tokens=16)
    assert (len(long.blocks), len(short.blocks)) == (20 * 8, 5 * 8)
    (other,) = feed_of([row_feed(0, 320, (*blocks[:16], 7, 8, 9, 10))], block_tokens=16)
    assert long.prefix_hash == other.prefix_hash != short.prefix_hash
