"""Eight publishers of KV events in a process of their own: two million events a minute together.

Each sends 50 messages a second: two prompts stored, 40 blocks each, and as many removals of one block. Messages are
encoded once and repeat after a cycle, so that the process takes little of the machine. They take turns, as engines do
that know nothing of each other.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from itertools import count

from msgspec.msgpack import encode

from gorgo.live.kv_events.sockets import import_zmq

REPLICAS = 8
MESSAGES_PER_S = 50
STORED, BLOCKS, BLOCK_TOKENS = 2, 40, 16
EVENTS_PER_MESSAGE = STORED + STORED * BLOCKS
#: Messages until the blocks of one are removed, and until they are stored again.
RETAINED, CYCLE = 50, 400
#: Topic of the events, and one to which the proxy does not subscribe: the publishers do the same work for both.
TOPIC, UNHEARD = "kv", "unheard"
_ON, _OFF = b"1", b"0"


class Publishers:
    """The process; `ports` are those of the publishers. Silent at first."""

    def __init__(self, process: subprocess.Popen[bytes], ports: list[int]) -> None:
        self._process = process
        self.ports = ports

    def switch(self, *, on: bool) -> None:
        """Let the events be heard, or not."""
        assert self._process.stdin is not None
        self._process.stdin.write(_ON if on else _OFF)
        self._process.stdin.flush()


@contextmanager
def publishers() -> Iterator[Publishers]:
    """Publish until the end of the block."""
    command = [sys.executable, "-m", "tests.bench.kv_publishers"]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        yield Publishers(process, [int(port) for port in process.stdout.readline().split()])
    finally:
        process.kill()
        process.communicate()


def payloads() -> Iterator[bytes]:
    """Yield the messages of one publisher; from number `RETAINED` on each has all its events."""
    return (_payload(number % CYCLE, removes=number >= RETAINED) for number in count())


@cache
def _payload(number: int, *, removes: bool) -> bytes:
    events: list[dict[str, object]] = []
    for hashes in _prompts(number):
        tokens = [value % 150_000 for value in hashes for _ in range(BLOCK_TOKENS)]
        events.append(
            {"type": "BlockStored", "block_hashes": hashes, "parent_block_hash": None, "token_ids": tokens}
            | {"block_size": BLOCK_TOKENS, "lora_id": None, "medium": "GPU", "lora_name": None, "group_idx": 0}
        )
    if removes:
        events += [
            {"type": "BlockRemoved", "block_hashes": [value], "medium": "GPU", "group_idx": 0}
            for hashes in _prompts((number - RETAINED) % CYCLE)
            for value in hashes
        ]
    return encode([1.5, events, 0])


def _prompts(number: int) -> list[list[int]]:
    """Return the hashes of the blocks that a message stores, by prompt."""
    starts = [(number * STORED + place) * BLOCKS + 1 for place in range(STORED)]
    return [[block * 0x9E3779B97F4A7C15 & (1 << 64) - 1 for block in range(start, start + BLOCKS)] for start in starts]


def _publish() -> None:
    """Publish at free ports, which are printed, until killed."""
    zmq = import_zmq()
    context = zmq.Context()
    sockets = [context.socket(zmq.PUB) for _ in range(REPLICAS)]
    messages, numbers = [payloads() for _ in sockets], [0 for _ in sockets]
    for _ in range(CYCLE + RETAINED):
        next(messages[0])  # encoded before the first one is due
    messages[0] = payloads()
    print(*[socket.bind_to_random_port("tcp://127.0.0.1") for socket in sockets], flush=True)
    os.set_blocking(sys.stdin.fileno(), False)
    began_s, heard = time.monotonic(), False
    for turn in count():
        socket, place = sockets[turn % REPLICAS], turn % REPLICAS
        with suppress(BlockingIOError):
            heard = os.read(sys.stdin.fileno(), 100)[-1:] == _ON
        number = numbers[place].to_bytes(8, "big")
        if heard:
            socket.send_multipart([TOPIC.encode(), number, next(messages[place])])
            numbers[place] += 1
        else:
            socket.send_multipart([UNHEARD.encode(), number, _payload(turn % CYCLE, removes=True)])
        time.sleep(max(0.0, began_s + (turn + 1) / (MESSAGES_PER_S * REPLICAS) - time.monotonic()))


if __name__ == "__main__":
    _publish()
