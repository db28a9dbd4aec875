"""Options that several commands share: where the admin token comes from."""

from __future__ import annotations

from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from gorgo.cli.app import app
from gorgo.cli.options import admin_token, api_key
from tests.documents import commands


@pytest.fixture(autouse=True)
def _no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("GORGO_ADMIN_TOKEN", "GORGO_ADMIN_TOKEN_FILE", "GORGO_API_KEY"):
        monkeypatch.delenv(name, raising=False)


def test_without_any_there_is_none() -> None:
    assert admin_token() is None


def test_the_file_is_read_and_its_line_end_is_none_of_the_token(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "token").write_text("from-a-file\n")
    monkeypatch.setenv("GORGO_ADMIN_TOKEN_FILE", str(tmp_path / "token"))
    assert admin_token() == "from-a-file"


def test_the_variable_goes_before_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GORGO_ADMIN_TOKEN_FILE", str(tmp_path / "not-even-there"))
    monkeypatch.setenv("GORGO_ADMIN_TOKEN", "from-the-environment")
    assert admin_token() == "from-the-environment"


@pytest.mark.parametrize("content", [None, b"", b" \n", b"\xff\xfe"])
def test_a_file_without_a_token_is_an_error_that_names_it(
    content: bytes | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if content is not None:
        (tmp_path / "token").write_bytes(content)
    monkeypatch.setenv("GORGO_ADMIN_TOKEN_FILE", str(tmp_path / "token"))
    with pytest.raises(typer.BadParameter, match=r"GORGO_ADMIN_TOKEN_FILE=.*token: expected"):
        admin_token()


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


def test_blanks_around_a_token_are_none_of_it_and_blanks_alone_are_no_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GORGO_ADMIN_TOKEN", " padded\n")
    assert admin_token() == "padded"
    monkeypatch.setenv("GORGO_ADMIN_TOKEN", " \n")
    assert admin_token() is None


@pytest.mark.parametrize("key", ["CAN\r\nARY", "CANAR\u00dd", "CAN\x7f"])
def test_key_that_no_header_can_hold_is_a_usage_error_and_not_shown(key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GORGO_API_KEY", key)
    with pytest.raises(typer.BadParameter, match=r"^GORGO_API_KEY: expected printable ASCII") as caught:
        api_key()
    assert "CAN" not in str(caught.value)
    monkeypatch.setenv("GORGO_API_KEY", "key\n")
    assert api_key() == "key"


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


@pytest.mark.parametrize("name", ["/dev/zero", "long"])
def test_a_file_without_end_is_no_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    (tmp_path / "long").write_text("x" * 100_000)
    monkeypatch.setenv("GORGO_ADMIN_TOKEN_FILE", str(tmp_path / name))
    with pytest.raises(typer.BadParameter, match="expected the token, found more than any header holds"):
        admin_token()


def test_there_are_no_more_places_of_options_than_a_page_lists() -> None:
    """An option that few set is a key of a settings file or of regions.yaml; 130 before the verbs of an operator.

    Ten are those of `serve` in `picker`.
    """
    places = [
        (name, option.name)
        for name, command in commands()
        if name
        for option in command.params
        if option.param_type_name == "option"
    ]
    assert 100 < len(places) <= 204
