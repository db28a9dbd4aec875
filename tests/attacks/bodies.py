"""Hostile bodies of requests: each a field of a dialect, filled with one kind of value up to a size."""

from __future__ import annotations

import base64
from collections.abc import Callable
from dataclasses import dataclass
from random import Random

MIB = 1024 * 1024

CHAT, GENERATE = "/v1/chat/completions", "/generate"
COMPLETIONS, EMBEDDINGS, RESPONSES, MESSAGES = "/v1/completions", "/v1/embeddings", "/v1/responses", "/v1/messages"


@dataclass(frozen=True, slots=True)
class HostileBody:
    """A body of any size: `start`, one of `units` or several over and over, `end`."""

    route: str
    start: bytes
    unit: Callable[[int, Random], bytes]
    end: bytes

    def of_size(self, size: int) -> bytes:
        """Return a body of at most `size` bytes, the same for the same size."""
        chance = Random(size)
        left = size - len(self.start) - len(self.end)
        parts, number = [self.start], 0
        while left > 0:
            part = self.unit(number, chance)
            if len(part) < 64 and number % 1024 == 0 and self.unit(number + 1, chance) == part:
                part *= max(1, min(left, MIB) // len(part))
            if len(part) > left:
                break
            parts.append(part)
            left -= len(part)
            number += 1
        return b"".join([*parts, self.end])


def _same(unit: bytes) -> Callable[[int, Random], bytes]:
    return lambda number, chance: unit  # noqa: ARG005 - one shape for all units


_KEYS: Callable[[int, Random], bytes] = lambda number, chance: b'"%x":0,' % number  # noqa: ARG005, E731
_MEDIA = base64.b64encode(Random("image").randbytes(48 * 1024))


def _image(number: int, chance: Random) -> bytes:
    return _MEDIA


def _mixed(number: int, chance: Random) -> bytes:
    return chance.choice(_VALUES) * chance.randint(1, 200)


#: Kinds of value, each with what separates it from the next.
FILLERS: dict[str, bytes] = {
    "short floats": b"2e-308,",
    "long floats": b"-0.12345678901234567,",
    "digits": b"0,",
    "huge integers": b"9" * 4300 + b",",
    "integers of 640 digits": b"9" * 640 + b",",
    "empty texts": b'"",',
    "empty lists": b"[],",
    "empty objects": b"{},",
    "nulls": b"null,",
    "objects": b'{"a":1},',
}
_VALUES = tuple(FILLERS.values())
#: Kinds of text.
TEXTS: dict[str, bytes] = {
    "plain text": b"hello wor ",
    "commas": b",",
    "brackets": b"[{",
    "Chinese": "你".encode(),
    "escapes": b"\\n",
    "unicode escapes": b"\\u4f60",
    "surrogates": b"\\ud83d\\ude00",
    "emoji": "😀".encode(),
}
_USER = b'{"model":"m","messages":[{"role":"user","content":"x"}],'
#: Fields that take a list: route, before, after.
LISTS: dict[str, tuple[str, bytes, bytes]] = {
    "tools": (CHAT, _USER + b'"tools":[', b"1]}"),
    "metadata": (CHAT, _USER + b'"metadata":[', b"1]}"),
    "stop": (CHAT, _USER + b'"stop":[', b"1]}"),
    "content": (CHAT, b'{"model":"m","messages":[{"role":"user","content":[', b'""]}]}'),
    "messages": (CHAT, b'{"model":"m","messages":[', b"1]}"),
    "prompt": (COMPLETIONS, b'{"model":"m","prompt":[', b"1]}"),
    "input": (EMBEDDINGS, b'{"model":"m","input":[', b"1]}"),
    "items": (RESPONSES, b'{"model":"m","input":[', b"1]}"),
    "system": (MESSAGES, b'{"model":"m","messages":[{"role":"user","content":"x"}],"system":[', b'""]}'),
    "input_ids": (GENERATE, b'{"input_ids":[', b"1]}"),
    "input_embeds": (GENERATE, b'{"input_embeds":[[', b"1]]}"),
}


def hostile_bodies() -> dict[str, HostileBody]:
    """Return every kind by name: each list filled with each kind of value, texts, keys, nesting, blanks, media."""
    found = {
        f"{filler} in {field}": HostileBody(route, start, _same(unit), end)
        for field, (route, start, end) in LISTS.items()
        for filler, unit in FILLERS.items()
    }
    text = b'{"model":"m","messages":[{"role":"user","content":"'
    found |= {name: HostileBody(CHAT, text, _same(unit), b'"}]}') for name, unit in TEXTS.items()}
    messages = (b'{"role":"user","content":"a"},', b'{"role":"user","content":"a"}]}')
    found |= {
        "plain text for a stream": HostileBody(
            CHAT, b'{"stream":true,' + text[1:], _same(TEXTS["plain text"]), b'"}]}'
        ),
        "messages of one letter": HostileBody(CHAT, b'{"model":"m","messages":[', _same(messages[0]), messages[1]),
        "keys in tools": HostileBody(CHAT, _USER + b'"tools":{', _KEYS, b'"z":1}}'),
        "keys in logit_bias": HostileBody(CHAT, _USER + b'"logit_bias":{', _KEYS, b'"z":1}}'),
        "keys at the top": HostileBody(CHAT, _USER, _KEYS, b'"z":1}'),
        "one key over and over": HostileBody(CHAT, _USER, _same(b'"model":"m",'), b'"z":1}'),
        "nesting": HostileBody(CHAT, _USER + b'"tools":', _same(b"["), b"]}"),
        "nested objects": HostileBody(CHAT, _USER + b'"tools":', _same(b'{"":'), b"}"),
        "blanks": HostileBody(CHAT, _USER + b'"a":1', _same(b" "), b"}"),
        "a float of all digits": HostileBody(CHAT, _USER + b'"a":1.', _same(b"9"), b"}"),
        "an integer of all digits": HostileBody(CHAT, _USER + b'"a":', _same(b"9"), b"}"),
        "a model of all bytes": HostileBody(CHAT, _USER + b'"model":"', _same(b"m"), b'"}'),
        "an image": HostileBody(
            CHAT,
            b'{"model":"m","messages":[{"role":"user","content":[{"type":"image_url","image_url":{"url":"data:',
            _image,
            b'"}}]}]}',
        ),
        "values of all kinds": HostileBody(CHAT, _USER + b'"tools":[', _mixed, b"1]}"),
    }
    return found


#: The kinds that the table shows: the worst of each class before the mends, and what ordinary requests are like.
SHOWN = (
    "short floats in tools",
    "long floats in input_embeds",
    "digits in input_ids",
    "huge integers in tools",
    "digits in metadata",
    "empty texts in content",
    "objects in content",
    "empty lists in stop",
    "empty texts in prompt",
    "messages of one letter",
    "keys in tools",
    "keys at the top",
    "nesting",
    "blanks",
    "a float of all digits",
    "an integer of all digits",
    "escapes",
    "unicode escapes",
    "emoji",
    "values of all kinds",
    "an image",
    "plain text",
    "plain text for a stream",
)
