"""The process that decodes large messages of KV events: a message in, its pieces or the reason why it is none out."""

from __future__ import annotations

from collections.abc import Iterator

from gorgo.core.messages.kv_events import KvEventBatch
from gorgo.engines.kv_events import decode_message
from gorgo.live.helper_worker import Work, run_worker
from gorgo.live.kv_events.pieces import pieces

#: Data of this process: ten times the largest message and what is decoded of it.
MAX_MEMORY_BYTES = 1024 * 1024 * 1024


def decoder(_: None) -> Work:
    """Return what decodes one message."""

    def decode(message: bytes) -> Iterator[KvEventBatch | str]:
        try:
            yield from pieces(decode_message(message))
        except ValueError as error:
            yield str(error)

    return decode


def main() -> None:
    """Decode messages until the standard input ends."""
    run_worker(decoder, frames=1, max_memory_bytes=MAX_MEMORY_BYTES)


if __name__ == "__main__":
    main()
