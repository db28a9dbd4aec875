"""Seeded mutations of bytes and JSON, and how many of them: a few seconds' worth, more by `GORGO_FUZZ_EXAMPLES`."""

from __future__ import annotations

import json
import os
from random import Random
from typing import Any

EXAMPLES = int(os.environ.get("GORGO_FUZZ_EXAMPLES", "60"))

#: What parsers stumble over.
SPLINTERS = (
    b"\0", b"\r", b"\n", b"\r\n\r\n", b"\xff\xfe", b"\xef\xbb\xbf", b"\xed\xa0\x80", b"\xf0\x9f\x98", b"NaN",
    b"Infinity", b"1e999999", b"-0", b"9" * 400, b"[" * 3000, b'{"a":' * 3000, b'"\\ud800"', b"null", b"true", b"{}",
    b"[]", b'""', b",", b":", b"&a *a", b"!!python/object:os.system", b"<<: *a", b"\t", b" " * 300, b"%n%s",
    b"../" * 20, b"\x1b[2J",
)  # fmt: skip


def mutated(chance: Random, text: bytes) -> bytes:
    """`text` with one to four faults."""
    for _ in range(chance.randint(1, 4)):
        at, to = sorted(chance.randrange(len(text) + 1) for _ in range(2))
        match chance.randrange(5):
            case 0:
                text = text[:at] + chance.choice(SPLINTERS) + text[at:]
            case 1:
                text = text[:at] + text[min(to, at + 20) :]
            case 2:
                text = text[:to] + text[at:to] + text[to:]
            case 3:
                text = text[:at] + bytes([chance.randrange(256)]) + text[at + 1 :]
            case _:
                text = text[:at]
    return text


def odd_value(chance: Random, depth: int = 0) -> Any:
    """Anything that JSON can say."""
    kinds = 11 if depth < 3 else 9
    match chance.randrange(kinds):
        case 0:
            return None
        case 1:
            return chance.choice([True, False])
        case 2:
            return chance.choice([0, -1, 2**63, -(2**70), 10**300])
        case 3:
            return chance.choice([0.0, -0.0, 1e308, 5e-324])
        case 4:
            return ""
        case 5:
            return chance.choice(["a", "user", "\ud800", "\0", "é" * 300, "text", "<|im_end|>"])
        case 6 | 7 | 8:
            return chance.choice(["http://169.254.169.254/", "x" * 2000, "-1", "true"])
        case 9:
            return [odd_value(chance, depth + 1) for _ in range(chance.randrange(4))]
        case _:
            return {chance.choice(KEYS): odd_value(chance, depth + 1) for _ in range(chance.randrange(5))}


KEYS = (
    "model", "messages", "content", "role", "prompt", "text", "input", "input_ids", "stream", "stream_options", "tools",
    "tool_calls", "image_url", "url", "previous_response_id", "store", "usage", "system", "sampling_params", "type", "",
)  # fmt: skip


def odd_body(chance: Random) -> bytes:
    """A body that may be an object with the keys of one."""
    body = {key: odd_value(chance) for key in chance.sample(KEYS, chance.randrange(1, 6))}
    text = json.dumps(body if chance.random() < 0.9 else odd_value(chance)).encode()
    return mutated(chance, text) if chance.random() < 0.3 else text
