"""The reader of command lines, which other tests rely on to refuse what the command line would."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.packaging.commands import parsed


def test_words_become_the_command_s_own_values() -> None:
    name, values = parsed(["engine", "--replica", "a", "--port", "0"])
    assert (name, values["replica"], values["port"], values["config"]) == ("engine", "a", 0, Path("regions.yaml"))


def test_a_command_of_two_words_is_found() -> None:
    assert parsed(["datasets", "describe", "chat-small"])[0] == "datasets describe"


@pytest.mark.parametrize(
    "words",
    [
        ["server"],
        ["serve", "--listen", "x"],
        ["engine"],
        ["engine", "--replica", "a", "--port", "seven"],
        ["engine", "--replica", "a", "--port", "70000"],
        ["datasets", "lists"],
    ],
)
def test_what_the_command_line_would_refuse_is_refused(words: list[str]) -> None:
    with pytest.raises(Exception, match=r"(?i)no such|missing|should be"):
        parsed(words)
