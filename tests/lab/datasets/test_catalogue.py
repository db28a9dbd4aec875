""""""

from __future__ import annotations

from dataclasses import replace
from math import isnan
from pathlib import Path

import pytest

from gorgo.errors import TraceError
from gorgo.lab.datasets import (
    AgentsShape,
    HerdShape,
    SharingShape,
    describe_trace,
    generate_requests,
    load_requests,
    own_block_tokens,
    read_shape,
    shapes,
    shipped_path,
    write_trace,
)
from gorgo.lab.traces import TraceFilters, TraceRequest, load_trace


@pytest.mark.parametrize("name", ["art-chat-sample", "wildchat-like", "chat-small"])
def test_memory_and_file_hold_the_same_requests(name: str, tmp_path: Path) -> None:
    found = read_shape(shapes()[name])
    assert not isinstance(found, SharingShape | HerdShape | AgentsShape)
    shape = replace(found, duration_s=60.0)
    write_trace(shape, tmp_path / "t.jsonl.gz")
    assert TraceFilters().apply(generate_requests(shape)) == load_trace(tmp_path / "t.jsonl.gz")


def test_a_shape_s_name_is_a_trace_of_which_the_seed_picks_the_window() -> None:
    own, zero, one = (load_requests("art-chat-sample", TraceFilters(limit=9), seed=seed) for seed in (None, 0, 1))
    assert own == zero
    shape = load_requests(shapes()["art-chat-sample"], TraceFilters(limit=9), seed=1)
    assert shape == load_requests(str(shapes()["art-chat-sample"]), TraceFilters(limit=9), seed=1)
    assert one == zero  # the sample is a file: there is nothing to draw
    assert shape != zero


def test_a_shipped_trace_is_found_by_name_and_a_file_by_its_path() -> None:
    assert (
        load_requests("chat-small")
        == load_requests(shipped_path("chat-small"))
        == load_trace(shipped_path("chat-small"))
    )


def test_a_file_goes_before_a_shape_of_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "wildchat-like").write_text('{"timestamp":0,"input_length":5,"output_length":1,"hash_ids":[1]}\n')
    monkeypatch.chdir(tmp_path)
    assert len(load_requests("wildchat-like")) == 1


def test_filters_act_on_generated_windows_as_on_files() -> None:
    requests = load_requests("art-chat-apr5", TraceFilters(start_s=600, end_s=660, max_output=128), seed=1)
    assert requests[0].timestamp_s == 0
    assert 100 < len(requests) < 500
    assert max(request.output_tokens for request in requests) == 128


def test_a_name_that_nothing_has_lists_those_there_are() -> None:
    with pytest.raises(TraceError, match=r"nothing: No such file.*there are: agents, art-chat-apr5, .*wildchat-like"):
        load_requests("nothing")


def test_filters_that_leave_nothing_of_a_shape_are_an_error() -> None:
    with pytest.raises(TraceError, match="no request is left"):
        load_requests("wildchat-like", TraceFilters(max_input=1, limit=1, start_s=1799.9))


def test_a_shape_is_drawn_in_blocks_of_any_size_and_is_otherwise_the_same() -> None:
    coarse = load_requests("wildchat-like", TraceFilters(limit=200))
    fine = load_requests("wildchat-like", TraceFilters(limit=200), block_tokens=16)
    assert [replace(one, hash_ids=()) for one in coarse] == [replace(one, hash_ids=()) for one in fine]
    assert [len(one.hash_ids) for one in fine] == [-(-one.input_tokens // 16) for one in fine]
    # Whoever shares a block of 512 shares its 32 of 16.
    first: dict[int, int] = {}
    for wide, narrow in zip(coarse, fine, strict=True):
        for place in range(wide.input_tokens // 512):
            assert (
                first.setdefault(wide.hash_ids[place], narrow.hash_ids[32 * place + 31])
                == narrow.hash_ids[32 * place + 31]
            )


def test_a_file_has_the_blocks_that_it_was_written_in() -> None:
    with pytest.raises(TraceError, match=r"chat-small.* line 1: hash_ids is .*one per 16 tokens.*--block-tokens names"):
        load_requests("chat-small", block_tokens=16)
    assert own_block_tokens("chat-small") == own_block_tokens(shipped_path("chat-small")) == 512


def test_a_shape_may_state_its_blocks_and_they_are_no_less_than_a_token(tmp_path: Path) -> None:
    path = tmp_path / "shape.toml"
    text = shapes()["wildchat-like"].read_text()
    path.write_text(f"{text}\nblock_tokens = 16\n")
    assert (own_block_tokens(path), own_block_tokens("wildchat-like")) == (16, 512)
    path.write_text(f"{text}\nblock_tokens = 0\n")
    with pytest.raises(TraceError, match="block_tokens is 0; expected at least 1"):
        read_shape(path)


def request(index: int, ids: tuple[int, ...], user: str | None = "a", turns: int | None = 1) -> TraceRequest:
    return TraceRequest(index, float(index), 512 * max(1, len(ids)), 10, ids, None, user, turns)


def test_lengths_and_the_rate_are_over_all_requests() -> None:
    """Prompts of 100 to 500 and of 10,000 tokens in four seconds: their p95 is three quarters of the last step."""
    lengths = (100, 200, 300, 400, 500, 10_000)
    times_s = (3.0, 4.0, 4.5, 5.0, 6.0, 7.0)
    figures = describe_trace([TraceRequest(n, times_s[n], tokens, 10 * n, ()) for n, tokens in enumerate(lengths)])
    assert (figures.requests, figures.duration_s, figures.requests_per_s) == (6, 4.0, 1.5)
    assert (figures.input_p50, figures.input_mean, figures.output_mean) == (350.0, 11_500 / 6, 25.0)
    assert figures.input_p95 == 500 + 0.75 * 9500


def test_reuse_of_a_user_counts_only_what_the_same_user_had() -> None:
    figures = describe_trace([request(0, (1, 2)), request(1, (1, 3), user="b"), request(2, (1, 2))])
    assert figures.block_reuse == 3 / 6
    assert figures.user_block_reuse == 2 / 6
    assert (figures.users, figures.requests_per_user) == (2, 1.5)


def test_mean_turns_are_those_of_multi_turn_requests() -> None:
    figures = describe_trace([request(0, (1,)), request(1, (1, 2), turns=4), request(2, (1, 2, 3), turns=6)])
    assert figures.turns_mean == 5
    assert figures.multi_turn_share == 2 / 3


def test_without_conversations_there_is_a_share_but_no_mean() -> None:
    figures = describe_trace([request(0, (1,)), request(1, (2,))])
    assert (figures.turns_mean, figures.multi_turn_share) == (None, 0.0)


def test_what_one_request_does_not_tell_is_unknown_of_all() -> None:
    figures = describe_trace([request(0, (1,)), request(1, (1,), user=None, turns=None)])
    assert figures.users is None
    assert figures.requests_per_user is None
    assert figures.turns_mean is None
    assert figures.multi_turn_share is None
    assert figures.user_block_reuse is None
    assert figures.block_reuse == 0.5


def test_a_trace_of_texts_without_ids_has_no_known_reuse() -> None:
    figures = describe_trace([request(0, ()), request(1, ())])
    assert figures.block_reuse is None
    assert figures.user_block_reuse is None


def test_a_single_request_has_no_rate() -> None:
    assert isnan(describe_trace([request(0, (1,))]).requests_per_s)
