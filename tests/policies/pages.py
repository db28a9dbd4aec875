"""The lines about a policy on the pages: made from the registry, and written by `python -m tests.policies.pages`.

Owns the rows of `docs/policies/README.md` and the section of `baselines.md` for a policy that has none yet. They can be
extended by hand; `tests/test_docs_pages.py` compares their facts with the code.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np

from gorgo.core.fleet.replica import Columns
from gorgo.core.messages.request import AttemptResult, Outcome, RouteRequest
from gorgo.core.policy.interface import Candidates
from gorgo.core.policy.weights import Weights
from gorgo.policies.registry import POLICIES, make_policy
from tests.core.routers import a_request, blocks_of, dispatched, make_router, submitted
from tests.documents import DOCS, code, headings, rows_of

PAGES = DOCS / "policies"
OVERVIEW, BASELINES = PAGES / "README.md", PAGES / "baselines.md"
#: Policies with a page of their own; the others are sections of one page.
OWN_PAGE = ("gorgo", "gorgo-ms", "lodestar", "predicted-latency", "gorgo-residual")
TABLE = ("policy", "cost in", "index", "terms of a decision", "when")
#: Columns of the table of missing signals, and the columns of candidates that hold the signal.
SIGNALS = {
    "unknown RTT": ("rtt_s",),
    "unknown engine metrics": ("running_requests", "queued_requests", "used_tokens"),
    "no `cached_tokens` in answers": (),
    "cold index": ("cached_tokens",),
}


@dataclass(frozen=True)
class Line:
    """Lines that a page lacks, and the text that they follow."""

    page: Path
    after: str
    text: str

    def __str__(self) -> str:
        return f"docs/policies/{self.page.name}:\n{self.text}"


def missing() -> list[Line]:
    """Everything that the pages do not say of a registered policy."""
    found = [*_missing_of(OVERVIEW, TABLE, _row), *_missing_sections()]
    return [*found, *_missing_of(OVERVIEW, ("policy", *SIGNALS), _signals_row)]


def write(lines: list[Line]) -> None:
    """Add the lines to their pages."""
    for line in lines:
        text = line.page.read_text()
        assert line.after in text
        line.page.write_text(text.replace(line.after, line.after + line.text, 1))


def _missing_of(page: Path, header: tuple[str, ...], row: Any) -> Iterator[Line]:
    text = page.read_text()
    rows = rows_of(text, *header)
    named = {code(cells[0])[0] for cells in rows}
    last = next(line for line in reversed(text.splitlines()) if line.startswith(f"| {rows[-1][0]} |")) + "\n"
    for name in POLICIES:
        made = None if name in named else row(name)
        if made is not None:
            yield Line(page, last, made + "\n")


def _row(name: str) -> str:
    kind = POLICIES[name]
    terms = ", ".join(f"`{term}`" for term in terms_of(name))
    cells = (f"[`{name}`](baselines.md#{name})", kind.unit or "-", f"`{kind.index}`", terms, "not measured")
    return f"| {' | '.join(cells)} |"


def _missing_sections() -> Iterator[Line]:
    text = BASELINES.read_text()
    named = {heading.strip("`") for heading in headings(text)}
    for name, kind in POLICIES.items():
        if name in named or name in OWN_PAGE:
            continue
        rows = "".join(
            f"| `{one.name}` | `{one.default}` | `{one.low}` to `{one.high}` | {one.tunable} | {one.description} |\n"
            for one in kind.weight_specs
        )
        head = "\n| weight | default | bounds | tunable | meaning |\n|---|---|---|---|---|\n" if rows else ""
        yield Line(BASELINES, text[-200:], f"\n## `{name}`\n\n{kind.summary}.\n{head}{rows}")


def _signals_row(name: str) -> str | None:
    """The row of missing signals, None for a policy that reads none."""
    known = [_unknown_cell(name, signal) for signal in ("unknown RTT", "unknown engine metrics")]
    corrected, cold = is_corrected(name), reads(name, "cold index")
    if known == ["not read"] * 2 and not corrected and not cold:
        return None
    fallback = cold_fallback(name)
    uncached = "the whole prompt is uncached" if fallback is None else f"`{fallback}`"
    cells = (
        *known,
        "bounded by the KV pool, not corrected" if corrected else "not read",
        uncached if cold else "not read",
    )
    return f"| `{name}` | {' | '.join(cells)} |"


def _unknown_cell(name: str, signal: str) -> str:
    if not reads(name, signal):
        return "not read"
    worst = all(unknown_is_the_worst_known(name, column) for column in SIGNALS[signal])
    return "worst known, else 0" if worst else "read, but not as the worst known: see `fill_unknown`"


# -- what a policy does


def terms_of(name: str) -> list[str]:
    """The terms of a decision of the policy."""
    return list(dispatched(submitted(make_router("a", "b", policy=name), a_request(), now=0.0)).decision.terms)


def reads(name: str, signal: str) -> bool:
    return any(_choose(name, {column: [900.0, 10.0, 500.0]}) != _choose(name, {}) for column in SIGNALS[signal])


def unknown_is_the_worst_known(name: str, column: str) -> bool:
    one_unknown = _choose(name, {column: [np.nan, 10.0, 500.0]}) == _choose(name, {column: [500.0, 10.0, 500.0]})
    none_known = _choose(name, {column: [np.nan] * 3}) == _choose(name, {column: [0.0] * 3})
    return one_unknown and none_known


def is_corrected(name: str) -> bool:
    """Whether a report of no cached tokens evicts an older prompt from the index."""
    router = make_router("a", policy=name)
    older, newer = blocks_of(*range(100)), blocks_of(*range(100, 200))
    for prompt in (older, newer, newer):
        attempt = dispatched(submitted(router, a_request(prompt_tokens=6400, blocks=prompt), now=0.0)).attempt_id
        router.on_first_token(attempt, now=1.0)
        outcome = Outcome(AttemptResult.COMPLETED, status=200, prompt_tokens=6400, cached_tokens=0, output_tokens=1)
        router.on_finish(attempt, outcome, now=2.0)
    return bool(router.index.match(older, 1)[0] < 100)


def cold_fallback(name: str) -> str | None:
    return dispatched(submitted(make_router("a", "b", policy=name), a_request(), now=0.0)).decision.fallback


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


def main() -> None:
    lines = missing()
    write(lines)
    sys.stdout.write("".join(f"{line}\n" for line in lines) or "every policy has its lines\n")


if __name__ == "__main__":
    main()
