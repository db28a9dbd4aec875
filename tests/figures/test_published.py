"""Figures of the GORGO paper: each with its place, and those of a page as the paper prints them."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import astuple

from gorgo.apps.claims.targets import HELD_OUT, PUBLISHED_RATIOS
from gorgo.apps.demo.options import PAPER, RANDOM
from gorgo.apps.fleet_fit.published import (
    AFFINITY,
    HACKED,
    HALF_LOAD,
    LOAD_SWEEP,
    P95,
    PAPER_FIXED,
    PAPER_ONLINE,
    WILDCHAT,
    WILDCHAT_FULL_LOAD,
    WILDCHAT_PRINTED,
    WINDOWS,
    published_values,
)
from tests.documents import DOCS, code, rows_of

PAGE = (DOCS / "results.md").read_text()


def test_every_published_figure_has_a_table_a_row_and_a_column_of_its_own() -> None:
    found = list(published_values())
    assert all(re.fullmatch(r"table [1-9]|authors' note of \d+ \w+ \d{4}", figure.table) for figure in found)
    assert all(figure.row and figure.column and figure.value > 0 for figure in found)
    places = Counter((figure.table, figure.row, figure.column) for figure in found)
    assert places.most_common(1)[0][1] == 1
    windows = sum(len(window.stats) for window in WINDOWS)
    rows_of_seven = windows + len(HALF_LOAD) + len(WILDCHAT) + len(HACKED)
    others = 2 * 3 * len(LOAD_SWEEP) + 5 * len(WILDCHAT_PRINTED) + len(WILDCHAT_FULL_LOAD)
    assert len(found) == 7 * rows_of_seven + others


def test_the_page_prints_table_6_as_the_paper_does() -> None:
    rows = rows_of(
        PAGE, "policy in table 6", "completed requests", "TTFT p50, s", "TTFT p95, s", "TTFT p99, s", "TTFT max, s"
    )
    shown = {
        code(name)[0] + "".join(f" ({kind})" for kind in re.findall(r", (\w+)$", name)): tuple(
            float(cell.replace(",", "")) for cell in cells
        )
        for name, *cells in rows
    }
    assert shown == {policy: astuple(stats) for policy, stats in WILDCHAT_PRINTED.items()}


def test_in_table_6_the_paper_s_policy_loses_to_a_random_choice() -> None:
    of_random = WILDCHAT_PRINTED[RANDOM].ttft_s_p95
    online, fixed = (WILDCHAT_PRINTED[name].ttft_s_p95 / of_random for name in (PAPER_ONLINE, PAPER_FIXED))
    assert (round(online, 2), round(fixed, 2)) == (1.23, 1.79)
    assert "1.23 times as long online and 1.79 times as long with fixed weights" in " ".join(PAGE.split())


def test_targets_of_the_published_claim_are_the_published_levels() -> None:
    """Over the best baseline of table 2, and the range that the paper states over session affinity."""
    held_out = [window for window in WINDOWS if window.name != "April 5"]
    place = P95[0]
    ratios, over_affinity = [], []
    for window in held_out:
        p95 = {policy: stats.values()[place] for policy, stats in window.stats.items()}
        ours = p95.pop(PAPER)
        ratios.append(round(ours / min(p95.values()), 3))
        over_affinity.append(round(100 * (1 - ours / p95[AFFINITY]), 1))
    assert [PUBLISHED_RATIOS[workload.name] for workload in HELD_OUT] == ratios == [0.881, 0.931]
    assert sorted(over_affinity) == [6.9, 15.5]
