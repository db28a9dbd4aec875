"""The frames of a publisher's messages, of a request for a replay and of its answers.

A message has a topic, a number and a payload. An answer begins with an empty frame, and older engines leave its topic
out: the frames are counted from the end.
"""

from __future__ import annotations

from collections.abc import Sequence

_NUMBER_BYTES = 8
#: Number of the answer that ends a replay: -1.
END = (1 << 64) - 1


def read_message(frames: Sequence[bytes]) -> tuple[int, bytes] | None:
    """Return number and payload; `None` for frames of another form.

    >>> read_message([b"topic", b"\\0" * 7 + b"\\5", b"payload"])
    (5, b'payload')
    """
    if not 2 <= len(frames) <= 4 or len(frames[-2]) != _NUMBER_BYTES:
        return None
    return int.from_bytes(frames[-2], "big"), frames[-1]


def replay_request(start: int) -> list[bytes]:
    """Return the frames that request the messages from number `start` on."""
    return [b"", start.to_bytes(_NUMBER_BYTES, "big")]


def is_end(frames: Sequence[bytes]) -> bool:
    """Return whether an answer ends a replay; the first vLLM releases with replays end with empty frames."""
    message = read_message(frames)
    return not any(frames) if message is None else message[0] == END
