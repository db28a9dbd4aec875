"""The admin token of a process that was given none: made, printed, and the same after a restart with a state file."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from gorgo.cli.launch import made_admin_token
from gorgo.config.values import MIN_TOKEN_CHARS


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
