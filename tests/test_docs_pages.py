"""The pages about policies against the policies: parameters, examples, decisions, what each does without a signal."""

from __future__ import annotations

import doctest
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, fields
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gorgo.core.fleet.columns import Columns
from gorgo.core.latency.prefill import PrefillPrior
from gorgo.core.messages.decision import Choice, Decision
from gorgo.core.messages.request import AttemptResult, Outcome, RouteRequest
from gorgo.core.policy.candidates import Candidates
from gorgo.core.policy.weights import Weights
from gorgo.policies.registry import POLICIES, make_policy
from tests.core.routers import a_request, blocks_of, dispatched, make_router
from tests.documents import DOCS, ROOT, Row, blocks, code, headings, rows_of, section, tables

PAGES = DOCS / "policies"
SECTIONS = [
    "Rule",
    "Parameters",
    "Without a signal",
    "A worked example",
    "One of its decisions",
    "When to use it",
    "Measured",
]
#: Rows of "Without a signal", and the columns that a policy reads them in.
SIGNALS = {
    "a round trip (none yet, or stale)": ("rtt_s",),
    "engine metrics (none, or stale)": ("running_requests", "queued_requests", "used_tokens"),
    "`cached_tokens` in answers": (),
    "a warm index": ("cached_tokens",),
    "a second replica": (),
    "a healthy replica (all ejected)": (),
}

every_page = pytest.mark.parametrize("name", POLICIES)


def page(name: str) -> str:
    return (PAGES / f"{name}.md").read_text()


def test_every_policy_has_a_page_and_every_page_a_policy() -> None:
    assert {path.stem for path in PAGES.glob("*.md")} - {"README"} == set(POLICIES)
    linked = [
        code(row[0])[0] for row in rows_of((PAGES / "README.md").read_text(), "policy", "cost in", "index", "when")
    ]
    assert linked == list(POLICIES)


def test_index_of_the_pages_tells_unit_and_index_of_each() -> None:
    told = {
        code(row[0])[0]: (row[1], code(row[2])[0])
        for row in rows_of(page("README"), "policy", "cost in", "index", "when")
    }
    assert told == {name: (kind.unit or "-", kind.index) for name, kind in POLICIES.items()}


@every_page
def test_page_has_its_title_its_summary_and_all_sections(name: str) -> None:
    text = page(name)
    assert text.startswith(f"# `{name}`\n")
    assert POLICIES[name].summary in text.replace("\n", " ")
    assert headings(text) == SECTIONS


# -- parameters


@every_page
def test_every_weight_is_named_with_its_default_its_box_and_who_moves_it(name: str) -> None:
    specs, text = POLICIES[name].weight_specs, section(page(name), "## Parameters")
    if not specs:
        assert "No weights." in text
        return
    documented = [
        (code(weight)[0], float(code(default)[0]), [float(bound) for bound in code(box)], tuned, meaning)
        for weight, default, box, tuned, meaning in rows_of(text, "weight", "default", "box", "tuned", "meaning")
    ]
    assert documented == [
        (spec.name, spec.default, [spec.low, spec.high], spec.tunable, spec.description) for spec in specs
    ]


@every_page
def test_every_constant_has_the_value_that_the_code_has(name: str) -> None:
    text = section(page(name), "## Parameters")
    found = [rows for header, rows in tables(text) if header == ["constant", "value", "meaning"]]
    for constant, value, _ in (row for rows in found for row in rows):
        module, attribute = code(constant)[0].rsplit(".", 1)
        assert getattr(import_module(module), attribute) == pytest.approx(float(code(value)[0])), constant


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
    text = section(page(name), "## A worked example")
    for part in re.split(r"^### ", text, flags=re.MULTILINE):
        found = [(header, rows) for header, rows in tables(part) if header[0] == "replica"]
        if found:
            yield _example(part, *found)


def _example(text: str, *found: tuple[Row, list[Row]]) -> Example:
    (header, rows), (terms, values) = found
    asked = re.search(r"prompt of ([\d,]+) tokens(?: in ([\d,]+) bytes)?", text)
    chosen = re.search(r"^Chosen: `([^`]+)`(?:, fallback `([^`]+)`)?", text, flags=re.MULTILINE)
    assert asked
    assert chosen
    prompt_tokens, body_bytes = (int((number or "0").replace(",", "")) for number in asked.groups())
    return Example(
        _table([code(cell)[0] for cell in header[1:]], rows, prompt_tokens),
        RouteRequest("r", 0.0, prompt_tokens, b"", 64.0, 0, body_bytes=body_bytes),
        {row[0]: dict(zip(terms[1:], row[1:], strict=True)) for row in values},
        chosen[1],
        chosen[2],
    )


def _table(columns: list[str], rows: list[Row], prompt_tokens: int) -> Candidates:
    """As the fleet has it: empty cells, the default priors, and what the page says."""
    kept, prior = Columns.empty(), PrefillPrior()
    for _ in rows:
        kept.grow()
    kept.prefill_base_s[:], kept.prefill_token_s[:] = prior.base_s, 1 / prior.tokens_per_s
    kept.prefill_kappa_s[:] = prior.kappa_s
    cached = np.zeros(len(rows))
    for place, column in enumerate(columns):
        values = [float(row[place + 1].replace(",", "").replace("unknown", "nan")) for row in rows]
        (cached if column == "cached_tokens" else getattr(kept, column))[:] = values
    names = tuple(row[0] for row in rows)
    return Candidates(np.arange(len(rows)), names, kept, cached, prompt_tokens, is_all=True, now=0.0)


def _is_printed(value: float, cell: str) -> bool:
    number = cell.strip("*").replace(",", "")
    places = len(number.partition(".")[2])
    return abs(value - float(number)) <= 0.5 * 10.0**-places + 1e-9


@every_page
def test_worked_examples_are_what_the_code_makes_of_them(name: str) -> None:
    found = list(examples(name))
    if POLICIES[name].unit:
        assert found, "a policy with a cost has an example that shows it"
    for example in found:
        choice = example.choice(name)
        assert example.candidates.names[choice.row] == example.chosen
        assert choice.fallback == example.fallback
        shown = {f"`{term}`": column for term, column in choice.terms.items()}
        shown |= {} if choice.cost is None else {"cost": choice.cost}
        for row, replica in enumerate(example.candidates.names):
            assert list(example.terms[replica]) == list(shown)
            for term, cell in example.terms[replica].items():
                assert _is_printed(float(shown[term][row]), cell), (replica, term, float(shown[term][row]))


@pytest.mark.parametrize("path", sorted(PAGES.glob("*.md")), ids=lambda path: path.stem)
def test_python_lines_on_the_pages_print_what_they_say(path: Path) -> None:
    failed, _ = doctest.testfile(str(path), module_relative=False)
    assert not failed


@every_page
def test_every_page_has_an_example_that_is_run(name: str) -> None:
    assert list(examples(name)) or ">>> " in section(page(name), "## A worked example")


# -- without a signal


def behaviour(name: str) -> dict[str, str]:
    rows = rows_of(section(page(name), "## Without a signal"), "without", "what it does")
    assert [row[0] for row in rows] == list(SIGNALS)
    return {row[0]: row[1] for row in rows}


def _seen(name: str, cells: dict[str, Any]) -> tuple[int, dict[str, list[float]]]:
    """Row and terms for three replicas of which everything is known, but for `cells`."""
    kept = Columns.empty()
    for _ in range(3):
        kept.grow()
    for place, item in enumerate(fields(Columns)):
        getattr(kept, item.name)[:] = cells.get(item.name, [place + 1, place + 2, place + 3])
    cached = np.array(cells.get("cached_tokens", [0.0, 640.0, 320.0]), dtype=float)
    candidates = Candidates(np.arange(3), ("a", "b", "c"), kept, cached, 1000, is_all=True, now=0.0)
    policy = make_policy(name)
    asked = RouteRequest("r", 0.0, 1000, b"", 64.0, 7)
    choice = policy.choose(asked, candidates, Weights.of(policy.weight_specs), np.random.default_rng(0))
    return choice.row, {term: column.tolist() for term, column in choice.terms.items()}


@every_page
@pytest.mark.parametrize("signal", [signal for signal, columns in SIGNALS.items() if columns])
def test_what_a_page_calls_not_read_is_not_read_and_the_rest_is(name: str, signal: str) -> None:
    changed = [_seen(name, {column: [900.0, 10.0, 500.0]}) != _seen(name, {}) for column in SIGNALS[signal]]
    assert behaviour(name)[signal].startswith("not read") == (not any(changed))


@every_page
@pytest.mark.parametrize("signal", list(SIGNALS)[:2])
def test_what_counts_as_the_worst_known_does(name: str, signal: str) -> None:
    for column in SIGNALS[signal]:
        one_unknown = _seen(name, {column: [np.nan, 10.0, 500.0]}) == _seen(name, {column: [500.0, 10.0, 500.0]})
        none_known = _seen(name, {column: [np.nan] * 3}) == _seen(name, {column: [0.0] * 3})
        read = not behaviour(name)[signal].startswith("not read")
        assert (one_unknown and none_known) or not read
        assert ("worst known" in behaviour(name)[signal]) == read


@every_page
def test_reports_of_cached_tokens_count_where_the_page_says_so(name: str) -> None:
    router = make_router("a", policy=name)
    older, newer = blocks_of(*range(100)), blocks_of(*range(100, 200))
    for prompt in (older, newer, newer):  # the third answer tells that the second prompt is gone: so is the first
        attempt = dispatched(router.submit(a_request(prompt_tokens=6400, blocks=prompt), now=0.0)).attempt_id
        router.on_first_token(attempt, now=1.0)
        told = Outcome(AttemptResult.COMPLETED, status=200, prompt_tokens=6400, cached_tokens=0, output_tokens=1)
        router.on_finish(attempt, told, now=2.0)
    contradicted = bool(router.index.match(older, 1)[0] < 100)
    assert behaviour(name)["`cached_tokens` in answers"].startswith("not read") == (not contradicted)


@every_page
def test_ejection_is_ignored_when_all_are_ejected_and_one_replica_gets_everything(name: str) -> None:
    router = make_router("a", "b", policy=name)
    for _ in range(3):
        for replica in ("a", "b"):
            router.on_probe(replica, None, now=1.0)
    decision = dispatched(router.submit(a_request(), now=2.0)).decision
    assert set(decision.candidates) == {"a", "b"}
    assert "panic" in behaviour(name)["a healthy replica (all ejected)"]
    alone = make_router("a", policy=name)
    assert dispatched(alone.submit(a_request(), now=2.0)).replica == "a"


# -- decisions


@every_page
def test_decision_on_the_page_has_the_form_and_the_terms_of_one_made_now(name: str) -> None:
    (block,) = blocks(section(page(name), "## One of its decisions"), "json")
    shown = json.loads(block)
    router = make_router("us-ashburn-0", "eu-frankfurt-0", "ap-seoul-0", policy=name)
    made: Decision = dispatched(router.submit(a_request(), now=0.0)).decision
    fresh = made.as_dict()
    assert list(shown) == list(fresh)
    assert {key: shown[key] for key in ("policy", "unit", "weights")} == {
        key: fresh[key] for key in ("policy", "unit", "weights")
    }
    assert [list(row["terms"]) for row in shown["candidates"]] == [list(made.terms)] * 3
    assert shown["replica"] in [row["replica"] for row in shown["candidates"]]
    assert (shown["predicted_ttft_ms"] is None) == (made.predicted_ttft_s is None)


@every_page
def test_decision_on_the_page_adds_up_and_takes_the_least(name: str) -> None:
    (block,) = blocks(section(page(name), "## One of its decisions"), "json")
    rows = {row["replica"]: row for row in json.loads(block)["candidates"]}
    chosen = rows[json.loads(block)["replica"]]
    for row in rows.values():
        if POLICIES[name].unit:
            assert row["cost"] == pytest.approx(sum(row["terms"].values()), abs=0.011)
            assert chosen["cost"] <= row["cost"]
        else:
            assert row["cost"] is None


# -- figures


@every_page
def test_measured_rows_are_rows_of_the_results(name: str) -> None:
    documents = [ROOT / "README.md", *DOCS.glob("*.md")]
    lines = {line for path in documents for line in path.read_text().splitlines()}
    text = section(page(name), "## Measured")
    quoted = [line for line in text.splitlines() if re.match(r"(\| [A-Zcg]|[a-z-]+ +\d)", line)]
    assert [line for line in quoted if line not in lines] == []
    assert "simulated" in text
