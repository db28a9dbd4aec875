"""Pages of samples: none lost, none twice, whatever their size and whatever happens in between."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from tests.tuner.sidecar.fake_proxy import FakeProxy
from tuner.objective import SampleCursor
from tuner.proxy_client import SampleBatch
from tuner.sidecar.reader import MAX_PAGES, SampleBatchResult, read_new


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
