"""The proxy's request log read as a trace."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from gorgo.cli import app
from gorgo.errors import TraceError
from gorgo.lab import request_log
from gorgo.lab.datasets import unit_warning
from gorgo.lab.request_log import (
    hash_ids,
    is_request_log,
    load_request_log,
    read_logged_requests,
    read_request_log,
    skipped_lines,
)
from gorgo.lab.simulate.feed import feed_of
from gorgo.lab.traces import BLOCK_TOKENS, TraceFilters
from gorgo.live.logs import RequestLogFile
from tests.live.test_logs import finished, log_file

HEADER = {"gorgo_request_log": 1, "boot_id": "boot", "started_s": 0.0, "block_bytes": 2048}
ROW = {
    "received_s": 1.0,
    "model": "m",
    "input_tokens": 1100,
    "output_tokens": 20,
    "text_bytes": 4400,
    "status": 200,
    "block_hashes": ["00000000000000aa", "00000000000000bb"],
}


def written(path: Path, *lines: dict[str, Any] | str) -> Path:
    texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    path.write_text("".join(text + "\n" for text in texts))
    return path


def test_requests_are_read_over_rotated_files_in_order_of_time(tmp_path: Path) -> None:
    file = log_file(tmp_path / "log", max_bytes=900, max_files=9)
    for number in (0, 1, 3, 2, 4, 5, 6, 7, 8, 9):
        file.write([finished(1000.0 + number)])
    file.close()
    assert (tmp_path / "log.2").exists()
    trace = read_request_log(tmp_path / "log")
    assert [request.timestamp_s for request in trace.requests] == [1000.0 + number for number in range(10)]
    assert [request.index for request in trace.requests] == list(range(10))
    assert (trace.boots, trace.guessed_outputs, trace.skipped, trace.cut_lines) == (1, 0, 0, 0)
    assert {len(request.hash_ids) for request in trace.requests} == {2}
    assert len({request.hash_ids for request in trace.requests}) == 1
    kept = load_request_log(tmp_path / "log", TraceFilters(start_s=3.0, end_s=6.0))
    assert [request.timestamp_s for request in kept] == [0.0, 1.0, 2.0]


def test_ends_of_messages_are_read_and_older_logs_have_none(tmp_path: Path) -> None:
    rows = [ROW | {"boundaries": [100, 100, 1100]}, ROW]
    trace = read_request_log(written(tmp_path / "log", HEADER, *rows))
    assert [request.boundaries for request in trace.requests] == [(100, 100, 1100), ()]
    assert [request.boundaries for request in feed_of(trace.requests)] == [(100, 100, 1100), ()]


@pytest.mark.parametrize("value", ["x", [1.5], [True], [-1], [2, 1], [1] * 129, {}])
def test_wrong_ends_of_messages_are_named(tmp_path: Path, value: object) -> None:
    with pytest.raises(TraceError, match=r"line 2: boundaries is .*expected at most 128 ascending numbers of tokens"):
        read_request_log(written(tmp_path / "log", HEADER, ROW | {"boundaries": value}))


def test_parts_of_the_time_and_the_client_are_read_and_older_logs_have_none(tmp_path: Path) -> None:
    parts = [0.1, 0.0, 0.05, 0.2, 0.3, 0.0]
    rows = [ROW | {"ttft_parts_s": parts, "client": "batch"}, ROW | {"ttft_parts_s": None}, ROW]
    found = read_logged_requests(written(tmp_path / "log", HEADER, *rows))
    assert [(row.client, list(row.ttft_parts_s)) for row in found] == [("batch", parts), (None, []), (None, [])]


@pytest.mark.parametrize("value", ["x", [0.1], [0.1] * 7, [-1.0] * 6, ["a"] * 6])
def test_wrong_parts_of_the_time_are_named(tmp_path: Path, value: object) -> None:
    with pytest.raises(TraceError, match=r"line 2: ttft_parts_s is .*; expected"):
        read_request_log(written(tmp_path / "log", HEADER, ROW | {"ttft_parts_s": value}))


def test_log_is_told_from_other_traces(tmp_path: Path) -> None:
    log = written(tmp_path / "log", HEADER)
    other = written(tmp_path / "trace", {"timestamp": 0, "input_length": 1, "output_length": 1, "hash_ids": []})
    assert is_request_log(log)
    assert not is_request_log(other)
    assert not is_request_log(tmp_path / "none")
    os.mkfifo(tmp_path / "pipe")
    assert not is_request_log(tmp_path / "pipe")


@pytest.mark.parametrize("gap_s", [0.0005, 500.0])
def test_log_of_a_burst_or_of_a_quiet_day_is_not_said_to_have_another_unit(tmp_path: Path, gap_s: float) -> None:
    log = written(tmp_path / "log", HEADER, *(ROW | {"received_s": 1.0 + gap_s * number} for number in range(9)))
    result = CliRunner().invoke(app, ["datasets", "describe", str(log)])
    assert (result.exit_code, result.stderr) == (0, "")
    assert unit_warning(tmp_path / "trace", 9, 8 * gap_s) is not None


def test_unknown_output_is_the_median_of_its_model(tmp_path: Path) -> None:
    rows = [ROW | {"output_tokens": tokens} for tokens in (10, 30, 50, None)]
    rows += [ROW | {"model": None, "output_tokens": None}]
    trace = read_request_log(written(tmp_path / "log", HEADER, *rows))
    assert [request.output_tokens for request in trace.requests] == [10, 30, 50, 30, 30]
    assert trace.guessed_outputs == 2


def test_output_of_nothing_is_one_token_and_the_median_of_two_is_the_lower(tmp_path: Path) -> None:
    rows = [ROW | {"output_tokens": tokens} for tokens in (0, 8, None)]
    rows += [ROW | {"model": "other", "output_tokens": tokens} for tokens in (5, None)]
    rows += [ROW | {"model": None, "output_tokens": None}]
    trace = read_request_log(written(tmp_path / "log", HEADER, *rows))
    # A model of which none is known is taken for the median of all: 1, 5 and 8.
    assert [request.output_tokens for request in trace.requests] == [1, 8, 1, 5, 5, 5]
    assert trace.guessed_outputs == 3


def test_blocks_of_a_prompt_are_told_by_its_own_model_s_bytes_per_token(tmp_path: Path) -> None:
    """Hashes of 2,048 bytes: 512 tokens at four bytes a token, 256 at eight, over all requests of a model."""
    hashes = [f"{number:016x}" for number in range(1, 5)]
    wide = {"model": "wide", "text_bytes": 8192, "input_tokens": 1024, "block_hashes": hashes}
    rows = [
        ROW | {"text_bytes": 4096, "input_tokens": 1024, "block_hashes": hashes[:2]},
        ROW | wide,
        ROW | wide | {"text_bytes": 4096, "input_tokens": 512, "block_hashes": hashes[:2]},
    ]
    first, second, third = read_request_log(written(tmp_path / "log", HEADER, *rows)).requests
    assert first.hash_ids == hash_ids([1, 2], 1024, hash_tokens=512.0)
    assert second.hash_ids == hash_ids([1, 2, 3, 4], 1024, hash_tokens=256.0)
    assert second.hash_ids[:1] == third.hash_ids
    assert (len(first.hash_ids), len(second.hash_ids)) == (2, 2)


def test_a_model_without_any_text_shares_what_a_hash_says(tmp_path: Path) -> None:
    """No text at all counts as one byte: a hash then stands for more tokens than any prompt has."""
    (request,) = read_request_log(written(tmp_path / "log", HEADER, ROW | {"text_bytes": 0})).requests
    assert request.hash_ids == hash_ids([0xAA], 1100, hash_tokens=2048 * 1100.0)
    assert len(request.hash_ids) == 2


@pytest.mark.parametrize(
    ("tokens", "hashes", "hash_tokens", "blocks"),
    [
        (1024, 2, 512.0, 2),
        (1023, 2, 512.0, 1),
        (1535, 3, 512.0, 2),
        # Three hashes of 400 tokens end at 1,200: the second block needs all of them, the third another one.
        (1536, 3, 400.0, 2),
        (1536, 4, 400.0, 3),
        (1024, 2, 511.9, 1),
        (1024, 1, 1024.0, 2),
        (511, 9, 512.0, 0),
    ],
)
def test_a_block_is_told_where_its_hashes_reach_its_end(
    tokens: int, hashes: int, hash_tokens: float, blocks: int
) -> None:
    assert len(hash_ids(list(range(hashes)), tokens, hash_tokens=hash_tokens)) == blocks


def test_log_without_any_output_length_says_how_to_get_one(tmp_path: Path) -> None:
    log = written(tmp_path / "log", HEADER, ROW | {"output_tokens": None})
    with pytest.raises(TraceError, match="request_usage: true"):
        read_request_log(log)


def test_request_that_was_wrong_in_itself_is_no_load_and_one_that_was_turned_away_is(tmp_path: Path) -> None:
    rows = [ROW | {"status": status} for status in (200, 400, 404, 429, 499, 503)]
    trace = read_request_log(written(tmp_path / "log", HEADER, *rows))
    assert (len(trace.requests), trace.skipped) == (4, 2)


def test_line_that_a_killed_proxy_cut_off_is_counted_and_the_next_run_goes_on(tmp_path: Path) -> None:
    log = written(tmp_path / "log", HEADER, ROW, '{"received_s": 1.2, "mo', HEADER | {"boot_id": "next"}, ROW)
    with log.open("a") as file:
        file.write('{"recei')
    trace = read_request_log(log)
    assert (len(trace.requests), trace.boots, trace.cut_lines) == (2, 2, 2)


def test_lines_and_headers_that_a_full_disk_cut_off_in_a_row_are_skipped_and_said(tmp_path: Path) -> None:
    cut = ['{"received_s": 1.2, "mo', '{"gorgo_req', "", '{"gorgo_request_log": 1, "boot']
    log = written(tmp_path / "log", HEADER, '{"gorgo_', HEADER, ROW, *cut, HEADER, ROW, "\0\0\0", ROW)
    trace = read_request_log(log)
    assert (len(trace.requests), trace.boots, trace.cut_lines) == (3, 1, 6)
    assert skipped_lines(log) == f"{log}: 6 lines were cut off by a full disk or a killed process and are skipped"
    assert skipped_lines(written(tmp_path / "whole", HEADER, ROW)) is None


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        ([ROW], r"line 1: expected the header"),
        (["nonsense", ROW], r"line 2: expected the header"),
        (["nonsense", "nonsense"], r"line 2: nonsense is no JSON object"),
        ([HEADER | {"gorgo_request_log": 2}], r"line 1: gorgo_request_log is 2; this GORGO reads 1"),
        ([HEADER | {"boot_id": 5}], r"line 1: boot_id is 5; expected text"),
        ([HEADER | {"block_bytes": 0}], r"line 1: block_bytes is 0; expected a whole number from 1"),
        ([HEADER, ROW | {"received_s": "now"}], r'line 2: received_s is "now"; expected seconds'),
        ([HEADER, ROW | {"received_s": True}], r"line 2: received_s is true; expected seconds"),
        ([HEADER, ROW | {"received_s": -0.1}], r"line 2: received_s is -0\.1; expected seconds"),
        ([HEADER, ROW | {"received_s": 1e11}], r"line 2: received_s is 1.*; expected seconds"),
        ([HEADER, ROW | {"text_bytes": 2**53}], r"line 2: text_bytes is 9007199254740992; expected a whole number"),
        ([HEADER, ROW | {"block_hashes": "00000000000000aa"}], r"line 2: block_hashes is .*; expected a list"),
        ([HEADER, ROW | {"block_hashes": [7]}], r"line 2: block_hashes is \[7\]; expected a list"),
        ([HEADER, ROW | {"model": ["x" * 60]}], r'line 2: model is \["x{55}\.\.\.; expected'),
        ([HEADER, ROW | {"model": 7}], r"line 2: model is 7; expected text or null"),
        ([HEADER, ROW | {"input_tokens": -1}], r"line 2: input_tokens is -1; expected a whole number"),
        ([HEADER, ROW | {"output_tokens": 1.5}], r"line 2: output_tokens is 1\.5; expected a whole number"),
        ([HEADER, ROW | {"text_bytes": None}], r"line 2: text_bytes is null; expected a whole number"),
        ([HEADER, ROW | {"status": True}], r"line 2: status is true; expected a whole number"),
        ([HEADER, ROW | {"block_hashes": ["xyz"]}], r'line 2: block_hashes is \["xyz"\]; expected a list'),
        ([HEADER], r"log: the request log has no request"),
    ],
)
def test_other_lines_are_refused_with_file_and_line(tmp_path: Path, lines: list[Any], expected: str) -> None:
    log = written(tmp_path / "log", *lines)
    with pytest.raises(TraceError, match=expected) as caught:
        read_request_log(log)
    assert str(caught.value).startswith(str(log))


def test_counts_that_no_engine_can_mean_are_bounded(tmp_path: Path) -> None:
    log = written(tmp_path / "log", HEADER, ROW, ROW | {"input_tokens": 2**52, "output_tokens": 2**52})
    last = read_request_log(log).requests[-1]
    assert (last.input_tokens, last.output_tokens) == (10_000_000, 10_000_000)


def test_log_of_more_than_a_year_is_refused(tmp_path: Path) -> None:
    log = written(tmp_path / "log", HEADER, ROW, ROW | {"received_s": 1.7e9})
    with pytest.raises(TraceError, match=r"log: 1,699,999,999 s from the first request to the last; expected a year"):
        read_request_log(log)


def test_bounds_of_a_line_are_inside(tmp_path: Path) -> None:
    """A year from the first request to the last, counts and lengths as they come: the last that are taken."""
    last = {"received_s": 366 * 86_400.0, "text_bytes": 2**53 - 1, "input_tokens": 0, "output_tokens": 10_000_000}
    log = written(tmp_path / "log", HEADER | {"block_bytes": 1}, ROW | {"received_s": 0}, ROW | last)
    first, second = read_request_log(log).requests
    assert (first.timestamp_s, second.timestamp_s) == (0.0, 366 * 86_400.0)
    assert (second.input_tokens, second.output_tokens) == (1, 10_000_000)


def test_line_longer_than_any_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = [json.dumps(line) for line in (HEADER, ROW)]
    longest = max(map(len, lines)) + 1
    log = written(tmp_path / "log", *lines)
    monkeypatch.setattr(request_log, "MAX_LINE_BYTES", longest)
    assert len(read_request_log(log).requests) == 1
    monkeypatch.setattr(request_log, "MAX_LINE_BYTES", longest - 1)
    with pytest.raises(TraceError, match=r"line 2: over \d+ bytes; expected a request log"):
        read_request_log(log)


def test_missing_log_says_so(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="No such file"):
        read_request_log(tmp_path / "none")


@given(
    shared=st.integers(0, 40),
    first=st.integers(0, 40),
    second=st.integers(0, 40),
    hash_tokens=st.floats(100.0, 2000.0),
)
def test_ids_share_no_more_than_the_hashes_and_less_by_no_more_than_one_id(
    shared: int, first: int, second: int, hash_tokens: float
) -> None:
    # A hash stands for its whole prefix: after the first difference nothing is equal again.
    chains = [[*range(shared), *range(1000, 1000 + first)], [*range(shared), *range(2000, 2000 + second)]]
    tokens = [int(len(chain) * hash_tokens) + 100 for chain in chains]
    one, other = (hash_ids(chain, size, hash_tokens=hash_tokens) for chain, size in zip(chains, tokens, strict=True))
    ids = sum(left == right for left, right in zip(one, other, strict=False))
    assert one[:ids] == other[:ids]
    assert ids * BLOCK_TOKENS <= shared * hash_tokens + 1e-3
    assert (ids + 1) * BLOCK_TOKENS > shared * hash_tokens - 1e-3
    assert len(set(one)) == len(one)
    assert all(len(found) <= size // BLOCK_TOKENS for found, size in ((one, tokens[0]), (other, tokens[1])))


def test_reader_takes_what_the_writer_gives(tmp_path: Path) -> None:
    file: RequestLogFile = log_file(tmp_path / "log")
    file.write([finished(1.0, (7, 8, 9), input_tokens=1500, text_bytes=6144, output_tokens=None), finished(2.0)])
    file.close()
    trace = read_request_log(tmp_path / "log")
    assert [(request.input_tokens, request.output_tokens) for request in trace.requests] == [(1500, 20), (1100, 20)]


@pytest.mark.parametrize("compress", [gzip.compress, bz2.compress, lzma.compress])
def test_a_compressed_log_is_named_and_its_bytes_are_not_shown(
    tmp_path: Path, compress: Callable[[bytes], bytes]
) -> None:
    packed = tmp_path / "log"
    packed.write_bytes(compress(written(tmp_path / "plain", HEADER, ROW).read_bytes()))
    with pytest.raises(TraceError, match=r"log: a compressed file; expected a request log, unpacked$"):
        read_request_log(packed)
