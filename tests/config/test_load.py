"""regions.yaml: what is good loads; what is not, old keys too, is named with place, line, value and expectation,
all at once.
"""

from __future__ import annotations

import json
import re
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, get_type_hints

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gorgo.config import load
from gorgo.config.document import Path as DocumentPath
from gorgo.config.fleet import CapacityConfig, KvEventsConfig, ReplicaConfig
from gorgo.config.load import KEY_VARIABLE, MAX_PROBLEMS_SHOWN, RENAMED, config_text, keys_at, load_config, parse_config
from gorgo.config.model import Config, LimitsConfig, ModelConfig, ProxyConfig, RegionConfig, SimulationConfig
from gorgo.config.replica_advice import model_warnings, url_warnings, without_api_path
from gorgo.config.router_settings import Deadlines, deadlines_by_region
from gorgo.errors import ConfigError
from gorgo.policies.registry import make_policy

# --- regions.yaml: what is good loads, what is not is named with place, line, value and expectation, all at once.


GOOD = """\
proxy:
  region: us
  weights: {w_rtt: 0.5}
regions:
  - name: us
  - name: eu
replicas:
  - name: us-0
    region: us
    url: http://127.0.0.1:30000
  - name: eu-0
    region: eu
    url: https://eu.example:30000/base
    models: [a, b]
    capacity: {kv_tokens: 100000}
limits:
  max_attempts: 2
simulation:
  rtt_ms: {us: 2, eu: 95.5}
"""

ROOT = Path(__file__).parents[2]


def errors(text: str | bytes) -> list[str]:
    with pytest.raises(ConfigError) as raised:
        parse_config(text if isinstance(text, bytes) else text.encode())
    first, *rest = str(raised.value).splitlines()
    assert first.startswith("regions.yaml: "), first
    # Without the excerpts of the file.
    return [line.strip() for line in rest if not re.match(r" +\d* ?\|", line)]


def changed(old: str, new: str) -> str:
    assert GOOD.count(old) == 1, old
    return GOOD.replace(old, new)


def test_good_file_loads() -> None:
    config = parse_config(GOOD.encode())
    assert config.proxy == ProxyConfig(region="us", weights={"w_rtt": 0.5})
    assert config.limits == LimitsConfig(max_attempts=2)
    assert config.simulation == SimulationConfig(rtt_ms={"us": 2.0, "eu": 95.5})
    assert config.replicas[1] == ReplicaConfig(
        name="eu-0",
        region="eu",
        url="https://eu.example:30000/base",
        models=("a", "b"),
        capacity=CapacityConfig(kv_tokens=100_000),
    )


def test_engine_of_a_replica_that_names_none_is_auto() -> None:
    assert {replica.engine for replica in parse_config(GOOD.encode()).replicas} == {"auto"}
    written = parse_config(changed("name: us-0", "name: us-0\n    engine: vllm").encode())
    assert [replica.engine for replica in written.replicas] == ["vllm", "auto"]


def test_region_inherits_each_deadline_that_it_does_not_set() -> None:
    text = changed("- name: eu\n", "- name: eu\n    limits: {first_token_timeout_s: 9}\n")
    config = parse_config(text.replace("max_attempts: 2", "connect_timeout_s: 7").encode())
    expected = Deadlines(connect_s=7.0, first_token_s=120.0, response_s=600.0, stream_idle_s=60.0, request_s=3600.0)
    assert deadlines_by_region(config) == {"us": expected, "eu": replace(expected, first_token_s=9.0)}


def test_region_s_deadline_is_no_longer_than_the_whole_request() -> None:
    text = changed("- name: eu\n", "- name: eu\n    limits: {first_token_timeout_s: 9.5}\n")
    assert parse_config(text.replace("max_attempts: 2", "request_timeout_s: 10").encode())
    place = r"regions\[1\].limits.first_token_timeout_s \(line 7\): 9.5; expected at most request_timeout_s, which is 9"
    with pytest.raises(ConfigError, match=place):
        parse_config(text.replace("max_attempts: 2", "request_timeout_s: 9").encode())


def test_shipped_regions_file_loads_and_has_the_three_regions() -> None:
    config = load_config(ROOT / "regions.yaml")
    assert config.simulation.rtt_ms == {"us-ashburn": 2, "eu-frankfurt": 95, "ap-seoul": 180}
    assert {replica.region for replica in config.replicas} == set(config.simulation.rtt_ms)


def test_shipped_regions_file_states_every_default_truly() -> None:
    config = load_config(ROOT / "regions.yaml")
    assert config.limits == LimitsConfig()
    for default in fields(ProxyConfig):
        if default.name not in ("region", "weights", "tls", "tracing", "cors", "learning", "multi_depth"):
            assert getattr(config.proxy, default.name) == default.default, default.name


CASES = [
    (
        "  weights",
        "  wieghts",
        "proxy.wieghts (line 3): unknown key (did you mean 'weights'?); expected one of region,",
    ),
    ("  max_attempts", "  max_attemps", "limits.max_attemps (line 17): unknown key (did you mean 'max_attempts'?)"),
    ("url: http://127.0.0.1:30000", "url: ftp://x", "replicas[0].url (line 10): 'ftp://x'; expected an http:// or"),
    ("url: http://127.0.0.1:30000", "url: 30000", "replicas[0].url (line 10): 30000; expected text (put it in quotes)"),
    ("name: eu-0", "name: us-0", 'replicas[1].name (line 11): "us-0" is the name of replicas[0].name on line 8'),
    (
        "- name: eu\n",
        "- name: eu\n  - name: us\n",
        'regions[2].name (line 7): "us" is the name of regions[0].name on line 5',
    ),
    ("    region: eu", "    region: eux", 'replicas[1].region (line 12): "eux" is not a region of this file (did you'),
    ("region: us\n  w", "region: uss\n  w", 'proxy.region (line 2): "uss" is not a region of this file'),
    ("eu: 95.5", "eu: -1", "simulation.rtt_ms.eu (line 19): -1; expected a number of at least 0"),
    ("eu: 95.5", "mars: 1", 'simulation.rtt_ms.mars (line 19): "mars" is not a region of this file'),
    ("eu: 95.5", "eu: .inf", "simulation.rtt_ms.eu (line 19): '.inf'; expected a finite number"),
    ("eu: 95.5", "eu: 1e999", "simulation.rtt_ms.eu (line 19): '1e999'; expected a finite number"),
    ("eu: 95.5", 'eu: "95.5"', "simulation.rtt_ms.eu (line 19): '95.5'; expected a number"),
    ("rtt_ms:", "profiles: {eu-9: x}\n  rtt_ms:", '"eu-9" is not a replica of this file (did you mean'),
    ("eu: 95.5", "us: 95.5", "simulation.rtt_ms.us (line 19): the key a second time (first on line 19)"),
    ("max_attempts: 2", "max_attempts: true", "limits.max_attempts (line 17): true; expected a whole number"),
    ("max_attempts: 2", "max_attempts: 2.0", "limits.max_attempts (line 17): 2.0; expected a whole number"),
    ("max_attempts: 2", "max_attempts: 0", "limits.max_attempts (line 17): 0; expected a number of at least 1"),
    ("max_attempts: 2", "max_attempts: 010", "limits.max_attempts (line 17): '010'; expected a whole number"),
    ("max_attempts: 2", "max_attempts: !!int 2", "limits.max_attempts (line 17): a YAML tag; expected plain YAML"),
    (
        "- name: eu\n",
        "- name: eu\n    limits: {first_token_timeout_s: 0}\n",
        "regions[1].limits.first_token_timeout_s (line 7): 0; expected a number greater than 0",
    ),
    (
        "- name: eu\n",
        "- name: eu\n    limits: {max_attempts: 2}\n",
        "regions[1].limits.max_attempts (line 7): unknown key; expected one of first_token_timeout_s",
    ),
    (
        "  weights",
        "  scrape_interval_s: 0.09\n  weights",
        "proxy.scrape_interval_s (line 3): 0.09; expected",
    ),
    ("  weights", "  learning: {epochs: 0}\n  weights", "proxy.learning.epochs (line 3): 0; expected a number of at"),
    ("  weights", "  learning: {model_file: 3}\n  weights", "proxy.learning.model_file (line 3): 3; expected text"),
    ("  weights", "  learning: {rounds: 3}\n  weights", "proxy.learning.rounds (line 3): unknown key"),
    (
        "  weights",
        "  learning: {fifo_samples: 200001}\n  weights",
        "proxy.learning.fifo_samples (line 3): 200001; expected a number of at most 200000",
    ),
    (
        "  weights",
        "  learning: {first_samples: 500, fifo_samples: 400}\n  weights",
        "proxy.learning (line 3): a mapping; expected first_samples of at most fifo_samples",
    ),
    (
        "max_attempts: 2",
        "stream_idle_timeout_s: 61\n  request_timeout_s: 60",
        "limits.stream_idle_timeout_s (line 17): 61; expected at most request_timeout_s, which is 60",
    ),
    (
        "  weights",
        "  min_ready_replicas: 3\n  weights",
        "proxy.min_ready_replicas (line 3): 3; expected at most the number of replicas, which is 2",
    ),
    ("{w_rtt: 0.5}", "{w_rtt: yes}", "proxy.weights.w_rtt (line 3): 'yes'; expected a number"),
    ("{w_rtt: 0.5}", "[0.5]", "proxy.weights (line 3): a list; expected a mapping"),
    (
        "limits:",
        "models: [{name: m, chat_template: a.jinja}]\nlimits:",
        "models[0] (line 16): a mapping; expected chat_template beside a tokenizer file",
    ),
    (
        "limits:",
        "models: [{name: m, tokenizer: simulated, chat_template: a.jinja}]\nlimits:",
        "models[0] (line 16): a mapping; expected chat_template beside a tokenizer file",
    ),
    ("[a, b]", "a", "replicas[1].models (line 14): 'a'; expected a list"),
    ("{kv_tokens: 100000}", "{kv_tokens: *x}", "the file (line 15): an alias; expected plain YAML without aliases"),
    ("{kv_tokens: 100000}", "{kv_tokens: [}", "the file (line 15): not YAML"),
    ("  weights: {", "  bind: localhost\n  weights: {", "proxy.bind (line 3): 'localhost'; expected host:port"),
    ("  weights: {", "  bind: 127.0.0.1:9090\n  admin_bind: 127.0.0.1:9090\n  weights: {", "is also proxy.bind"),
    ("    region: eu\n", "", "replicas[1].region (line 11): missing; expected this key with text"),
    (
        "    models",
        "    engine: triton\n    models",
        "replicas[1].engine (line 14): 'triton'; expected 'sglang', 'vllm'",
    ),
]


@pytest.mark.parametrize(("old", "new", "expected"), CASES)
def test_fault_is_named_with_place_line_value_and_expectation(old: str, new: str, expected: str) -> None:
    found = errors(changed(old, new))
    assert len(found) == 1, found
    assert expected in found[0]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (b"", "the file (line 1): empty; expected a mapping with proxy, regions and replicas"),
        (b"# nothing\n", "the file (line 1): empty"),
        (b"\xef\xbb\xbf", "the file (line 1): empty"),
        (b"just words", "the file (line 1): 'just words'; expected a mapping"),
        (b"- a\n- b", "the file (line 1): a list; expected a mapping"),
        (b"a: 1\n\xff\xfe", "the file (line 2): bytes that are not UTF-8"),
        (b"\x7fELF\x00\x01", "the file (line 1): not YAML"),
        (b"{" * 50_000, "the file (line 1): deep nesting; expected at most 16 levels"),
        (b'a: "\\UFFFFFFFF"', "the file (line 1): text that is not YAML"),
        (b"--- {}\n--- {}\n", "the file (line 2): not YAML: but found another document"),
        (b"!!python/object/apply:os.system [id]", "the file (line 1): a YAML tag"),
        (b"#" * (1024 * 1024 + 1), "the file (line 1): 1,048,577 bytes; expected at most 1,048,576"),
    ],
)
def test_file_that_is_no_regions_file_at_all_is_named_as_such(text: bytes, expected: str) -> None:
    found = errors(text)
    assert len(found) == 1
    assert expected in found[0]


def test_all_faults_are_listed_in_the_order_of_the_file() -> None:
    text = changed("region: us\n  w", "regoin: us\n  w").replace("ftp", "http").replace("eu: 95.5", "eu: -1")
    found = errors(text.replace("127.0.0.1:30000", "127.0.0.1:x"))
    places = [line.split(" (")[0] for line in found]
    assert places == ["proxy.region", "proxy.regoin", "replicas[0].url", "simulation.rtt_ms.eu"]


def test_list_with_a_bad_entry_is_not_called_empty() -> None:
    assert not any("at least one entry" in line for line in errors(changed("  - name: eu\n", "  - 3\n")))
    assert any("an empty list; expected at least one entry" in line for line in errors("replicas: []"))


def test_endless_list_of_faults_is_cut_and_counted() -> None:
    found = errors("\n".join(f"key{number}: 1" for number in range(MAX_PROBLEMS_SHOWN + 7)))
    assert len(found) == MAX_PROBLEMS_SHOWN + 1
    assert found[-1] == "and 10 more"  # three missing sections and seven keys


@pytest.mark.parametrize(
    "line", ["api_key: sk-secret", "api_key_env: sk-secret", "url2: http://u:sk-secret@x", "url: http://u:sk-secret@x"]
)
def test_keys_and_passwords_are_never_echoed(line: str) -> None:
    text = GOOD.replace("    url: http://127.0.0.1:30000", "    " + line)
    assert "secret" not in "\n".join(errors(text))


def test_words_that_yaml_1_1_would_turn_into_something_else_stay_text() -> None:
    text = GOOD.replace("- name: eu\n", "- name: no\n").replace("region: eu", "region: no").replace("eu: 95.5", "no: 9")
    assert parse_config(text.encode()).replicas[1].region == "no"


@pytest.mark.parametrize(
    ("path", "reason"),
    [("missing.yaml", "No such file"), (".", "Is a directory"), ("nul\0.yaml", "null byte")],
)
def test_path_that_cannot_be_read_says_why(tmp_path: Path, path: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        load_config(tmp_path / path)


def test_file_is_named_by_its_path_in_the_error(tmp_path: Path) -> None:
    (tmp_path / "fleet.yaml").write_text("proxy: 1\n")
    with pytest.raises(ConfigError, match=r"fleet\.yaml: 3 errors"):
        load_config(tmp_path / "fleet.yaml")


def loads_or_explains(text: bytes) -> None:
    try:
        config = parse_config(text)
    except ConfigError as error:
        explanation = str(error)
        explanation.encode()  # printable wherever it goes
    else:
        assert isinstance(config, Config)
        return
    assert len(explanation.splitlines()) > 1


@given(st.text())
def test_any_text_loads_or_explains_itself(text: str) -> None:
    loads_or_explains(text.encode(errors="surrogatepass"))


@given(st.binary())
def test_any_bytes_load_or_explain_themselves(text: bytes) -> None:
    loads_or_explains(text)


MARKS = [*"{}[]:,-?&*!|>'\"%@`#~\n\t ", "<<: ", "- ", "a: ", "!!int ", "---\n", "\\U", "9" * 30]


@given(st.lists(st.sampled_from(MARKS)).map("".join), st.integers(0, len(GOOD)))
def test_good_file_with_yaml_syntax_thrown_in_loads_or_explains_itself(noise: str, at: int) -> None:
    loads_or_explains((GOOD[:at] + noise + GOOD[at:]).encode())


KEYS = sorted(
    {
        key.name
        for kind in (Config, ProxyConfig, ReplicaConfig, LimitsConfig, SimulationConfig, CapacityConfig)
        for key in fields(kind)
    }
)
SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.just("http://x")
VALUES: st.SearchStrategy[Any] = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(KEYS), inner, max_size=4)
)


@given(VALUES)
def test_any_tree_of_known_keys_loads_or_explains_itself(tree: Any) -> None:
    loads_or_explains(json.dumps(tree).encode())


def test_many_faults_are_explained_without_reading_the_model_for_each(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[object] = []

    def counted(kind: object, *, include_extras: bool) -> dict[str, Any]:
        read.append(kind)
        return get_type_hints(kind, include_extras=include_extras)

    monkeypatch.setattr(load, "get_type_hints", counted)
    rows = "".join(f"- {{odd{number}: 1}}\n" for number in range(100))
    with pytest.raises(ConfigError, match="400 errors"):
        parse_config(f"proxy: {{region: a}}\nregions: [{{name: a}}]\nreplicas:\n{rows}".encode())
    assert len(read) == len(set(read))


def test_seed_below_zero_is_refused_where_it_is_written() -> None:
    with pytest.raises(ConfigError, match=r"simulation\.seed \(line 20\): -1; expected a number of at least 0"):
        parse_config((GOOD + "  seed: -1\n").encode())


def made(*urls: str, environ: dict[str, str] | None = None, **proxy: str | None) -> Config:
    text = config_text(urls, engine="auto", proxy=proxy, environ=environ or {})
    return parse_config(text.encode(), environ={})


def test_a_name_before_the_url_is_a_region_and_the_others_are_local() -> None:
    config = made("http://a:30000", "eu=http://b:30000", "eu=https://b/x=y", "http://[::1]:1")
    assert config.proxy.region == "local"
    assert [region.name for region in config.regions] == ["local", "eu"]
    assert [(replica.name, replica.region, replica.url) for replica in config.replicas] == [
        ("local-0", "local", "http://a:30000"),
        ("eu-0", "eu", "http://b:30000"),
        ("eu-1", "eu", "https://b/x=y"),
        ("local-1", "local", "http://[::1]:1"),
    ]
    assert {replica.engine for replica in config.replicas} == {"auto"}


def test_a_url_as_clients_write_it_is_taken_without_v1() -> None:
    written = ("http://a/v1", "http://b/v1/", "http://c/x/v1", "http://d/", "http://v1")
    urls = [replica.url for replica in made(*written).replicas]
    assert urls == ["http://a", "http://b", "http://c/x", "http://d", "http://v1"]


def test_options_of_the_command_are_keys_of_the_file() -> None:
    proxy = made("http://a", policy="nearest", bind="127.0.0.1:1", admin_bind=None).proxy
    assert (proxy.policy, proxy.bind, proxy.admin_bind) == ("nearest", "127.0.0.1:1", "127.0.0.1:9090")


def test_the_key_of_the_replicas_is_named_and_never_written() -> None:
    environ = {KEY_VARIABLE: "canary"}
    assert "canary" not in config_text(["http://a"], engine="auto", proxy={}, environ=environ)
    assert made("http://a", environ=environ).replicas[0].api_key_env == KEY_VARIABLE
    assert made("http://a", environ={KEY_VARIABLE: ""}).replicas[0].api_key_env is None


def test_a_dollar_sign_in_a_url_is_no_reference() -> None:
    assert made("http://a/${HOME}$$").replicas[0].url == "http://a/${HOME}$$"


@pytest.mark.parametrize("text", ["", "a:30000", "eu=", "=http://a", "e u=http://a", "ftp://a", "eu=b=http://a"])
def test_a_url_that_is_none_is_an_error_that_says_what_is_one(text: str) -> None:
    with pytest.raises(ConfigError, match=r"--replica: .*; expected URL or REGION=URL with an http://"):
        made(text)


def test_a_password_in_a_url_is_not_shown() -> None:
    with pytest.raises(ConfigError, match="not shown") as raised:
        made("http://user:canary@a")
    assert "canary" not in str(raised.value)


def test_a_url_given_twice_is_an_error() -> None:
    with pytest.raises(ConfigError, match=r"--replica http://a: given twice; expected each replica once"):
        made("http://a", "eu=http://a/")


def test_a_short_value_of_the_environment_takes_no_letter_from_a_message() -> None:
    with pytest.raises(ConfigError) as refused:
        parse_config(b'proxy:\n  region: "${S}"\nregions: [{name: b}]\n', environ={"S": "a"})
    assert "proxy.region (line 2): the value of '${S}' is not a region" in str(refused.value)
    assert "replicas (line 1): missing; expected this key with a list" in str(refused.value)


# --- Old keys of regions.yaml: the error says what became of each.


OLD = {
    "proxy.policies": "proxy.policy",
    "regions.limits.first_s": "regions.limits.first_token_timeout_s",
    "queueing": "overload",
    "queueing.wait_ms": "overload.queue_wait_ms",
    "limits.gap_s": "a constant now, since no other value helped",
    "replicas.url": "replicas.address",
}
FILE = b"""
proxy: {region: us, policies: random}
regions:
  - name: us
    limits: {first_s: 2}
queueing:
  wait_ms: 5
limits: {gap_s: 3, max_attempst: 2}
replicas:
  - {name: a, region: us, url: "http://a"}
"""


def test_each_old_key_is_named_with_what_became_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for old, new in OLD.items():
        monkeypatch.setitem(RENAMED, old, new)
    with pytest.raises(ConfigError) as refused:
        parse_config(FILE)
    header, *lines = str(refused.value).split("\n")
    assert header == "regions.yaml: 6 errors"
    assert lines[:5] == [
        "  proxy.policies (line 2): unknown key (renamed); expected proxy.policy",
        "  regions[0].limits.first_s (line 5): unknown key (renamed); expected regions.limits.first_token_timeout_s",
        "  queueing (line 6): unknown key (renamed); expected overload",
        "  queueing.wait_ms (line 7): unknown key (renamed); expected overload.queue_wait_ms",
        "  limits.gap_s (line 8): unknown key (removed: a constant now, since no other value helped); "
        "expected the file without it",
    ]
    assert lines[5].startswith("  limits.max_attempst (line 8): unknown key (did you mean 'max_attempts'?); expected")


@pytest.mark.parametrize("old", RENAMED)
def test_a_file_with_an_old_key_is_refused_with_its_new_name_or_value(old: str) -> None:
    document: dict[str, Any] = {
        "proxy": {"region": "us"},
        "regions": [{"name": "us"}],
        "replicas": [{"name": "a", "region": "us", "url": "http://a"}],
    }
    *sections, key = old.split(".")
    place: Any = document
    for section in sections:
        place = place.setdefault(section, {})
        place = place[0] if isinstance(place, list) else place
    place[key] = 1
    with pytest.raises(ConfigError) as refused:
        parse_config(json.dumps(document).encode())
    shown = old.replace("regions.", "regions[0].").replace("replicas.", "replicas[0].")
    new = RENAMED[old]
    expected = f"(removed: {new})" if " " in new else f"(renamed); expected {new}"
    assert str(refused.value).split("\n") == [
        "regions.yaml: 1 error",
        f"  {shown} (line 1): unknown key {expected}" + ("; expected the file without it" if " " in new else ""),
    ]


def test_the_table_has_keys_that_are_gone_and_new_ones_that_exist() -> None:
    for old, new in RENAMED.items():
        assert not exists(old), old
        assert " " in new or exists(new), new


def test_a_key_of_the_file_is_found_by_its_dotted_name() -> None:
    for key in (
        "proxy.policy",
        "regions.limits.first_token_timeout_s",
        "clients.rules.name",
        "replicas.capacity.kv_tokens",
    ):
        assert exists(key)
    for key in ("proxy.policies", "regions.max_attempts", "limits.max_attempts.more"):
        assert not exists(key)


def exists(dotted: str) -> bool:
    """Whether the file may have this key, in a mapping or in the entries of a list."""
    path: DocumentPath = ()
    for part in dotted.split("."):
        path = next(((*above, part) for above in (path, (*path, 0)) if part in keys_at(above)), ())
        if not path:
            return False
    return True


def warnings_of(*urls: str) -> list[str]:
    return url_warnings([ReplicaConfig(name=f"r{n}", region="a", url=url) for n, url in enumerate(urls)])


def test_urls_without_a_path_have_no_warning() -> None:
    assert warnings_of("http://a", "http://a:30000/", "https://a", "http://[::1]:80", "http://v1", "http://b/") == []


@pytest.mark.parametrize("url", ["http://a:30000/v1", "http://a:30000/v1/", "http://a:30000//v1//"])
def test_a_url_that_ends_in_v1_is_shown_without_it(url: str) -> None:
    wanted = url.rstrip("/").removesuffix("/v1")
    assert warnings_of(url) == [
        f"replicas[0].url: {url} ends in /v1, which the proxy adds itself; write {without_api_path(url)}"
    ]
    assert without_api_path(url).rstrip("/") == wanted.rstrip("/")


def test_another_path_is_shown_with_what_is_sent() -> None:
    assert warnings_of("http://b", "http://a/openai/") == [
        "replicas[1].url: http://a/openai/ has the path /openai: requests go to http://a/openai/v1/...; remove it "
        "unless a reverse proxy needs it"
    ]


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("http://a:80", "http://A/"),
        ("https://a.:443", "https://a"),
        ("http://a:30000", "http://a:30000"),
    ],
)
def test_one_engine_twice_is_one_warning_however_it_is_written(first: str, second: str) -> None:
    (found,) = warnings_of(first, "http://other", second)
    assert found == f"replicas[2].url: {second} is that of replicas[0] (r0): one engine would count as two"


def test_a_url_with_v1_is_the_same_engine_as_the_one_without() -> None:
    assert [text.split(":", 1)[0] for text in warnings_of("http://a", "http://a/v1")] == ["replicas[1].url"] * 2


def test_ports_schemes_and_paths_make_different_engines() -> None:
    assert len(warnings_of("http://a:1", "http://a:2", "https://a:1", "http://a:1/x", "http://a:1/y")) == 2


def test_reports_of_a_replica_whose_listed_models_have_no_tokenizer_are_named() -> None:
    replicas = (
        ReplicaConfig(name="a", region="here", url="http://a", kv_events=KvEventsConfig()),
        ReplicaConfig(name="b", region="here", url="http://b", kv_events=KvEventsConfig()),
        ReplicaConfig(name="c", region="here", url="http://c"),
    )
    config = Config(
        proxy=ProxyConfig(region="here"),
        regions=(RegionConfig(name="here"),),
        replicas=replicas,
        models=(ModelConfig(name="m", aliases=("alias",), tokenizer="simulated"),),
    )
    listed = {"a": ["n", "o"], "b": ["alias"], "c": ["n"]}
    found = model_warnings(config, [make_policy("gorgo-ms")], listed)
    assert found == ["a: history: no tokenizer for n, o; set models[].tokenizer"]
    assert model_warnings(config, [make_policy("random")], listed) == [], "said of the file already"
