"""One HTTP/2 connection, frame by frame: calls, windows, ends, errors, and floods."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gorgo.core.limits import BufferBudget
from gorgo.picker.transport import connection, frames
from gorgo.picker.transport.frames import BLOCK_BYTES, MAX_CONTINUATIONS, CallStream, Code, Http2Error
from tests import fuzz
from tests.picker.transport.peer import (
    BLOCK,
    CALLS,
    MESSAGE_BYTES,
    Peer,
    block,
    data,
    decoded,
    encoded,
    greeted,
    headers,
    kinds,
    message,
)

# --- One connection: its calls, windows, ends and errors, frame by frame.


OPEN = headers(1)


def test_a_call_gets_a_head_its_answers_and_trailers() -> None:
    peer = greeted()
    head, answer = peer.send(OPEN, data(1, message(b"one")))
    assert (head.kind, decoded(head)) == (frames.HEADERS, {":status": "200", "content-type": "application/grpc"})
    assert (answer.kind, answer.payload) == (frames.DATA, message(b"echo one"))
    (trailers,) = peer.send(data(1, b"", end=True))
    assert (trailers.flags & frames.END_STREAM, decoded(trailers)) == (1, {"grpc-status": "0"})
    assert (peer.calls[0].ends, peer.connection.is_idle, len(peer.services)) == (1, True, 0)


def test_a_message_may_come_in_any_pieces_and_several_in_one() -> None:
    whole = message(b"one") + message(b"") + message(b"three")
    for size in (1, 2, 5, 6, 9, 100):
        peer = greeted()
        peer.send(OPEN)
        for start in range(0, len(whole), size):
            peer.send(data(1, whole[start : start + size]))
        assert peer.calls[0].received == [b"one", b"", b"three"]


def test_the_bytes_of_frames_may_come_one_by_one() -> None:
    peer = Peer()
    sent = frames.PREFACE + frames.settings({}) + OPEN + data(1, message(b"one"), end=True)
    found = [frame for place in range(len(sent)) for frame in peer.send(sent[place : place + 1])]
    assert peer.calls[0].received == [b"one"]
    assert kinds(found)[-3:] == [frames.HEADERS, frames.DATA, frames.HEADERS]


def test_padding_and_priority_are_no_content() -> None:
    peer = greeted()
    fragment = bytes([3]) + bytes(5) + BLOCK + bytes(3)
    peer.send(headers(1, fragment, frames.END_HEADERS | frames.PADDED | frames.WITH_PRIORITY))
    peer.send(frames.frame(frames.DATA, frames.PADDED, 1, bytes([4]) + message(b"one") + bytes(4)))
    assert peer.calls[0].received == [b"one"]


def test_a_head_in_several_frames_is_one() -> None:
    peer = greeted()
    peer.send(
        headers(1, BLOCK[:5], 0),
        frames.frame(frames.CONTINUATION, 0, 1, BLOCK[5:9]),
        frames.frame(frames.CONTINUATION, frames.END_HEADERS, 1, BLOCK[9:]),
        data(1, message(b"one")),
    )
    assert peer.calls[0].received == [b"one"]


def test_a_request_that_is_no_call_gets_a_status_of_http() -> None:
    for method, content_type, status in (("GET", "application/grpc", "405"), ("POST", "text/plain", "415")):
        peer = greeted()
        (answer,) = peer.send(headers(1, encoded((":method", method), (":path", "/x"), ("content-type", content_type))))
        assert decoded(answer)[":status"] == status
        assert (peer.connection.is_idle, peer.calls) == (True, [])


def test_an_unknown_method_is_unimplemented() -> None:
    peer = greeted()
    head, reset = peer.send(headers(1, block("/nothing.Here/Is")))
    assert decoded(head)["grpc-status"] == "12"
    assert (reset.kind, reset.code) == (frames.RST_STREAM, Code.NO_ERROR)


def test_a_stream_above_the_bound_is_refused_and_a_later_one_is_not() -> None:
    peer = greeted(calls_limit=2)
    (refused,) = peer.send(headers(1), headers(3), headers(5))
    assert (refused.kind, refused.stream_id, refused.code) == (frames.RST_STREAM, 5, Code.REFUSED_STREAM)
    peer.send(frames.reset(1, Code.CANCEL), headers(7), data(7, message(b"one")))
    assert [call.received for call in peer.calls] == [[], [], [b"one"]]


def test_answers_wait_for_the_windows_of_stream_and_connection() -> None:
    peer = greeted({frames.INITIAL_WINDOW_SIZE: 10})
    first = peer.send(OPEN, data(1, message(b"12345678")))
    whole = message(b"echo 12345678")
    assert first[-1].payload == whole[:10]
    assert peer.send(frames.window_update(1, 3))[-1].payload == whole[10:13]
    assert peer.send(frames.settings({frames.INITIAL_WINDOW_SIZE: 1}))[0].flags == frames.ACK
    assert peer.send(frames.window_update(1, 9)) == [], "the window was nine below zero"
    assert peer.send(frames.window_update(1, 100))[-1].payload == whole[13:]
    peer = greeted({frames.INITIAL_WINDOW_SIZE: 10_000_000})
    sent = peer.send(OPEN, data(1, message(b"pieces 2")))
    assert sum(len(each.payload) for each in sent if each.kind == frames.DATA) == frames.FIRST_WINDOW
    assert max(len(each.payload) for each in sent) <= frames.FRAME_BYTES
    rest = peer.send(frames.window_update(0, 10_000_000))
    assert sum(len(each.payload) for each in rest) == 2 * (60_000 + 7) - frames.FIRST_WINDOW


def test_trailers_wait_for_the_answers_before_them() -> None:
    peer = greeted({frames.INITIAL_WINDOW_SIZE: 3})
    found = peer.send(OPEN, data(1, message(b"end"), end=True))
    assert kinds(found) == [frames.HEADERS, frames.DATA]
    assert kinds(peer.send(frames.window_update(1, 100))) == [frames.DATA, frames.HEADERS]


def test_a_client_that_reads_no_answer_gets_no_new_window() -> None:
    peer = greeted({frames.INITIAL_WINDOW_SIZE: 0})
    peer.send(OPEN)
    sent, content = 0, message(b"x" * 16_000)
    while sent + len(content) <= connection.STREAM_WINDOW:
        found = peer.send(data(1, content))
        assert frames.WINDOW_UPDATE not in kinds(found)[1:]
        sent += len(content)
    with pytest.raises(Http2Error, match="the stream's window"):
        peer.send(data(1, content))


def test_the_answers_of_all_streams_hold_the_connection_s_window(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "CONNECTION_WINDOW", 200_000)
    monkeypatch.setattr(connection, "UNSENT_TOTAL_BYTES", 50_000)
    peer = greeted({frames.INITIAL_WINDOW_SIZE: 0})
    with pytest.raises(Http2Error, match="the connection's window"):  # noqa: PT012 - one of many frames raises it
        for stream_id in range(1, 16, 2):
            peer.send(headers(stream_id))
            for _ in range(2):
                assert frames.window_update(0, 0)[:5] not in b"".join(each.payload for each in peer.read())
                peer.send(data(stream_id, message(b"x" * 16_000)))
    peer = greeted({frames.INITIAL_WINDOW_SIZE: 0})
    for stream_id in range(1, 8, 2):
        peer.send(headers(stream_id), *(data(stream_id, message(b"x" * 16_000)) for _ in range(2)))
    waiting = peer.send(frames.window_update(0, 1_000_000), frames.window_update(1, 1_000_000))
    assert [each.size for each in waiting if each.kind == frames.WINDOW_UPDATE] == []
    read = peer.send(*(frames.window_update(stream_id, 1_000_000) for stream_id in (3, 5)))
    assert [each.size for each in read if each.kind == frames.WINDOW_UPDATE and not each.stream_id] == [8 * 16_005]


def test_a_message_of_gigabytes_is_refused_by_its_prefix_and_a_frame_of_megabytes_by_its_head() -> None:
    peer = greeted()
    peer.send(OPEN)
    head, reset = peer.send(data(1, b"\0\xff\xff\xff\xff"))
    assert decoded(head)["grpc-status"] == "8"
    assert (reset.kind, peer.connection.is_idle) == (frames.RST_STREAM, True)
    assert peer.send(data(1, b"x" * 1000)) == [], "of a stream that has ended"
    with pytest.raises(Http2Error, match="16384") as failure:
        peer.send((1 << 20).to_bytes(3, "big") + b"\0\0" + (1).to_bytes(4, "big"))
    assert failure.value.code is Code.FRAME_SIZE_ERROR


def test_a_compressed_message_is_unimplemented() -> None:
    peer = greeted()
    head, _ = peer.send(OPEN, data(1, b"\1\0\0\0\1x"))
    assert decoded(head)["grpc-status"] == "12"


def test_incomplete_messages_of_all_connections_have_a_bound() -> None:
    buffers = BufferBudget(80_000)
    first, second = (Peer(buffers=buffers, client=host) for host in ("10.0.0.1", "10.0.0.2"))
    for peer in (first, second):
        peer.greet()
        peer.send(headers(1), headers(3), headers(5))
    part = message(bytes(MESSAGE_BYTES))[:16_000]
    assert [first.send(data(stream_id, part)) for stream_id in (1, 3)] == [[], []], "half of all is for one host"
    head, _ = first.send(data(5, part))
    assert (head.stream_id, decoded(head)["grpc-status"]) == (5, "8")
    assert second.send(data(1, part)) == [], "another host has a share"
    head, _ = second.send(data(3, part))
    assert (head.stream_id, decoded(head)["grpc-status"]) == (3, "8")
    assert buffers.used_bytes == 48_000
    first.send(frames.reset(1, Code.CANCEL), headers(7))
    assert first.send(data(7, part)) == [], "there is room again"
    for peer in (first, second):
        peer.connection.close()
    assert (buffers.used_bytes, len(buffers)) == (0, 0)


def test_a_message_that_does_not_end_makes_way_for_others_and_is_refused_in_time() -> None:
    buffers = BufferBudget(64_000)
    slow, other = (Peer(buffers=buffers, client=host) for host in ("10.0.0.1", "10.0.0.2"))
    for peer in (slow, other):
        peer.greet()
        peer.send(headers(1))
    whole = message(bytes(40_000))
    for start in (0, 16_000):
        slow.send(data(1, message(bytes(MESSAGE_BYTES))[start : start + 16_000]))
    slow.now = other.now = 3.0
    for start in (0, 16_000, 32_000):
        other.send(data(1, whole[start : start + 16_000]))
    assert other.calls[0].received == [whole[5:]]
    head, _ = slow.read()
    assert (decoded(head)["grpc-status"], slow.calls[0].ends) == ("8", 1)
    slow.send(headers(3), data(3, whole[:5]))
    slow.now += connection.PARTIAL_S - 0.1
    slow.connection.renew_budget()
    assert slow.read() == []
    slow.now += 0.2
    slow.connection.renew_budget()
    head, _ = slow.read()
    assert (head.stream_id, decoded(head)["grpc-status"]) == (3, "8")
    assert (buffers.used_bytes, len(buffers)) == (0, 0)


def test_a_stream_that_has_failed_retains_no_more_though_its_client_reads_nothing() -> None:
    peer = greeted({frames.INITIAL_WINDOW_SIZE: 0})
    peer.send(headers(1), data(1, message(b"x")), data(1, b"\1\0\0\0\1x"))
    for _ in range(20):
        peer.send(data(1, bytes(16_000)))
    assert (peer.buffers.used_bytes, len(peer.calls[0].received)) == (0, 1)


def test_the_end_of_the_connection_ends_each_call_once() -> None:
    peer = greeted()
    peer.send(headers(1), headers(3), frames.reset(3, Code.CANCEL))
    assert [call.ends for call in peer.calls] == [0, 1]
    for _ in range(2):
        peer.connection.close()
        assert [call.ends for call in peer.calls] == [1, 1]


def test_a_stop_asks_for_other_connections_first_and_names_the_last_stream_in_the_end() -> None:
    peer = greeted()
    peer.send(OPEN)
    peer.connection.announce_end()
    (soft,) = peer.read()
    assert (soft.kind, soft.payload[:4].hex(), soft.code) == (frames.GOAWAY, "7fffffff", Code.NO_ERROR)
    assert peer.send(headers(3), data(3, message(b"one")))[-1].kind == frames.DATA, "it was on its way"
    peer.connection.announce_last_stream()
    (last,) = peer.read()
    assert int.from_bytes(last.payload[:4], "big") == 3
    assert peer.wakes >= 2


def test_a_ping_comes_back_and_its_answer_does_not() -> None:
    peer = greeted()
    (pong,) = peer.send(frames.frame(frames.PING, 0, 0, b"12345678"))
    assert (pong.flags, pong.payload) == (frames.ACK, b"12345678")
    assert peer.send(frames.frame(frames.PING, frames.ACK, 0, b"12345678")) == []


FAULTS = {
    "no preface": (b"GET / HTTP/1.1\r\n\r\n", Code.PROTOCOL_ERROR),
    "no settings": (frames.PREFACE + headers(1), Code.PROTOCOL_ERROR),
}
LATER_FAULTS = {
    "stream 0": (headers(0), Code.PROTOCOL_ERROR),
    "even stream": (headers(2), Code.PROTOCOL_ERROR),
    "data of an unopened stream": (data(1, b""), Code.PROTOCOL_ERROR),
    "data of the connection": (data(0, b""), Code.PROTOCOL_ERROR),
    "more padding than data": (OPEN + frames.frame(frames.DATA, frames.PADDED, 1, b"\5abc"), Code.PROTOCOL_ERROR),
    "trailers that end nothing": (OPEN + headers(1), Code.PROTOCOL_ERROR),
    "continuation of nothing": (frames.frame(frames.CONTINUATION, 4, 1, b""), Code.PROTOCOL_ERROR),
    "ping within a head": (headers(1, BLOCK[:3], 0) + frames.frame(frames.PING, 0, 0, bytes(8)), Code.PROTOCOL_ERROR),
    "half a priority": (headers(1, b"12", frames.END_HEADERS | frames.WITH_PRIORITY), Code.FRAME_SIZE_ERROR),
    "broken block": (headers(1, b"\xff\xff\xff\xff\xff\xff"), Code.COMPRESSION_ERROR),
    "a table that is forbidden": (headers(1, b"\x3f\xe1\x1f" + BLOCK), Code.COMPRESSION_ERROR),
    "short reset": (OPEN + frames.frame(frames.RST_STREAM, 0, 1, b"123"), Code.FRAME_SIZE_ERROR),
    "reset of an unopened stream": (frames.reset(1, Code.CANCEL), Code.PROTOCOL_ERROR),
    "settings of a stream": (frames.frame(frames.SETTINGS, 0, 1), Code.PROTOCOL_ERROR),
    "settings of five bytes": (frames.frame(frames.SETTINGS, 0, 0, b"12345"), Code.FRAME_SIZE_ERROR),
    "acknowledged settings": (frames.frame(frames.SETTINGS, frames.ACK, 0, bytes(6)), Code.FRAME_SIZE_ERROR),
    "a window of 2^31": (frames.settings({frames.INITIAL_WINDOW_SIZE: 1 << 31}), Code.FLOW_CONTROL_ERROR),
    "frames of 1 byte": (frames.settings({frames.MAX_FRAME_SIZE: 1}), Code.PROTOCOL_ERROR),
    "push of 2": (frames.settings({frames.ENABLE_PUSH: 2}), Code.PROTOCOL_ERROR),
    "short ping": (frames.frame(frames.PING, 0, 0, bytes(7)), Code.FRAME_SIZE_ERROR),
    "ping of a stream": (frames.frame(frames.PING, 0, 1, bytes(8)), Code.PROTOCOL_ERROR),
    "push": (frames.frame(frames.PUSH_PROMISE, 4, 1, bytes(8)), Code.PROTOCOL_ERROR),
    "goaway of a stream": (frames.frame(frames.GOAWAY, 0, 1, bytes(8)), Code.PROTOCOL_ERROR),
    "short window": (frames.frame(frames.WINDOW_UPDATE, 0, 0, b"123"), Code.FRAME_SIZE_ERROR),
    "window of nothing": (frames.window_update(0, 0), Code.PROTOCOL_ERROR),
    "window of an unopened stream": (frames.window_update(1, 5), Code.PROTOCOL_ERROR),
    "too large a window": (frames.window_update(0, frames.LARGEST_WINDOW), Code.FLOW_CONTROL_ERROR),
    "too large a window of a stream": (OPEN + frames.window_update(1, frames.LARGEST_WINDOW), Code.FLOW_CONTROL_ERROR),
    "priority of the connection": (frames.frame(frames.PRIORITY, 0, 0, bytes(5)), Code.PROTOCOL_ERROR),
    "short priority": (frames.frame(frames.PRIORITY, 0, 1, bytes(4)), Code.FRAME_SIZE_ERROR),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_in_the_greeting_ends_the_connection(name: str) -> None:
    sent, code = FAULTS[name]
    peer = Peer()
    with pytest.raises(Http2Error, match="expected") as failure:
        peer.send(sent)
    assert failure.value.code is code


@pytest.mark.parametrize("name", LATER_FAULTS)
def test_a_fault_ends_the_connection_with_what_was_expected(name: str) -> None:
    sent, code = LATER_FAULTS[name]
    peer = greeted()
    with pytest.raises(Http2Error, match="expected") as failure:
        peer.send(sent)
    assert failure.value.code is code
    goaway = peer.connection.goaway_for(failure.value)
    assert goaway[frames.HEAD_BYTES + 8 :].decode().startswith("expected")
    peer.connection.close()
    assert len(peer.services) == 0


def test_data_after_the_end_of_an_open_stream_is_a_fault() -> None:
    peer = greeted({frames.INITIAL_WINDOW_SIZE: 0})
    peer.send(OPEN, data(1, message(b"one"), end=True))
    with pytest.raises(Http2Error, match="no DATA after the end"):
        peer.send(data(1, b"x"))


def test_what_is_late_for_an_ended_stream_and_frames_of_extensions_are_ignored() -> None:
    peer = greeted()
    peer.send(OPEN, data(1, message(b"end")))
    late = (data(1, b"x"), frames.window_update(1, 5), frames.reset(1, Code.CANCEL), headers(1))
    assert peer.send(*late, frames.frame(0x21, 255, 7, b"x"), frames.frame(frames.GOAWAY, 0, 0, bytes(8))) == []


# --- Frames that are cheap to send and not to answer: each kind of flood ends its connection, and usual use never
# does.


FREE = 300


@pytest.fixture
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


@pytest.mark.usefixtures("few_free_frames")
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


@pytest.mark.usefixtures("few_free_frames")
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


@pytest.mark.usefixtures("few_free_frames")
def test_a_window_of_one_byte_for_each_frame_does_not_pay_for_the_next() -> None:
    peer = greeted({frames.INITIAL_WINDOW_SIZE: 0})
    peer.send(headers(1), data(1, message(b"pieces 1")))
    with pytest.raises(Http2Error) as failure:  # noqa: PT012 - one of many frames raises it
        for _ in range(2 * FREE):
            peer.send(frames.window_update(1, 1))
    assert failure.value.code is Code.ENHANCE_YOUR_CALM


@pytest.mark.usefixtures("few_free_frames")
def test_a_change_of_all_windows_costs_by_the_streams_that_are_open() -> None:
    """1,000 streams: 63 frames each, of 300."""
    peer = waiting_answers(1000)
    peer.connection.renew_budget()
    with pytest.raises(Http2Error) as failure:  # noqa: PT012 - one of many frames raises it
        for turn in range(8):
            peer.send(frames.settings({frames.INITIAL_WINDOW_SIZE: turn + 1}))
    assert failure.value.code is Code.ENHANCE_YOUR_CALM


@pytest.mark.usefixtures("few_free_frames")
def test_waiting_answers_are_sent_in_turns_of_a_bounded_number_of_frames(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "FRAMES_PER_TURN", 30)
    peer = waiting_answers(100)
    sent, turns = peer.send(frames.settings({frames.INITIAL_WINDOW_SIZE: 4000})), 1
    while peer.connection.is_behind:
        sent += peer.send()
        turns += 1
    order = [each.stream_id for each in sent if each.kind == frames.DATA]
    assert (sorted(order), turns) == ([2 * turn + 1 for turn in range(100)], 4)


@pytest.mark.usefixtures("few_free_frames")
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


@pytest.mark.usefixtures("few_free_frames")
def test_heads_that_are_decoded_anew_cost_by_their_bytes() -> None:
    peer = greeted(calls_limit=1000)
    with pytest.raises(Http2Error) as failure:  # noqa: PT012 - one of many frames raises it
        for turn in range(20):
            peer.send(headers(2 * turn + 1, block("/x", "POST", (f"a{turn}", "a" * 9000))))
    assert failure.value.code is Code.ENHANCE_YOUR_CALM


@pytest.mark.usefixtures("few_free_frames")
@pytest.mark.parametrize("name", ["ping", "rapid reset", "settings"])
def test_the_same_over_a_longer_time_does_not(name: str) -> None:
    peer = greeted()
    for turn in range(4 * FREE):
        if turn % (FREE // 2) == 0:
            peer.connection.renew_budget()
        peer.send(FLOODS[name](turn))


@pytest.mark.usefixtures("few_free_frames")
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


@pytest.mark.usefixtures("few_free_frames")
def test_a_reader_of_large_answers_may_renew_its_windows_for_each_part() -> None:
    peer = greeted()
    peer.send(headers(1), data(1, message(b"pieces 60")))
    for _ in range(4 * FREE):
        peer.send(frames.window_update(1, 3000), frames.window_update(0, 3000))


@pytest.mark.usefixtures("few_free_frames")
@pytest.mark.parametrize(("size", "count"), [(0, MAX_CONTINUATIONS + 1), (1, MAX_CONTINUATIONS + 1), (16_000, 5)])
def test_a_head_without_an_end_has_a_bound(size: int, count: int) -> None:
    peer = greeted()
    peer.send(headers(1, BLOCK, 0))
    with pytest.raises(Http2Error, match=str(BLOCK_BYTES)) as failure:  # noqa: PT012 - one of many frames raises it
        for _ in range(count):
            peer.send(frames.frame(frames.CONTINUATION, 0, 1, bytes(size)))
    assert failure.value.code is Code.ENHANCE_YOUR_CALM


@pytest.mark.usefixtures("few_free_frames")
def test_a_short_head_that_means_a_very_long_one_is_refused() -> None:
    peer = greeted()
    # One field of 4 kB in the table, and then each of its copies in one byte.
    big = b"\x40\x01x\x7f\x81\x1e" + b"y" * 4000
    with pytest.raises(Http2Error) as failure:
        peer.send(headers(1, big + b"\xbe" * 8000))
    assert failure.value.code is Code.COMPRESSION_ERROR


# --- Frames that are cut, damaged, shuffled or made of chance: an error of the connection, and nothing is left open.


#: Calls that are open under each case.
OPEN_STREAMS = 64
WORDS = (b"one", b"end", b"wrong", b"quiet x", b"broken", b"pieces 3", b"")


def checked(peer: Peer, sent: bytes) -> bool:
    """Send bytes; return whether the connection goes on. Its state has its bounds either way."""
    connection = peer.connection
    refusal: Http2Error | None = None
    try:
        peer.send(sent)
    except Http2Error as error:
        refusal = error
    if refusal is not None:
        assert str(refusal).startswith("expected")
        assert connection.goaway_for(refusal)[3] == frames.GOAWAY
        connection.close()
        assert (connection.is_idle, len(peer.services), peer.buffers.used_bytes) == (True, 0, 0)
        assert [call.ends for call in peer.calls] == [1] * len(peer.calls)
        return False
    assert len(connection._streams) <= CALLS
    assert len(connection._buffer) < frames.HEAD_BYTES + frames.FRAME_BYTES
    assert peer.buffers.used_bytes == sum(stream.reader.partial_bytes for stream in connection._streams.values())
    peer.buffers.check()
    for stream in connection._streams.values():
        assert stream.unsent_bytes == sum(map(len, stream.unsent))
        can_go_on = connection._writer.client.stream_window + stream.granted > 0
        assert (stream.stream_id in connection._writer._ready) == (bool(stream.unsent) and can_go_on)
    streams = connection._streams.values()
    assert len(peer.services) == sum(stream.call is not None and not stream.input_ended for stream in streams)
    return True


@settings(max_examples=60, deadline=None)
@given(st.binary(max_size=200), st.booleans())
def test_random_bytes_end_a_connection_or_wait_for_more(sent: bytes, after_greeting: bool) -> None:
    checked(greeted() if after_greeting else Peer(), sent)


def odd_frame(chance: Random, last: int) -> bytes:
    """A frame that a client may send, or nearly."""
    stream_id = chance.choice((0, 1, 3, 5, last, last, last + 2, chance.randrange(2**31)))
    kind = chance.choice((0, 0, 0, 1, 1, 1, 2, 3, 3, 4, 6, 8, 8, 9, chance.randrange(256)))
    if kind == frames.DATA:
        content = message(chance.choice(WORDS))
        payload = chance.choice((content, content + content, content[:-1], b"", b"\0\0\1\0\0" + bytes(50), b"\1" * 9))
        flags = chance.choice((0, 0, 0, 1, 8))
    elif kind in (frames.HEADERS, frames.CONTINUATION):
        payload = chance.choice((BLOCK, BLOCK, block("/x"), block(method="GET"), BLOCK[:9], b"", b"\xbe", b"\x80"))
        flags = chance.choice((4, 4, 4, 5, 0, 0x24, 0xC))
    elif kind == frames.SETTINGS:
        key, value = chance.randrange(8), chance.choice((0, 1, 100, 65_535, 2**31 - 1, 2**31))
        payload, flags = frames.settings({key: value})[frames.HEAD_BYTES :], chance.choice((0, 0, 1))
        stream_id = chance.choice((0, 0, 0, stream_id))
    else:
        payload = chance.randbytes(chance.choice((4, 4, 4, 5, 8, 0, 30)))
        flags = chance.choice((0, 0, 1, 4))
    return frames.frame(kind, flags, stream_id, payload)


def test_odd_frames_in_any_order_end_a_connection_at_most() -> None:
    chance = Random(1)
    went_on = 0
    for _ in range(120):
        peer, last = greeted(), 1
        for _ in range(chance.randrange(30)):
            if chance.random() < 0.85:
                last += 2
                sent = headers(last) + data(last, message(chance.choice(WORDS)), end=chance.random() < 0.3)
            else:
                sent = odd_frame(chance, last)
            if not checked(peer, sent):
                break
            went_on += 1
        peer.connection.close()
        assert len(peer.services) == 0
    assert went_on > 500, "most sequences go some way"


def test_a_good_conversation_that_is_cut_or_damaged_anywhere_ends_a_connection_at_most() -> None:
    good = b"".join(
        (
            *(frames.PREFACE, frames.settings({frames.INITIAL_WINDOW_SIZE: 20_000}), frames.settings({})),
            *(headers(1), data(1, message(b"one")), headers(3), data(3, message(b"pieces 2")[:7])),
            *(data(3, message(b"pieces 2")[7:]), frames.window_update(3, 70_000), frames.reset(1, Code.CANCEL)),
            *(headers(5), data(5, message(b"end")), data(3, b"", end=True)),
        )
    )
    chance = Random(2)
    for _ in range(400):
        damaged = bytearray(good)
        for _ in range(chance.randrange(4)):
            damaged[chance.randrange(len(damaged))] = chance.randrange(256)
        if chance.random() < 0.5:
            cut = chance.randrange(len(damaged))
            del damaged[cut : cut + chance.randrange(20)]
        peer, start = Peer(), 0
        while start < len(damaged):
            size = chance.choice((1, 7, 50, 1000))
            if not checked(peer, bytes(damaged[start : start + size])):
                break
            start += size
        peer.connection.close()
        assert len(peer.services) == 0


def test_cases_of_chance_over_many_open_streams_delay_nothing_and_leave_nothing() -> None:
    chance, peer = Random(3), Peer()
    calls = b"".join(headers(2 * turn + 1) + data(2 * turn + 1, message(b"x")) for turn in range(OPEN_STREAMS))

    def opened() -> Peer:
        found = greeted({frames.INITIAL_WINDOW_SIZE: 0}, calls_limit=OPEN_STREAMS)
        found.send(calls)
        return found

    def case() -> None:
        for _ in range(chance.randrange(1, 4)):
            stream_id = 2 * chance.randrange(OPEN_STREAMS) + 1
            valid = (
                frames.window_update(0, chance.randrange(1, 100)),
                frames.window_update(stream_id, chance.randrange(1, 100)),
                frames.settings({frames.INITIAL_WINDOW_SIZE: chance.randrange(10)}),
                frames.settings({frames.MAX_FRAME_SIZE: 20_000}),
                frames.reset(stream_id, Code.CANCEL),
                data(stream_id, message(chance.choice(WORDS))),
            )
            sent = chance.choice(valid) if chance.random() < 0.95 else odd_frame(chance, stream_id)
            peer.send(sent * chance.choice((1, 1, 1, 50)))

    connections = 0
    for _ in range(fuzz.CASES):
        if peer.connection.is_idle:
            peer = opened()
            connections += 1
        refusal = None
        try:
            fuzz.timed(case)
        except Http2Error as error:
            refusal = error
        if refusal is not None:
            assert str(refusal).startswith("expected")
            peer.connection.close()
            assert len(peer.services) == 0
            assert [call.ends for call in peer.calls] == [1] * len(peer.calls)
        assert peer.connection._writer.unsent_bytes == sum(
            stream.unsent_bytes for stream in peer.connection._streams.values()
        )
    peer.connection.close()
    assert (len(peer.connection._partial_since), peer.connection._writer.unsent_bytes) == (0, 0)
    assert connections > fuzz.CASES // 100
