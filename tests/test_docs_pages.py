"""Pages with programs in them, about policies and about extending, against the code: parameters, examples,
decisions, entry points.
"""

from __future__ import annotations

import doctest
import importlib
import json
import re
import sys
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from itertools import product
from math import log
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from gorgo.cli import app
from gorgo.config.load import parse_config
from gorgo.core.fleet.replica import Columns
from gorgo.core.latency.prefill import PrefillPrior
from gorgo.core.messages.decision import Decision
from gorgo.core.messages.request import RouteRequest
from gorgo.core.policy.interface import Candidates, Choice
from gorgo.core.policy.weights import Weights, WeightSpec
from gorgo.core.prefix.residency import SharedRuns
from gorgo.engines import registry as engines
from gorgo.engines.registry import dialect
from gorgo.policies import registry
from gorgo.policies import registry as policies
from gorgo.policies.registry import POLICIES, make_policy
from tests.core.routers import a_request, dispatched, make_router, submitted
from tests.documents import DOCS, ROOT, Row, blocks, check_gorgo_lines, code, headings, rows_of, section, tables
from tests.engines import test_contract as engine_contract
from tests.engines.scrapes import METRICS
from tests.policies import pages as policy_pages
from tests.policies import test_contract as policy_contract
from tests.policies.pages import (
    OWN_PAGE,
    PAGES,
    SIGNALS,
    TABLE,
    Line,
    cold_fallback,
    is_corrected,
    missing,
    reads,
    terms_of,
    unknown_is_the_worst_known,
    write,
)
from tests.tuner import test_optimizers as optimizer_contract
from tuner.optimizers import registry as optimizers
from tuner.optimizers.registry import make_optimizer
from tuner.space import LogBox

# --- The pages about policies against the policies: parameters, examples, decisions, missing signals.


OVERVIEW = (PAGES / "README.md").read_text()
SECTIONS = ["Rule", "Parameters", "A worked example", "When to use it"]


def page(name: str) -> str:
    if name in OWN_PAGE:
        return (PAGES / f"{name}.md").read_text()
    return section((PAGES / "baselines.md").read_text(), f"## `{name}`")


def test_no_policy_lacks_its_lines() -> None:
    lines = [str(line) for line in missing()]
    assert lines == [], "\n".join(["run `python -m tests.policies.pages`, or add:", *lines])


def test_lines_of_a_new_policy_are_made_from_its_class(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    class NearestCached(type(make_policy("nearest"))):  # type: ignore[misc]
        name = "nearest-cached"
        weight_specs = (WeightSpec("w", 0.5, 0.1, 2.0, "of nothing"),)

    monkeypatch.setattr(policy_pages, "POLICIES", {**POLICIES, "nearest-cached": NearestCached})
    monkeypatch.setattr(registry, "POLICIES", {**POLICIES, "nearest-cached": NearestCached})
    lines = missing()
    overview, section_of_it, signals = (line.text for line in lines)
    assert overview == "| [`nearest-cached`](baselines.md#nearest-cached) | ms | `any` | `rtt` | not measured |\n"
    assert section_of_it.startswith(f"\n## `nearest-cached`\n\n{NearestCached.summary}.\n")
    assert section_of_it.endswith("| `w` | `0.5` | `0.1` to `2.0` | yes | of nothing |\n")
    assert signals == "| `nearest-cached` | worst known, else 0 | not read | not read | not read |\n"
    copies = [Line(tmp_path / line.page.name, line.after, line.text) for line in lines]
    for line, copy in zip(lines, copies, strict=True):
        copy.page.write_text(line.page.read_text())
    write(copies)
    assert all(copy.text in copy.page.read_text() for copy in copies)


def test_every_policy_has_a_row_with_unit_index_and_terms_and_its_own_description() -> None:
    documented = {code(row[0])[0]: (row[1], code(row[2]), code(row[3])) for row in rows_of(OVERVIEW, *TABLE)}
    assert documented == {name: (kind.unit or "-", [kind.index], terms_of(name)) for name, kind in POLICIES.items()}
    assert [n for n, kind in POLICIES.items() if kind.summary not in page(n).replace("\n", " ")] == []
    baselines = headings((PAGES / "baselines.md").read_text())
    assert sorted(heading.strip("`") for heading in baselines) == sorted(set(POLICIES) - set(OWN_PAGE))
    assert all(set(headings(page(name))) >= set(SECTIONS) for name in OWN_PAGE)


# -- parameters
@pytest.mark.parametrize("name", [name for name, kind in POLICIES.items() if kind.weight_specs])
def test_every_weight_is_named_with_its_default_its_box_and_who_moves_it(name: str) -> None:
    documented = [
        (code(weight)[0], float(code(default)[0]), [float(bound) for bound in code(box)], tuned, meaning)
        for weight, default, box, tuned, meaning in rows_of(
            page(name), "weight", "default", "bounds", "tunable", "meaning"
        )
    ]
    specs = POLICIES[name].weight_specs
    assert documented == [
        (spec.name, spec.default, [spec.low, spec.high], spec.tunable, spec.description) for spec in specs
    ]


# -- worked examples
@dataclass(frozen=True)
class Example:
    """What a page says of one decision: the table that the policy sees, and what it makes of it."""

    candidates: Candidates
    request: RouteRequest
    #: Replica to term to the cell as printed; the cost is the last term, where there is one.
    terms: dict[str, dict[str, str]]
    chosen: str
    fallback: str | None

    def choice(self, name: str) -> Choice:
        policy = make_policy(name)
        weights = Weights.of(policy.weight_specs)
        return policy.choose(self.request, self.candidates, weights, np.random.default_rng(0))


def examples(name: str) -> Iterator[Example]:
    for part in re.split(r"^### ", page(name), flags=re.MULTILINE):
        found = [(header, rows) for header, rows in tables(part) if header[0] == "replica"]
        if found:
            yield _example(part, *found)


def _example(text: str, *found: tuple[Row, list[Row]]) -> Example:
    (header, rows), (terms, values) = found
    prompt = re.search(r"prompt of ([\d,]+) tokens(?: in ([\d,]+) bytes)?", text)
    chosen = re.search(r"^Chosen: `([^`]+)`(?:, fallback `([^`]+)`)?", text, flags=re.MULTILINE)
    assert prompt
    assert chosen
    prompt_tokens, body_bytes = (int((number or "0").replace(",", "")) for number in prompt.groups())
    candidates = _table([code(cell)[0] for cell in header[1:]], rows, prompt_tokens)
    if found_share := re.search(r"([\d]+) % of recent prompt tokens", text):
        candidates.found_share = int(found_share[1]) / 100
    if went_on := re.search(r"(\d+) other prompts went on from its first ([\d,]+) tokens", text):
        others, depth = int(went_on[1]), float(went_on[2].replace(",", ""))
        copies = int((candidates.matched_tokens >= depth).sum())
        candidates.shared = SharedRuns([depth, 0.0], [0.0, depth * others / (others + copies + 1)])
    return Example(
        candidates,
        RouteRequest("r", 0.0, prompt_tokens, b"", 64.0, 0, body_bytes=body_bytes),
        {row[0]: dict(zip(terms[1:], row[1:], strict=True)) for row in values},
        chosen[1],
        chosen[2],
    )


def _table(names: list[str], rows: list[Row], prompt_tokens: int) -> Candidates:
    """As the fleet has it: empty cells, the default priors, and what the page says."""
    columns, prior = Columns.empty(), PrefillPrior()
    for _ in rows:
        columns.grow()
    columns.prefill_base_s[:], columns.prefill_token_s[:] = prior.base_s, 1 / prior.tokens_per_s
    columns.prefill_kappa_s[:] = prior.kappa_s
    cached = np.zeros(len(rows))
    for place, name in enumerate(names):
        values = [float(row[place + 1].replace(",", "").replace("unknown", "nan")) for row in rows]
        (cached if name == "cached_tokens" else getattr(columns, name))[:] = values
    replicas = tuple(row[0] for row in rows)
    return Candidates(np.arange(len(rows)), replicas, columns, cached, prompt_tokens, is_all=True, now=0.0)


def _is_printed(value: float, cell: str) -> bool:
    number = cell.strip("*").replace(",", "")
    places = len(number.partition(".")[2])
    return abs(value - float(number)) <= 0.5 * 10.0**-places + 1e-9


@pytest.mark.parametrize("name", [*OWN_PAGE, "least-load"])
def test_worked_examples_are_what_the_code_makes_of_them(name: str) -> None:
    found = list(examples(name))
    assert found, "a policy whose cost has several terms has an example"
    for example in found:
        choice = example.choice(name)
        assert example.candidates.names[choice.row] == example.chosen
        assert choice.fallback == example.fallback
        computed = {f"`{term}`": column for term, column in choice.terms.items()}
        computed |= {} if choice.cost is None else {"cost": choice.cost}
        for row, replica in enumerate(example.candidates.names):
            assert list(example.terms[replica]) == list(computed)
            for term, cell in example.terms[replica].items():
                assert _is_printed(float(computed[term][row]), cell), (replica, term, float(computed[term][row]))


def test_python_lines_on_the_pages_print_what_they_say() -> None:
    ran = [doctest.testfile(str(path), module_relative=False) for path in sorted(PAGES.glob("*.md"))]
    assert sum(result.failed for result in ran) == 0
    assert sum(result.attempted for result in ran) >= 5


# -- without a signal
def behaviour() -> dict[str, dict[str, str]]:
    rows = rows_of(OVERVIEW, "policy", *SIGNALS)
    listed = {code(row[0])[0]: dict(zip(SIGNALS, row[1:], strict=True)) for row in rows}
    return {name: listed.pop(name, dict.fromkeys(SIGNALS, "not read")) for name in POLICIES} | listed


def test_the_table_of_missing_signals_says_what_each_policy_does() -> None:
    documented = behaviour()
    assert list(documented) == list(POLICIES)
    for name, cells in documented.items():
        read = {signal: not cell.startswith("not read") for signal, cell in cells.items()}
        assert read == {
            signal: reads(name, signal) if columns else is_corrected(name) for signal, columns in SIGNALS.items()
        }, name
        for signal in ("unknown RTT", "unknown engine metrics"):
            assert ("worst known" in cells[signal]) == read[signal], name
            assert not read[signal] or all(unknown_is_the_worst_known(name, column) for column in SIGNALS[signal])
        fallback = code(cells["cold index"])
        assert fallback == [] or cold_fallback(name) == fallback[0], name


def test_with_all_replicas_ejected_or_only_one_every_policy_chooses() -> None:
    for name in POLICIES:
        router = make_router("a", "b", policy=name)
        for replica in ("a", "b") * 3:
            router.replicas.on_probe(replica, None, now=1.0)
        assert set(dispatched(submitted(router, a_request(), now=2.0)).decision.candidates) == {"a", "b"}
        assert dispatched(submitted(make_router("a", policy=name), a_request(), now=2.0)).replica == "a"


# -- decisions
def test_decision_on_the_page_has_the_form_of_one_made_now_and_takes_the_least() -> None:
    name = "gorgo-ms"
    (block,) = blocks(section(page(name), "## One of its decisions"), "json")
    printed = json.loads(block)
    router = make_router("us-ashburn-0", "eu-frankfurt-0", "ap-seoul-0", policy=name)
    made: Decision = dispatched(submitted(router, a_request(), now=0.0)).decision
    fresh = made.as_dict()
    assert list(printed) == list(fresh)
    assert {key: printed[key] for key in ("policy", "unit", "weights")} == {
        key: fresh[key] for key in ("policy", "unit", "weights")
    }
    rows = {row["replica"]: row for row in printed["candidates"]}
    assert [list(row["terms"]) for row in rows.values()] == [list(made.terms)] * 3
    assert (printed["predicted_ttft_ms"] is None) == (made.predicted_ttft_s is None)
    for row in rows.values():
        assert row["cost"] == pytest.approx(sum(row["terms"].values()), abs=0.011)
        assert rows[printed["replica"]]["cost"] <= row["cost"]


# --- The examples of the page about extending: offered by its own entry points, and held to the contracts.


PAGE = (DOCS / "extending.md").read_text()


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The page's package as pip would leave it, and its folder on the path."""
    site = tmp_path_factory.mktemp("site-packages")
    for path, text in re.findall(r"^```\w+ (extras/\S+)\n(.*?)^```$", PAGE, flags=re.MULTILINE | re.DOTALL):
        (site / path).parent.mkdir(exist_ok=True)
        (site / path).write_text(text)
    info = site / "extras-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: extras\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(_entry_points())
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(site))
        yield site
    for name in [name for name in sys.modules if name.partition(".")[0] == "extras"]:
        del sys.modules[name]
    importlib.invalidate_caches()


def _entry_points() -> str:
    """As the build makes it of pyproject.toml."""
    (table,) = blocks(PAGE, "toml")
    groups = tomllib.loads(table)["project"]["entry-points"]
    lines = [[f"[{group}]", *(f"{name} = {found}" for name, found in rows.items())] for group, rows in groups.items()]
    return "\n".join(line for group in lines for line in group) + "\n"


def cases(module: ModuleType, name: str) -> Iterator[Callable[[], None]]:
    """Every test of a contract suite that is run for each name, for this one, with all of its other parameters."""
    for function in [one for key, one in vars(module).items() if key.startswith("test_")]:
        marks = [mark for mark in getattr(function, "pytestmark", []) if mark.name == "parametrize"]
        shared = getattr(module, "pytestmark", None)
        marks = [*marks, *([shared.mark] if shared is not None else [])]
        if any(mark.args[0] == "name" for mark in marks):
            yield from _calls(function, [mark for mark in marks if mark.args[0] != "name"], name)


def _calls(function: Callable[..., None], marks: list[Any], name: str) -> Iterator[Callable[[], None]]:
    for values in product(*(mark.args[1] for mark in marks)):
        given: dict[str, Any] = {}
        for mark, value in zip(marks, values, strict=True):
            names = mark.args[0]
            given |= {names: value} if isinstance(names, str) else dict(zip(names, value, strict=True))
        yield lambda given=given: function(name=name, **given)  # type: ignore[misc]


def held_to(module: ModuleType, name: str) -> int:
    ran = list(cases(module, name))
    for case in ran:
        case()
    return len(ran)


# The contracts make one of each many times over, so they find it as a line of this repository's registries; looking for
# entry points reads the metadata of all that is installed, each time.
@pytest.mark.usefixtures("installed")
def test_the_policy_of_the_page_keeps_the_contract(monkeypatch: pytest.MonkeyPatch) -> None:
    kind = type(make_policy("least-work"))
    monkeypatch.setattr(policies, "POLICIES", {**policies.POLICIES, "least-work": kind})
    assert held_to(policy_contract, "least-work") >= 8


@pytest.mark.usefixtures("installed")
def test_the_policy_of_the_page_is_listed_and_simulated_by_its_name() -> None:
    listed = CliRunner().invoke(app, ["policies", "--json"])
    assert "least-work" in {row["name"] for row in json.loads(listed.stdout)}
    asked = [
        "simulate",
        "chat-small",
        "--policy",
        "least-work",
        "--policy",
        "random",
        "--limit",
        "60",
        "--jobs",
        "1",
    ]
    ran = CliRunner().invoke(app, [*asked, "--json"])
    rows = {row["policy"]: row for row in json.loads(ran.stdout)}
    assert rows["least-work"]["weights"] == {"ms_per_token": 0.09}
    assert rows["least-work"]["ttft_ms"]["mean"] < rows["random"]["ttft_ms"]["mean"]


def test_the_page_names_everything_that_a_policy_may_read() -> None:
    listed = {
        name for line in re.findall(r"^- (`.*?): ", PAGE, flags=re.MULTILINE) for name in re.findall(r"`(\w+)`", line)
    }
    internal = {"slots", "columns", "matched_tokens", "is_all", "table"}
    assert listed == {name for name in dir(Candidates) if not name.startswith("_")} - internal
    (request,) = re.findall(r"^`request`: (.*?)\.", PAGE, flags=re.MULTILINE)
    assert set(re.findall(r"`(\w+)`", request)) <= {field.name for field in fields(RouteRequest)}


def test_the_engine_of_the_page_keeps_the_contract(installed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines, "DIALECTS", {**engines.DIALECTS, "tgi": type(dialect("tgi"))})
    monkeypatch.setitem(METRICS, "tgi", (installed / "extras/scrape").read_text())
    assert held_to(engine_contract, "tgi") >= 6


def test_the_engine_of_the_page_reads_its_scrape_and_no_other(installed: Path) -> None:
    text = (installed / "extras/scrape").read_text()
    sample = dialect("tgi").read_metrics(text)
    assert (sample.running_requests, sample.queued_requests, sample.used_tokens) == (12.0, 3.0, None)
    for other in METRICS:
        assert dialect(other).read_metrics(text) == type(sample)()


@pytest.mark.usefixtures("installed")
def test_the_engine_of_the_page_may_be_named_in_regions_yaml() -> None:
    text = (ROOT / "regions.yaml").read_bytes().replace(b"engine: sglang", b"engine: tgi", 1)
    assert parse_config(text).replicas[0].engine == "tgi"


@pytest.mark.usefixtures("installed")
def test_the_optimizer_of_the_page_keeps_the_contract(monkeypatch: pytest.MonkeyPatch) -> None:
    kind = type(make_optimizer("coordinate", optimizer_contract.PAPER_BOX, {}, np.random.default_rng(0)))
    monkeypatch.setitem(optimizers.OPTIMIZERS, "coordinate", kind)
    assert held_to(optimizer_contract, "coordinate") >= 12


@pytest.mark.usefixtures("installed")
def test_the_optimizer_of_the_page_finds_the_bottom_of_a_bowl() -> None:
    best = {"a": 0.2, "b": 4.0}
    box = LogBox(tuple(WeightSpec(name, 1.0, 1e-3, 1e3, "any") for name in best))
    for seed in range(20):
        optimizer = make_optimizer("coordinate", box, {}, np.random.default_rng(seed), budget=80)
        while optimizer.stop() is None:
            weights = optimizer.ask()
            optimizer.tell(weights, sum(log(weights[name] / best[name]) ** 2 for name in best))
        assert all(abs(log(optimizer.incumbent[name] / best[name])) < 0.1 for name in best)


@pytest.mark.usefixtures("installed")
def test_gorgo_tune_takes_the_optimizer_of_the_page_by_its_name() -> None:
    refused = CliRunner().invoke(app, ["tune", "--algorithm", "adam"])
    assert refused.exit_code == 2
    assert "coordinate" in re.sub(r"\W+", " ", refused.stderr)


def test_commands_of_the_page_exist() -> None:
    assert check_gorgo_lines(PAGE) >= 5
