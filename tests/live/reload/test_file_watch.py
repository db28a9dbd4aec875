"""When a file counts as changed: looks are taken one by one, so nothing depends on time."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from gorgo.config.load import parse_config
from gorgo.errors import ConfigError
from gorgo.live.reload.file_watch import POLL_S, SETTLE_S, ConfigFile, Found


def followed(folder: Path, text: bytes = b"one") -> tuple[Path, ConfigFile]:
    path = folder / "regions.yaml"
    path.write_bytes(text)
    return path, ConfigFile(path, parse_config, text, poll_s=0.001, settle_s=0.0)


async def looks(file: ConfigFile, count: int) -> list[Found | None]:
    return [await file.poll() for _ in range(count)]


async def test_unchanged_file_says_nothing(tmp_path: Path) -> None:
    _, file = followed(tmp_path)
    assert await looks(file, 4) == [None] * 4


async def test_change_is_told_once_when_it_has_stood_for_a_look(tmp_path: Path) -> None:
    path, file = followed(tmp_path)
    await looks(file, 2)
    path.write_bytes(b"another")
    assert await looks(file, 4) == [None, b"another", None, None]


async def test_change_before_the_first_look_is_not_lost(tmp_path: Path) -> None:
    path, file = followed(tmp_path)
    path.write_bytes(b"changed while the proxy started")
    assert (await looks(file, 2))[1] == b"changed while the proxy started"


async def test_change_of_a_file_that_it_names_reports_the_content_again(tmp_path: Path) -> None:
    _, file = followed(tmp_path)
    keys = tmp_path / "keys"
    keys.write_bytes(b"first")
    file.watch_also(str(keys))
    keys.write_bytes(b"second")
    async with asyncio.timeout(10):
        assert await file.changed() == b"one"
    keys.unlink()  # as in the middle of a replacement
    assert not await file._beside_changed()
    keys.write_bytes(b"third one")
    assert [await file._beside_changed() for _ in range(4)] == [False, True, False, False]
    file.watch_also(None)
    keys.write_bytes(b"fourth")
    assert [await file._beside_changed() for _ in range(3)] == [False] * 3


async def test_half_written_file_is_left_alone(tmp_path: Path) -> None:
    path, file = followed(tmp_path)
    await looks(file, 2)
    with path.open("wb", buffering=0) as writer:
        for part in (b"", b"half", b" and half"):
            writer.write(part)
            assert await file.poll() is None
    assert await file.poll() == b"half and half"


async def test_file_replaced_by_rename_is_read(tmp_path: Path) -> None:
    path, file = followed(tmp_path)
    await looks(file, 2)
    for text in (b"two", b"six"):  # of one size, as `one` is
        (tmp_path / "new").write_bytes(text)
        os.replace(tmp_path / "new", path)
        assert await looks(file, 2) == [None, text]


async def test_link_that_is_turned_over_is_read(tmp_path: Path) -> None:
    path, file = followed(tmp_path)
    await looks(file, 2)
    (tmp_path / "elsewhere").write_bytes(b"two")
    (tmp_path / "link").symlink_to("elsewhere")
    os.replace(tmp_path / "link", path)
    assert await looks(file, 2) == [None, b"two"]


async def test_touched_file_is_not_a_changed_one(tmp_path: Path) -> None:
    path, file = followed(tmp_path)
    await looks(file, 2)
    os.utime(path, (1, 1))
    assert await looks(file, 3) == [None] * 3


async def test_missing_file_is_an_error_once_and_its_return_is_told(tmp_path: Path) -> None:
    path, file = followed(tmp_path)
    await looks(file, 2)
    path.unlink()
    asked = asyncio.create_task(file.changed())
    gone = await asyncio.wait_for(asked, 10)
    assert isinstance(gone, ConfigError)
    with pytest.raises(ConfigError, match="missing, or not a regular file"):
        await file.parse(gone)
    assert await looks(file, 3) == [None] * 3
    path.write_bytes(b"one")
    assert await asyncio.wait_for(file.changed(), 10) == b"one"


async def test_folder_in_its_place_is_an_error(tmp_path: Path) -> None:
    path, file = followed(tmp_path)
    path.unlink()
    path.mkdir()
    file.request_reload()
    assert "not a regular file" in str(await asyncio.wait_for(file.changed(), 10))


async def test_file_asked_for_is_told_changed_or_not(tmp_path: Path) -> None:
    _, file = followed(tmp_path)
    for _ in range(2):
        file.request_reload()
        assert await asyncio.wait_for(file.changed(), 10) == b"one"
    assert await looks(file, 3) == [None] * 3


async def test_file_asked_for_while_it_is_written_is_read_when_two_reads_agree(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, file = followed(tmp_path)
    reads = iter([b"h", b"half", b"half and half", b"half and half"])

    def take(_: Path) -> tuple[Found, tuple[int, ...] | None]:
        return next(reads), ()

    monkeypatch.setattr("gorgo.live.reload.file_watch._read_file", take)
    file.request_reload()
    assert await asyncio.wait_for(file.changed(), 10) == b"half and half"
    assert path.exists()


def test_a_file_is_looked_at_each_second_and_rests_for_a_twentieth_after_a_request() -> None:
    assert (POLL_S, SETTLE_S) == (1.0, 0.05)
