"""Frames that are cheap to send and not to answer: each kind of flood ends its connection, and usual use never does."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from gorgo.picker.transport.http2 import connection, frames
from gorgo.picker.transport.http2.frames import BLOCK_BYTES, MAX_CONTINUATIONS, Code, Http2Error
from gorgo.picker.transport.http2.stream import CallStream
from tests.picker.transport.http2.peer import BLOCK, Peer, block, data, greeted, headers, message

FREE = 300


@pytest.fixture(autouse=True)
def few_free_frames(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "FREE_FRAMES", FREE)


FLOODS: dict[str, Callable[[int], bytes]] = {
    "rapid reset": lambda turn: headers(2 * turn + 3) + frames.reset(2 * turn + 3, Code.CANCEL),
    "settings": lambda _: frames.settings({}),
    "settings that change every window": lambda turn: frames.settings({frames.INITIAL_WINDOW_SIZE: 1000 + turn % 2}),
    "acknowledged settings": lambda _: frames.frame(frames.SETTINGS, frames.ACK, 0),
    "ping": lambda _: frames.frame(frames.PING, 0, 0, bytes(8)),
    "acknowledged ping": lambda _: frames.frame(frames.PING, frames.ACK, 0, bytes(8)),
    "priority": lambda _: frames.frame(frames.PRIORITY, 0, 1, bytes(5)),
    "windows of one byte": lambda _: frames.window_update(1, 1),
    "goaway": lambda _: frames.frame(frames.GOAWAY, 0, 0, bytes(8)),
    "extensions": lambda _: frames.frame(0x99, 0, 0, bytes(8)),
    "empty data": lambda _: data(1, b""),
    "padding alone": lambda _: frames.frame(frames.DATA, frames.PADDED, 1, b"\1\0"),
    "no call": lambda turn: headers(2 * turn + 3, block(method="GET")),
    "heads of a stream that has ended": lambda _: headers(1),
    "refused streams": lambda turn: headers(2 * turn + 3),
}


@pytest.mark.parametrize("name", FLOODS)
def test_a_flood_ends_its_connection(name: str) -> None:
    flood = FLOODS[name]
    peer = Peer(calls_limit=1 if name == "refused streams" else 8)
    peer.greet()
    peer.send(headers(1))
    if "ended" in name:
        peer.send(data(1, message(b"end")))
    with pytest.raises(Http2Error) as failure:  # noqa: PT012 - one of many frames raises it
        for turn in range(2 * FREE):
            peer.send(flood(turn))
    assert failure.value.code is Code.ENHANCE_YOUR_CALM
    peer.connection.close()
    assert len(peer.services) == 0


def waiting_answers(calls: int) -> Peer:
    """Calls whose answers all wait for their windows."""
    peer = greeted({frames.INITIAL_WINDOW_SIZE: 0}, calls_limit=calls)
    for turn in range(calls):
        peer.send(headers(2 * turn + 1), data(2 * turn + 1, message(b"x")))
    return peer


@pytest.mark.parametrize(
    ("frame_", "most"),
    [
        (frames.window_update(0, 1), 0),
        (frames.window_update(1, 1), 1),
        (frames.settings({frames.MAX_FRAME_SIZE: 20_000}), 0),
    ],
    ids=["window of the connection", "window of a stream", "settings"],
)
def test_frames_of_windows_write_once_and_only_what_can_be_sent(
    monkeypatch: pytest.MonkeyPatch, frame_: bytes, most: int
) -> None:
    """200 frames over 1,000 open calls made 200,000 attempts to write."""
    peer = waiting_answers(1000)
    writes: list[int] = []
    write = connection.FrameWriter.write

    def counted(self: connection.FrameWriter, stream: CallStream, most_frames: int | None = None) -> None:
        writes.append(stream.stream_id)
        write(self, stream, most_frames)

    monkeypatch.setattr(connection.FrameWriter, "write", counted)
    peer.send(frame_ * 200)
    assert len(writes) <= most


def test_a_window_of_one_byte_for_each_frame_does_not_pay_for_the_next() -> None:
    peer = greeted({frames.INITIAL_WINDOW_SIZE: 0})
    peer.send(headers(1), data(1, message(b"pieces 1")))
    with pytest.raises(Http2Error) as failure:  # noqa: PT012 - one of many frames raises it
        for _ in range(2 * FREE):
            peer.send(frames.window_update(1, 1))
    assert failure.value.code is Code.ENHANCE_YOUR_CALM


def test_a_change_of_all_windows_costs_by_the_streams_that_are_open() -> None:
    """1,000 streams: 63 frames each, of 300."""
    peer = waiting_answers(1000)
    peer.connection.renew_budget()
    with pytest.raises(Http2Error) as failure:  # noqa: PT012 - one of many frames raises it
        for turn in range(8):
            peer.send(frames.settings({frames.INITIAL_WINDOW_SIZE: turn + 1}))
    assert failure.value.code is Code.ENHANCE_YOUR_CALM


def test_waiting_answers_are_sent_in_turns_of_a_bounded_number_of_frames(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "FRAMES_PER_TURN", 30)
    peer = waiting_answers(100)
    sent, turns = peer.send(frames.settings({frames.INITIAL_WINDOW_SIZE: 4000})), 1
    while peer.connection.is_behind:
        sent += peer.send()
        turns += 1
    order = [each.stream_id for each in sent if each.kind == frames.DATA]
    assert (sorted(order), turns) == ([2 * turn + 1 for turn in range(100)], 4)


def test_frames_beyond_the_time_of_a_turn_wait_for_the_next() -> None:
    peer = greeted()
    times = iter(range(1000))
    peer.connection._clock = lambda: float(next(times))
    ping = frames.frame(frames.PING, 0, 0, bytes(8))
    answers = [len(peer.send(ping * 3 + ping[:5]))]
    while peer.connection.is_behind:
        answers.append(len(peer.send()))
    assert answers == [1, 1, 1]
    assert len(peer.send(ping[5:])) == 1


def test_heads_that_are_decoded_anew_cost_by_their_bytes() -> None:
    peer = greeted(calls_limit=1000)
    with pytest.raises(Http2Error) as failure:  # noqa: PT012 - one of many frames raises it
        for turn in range(20):
            peer.send(headers(2 * turn + 1, block("/x", "POST", (f"a{turn}", "a" * 9000))))
    assert failure.value.code is Code.ENHANCE_YOUR_CALM


@pytest.mark.parametrize("name", ["ping", "rapid reset", "settings"])
def test_the_same_over_a_longer_time_does_not(name: str) -> None:
    peer = greeted()
    for turn in range(4 * FREE):
        if turn % (FREE // 2) == 0:
            peer.connection.renew_budget()
        peer.send(FLOODS[name](turn))


def test_calls_with_their_ends_aborts_windows_and_pings_never_do() -> None:
    peer = greeted()
    for turn in range(4 * FREE):
        stream_id = 2 * turn + 1
        peer.send(headers(stream_id), data(stream_id, message(b"one")), frames.window_update(stream_id, 8))
        if turn % 2:
            peer.send(frames.reset(stream_id, Code.CANCEL), frames.window_update(0, 8))
        else:
            peer.send(data(stream_id, b"", end=True), frames.window_update(0, 8))
        if turn % 10 == 0:
            peer.send(frames.frame(frames.PING, 0, 0, bytes(8)))
    assert peer.connection.is_idle


def test_a_reader_of_large_answers_may_renew_its_windows_for_each_part() -> None:
    peer = greeted()
    peer.send(headers(1), data(1, message(b"pieces 60")))
    for _ in range(4 * FREE):
        peer.send(frames.window_update(1, 3000), frames.window_update(0, 3000))


@pytest.mark.parametrize(("size", "count"), [(0, MAX_CONTINUATIONS + 1), (1, MAX_CONTINUATIONS + 1), (16_000, 5)])
def test_a_head_without_an_end_has_a_bound(size: int, count: int) -> None:
    peer = greeted()
    peer.send(headers(1, BLOCK, 0))
    with pytest.raises(Http2Error, match=str(BLOCK_BYTES)) as failure:  # noqa: PT012 - one of many frames raises it
        for _ in range(count):
            peer.send(frames.frame(frames.CONTINUATION, 0, 1, bytes(size)))
    assert failure.value.code is Code.ENHANCE_YOUR_CALM


def test_a_short_head_that_means_a_very_long_one_is_refused() -> None:
    peer = greeted()
    # One field of 4 kB in the table, and then each of its copies in one byte.
    big = b"\x40\x01x\x7f\x81\x1e" + b"y" * 4000
    with pytest.raises(Http2Error) as failure:
        peer.send(headers(1, big + b"\xbe" * 8000))
    assert failure.value.code is Code.COMPRESSION_ERROR
