"""Options that several commands share: where the admin token comes from, and the one that a process makes for
itself.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from gorgo.cli.app import app
from gorgo.cli.launch import available_processors, made_admin_token
from gorgo.cli.options import admin_token, api_key
from gorgo.config.values import MIN_TOKEN_CHARS
from tests.documents import commands

# --- Options that several commands share: where the admin token comes from.


@pytest.fixture
def _no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("GORGO_ADMIN_TOKEN", "GORGO_ADMIN_TOKEN_FILE", "GORGO_API_KEY"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.usefixtures("_no_environment")
def test_without_any_there_is_none() -> None:
    assert admin_token() is None


@pytest.mark.usefixtures("_no_environment")
def test_the_file_is_read_and_its_line_end_is_none_of_the_token(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "token").write_text("from-a-file\n")
    monkeypatch.setenv("GORGO_ADMIN_TOKEN_FILE", str(tmp_path / "token"))
    assert admin_token() == "from-a-file"


@pytest.mark.usefixtures("_no_environment")
def test_the_variable_goes_before_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GORGO_ADMIN_TOKEN_FILE", str(tmp_path / "not-even-there"))
    monkeypatch.setenv("GORGO_ADMIN_TOKEN", "from-the-environment")
    assert admin_token() == "from-the-environment"


@pytest.mark.usefixtures("_no_environment")
@pytest.mark.parametrize("content", [None, b"", b" \n", b"\xff\xfe"])
def test_a_file_without_a_token_is_an_error_that_names_it(
    content: bytes | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if content is not None:
        (tmp_path / "token").write_bytes(content)
    monkeypatch.setenv("GORGO_ADMIN_TOKEN_FILE", str(tmp_path / "token"))
    with pytest.raises(typer.BadParameter, match=r"GORGO_ADMIN_TOKEN_FILE=.*token: expected"):
        admin_token()


@pytest.mark.usefixtures("_no_environment")
@pytest.mark.parametrize("place", ["GORGO_ADMIN_TOKEN", "GORGO_ADMIN_TOKEN_FILE"])
def test_token_that_nobody_could_show_is_a_usage_error_that_names_its_place(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "token"
    for token in ("CAN\tARY", "CANAR\u00dd"):
        file.write_text(token, encoding="utf-8")
        monkeypatch.setenv(place, str(file) if place.endswith("FILE") else token)
        with pytest.raises(typer.BadParameter, match=f"^{place}.*: expected printable ASCII") as caught:
            admin_token()
        assert "CAN" not in str(caught.value)


@pytest.mark.usefixtures("_no_environment")
def test_blanks_around_a_token_are_none_of_it_and_blanks_alone_are_no_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GORGO_ADMIN_TOKEN", " padded\n")
    assert admin_token() == "padded"
    monkeypatch.setenv("GORGO_ADMIN_TOKEN", " \n")
    assert admin_token() is None


@pytest.mark.usefixtures("_no_environment")
@pytest.mark.parametrize("key", ["CAN\r\nARY", "CANAR\u00dd", "CAN\x7f"])
def test_key_that_no_header_can_hold_is_a_usage_error_and_not_shown(key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GORGO_API_KEY", key)
    with pytest.raises(typer.BadParameter, match=r"^GORGO_API_KEY: expected printable ASCII") as caught:
        api_key()
    assert "CAN" not in str(caught.value)
    monkeypatch.setenv("GORGO_API_KEY", "key\n")
    assert api_key() == "key"


@pytest.mark.usefixtures("_no_environment")
@pytest.mark.parametrize(
    "words",
    [
        ["overload", "art-chat-sample", "--load"],
        ["overload", "art-chat-sample", "--spread"],
        ["simulate", "art-chat-sample", "--time-scale"],
        ["simulate", "art-chat-sample", "--peer-delay"],
        ["simulate", "art-chat-sample", "--peer-loss"],
        ["tune", "--budget-s"],
    ],
)
def test_number_that_is_none_is_a_usage_error_that_names_the_option(words: list[str]) -> None:
    for number in ("nan", "inf", "-inf", "1e400"):
        done = CliRunner().invoke(app, [*words, number])
        assert done.exit_code == 2, number
        assert words[-1] in done.output


@pytest.mark.usefixtures("_no_environment")
@pytest.mark.parametrize("name", ["/dev/zero", "long"])
def test_a_file_without_end_is_no_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    (tmp_path / "long").write_text("x" * 100_000)
    monkeypatch.setenv("GORGO_ADMIN_TOKEN_FILE", str(tmp_path / name))
    with pytest.raises(typer.BadParameter, match="expected the token, found more than any header holds"):
        admin_token()


@pytest.mark.usefixtures("_no_environment")
def test_there_are_no_more_places_of_options_than_a_page_lists() -> None:
    """An option that few set is a key of a settings file or of regions.yaml; 130 before the verbs of an operator.

    Ten are those of `serve` in `picker`, and twelve those of traces in other forms, sessions, windows and plots;
    25 are those of `plan`, `diagnose`, a minute's report, processes and their takeover, and seven those of `whatif`.
    """
    places = [
        (name, option.name)
        for name, command in commands()
        if name
        for option in command.params
        if option.param_type_name == "option"
    ]
    assert 100 < len(places) <= 246


# --- The admin token of a process that was given none: made, printed, and the same after a restart with a state file.


def test_token_is_printed_and_ends_with_a_process_without_a_state_file() -> None:
    token, words = made_admin_token(None)
    assert len(token) >= MIN_TOKEN_CHARS
    assert words == f"made the token {token} for this process; --state FILE keeps one"
    assert made_admin_token(None)[0] != token


def test_restart_has_the_same_token_which_only_its_owner_can_read(tmp_path: Path) -> None:
    state, kept = tmp_path / "state.json", tmp_path / "state.json.token"
    token, words = made_admin_token(state)
    assert words == f"made the token {token}; for other commands: export GORGO_ADMIN_TOKEN_FILE={kept}"
    assert kept.read_text() == f"{token}\n"
    assert stat.S_IMODE(kept.stat().st_mode) == 0o600
    kept.chmod(0o644)
    again, words = made_admin_token(state)
    assert again == token
    assert token not in words
    assert str(kept) in words
    assert stat.S_IMODE(kept.stat().st_mode) == 0o600


@pytest.mark.parametrize("content", [b"", b"short\n", b"a" * 31 + b"\xff"])
def test_damaged_file_is_never_a_weak_token(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "state.json.token").write_bytes(content)
    token, _ = made_admin_token(tmp_path / "state.json")
    assert len(token) >= MIN_TOKEN_CHARS
    assert token.encode() != content.strip()


def test_folder_that_cannot_be_written_to_gives_a_token_for_this_process(tmp_path: Path) -> None:
    token, words = made_admin_token(tmp_path / "none" / "state.json")
    assert words.startswith(f"made the token {token} for this process, because ")
    assert os.listdir(tmp_path) == []


# --- `--processes auto`: the processors that a process may use, of a container with a limit not those of its machine.


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, 64),
        ({"cpu.max": "max 100000"}, 64),
        ({"cpu.max": "250000 100000"}, 3),
        ({"slice/unit/cpu.max": "200000 100000", "cpu.max": "max 100000"}, 2),
        ({"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, 64),
        ({"cpu/slice/unit/cpu.cfs_quota_us": "50000", "cpu/slice/unit/cpu.cfs_period_us": "100000"}, 1),
        ({"cpu.max": "6400000 10000"}, 64),
        ({"cpu.max": "0 0"}, 64),
    ],
)
def test_processors_are_those_that_a_limit_grants(
    files: dict[str, str], expected: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(64)))
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"{text}\n")
    (tmp_path / "own").write_text("0::/slice/unit\n")
    assert available_processors(tmp_path, tmp_path / "own") == expected
