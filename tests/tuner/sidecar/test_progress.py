"""What a sidecar reads and shows: pages of samples, metrics, and its progress."""

from __future__ import annotations

import asyncio
import io
import json
from collections.abc import Sequence
from dataclasses import replace
from math import isnan
from pathlib import Path
from urllib.request import urlopen

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from tests.observability.test_dashboard import labels_after
from tests.tuner.history.examples import generation
from tests.tuner.sidecar.fake_proxy import Beside, FakeProxy
from tuner.campaign.generation import Generation
from tuner.objective import SampleCursor
from tuner.proxy_client import MAX_PAGES, SampleBatch, SampleBatchResult, read_new
from tuner.sidecar.metrics import LABELS, METRICS, TunerMetrics, listening
from tuner.sidecar.progress import LINE_EVERY_S, LinePrinter, Progress, Reporter, line, verdict

PROGRESS = Progress(
    phase="comparing",
    generation=3,
    arm="offspring",
    weights={"w_rtt": 0.61234, "w_queue": 0.14},
    incumbent={"w_rtt": 0.5, "w_queue": 0.1},
    ttft_ms_p95=412.3,
    samples=40,
    needed=128,
)


def test_a_line_says_what_is_in_force_and_how_far_it_is() -> None:
    wanted = "comparing, generation 3 (offspring): w_rtt=0.6123 w_queue=0.14, p95 TTFT 412 ms, 40 of 128 samples"
    assert line(PROGRESS) == wanted


@pytest.mark.parametrize(
    ("progress", "wanted"),
    [
        (
            replace(PROGRESS, samples=128),
            "comparing, generation 3 (offspring): w_rtt=0.6123 w_queue=0.14, p95 TTFT 412 ms, 128 of 128 samples",
        ),
        (
            replace(PROGRESS, phase="warming", samples=45, needed=16),
            "warming: w_rtt=0.6123 w_queue=0.14, p95 TTFT 412 ms, 45 samples (16 needed)",
        ),
        (replace(PROGRESS, phase="warming"), "warming: w_rtt=0.6123 w_queue=0.14, p95 TTFT 412 ms, 40 of 128 samples"),
        (
            replace(PROGRESS, phase="new", weights=None, ttft_ms_p95=None),
            "new: w_rtt=0.5 w_queue=0.1, 40 of 128 samples",
        ),
        (
            replace(PROGRESS, phase="frozen", trouble="frozen: by hand", samples=0),
            "frozen (frozen: by hand): w_rtt=0.6123 w_queue=0.14, p95 TTFT 412 ms, 0 of 128 samples",
        ),
        (
            replace(PROGRESS, needed=0, detail="3 of 20 pairs", ttft_ms_p95=None),
            "comparing, generation 3 (offspring): w_rtt=0.6123 w_queue=0.14, 40 samples, 3 of 20 pairs",
        ),
    ],
)
def test_a_line_leaves_out_what_there_is_not(progress: Progress, wanted: str) -> None:
    assert line(progress) == wanted


@pytest.mark.parametrize(
    ("row", "wanted"),
    [
        (generation(0), "generation 0 accepted: w_rtt=0.5 w_queue=0.1, p95 TTFT 1584 ms: the start"),
        (
            generation(0, incumbent_objective_ms=1700.0),
            "generation 0 accepted: w_rtt=0.5 w_queue=0.1, p95 TTFT 1584 ms: the start",
        ),
        (
            generation(1, incumbent_objective_ms=1700.0, accepted=False, reason="r"),
            "generation 1 rejected: w_rtt=0.5 w_queue=0.1, p95 TTFT 1584 ms against 1700 ms: r",
        ),
        (generation(1, reason="r"), "generation 1 accepted: w_rtt=0.5 w_queue=0.1, p95 TTFT 1584 ms: r"),
        (
            generation(1, objective_ms=None, incumbent_objective_ms=1700.0, reason="r"),
            "generation 1 accepted: w_rtt=0.5 w_queue=0.1: r",
        ),
    ],
)
def test_a_finished_generation_is_one_line(row: Generation, wanted: str) -> None:
    assert verdict(row) == wanted


def test_a_log_gets_a_line_a_minute_and_not_sooner() -> None:
    said: list[str] = []
    reporter = Reporter(said.append, said.append)
    for now in (100.0, 100.0 + LINE_EVERY_S - 0.1, 100.0 + LINE_EVERY_S, 100.0 + 2 * LINE_EVERY_S - 0.1):
        reporter.show(PROGRESS, now=now)
    assert len(said) == 2
    assert LINE_EVERY_S == 60.0
    reporter.close()


def test_a_log_gets_a_line_now_and_then() -> None:
    said: list[str] = []
    reporter = Reporter(said.append, said.append)
    for now in range(0, int(2.5 * LINE_EVERY_S), 10):
        reporter.show(PROGRESS, now=float(now))
    assert len(said) == 3


def test_a_terminal_has_one_line_that_changes() -> None:
    text = io.StringIO()
    said: list[str] = []
    reporter = Reporter(said.append, said.append, Console(file=text, force_terminal=True, width=120))
    reporter.show(PROGRESS, now=0.0)
    reporter.close()
    assert "generation 3 (offspring)" in text.getvalue()
    assert said == []


def test_words_are_printed_as_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    printer = LinePrinter()
    printer.say("generation 1 accepted: [w]=0.5")
    printer.complain("no answer")
    assert capsys.readouterr() == ("generation 1 accepted: [w]=0.5\n", "gorgo: no answer\n")


def test_json_lines_have_time_level_and_text(capsys: pytest.CaptureFixture[str]) -> None:
    printer = LinePrinter("json")
    printer.say("x" * 300)
    printer.complain("no answer")
    printed = capsys.readouterr()
    news, trouble = json.loads(printed.out), json.loads(printed.err)
    assert (news["level"], news["event"], news["text"]) == ("info", "tuner", "x" * 300)
    assert (trouble["level"], trouble["text"]) == ("warning", "no answer")
    assert news["time"] <= trouble["time"]
    assert printer.terminal is None


@pytest.mark.parametrize(("level", "out", "err"), [("info", 1, 1), ("warning", 0, 1), ("error", 0, 0)])
def test_lines_below_the_level_are_not_printed(
    level: str, out: int, err: int, capsys: pytest.CaptureFixture[str]
) -> None:
    printer = LinePrinter("text", level)
    printer.say("news")
    printer.complain("trouble")
    printed = capsys.readouterr()
    assert (printed.out.count("\n"), printed.err.count("\n")) == (out, err)


PROGRESS_METRICS = Progress(
    phase="comparing",
    generation=3,
    arm="offspring",
    weights={"w_rtt": 0.6},
    incumbent={"w_rtt": 0.5},
    ttft_ms_p95=400.0,
    samples=40,
    needed=128,
)


def value(metrics: TunerMetrics, name: str, **labels: str) -> float | None:
    return metrics.registry.get_sample_value(f"gorgo_tuner_{name}", labels)


def test_counters_are_there_before_anything_has_happened() -> None:
    metrics = TunerMetrics()
    assert value(metrics, "generations_total", outcome="accepted") == 0
    assert value(metrics, "generations_total", outcome="rejected") == 0
    assert value(metrics, "polls_total", result="ok") == 0
    assert value(metrics, "rollbacks_total") == 0


def test_a_generation_is_counted_by_its_outcome_and_its_figures_are_seconds() -> None:
    metrics = TunerMetrics()
    metrics.generation(generation(1, objective_ms=300.0, incumbent_objective_ms=400.0, sigma=0.4, accepted=False))
    assert value(metrics, "generations_total", outcome="accepted") == 0
    assert value(metrics, "generations_total", outcome="rejected") == 1
    assert value(metrics, "objective_seconds", arm="offspring") == 0.3
    assert value(metrics, "objective_seconds", arm="incumbent") == 0.4
    assert value(metrics, "sigma") == 0.4
    metrics.generation(generation(2, objective_ms=None, incumbent_objective_ms=None, sigma=None))
    assert value(metrics, "generations_total", outcome="accepted") == 1
    assert value(metrics, "objective_seconds", arm="offspring") == 0.3, "what is not known changes nothing"
    assert value(metrics, "sigma") == 0.4


def test_where_the_campaign_is() -> None:
    metrics = TunerMetrics()
    metrics.progress(PROGRESS_METRICS, waiting=7)
    assert value(metrics, "weight", weight="w_rtt", set="in_force") == 0.6
    assert value(metrics, "weight", weight="w_rtt", set="incumbent") == 0.5
    assert value(metrics, "generation") == 3
    assert value(metrics, "window_ttft_seconds") == 0.4
    assert (value(metrics, "comparing"), value(metrics, "paused")) == (1, 0)
    assert value(metrics, "history_waiting_rows") == 7
    metrics.progress(replace(PROGRESS_METRICS, phase="frozen", weights=None, ttft_ms_p95=None), waiting=0)
    assert (value(metrics, "comparing"), value(metrics, "paused")) == (0, 1)
    assert isnan(value(metrics, "window_ttft_seconds") or 0.0)
    assert value(metrics, "history_waiting_rows") == 0


def test_counts_go_up_by_what_they_are_told() -> None:
    metrics = TunerMetrics()
    metrics.count("gorgo_tuner_samples_total", by=5)
    metrics.count("gorgo_tuner_samples_total")
    metrics.count("gorgo_tuner_polls_total", "failed")
    assert value(metrics, "samples_total") == 6
    assert value(metrics, "polls_total", result="failed") == 1
    assert value(metrics, "polls_total", result="ok") == 0


async def test_figures_follow_the_campaign(tmp_path: Path) -> None:
    beside = Beside(FakeProxy(), tmp_path)
    await beside.start()
    await beside.until_generation(4)
    beside.proxy.down = True
    await beside.step()
    outcomes = [value(beside.metrics, "generations_total", outcome=how) or 0 for how in ("accepted", "rejected")]
    assert sum(outcomes) == 4
    assert value(beside.metrics, "polls_total", result="failed") == 1
    assert value(beside.metrics, "samples_total") == beside.sidecar.campaign.cursor.last_seq
    assert value(beside.metrics, "weight", weight="w_rtt", set="in_force") == beside.proxy.weights["w_rtt"]
    assert value(beside.metrics, "sigma") == beside.history.generations()[-1].sigma


def test_they_are_served_until_the_end_and_a_taken_port_is_an_error() -> None:
    with listening(TunerMetrics(), ("127.0.0.1", 0)) as port:
        with urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
            text = answer.read().decode()
        assert all(spec.name in text for spec in METRICS)
        assert port is not None
        with pytest.raises(OSError, match="in use"), listening(TunerMetrics(), ("127.0.0.1", port)):
            pass
    with pytest.raises(OSError, match="refused"):
        urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10)


def test_without_an_address_nothing_listens() -> None:
    with listening(TunerMetrics(), None) as port:
        assert port is None


def test_labels_are_the_documented_ones() -> None:
    documented = list(labels_after("Labels of the tuner:"))
    assert documented == [(spec.label, spec.of, spec.meaning, spec.values, spec.at_most) for spec in LABELS]


# --- Pages of samples: none lost, none twice, whatever their size and whatever happens in between.


class Pages:
    """`FakeProxy`'s answers without HTTP. Between two pages it may go on serving, or be another run."""

    def __init__(self, proxy: FakeProxy, between: Sequence[str] = ()) -> None:
        self.proxy, self.between = proxy, list(between)

    async def samples(self, after: int) -> SampleBatch:
        answer = self.proxy._samples(after)
        if self.between:
            do(self.proxy, self.between.pop(0))
        return SampleBatch(answer["boot_id"], answer["first_seq"], answer["last_seq"], tuple(answer["samples"]))


def do(proxy: FakeProxy, what: str) -> None:
    if what == "restart":
        proxy.restart()
    else:
        proxy.serve(int(what))


def read(proxy: FakeProxy, boot_id: str | None, after: int, between: Sequence[str] = ()) -> list[SampleBatchResult]:
    return asyncio.run(read_new(Pages(proxy, between), boot_id, after))


def seqs(delivery: SampleBatchResult) -> list[int]:
    return [sample.seq for sample in delivery.samples]


def test_a_reader_that_is_behind_reads_every_page() -> None:
    proxy = FakeProxy(page=3)
    proxy.serve(10)
    (delivery,) = read(proxy, "boot-001", 2)
    assert seqs(delivery) == [3, 4, 5, 6, 7, 8, 9, 10]
    assert delivery.lost == 0


def test_the_first_contact_takes_what_there_is_and_misses_nothing() -> None:
    proxy = FakeProxy(stored=4)
    proxy.serve(10)
    (delivery,) = read(proxy, None, 0)
    assert seqs(delivery) == [7, 8, 9, 10]
    assert delivery.lost == 0


def test_samples_that_the_ring_has_dropped_are_counted() -> None:
    proxy = FakeProxy(stored=4)
    proxy.serve(10)
    (delivery,) = read(proxy, "boot-001", 1)
    assert delivery.lost == 5


def test_another_run_is_read_from_its_beginning() -> None:
    proxy = FakeProxy()
    proxy.serve(10)
    proxy.restart()
    proxy.serve(3)
    old, new = read(proxy, "boot-001", 10)
    assert (old.boot_id, seqs(old)) == ("boot-001", [])
    assert (new.boot_id, seqs(new)) == ("boot-002", [1, 2, 3])


def test_what_was_read_before_a_restart_between_two_pages_still_counts() -> None:
    proxy = FakeProxy(page=4)
    proxy.serve(10)
    deliveries = read(proxy, "boot-001", 0, between=["restart", "2"])
    assert [(one.boot_id, seqs(one)) for one in deliveries] == [("boot-001", [1, 2, 3, 4]), ("boot-002", [1, 2])]


def test_a_row_that_is_no_sample_is_named_and_missing() -> None:
    proxy = FakeProxy()
    proxy.serve(3)
    del proxy.ring[1]["ttft_ms"]
    (delivery,) = read(proxy, "boot-001", 0)
    assert seqs(delivery) == [1, 3]
    assert "sample 2" in delivery.unreadable[0]
    assert SampleCursor("boot-001", 0).read("boot-001", delivery.samples).gap


def test_a_row_that_is_no_sample_is_missing_beside_those_that_were_lost() -> None:
    proxy = FakeProxy(stored=4)
    proxy.serve(10)
    proxy.ring[1]["status"] = "fine"
    (delivery,) = read(proxy, "boot-001", 5)
    assert (seqs(delivery), delivery.lost, len(delivery.unreadable)) == ([7, 9, 10], 1, 1)


def test_a_page_that_comes_again_changes_nothing() -> None:
    proxy = FakeProxy()
    proxy.serve(4)

    class Deaf(Pages):
        async def samples(self, after: int) -> SampleBatch:
            return await super().samples(0)

    (delivery,) = asyncio.run(read_new(Deaf(proxy), "boot-001", 2))
    assert (seqs(delivery), delivery.lost) == ([3, 4], 0)


def test_one_look_reads_no_more_pages_than_its_bound() -> None:
    proxy = FakeProxy(page=1)
    proxy.serve(MAX_PAGES + 5)
    (delivery,) = read(proxy, "boot-001", 0)
    assert seqs(delivery) == list(range(1, MAX_PAGES + 1))
    (stored,) = read(proxy, "boot-001", MAX_PAGES)
    assert len(stored.samples) == 5


def test_a_look_asks_once_where_there_is_nothing_new() -> None:
    proxy, asked = FakeProxy(page=5), []
    proxy.serve(10)

    class Counted(Pages):
        async def samples(self, after: int) -> SampleBatch:
            asked.append(after)
            return await super().samples(after)

    asyncio.run(read_new(Counted(proxy), "boot-001", 10))
    asyncio.run(read_new(Counted(proxy), "boot-001", 0))
    assert asked == [10, 0, 5]


EVENTS = st.lists(st.sampled_from(["restart", "1", "2", "5", "9", "look"]), max_size=40)
#: Per look: what happens between its pages.
BETWEEN = st.lists(st.sampled_from(["restart", "1", "4"]), max_size=3)


@given(events=EVENTS, data=st.data())
def test_no_sample_is_lost_or_taken_twice(events: list[str], data: st.DataObject) -> None:
    proxy, inbox = FakeProxy(stored=12), SampleCursor()
    taken: list[tuple[str, int]] = []

    def look(between: Sequence[str]) -> None:
        proxy.page = data.draw(st.integers(1, 7))
        for delivery in read(proxy, inbox.boot_id, inbox.last_seq, between):
            new = inbox.read(delivery.boot_id, delivery.samples)
            assert new.gap == (delivery.lost > 0), "what is missing is seen by both, or by none"
            taken.extend((delivery.boot_id, sample.seq) for sample in new.samples)

    for event in events:
        if event == "look":
            look(data.draw(BETWEEN))
        else:
            do(proxy, event)
    look([])
    assert taken == sorted(set(taken)), "each once, and in order"
    assert [row["seq"] for row in proxy.ring if (proxy.boot_id, row["seq"]) not in taken] == []


def test_a_turn_reads_a_hundred_pages() -> None:
    assert MAX_PAGES == 100
