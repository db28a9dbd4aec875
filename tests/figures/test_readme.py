"""The README's tables and picture against the stored results, to the byte; and the comparison, on rows made up here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.figures.comparison import PICTURE, POLICIES, TIME_SCALES, comparison, picture
from tests.figures.marked import Table
from tests.figures.readme import README, SHOWN, table_of
from tests.figures.written import markdown, write_table


@pytest.mark.parametrize("name", SHOWN)
def test_a_table_of_the_readme_is_the_one_that_its_stored_result_makes(name: str) -> None:
    made = f"<!-- figures: {name} -->\n{markdown(table_of(name))}<!-- /figures -->\n"
    assert made in README.read_text(), "run `python -m tests.figures.readme`"


def test_the_picture_of_the_readme_is_the_one_that_the_stored_result_makes() -> None:
    pytest.importorskip("matplotlib")
    assert PICTURE.read_text() == picture(), "run `python -m tests.figures.readme`"


def test_an_empty_part_is_written_once_and_the_page_behind_it_stays(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("<!-- figures: one -->\n<!-- /figures -->\n\nText.\n\n<!-- figures: two -->\n<!-- /figures -->\n")
    table = Table(labels=("load",), rows={("half",): {"sooner": "12 %"}})
    write_table(page, "one", table)
    shown = "<!-- figures: one -->\n| load | sooner |\n|---|---|\n| half | 12 % |\n<!-- /figures -->\n"
    assert page.read_text() == f"{shown}\nText.\n\n<!-- figures: two -->\n<!-- /figures -->\n"
    write_table(page, "one", table)
    assert page.read_text().startswith(f"{shown}\nText.")
    with pytest.raises(LookupError, match=r"page\.md has no part for the figure three"):
        write_table(page, "three", table)


def test_the_comparison_says_sooner_and_later_and_shows_an_interval_that_holds_no_change() -> None:
    def row(policy: str, scale: float, seed: int, first_s: float, whole_s: float, gap_ms: float) -> dict[str, Any]:
        return {
            "policy": policy,
            "time_scale": scale,
            "seed": seed,
            "ttft_ms": {"p95": 1000 * first_s},
            "e2e_s": {"p95": whole_s},
            "itl_ms": {"p95": gap_ms},
        }

    windows = [
        row(policy, scale, seed, 0.9 if policy == "gorgo-ms" else 1.0, 5.0, 10.0 if seed or policy == "gorgo" else 12.0)
        for policy in POLICIES
        for scale in TIME_SCALES
        for seed in (1, 0)
    ]
    burst = [
        row(policy, 1.0, seed, 2.0 if policy == "gorgo-ms" else 1.0, 5.0, 10.0)
        for policy in POLICIES[:2]
        for seed in (0, 1)
    ]
    (table,) = comparison([windows, burst]).tables
    cells = {label[0]: str(shown["How much (95 % interval)"]) for label, shown in table.rows.items()}
    assert cells["Conversations, half load"].startswith(
        "round robin: 10 % sooner (10 to 10 %)<br>session affinity: 10 %"
    )
    assert (
        cells["Conversations, full load"]
        .split("<br>")[2]
        .startswith("gap between tokens: 10 % longer (66 % shorter to ")
    )
    assert cells["Chats beyond capacity"].startswith("first token: 100 % later (100 to 100 %)")
