"""Made traces: each distribution from a known uniform number, rows with their order and blocks, and what prompts
share.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import astuple, dataclass, replace
from functools import lru_cache
from itertools import groupby, islice, pairwise, product
from pathlib import Path
from statistics import fmean, median, quantiles
from typing import Any

import numpy as np
import pytest

from gorgo.errors import TraceError
from gorgo.lab.datasets import (
    AgentsShape,
    GroupsShape,
    HerdShape,
    PoissonShape,
    RagShape,
    SharingShape,
    UsersShape,
    describe_trace,
    generate_requests,
    load_requests,
    own_block_tokens,
    read_shape,
    shapes,
)
from gorgo.lab.datasets.catalogue import generate_trace
from gorgo.lab.datasets.shape import RandomDraws
from gorgo.lab.datasets.synthetic import MadeRow, as_lines, as_requests
from gorgo.lab.datasets.users import agent_rows, herd_rows, quantile, rag_rows, sharing_rows, user_rows
from gorgo.lab.traces import TraceRequest

# --- Each distribution from a known uniform number, and the bytes of every kind of shape.


def drawing(*uniform: float) -> RandomDraws:
    """RandomDraws that see these numbers in turn."""
    draws, numbers = RandomDraws(0), iter(uniform)
    draws.uniform = lambda: next(numbers)
    return draws


def test_the_same_seed_draws_the_same_and_another_one_something_else() -> None:
    first, again, other = (RandomDraws(seed) for seed in (5, 5, 6))
    assert [first.uniform() for _ in range(3)] == [again.uniform() for _ in range(3)]
    assert RandomDraws(5).uniform() != other.uniform()


def test_an_exponential_is_its_mean_times_the_logarithm() -> None:
    assert drawing(0.0).exponential(3.0) == 0.0
    # Half of all are below ln 2 of the mean.
    assert drawing(0.5).exponential(3.0) == pytest.approx(3.0 * 0.693147)


@pytest.mark.parametrize(
    ("first", "second", "normal"),
    # A quarter turn is 0, half a turn the opposite: sqrt(2 ln 2) is 1.177410.
    [(0.5, 0.0, 1.177410), (0.5, 0.5, -1.177410), (0.5, 0.25, 0.0), (0.0, 0.3, 0.0)],
)
def test_a_log_normal_is_its_median_times_e_to_a_normal(first: float, second: float, normal: float) -> None:
    expected = 10.0 * 2.718281828 ** (0.5 * normal)
    assert drawing(first, second).log_normal(10.0, 0.5) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize(
    ("mean", "uniform", "count"),
    # Of a mean of 4 a quarter of all ends with each: 1 up to 1/4, 2 up to 7/16, 3 up to 37/64.
    [(4.0, 0.0, 1), (4.0, 0.24, 1), (4.0, 0.26, 2), (4.0, 0.43, 2), (4.0, 0.44, 3), (4.0, 0.57, 3), (4.0, 0.58, 4)],
)
def test_a_geometric_ends_with_each_turn_with_the_same_chance(mean: float, uniform: float, count: int) -> None:
    assert drawing(uniform).geometric(mean) == count


@pytest.mark.parametrize("mean", [1.0, 0.5])
def test_a_geometric_of_one_at_most_is_one(mean: float) -> None:
    assert drawing(0.999).geometric(mean) == 1


@pytest.mark.parametrize(
    ("uniform", "rank"),
    # Of three, 6/11, 3/11 and 2/11.
    [(0.0, 0), (0.545, 0), (0.546, 1), (0.818, 1), (0.819, 2), (0.999, 2), (1.0, 2)],
)
def test_a_rank_is_in_proportion_to_one_over_it(uniform: float, rank: int) -> None:
    assert drawing(uniform).rank(3) == rank


@pytest.mark.parametrize(("uniform", "found"), [(0.0, 0), (0.249, 0), (0.25, 1), (0.999, 3), (1.0, 3)])
def test_numbers_below_a_count_are_equally_likely(uniform: float, found: int) -> None:
    assert drawing(uniform).below(4) == found


@pytest.mark.parametrize(
    ("uniform", "mixed"),
    [([0.0, 0.0, 0.0], "bcda"), ([0.9, 0.9, 0.9], "abcd"), ([0.3, 0.0, 0.9], "cdab")],
)
def test_items_are_exchanged_from_the_last_to_the_second(uniform: Sequence[float], mixed: str) -> None:
    items = list("abcd")
    assert "".join(drawing(*uniform).shuffled(items)) == mixed
    assert items == list("abcd")


def test_a_shape_gives_the_same_bytes_on_every_machine_and_every_python() -> None:
    """Shipped traces are held to their shapes elsewhere; of this kind none is shipped."""
    shape = read_shape(shapes()["wildchat-like"])
    assert isinstance(shape, PoissonShape)
    made = generate_trace(replace(shape, duration_s=120.0))
    assert hashlib.sha256(made).hexdigest()[:16] == "f416e89673678ec2"


# --- Made rows as a trace: order, times, and which blocks are the same.


def row(timestamp_ms: int, tokens: int, **more: Any) -> MadeRow:
    given: dict[str, Any] = {"shared": ("system", 1), "shared_tokens": 1024, "own": ("text", 1), "output_tokens": 7}
    return MadeRow(timestamp_ms=timestamp_ms, input_tokens=tokens, **given | more)


def test_blocks_of_a_shared_beginning_are_everybody_s_and_a_block_that_grows_is_another() -> None:
    """Blocks of 512 tokens: two of the system prompt, then the row's own."""
    rows = [
        row(0, 1300),
        row(1, 1536),
        row(2, 2000),
        row(3, 1536, own=("text", 2)),
        # One token of the second block lies behind the shared text: then it is the row's own.
        row(4, 1536, own=("text", 3), shared_tokens=1023),
        row(5, 512),
    ]
    assert [request.hash_ids for request in as_requests(rows)] == [
        (0, 1, 2),
        (0, 1, 3),
        (0, 1, 3, 4),
        (0, 1, 5),
        (0, 6, 7),
        (0,),
    ]


def test_rows_are_in_the_order_of_time_and_numbered_so() -> None:
    rows = [row(2500, 512, user="b", turn=2), row(500, 600, own=("text", 9))]
    first, second = as_requests(rows)
    assert [(one.index, one.timestamp_s, one.input_tokens, one.output_tokens) for one in (first, second)] == [
        (0, 0.5, 600, 7),
        (1, 2.5, 512, 7),
    ]
    assert [(one.user, one.turns) for one in (first, second)] == [(None, None), ("b", 2)]
    assert [json.loads(line) for line in as_lines(rows).splitlines()] == [
        {"timestamp": 500, "input_length": 600, "output_length": 7, "hash_ids": [0, 1]},
        {"timestamp": 2500, "input_length": 512, "output_length": 7, "hash_ids": [0], "user_id": "b", "turn": 2},
    ]


@pytest.fixture(scope="module")
def shape() -> PoissonShape:
    found = read_shape(shapes()["wildchat-like"])
    assert isinstance(found, PoissonShape)
    return found


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_wildchat_s_figures_are_met_within_a_tenth(shape: PoissonShape, seed: int) -> None:
    figures = describe_trace(generate_requests(replace(shape, seed=seed)))
    assert figures.requests_per_s == pytest.approx(11.4, rel=0.03)
    assert figures.input_mean == pytest.approx(840, rel=0.1)
    assert figures.block_reuse == pytest.approx(0.0495, rel=0.1)


def test_arrivals_are_poisson(shape: PoissonShape) -> None:
    """Exponential gaps vary by as much as their mean, and so do the counts of a second."""
    times = [request.timestamp_s for request in generate_requests(shape)]
    gaps, counts = np.diff(times), np.histogram(times, 1800, (0, 1800))[0]
    assert gaps.std() / gaps.mean() == pytest.approx(1, abs=0.05)
    assert counts.var() / counts.mean() == pytest.approx(1, abs=0.15)


def test_who_asks_on_does_so_behind_what_was_said_and_after_a_while(shape: PoissonShape) -> None:
    last: dict[str | None, tuple[float, tuple[int, ...], int]] = {}
    continued = 0
    for request in generate_requests(replace(shape, duration_s=600.0)):
        if request.user in last:
            time_s, ids, tokens = last[request.user]
            assert request.timestamp_s - time_s >= shape.continue_after_s - 0.001
            assert request.hash_ids[: tokens // 512] == ids[: tokens // 512]
            continued += 1
        last[request.user] = (request.timestamp_s, request.hash_ids, request.input_tokens)
    assert continued > 300


def test_a_shape_without_continuation_reuses_nothing(shape: PoissonShape) -> None:
    assert describe_trace(generate_requests(replace(shape, continue_share=0.0, duration_s=200.0))).block_reuse == 0


# --- Shapes by what their prompts share, against the published figures of the traffic that they follow.


#: Mooncake's release (FAST'25, appendix; the data set's card has the counts): requests, mean input and output tokens,
#: and the ratio of the cache that hits.
MOONCAKE = {"toolagent-like": (23_608, 8_596, 182, 0.59), "synthetic-like": (3_993, 15_325, 149, 0.66)}


@pytest.mark.system
@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("name", MOONCAKE)
def test_mooncake_s_figures_are_met_within_a_tenth(name: str, seed: int) -> None:
    found = describe_trace(load_requests(name, seed=seed))
    figures = (found.requests, found.input_mean, found.output_mean, found.block_reuse)
    assert figures == pytest.approx(MOONCAKE[name], rel=0.1)


def groups(name: str, **changes: object) -> GroupsShape:
    shape = read_shape(shapes()[name])
    assert isinstance(shape, GroupsShape)
    return replace(shape, **changes)  # type: ignore[arg-type]


def test_groups_have_the_lengths_of_the_benchmark_that_they_follow() -> None:
    requests = generate_requests(groups("groups", duration_s=200.0), block_tokens=64)
    first = [request for request in requests if request.turns == 1]
    assert {request.input_tokens for request in first} == {2048 + 128}
    assert {request.output_tokens for request in requests} == {256}
    # Each turn adds the last answer and a question.
    assert {request.input_tokens - 2176 - 384 * ((request.turns or 1) - 1) for request in requests} == {0}
    # Users of one group share its system prompt of 32 blocks, and nothing else.
    heads = {request.hash_ids[31] for request in requests}
    assert 50 <= len(heads) <= 64
    assert len({request.hash_ids[32] for request in first}) == len(first)


def test_users_pause_between_their_requests_and_keep_their_group() -> None:
    shape = groups("groups", duration_s=300.0)
    last: dict[str | None, tuple[float, int]] = {}
    for request in generate_requests(shape, block_tokens=64):
        if request.user in last:
            before_s, head = last[request.user]
            assert request.timestamp_s - before_s >= shape.think_s_min - 0.001
            assert request.hash_ids[31] == head
        last[request.user] = (request.timestamp_s, request.hash_ids[31])


def test_a_user_waits_for_the_answer_that_the_next_request_goes_on_with() -> None:
    shape = replace(groups("groups", duration_s=300.0), answer_token_s=0.05)
    last: dict[str | None, float] = {}
    for request in generate_requests(shape, block_tokens=64):
        assert request.timestamp_s >= last.get(request.user, 0.0) - 0.001
        last[request.user] = request.timestamp_s + shape.think_s_min + 0.05 * request.output_tokens


def test_messages_end_where_answers_begin() -> None:
    answers: dict[int, tuple[int, int]] = {}
    turns = 0
    for request in generate_requests(groups("groups", duration_s=300.0), block_tokens=64):
        ends = list(request.boundaries)
        assert ends == sorted(ends)
        assert ends[-1] == request.input_tokens
        if request.turns is not None and request.turns > 1:
            turns += 1
            prompt, answer = answers[request.hash_ids[32]]
            assert {prompt, prompt + answer} <= set(ends)
        answers[request.hash_ids[32]] = request.input_tokens, request.output_tokens
    assert turns > 10


@pytest.mark.parametrize("seed", [0, 1])
def test_short_chat_has_the_means_of_lmsys_chat_within_a_tenth(seed: int) -> None:
    """Table 1 of LMSYS-Chat-1M: 2.0 turns, 69.5 tokens a question, 214.5 an answer; the window cuts conversations."""
    requests = load_requests("short-chat", seed=seed)
    first = [request.input_tokens - 48 for request in requests if request.turns == 1]
    assert len(requests) / len(first) == pytest.approx(2.0, rel=0.1)
    assert sum(first) / len(first) == pytest.approx(69.5, rel=0.1)
    assert describe_trace(requests).output_mean == pytest.approx(214.5, rel=0.1)


def test_rag_has_the_lengths_of_ragpulse_within_a_tenth() -> None:
    """RAGPulse: prompts of 1,050 to 7,710 tokens; means over 59 consecutive rows of its trace, 2,959 and 198."""
    requests = load_requests("rag")
    found = describe_trace(requests)
    assert (found.input_mean, found.output_mean) == pytest.approx((2_959, 198), rel=0.1)
    inputs = sorted(request.input_tokens for request in requests)
    assert inputs[0] == pytest.approx(1_050, rel=0.1)
    assert inputs[-1] <= 7_710


def test_retrieved_documents_are_shared_as_far_as_their_order_agrees() -> None:
    shape = read_shape(shapes()["rag"])
    assert isinstance(shape, RagShape)
    shape = replace(shape, documents=3, plain_share=0.0, retrieved=2, question_sigma=0.0, document_sigma=0.0)
    rows = list(islice(rag_rows(shape), 300))
    assert all(len({name for name, _ in row.parts}) == 2 for row in rows), "distinct documents"
    requests = generate_requests(replace(shape, duration_s=30.0), block_tokens=1)
    orders = {request.hash_ids[: shape.system_tokens + 2 * 330] for request in requests}
    assert len(orders) <= 6
    assert len({order[: shape.system_tokens] for order in orders}) == 1
    assert len({order[: shape.system_tokens + 330] for order in orders}) == 3


def sharing(**changes: object) -> SharingShape:
    shape = read_shape(shapes()["sharing"])
    assert isinstance(shape, SharingShape)
    return replace(shape, **changes)  # type: ignore[arg-type]


def test_the_shared_part_is_as_large_as_stated_and_its_prefixes_return_after_the_distance() -> None:
    rows = list(sharing_rows(sharing(shift_at=0)))
    shared = sum(row.shared_tokens for row in rows) / sum(row.input_tokens for row in rows)
    assert shared == pytest.approx(0.7, rel=0.05)
    uses = Counter(row.shared for row in rows)
    assert len(uses) / len(rows) == pytest.approx(0.1, rel=0.1)
    distances, last = [], dict[object, int]()
    for place, row in enumerate(rows):
        if row.shared in last:
            distances.append(len({other.shared for other in rows[last[row.shared] + 1 : place]}))
        last[row.shared] = place
    assert sum(distances) / len(distances) == pytest.approx(40, rel=0.1)


def test_from_the_shift_on_no_prefix_is_of_before() -> None:
    rows = list(sharing_rows(sharing(requests=400, shift_at=200)))
    before, after = ({row.shared for row in part} for part in (rows[:200], rows[200:]))
    assert not before & after
    assert {row.shared for row in rows[:200]} & {row.shared for row in sharing_rows(sharing(requests=200, shift_at=0))}


@pytest.mark.system
def test_seeds_draw_other_windows_and_one_seed_the_same() -> None:
    for name in ("groups", "sharing", "rag", "herd"):
        one, again, other = (load_requests(name, seed=seed, block_tokens=64)[:50] for seed in (1, 1, 2))
        assert one == again != other


@pytest.mark.parametrize(
    ("name", "old", "new", "said"),
    [
        ("groups", "groups = 64", "groups = 0", "groups is 0; expected more than 0"),
        ("sharing", "new_share = 0.1", "new_share = 1.5", "new_share is 1.5; expected a share, at most 1"),
        ("rag", "rate_per_s = 8.0", "rate_per_s = 0", "rate_per_s is 0; expected more than 0"),
        ("herd", "gap_s = 1.5", "gap_s = 0", "gap_s is 0; expected more than 0"),
        ("herd", "leaving_share = 0.0", "leaving_share = 2", "leaving_share is 2; expected a share, at most 1"),
        ("agents", "one_shot_share = 0.3", "one_shot_share = 30", "one_shot_share is 30; expected a share, at most 1"),
        ("agents", "burst_mean = 22.0", "burst_mean = 0.5", "burst_mean is 0.5; expected at least 1"),
        ("agents", "turns_mean = 20.0", "turns_mean = 1", "turns_mean is 1; expected at least 2"),
    ],
)
def test_a_wrong_parameter_is_named(tmp_path: Path, name: str, old: str, new: str, said: str) -> None:
    path = shapes()[name]
    wrong = tmp_path / "shape.toml"
    wrong.write_text(path.read_text().replace(old, new))
    with pytest.raises(TraceError, match=said):
        read_shape(wrong)


def test_short_prompts_are_drawn_in_small_blocks() -> None:
    assert [own_block_tokens(name) for name in ("short-chat", "rag", "toolagent-like")] == [16, 64, 512]


def herd(**changes: object) -> HerdShape:
    shape = read_shape(shapes()["herd"])
    assert isinstance(shape, HerdShape)
    return replace(shape, **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize("groups", [1, 3, 10])
def test_a_herd_has_a_turn_of_each_session_per_round_and_its_groups_share_the_system_prompt_alone(groups: int) -> None:
    requests = generate_requests(herd(groups=groups))
    assert len(requests) == 61 * 12
    for number in range(12):
        turn = requests[61 * number : 61 * (number + 1)]
        assert len({request.user for request in turn}) == 61
        assert {request.turns for request in turn} == {number + 1}
        assert {request.input_tokens for request in turn} == {8192 + 2048 * (number + 1) - 100}
    # 16 blocks of the group's system prompt; every later block is of one session.
    heads = Counter(request.hash_ids[15] for request in requests[:61])
    assert len(heads) == groups
    assert max(heads.values()) - min(heads.values()) <= 1
    owners: dict[int, set[str | None]] = {}
    for request in requests:
        for block in request.hash_ids[16:]:
            owners.setdefault(block, set()).add(request.user)
    assert {len(users) for users in owners.values()} == {1}


def test_a_later_turn_of_a_herd_goes_on_with_the_whole_prompt_and_answer_of_the_one_before() -> None:
    last: dict[str | None, tuple[int, ...]] = {}
    for request in generate_requests(herd()):
        if request.user in last:
            before = last[request.user]
            assert request.hash_ids[: len(before) - 1] == before[:-1], "all but the block that was not full"
        last[request.user] = request.hash_ids


@pytest.mark.parametrize("gap_s", [0.4, 1.5, 15.0])
def test_requests_of_a_herd_are_as_far_apart_as_stated(gap_s: float) -> None:
    times = [row.timestamp_ms / 1000 for row in herd_rows(herd(gap_s=gap_s, rounds=60))]
    gaps = [later - earlier for earlier, later in pairwise(times)]
    assert fmean(gaps) == pytest.approx(gap_s, rel=0.05)
    assert median(gaps) == pytest.approx(gap_s * 0.693, rel=0.07), "an exponential distribution"


def test_the_reuse_of_a_herd_is_within_its_sessions_and_more_with_the_system_prompt() -> None:
    steady = describe_trace(generate_requests(herd()))
    # Of the 16 + 4, ..., 16 + 48 blocks of 12 turns those of the last are new; so is each that was not full before.
    assert steady.user_block_reuse == pytest.approx(1 - (16 + 48 + 11) / sum(16 + 4 * n for n in range(1, 13)))
    assert steady.block_reuse is not None
    assert steady.user_block_reuse is not None
    assert steady.block_reuse > steady.user_block_reuse


def test_sessions_of_a_changing_herd_are_replaced_by_new_ones_of_their_group() -> None:
    rows = list(herd_rows(herd(leaving_share=0.2, rounds=30, groups=3)))
    begun = [row for row in rows if row.turn == 1]
    assert len(begun) - 61 == pytest.approx(0.2 * 61 * 29, rel=0.1)
    assert len({row.user for row in rows}) == len(begun)
    groups_of: dict[str | None, set[object]] = {}
    for row in rows:
        groups_of.setdefault(row.user, set()).add(row.shared)
    assert {len(groups) for groups in groups_of.values()} == {1}
    assert len({row.user for row in herd_rows(herd(rounds=30))}) == 61


def agents(**changes: object) -> AgentsShape:
    shape = read_shape(shapes()["agents"])
    assert isinstance(shape, AgentsShape)
    return replace(shape, **changes)  # type: ignore[arg-type]


@pytest.mark.system
def test_agents_have_the_published_figures_within_a_tenth() -> None:
    """Median input and output, and the share of blocks that is reused within a session, over three windows."""
    windows = [load_requests("agents", seed=seed) for seed in range(3)]
    requests = [request for window in windows for request in window]
    assert median(request.input_tokens for request in requests) == pytest.approx(195_000, rel=0.1)
    assert median(request.output_tokens for request in requests) == pytest.approx(317, rel=0.1)
    reuse = [describe_trace(window).user_block_reuse for window in windows]
    assert fmean(share for share in reuse if share is not None) == pytest.approx(0.91, abs=0.01)


def test_agents_sessions_begin_in_bursts_of_the_published_size() -> None:
    """51 within a second at the 90th percentile; one request of each session is enough for it."""
    rows = list(agent_rows(agents(duration_s=200_000.0, one_shot_share=1.0, task_median=1.0)))
    times = sorted(row.timestamp_ms / 1000 for row in rows)
    starts = [0, *(place for place, (one, other) in enumerate(pairwise(times), 1) if other - one > 1.0), len(times)]
    sizes = [end - begin for begin, end in pairwise(starts)]
    assert quantiles(sizes, n=10)[-1] == pytest.approx(51, rel=0.1)
    assert len(rows) / 200_000.0 == pytest.approx(0.1, rel=0.1)


def test_agents_sessions_arrive_alone_at_poisson_times_without_bursts() -> None:
    rows = agent_rows(agents(duration_s=40_000.0, burst_mean=1.0, one_shot_share=1.0, task_median=1.0))
    times = sorted(row.timestamp_ms / 1000 for row in rows)
    gaps = [later - earlier for earlier, later in pairwise(times)]
    assert fmean(gaps) == pytest.approx(10.0, rel=0.05)
    assert median(gaps) == pytest.approx(6.93, rel=0.07), "an exponential distribution"


def test_agents_sessions_depart_after_their_turns_and_so_many_ask_once() -> None:
    shape = agents(duration_s=100_000.0, burst_mean=1.0, task_median=1.0, tool_median=1.0, pause_s_mean=1.0)
    turns = Counter(row.user for row in agent_rows(shape))
    assert sum(count == 1 for count in turns.values()) / len(turns) == pytest.approx(0.3, abs=0.02)
    assert fmean(count for count in turns.values() if count > 1) == pytest.approx(20, rel=0.05)


def test_a_tool_runs_between_an_answer_and_the_next_request_of_a_session() -> None:
    shape = agents(duration_s=4000.0, answer_token_s=0.05)
    by_session = sorted(agent_rows(shape), key=lambda row: (str(row.user), row.turn or 0))
    pauses = []
    for _, rows in groupby(by_session, key=lambda row: row.user):
        for before, after in pairwise(rows):
            assert after.input_tokens > before.input_tokens + before.output_tokens or after.input_tokens == 500_000
            pauses.append((after.timestamp_ms - before.timestamp_ms) / 1000 - 0.05 * before.output_tokens)
    assert min(pauses) >= 1.0 - 0.001
    assert fmean(pauses) == pytest.approx(1.0 + 12.0, rel=0.05)


def test_agents_sessions_share_the_system_prompt_of_their_group_alone() -> None:
    requests = generate_requests(agents(duration_s=2000.0, system_median=20_480))
    firsts = Counter(request.hash_ids[39] for request in requests if request.turns == 1)
    assert len(firsts) == 3
    assert firsts.most_common()[0][1] > firsts.most_common()[-1][1], "in proportion to 1/n"
    own = {request.user: request.hash_ids[40] for request in requests if request.turns == 1}
    assert len(set(own.values())) == len(own)


# --- Generated windows against the GORGO paper's table 4.


@dataclass(frozen=True)
class Table4:
    """A column of the paper's table."""

    requests: float
    users: float
    requests_per_user: float
    turns_mean: float
    multi_turn_share: float
    input_p50: float
    input_mean: float
    input_p95: float
    block_reuse: float
    user_block_reuse: float


PAPER = {
    "art-chat-apr5": Table4(7195, 579, 12.8, 30.3, 0.739, 5638, 6877, 19886, 0.788, 0.785),
    "art-chat-apr6": Table4(7630, 606, 12.9, 27.7, 0.741, 5787, 7008, 20974, 0.776, 0.771),
    "art-chat-apr7": Table4(8663, 540, 16.4, 21.5, 0.737, 5745, 7148, 20435, 0.879, 0.874),
}
#: The first few of every window, and two more that were picked without looking.
CASES = [*product(PAPER, range(5)), ("art-chat-apr5", 17), ("art-chat-apr7", 2026)]


def shape_of(name: str) -> UsersShape:
    shape = read_shape(shapes()[name])
    assert isinstance(shape, UsersShape)
    return shape


@lru_cache(maxsize=len(CASES))
def window(name: str, seed: int = 0) -> list[TraceRequest]:
    return generate_requests(replace(shape_of(name), seed=seed))


@pytest.fixture(scope="module")
def apr5() -> list[TraceRequest]:
    return window("art-chat-apr5")


@pytest.fixture(scope="module")
def by_user(apr5: list[TraceRequest]) -> dict[str, list[TraceRequest]]:
    users: dict[str, list[TraceRequest]] = {}
    for request in apr5:
        users.setdefault(str(request.user), []).append(request)
    return users


@pytest.mark.system
@pytest.mark.parametrize(("name", "seed"), CASES)
def test_every_row_of_table_4_is_met_within_a_tenth(name: str, seed: int) -> None:
    figures = describe_trace(window(name, seed))
    for row, wanted in zip(Table4.__dataclass_fields__, astuple(PAPER[name]), strict=True):
        assert getattr(figures, row) == pytest.approx(wanted, rel=0.1), row


@pytest.mark.parametrize("name", PAPER)
def test_little_is_shared_between_users(name: str) -> None:
    figures = describe_trace(window(name))
    assert figures.block_reuse is not None
    assert figures.user_block_reuse is not None
    assert 0.001 <= figures.block_reuse - figures.user_block_reuse <= 0.006


@pytest.mark.parametrize("name", PAPER)
def test_load_is_there_from_the_start_and_to_the_end(name: str) -> None:
    """No tenth of the window has less than half or more than 1.6 times of its share, with any of a few seeds."""
    for seed in range(3):
        requests = window(name, seed)
        share = len(requests) / 10
        tenths = [sum(n * 180 <= r.timestamp_s < (n + 1) * 180 for r in requests) for n in range(10)]
        assert sum(tenths) == len(requests)
        assert min(tenths) > 0.5 * share
        assert max(tenths) < 1.6 * share


def test_a_surge_has_the_prompts_of_its_window_and_twice_the_load_at_its_peak() -> None:
    requests = window("art-chat-apr7-surge")
    assert sorted(r.input_tokens for r in requests) == sorted(r.input_tokens for r in window("art-chat-apr7"))
    share = len(requests) / 10
    tenths = [sum(n * 180 <= r.timestamp_s < (n + 1) * 180 for r in requests) for n in range(10)]
    assert 1.6 * share < max(tenths) < 2.2 * share
    assert 0.5 * share < min(tenths) < 0.8 * share


def test_no_prompt_exceeds_the_paper_s_filter(apr5: list[TraceRequest]) -> None:
    assert max(request.input_tokens for request in apr5) <= 24_000


def test_capped_outputs_have_about_a_hundred_tokens(apr5: list[TraceRequest]) -> None:
    assert 90 <= sum(min(128, request.output_tokens) for request in apr5) / len(apr5) <= 110


def test_a_user_does_not_ask_again_before_the_shortest_pause(by_user: dict[str, list[TraceRequest]]) -> None:
    """Squeezed, swung and rounded pauses are shorter than the least, but nobody sends in bursts."""
    for requests in by_user.values():
        pauses = [b.timestamp_s - a.timestamp_s for a, b in pairwise(requests)]
        assert min(pauses, default=9.0) > 1.0


def test_a_conversation_never_shrinks_or_changes_its_beginning() -> None:
    last: dict[tuple[str, int], tuple[int, int, int]] = {}
    for row in user_rows(shape_of("art-chat-apr5")):
        tokens, turn, shared = last.get(row.own, (0, 0, row.shared_tokens))
        assert row.input_tokens >= tokens
        assert (row.turn or 0) >= turn
        assert row.shared_tokens == shared
        last[row.own] = (row.input_tokens, row.turn or 0, shared)


def test_many_conversations_have_a_history_older_than_the_window(by_user: dict[str, list[TraceRequest]]) -> None:
    assert sum((requests[0].turns or 0) > 5 for requests in by_user.values()) > len(by_user) / 3


def test_a_retry_is_the_same_prompt_word_for_word(apr5: list[TraceRequest]) -> None:
    prompts = [(request.user, request.turns, request.hash_ids) for request in apr5 if (request.turns or 0) > 1]
    assert 0.15 < 1 - len(set(prompts)) / len(prompts) < 0.35


def test_an_id_stands_for_its_whole_prefix(apr5: list[TraceRequest]) -> None:
    before: dict[int, int | None] = {}
    for request in apr5:
        for previous, hash_id in zip((None, *request.hash_ids), request.hash_ids, strict=False):
            assert before.setdefault(hash_id, previous) == previous


def test_seeds_differ_in_who_and_when_but_not_in_how_many() -> None:
    one, other = window("art-chat-apr5", 1), window("art-chat-apr5", 2)
    assert [r.timestamp_s for r in one] != [r.timestamp_s for r in other]
    assert sorted(counts(one)) == sorted(counts(other))


def counts(requests: list[TraceRequest]) -> list[int]:
    return list(Counter(request.user for request in requests).values())


def test_a_small_window_has_its_users_and_requests_too() -> None:
    small = replace(shape_of("art-chat-apr5"), users=3, requests=3, duration_s=10.0, waves=0)
    requests = generate_requests(small)
    assert (len(requests), len({request.user for request in requests})) == (3, 3)
    assert all(0 <= request.timestamp_s < 10 for request in requests)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"users": 9000}, "expected at least 1 each"),
        ({"swing": 1.0}, "less than 1"),
        ({"applications": 0}, "at least 1"),
    ],
)
def test_a_shape_that_cannot_be_is_refused(change: dict[str, float], said: str) -> None:
    with pytest.raises(TraceError, match=said):
        replace(shape_of("art-chat-apr5"), **change)  # type: ignore[arg-type]


def test_quantiles_are_joined_by_straight_lines() -> None:
    points = ((0.0, 100.0), (0.5, 200.0), (1.0, 1000.0))
    assert [quantile(points, share) for share in (0.0, 0.25, 0.5, 0.75, 1.0)] == [100, 150, 200, 600, 1000]


def test_shuffling_loses_nothing_and_ends_anywhere() -> None:
    draws = RandomDraws(3)
    ends = {tuple(draws.shuffled([1, 2, 3])) for _ in range(200)}
    assert len(ends) == 6
    assert all(sorted(end) == [1, 2, 3] for end in ends)
