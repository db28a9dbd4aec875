"""When a file counts as changed, and what of a configuration protects."""

from __future__ import annotations

import asyncio
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gorgo.config.load import parse_config
from gorgo.config.model import ClientRuleConfig, ClientsConfig, Config, ModelConfig
from gorgo.errors import ConfigError
from gorgo.live.reload.file_watch import POLL_S, SETTLE_S, ConfigFile, Found
from gorgo.live.reload.reloader import refuse_loss
from tests.live.reload.test_reloader import OLD

# --- When a file counts as changed: looks are taken one by one, so nothing depends on time.


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


# --- What of a configuration protects, and that a file with less of it is refused.


RULE = ClientRuleConfig(
    name="team", max_in_flight=2, requests_per_minute=60.0, tokens_per_minute=600.0, allowed_regions=("here",)
)
PROTECTED = replace(
    OLD,
    clients=ClientsConfig(
        keys_file="KEYS", max_in_flight=8, requests_per_minute=600.0, tokens_per_minute=6000.0, rules=(RULE,)
    ),
    models=(ModelConfig(name="m", allowed_regions=("here",)), ModelConfig(name="free")),
)


def without(**clients: Any) -> Config:
    return replace(PROTECTED, clients=replace(PROTECTED.clients, **clients))


LOSSES = {
    "clients.keys_file": without(keys_file=None),
    "clients.max_in_flight": without(max_in_flight=None),
    "clients.requests_per_minute": without(requests_per_minute=None),
    "clients.tokens_per_minute": without(tokens_per_minute=None),
    "the rule of client 'team'": without(rules=()),
    "max_in_flight of client 'team'": without(rules=(replace(RULE, max_in_flight=None),)),
    "requests_per_minute of client 'team'": without(rules=(replace(RULE, requests_per_minute=None),)),
    "tokens_per_minute of client 'team'": without(rules=(replace(RULE, tokens_per_minute=None),)),
    "allowed_regions of client 'team'": without(rules=(replace(RULE, allowed_regions=()),)),
    "allowed_regions of model 'm'": replace(PROTECTED, models=(ModelConfig(name="m"),)),
}


@pytest.mark.parametrize("lost", LOSSES)
def test_a_file_that_protects_less_is_refused_with_what_it_lacks(lost: str) -> None:
    with pytest.raises(ConfigError) as raised:
        refuse_loss(PROTECTED, LOSSES[lost])
    assert f": without {lost}; if that is intended, add `open: true` to `clients`" in str(raised.value)
    intended = replace(LOSSES[lost], clients=replace(LOSSES[lost].clients, open=True))
    refuse_loss(PROTECTED, intended)


def test_everything_that_a_cut_file_lacks_is_listed_at_once() -> None:
    with pytest.raises(ConfigError) as raised:
        refuse_loss(PROTECTED, OLD)
    for lost in ("clients.keys_file", "the rule of client 'team'", "allowed_regions of model 'm'"):
        assert lost in str(raised.value)


def test_a_file_with_as_much_or_more_protection_is_taken() -> None:
    refuse_loss(PROTECTED, PROTECTED)
    refuse_loss(OLD, PROTECTED)
    refuse_loss(PROTECTED, without(keys_file="OTHER", max_in_flight=100))
    refuse_loss(PROTECTED, replace(PROTECTED, models=PROTECTED.models[:1]))
