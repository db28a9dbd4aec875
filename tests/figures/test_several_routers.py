"""The view of the tables of several routers."""

from __future__ import annotations

import re

from tests.figures.marked import problems
from tests.figures.several_routers import several_routers

_ROUTERS = "hit, % / p95 TTFT, ms / p95 E2E, s"
_TARGETS = """| store against one | hit, points | p95 TTFT, % | p95 E2E, % | won back, % | missed |
|---|---|---|---|---|---|
"""
_FOUR = f"""| {_ROUTERS} | alone | store | one |
|---|---|---|---|
| ART-Chat-like@1/4 | 17.5 / 2213 / 8.03 | 19.1 / 1921 / 5.89 | 19.1 / 1882 / 5.91 |

{_TARGETS}| ART-Chat-like@1/4 | -0.0 [-0.8, +0.2] | +2.1 [-3.4, +2.9] | -0.3 [+0.9, +7.8] | 98 / 88 / 101 | none |
| ART-Chat-like@0.5/4 | -0.1 [-0.8, +0.2] | +3.1 [-3.4, +2.9] | -0.3 [+0.9, +7.8] | 40 / 88 / 101 | TTFT, hit won back |

All simulated; 9 runs, 40 s of processor time.
"""
_EIGHT = f"""{_TARGETS}| ART-Chat-like@1/8 | -0.5 [-0.5, -0.5] | +4 [+4, +4] | +1.0 [+1.0, +1.0] | - / 7 / 8 | hit |

All simulated; 5 runs, 20 s of processor time.
"""


def test_rows_of_both_commands_are_shown_and_met_targets_of_four_are_counted() -> None:
    shown = several_routers([_FOUR.splitlines(), _EIGHT.splitlines()])
    page = _on_the_page(_FOUR) + _on_the_page(_EIGHT)
    assert problems(f"{page}\nOf 2 rows 1 is within 3 % and 1 has 50 % won back; 14 runs.", shown) == []
    assert (shown.values["TTFT met"], shown.values["hit won back met"], shown.values["E2E met"]) == (1.0, 1.0, 2.0)
    assert problems(page.replace("98 / 88", "98 / 89"), shown) != []


def _on_the_page(printed: str) -> str:
    text = printed.partition("All")[0].replace("store against one", "several routers with a store against one")
    text = text.replace(_ROUTERS, "traffic, load and routers").replace(
        "| alone | store | one |", "| no store | with a store | one router |"
    )
    text = text.replace("hit, points", "cached tokens found, points")
    return re.sub(r"ART-Chat-like@([\d.]+)/(\d)", r"ART-Chat-like, load \1, \2 routers", text)
