"""`gorgo check` and `gorgo serve` give one verdict on a file, in one text."""

from __future__ import annotations

import json
import os
import socket
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from gorgo.cli.app import app
from gorgo.cli.validation import Overrides, validate
from gorgo.errors import ConfigError
from gorgo.policies import registry
from gorgo.proxy import server
from tests.cli.test_processes import environ, gorgo

BASE = """\
proxy: {region: here, policy: gorgo, bind: "127.0.0.1:0", admin_bind: "127.0.0.1:0"}
regions: [{name: here}]
replicas:
  - {name: a, region: here, url: "https://127.0.0.1:1"}
"""
A = 'url: "https://127.0.0.1:1"'
ONE_OF = "expected one of gorgo, gorgo-ms, "


@dataclass(frozen=True)
class Case:
    """A change of the valid file, words of the command line, and the lines of the error after the first."""

    name: str
    text: str
    lines: Sequence[str]
    words: Sequence[str] = ()
    #: Whether the fault is one of this machine.
    machine: bool = False


def proxy(keys: str) -> str:
    return BASE.replace("policy: gorgo,", keys)


def sources(rows: str) -> str:
    return f"{BASE}fleet_sources: [{rows}]\n"


def replica(keys: str) -> str:
    return BASE.replace(A, f"{A}, {keys}")


PAIR = "expected a certificate chain and a private key without a passphrase, both in PEM form"
#: Of a machine with the extra, and of one without.
TOKENIZER_MISSING = (
    "models[0].tokenizer (line 5): 'no.json': No such file or directory; "
    "expected a tokenizer.json, or the word simulated"
    if find_spec("tokenizers")
    else "models[0].tokenizer (line 5): models[].tokenizer needs tokenizers, which is not installed: "
    "pip install 'gorgo-router[tokens]'; expected the extra tokens to be installed"
)
ENTRY = "expected NAME:SHA256, the key's hash as 64 hexadecimal digits"

CASES = [
    Case(
        "tokenizer missing",
        BASE + "models: [{name: m, tokenizer: no.json}]",
        [TOKENIZER_MISSING],
        machine=True,
    ),
    Case(
        "TLS files missing",
        proxy("tls: {cert: no.pem, key: no.key},"),
        [f"proxy.tls.cert (line 1): 'no.pem' with 'no.key': No such file or directory; {PAIR}"],
        machine=True,
    ),
    Case(
        "TLS files malformed",
        proxy("tls: {cert: nonsense, key: nonsense},"),
        ["proxy.tls.cert (line 1): 'nonsense' with 'nonsense': "],
        machine=True,
    ),
    Case(
        "authority of the picker's clients missing",
        BASE + "picker: {tls: {cert: no.pem, key: no.key, client_ca: no.pem}}",
        [
            f"picker.tls.cert (line 5): 'no.pem' with 'no.key': No such file or directory; {PAIR}",
            "picker.tls.client_ca (line 5): client_ca 'no.pem': No such file or directory; expected certificates of",
        ],
        machine=True,
    ),
    Case(
        "fleet source without a cluster",
        sources("{name: p, kind: pods, selector: {app: x}, port: 1}"),
        [
            "fleet_sources[0].api.url (line 5): no cluster: KUBERNETES_SERVICE_HOST is not set; "
            "expected api.url in the source",
            "fleet_sources[0].namespace (line 5): no pod: its namespace is not known; expected namespace in the source",
        ],
        machine=True,
    ),
    Case(
        "store without its secrets and file",
        BASE + "shared: {url: 'rediss://s', group: g, key_env: NO_SUCH_KEY, password_env: NO_SUCH, ca_file: no.pem}",
        [
            "shared.ca_file (line 5): ca_file 'no.pem': No such file or directory; expected certificates of auth",
            "shared.key_env (line 5): the environment variable NO_SUCH_KEY is not set; expected it to hold 32 to 128",
            "shared.password_env (line 5): the environment variable NO_SUCH is not set; expected it to hold the store",
        ],
        machine=True,
    ),
    Case(
        "key of a fleet source missing",
        sources("{name: d, kind: dns, host: x, port: 1, replica: {api_key_env: NO_SUCH_KEY}}"),
        [
            "fleet_sources[0].replica.api_key_env (line 5): the environment variable NO_SUCH_KEY is not set; "
            "expected it to hold the replica's API key"
        ],
        machine=True,
    ),
    Case(
        "authorities missing",
        replica("ca_file: no.pem"),
        ["replicas[0].ca_file (line 4): ca_file 'no.pem': No such file or directory; expected certificates"],
        machine=True,
    ),
    Case(
        "client certificate missing",
        replica("client_cert: no.pem, client_key: no.key"),
        [f"replicas[0].client_cert (line 4): 'no.pem' with 'no.key': No such file or directory; {PAIR}"],
        machine=True,
    ),
    Case(
        "client keys missing",
        BASE + "clients: {keys_file: no.keys}\n",
        ["clients.keys_file (line 5): 'no.keys': No such file or directory; expected a file of client keys"],
        machine=True,
    ),
    Case(
        "client keys malformed",
        BASE + "clients:\n  keys_file: nonsense\n",
        [f"clients.keys_file (line 6): 'nonsense': line 1 is no entry; {ENTRY}"],
        machine=True,
    ),
    Case(
        "client keys empty",
        BASE + "clients: {keys_file: empty}\n",
        ["clients.keys_file (line 5): 'empty': 0 keys; expected 1 to 1024, each as NAME:SHA256"],
        machine=True,
    ),
    Case(
        "API key not set",
        replica("api_key_env: GORGO_NO_SUCH_KEY"),
        ["replicas[0].api_key_env (line 4): the environment variable GORGO_NO_SUCH_KEY is not set; "],
        machine=True,
    ),
    Case(
        "variable not set",
        BASE.replace(A, 'url: "https://${GORGO_NO_SUCH_HOST}:1"'),
        ["replicas[0].url (line 4): the environment variable GORGO_NO_SUCH_HOST is not set; expected it to be set"],
        machine=True,
    ),
    Case(
        "address of another machine",
        BASE.replace('bind: "127.0.0.1:0", ', 'bind: "192.0.2.1:0", '),
        ["proxy.bind (line 1): cannot listen on 192.0.2.1:0: "],
        machine=True,
    ),
    Case(
        "two listeners on one address",
        BASE.replace("127.0.0.1:0", "127.0.0.1:8080"),
        ['proxy.admin_bind (line 1): "127.0.0.1:8080" is also proxy.bind; expected an address of its own'],
    ),
    Case("port without number", BASE.replace("127.0.0.1:0", "127.0.0.1:http", 1), ["proxy.bind (line 1): "]),
    Case(
        "policy misspelt",
        proxy("policy: gorgo_ms,"),
        [f"proxy.policy (line 1): \"gorgo_ms\" is not a known policy (did you mean 'gorgo-ms'?); {ONE_OF}"],
    ),
    Case(
        "weight misspelt and another out of range",
        proxy("policy: gorgo, weights: {w_rt: 1, w_queue: 9},"),
        [
            "proxy.weights.w_queue (line 1): 9; expected a number in [0.02, 5]",
            "proxy.weights.w_rt (line 1): unknown weight of gorgo (did you mean 'w_rtt'?); expected one of w_rtt",
        ],
    ),
    Case(
        "weight of a policy without any",
        proxy("policy: nearest, weights: {w_rtt: 1},"),
        ["proxy.weights.w_rtt (line 1): unknown weight of nearest; expected none: nearest has no weights"],
    ),
    Case(
        "shadow policy misspelt",
        proxy("policy: gorgo, shadow_policy: neerest,"),
        [f"proxy.shadow_policy (line 1): \"neerest\" is not a known policy (did you mean 'nearest'?); {ONE_OF}"],
    ),
    Case(
        "shadow policy without a cost",
        proxy("policy: gorgo, shadow_policy: random,"),
        ["proxy.shadow_policy (line 1): shadow policy 'random' has no cost to rank replicas by; expected one that has"],
    ),
    Case(
        "shadow policy of another index",
        proxy("policy: gorgo, shadow_policy: gorgo-ms,"),
        ["proxy.shadow_policy (line 1): shadow policy and policy read different prefix indexes"],
    ),
    Case(
        "engine profile misspelt",
        BASE + "simulation: {profile: 1xH100-Llama-3.1-8b}\n",
        ['simulation.profile (line 5): "1xH100-Llama-3.1-8b" is not a known engine profile (did you mean \'1xH100'],
    ),
    Case(
        "engine profile of a replica misspelt",
        BASE + "simulation: {profiles: {a: 1xH100}}\n",
        ['simulation.profiles.a (line 5): "1xH100" is not a known engine profile'],
    ),
    Case("engine misspelt", replica("engine: sglag"), ["replicas[0].engine (line 4): 'sglag'; expected 'sglang'"]),
    Case(
        "policy of a broken package",
        proxy("policy: broken,"),
        ["proxy.policy (line 1): no_such_module:Policy of the entry point 'broken' cannot be loaded: Modul"],
    ),
    Case(
        "engine of a broken package",
        replica("engine: broken"),
        ["replicas[0].engine (line 4): no_such_module:Engine of the entry point 'broken' cannot be loaded: "],
    ),
    Case("weights file missing", BASE, ["--weights: no.json: cannot be read as weights"], ["--weights", "no.json"]),
    Case(
        "weights file with an unknown weight",
        BASE,
        ["--weights: unknown.json: weight 'w_rt' is unknown to this policy (did you mean 'w_rtt'?)"],
        ["--weights", "unknown.json"],
    ),
    Case(
        "all kinds in one list",
        proxy("policy: gorgo_ms, probe_interval_s: 0,").replace(
            "region: here, url", "region: her, ca_file: no.pem, url"
        ),
        [
            "proxy.policy (line 1)",
            "proxy.probe_interval_s (line 1)",
            "replicas[0].ca_file (line 4)",
            "replicas[0].region",
        ],
    ),
]


class BrokenEntryPoint:
    """An entry point of a package that is half installed."""

    name = "broken"

    def __init__(self, value: str) -> None:
        self.value = value

    def load(self) -> Any:
        raise ModuleNotFoundError("No module named 'no_such_module'")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "nonsense").write_text("nonsense\n")
    (tmp_path / "empty").write_text("# no key yet\n")
    (tmp_path / "weights.json").write_text('{"policy": "gorgo", "weights": {"w_rtt": 0.7}}')
    (tmp_path / "unknown.json").write_text('{"policy": "gorgo", "weights": {"w_rt": 0.7}}')
    monkeypatch.setattr(registry, "_third_party", lambda: {"broken": BrokenEntryPoint("no_such_module:Policy")})
    engines = [BrokenEntryPoint("no_such_module:Engine")]
    monkeypatch.setattr("gorgo.engines.registry.entry_points", lambda **_: engines)
    monkeypatch.setattr("gorgo.config.values.entry_points", lambda **_: engines)

    async def listens(*_: object, **__: object) -> None:
        raise AssertionError("serve accepted the file")

    monkeypatch.setattr(server, "serve", listens)
    return tmp_path


def verdict(command: str, *words: str) -> tuple[int, list[str]]:
    done = CliRunner().invoke(app, [command, "--config", "regions.yaml", *words])
    return done.exit_code, done.stderr.splitlines()


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_check_and_serve_refuse_the_same_files_with_the_same_words(case: Case, folder: Path) -> None:
    (folder / "regions.yaml").write_text(case.text)
    code, lines = verdict("check", *case.words)
    assert (code, lines[0]) == (2, f"gorgo: regions.yaml: {len(case.lines)} error{'s' * (len(case.lines) > 1)}"), lines
    for line, expected in zip(lines[1:], case.lines, strict=True):
        assert line.strip().startswith(expected), line
    assert verdict("serve", *case.words) == (code, lines)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_without_this_machines_files_the_other_errors_stay(case: Case, folder: Path) -> None:
    (folder / "regions.yaml").write_text(case.text)
    code, lines = verdict("check", "--no-files", *case.words)
    if case.machine:
        assert (code, lines) == (0, [])
    elif case.name == "all kinds in one list":
        assert [line.split(" (")[0].strip() for line in lines[1:]] == [
            "proxy.policy", "proxy.probe_interval_s", "replicas[0].region"
        ]  # fmt: skip
    else:
        assert (code, lines) == verdict("check", *case.words)


def test_value_of_a_variable_that_is_not_set_hides_no_other_error(folder: Path) -> None:
    text = BASE.replace("{name: here}", '{name: "${GORGO_NO_SUCH_REGION}"}').replace("policy: gorgo", "policy: gorg")
    (folder / "regions.yaml").write_text(text)
    code, lines = verdict("check", "--no-files")
    assert (code, len(lines)) == (2, 2)
    assert lines[1].strip().startswith("proxy.policy (line 1)")
    (folder / "regions.yaml").write_text(text.replace("gorg,", "gorgo,"))
    done = CliRunner().invoke(app, ["check", "--no-files", "--config", "regions.yaml"])
    assert done.stdout == "regions.yaml: ok, 1 replica in 1 region, policy unknown without its variables\n"


#: Replicas come from a source alone.
FOUND = """\
proxy: {region: here}
regions: [{name: here}]
fleet_sources: [{name: d, kind: dns, host: engines, port: 30000}, {name: p, kind: pods, selector: {a: b}, port: 1}]
"""


def test_check_counts_the_fleet_sources(folder: Path) -> None:
    (folder / "regions.yaml").write_text(FOUND)
    done = CliRunner().invoke(app, ["check", "--no-files", "--config", "regions.yaml"])
    assert done.stdout == "regions.yaml: ok, 0 replicas and 2 fleet sources in 1 region, policy gorgo-ms\n"


def test_check_names_the_store_the_group_and_the_router(folder: Path) -> None:
    text = BASE + "shared: {url: 'redis://store:6379', group: qwen, key_env: KEY, router: eu-1}\n"
    (folder / "regions.yaml").write_text(text)
    arguments = ["check", "--no-files", "--config", "regions.yaml"]
    done = CliRunner().invoke(app, arguments)
    assert done.stdout.splitlines()[1] == "  shared: router eu-1 of group qwen, store redis://store:6379"
    found = json.loads(CliRunner().invoke(app, [*arguments, "--json"]).stdout)
    assert found["shared"] == {"url": "redis://store:6379", "group": "qwen", "router": "eu-1"}


def test_simulation_needs_replicas_of_the_file(folder: Path) -> None:
    (folder / "regions.yaml").write_text(FOUND)
    (folder / "trace.jsonl").write_text('{"timestamp": 0, "input_length": 5, "output_length": 2, "hash_ids": [1]}\n')
    done = CliRunner().invoke(app, ["simulate", "trace.jsonl", "--config", "regions.yaml"])
    assert done.exit_code == 2
    assert "regions.yaml: replicas: none; expected one to simulate" in done.stderr


def test_short_admin_token_is_an_error_of_both_beside_those_of_the_file(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GORGO_ADMIN_TOKEN", "short")
    (folder / "regions.yaml").write_text(proxy("policy: gorgo_ms,"))
    code, lines = verdict("check")
    assert (code, lines) == verdict("serve")
    assert (code, lines[0]) == (2, "gorgo: regions.yaml: 2 errors")
    assert lines[1].strip() == (
        "GORGO_ADMIN_TOKEN: a token of 5 characters; expected at least 16; openssl rand -hex 32 makes one"
    )
    assert len(verdict("check", "--no-files")[1]) == 2


@pytest.mark.parametrize(
    ("token", "found"),
    [
        ("short", "a token of 5 characters; expected at least 16; openssl rand -hex 32 makes one"),
        ("token-of-the-operators", "the admin token; expected a token of its own"),
    ],
)
def test_token_for_metrics_that_is_short_or_lets_prometheus_administrate_is_an_error(
    token: str, found: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GORGO_ADMIN_TOKEN", "token-of-the-operators")
    monkeypatch.setenv("GORGO_METRICS_TOKEN", token)
    (folder / "regions.yaml").write_text(proxy(""))
    code, lines = verdict("check")
    assert (code, lines) == verdict("serve")
    assert code == 2
    assert f"GORGO_METRICS_TOKEN: {found}" in "\n".join(lines)


@pytest.mark.parametrize(
    ("token", "found"),
    [
        ("token-of-the-operators", "PUSH has the admin token; expected a token of its own"),
        ("short", "the environment variable PUSH has 5 characters; expected at least 16"),
        ("", "the environment variable PUSH is not set; expected it to hold the token of the replica's pushes"),
    ],
)
def test_push_token_that_administrates_or_can_be_guessed_is_an_error(
    folder: Path, monkeypatch: pytest.MonkeyPatch, token: str, found: str
) -> None:
    monkeypatch.setenv("GORGO_ADMIN_TOKEN", "token-of-the-operators")
    monkeypatch.setenv("PUSH", token)
    (folder / "regions.yaml").write_text(replica("push_token_env: PUSH"))
    code, lines = verdict("check")
    assert (code, lines) == verdict("serve")
    assert (code, " ".join(line.strip() for line in lines[1:])) == (2, f"replicas[0].push_token_env (line 4): {found}")


def test_push_token_of_a_source_that_administrates_is_an_error(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GORGO_ADMIN_TOKEN", "token-of-the-operators")
    monkeypatch.setenv("PUSH", "token-of-the-operators")
    text = sources("{name: d, kind: dns, host: x, port: 1, replica: {push_token_env: PUSH}}")
    (folder / "regions.yaml").write_text(text)
    code, lines = verdict("check")
    found = "fleet_sources[0].replica.push_token_env (line 5): PUSH has the admin token; expected a token of its own"
    assert (code, " ".join(line.strip() for line in lines[1:])) == (2, found)


def test_files_cannot_be_skipped_for_a_live_check(folder: Path) -> None:
    (folder / "regions.yaml").write_text(BASE)
    code, lines = verdict("check", "--live", "--no-files")
    assert (code, "--live and --no-files: expected one of them" in "\n".join(lines)) == (2, True)


@contextmanager
def taken_port() -> Iterator[int]:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield listener.getsockname()[1]


def run(*words: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(gorgo(*words), env=environ(), capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize("name", ["API key not set", "policy misspelt"])
def test_processes_agree(name: str, tmp_path: Path) -> None:
    (case,) = [case for case in CASES if case.name == name]
    path = tmp_path / "regions.yaml"
    path.write_text(case.text)
    checked, served = run("check", "--config", path), run("serve", "--config", path)
    assert (checked.returncode, checked.stdout) == (2, "")
    assert case.lines[0] in checked.stderr
    # The admin token is set: nothing but the verdict is on stderr.
    assert (served.returncode, served.stdout, served.stderr) == (2, "", checked.stderr)


def test_port_in_use_is_a_warning_of_check_because_the_running_proxy_has_it(tmp_path: Path) -> None:
    path = tmp_path / "regions.yaml"
    with taken_port() as port:
        path.write_text(BASE.replace('bind: "127.0.0.1:0", ', f'bind: "127.0.0.1:{port}", '))
        checked, served = run("check", "--config", path), run("serve", "--config", path)
        live = run("check", "--config", path, "--live")
    assert "in use" not in live.stdout
    assert checked.returncode == 0
    assert f"warning: proxy.bind: 127.0.0.1:{port} is in use" in checked.stdout
    assert served.returncode == 2
    assert f"proxy.bind: cannot listen on 127.0.0.1:{port}" in served.stderr
    assert os.linesep not in served.stderr.rstrip()


#: A section of a file, and values of it with `${S}` where each is invalid for another reason.
HIDDEN = [
    *(("proxy", f"{{{key}}}") for key in ('policy: "${S}"', 'shadow_policy: "${S}"', 'probe_interval_s: "${S}"')),
    *(("proxy", f"{{{key}}}") for key in ('weights: {lambda: "${S}"}', 'region: "${S}"', 'bind: "${S}"')),
    *(("proxy", f"{{{key}}}") for key in ('metrics_listener: "${S}"', 'pass_headers: ["${S} "]', 'policy: "x-${S}-y"')),
    ("replicas", '[{name: a, region: a, url: "http://10.0.0.9:1", engine: "${S}"}]'),
    ("replicas", '[{name: a, region: "${S}", url: "${S}"}]'),
    ("replicas", '[{name: "${S}", region: a, url: "http://a:1"}, {name: "${S}", region: a, url: "http://b:1"}]'),
    ("regions", '[{name: "${S}"}, {name: "${S}"}]'),
    ("clients", '{keys_file: "${S}"}'),
    ("clients", '{keys_file: x, rules: [{name: "${S}", allowed_regions: ["${S}"]}]}'),
    ("models", '[{name: m, tokenizer: "${S}"}]'),
    ("models", '[{name: "${S}", aliases: ["${S}"], allowed_regions: ["${S}"]}]'),
    ("simulation", '{profile: "${S}"}'),
]


@pytest.mark.parametrize("secret", ["s3cr3t-VALUE-98765432100-abcdef", "hunter2", "s3cr3t" * 20])
@pytest.mark.parametrize(("section", "text"), HIDDEN)
def test_no_message_shows_a_value_of_the_environment(tmp_path: Path, section: str, text: str, secret: str) -> None:
    parts = {
        "proxy": "{region: a}",
        "regions": "[{name: a}]",
        "replicas": '[{name: z, region: a, url: "http://10.0.0.7:1"}]',
        section: text,
    }
    content = "".join(f"{key}: {part}\n" for key, part in parts.items()).encode()
    with pytest.raises(ConfigError) as refused:
        validate(content, source=tmp_path / "regions.yaml", overrides=Overrides(environ={"S": secret}, ports=False))
    assert secret[:20] not in str(refused.value)
