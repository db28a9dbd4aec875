"""ZMTP of one subscribed connection: the same messages however the bytes are cut, and an error for anything else."""

from __future__ import annotations

import random
from collections.abc import Iterable

import pytest

from gorgo.live.kv_events.zmtp import _COMMAND, _GREETING, _LONG, _MORE, ZmtpError, ZmtpSubscriber, _frame, _ready

MAX_BYTES = 1_000_000
OPENING = _GREETING + _ready("PUB")


def message(*frames: bytes) -> bytes:
    return b"".join(_frame(_MORE if place < len(frames) - 1 else 0, frame) for place, frame in enumerate(frames))


MESSAGES = [[b"kv", bytes(8), b"x" * 300], [b"", bytes(8), b""], [b"kv", bytes(8), random.Random(1).randbytes(70_000)]]
STREAM = OPENING + b"".join(message(*frames) for frames in MESSAGES)


def received(parts: Iterable[bytes]) -> list[list[bytes]]:
    connection = ZmtpSubscriber("kv", max_bytes=MAX_BYTES)
    return [found for part in parts for found in connection.received(part)]


@pytest.mark.parametrize("seed", range(20))
def test_messages_do_not_depend_on_how_the_bytes_are_cut(seed: int) -> None:
    rng = random.Random(seed)
    cuts = sorted(rng.sample(range(1, 600), 40) + rng.sample(range(600, len(STREAM)), 5))
    parts = [STREAM[begin:end] for begin, end in zip([0, *cuts], [*cuts, len(STREAM)], strict=True)]
    assert received(parts) == MESSAGES


def test_each_byte_by_itself_gives_the_same_messages() -> None:
    short = OPENING + message(*MESSAGES[0]) + message(*MESSAGES[1])
    assert received(short[place : place + 1] for place in range(len(short))) == MESSAGES[:2]


def test_the_subscription_follows_the_handshake() -> None:
    connection = ZmtpSubscriber("kv", max_bytes=MAX_BYTES)
    assert connection.opening() == _GREETING + _ready("SUB")
    connection.received(_GREETING)
    assert (connection.is_ready, connection.take_replies()) == (False, b"")
    connection.received(_ready("PUB"))
    assert (connection.is_ready, connection.take_replies()) == (True, _frame(0, b"\x01kv"))
    assert connection.take_replies() == b""


def test_a_heartbeat_is_answered_with_what_it_carries() -> None:
    connection = ZmtpSubscriber("", max_bytes=MAX_BYTES)
    connection.received(OPENING)
    connection.take_replies()
    assert connection.received(_frame(_COMMAND, b"\x04PING\x00\x0acontext")) == []
    assert connection.take_replies() == _frame(_COMMAND, b"\x04PONGcontext")
    assert connection.received(_frame(_COMMAND, b"\x04PONG")) == []


@pytest.mark.parametrize(
    "stream",
    [
        b"HTTP/1.1 400 Bad Request",
        _GREETING[:10] + b"\x01\x00" + _GREETING[12:],
        _GREETING[:12] + b"CURVE".ljust(20, b"\0") + _GREETING[32:],
        _GREETING + message(b"before READY"),
        OPENING + b"\xff" + bytes(8),
        OPENING + bytes([_LONG]) + (MAX_BYTES + 1).to_bytes(8, "big"),
        OPENING + bytes([_LONG | _COMMAND]) + (1 << 20).to_bytes(8, "big"),
        OPENING + _frame(_MORE, b"") * 100,
        _GREETING + _frame(_COMMAND, b"\x05ERROR\x06denied"),
    ],
    ids=["http", "version", "mechanism", "early", "flags", "huge", "command", "frames", "error"],
)
def test_another_protocol_and_frames_beyond_the_bounds_are_errors(stream: bytes) -> None:
    with pytest.raises(ZmtpError):
        received([stream])


def test_random_bytes_are_messages_or_an_error() -> None:
    rng = random.Random(7)
    for _ in range(2000):
        changed = bytearray(STREAM[:500])
        for _ in range(rng.randrange(1, 4)):
            changed[rng.randrange(len(changed))] = rng.randrange(256)
        try:
            received([bytes(changed[:250]), bytes(changed[250:])])
        except ZmtpError:
            continue
