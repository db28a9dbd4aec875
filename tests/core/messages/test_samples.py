from __future__ import annotations

from dataclasses import replace

from gorgo.core.messages.request import Sample, SampleRing


def sample(seq: int) -> Sample:
    return Sample(
        seq, f"r{seq}", 1.0, "a", "region", "gorgo", 1, 10, None, 0, None, None, None, None, 0.5, None, 200, 0, False
    )


def filled(count: int, *, kept: int) -> SampleRing:
    ring = SampleRing("boot", kept)
    for seq in range(1, count + 1):
        ring.append(sample(seq))
    return ring


def seqs(page: dict[str, object]) -> list[int]:
    rows = page["samples"]
    assert isinstance(rows, list)
    return [row["seq"] for row in rows]


def test_an_empty_ring_says_which_number_comes_next() -> None:
    page = SampleRing("boot", 3).after(0)
    assert page == {"boot_id": "boot", "first_seq": 1, "last_seq": 0, "samples": []}


def test_a_reader_pages_on_from_its_last_number() -> None:
    ring = filled(5, kept=10)
    assert seqs(ring.after(0, limit=2)) == [1, 2]
    assert seqs(ring.after(2, limit=2)) == [3, 4]
    assert seqs(ring.after(4)) == [5]
    assert seqs(ring.after(5)) == []


def test_a_reader_that_lags_sees_the_gap() -> None:
    page = filled(5, kept=3).after(1)
    assert (page["first_seq"], page["last_seq"]) == (3, 5)
    assert seqs(page) == [3, 4, 5]


def test_the_newest_sample_of_a_request_is_found_while_it_is_held() -> None:
    ring = SampleRing("boot", 3)
    for seq, name in enumerate(("a", "b", "a", "c", "d"), start=1):
        ring.append(replace(sample(seq), request_id=name))
    assert [found and found.seq for found in map(ring.for_request, "abcdx")] == [3, None, 4, 5, None]
    assert [each.seq for each in ring.newest(2)] == [5, 4]
    assert (len(ring), ring.first_seq, ring.last_seq, ring.next_seq) == (3, 3, 5, 6)
    assert [each.seq for each in ring] == [3, 4, 5]


def test_a_page_has_a_thousand_samples_at_most_and_none_where_none_are_asked_for() -> None:
    ring = filled(1001, kept=2000)
    assert (len(seqs(ring.after(0))), seqs(ring.after(0, limit=0)), seqs(ring.after(0, limit=-1))) == (1000, [], [])


def test_a_number_from_another_run_is_answered_with_nothing() -> None:
    assert seqs(filled(2, kept=3).after(900)) == []
    assert seqs(filled(2, kept=3).after(-5)) == [1, 2]
