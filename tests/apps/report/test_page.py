"""The page as its readers get it: valid, closed in itself, the same bytes, the best in bold."""

from __future__ import annotations

import json
import re
from html import escape
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

from gorgo.apps.report import latency, sections, write_report
from gorgo.apps.report.find import find_results
from gorgo.apps.report.page import page
from gorgo.apps.results import write_results
from tests.apps.report.made import generation, records, row, write_run, write_sweep

VOID = {"meta", "link", "br", "hr", "img", "input", "source"}
LOADS = {"gorgo-ms": {2.0: 200, 1.0: 300}, "gorgo": {2.0: 190, 1.0: 400}, "prefix-cache": {2.0: 220, 1.0: 350}}


class Page(HTMLParser):
    """Tags that match, ids, what is referred to, and the cells of the tables."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.references: list[str] = []
        self.labelled: list[str] = []
        self.tables: list[list[list[tuple[str, bool]]]] = []
        self.header_scopes: list[str | None] = []
        self.bold = False
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        self.note(tag, values)
        if tag not in VOID:
            self.open.append(tag)
        if tag == "table":
            self.tables.append([])
        elif tag == "tr":
            self.tables[-1].append([])
        elif tag in ("td", "th"):
            self.tables[-1][-1].append(("", False))
        if tag == "th":
            self.header_scopes.append(values.get("scope"))

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.note(tag, dict(attrs))

    def note(self, tag: str, values: dict[str, str | None]) -> None:
        assert tag not in ("script", "iframe", "object", "link", "img"), tag
        self.ids += [value for name, value in values.items() if name == "id" and value]
        self.references += [
            value for name, value in values.items() if name in ("src", "href", "xlink:href") and value is not None
        ]
        self.references += re.findall(r"url\(([^)]*)\)", " ".join(value or "" for value in values.values()))
        if tag == "svg":
            assert values["role"] == "img"
            self.labelled.append(values["aria-labelledby"] or "")

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and ({"td", "th"} & set(self.open[-2:])):
            text, bold = self.tables[-1][-1][-1]
            self.tables[-1][-1][-1] = (text + data, bold or self.open[-1] == "b")


def made(folder: Path) -> str:
    return page(find_results(folder))


@pytest.fixture
def without_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    """For tests of words and tables: drawing takes a second."""

    def svg(draw: object, *, key: str, title: str) -> str:
        return f'<svg role="img" aria-labelledby="{key}-title"><title id="{key}-title">{escape(title)}</title></svg>'

    monkeypatch.setattr(sections, "svg", svg)


def test_page_is_valid_and_refers_to_nothing_outside_itself(tmp_path: Path) -> None:
    write_sweep(tmp_path, LOADS)
    (tmp_path / "history.json").write_text(json.dumps([generation(n, sigma=0.5 + n) for n in range(5)]))
    text = made(tmp_path)
    found = Page(text)
    assert len(found.labelled) == 6  # load, two distributions, share, hits, tuning
    assert len(found.ids) == len(set(found.ids))
    assert {reference.removeprefix("#") for reference in found.references} <= set(found.ids)
    assert set(found.labelled) <= set(found.ids)
    assert all(scope in ("col", "row") for scope in found.header_scopes)
    assert "@import" not in text
    assert re.findall(r'https?://[^"\s<]*', text.replace("http://www.w3.org/", "")) == []


def test_the_same_results_give_the_same_bytes(tmp_path: Path) -> None:
    write_run(tmp_path, records([10.0, 20.0, 30.0] * 9, predicted_ttft_ms=12.0), "gorgo-ms")
    assert made(tmp_path) == made(tmp_path)


def test_bold_is_the_best_policy_and_never_a_yardstick(tmp_path: Path, without_pictures: None) -> None:
    write_sweep(tmp_path, {**LOADS, "oracle": {2.0: 100, 1.0: 100}})
    tables = Page(made(tmp_path)).tables
    for table, best in zip(tables, ("gorgo", "gorgo-ms"), strict=True):
        header = [text for text, _ in table[0]]
        for measure in ("p50 TTFT, ms", "p95 TTFT, ms", "p95 E2E, s"):
            column = header.index(measure)
            assert [line[0][0] for line in table[1:] if line[column][1]] == [best], measure
        assert not any(bold for _, bold in next(line for line in table if line[0][0] == "oracle"))


def test_columns_in_which_all_are_alike_have_no_bold(tmp_path: Path, without_pictures: None) -> None:
    write_sweep(tmp_path, LOADS)
    (table, _) = Page(made(tmp_path)).tables
    column = [text for text, _ in table[0]].index("errors")
    assert [line[column] for line in table[1:]] == [("0", False)] * 3


def test_intervals_come_with_several_seeds_only(tmp_path: Path, without_pictures: None) -> None:
    write_sweep(tmp_path / "one", LOADS)
    write_sweep(tmp_path / "many", LOADS, seeds=3)
    one, many = made(tmp_path / "one"), made(tmp_path / "many")
    assert "One run each: no intervals" in one
    assert "95 % intervals" not in one
    assert "(95 % intervals over 3 seeds)" in many
    assert "One run each" not in many


def test_simulated_figures_are_called_so_in_the_title_and_in_every_caption(
    tmp_path: Path, without_pictures: None
) -> None:
    write_sweep(tmp_path, LOADS)
    text = made(tmp_path)
    assert re.search(r"<title>[^<]*simulated[^<]*</title>", text)
    captions = re.findall(r"<figcaption>(.*?)</figcaption>\s*<svg", text, re.DOTALL)
    assert len(captions) == 5
    assert all("simulated" in caption for caption in captions)
    assert all("simulated" in caption for caption in re.findall(r"<caption>(.*?)</caption>", text))


def test_live_figures_are_not_called_simulated(tmp_path: Path, without_pictures: None) -> None:
    write_sweep(tmp_path, LOADS, source="live")
    assert "All figures simulated" not in made(tmp_path)
    assert "small.jsonl, live" in made(tmp_path)


def test_names_from_files_are_escaped_everywhere(tmp_path: Path) -> None:
    nasty = '<script>alert("x")</script> $\\frac{ id="y" _'
    other = "_hidden & $1"
    for place, policy in enumerate((nasty, other)):
        write_run(tmp_path / str(place), records([10.0, 20.0, 30.0]), policy, trace="<b>&amp;")
    text = made(tmp_path)
    Page(text)
    assert "<script" not in text
    assert "&lt;script&gt;" in text
    assert "_hidden &amp; $1" in text


def test_what_cannot_be_plotted_is_left_out_with_the_reason(tmp_path: Path) -> None:
    write_results(tmp_path, [row(records([10.0, 20.0]), share={}, cache_hit=None)])
    text = made(tmp_path)
    assert Page(text).labelled == []
    for reason in ("only one load", "requests.jsonl, which was not kept", "no answer named", "did not report cached"):
        assert reason in text


def test_round_trips_are_drawn_where_the_requests_tell_them(tmp_path: Path, without_pictures: None) -> None:
    write_run(tmp_path, records([10.0] * 30))
    assert "do not tell round trips" in made(tmp_path)
    lines = [json.loads(line) for line in (tmp_path / "requests.jsonl").read_text().splitlines()]
    told = [{**line, "rtt_ms": 95.0 if number < 15 else 320.0} for number, line in enumerate(lines)]
    (tmp_path / "requests.jsonl").write_text("".join(json.dumps(line) + "\n" for line in told))
    assert "us-0 between 95 and 320 ms" in made(tmp_path)


def test_predictions_are_told_with_their_error_and_bias(tmp_path: Path, without_pictures: None) -> None:
    write_run(tmp_path, records([100.0] * 30, predicted_ttft_ms=90.0), "gorgo-ms")
    assert "gorgo-ms: half of 30 predictions are within 10 ms, 95 % within 10 ms; 100% of the requests" in made(
        tmp_path
    )


def test_kinds_of_errors_have_a_table(tmp_path: Path, without_pictures: None) -> None:
    failed = records([1.0], error="timeout: after 120 s", ttft_ms=None, e2e_s=None)
    write_run(tmp_path, [*records([10.0] * 9), *failed])
    text = made(tmp_path)
    assert "1 of 10 requests failed" in text
    assert [("gorgo", False), ("1", False), ("timeout", False), ("1", False)] in Page(text).tables[-1]


def test_acceptance_log_is_bounded_and_says_so(tmp_path: Path, without_pictures: None) -> None:
    (tmp_path / "history.json").write_text(json.dumps([generation(n, accepted=n % 2 == 0) for n in range(250)]))
    text = made(tmp_path)
    assert len(Page(text).tables[-1]) == 201
    assert "50 earlier generations left out." in text
    assert "125 of 250 generations accepted" in text


def test_more_replicas_loads_and_policies_than_can_be_drawn_are_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (latency, sections):
        monkeypatch.setattr(module, "MAX_PANELS", 2)
        monkeypatch.setattr(module, "MAX_CURVES", 3)
    share = {f"replica-{n:03}": float(value) for n, value in enumerate(np.random.default_rng(0).dirichlet([1.0] * 300))}
    rows = [
        row(records([10.0 + n, 20.0]), f"p{n}", time_scale=time_scale, share=share)
        for time_scale in (1.0, 2.0, 3.0)
        for n in range(4)
    ]
    write_results(tmp_path, rows)
    text = made(tmp_path)
    assert "Drawn are 2 loads of 3. Drawn are 3 policies of 4." in text
    assert ">others</text>" in text
    assert len(set(re.findall(r">(replica-\d+)</text>", text))) == 7  # and the others
    assert len(text) < 200_000


def test_page_goes_beside_the_results_or_where_it_is_told(tmp_path: Path, without_pictures: None) -> None:
    write_run(tmp_path / "in", records([10.0, 20.0]))
    assert write_report(tmp_path / "in") == tmp_path / "in" / "report.html"
    assert write_report(tmp_path / "in", out=tmp_path / "page.html") == tmp_path / "page.html"
    assert (tmp_path / "page.html").read_bytes() == (tmp_path / "in" / "report.html").read_bytes()


def test_a_run_of_one_request_is_no_error(tmp_path: Path) -> None:
    write_run(tmp_path, records([10.0], predicted_ttft_ms=10.0))
    Page(made(tmp_path))


def test_a_run_without_any_success_is_no_error(tmp_path: Path) -> None:
    write_run(tmp_path, records([1.0, 1.0], error="refused", ttft_ms=None, e2e_s=None, replica=None), cache_hit=None)
    text = made(tmp_path)
    Page(text)
    assert "No p95 TTFT is known." in text
