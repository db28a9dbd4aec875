"""The pages about policies against the policies: parameters, examples, decisions, missing signals."""

from __future__ import annotations

import doctest
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import pytest

from gorgo.core.fleet.columns import Columns
from gorgo.core.latency.prefill import PrefillPrior
from gorgo.core.messages.decision import Decision
from gorgo.core.messages.request import AttemptResult, Outcome, RouteRequest
from gorgo.core.policy.candidates import Candidates
from gorgo.core.policy.choice import Choice
from gorgo.core.policy.weights import Weights
from gorgo.policies.registry import POLICIES, make_policy
from tests.core.routers import a_request, blocks_of, dispatched, make_router, submitted
from tests.documents import DOCS, Row, blocks, code, headings, rows_of, section, tables

PAGES = DOCS / "policies"
OVERVIEW = (PAGES / "README.md").read_text()
#: Policies with a page of their own; the others are sections of one page.
OWN_PAGE = ("gorgo", "gorgo-ms")
SECTIONS = ["Rule", "Parameters", "A worked example", "When to use it"]
#: Columns of the table of missing signals, and the columns of candidates that hold the signal.
SIGNALS = {
    "unknown RTT": ("rtt_s",),
    "unknown engine metrics": ("running_requests", "queued_requests", "used_tokens"),
    "no `cached_tokens` in answers": (),
    "cold index": ("cached_tokens",),
}


def page(name: str) -> str:
    if name in OWN_PAGE:
        return (PAGES / f"{name}.md").read_text()
    return section((PAGES / "baselines.md").read_text(), f"## `{name}`")


def test_every_policy_has_a_row_with_unit_index_and_terms_and_its_own_description() -> None:
    documented = {
        code(row[0])[0]: (row[1], code(row[2]), code(row[3]))
        for row in rows_of(OVERVIEW, "policy", "cost in", "index", "terms of a decision", "when")
    }
    made = {name: dispatched(submitted(make_router("a", "b", policy=name), a_request(), now=0.0)) for name in POLICIES}
    assert documented == {
        name: (kind.unit or "-", [kind.index], list(made[name].decision.terms)) for name, kind in POLICIES.items()
    }
    assert [n for n, kind in POLICIES.items() if kind.summary not in page(n).replace("\n", " ")] == []
    baselines = headings((PAGES / "baselines.md").read_text())
    assert [heading.strip("`") for heading in baselines] == [name for name in POLICIES if name not in OWN_PAGE]
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
    return Example(
        _table([code(cell)[0] for cell in header[1:]], rows, prompt_tokens),
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


@pytest.mark.parametrize("name", ["gorgo", "gorgo-ms", "least-load"])
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


def _choose(name: str, cells: dict[str, Any]) -> tuple[int, dict[str, list[float]]]:
    """Row and terms for three replicas of which everything is known, but for `cells`."""
    columns = Columns.empty()
    for _ in range(3):
        columns.grow()
    for place, item in enumerate(fields(Columns)):
        getattr(columns, item.name)[:] = cells.get(item.name, [place + 1, place + 2, place + 3])
    cached = np.array(cells.get("cached_tokens", [0.0, 640.0, 320.0]), dtype=float)
    candidates = Candidates(np.arange(3), ("a", "b", "c"), columns, cached, 1000, is_all=True, now=0.0)
    policy = make_policy(name)
    request = RouteRequest("r", 0.0, 1000, b"", 64.0, 7)
    choice = policy.choose(request, candidates, Weights.of(policy.weight_specs), np.random.default_rng(0))
    return choice.row, {term: column.tolist() for term, column in choice.terms.items()}


def _reads(name: str, signal: str) -> bool:
    return any(_choose(name, {column: [900.0, 10.0, 500.0]}) != _choose(name, {}) for column in SIGNALS[signal])


def _unknown_is_the_worst_known(name: str, column: str) -> bool:
    one_unknown = _choose(name, {column: [np.nan, 10.0, 500.0]}) == _choose(name, {column: [500.0, 10.0, 500.0]})
    none_known = _choose(name, {column: [np.nan] * 3}) == _choose(name, {column: [0.0] * 3})
    return one_unknown and none_known


def _is_corrected(name: str) -> bool:
    """Whether a report of no cached tokens evicts an older prompt from the index."""
    router = make_router("a", policy=name)
    older, newer = blocks_of(*range(100)), blocks_of(*range(100, 200))
    for prompt in (older, newer, newer):
        attempt = dispatched(submitted(router, a_request(prompt_tokens=6400, blocks=prompt), now=0.0)).attempt_id
        router.on_first_token(attempt, now=1.0)
        outcome = Outcome(AttemptResult.COMPLETED, status=200, prompt_tokens=6400, cached_tokens=0, output_tokens=1)
        router.on_finish(attempt, outcome, now=2.0)
    return bool(router.index.match(older, 1)[0] < 100)


def test_the_table_of_missing_signals_says_what_each_policy_does() -> None:
    documented = behaviour()
    assert list(documented) == list(POLICIES)
    for name, cells in documented.items():
        read = {signal: not cell.startswith("not read") for signal, cell in cells.items()}
        assert read == {
            signal: _reads(name, signal) if columns else _is_corrected(name) for signal, columns in SIGNALS.items()
        }, name
        for signal in ("unknown RTT", "unknown engine metrics"):
            assert ("worst known" in cells[signal]) == read[signal], name
            assert not read[signal] or all(_unknown_is_the_worst_known(name, column) for column in SIGNALS[signal])
        fallback = code(cells["cold index"])
        assert fallback == [] or _cold_fallback(name) == fallback[0], name


def _cold_fallback(name: str) -> str | None:
    return dispatched(submitted(make_router("a", "b", policy=name), a_request(), now=0.0)).decision.fallback


def test_with_all_replicas_ejected_or_only_one_every_policy_chooses() -> None:
    for name in POLICIES:
        router = make_router("a", "b", policy=name)
        for replica in ("a", "b") * 3:
            router.on_probe(replica, None, now=1.0)
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
