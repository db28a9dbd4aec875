"""README, docs/ and examples/ against the code, both ways: what is there has a row, and what has a row is there."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from dataclasses import MISSING, astuple, fields, is_dataclass
from pathlib import Path
from types import NoneType, SimpleNamespace
from typing import Any, cast, get_args, get_type_hints

import pytest
import typer.main
import yaml

from gorgo.cli import app
from gorgo.cli.tune import TuneSettings, read_settings
from gorgo.config.fleet import FleetSourceConfig
from gorgo.config.load import load_config
from gorgo.config.model import Config
from gorgo.config.weights_file import read_weights_file
from gorgo.core.policy.weights import Weights
from gorgo.lab.replay_client import ReplayRecord
from gorgo.lab.results import ResultRow
from gorgo.lab.sim.scenarios import SCENARIOS
from gorgo.live.admin.app import Admin
from gorgo.live.http.headers import SESSION_HEADERS
from gorgo.live.request.parse import INFERENCE_ROUTES
from gorgo.live.request_options import SLO_HEADERS
from gorgo.live.telemetry.metric_table import METRICS
from gorgo.policies.registry import POLICIES
from gorgo.proxy.server import data_app
from tests.cli.test_processes import fleet, output
from tests.documents import DOCS, ROOT, blocks, check_gorgo_lines, code, headings, rows_of, section, tables
from tuner.sidecar.metrics import METRICS as TUNER_METRICS

# --- README and docs/ against the code, both ways: what is there has a row, and what has a row is there.


#: The README and the pages beside it, as one text; pages of policies have tests of their own.
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
DOCUMENTS = [
    *(ROOT / "docs").rglob("*.md"),
    *(ROOT / name for name in ("README.md", "DESIGN.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")),
    *(ROOT / folder / "README.md" for folder in ("datasets", "examples", "packaging", "terraform")),
]
README = "\n\n".join(page.read_text() for page in PAGES)


def code_docs(cell: str) -> list[str]:
    return re.findall(r"`([^`]*)`", cell)


def items_after(text: str) -> list[tuple[str, str]]:
    """Return head and meaning of each item `- `HEAD`: MEANING` of the first list after a text."""
    assert README.count(text) == 1, text
    (found,) = re.findall(r"(?:^- `.*\n)+", README.split(text)[1] + "\n", flags=re.MULTILINE)[:1]
    items = [re.fullmatch(r"- (`[^`]*`(?:, `[^`]*`)*(?: \(.*?\))?): (.*)", line) for line in found.splitlines()]
    assert all(items), found
    return [(item[1], item[2]) for item in items if item]


# -- configuration
def config_keys(kind: Any = Config, prefix: str = "") -> dict[str, Any]:
    """Path of every key that has no keys of its own, with its default."""
    keys: dict[str, Any] = {}
    for field in fields(kind):
        hint, path = get_type_hints(kind)[field.name], prefix + field.name
        if kind is Config and NoneType in get_args(hint):  # a section that may be left out
            (hint,) = (each for each in get_args(hint) if each is not NoneType)
        entry = next(iter(get_args(hint)), None) if get_args(hint)[1:] == (...,) else None
        if is_dataclass(hint):
            keys |= config_keys(hint, path + ".")
        elif is_dataclass(entry):
            keys |= config_keys(entry, path + "[].")
        else:
            keys[path] = field.default if field.default_factory is MISSING else field.default_factory()
    return keys


def test_every_key_of_the_configuration_has_a_row_and_every_row_a_key() -> None:
    assert [code_docs(head)[0] for head, _ in items_after("Keys, with their defaults:")] == list(config_keys())


def test_defaults_in_the_readme_are_the_defaults() -> None:
    items = items_after("Keys, with their defaults:")
    for (key, default), (head, _) in zip(config_keys().items(), items, strict=True):
        documented = head.partition(" (")[2].removesuffix(")")
        if default is MISSING:
            assert documented == "required", key
        elif isinstance(default, bool):
            assert documented == f"`{str(default).lower()}`", key
        elif isinstance(default, str | int | float):
            assert documented == f"`{default}`", key
        else:  # nothing, or an empty collection: a word says what that means
            assert documented, key
            assert not code_docs(documented), key


def test_every_key_of_the_configuration_is_in_the_shipped_file() -> None:
    text = (ROOT / "regions.yaml").read_text()
    assert [key for key in config_keys() if not re.search(rf"\b{key.split('.')[-1]}:", text)] == []


def test_keys_that_pages_name_exist() -> None:
    keys = list(config_keys())
    named = [
        (page.name, word)
        for page in DOCUMENTS
        if page.name != "CHANGELOG.md"  # it names former keys
        for word in code_docs(page.read_text())
        if re.fullmatch(
            r"(proxy|regions\[\]|replicas\[\]|fleet_sources\[\]|clients|models|limits|overload|picker|shared|simulation)\.[\w.\[\]]+",
            word,
        )
    ]
    assert [
        row for row in named if not any(key == row[1] or key.startswith((row[1] + ".", row[1] + "[]")) for key in keys)
    ] == []


# -- what registries hold
def test_every_scenario_has_a_row_with_what_happens() -> None:
    documented = {code_docs(name)[0]: happens for name, happens in items_after("## Reference rows and scenarios")}
    assert documented == {name: scenario.description for name, scenario in SCENARIOS.items()}


def test_every_metric_has_an_item_with_its_type_and_labels() -> None:
    proxy = metrics_after("Questions and their metrics: [observability](observability.md).")
    tuner = metrics_after("Its own metrics, with `--metrics-bind 127.0.0.1:9091`:")
    assert proxy == [astuple(spec) for spec in METRICS]
    assert tuner == [astuple(spec) for spec in TUNER_METRICS]


def metrics_after(text: str) -> list[tuple[Any, ...]]:
    return [
        (code_docs(head)[0], head.partition(" (")[2].strip(")").partition(";")[0], tuple(code_docs(head)[1:]), meaning)
        for head, meaning in items_after(text)
    ]


def test_every_key_of_a_result_row_has_a_row() -> None:
    assert [code_docs(key)[0] for key, _ in items_after("## Result rows")] == [
        field.name for field in fields(ResultRow)
    ]


def test_every_key_of_requests_jsonl_has_a_row() -> None:
    record = ReplayRecord(id="0", scheduled_s=0.0, sent_s=0.0, input_tokens=1)
    documented = [code_docs(key)[0] for key, _ in items_after("has a line per request:")]
    assert sorted(documented) == sorted(record.as_json())


# -- commands and options
def commands(command: Any = None, path: tuple[str, ...] = ()) -> Iterator[tuple[str, Any]]:
    """Every command that does something, by its words after `gorgo`, and the group itself."""
    command = command or typer.main.get_command(app)
    inner = getattr(command, "commands", None)
    if not inner or not path:
        yield " ".join(path), command
    for name, found in (inner or {}).items():
        yield from commands(found, (*path, name))


def test_every_command_has_a_row_with_its_arguments() -> None:
    documented = {code_docs(command)[0] for command, _ in items_after("their pages](policies/README.md).\n")}
    found = set()
    for name, command in commands():
        arguments = [parameter.name.upper() for parameter in command.params if parameter.param_type_name == "argument"]
        found.add(" ".join(["gorgo", name, *arguments]))
    assert documented == found - {"gorgo "}


def test_every_option_of_every_command_has_a_row() -> None:
    documented = {
        (option.split()[0], one)
        for head, _ in items_after("Options, with their commands:")
        for option in code_docs(head.partition(" (")[0])
        for one in code_docs(head.partition(" (")[2])
    }
    found = {
        (option, name or "gorgo")
        for name, command in commands()
        for parameter in command.params
        if parameter.param_type_name == "option"
        for option in parameter.opts
    }
    assert documented == found


def test_every_setting_of_the_tuner_has_a_row_with_its_default() -> None:
    documented = {
        code_docs(head)[0]: head.partition(" (")[2].removesuffix(")")
        for head, _ in items_after("Settings, with their defaults:")
    }
    assert list(documented) == [field.name for field in fields(TuneSettings)]
    for field in fields(TuneSettings):
        if field.default is not MISSING:
            assert code_docs(documented[field.name]) == [json.dumps(field.default)], field.name


def test_every_environment_variable_of_the_command_line_is_named() -> None:
    """By its own name where commands share it; the others follow a rule (tests/cli/test_commands.py)."""
    named = [p.envvar for _, command in commands() for p in command.params if p.envvar]
    found = {name for name in named if named.count(name) > 1}
    assert len(found) == 3
    assert {name for name in code_docs(README) if name.startswith("GORGO_")} >= found


def test_every_command_and_option_explains_itself() -> None:
    for name, command in commands():
        assert command.help, name
        assert all(parameter.help for parameter in command.params), name


def test_weights_file_in_the_readme_is_one(tmp_path: Path) -> None:
    (example,) = [text for text in code_docs(README) if text.startswith('{"policy"')]
    (tmp_path / "weights.json").write_text(example)
    file = read_weights_file(tmp_path / "weights.json")
    weights = Weights.of(POLICIES[file.policy].weight_specs, file.weights)
    assert weights["w_rtt"] == json.loads(example)["weights"]["w_rtt"]


def test_commands_in_shell_blocks_are_spelt_right() -> None:
    checked = {page: check_gorgo_lines(page.read_text()) for page in DOCUMENTS}
    assert checked[ROOT / "docs/README.md"] >= 2
    assert sum(checked.values()) >= 80


# -- HTTP
def test_every_route_of_the_data_listener_has_a_row() -> None:
    routes = data_app(cast(Any, None)).routes  # the table is made without looking at the state
    found = {f"{'POST' if route.path in INFERENCE_ROUTES else 'GET'} {route.path}" for route in routes}
    documented = {code_docs(route)[0] for route, _ in items_after("Clients speak to the data listener.")}
    assert documented == {path.replace(":path", "") for path in found}


def test_every_route_of_the_admin_listener_has_a_row() -> None:
    routes = Admin(
        cast(Any, SimpleNamespace(routing=None, replicas=None)), cast(Any, None), None, cast(Any, None)
    ).routes()
    found = {f"{method} {route.path}" for route in routes for method in (route.methods or set()) - {"HEAD"}}
    documented = {code_docs(route)[0] for route, _ in items_after("Operators speak to the admin listener")}
    assert documented == {path.replace(":path", "") for path in found}


def test_every_response_header_has_a_row() -> None:
    source = (ROOT / "gorgo/proxy/exchange/response.py").read_text()
    documented = [code_docs(header)[0] for header, _ in items_after("Every response of a replica carries:")]
    assert set(documented) == set(re.findall(r'b"(x-[a-z-]+)"', source))


def test_the_threat_model_names_tests_that_exist_and_the_attacks_in_order() -> None:
    page = (ROOT / "docs/security.md").read_text()
    named = {test for test in code_docs(page) if test.startswith("test_")}
    sources = [path.read_text() for path in (ROOT / "tests").rglob("test_*.py")]
    found = {name for source in sources for name in re.findall(r"^(?:async )?def (test_\w+)", source, re.MULTILINE)}
    assert len(named) >= 18
    assert named <= found
    numbers = [int(number) for number in re.findall(r"^\| (\d+) ", page, re.MULTILINE)]
    assert numbers == list(range(1, max(numbers) + 1))


# -- map and files
def test_map_names_every_package_of_the_code() -> None:
    mapped = {code_docs(folder)[0] for folder, _ in items_after("## Packages")}
    packages = {path.parent for top in ("gorgo", "tuner", "experiments") for path in (ROOT / top).rglob("*.py")}
    assert {f"{package.relative_to(ROOT)}/" for package in packages} <= mapped


def test_map_names_only_what_is_there() -> None:
    assert [path for path, _ in items_after("## Packages") if not (ROOT / code_docs(path)[0]).exists()] == []


def test_links_lead_to_files_and_headings() -> None:
    wrong = [f"{page.relative_to(ROOT)}: {link}" for page in DOCUMENTS for link in broken_links(page)]
    assert wrong == []


def broken_links(page: Path) -> Iterator[str]:
    for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        if not link.startswith("http") and not (target.exists() and (not anchor or anchor in anchors(target))):
            yield link


def anchors(page: Path) -> set[str]:
    headings = re.findall(r"^#+ (.*)$", page.read_text(), flags=re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_files_that_pages_name_exist() -> None:
    pattern = re.compile(r"(gorgo|tuner|experiments|tests|docs|datasets|packaging|terraform)/[\w./-]+")
    named = [(page.name, word) for page in DOCUMENTS for word in code_docs(page.read_text()) if pattern.fullmatch(word)]
    assert [row for row in named if not (ROOT / row[1]).exists()] == []
    assert len(named) >= 50


def bare_tables(text: str) -> Iterator[int]:
    """Yield the line of each table without a sentence above or below; marks of figures are looked through."""
    lines = re.sub(r"^```.*?^```$", _blank, text, flags=re.MULTILINE | re.DOTALL).splitlines()
    around = [line for line in enumerate(lines, start=1) if line[1].strip() and not line[1].startswith("<!--")]
    kinds = [
        "table" if line.startswith("|") else "heading" if line.startswith(("#", "```")) else "" for _, line in around
    ]
    for place, (number, _) in enumerate(around):
        before, after = kinds[place - 1] if place else "heading", (*kinds, "heading")[place + 1]
        begins = before != "table" or number - around[place - 1][0] > 1
        ends = after != "table" or around[place + 1][0] - number > 1
        if kinds[place] == "table" and ((begins and before) or (ends and after)):
            yield number


def _blank(found: re.Match[str]) -> str:
    return "```" + "\n" * found[0].count("\n")


def test_a_table_stands_between_two_sentences() -> None:
    pages = [page for page in DOCUMENTS if page.name != "CHANGELOG.md"]
    assert [f"{page.relative_to(ROOT)}:{line}" for page in pages for line in bare_tables(page.read_text())] == []


def test_a_table_below_a_heading_or_above_one_is_found() -> None:
    table = "| a |\n|---|\n| b |\n"
    assert list(bare_tables(f"Text.\n\n<!-- figures: c -->\n{table}<!-- /figures -->\n\nText.\n")) == []
    assert list(bare_tables(f"# d\n\n{table}\nText.\n")) == [3]
    assert list(bare_tables(f"Text.\n\n{table}\n{table}")) == [5, 7, 9]


def test_every_page_is_in_the_index_of_the_documentation() -> None:
    index = (ROOT / "docs/README.md").read_text()
    assert [page.name for page in PAGES[1:] if page.name != "README.md" and f"]({page.name})" not in index] == []


def test_the_readme_counts_the_missed_targets_of_the_page_of_results() -> None:
    readme = PAGES[0].read_text().split("## Results in short")[1].split("\n## ")[0]
    table = (ROOT / "docs/results.md").read_text().split("<!-- claims:begin -->")[1]
    missed = sum("| missed" in line for line in table.splitlines())
    words = ("none", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")
    assert f"{words[missed]} {'is' if missed == 1 else 'are'} missed" in readme


def visible_words(text: str) -> list[str]:
    """Return what a reader of the page reads: tables, commands of a line and the text of links and pictures count.

    Fenced blocks, comments, the targets of links and what has neither letter nor digit nor `%` do not.
    """
    text = re.sub(r"^```.*?^```$|<!--.*?-->", "", text, flags=re.MULTILINE | re.DOTALL)
    text = re.sub(r"\]\([^)]*\)", "]", text).replace("<br>", " ")
    return [word for word in text.split() if re.search(r"[\w%]", word)]


def test_words_of_a_page_are_counted_without_marks_targets_and_fences() -> None:
    table = "<!-- figures: a -->\n| b | 5 %<br>c |\n|---|---|\n"
    page = f"## A [link](https://example.org)\n\n{table}\n```sh\nd e\n```\n\n    make f\n"
    assert visible_words(page) == ["A", "[link]", "b", "5", "%", "c", "make", "f"]


def test_the_readme_is_short() -> None:
    assert len(visible_words((ROOT / "README.md").read_text())) <= 900


def test_the_page_for_users_of_other_routers_names_what_they_ask_for_and_this_project_has() -> None:
    """Discovery, events, tokenizers and shared state: the page once said that none of them exists."""
    page = (ROOT / "docs/migrating.md").read_text()
    named = set(code_docs(page))
    assert {"fleet_sources", "replicas[].kv_events", "models[].tokenizer", "shared.url", "gorgo picker"} <= named
    assert [kind for kind in get_args(get_type_hints(FleetSourceConfig)["kind"]) if kind not in named] == []


def test_every_dependency_has_its_reason() -> None:
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"].values()
    wanted = [*project["dependencies"], *(name for extra in extras for name in extra)]
    names = {re.split(r"[<>=;\[ ]", requirement)[0].lower() for requirement in wanted}
    section = (ROOT / "DESIGN.md").read_text().split("## Dependencies")[1]
    lines = re.findall(r"^- ((?:`[^`]+`(?:, )?)+): .+$", section, re.MULTILINE)
    assert {name for line in lines for name in code_docs(line)} == names


def test_make_targets_that_the_readme_names_exist() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = re.findall(r"(?:`|^ *)make ([a-z-]+)", README, re.MULTILINE)  # in prose it is a verb
    assert set(named) <= targets
    assert len(set(named)) >= 6
    assert {"demo", "test"} <= targets


def test_no_page_and_no_stored_table_writes_a_load_as_a_factor_of_time() -> None:
    """`x2` reads as twice the load; a multiplication sign before a speed, as in `3x slower`, stays."""
    stored = [path for path in (ROOT / "docs/figures").glob("*.json") if path.name != "chaos.json"]
    texts = {path: path.read_text() for path in [*DOCUMENTS, *stored]}
    found = [
        (path.name, word)
        for path, text in texts.items()
        for word in re.findall(r"(?<![\w-])x\d(?:\.\d+)?(?![\w-])", text)
    ]
    assert found == []


# --- The runbook against the code: its commands, queries, routes and words exist.


RUNBOOK = (DOCS / "runbook.md").read_text()
#: What each situation has, in this order.
PARTS = ("**Symptom.**", "**Look.**", "**Likely causes", "**Do.**", "**Over when**", "**Do not**")
#: Of prometheus_client, under the proxy's own prefix; they exist on Linux only, so they are named here.
PROCESS = {
    "gorgo_process_resident_memory_bytes",
    "gorgo_process_open_fds",
    "gorgo_process_start_time_seconds",
}
#: Of Envoy.
ENVOYS = {"envoy_http_ext_proc_failure_mode_allowed"}
_SUFFIXES = ("_bucket", "_sum", "_count")

SPECS: dict[str, Any] = {spec.name: spec for spec in (*METRICS, *TUNER_METRICS)}
QUERIES = [line for block in blocks(RUNBOOK, "promql") for line in block.splitlines()]


def _metric(name: str) -> str:
    """The metric that a series belongs to."""
    stem = next((name.removesuffix(end) for end in _SUFFIXES if name.endswith(end)), name)
    return stem if stem in SPECS and SPECS[stem].kind == "histogram" else name


def test_every_situation_says_what_to_see_to_do_and_not_to_do() -> None:
    for heading in headings(RUNBOOK):
        text = section(RUNBOOK, f"## {heading}")
        places = [text.find(part) for part in PARTS]
        assert -1 not in places, (heading, dict(zip(PARTS, places, strict=True)))
        assert places == sorted(places), heading
        assert blocks(text, "promql"), f"{heading}: a way to see it on a dashboard"
        assert blocks(text, "sh"), f"{heading}: a command to look or act with"


def test_commands_exist_with_the_options_that_they_are_given() -> None:
    assert check_gorgo_lines(RUNBOOK) >= 25


def test_metrics_of_queries_exist() -> None:
    named = {_metric(name) for query in QUERIES for name in re.findall(r"\bgorgo_\w+", query)}
    assert named <= set(SPECS) | PROCESS
    assert len(named) >= 25


def test_labels_of_queries_are_labels_of_their_metrics() -> None:
    assert [query for query in QUERIES if unknown_labels(query) or query.count("(") != query.count(")")] == []


def unknown_labels(query: str) -> set[tuple[str, str]]:
    """Metric and label of each label that the metric lacks."""
    named = [name for name in re.findall(r"\b(gorgo_\w+)", query) if name not in PROCESS]
    used = {
        (name, label)
        for name, selector in re.findall(r"\b(gorgo_\w+)\{([^}]*)\}", query)
        for label in re.findall(r"(\w+)=", selector)
    }
    grouped = {label.strip() for found in re.findall(r"by \(([^)]*)\)", query) for label in found.split(",")} - {"le"}
    used |= {(name, label) for name in named for label in grouped}
    return {(name, label) for name, label in used if label not in SPECS[_metric(name)].labels}


def test_buckets_are_asked_of_histograms_and_rates_of_counters() -> None:
    for query in QUERIES:
        for name in re.findall(r"\b(?:rate|increase)\((gorgo_\w+)", query):
            spec = SPECS[_metric(name)]
            assert spec.kind == ("histogram" if name.endswith("_bucket") else "counter"), query


def test_routes_of_calls_exist_with_their_methods() -> None:
    """The table of routes is compared with the code in test_docs.py."""
    documents = "".join(path.read_text() for path in (ROOT / "README.md", *DOCS.glob("*.md")))
    routes = re.findall(r"^- `([A-Z]+) (/admin/[^`]*)`:", documents, flags=re.MULTILINE)
    shell = "".join(blocks(RUNBOOK, "sh")).replace("\\\n", " ")
    calls = [line for line in shell.splitlines() if "/admin/" in line]
    assert len(calls) >= 5
    for call in calls:
        method = (re.search(r"-X (\w+)", call) or ["", "GET"])[1]
        (path,) = re.findall(r"http://127\.0\.0\.1:9090(/admin/[\w/-]*)", call)
        patterns = [re.sub(r"\{\w+\}", "[^/]+", route) for allowed, route in routes if allowed == method]
        assert any(re.fullmatch(pattern, path) for pattern in patterns), call


def test_every_alert_leads_to_a_section() -> None:
    rules = yaml.safe_load((ROOT / "terraform/modules/observability/gorgo-rules.yml").read_text())
    alerts = {rule["alert"] for group in rules["groups"] for rule in group["rules"]}
    assert {alert for row in rows_of(RUNBOOK, "alert", "section") for alert in code(row[0])} == alerts


def test_events_codes_and_keys_are_words_of_the_code() -> None:
    sources = "".join(path.read_text() for top in ("gorgo", "tuner") for path in (ROOT / top).rglob("*.py"))
    known = set(re.findall(r"\w+", sources)) | PROCESS | ENVOYS
    prose = re.sub(r"^```.*?^```", "", RUNBOOK, flags=re.MULTILINE | re.DOTALL)
    words = {word for found in code(prose) for word in re.findall(r"\w+_\w+", found)}
    grepped = set(re.findall(r"[a-z]+_[a-z_]+", " ".join(re.findall(r"grep -\w+ '([^']*)'", RUNBOOK))))
    assert {_metric(word) for word in words | grepped} <= known
    assert len(grepped) >= 8


# --- The files of `examples/`, and the page for people who come from other routers, name what there is.


EXAMPLES = ROOT / "examples"
FLEETS = sorted(EXAMPLES.glob("two-*.yaml"))


@pytest.mark.parametrize("path", FLEETS, ids=lambda path: path.name)
def test_a_fleet_of_the_examples_is_valid(path: Path) -> None:
    assert len(load_config(path).replicas) >= 2


def test_the_settings_of_the_example_are_those_of_a_tuner() -> None:
    assert read_settings(EXAMPLES / "tune.yaml").pairs == 30


def test_the_client_of_the_examples_prints_the_replica_and_the_answer(tmp_path: Path) -> None:
    script = (EXAMPLES / "client.py").read_text()
    with fleet(tmp_path) as (url, _, _, _):
        replaced = script.replace("http://127.0.0.1:8080", url)
        assert replaced != script
        first, answer = output([sys.executable, "-c", replaced]).splitlines()
    assert first == "replica us-ashburn-0 in us-ashburn"
    assert len(answer) == 8 * 4  # eight tokens of four bytes


def test_every_example_is_listed_with_its_purpose() -> None:
    listed = re.findall(r"^- \[([^\]]+)\]\(\1\): .+$", (EXAMPLES / "README.md").read_text(), re.MULTILINE)
    assert sorted(listed) == sorted(path.name for path in EXAMPLES.iterdir() if path.name != "README.md")


def _ours() -> Iterator[str]:
    """Names of the second column of each table, which are the project's own; the first table has commands there."""
    overview, *of_routers = tables((ROOT / "docs/migrating.md").read_text())
    assert overview[0][:2] == ["You run", "Start with"]
    assert len(of_routers) == 7
    for columns, rows in of_routers:
        assert columns[1:] == ["GORGO", "What is different"]
        for row in rows:
            yield from code(row[1])


def test_every_name_of_ours_beside_another_router_s_is_in_the_reference() -> None:
    reference = code((ROOT / "docs/reference.md").read_text())
    sources = {name.removeprefix("fleet_sources[].") for name in reference if name.startswith("fleet_sources[].")}
    known = {*reference, *sources, *POLICIES}
    known |= {name.decode() for name in (*SESSION_HEADERS, *SLO_HEADERS)}
    known |= {"regions.yaml", "tau", "${NAME}", "GORGO_ADMIN_TOKEN"}
    ours = list(_ours())
    assert len(ours) > 40
    assert [name for name in ours if name not in known] == []
