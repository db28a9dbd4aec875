"""Lines on disk: what is in them, when files turn over, and what an interrupted one leaves."""

from __future__ import annotations

import json
import os
import struct
from pathlib import Path
from typing import Any

import pytest

from gorgo.errors import ConfigError
from gorgo.live.logs import Finished, RequestLogFile


def finished(received_s: float = 1000.5, hashes: tuple[int, ...] = (1, 2**64 - 1), **changes: Any) -> Finished:
    fields: dict[str, Any] = {
        "model": "m",
        "input_tokens": 1100,
        "output_tokens": 20,
        "text_bytes": 4400,
        "status": 200,
    }
    return Finished(received_s, hashes=struct.pack(f"<{len(hashes)}Q", *hashes), **(fields | changes))


def log_file(path: Path, **options: Any) -> RequestLogFile:
    fields: dict[str, Any] = {"boot_id": "boot", "clock": lambda: 999.0, "block_bytes": 2048}
    return RequestLogFile(path, **(fields | options))


def entries(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_file_begins_with_a_header_and_has_a_line_per_request(tmp_path: Path) -> None:
    file = log_file(tmp_path / "log")
    file.open()
    file.write([finished(), finished(1001.0, (), model=None, output_tokens=None, status=499)])
    file.close()
    header, one, other = entries(tmp_path / "log")
    assert header == {"gorgo_request_log": 1, "boot_id": "boot", "started_s": 999.0, "block_bytes": 2048}
    assert one == {
        "received_s": 1000.5,
        "model": "m",
        "client": None,
        "input_tokens": 1100,
        "output_tokens": 20,
        "text_bytes": 4400,
        "status": 200,
        "replica": None,
        "cached_tokens": None,
        "attempts": 0,
        "queued_s": None,
        "ttft_s": None,
        "e2e_s": None,
        "boundaries": [],
        "block_hashes": ["0000000000000001", "ffffffffffffffff"],
    }
    assert (other["model"], other["output_tokens"], other["block_hashes"]) == (None, None, [])


def test_name_of_a_model_cannot_break_a_line(tmp_path: Path) -> None:
    file = log_file(tmp_path / "log")
    file.write([finished(model='a"\n\u2028{')])
    assert entries(tmp_path / "log")[1]["model"] == 'a"\n\u2028{'
    file.close()


def test_full_file_turns_over_and_only_so_many_stay(tmp_path: Path) -> None:
    file = log_file(tmp_path / "log", max_bytes=1000, max_files=3)
    for number in range(60):
        file.write([finished(float(number))])
    file.close()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["log", "log.1", "log.2"]
    assert all(path.stat().st_size <= 1000 for path in tmp_path.iterdir())
    kept = [entry for name in ("log.2", "log.1", "log") for entry in entries(tmp_path / name)]
    assert all("gorgo_request_log" in entries(path)[0] for path in tmp_path.iterdir())
    times = [entry["received_s"] for entry in kept if "received_s" in entry]
    assert times == [float(number) for number in range(60 - len(times), 60)]
    assert len(times) > 5


def test_next_run_goes_on_in_the_same_file_under_its_own_header(tmp_path: Path) -> None:
    for boot in ("one", "two"):
        file = log_file(tmp_path / "log", boot_id=boot)
        file.open()
        file.write([finished()])
        file.close()
    assert [entry.get("boot_id") for entry in entries(tmp_path / "log")] == ["one", None, "two", None]


@pytest.mark.parametrize("removed", [False, True])
def test_file_that_another_program_rotates_is_begun_anew_without_a_signal(tmp_path: Path, removed: bool) -> None:
    file = log_file(tmp_path / "log")
    file.open()
    file.write([finished(1.0)])
    os.rename(tmp_path / "log", tmp_path / "log-2026")
    if removed:
        (tmp_path / "log-2026").unlink()
    file.write([finished(2.0)])
    file.write([finished(3.0)])
    file.close()
    header, *lines = entries(tmp_path / "log")
    assert "gorgo_request_log" in header
    assert [line["received_s"] for line in lines] == [2.0, 3.0]
    if not removed:
        assert [line.get("received_s") for line in entries(tmp_path / "log-2026")] == [None, 1.0]


def test_file_in_the_place_of_a_rotated_one_is_appended_to_under_a_header(tmp_path: Path) -> None:
    file = log_file(tmp_path / "log")
    file.open()
    os.rename(tmp_path / "log", tmp_path / "log-2026")
    (tmp_path / "log").touch()  # `create` of logrotate
    file.write([finished(2.0)])
    file.close()
    assert [line.get("received_s") for line in entries(tmp_path / "log")] == [None, 2.0]


def test_file_that_another_program_truncates_begins_with_a_header_again(tmp_path: Path) -> None:
    file = log_file(tmp_path / "log")
    file.open()
    file.write([finished(1.0)])
    os.truncate(tmp_path / "log", 0)  # `copytruncate` of logrotate
    file.write([finished(2.0)])
    file.write([finished(3.0)])
    file.close()
    assert [line.get("received_s") for line in entries(tmp_path / "log")] == [None, 2.0, 3.0]


def test_lines_of_a_place_that_takes_no_file_any_more_are_not_counted_as_written(tmp_path: Path) -> None:
    folder = tmp_path / "logs"
    folder.mkdir()
    file = log_file(folder / "log")
    file.open()
    (folder / "log").unlink()
    folder.rmdir()
    with pytest.raises(FileNotFoundError):
        file.write([finished(1.0)])


def test_line_that_was_cut_off_ends_before_the_next_header(tmp_path: Path) -> None:
    (tmp_path / "log").write_text('{"received_s": 1.0, "mod')
    file = log_file(tmp_path / "log")
    file.open()
    file.close()
    cut, header = (tmp_path / "log").read_text().splitlines()
    assert cut == '{"received_s": 1.0, "mod'
    assert "gorgo_request_log" in header


def test_files_are_for_their_owner_alone(tmp_path: Path) -> None:
    file = log_file(tmp_path / "log")
    file.open()
    file.close()
    assert (tmp_path / "log").stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("kind", ["folder", "pipe", "nowhere"])
def test_what_cannot_be_a_log_is_told_at_the_start(tmp_path: Path, kind: str) -> None:
    path = tmp_path / kind
    if kind == "folder":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    else:
        path = path / "log"
    with pytest.raises(ConfigError, match=r"cannot write a request log: .*; expected a file"):
        log_file(path).open()
