"""Frames that are cut, damaged, shuffled or made of chance: an error of the connection, and nothing is left open."""

from __future__ import annotations

from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from gorgo.picker.transport.http2 import frames
from gorgo.picker.transport.http2.frames import Code, Http2Error
from tests import fuzz
from tests.picker.transport.http2.peer import BLOCK, CALLS, Peer, block, data, greeted, headers, message

#: Calls that are open under each case.
OPEN = 64
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
    calls = b"".join(headers(2 * turn + 1) + data(2 * turn + 1, message(b"x")) for turn in range(OPEN))

    def opened() -> Peer:
        found = greeted({frames.INITIAL_WINDOW_SIZE: 0}, calls_limit=OPEN)
        found.send(calls)
        return found

    def case() -> None:
        for _ in range(chance.randrange(1, 4)):
            stream_id = 2 * chance.randrange(OPEN) + 1
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
