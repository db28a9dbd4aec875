"""The process that decodes large messages of KV events: a message in, its pieces out, each pickled."""

from __future__ import annotations

import pickle
import struct
import sys
from collections.abc import Iterator

from gorgo.engines.kv_events import decode_message
from gorgo.live.kv_events.pieces import pieces

#: Of a message, and of a piece; 0 follows the last one.
LENGTH = struct.Struct(">I")


def answers(message: bytes) -> Iterator[bytes]:
    """Yield the pieces of a message, or the reason why it is none."""
    try:
        for piece in pieces(decode_message(message)):
            yield pickle.dumps(piece)
    except ValueError as error:
        yield pickle.dumps(str(error))


def main() -> None:
    """Decode messages until the standard input ends."""
    source, sink = sys.stdin.buffer, sys.stdout.buffer
    while head := source.read(LENGTH.size):
        for answer in answers(source.read(*LENGTH.unpack(head))):
            sink.write(LENGTH.pack(len(answer)) + answer)
        sink.write(LENGTH.pack(0))
        sink.flush()


if __name__ == "__main__":
    main()
