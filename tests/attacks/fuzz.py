"""`python -m tests.attacks.fuzz [--count N] [--seed N]`: seeded items of every kind through the real parsing functions.

Requests (heads, and bodies as the proxy reads them), answers and events of engines, and metrics texts: mutated, odd or
hostile. Fails if one raises what its reader does not document, takes more than 50 ms of the processor, or if a
descriptor or task is left. Prints JSON: items of each kind, refusals, and the longest time of one.
"""

# ruff: noqa: T201 - a command says what it found

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from random import Random
from time import thread_time

import h11

from gorgo.core.json_cost import is_quick
from gorgo.core.prompt.fingerprint import Fingerprinter
from gorgo.core.stream import FirstTokenDetector, UsageEventFilter, UsageReader, read_usage
from gorgo.engines.registry import dialect
from gorgo.proxy.app import INFERENCE_ROUTES
from gorgo.proxy.http.errors import HttpError
from gorgo.proxy.http.http1 import HeadLimits, StrictConnection
from gorgo.proxy.parsing.fields import read_fields
from gorgo.proxy.parsing.json_body import limit_digits, request_usage, with_model
from tests.attacks.bodies import hostile_bodies
from tests.engines.scrapes import METRICS
from tests.proxy.fakes import DONE, ROLE, USAGE, chat, delta
from tests.proxy.fuzz.mutate import mutated, odd_body

#: Time of the processor that one item may take, s.
LIMIT_S = 0.05
#: One item in so many is a hostile body of up to this size.
HOSTILE_EVERY, HOSTILE_BYTES = 200, 256 * 1024

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


def _read_request(chance: Random) -> Callable[[], bool]:
    if chance.randrange(HOSTILE_EVERY) == 0:
        hostile = chance.choice(_BODIES)
        route, body = hostile.route, hostile.of_size(chance.randrange(100, HOSTILE_BYTES))
    elif chance.random() < 0.5:
        route, body = chance.choice(INFERENCE_ROUTES), odd_body(chance)
    else:
        route, body = chance.choice(_ORDINARY)
        body = mutated(chance, body) if chance.random() < 0.5 else body
    head = b"POST %b HTTP/1.1\r\nhost: g\r\ncontent-type: application/json\r\n" % route.encode()
    sent = head + b"content-length: %d\r\n\r\n" % len(body)
    if chance.random() < 0.5:
        sent = mutated(chance, sent)
    return lambda: _request(route, sent, body)


def _request(route: str, head: bytes, body: bytes) -> bool:
    connection = StrictConnection(_LIMITS)
    connection.receive_data(head)
    try:
        if not isinstance(connection.next_event(), h11.Request):
            return False
    except h11.RemoteProtocolError:
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


def _read_answer(chance: Random) -> Callable[[], bool]:
    kind = chance.randrange(3)
    route = chance.choice(INFERENCE_ROUTES)
    if kind == 0:
        body = mutated(chance, chance.choice((_WHOLE, _BATCH)))
        return lambda: read_usage(body) is not None
    stream = mutated(chance, _STREAM * chance.choice((1, 1, 1, 30)))
    cuts = sorted(chance.randrange(len(stream) + 1) for _ in range(chance.randrange(6)))
    parts = [stream[a:b] for a, b in zip([0, *cuts], [*cuts, len(stream)], strict=True)]
    return lambda: _stream(route, stream, parts)


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


def _read_metrics(chance: Random) -> Callable[[], bool]:
    name = chance.choice(list(_SCRAPES))
    lines = _SCRAPES[name].split(b"\n")
    start = chance.randrange(len(lines))
    text = mutated(chance, b"\n".join(lines[start : start + chance.randrange(1, 60)]))
    engine = dialect(name)
    return lambda: engine.read_metrics(text.decode("utf-8", "replace")).running_requests is not None


KINDS = {"requests": _read_request, "engine answers": _read_answer, "metrics texts": _read_metrics}


def fuzz(count: int, seed: int) -> dict[str, Count]:
    """Read `count` items; return what came of them. Raises `AssertionError` with the number of a slow item."""
    found = {kind: Count() for kind in KINDS}
    kinds = list(KINDS)
    for number in range(count):
        kind = kinds[number % len(kinds)]
        read = KINDS[kind](Random(f"{seed} {number}"))
        began = thread_time()
        taken = read()
        spent_s = thread_time() - began
        if spent_s > LIMIT_S:
            raise AssertionError(f"item {number} of seed {seed} took {spent_s * 1000:.0f} ms")
        one = found[kind]
        one.items += 1
        one.refused += not taken
        one.longest_ms = max(one.longest_ms, round(spent_s * 1000, 2))
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.attacks.fuzz", description=__doc__)
    parser.add_argument("--count", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=16)
    wanted = parser.parse_args(arguments)
    limit_digits()
    gc.freeze()
    descriptors = len(os.listdir("/proc/self/fd"))
    found = fuzz(wanted.count, wanted.seed)
    left = len(os.listdir("/proc/self/fd")) - descriptors
    print(json.dumps({"descriptors_left": left} | {kind: asdict(count) for kind, count in found.items()}))
    return 1 if left else 0


if __name__ == "__main__":
    sys.exit(main())
