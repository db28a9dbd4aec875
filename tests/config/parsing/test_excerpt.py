"""The text of a line at a syntax error, without secrets."""

from __future__ import annotations

import pytest

from gorgo.config.load import parse_config
from gorgo.config.parsing.excerpt import WIDTH, excerpt, redact_secrets
from gorgo.errors import ConfigError


def message(text: str) -> str:
    with pytest.raises(ConfigError) as raised:
        parse_config(text.encode())
    return str(raised.value)


def test_syntax_error_shows_where_the_value_begins_and_where_it_breaks() -> None:
    assert message("proxy:\n  region: a\n  tls: {cert: x\nregions: []\n").splitlines()[2:] == [
        "    3 |   tls: {cert: x",
        "      |        ^",
        "    4 | regions: []",
        "      |        ^",
    ]


def test_error_at_the_end_of_the_file_shows_the_line_that_is_not_closed() -> None:
    assert message("x: 'abc\n\n").splitlines()[2:] == ["    1 | x: 'abc", "      |    ^"]


def test_long_line_is_cut_around_the_error() -> None:
    line = "[" + "bc d" * 150 + "}"
    shown, caret = excerpt(line, 1, 501).splitlines()
    assert shown == "1 | " + line[501 - WIDTH // 2 : 501 + WIDTH // 2]
    assert shown[len(caret) - 1 :].startswith(line[501:520])


def test_control_characters_of_a_line_are_blanks() -> None:
    assert excerpt("a:\t\x1b[2J\x07b\n", 1, 3) == "1 | a:  [2J b\n  |    ^"


@pytest.mark.parametrize(("line", "column"), [(0, 0), (3, 0), (2, 0)])
def test_line_that_is_empty_or_beyond_the_text_is_not_shown(line: int, column: int) -> None:
    assert excerpt("a: 1\n", line, column) == ""


@pytest.mark.parametrize(
    "secret",
    [
        "api_key: CANARY",
        'api_key_env: "CANARY"',
        "password = CANARY",
        "Authorization: CANARY",
        "bearer CANARY",
        "url: http://me:CANARY@host:80",
        "name: CANARYsk-0123456789abcdef0123",
        "{token:CANARY}",
    ],
)
def test_what_may_be_a_secret_is_redacted(secret: str) -> None:
    assert "CANARY" in secret
    assert "CANARY" not in redact_secrets(secret)
    assert len(redact_secrets(secret)) == len(secret)
    assert "CANARY" not in message(f"proxy: [{secret}\n}}\n")


def test_ordinary_values_are_not_redacted() -> None:
    line = "{name: us-ashburn-0, url: http://10.0.0.1:30000, models: [Qwen/Qwen3-32B], kv_tokens: 100000}"
    assert redact_secrets(line) == line
