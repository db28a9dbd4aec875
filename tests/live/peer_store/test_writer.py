"""What a failed write had is part of the next report, within the bounds of one."""

from __future__ import annotations

from gorgo.core.peers.records import (
    MAX_PREFIXES,
    LearnedSpeed,
    PeerReport,
    PrefixMarks,
    ReplicaLoad,
    SharedAnswer,
    SharedCacheReport,
    StartedPrefill,
)
from gorgo.live.peer_store.writer import Outgoing


def report(seq: int, *, prefixes: int = 1) -> PeerReport:
    return PeerReport(
        "eu-1/run1",
        seq,
        loads=(ReplicaLoad("a", seq),),
        prefixes=tuple(PrefixMarks(f"{seq}-{number}", None, (), b"") for number in range(prefixes)),
        cache_reports=(SharedCacheReport("a", None, 1.0 + seq, 0.0),),
        answers=(SharedAnswer("a", b"12345678", seq, 1),),
        prefills=(StartedPrefill("a", 25.0), StartedPrefill(f"r{seq}", 0.5)),
        speeds=(LearnedSpeed("a", float(seq), 1.0), LearnedSpeed(f"r{seq}", 1.0, 1.0)),
    )


def test_a_written_report_is_forgotten() -> None:
    outgoing = Outgoing()
    assert outgoing.add(report(1)) == report(1)
    assert outgoing
    outgoing.on_written()
    assert not outgoing
    assert outgoing.add(report(2)) == report(2)


def test_the_next_report_has_its_own_load_and_all_prefixes_since_the_last_written_one() -> None:
    outgoing = Outgoing()
    outgoing.add(report(1))
    outgoing.add(report(2))
    merged = outgoing.add(report(3))
    assert merged.loads == (ReplicaLoad("a", 3),)
    assert [marks.replica for marks in merged.prefixes] == ["1-0", "2-0", "3-0"]
    assert [sample.confirmed_tokens for sample in merged.cache_reports] == [2.0, 3.0, 4.0]
    assert {speed.replica: speed.spent_s for speed in merged.speeds} == {"a": 3.0, "r1": 1.0, "r2": 1.0, "r3": 1.0}
    assert [answer.prompt_tokens for answer in merged.answers] == [1, 2, 3]
    assert {each.replica: each.prefill_s for each in merged.prefills} == {"a": 60.0, "r1": 0.5, "r2": 0.5, "r3": 0.5}
    assert outgoing.dropped == 0


def test_the_oldest_prefixes_are_dropped_beyond_the_bound_and_counted() -> None:
    outgoing = Outgoing()
    outgoing.add(report(1, prefixes=MAX_PREFIXES))
    merged = outgoing.add(report(2, prefixes=3))
    assert len(merged.prefixes) == MAX_PREFIXES
    assert [merged.prefixes[0].replica, merged.prefixes[-1].replica] == ["1-3", "2-2"]
    assert outgoing.dropped == 3
