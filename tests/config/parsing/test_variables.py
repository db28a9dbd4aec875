"""`${NAME}` in regions.yaml: expanded before the type is read, never shown; an unset one is an error with its line."""

from __future__ import annotations

from pathlib import Path

import pytest

from gorgo.config.load import load_config, parse_config
from gorgo.config.parsing.variables import MAX_EXPANDED, VariableError, Variables
from gorgo.errors import ConfigError

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
