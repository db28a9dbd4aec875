"""The README's tables and picture against the stored results, to the byte; and the comparison, on rows made up here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.figures.comparison import BURST_HEADER, PICTURE, POLICIES, TIME_SCALES, burst, comparison, picture
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


def row(policy: str, scale: float, seed: int, first_s: float, whole_s: float, gap_ms: float) -> dict[str, Any]:
    return {
        "policy": policy,
        "time_scale": scale,
        "seed": seed,
        "ttft_ms": {"p95": 1000 * first_s},
        "e2e_s": {"p95": whole_s},
        "itl_ms": {"p95": gap_ms},
    }


def test_the_comparison_says_sooner_and_later_and_shows_an_interval_that_holds_no_change() -> None:
    windows = [
        row(policy, scale, seed, 0.9 if policy == "gorgo-ms" else 1.0, 5.0, 10.0 if seed or policy == "gorgo" else 12.0)
        for policy in POLICIES
        for scale in TIME_SCALES
        for seed in (1, 0)
    ]
    (table,) = comparison([windows]).tables
    cells = {label[0]: str(shown["How much (95 % interval)"]) for label, shown in table.rows.items()}
    assert cells["Conversations, half load"].startswith(
        "round robin: 10 % sooner (10 to 10 %)<br>session affinity: 10 %"
    )
    assert (
        cells["Conversations, full load"]
        .split("<br>")[2]
        .startswith("gap between tokens: 10 % longer (66 % shorter to ")
    )


def test_a_burst_is_compared_without_queues_with_two_and_as_the_proxy_queues() -> None:
    def runs(default_s: float, published_s: float) -> list[dict[str, Any]]:
        p95_s = {"gorgo-ms": default_s, "gorgo": published_s}
        return [row(policy, 1.0, seed, p95_s[policy], 5.0, 10.0) for policy in p95_s for seed in (0, 1)]

    (table,) = burst([runs(1.0, 2.0), runs(3.0, 4.0)]).tables
    first = [str(shown[BURST_HEADER[1]]).split("<br>")[0] for shown in table.rows.values()]
    assert first == [
        "first token: 50 % sooner (50 to 50 %)",
        "first token: 25 % sooner (25 to 25 %)",
        "first token: 50 % later (50 to 50 %)",
    ]
