"""`python -m tests.attacks.fuzz [--count N] [--seed N]`: seeded items of every kind through the real parsing functions.

Requests (heads, and bodies as the proxy reads them), answers and events of engines, and metrics texts: mutated, odd or
hostile. One in twenty also goes through a whole proxy over sockets (`fuzz_live`). Fails if one raises what its reader
does not document, takes more than 50 ms of the processor, or if a descriptor or task is left. Prints JSON: items of
each kind, refusals, and the longest time of one.
"""

# ruff: noqa: T201 - a command says what it found

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from random import Random
from time import thread_time

from gorgo.core.numeric import is_quick
from gorgo.core.prompt.fingerprint import Fingerprinter
from gorgo.core.stream import FirstTokenDetector, UsageEventFilter, UsageReader, read_usage
from gorgo.engines.registry import dialect
from gorgo.live.http.errors import HttpError
from gorgo.live.listener.connection.reader import Refused, RequestReader
from gorgo.live.listener.heads import HeadLimits
from gorgo.live.parsing.json_body import limit_digits, read_fields, request_usage, with_model
from gorgo.live.request.parse import INFERENCE_ROUTES
from tests.attacks.bodies import hostile_bodies
from tests.attacks.fuzz_live import BATCH, LiveFound, LiveItem, live_proxy
from tests.engines.scrapes import METRICS
from tests.proxy.fakes import DONE, ROLE, USAGE, chat, delta
from tests.proxy.test_fuzz import mutated, odd_body

#: Time of the processor that one item may take, s.
LIMIT_S = 0.05
#: One item in so many is a hostile body of up to this size.
HOSTILE_EVERY, HOSTILE_BYTES = 200, 256 * 1024

#: One item in so many goes through a proxy.
LIVE_EVERY = 20

_FINGERPRINTER = Fingerprinter(key=7)
_LIMITS = HeadLimits(64 * 1024, 10.0)
_BODIES = list(hostile_bodies().values())
_ORDINARY = (
    ("/v1/chat/completions", chat(stream=True, model="m")),
    ("/v1/completions", b'{"model": "m", "prompt": ["a", [1, 2, 3], {"text": "b"}], "stream": true}'),
    ("/generate", b'{"input_ids": [1, 2, 3], "sampling_params": {"max_new_tokens": 5}}'),
    ("/v1/responses", b'{"model": "m", "input": [{"role": "user", "content": [{"type": "input_text", "text": "a"}]}]}'),
    (
        "/v1/messages",
        b'{"model": "m", "system": "s", "messages": [{"role": "user", "content": "a"}]}',
    ),
)
_STREAM = ROLE + b": ping\n\n" + delta("Hé") + delta("b") + USAGE + DONE
_WHOLE = b'{"choices": [{"text": "a"}], "usage": {"prompt_tokens": 3, "prompt_tokens_details": {"cached_tokens": 1}}}'
_BATCH = b'[{"text": "a", "meta_info": {"prompt_tokens": 3, "cached_tokens": 1, "completion_tokens": 2}}]'
_SCRAPES = {name: text.encode() for name, text in METRICS.items()}


@dataclass(slots=True)
class Count:
    """Items of one kind."""

    items: int = 0
    refused: int = 0
    longest_ms: float = 0.0


@dataclass(frozen=True, slots=True)
class Item:
    """How to read it, which returns whether it is accepted; and its bytes for a proxy."""

    read: Callable[[], bool]
    live: LiveItem


def _read_request(chance: Random) -> Item:
    if chance.randrange(HOSTILE_EVERY) == 0:
        hostile = chance.choice(_BODIES)
        route, body = hostile.route, hostile.of_size(chance.randrange(100, HOSTILE_BYTES))
    elif chance.random() < 0.5:
        route, body = chance.choice(INFERENCE_ROUTES), odd_body(chance)
    else:
        route, body = chance.choice(_ORDINARY)
        body = mutated(chance, body) if chance.random() < 0.5 else body
    head = b"POST %b HTTP/1.1\r\nhost: g\r\nconnection: close\r\ncontent-type: application/json\r\n" % route.encode()
    sent = head + b"content-length: %d\r\n\r\n" % len(body)
    if chance.random() < 0.5:
        sent = mutated(chance, sent)
    return Item(lambda: _request(route, sent, body), LiveItem("request", route, sent + body))


def _request(route: str, head: bytes, body: bytes) -> bool:
    reader = RequestReader(_LIMITS)
    reader.receive(head)
    try:
        if reader.next_head() is None:
            return False
    except Refused:
        return False
    if not is_quick(body):
        return False  # another process reads it
    try:
        read_fields(route, body, _FINGERPRINTER)
        if b"\0" not in body:
            request_usage(body)
        with_model(body, "m")
    except HttpError as error:
        if error.status != 400:
            raise
        return False
    return True


def _read_answer(chance: Random) -> Item:
    kind = chance.randrange(3)
    route = chance.choice(INFERENCE_ROUTES)
    if kind == 0:
        body = mutated(chance, chance.choice((_WHOLE, _BATCH)))
        head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(body)
        return Item(lambda: read_usage(body) is not None, LiveItem("answer", route, _odd(chance, head + body)))
    stream = mutated(chance, _STREAM * chance.choice((1, 1, 1, 30)))
    cuts = sorted(chance.randrange(len(stream) + 1) for _ in range(chance.randrange(6)))
    parts = [stream[a:b] for a, b in zip([0, *cuts], [*cuts, len(stream)], strict=True)]
    head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
    chunks = b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in parts if part) + b"0\r\n\r\n"
    return Item(lambda: _stream(route, stream, parts), LiveItem("answer", route, _odd(chance, head + chunks)))


def _odd(chance: Random, answer: bytes) -> bytes:
    """Return the answer, one in three with faults in its framing."""
    return mutated(chance, answer) if chance.randrange(3) == 0 else answer


def _stream(route: str, stream: bytes, parts: Sequence[bytes]) -> bool:
    detector, events, tail = FirstTokenDetector(route), UsageEventFilter(), UsageReader()
    passed = b""
    for part in parts:
        detector.feed(part)
        tail.feed(part)
        passed += events.feed(part)
    passed += events.flush()
    if len(passed) > len(stream):
        raise AssertionError("a filter that adds bytes")
    return tail.usage() is not None


def _read_metrics(chance: Random) -> Item:
    name = chance.choice(list(_SCRAPES))
    lines = _SCRAPES[name].split(b"\n")
    start = chance.randrange(len(lines))
    text = mutated(chance, b"\n".join(lines[start : start + chance.randrange(1, 60)]))
    engine = dialect(name)
    return Item(
        lambda: engine.read_metrics(text.decode("utf-8", "replace")).running_requests is not None,
        LiveItem("metrics", name, text),
    )


KINDS = {"requests": _read_request, "engine answers": _read_answer, "metrics texts": _read_metrics}


def fuzz(count: int, seed: int, *, live_every: int = LIVE_EVERY) -> tuple[dict[str, Count], LiveFound]:
    """Read `count` items; return what came of them. Raises `AssertionError` with the number of a slow item."""
    found, over_sockets = {kind: Count() for kind in KINDS}, LiveFound()
    batch: list[LiveItem] = []
    with _frozen(), live_proxy(list(_SCRAPES), over_sockets) as (runner, proxy):
        for number in range(count):
            kind = list(KINDS)[number % len(KINDS)]
            item = KINDS[kind](Random(f"{seed} {number}"))
            _timed_read(item, found[kind], f"item {number} of seed {seed}")
            if number // len(KINDS) % live_every == 0:
                batch.append(item.live)
            if len(batch) >= BATCH or number == count - 1:
                runner.run(proxy.run(batch))
                batch.clear()
    if over_sockets.errors:
        raise AssertionError("\n".join(over_sockets.errors[:10]))
    if over_sockets.longest_ms > LIMIT_S * 1000:
        raise AssertionError(f"{over_sockets.longest} took {over_sockets.longest_ms} ms")
    return found, over_sockets


@contextmanager
def _frozen() -> Iterator[None]:
    """Leave what there is already out of garbage collection: of a process with many tests it would be timed too."""
    frozen = gc.get_freeze_count() > 0
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        if not frozen:
            gc.unfreeze()


def _timed_read(item: Item, count: Count, name: str) -> None:
    began = thread_time()
    taken = item.read()
    spent_s = thread_time() - began
    if spent_s > LIMIT_S:
        raise AssertionError(f"{name} took {spent_s * 1000:.0f} ms")
    count.items += 1
    count.refused += not taken
    count.longest_ms = max(count.longest_ms, round(spent_s * 1000, 2))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.attacks.fuzz", description=__doc__)
    parser.add_argument("--count", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=16)
    wanted = parser.parse_args(arguments)
    limit_digits()
    descriptors = len(os.listdir("/proc/self/fd"))
    found, live = fuzz(wanted.count, wanted.seed)
    left = len(os.listdir("/proc/self/fd")) - descriptors
    counts = {kind: asdict(count) for kind, count in found.items()}
    print(json.dumps({"descriptors_left": left} | counts | {"over sockets": asdict(live)}))
    return 1 if left or live.tasks_left else 0


if __name__ == "__main__":
    sys.exit(main())
