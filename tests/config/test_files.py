"""Files: the YAML layer alone, files that are written whole or not at all, and weights files."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from gorgo.config.atomic import PUBLIC, create_file, write_atomically
from gorgo.config.document import (
    MAX_EXPANDED,
    MAX_LINE,
    MAX_NODES,
    WIDTH,
    VariableError,
    Variables,
    excerpt,
    read_document,
    redact_secrets,
    show_path,
    show_value,
)
from gorgo.config.load import load_config, parse_config
from gorgo.config.weights_file import WeightsFile, parse_weights_file, read_weights_file, write_weights_file
from gorgo.errors import ConfigError

# --- The YAML layer alone: plain data, lines, notation.


@pytest.mark.parametrize(
    ("text", "value"),
    [("3", 3), ("-0", 0), ("'3'", "3"), ("3.0", 3.0), ("1e3", 1000.0), (".5", 0.5), ("true", True), ("yes", "yes"),
     ("True", "True"), ("~", None), ("", None), ("''", ""), ("0x1F", "0x1F"), ("1_000", "1_000"), ("1:30", "1:30"),
     ("2026-01-01", "2026-01-01"), ("|\n  a\n  b", "a\nb"), ("1234567890123456789", 1234567890123456789.0),
     ("\u0663", "\u0663")],
)  # fmt: skip
def test_scalar_is_what_it_looks_like_and_nothing_cleverer(text: str, value: object) -> None:
    document = read_document(f"key: {text}".encode())
    assert document.data == {"key": value}
    assert isinstance(document.data, dict)
    assert type(document.data["key"]) is type(value)
    assert not document.problems


def test_every_place_has_its_line() -> None:
    document = read_document(b"a:\n  b: 1\nc:\n- d\n-\n  e: 2\n")
    places = {show_path(path): line for path, line in document.lines.items()}
    assert places == {"the file": 1, "a": 1, "a.b": 2, "c": 3, "c[0]": 4, "c[1]": 6, "c[1].e": 6}
    assert document.line(("c", 1, "missing")) == 6


def test_crlf_and_byte_order_mark_are_read() -> None:
    document = read_document(b"\xef\xbb\xbfa: 1\r\nb: 2\r\n")
    assert document.data == {"a": 1, "b": 2}
    assert document.line(("b",)) == 2


@pytest.mark.parametrize(
    ("value", "shown"),
    [({"a": 1}, "a mapping"), ([1], "a list"), ([], "an empty list"), (None, "null"), (True, "true"), (1.5, "1.5"),
     ("\u00e9\n", r"'\xe9\n'"), ("x" * 100, "'" + "x" * 56 + "...")],
)  # fmt: skip
def test_value_is_shown_on_one_short_line(value: object, shown: str) -> None:
    assert show_value(value) == shown


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


FILE = """\
proxy:
  region: ${REGION:-us}
  probe_interval_s: ${PROBE_S}
regions:
  - name: ${REGION:-us}
replicas:
  - name: "0"
    region: ${REGION:-us}
    url: http://${HOST}:${PORT:-30000}
    request_usage: ${USAGE:-false}
    models: ["price in $$", "$5", "$$$${HOST}"]
"""


def test_values_are_expanded_before_their_type_is_read() -> None:
    config = parse_config(FILE.encode(), environ={"PROBE_S": "2.5", "HOST": "10.0.0.5", "USAGE": "true"})
    assert config.proxy.probe_interval_s == 2.5
    (replica,) = config.replicas
    assert (replica.url, replica.region, replica.request_usage) == ("http://10.0.0.5:30000", "us", True)
    assert replica.models == ("price in $", "$5", "$${HOST}")


def test_a_quoted_reference_stays_text_and_a_value_is_not_expanded_again() -> None:
    text = FILE.replace('name: "0"', 'name: "${ID}"').replace("$$$${HOST}", "${AGAIN}")
    config = parse_config(text.encode(), environ={"PROBE_S": "3", "HOST": "a", "ID": "7", "AGAIN": "${HOST} $$"})
    assert config.replicas[0].name == "7"
    assert config.replicas[0].models[2] == "${HOST} $$"


def test_each_unset_variable_is_an_error_with_its_line() -> None:
    with pytest.raises(ConfigError) as raised:
        parse_config(FILE.encode(), source="fleet.yaml", environ={"REGION": "eu"})
    assert str(raised.value).splitlines() == [
        "fleet.yaml: 2 errors",
        "  proxy.probe_interval_s (line 3): the environment variable PROBE_S is not set; "
        "expected it to be set, or ${PROBE_S:-default}",
        "  replicas[0].url (line 9): the environment variable HOST is not set; "
        "expected it to be set, or ${HOST:-default}",
    ]


def test_a_wrong_value_is_named_by_its_variable_and_never_shown() -> None:
    with pytest.raises(ConfigError) as raised:
        parse_config(FILE.encode(), environ={"PROBE_S": "canary", "HOST": "canary canary"})
    assert "canary" not in str(raised.value)
    assert "proxy.probe_interval_s (line 3): the value of '${PROBE_S}'; expected a number" in str(raised.value)
    assert "the value of 'http://${HOST}:${PORT:-30000}'; expected an http:// or https:// URL" in str(raised.value)


@pytest.mark.parametrize("text", ["${", "${}", "${A", "${A-b}", "${1}", "${A.B}"])
def test_a_reference_that_is_none_is_an_error_that_says_what_is_one(text: str) -> None:
    with pytest.raises(VariableError) as raised:
        Variables({"A": "a"}).expand(text)
    assert raised.value.expected == "${NAME}, ${NAME:-default}, or $$ for a dollar sign"


def test_keys_are_not_expanded() -> None:
    with pytest.raises(ConfigError, match=r"proxy\.\$\{A\} \(line 1\): unknown key"):
        parse_config(b'proxy: {"${A}": 1}', environ={"A": "region"})


def test_a_small_file_with_a_long_variable_does_not_grow_without_bound() -> None:
    variables = Variables({"A": "x" * (MAX_EXPANDED // 2)})
    variables.expand("${A}${A}")
    with pytest.raises(VariableError, match="too long"):
        variables.expand("${A}")


def test_a_file_reads_the_environment_of_the_process_at_each_reading(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "regions.yaml"
    file.write_text(FILE)
    monkeypatch.setenv("PROBE_S", "1")
    for host in ("a", "b"):
        monkeypatch.setenv("HOST", host)
        assert load_config(file).replicas[0].url == f"http://{host}:30000"


def test_a_reference_within_braces_needs_quotes_and_the_error_says_so() -> None:
    text = FILE + "  - {name: b, region: us, url: http://${HOST}:1}\n"
    with pytest.raises(ConfigError, match=r"\(line 12\): not YAML: .*; expected quotes around \$\{NAME\}"):
        parse_config(text.encode(), environ={})
    quoted = text.replace("http://${HOST}:1}", '"http://${HOST}:1"}')
    assert parse_config(quoted.encode(), environ={"PROBE_S": "1", "HOST": "h"}).replicas[1].url == "http://h:1"


# Bounds of a YAML file beside its length: keys and values, and the line that an error shows.
def test_keys_and_values_are_counted_before_they_are_read() -> None:
    assert read_document(b"[" + b"1," * (MAX_NODES - 1) + b"]").problems == []
    (problem,) = read_document(b"[" + b"1," * MAX_NODES + b"]").problems
    assert "too many keys and values" in str(problem)
    assert "65,536" in str(problem)


def test_line_of_an_error_is_searched_and_shown_up_to_its_bound() -> None:
    assert excerpt("a" * MAX_LINE, 1, 0)
    assert excerpt("auth" * 250_000, 1, 0) == ""
    (problem,) = read_document(b"a: [" + b"auth" * 250_000).problems
    assert len(str(problem)) < 200


# --- Files that are written whole or not at all, and what is no file.


def test_pipe_is_written_to_and_stays_a_pipe(tmp_path: Path) -> None:
    # A rename over /dev/null, which root may do, would take it from every program of the machine.
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        write_atomically(pipe, b"weights")
        assert os.read(reader, 100) == b"weights"
    finally:
        os.close(reader)
    assert stat.S_ISFIFO(pipe.stat().st_mode)
    assert [path.name for path in tmp_path.iterdir()] == ["pipe"]


def test_folder_is_no_file_to_write(tmp_path: Path) -> None:
    with pytest.raises(IsADirectoryError):
        write_atomically(tmp_path, b"weights")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("mode", "others"), [(None, 0), (PUBLIC, 0o044)])
def test_file_is_for_its_owner_unless_it_is_for_everybody(tmp_path: Path, mode: int | None, others: int) -> None:
    before = os.umask(0o022)
    try:
        write_atomically(tmp_path / "file", b"x", **({} if mode is None else {"mode": mode}))
    finally:
        os.umask(before)
    assert (tmp_path / "file").stat().st_mode & 0o077 == others


@pytest.mark.parametrize("name", [".file.new", "file"])
def test_a_link_that_another_user_has_planted_is_never_written_through(tmp_path: Path, name: str) -> None:
    victim = tmp_path / "victim"
    victim.write_bytes(b"old")
    (tmp_path / name).symlink_to(victim)
    if name == "file":
        create_file(tmp_path / "file").close()
    else:
        write_atomically(tmp_path / "file", b"new")
    assert victim.read_bytes() == b"old"
    assert not (tmp_path / "file").is_symlink()


def test_a_file_that_another_user_has_planted_is_replaced_and_not_filled(tmp_path: Path) -> None:
    theirs = (tmp_path / ".file.new").open("wb")
    write_atomically(tmp_path / "file", b"secret")
    with theirs:
        assert os.fstat(theirs.fileno()).st_size == 0
    assert (tmp_path / "file").read_bytes() == b"secret"


# --- Weights files: read back as written, and refused with place and expectation.


FULL = WeightsFile(
    policy="gorgo-ms",
    weights={"m_rtt": 1.25, "lambda": 0.02},
    widened=True,
    source="gorgo tune",
    created="2026-04-01T12:00:00+00:00",
    note="found at night",
    evidence={"ttft_ms_p95": [900.0, 950.0]},
)


@pytest.mark.parametrize("file", [FULL, WeightsFile(policy="gorgo", weights={})])
def test_file_is_read_as_it_was_written(tmp_path: Path, file: WeightsFile) -> None:
    write_weights_file(tmp_path / "weights.json", file)
    assert read_weights_file(tmp_path / "weights.json") == file


def test_file_replaces_the_one_that_was_there_and_leaves_nothing_beside_it(tmp_path: Path) -> None:
    for file in (FULL, WeightsFile(policy="random", weights={})):
        write_weights_file(tmp_path / "weights.json", file)
    assert read_weights_file(tmp_path / "weights.json").policy == "random"
    assert [path.name for path in tmp_path.iterdir()] == ["weights.json"]


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{}", "nonsense", '{"policy": 1, "weights": {}}', '{"policy": "gorgo", "weights": []}',
     '{"policy": "gorgo", "weights": {"w_rtt": "1"}}', '{"policy": "gorgo", "weights": {"w_rtt": true}}',
     '{"policy": "gorgo", "weights": {}, "more": 1}', '{"policy": "gorgo", "weights": {}, "widened": 1}',
     '{"policy": "gorgo", "weights": {}, "note": 1}', '{"policy": "gorgo", "weights": {}, "evidence": []}',
     '{"policy": "gorgo", "weights": {}, "gorgo_weights": 0}',
     '{"policy": "gorgo", "weights": {}, "gorgo_weights": "1"}',
     '{"policy": "gorgo", "weights": {"w_rtt": 1%s}}' % ("0" * 400), '{"policy": "gorgo", "weights": {"w_rtt": NaN}}',
     "[" * 50_000, '{"policy": "' + "x" * 70_000],
)  # fmt: skip
def test_other_json_is_no_weights_file(text: str) -> None:
    with pytest.raises(ConfigError, match=r'^weights\.json: .*expected \{"policy"'):
        parse_weights_file(text.encode(), source="weights.json")


def test_file_of_a_newer_form_says_so() -> None:
    with pytest.raises(ConfigError, match="form 2, of a newer GORGO"):
        parse_weights_file(b'{"gorgo_weights": 2, "policy": "gorgo", "weights": {}}', source="weights.json")


def test_missing_file_says_so(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        read_weights_file(tmp_path / "none.json")
