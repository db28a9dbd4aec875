from __future__ import annotations

import bz2
import gzip
import json
import lzma
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from gorgo.errors import TraceError
from gorgo.lab.traces import TraceFilters, load_trace


def lines(*stamps: int) -> bytes:
    rows = ({"timestamp": t, "input_length": 10, "output_length": 1, "hash_ids": [t]} for t in stamps)
    return b"\n".join(json.dumps(row).encode() for row in rows) + b"\n"


def test_gzip_is_told_by_its_first_bytes_not_its_name(tmp_path: Path) -> None:
    plain, packed = tmp_path / "a.gz", tmp_path / "b.jsonl"
    plain.write_bytes(lines(0, 10))
    packed.write_bytes(gzip.compress(lines(0, 10)))
    assert load_trace(plain) == load_trace(packed)


@pytest.mark.parametrize("pack", [bz2.compress, lzma.compress])
def test_bzip2_and_xz_are_read_and_damage_is_named(tmp_path: Path, pack: Callable[[bytes], bytes]) -> None:
    plain, packed = tmp_path / "a.jsonl", tmp_path / "b.jsonl"
    plain.write_bytes(lines(0, 10))
    packed.write_bytes(pack(lines(0, 10)))
    assert load_trace(plain) == load_trace(packed)
    for damaged in (pack(lines(*range(500)))[:-20], pack(b"x")[:8] + b"nonsense" * 9):
        packed.write_bytes(damaged)
        with pytest.raises(TraceError, match=r"b.jsonl: damaged (bzip2|xz) file \("):
            load_trace(packed)


def test_zstd_is_named_with_what_unpacks_it(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl.zst"
    path.write_bytes(b"\x28\xb5\x2f\xfd\x04\x58")
    with pytest.raises(TraceError, match=r"t.jsonl.zst: compressed by zstd; expected .*`zstd -d` unpacks it"):
        load_trace(path)


def test_a_byte_order_mark_before_the_first_line_is_no_part_of_it(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + lines(0, 10))
    assert [one.timestamp_s for one in load_trace(path)] == [0.0, 0.01]
    path.write_bytes(lines(0) + b"\xef\xbb\xbf" + lines(10))
    with pytest.raises(TraceError, match="line 2"):
        load_trace(path)


def test_ids_of_another_size_are_counted_by_it(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text(
        '{"timestamp": 0, "input_length": 131, "output_length": 1, "hash_ids": [1, 2, 3, 4, 5, 6, 7, 8, 9]}\n'
    )
    with pytest.raises(TraceError, match=r"expected 1 ids for .*one per 512 tokens\), not 9; --block-tokens names"):
        load_trace(path)
    assert load_trace(path, block_tokens=16)[0].hash_ids == tuple(range(1, 10))
    body = {"messages": [{"role": "user", "content": "a"}]}
    path.write_text(json.dumps({"timestamp": 0, "input_length": 9, "output_length": 1, "request": body}))
    with pytest.raises(TraceError, match="no body in a trace whose ids are of 16 tokens"):
        load_trace(path, block_tokens=16)


def test_empty_lines_are_skipped_and_counted(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_bytes(b"\n" + lines(0) + b"\n{}\n")
    with pytest.raises(TraceError, match=r"t.jsonl, line 4: input_length is missing"):
        load_trace(path)


def test_a_bad_line_behind_the_limit_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_bytes(lines(0) + b"nonsense\n")
    assert len(load_trace(path, TraceFilters(limit=1))) == 1


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "no request is left"),
        (b"\x1f\x8bnonsense", "damaged gzip file"),
        (gzip.compress(lines(0, 1, 2), mtime=0)[:-12], "damaged gzip file"),
        (b"\xff\xfe\n", "line 1: not UTF-8"),
    ],
)
def test_a_file_that_is_no_trace_is_one_clear_error(tmp_path: Path, content: bytes, said: str) -> None:
    path = tmp_path / "t.jsonl"
    path.write_bytes(content)
    with pytest.raises(TraceError, match=said):
        load_trace(path)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"nowhere.jsonl: No such file"):
        load_trace(tmp_path / "nowhere.jsonl")


def test_a_pipe_is_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(TraceError, match=r"pipe: a pipe; expected a file"):
        load_trace(tmp_path / "pipe")


def test_a_trace_of_more_than_a_year_is_a_slip_of_units(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_bytes(lines(5, 366 * 86_400_000 + 5))
    assert len(load_trace(path)) == 2
    path.write_bytes(lines(5, 366 * 86_400_000 + 1005))
    with pytest.raises(TraceError, match=r"t.jsonl, line 2: 31,622,401 s from the first request; expected"):
        load_trace(path)


def test_filters_that_leave_nothing_are_an_error(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_bytes(lines(0))
    with pytest.raises(TraceError, match="no request is left after the filters"):
        load_trace(path, TraceFilters(max_input=5))


def test_a_file_of_blank_lines_is_given_up_with_its_place(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl.gz"
    blank = b" " * 1023 + b"\n"
    path.write_bytes(gzip.compress(lines(0) + blank * 2048))
    with pytest.raises(TraceError, match=r"t.jsonl.gz, line 1026: over 1,048,576 .*; expected JSON lines"):
        load_trace(path)
    path.write_bytes(gzip.compress(lines(0) + blank * 1024 + lines(1) + blank * 1024))
    assert len(load_trace(path)) == 2
