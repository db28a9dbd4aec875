"""Shapes by what their prompts share, against the published figures of the traffic that they follow."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import islice
from pathlib import Path

import pytest

from gorgo.errors import TraceError
from gorgo.lab.datasets import (
    GroupsShape,
    RagShape,
    SharingShape,
    describe_trace,
    generate_requests,
    load_requests,
    own_block_tokens,
    read_shape,
    shapes,
)
from gorgo.lab.datasets.users import rag_rows, sharing_rows

#: Mooncake's release (FAST'25, appendix; the data set's card has the counts): requests, mean input and output tokens,
#: and the ratio of the cache that hits.
MOONCAKE = {"toolagent-like": (23_608, 8_596, 182, 0.59), "synthetic-like": (3_993, 15_325, 149, 0.66)}


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


def test_seeds_draw_other_windows_and_one_seed_the_same() -> None:
    for name in ("groups", "sharing", "rag"):
        one, again, other = (load_requests(name, seed=seed, block_tokens=64)[:50] for seed in (1, 1, 2))
        assert one == again != other


@pytest.mark.parametrize(
    ("name", "old", "new", "said"),
    [
        ("groups", "groups = 64", "groups = 0", "groups is 0; expected more than 0"),
        ("sharing", "new_share = 0.1", "new_share = 1.5", "new_share is 1.5; expected a share, at most 1"),
        ("rag", "rate_per_s = 8.0", "rate_per_s = 0", "rate_per_s is 0; expected more than 0"),
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
