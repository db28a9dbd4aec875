from __future__ import annotations

from typing import Any

import pytest

from gorgo.lab.replay.bodies import body_of
from gorgo.lab.simulate.feed import feed_of, fingerprinted
from gorgo.lab.traces import TraceRequest


def row(index: int, tokens: int, ids: tuple[int, ...], at_s: float = 0.0) -> TraceRequest:
    return TraceRequest(index=index, timestamp_s=at_s, input_tokens=tokens, output_tokens=7, hash_ids=ids)


def test_full_blocks_go_in_by_their_ids_and_the_rest_is_nobody_s() -> None:
    first, second = feed_of([row(0, 1100, (5, 6, 7)), row(1, 1024, (5, 6))])
    assert first.blocks == second.blocks
    assert first.blocks == (5).to_bytes(8, "little") + (6).to_bytes(8, "little")
    assert first.prefix_hash == second.prefix_hash
    assert (first.prompt_tokens, first.output_tokens) == (1100, 7)


def test_ids_wider_than_a_block_s_hash_are_cut_to_it() -> None:
    (request,) = feed_of([row(0, 512, (2**70 + 3,))])
    assert request.blocks == (3).to_bytes(8, "little")


def test_a_body_is_as_large_as_the_one_that_a_replay_sends() -> None:
    request = row(3, 700, (1, 2))
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
    assert [r.arrival_s for r in feed_of([row(0, 1, (), 0.0), row(1, 1, (), 3.0)], time_scale=2.0)] == [0.0, 6.0]


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
    rows = [row(n, tokens, tuple(range(9))) for n, tokens in enumerate((511, 512, 1023, 1024))]
    assert [len(request.blocks) // 8 for request in feed_of(rows)] == [0, 1, 1, 2]


@pytest.mark.parametrize(
    "request_",
    [
        row(3, 1100, (5, 6, 7)),
        row(3, 100, (5,)),
        row(3, 700, ()),
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
    first, second = feed_of([row(0, 600, ()), row(1, 600, ())])
    assert first.prefix_hash != second.prefix_hash
    assert first.blocks == second.blocks == b""


def test_prompts_share_as_many_fingerprinted_blocks_as_they_share_text() -> None:
    one, two = fingerprinted([row(0, 1536, (1, 2, 3)), row(1, 1536, (1, 2, 9))], model="m", key=7, block_bytes=256)
    assert one.prompt_tokens == 1536
    assert len(one.blocks) == 8 * 1536 // 64
    assert one.blocks[: 8 * 16] == two.blocks[: 8 * 16]
    assert one.blocks[8 * 16 :] != two.blocks[8 * 16 :]
    assert one.prefix_hash == two.prefix_hash


def test_small_blocks_identify_a_prompt_by_its_first_256_tokens() -> None:
    blocks = tuple(range(100, 120))
    long, short = feed_of([row(0, 320, blocks), row(1, 90, blocks[:6])], block_tokens=16)
    assert (len(long.blocks), len(short.blocks)) == (20 * 8, 5 * 8)
    (other,) = feed_of([row(0, 320, (*blocks[:16], 7, 8, 9, 10))], block_tokens=16)
    assert long.prefix_hash == other.prefix_hash != short.prefix_hash
