"""What `gorgo simulate` prints, from rows made by hand."""

from __future__ import annotations

import re
from io import StringIO

import pytest
from rich.console import Console

from gorgo.apps.results import ResultRow, Spread
from gorgo.apps.simulate.show import show_rows
from tests.apps.test_results import row

POLICIES = ("gorgo", "random", "oracle")


def one(policy: str, seed: int, p95_ms: float | None, *, time_scale: float = 1.0, trace: str = "t") -> ResultRow:
    ttft_ms = Spread() if p95_ms is None else Spread(1.0, p95_ms / 2, p95_ms, p95_ms)
    e2e_s = Spread() if p95_ms is None else Spread(1.0, 1.0, p95_ms / 50, 1.0)
    return row(policy, seed=seed, time_scale=time_scale, trace=trace, ttft_ms=ttft_ms, e2e_s=e2e_s)


def shown(*rows: ResultRow, styled: bool = False) -> str:
    out = StringIO()
    show_rows(rows, POLICIES, Console(file=out, width=120, force_terminal=styled))
    return out.getvalue()


def cells(text: str, policy: str) -> list[list[str]]:
    """Of every line that begins with the policy."""
    return [line.split() for line in text.splitlines() if line.startswith(f"{policy} ") and " / ... " not in line]


def test_each_load_has_a_block_with_means_over_its_seeds() -> None:
    text = shown(
        one("random", 0, 200.0),
        one("gorgo", 0, 100.0),
        one("gorgo", 1, 300.0),
        one("random", 1, 600.0),
        one("gorgo", 4, 80.0, time_scale=2.0),
        one("gorgo", 0, 60.0, trace="u"),
    )
    titles = [line for line in text.splitlines() if " at load " in line]
    assert titles == [
        "t at load 1: 300 requests, means of 2 seeds",
        "t at load 0.5: 300 requests, seed 4",
        "u at load 1: 300 requests, seed 0",
    ]
    # Errors, then p50 and p95 of TTFT: means of 50 and 150, and of 100 and 300 ms.
    assert [line[1:4] for line in cells(text, "gorgo")] == [["0", "100", "200"], ["0", "40", "80"], ["0", "30", "60"]]
    assert [line[1:4] for line in cells(text, "random")][:1] == [["0", "200", "400"]]
    assert text.index("\ngorgo ") < text.index("\nrandom ")


def test_ratios_are_of_the_first_policy_to_each_other_seed_by_seed() -> None:
    """Halves and eighths: their geometric mean is a quarter. Equal ratios have an interval of no width."""
    text = shown(
        *(one("gorgo", seed, 100.0) for seed in (0, 1)),
        *(one("random", seed, p95_ms) for seed, p95_ms in ((0, 200.0), (1, 800.0))),
        *(one("oracle", seed, 50.0) for seed in (0, 1)),
    )
    heads = next(line for line in text.splitlines() if line.startswith("gorgo / ..."))
    assert heads.split("  ")[-1].strip() == "ratio of p95 E2E"
    assert "ratio of p95 TTFT" in heads
    # Half the width is 12.706 standard errors of ln 2, which is the distance of either from their mean.
    low, high = 0.25 * 2.0**-12.706, 0.25 * 2.0**12.706
    assert re.findall(r"random +(\S+) \[(\S+), (\S+)\] +(\S+) \[", text) == [
        ("0.250", f"{low:.3f}", f"{high:.3f}", "0.250")
    ]
    assert "2.000 [2.000, 2.000]" in text
    assert "gorgo's figure / the row's, below 1 is better: mean [95 % interval] over 2 seeds, paired" in text


@pytest.mark.parametrize(
    "rows",
    [
        [one("gorgo", 0, 100.0), one("random", 0, 200.0)],
        [one("gorgo", 0, 100.0), one("gorgo", 1, 100.0)],
    ],
    ids=["one seed", "one policy"],
)
def test_one_seed_or_one_policy_has_no_ratios(rows: list[ResultRow]) -> None:
    assert "gorgo / ..." not in shown(*rows)


def test_a_ratio_that_nobody_knows_is_a_dash_and_one_of_a_single_pair_has_no_interval() -> None:
    text = shown(
        *(one("gorgo", seed, 100.0) for seed in (0, 1)),
        one("random", 0, 200.0),
        one("random", 1, None),
        *(one("oracle", seed, None) for seed in (0, 1)),
    )
    ratios = text[text.index("gorgo / ...") :]
    assert cells(ratios, "random") == [["random", "0.500", "0.500"]]
    assert cells(ratios, "oracle") == [["oracle", "-", "-"]]


def test_oracle_and_floor_do_not_compete_for_the_best() -> None:
    lines = shown(one("gorgo", 0, 100.0), one("random", 0, 200.0), one("oracle", 0, 50.0), styled=True).splitlines()
    bold = {line.split()[0]: "\x1b[1m" in line for line in lines if line.startswith(POLICIES)}
    assert bold["gorgo"]
    assert not any("\x1b[1m" in line for line in lines if line.startswith("oracle "))
