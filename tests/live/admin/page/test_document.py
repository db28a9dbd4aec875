"""The page as markup: what it says, that it is escaped whoever chose the words, and that it needs no script."""

from __future__ import annotations

import asyncio
import doctest
import re
from html.parser import HTMLParser
from importlib import import_module
from importlib.resources import files
from math import floor
from pkgutil import iter_modules
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import gorgo.live.admin.page
from gorgo.core.policy.interface import RouteStats
from gorgo.live.admin.page.charts import Html, joined, probe_line, tag, term_bar, ttft_chart
from gorgo.live.admin.page.document import (
    CLIENTS_SHOWN,
    VERSIONS_SHOWN,
    Writer,
    clients_section,
    login_page,
    off_page,
    routes_section,
    stats_section,
    status_page,
)
from gorgo.live.admin.page.sections import CANDIDATES_SHOWN, WIDTH, DecisionsSection
from gorgo.live.admin.page.snapshot import Alert, DecisionStatus, Snapshot
from gorgo.live.control.state_file import Frozen
from gorgo.live.telemetry.counters import ClientRow
from gorgo.live.telemetry.health import BINS, RECENT_S, RecentStats, quantile, recent_stats, ttft_series
from tests.live.admin.page.made import NOW, change, decision, peer, row, sample, source, status, store, view

# --- The page as markup: what it says, that it is escaped whoever chose the words, and that it needs no script.


NASTY = "<script>alert(1)</script>\"'><img src=x onerror=alert(2)>&amp;"
_VOID = {"meta", "link", "input"}


def parts_of(shown: Snapshot) -> dict[str, Html]:
    return {name: joined(part(shown)) for name, part in Writer().parts.items()}


def page_of(shown: Snapshot, *, every_s: int | None = None) -> str:
    return status_page(shown, parts_of(shown), every_s=every_s)


class Reader(HTMLParser):
    """Every element with its attributes, and all text; an element that is not closed in its turn is an error."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self._open: list[str] = []
        self.feed(text)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in _VOID:
            self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data + " "

    def names(self) -> set[str]:
        return {name for name, _ in self.elements}


def nasty_status() -> Snapshot:
    """Every name and word that comes from elsewhere is an attack."""
    made = decision(
        NASTY,
        candidates=(NASTY, "b"),
        policy=NASTY,
        unit=NASTY,
        fallback=NASTY,
        terms={NASTY: np.array([1.0, 2.0])},
        excluded={NASTY: NASTY},
    )
    told = sample(replica=NASTY, request_id=NASTY)
    return status(
        region=NASTY,
        alerts=[Alert("bad", NASTY)],
        regions={NASTY: [row(view(NASTY, models=(NASTY,), region=NASTY))]},
        policy=NASTY,
        weights={NASTY: 1.0},
        bounds={},
        frozen=Frozen("2026-05-01T00:00:00", NASTY, NASTY),
        history=[change(1), change(2, policy=NASTY, weights={NASTY: 2.0}, reason=NASTY, by=NASTY, source=NASTY)],
        decisions=[DecisionStatus(made, NASTY, told, followed=False)],
    )


def test_no_name_or_word_from_elsewhere_becomes_markup() -> None:
    calm, nasty = Reader(page_of(status())), Reader(page_of(nasty_status()))
    assert [attributes for name, attributes in nasty.elements if name == "script"] == [
        {"src": "/admin/page/page.js", "defer": None}
    ]
    assert "img" not in nasty.names()
    assert nasty.names() <= calm.names()
    allowed = {name for _, attributes in calm.elements for name in attributes}
    assert {name for _, attributes in nasty.elements for name in attributes} <= allowed
    assert nasty.text.count(NASTY) >= 15


def test_page_has_no_inline_script_style_or_handler_for_its_policy_to_forbid() -> None:
    for text in (page_of(nasty_status()), login_page(wrong=True), off_page("T")):
        for name, attributes in Reader(text).elements:
            assert name != "style"
            assert not [key for key in attributes if key.startswith("on") or key == "style"]


def test_page_asks_for_nothing_from_elsewhere() -> None:
    for text in (page_of(status()), login_page()):
        for _, attributes in Reader(text).elements:
            for key in ("src", "href", "action"):
                assert (attributes.get(key) or "/admin/page").startswith("/admin/page")


def test_every_part_has_its_place_in_the_page() -> None:
    elements = Reader(page_of(status())).elements
    assert [attributes["id"] for _, attributes in elements if "data-part" in attributes] == list(Writer().parts)


def test_page_without_scripts_reloads_by_itself_when_asked_to() -> None:
    def refreshes(text: str) -> list[dict[str, str | None]]:
        return [found for name, found in Reader(text).elements if name == "meta" and "http-equiv" in found]

    assert refreshes(page_of(status())) == []
    assert refreshes(page_of(status(), every_s=10)) == [{"http-equiv": "refresh", "content": "10"}]
    assert "reloads every 10 s" in page_of(status(), every_s=10)


def test_fleet_says_state_reason_and_figures_of_each_replica() -> None:
    ill = view("eu-0", region="far", state="ejected", ejected_by="probes", ejected_for_s=4.0, in_state_for_s=75.0)
    sick = row(ill, trips=((0.0, 0.09), (30.0, None)))
    shown = Reader(
        parts_of(status(regions={"near": [row(view())], "far": [sick]}, unreachable_regions=frozenset({"far"})))[
            "fleet"
        ]
    )
    assert "since 75 s" in shown.text
    assert "it does not answer probes; retried in 4 s" in shown.text
    assert "the proxy is here" in shown.text
    assert "unreachable" in shown.text
    assert [found["data-replica"] for _, found in shown.elements if "data-replica" in found] == ["us-0", "eu-0"]


def test_reason_of_a_replica_that_is_not_ready_is_a_line_below_its_own() -> None:
    ill = view("eu-0", state="ejected", ejected_by="attempts", ejected_why="500: CUDA error", ejected_for_s=4.0)
    slow = view("eu-1", slow_start_for_s=4.2, slow_start_in_flight=23)
    fleet = parts_of(status(regions={"near": [row(view()), row(ill), row(slow)]}))["fleet"]
    head, *regions = str(fleet).split("<tbody")
    columns = re.findall(r'<th scope="col" rowspan="2"[^>]*>([^<]*)', head)
    assert [column.strip() for column in columns] == ["replica", "state"]
    lines = re.findall(r"<tr[^>]* data-(replica|reason)=\"([^\"]*)\"[^>]*>(.*?)</tr>", "".join(regions), re.DOTALL)
    assert [(what, name) for what, name, _ in lines] == [
        ("replica", "us-0"),
        ("replica", "eu-0"),
        ("reason", "eu-0"),
        ("replica", "eu-1"),
        ("reason", "eu-1"),
    ]
    cells = [
        re.fullmatch(r"\s*<td colspan=\"(\d+)\"[^>]*>(.*)</td>\s*", inner, re.DOTALL)
        for what, _, inner in lines
        if what == "reason"
    ]
    found = [(int(cell[1]), Reader(cell[2]).text.strip()) for cell in cells if cell]
    assert found == [
        (WIDTH, "requests to it failed (500: CUDA error); retried in 4 s"),
        (WIDTH, "at most 23 requests for another 5 s"),
    ]


def test_rows_of_the_fleet_are_as_wide_as_its_head() -> None:
    elements = Reader(parts_of(status())["fleet"]).elements
    head = next(place for place, (name, _) in enumerate(elements) if name == "tbody")
    spans = sum(
        int(found.get("colspan") or 1) for name, found in elements[:head] if name == "th" and "rowspan" in found
    )
    groups = sum(int(found["colspan"] or 0) for name, found in elements[:head] if found.get("scope") == "colgroup")
    cells = [name for name, _ in elements[head:] if name == "td"]
    assert spans + groups == 1 + len(cells) == WIDTH


def test_decision_has_every_candidate_with_its_terms_cheapest_first() -> None:
    made = decision(
        candidates=("a", "b", "c"),
        row=1,
        cost=np.array([3.0, 1.0, np.nan]),
        terms={"rtt": np.array([1.0, 0.5, np.nan]), "queue": np.array([2.0, 0.5, 1234.5])},
        excluded={"d": "ejected"},
    )
    text = Reader(
        parts_of(status(decisions=[DecisionStatus(made, "near", sample(), followed=False)]))["decisions"]
    ).text
    assert text.index(" b ") < text.index(" a ") < text.index(" c ")
    assert "1,234" in text
    assert "Excluded: d (ejected)." in " ".join(text.split()).replace(" .", ".")
    assert "+20" in text  # predicted 100 ms, observed 120
    assert "50 of 100 prompt tokens estimated cached there; 60 on the replica with most; 40 by the engine" in text


def test_of_many_candidates_the_chosen_one_is_always_shown() -> None:
    many = 3 * CANDIDATES_SHOWN
    made = decision(
        candidates=tuple(f"c{n}" for n in range(many)),
        row=many - 1,
        terms={"rtt": np.arange(float(many))},
        cost=np.arange(float(many)),
    )
    part = parts_of(status(decisions=[DecisionStatus(made, None, None, followed=False)]))["decisions"]
    assert part.count("<tr") == CANDIDATES_SHOWN + 1
    assert f"c{many - 1} " in part
    assert f"{many - CANDIDATES_SHOWN} candidates of higher cost" in part


@pytest.mark.parametrize(
    ("changes", "followed", "said"),
    [
        ({"terms": {}, "cost": None, "predicted_ttft_s": None}, False, "gorgo-ms has no cost"),
        ({"fallback": "unbalanced"}, False, "Fallback of gorgo-ms: unbalanced"),
        ({"attempt": 2}, False, "attempt 2"),
        ({}, True, "retried"),
        ({}, False, "open"),
    ],
)
def test_decision_says_what_became_of_it(changes: dict[str, Any], followed: bool, said: str) -> None:
    made = DecisionStatus(decision(**changes), "near", None, followed=followed)
    assert said in Reader(parts_of(status(decisions=[made]))["decisions"]).text


def test_first_token_s_parts_are_told_where_they_are_known() -> None:
    told = sample(ttft_parts_ms={"router": 1.0, "network": 95.0})
    made = DecisionStatus(decision(), "near", told, followed=False)
    assert "router 1.0, network 95" in parts_of(status(decisions=[made]))["decisions"]


def test_without_a_decision_it_says_so() -> None:
    assert "No request has been routed yet" in parts_of(status(decisions=[]))["decisions"]


def test_weights_say_what_each_version_changed_and_who_set_it() -> None:
    history = [change(1), change(2, weights={"m_rtt": 2.0}, by="mara", reason="slow path")]
    text = parts_of(status(history=history, version=2))["weights"]
    assert "<b>m_rtt 2</b>" in text
    assert "mara (admin)" in text
    assert text.index("<td>2</td>") < text.index("<td>1</td>")
    assert "not frozen" in text


def test_frozen_weights_say_since_when_by_whom_and_how_long_it_holds() -> None:
    frozen = Frozen("2026-05-01T12:00:00.000+00:00", "weekend", "mara")
    assert "since 2026-05-01 12:00:00 by mara: weekend (no state file" in parts_of(status(frozen=frozen))["weights"]
    assert "no state file" not in parts_of(status(frozen=frozen, durable=True))["weights"]


def test_older_versions_are_behind_a_click() -> None:
    history = [change(n) for n in range(1, VERSIONS_SHOWN + 5)]
    assert "4 older versions" in parts_of(status(history=history))["weights"]


def test_alerts_are_in_the_title_of_the_tab() -> None:
    assert 'data-title="(2) GORGO near"' in parts_of(status(alerts=[Alert("bad", "x"), Alert("warn", "y")]))["alerts"]
    assert "The one replica is ready" in parts_of(status())["alerts"]


def test_unknown_figures_are_dashes() -> None:
    blank = view(rtt_ms=None, running_requests=None, used_tokens=None, probe_age_s=None, scrape_age_s=None)
    text = Reader(parts_of(status(regions={"near": [row(blank)]}))["fleet"]).text
    assert text.split().count("-") >= 5


def test_charts_stay_within_their_frame() -> None:
    bins = ttft_series([sample(n, finished_s=NOW - 7 * n, ttft_ms=100.0 * n) for n in range(1, 40)], now=NOW, up_s=1e6)
    chart, top = ttft_chart(bins)
    assert top == 4000.0
    for text in (chart, probe_line(((0.0, 0.1), (1.0, None), (2.0, 0.3), (3.0, 0.1)))):
        (box,) = [found["viewbox"] for name, found in Reader(text).elements if name == "svg"]
        width = float((box or "").split()[2])
        numbers = [
            float(number)
            for name, found in Reader(text).elements
            if name == "path"
            for number in (found["d"] or "")
            .replace("M", " ")
            .replace("L", " ")
            .replace("H", " ")
            .replace("V", " ")
            .split()
        ]
        assert all(-0.5 <= number <= max(width, 100.0) for number in numbers)
    assert len(bins) == BINS
    assert ttft_chart(ttft_series([], now=NOW, up_s=1e6))[1] == 1.0
    assert probe_line(()) == ""
    assert "none answered" in probe_line(((0.0, None), (1.0, None)))
    assert 'd="M0.0 0h100.0v' in term_bar([5.0], 5.0)
    assert "<path" not in term_bar([0.0, -1.0], 0.0)


async def test_what_has_not_changed_is_not_written_again() -> None:
    writer, open_now = Writer(), DecisionStatus(decision(), "near", None, followed=False)
    first = await writer.write(status(decisions=[open_now]))
    second = await writer.write(status(decisions=[open_now], now=NOW + 1.0))
    assert second == first
    over = await writer.write(status(decisions=[DecisionStatus(decision(), "near", sample(), followed=False)]))
    assert over["decisions"] != first["decisions"]
    frozen = await writer.write(status(frozen=Frozen("2026-05-01T12:00:00", None, None)))
    assert frozen["weights"] != first["weights"]


async def test_others_get_their_turn_while_a_large_fleet_is_written() -> None:
    turns = 0

    async def other() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    task = asyncio.create_task(other())
    regions = {f"g{n}": [row(view(f"r{n}"))] for n in range(20)}
    await Writer().write(status(regions=regions))
    task.cancel()
    assert turns >= 20


def test_decisions_that_are_shown_no_more_are_not_kept() -> None:
    part = DecisionsSection()
    for number in range(50):
        list(part(status(decisions=[DecisionStatus(decision(f"r{number}"), "near", None, followed=False)])))
    assert len(part._written) == 1


#: States that a replica of these pages is not in, levels of alerts that they do not have, and marks that say what
#: something is to a reader of the markup alone.
ELSEWHERE = {"draining", "ejected", "failed", "on-trial", "slow-start", "warn"}
UNSTYLED = {"plain", "seen"}


def test_every_class_of_the_page_has_a_style_and_every_style_its_class() -> None:
    older = [change(version) for version in range(1, VERSIONS_SHOWN + 3)]
    terms = {f"term{number}": np.array([1.0, 2.0]) for number in range(6)}
    trips = ((NOW - 30.0, 0.02), (NOW, 0.03))
    shown = status(
        history=older,
        decisions=[DecisionStatus(decision(terms=terms), "us", sample(), followed=True)],
        regions={"us": [row(view("a"), trips=trips)]},
        clients=[ClientRow("team-a", 1, 2, 3)],
        fleet_sources=[source(), source("dns", up=False, error="down")],
        store=store(peer(differences={"key": "another key"})),
    )
    pages = [page_of(status()), page_of(shown), page_of(nasty_status()), login_page(wrong=True), off_page("T")]
    used = {
        word
        for text in pages
        for _, attributes in Reader(text).elements
        for word in (attributes.get("class") or "").split()
    }
    css = (files("gorgo.live.admin.page") / "page.css").read_text(encoding="utf-8")
    styled = set(re.findall(r"\.([a-z][\w-]*)", re.sub(r"/\*.*?\*/", "", css, flags=re.DOTALL)))
    assert used - styled == UNSTYLED
    assert styled - used == ELSEWHERE


def test_answers_that_broke_off_are_counted_below_the_tiles_and_without_one_nothing_is_said() -> None:
    streams = {"continued": {"moved": 7}, "not_continued": {"request": 2}}
    (shown,) = stats_section(status(streams=streams))
    assert "answers that broke off: 7 went on elsewhere (7 moved), 2 ended with an error (2 request)." in str(shown)
    (calm,) = stats_section(status())
    assert "broke off" not in str(calm)


def test_routes_of_the_policy_have_a_section_and_without_routes_there_is_none() -> None:
    routes = RouteStats(1000, 3600.0, {"local": 7, "remote": 2}, {"local": 120.0}, {"local": 0, "remote": 5})
    assert "7 local, 2 remote of at most 1,000, the longest unused 2 min ago" in "".join(
        routes_section(status(routes=routes))
    )
    assert "".join(routes_section(status())) == ""


def test_without_keys_there_is_no_table() -> None:
    assert "".join(clients_section(status())) == ""


def test_each_client_is_a_row_and_429s_stand_out() -> None:
    clients = [ClientRow("<b>", 12, 45_678, 0), ClientRow("team-b", 3, 90, 2)]
    (html,) = clients_section(status(clients=clients))
    assert "<h2>Clients</h2>" in html
    assert "&lt;b&gt;" in html
    assert "<td>45.7k</td><td>0</td>" in html
    assert '<td class="bad">2</td>' in html


def test_only_so_many_clients_are_shown() -> None:
    (html,) = clients_section(status(clients=[ClientRow(f"c{n}", 1, 1, 0) for n in range(CLIENTS_SHOWN + 5)]))
    assert html.count('scope="row"') == CLIENTS_SHOWN


# --- Text becomes markup in one place, and is escaped there.


@pytest.mark.parametrize("name", [module.name for module in iter_modules(gorgo.live.admin.page.__path__)])
def test_examples_give_what_they_say(name: str) -> None:
    assert doctest.testmod(import_module(f"gorgo.live.admin.page.{name}")).failed == 0


@given(st.text())
def test_no_text_begins_an_element_or_ends_an_attribute(text: str) -> None:
    made = tag("p", text, title=text, data_x=text)
    assert made.count("<") == made.count(">") == 2
    assert made.count('"') == 4


def test_markup_is_not_escaped_twice_and_what_is_computed_from_it_is_text_again() -> None:
    inner = tag("b", "a & b")
    assert tag("p", inner) == "<p><b>a &amp; b</b></p>"
    assert joined([inner, inner]) == inner * 2
    assert tag("p", inner.upper()).startswith("<p>&lt;B&gt;")
    assert isinstance(inner, Html)
    assert not isinstance(inner.upper(), Html)


# --- What recent requests say, against plain readings of the same samples.


FLOATS = st.floats(min_value=0.0, max_value=1e6)


@settings(max_examples=50)
@given(st.lists(FLOATS, min_size=1), st.floats(min_value=0.0, max_value=1.0))
def test_quantile_is_numpy_s(values: list[float], q: float) -> None:
    assert quantile(sorted(values), q) == pytest.approx(float(np.quantile(values, q)), rel=1e-9, abs=1e-6)


def test_nothing_is_unknown_and_not_zero() -> None:
    assert RecentStats.of([]) == RecentStats(0, 0, None, None, None, None, None)


def test_failures_predictions_and_shares_are_of_those_that_tell() -> None:
    figures = RecentStats.of(
        [
            sample(1, ttft_ms=100.0, predicted_ttft_ms=90.0),
            sample(2, ttft_ms=300.0, predicted_ttft_ms=None, cached_tokens=None),
            sample(3, ttft_ms=None, status=502, cached_tokens=80, estimated_cached_tokens=30),
            sample(4, ttft_ms=None, status=499, cached_tokens=None),
        ]
    )
    assert (figures.n, figures.failed) == (4, 1)
    assert (figures.ttft_ms_p50, figures.error_ms_p50) == (200.0, 10.0)
    assert figures.cached_share == pytest.approx((40 + 80) / 200)
    assert figures.estimated_share == pytest.approx((50 + 30) / 200)


def test_recent_is_what_finished_within_the_window() -> None:
    samples = [sample(2, finished_s=NOW - 1.0), sample(1, finished_s=NOW - RECENT_S - 1.0)]
    assert recent_stats(samples, now=NOW) == samples[:1]


@pytest.mark.parametrize(("up_s", "span_s"), [(10.0, 60.0), (61.0, 120.0), (1e6, RECENT_S)])
@settings(max_examples=25)
@given(ages=st.lists(st.tuples(st.floats(min_value=0.0, max_value=400.0), FLOATS), max_size=60))
def test_course_puts_each_sample_into_the_place_of_its_time(
    up_s: float, span_s: float, ages: list[tuple[float, float]]
) -> None:
    bins = ttft_series([sample(finished_s=NOW - age, ttft_ms=ttft) for age, ttft in ages], now=NOW, up_s=up_s)
    length_s = span_s / BINS
    assert [one.start_s for one in bins] == pytest.approx(
        [(floor(NOW / length_s) - k) * length_s for k in range(BINS)][::-1]
    )
    for one in bins:
        place = round(one.start_s / length_s)
        mine = [ttft for age, ttft in ages if floor((NOW - age) / length_s) == place]
        assert one.n == len(mine)
        assert one.ttft_ms_p50 == (pytest.approx(float(np.median(mine)), rel=1e-6, abs=1e-6) if mine else None)


def test_course_stands_still_while_time_passes_within_a_place() -> None:
    samples = [sample(finished_s=NOW - 20.0)]
    assert ttft_series(samples, now=NOW, up_s=1e6) == ttft_series(samples, now=NOW + 4.9, up_s=1e6)
    assert ttft_series(samples, now=NOW, up_s=1e6) != ttft_series(samples, now=NOW + 5.0, up_s=1e6)


@pytest.mark.parametrize(("age_s", "recent"), [(0.0, True), (300.0, True), (300.001, False)])
def test_recent_is_five_minutes(age_s: float, recent: bool) -> None:
    found = recent_stats([sample(finished_s=1000.0 - age_s)], now=1000.0)
    assert len(found) == recent


@pytest.mark.parametrize(("status", "failed"), [(200, 0), (499, 0), (500, 1), (503, 1)])
def test_a_request_failed_that_ended_with_an_error_of_the_server(status: int, failed: int) -> None:
    assert RecentStats.of([sample(status=status)]).failed == failed


@pytest.mark.parametrize(
    ("up_s", "length_s"), [(0.0, 1.0), (60.0, 1.0), (60.1, 2.0), (120.0, 2.0), (120.1, 5.0), (300.0, 5.0), (1e9, 5.0)]
)
def test_places_are_a_sixtieth_of_one_two_or_five_minutes(up_s: float, length_s: float) -> None:
    bins = ttft_series([], now=NOW, up_s=up_s)
    assert ({one.length_s for one in bins}, len(bins)) == ({length_s}, 60)


def test_a_place_has_its_quantiles_and_a_request_without_a_first_token_none() -> None:
    times = [100.0, 200.0, 300.0, 400.0, 500.0]
    samples = [sample(finished_s=1000.0, ttft_ms=time) for time in (*times, None)]
    *_, last = ttft_series(samples, now=1000.0, up_s=1e6)
    assert (last.start_s, last.n, last.ttft_ms_p50) == (1000.0, 5, 300.0)
    assert last.ttft_ms_p95 == pytest.approx(480.0)
