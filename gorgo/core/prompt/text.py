"""The growing text of a prompt: parts, marks, digests of what is not text.

Owns how contents of any dialect become bytes. Which fields of a body they come from is for `core.prompt.parse`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from hashlib import sha256
from itertools import accumulate
from typing import Any

from gorgo.core.prompt.boundaries import Marks
from gorgo.errors import BadRequest

#: Bytes by which an image, or anything else that is not text, enters.
DIGEST_BYTES = 16
#: Messages, prompts, parts, and what parts consist of: more than any conversation or batch has. Each takes
#: microseconds, and a body of 32 MiB may have eleven million, for which all other requests would wait half a minute.
MAX_PIECES = 65_536
#: Up to so many messages, one by one is faster than step by step over all.
_FEW_MESSAGES = 8


class PromptText:
    """Collects parts and marks."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []
        #: Of messages: where they start, and their roles.
        self._starts: list[int] = []
        self._roles: list[str] = []
        self._size = 0
        self._pieces = 0

    def mark(self, role: str) -> None:
        self._count()
        self._starts.append(self._size)
        self._roles.append(role)

    def add_text_messages(self, messages: Sequence[object]) -> int:
        """Add messages up to the first that is more than a role and a text; return how many: most often all of them."""
        if len(messages) > _FEW_MESSAGES and (found := _roles_and_texts(messages)) is not None:
            return self._add_plain_messages(*found)
        starts, parts, size = self._starts, self._parts, self._size
        before = len(starts)
        for message in messages:
            if type(message) is not dict or len(message) != 2:
                break
            role, text = message.get("role"), message.get("content")
            if type(role) is not str or type(text) is not str:
                break
            starts.append(size)
            self._roles.append(role)
            data = text.encode() if text.isascii() else _utf8(text)
            parts.append(data)
            size += len(data)
        added = len(starts) - before
        self._size = size
        self._count(added)
        return added

    def _add_plain_messages(self, roles: Sequence[str], texts: Sequence[str], joined: str) -> int:
        """Add many messages of a role and a text each; `joined` is all text."""
        if joined.isascii():
            data, sizes = joined.encode(), map(len, texts)
        else:
            pieces = [*map(_utf8, texts)]
            data, sizes = b"".join(pieces), map(len, pieces)
        self._starts += accumulate(sizes, initial=self._size)
        self._starts.pop()  # the end of the last
        self._roles += roles
        self.add_bytes(data)
        self._count(len(roles))
        return len(roles)

    def add(self, text: str) -> None:
        self.add_bytes(_utf8(text))

    def add_bytes(self, data: bytes) -> None:
        self._parts.append(data)
        self._size += len(data)

    def add_json(self, value: object) -> None:
        """Return the text that a template renders from JSON (tools, calls), with about the right length."""
        self.add(_dump(value))

    def add_digest(self, value: object) -> None:
        digest = sha256()
        self._feed(digest.update, value)
        self.add_bytes(digest.digest()[:DIGEST_BYTES])

    def add_tools(self, body: Mapping[str, object]) -> None:
        tools = body.get("tools") or body.get("functions")
        if tools:
            self.mark("tools")
            self.add_json(tools)

    def add_content(self, content: object, where: str) -> None:
        """A message's content: nothing, text, or parts."""
        if content is None:
            return
        if isinstance(content, str):
            self.add(content)
        elif isinstance(content, list):
            for number, part in enumerate(content):
                self._add_part(part, f"{where}[{number}]")
        elif isinstance(content, dict):
            self._add_part(content, where)
        else:
            raise BadRequest(f"{where}: expected text or a list of parts, got {kind_of(content)}")

    def _count(self, pieces: int = 1) -> None:
        self._pieces += pieces
        if self._pieces > MAX_PIECES:
            raise BadRequest(f"body: expected at most {MAX_PIECES} messages, prompts and parts")

    def _add_part(self, part: object, where: str) -> None:
        self._count()
        if isinstance(part, str):
            self.add(part)
            return
        if not isinstance(part, dict):
            raise BadRequest(f"{where}: expected an object, got {kind_of(part)}")
        for name in _TEXT_FIELDS:
            text = part.get(name)
            if isinstance(text, str):
                self.add(text)
                return
        if part.get("type") == "tool_result":
            self.add_content(part.get("content"), f"{where}.content")
        elif part.get("type") == "tool_use":
            self.add_json([part.get("name"), part.get("input")])
        else:
            self.add_digest(part)

    def _feed(self, update: Callable[[bytes], object], value: object) -> None:
        """Put JSON into a digest. An image is one long string: dumping it first would cost more than hashing it."""
        self._count()
        if isinstance(value, str):
            data = _utf8(value)
            update(b'"%d ' % len(data))
            update(data)
        elif isinstance(value, dict):
            update(b"{%d " % len(value))
            for name, member in value.items():
                self._feed(update, name)
                self._feed(update, member)
        elif isinstance(value, list) and value and isinstance(value[0], str | dict):
            update(b"[%d " % len(value))
            for member in value:
                self._feed(update, member)
        else:
            update(b"%d " % len(text := _utf8(_dump(value))))
            update(text)

    @property
    def is_empty(self) -> bool:
        return not self._parts

    @property
    def text(self) -> bytes:
        return b"".join(self._parts)

    @property
    def marks(self) -> Marks:
        return Marks(self._starts, self._roles)


#: Keys of a part's text, over all dialects.
_TEXT_FIELDS = ("text", "thinking", "refusal")


def _roles_and_texts(messages: Sequence[Any]) -> tuple[list[str], list[str], str] | None:
    """Return the roles, the texts and all text of messages that have nothing else; `None` if one has."""
    try:
        roles, texts = [message["role"] for message in messages], [message["content"] for message in messages]
        joined, _ = "".join(texts), "".join(roles)  # which refuse anything but text
    except (KeyError, TypeError):
        return None
    return (roles, texts, joined) if sum(map(len, messages)) == 2 * len(messages) else None


def _utf8(text: str) -> bytes:
    """JSON can carry half a surrogate pair; it must not stop a request that the engine may well accept."""
    return text.encode("utf-8", "surrogatepass")


def _dump(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


_KINDS = {type(None): "nothing", bool: "true or false", int: "a number", float: "a number", str: "text", list: "a list"}


def kind_of(value: object) -> str:
    """What a value is, in words safe to send back."""
    return "an empty list" if value == [] else _KINDS.get(type(value), "an object")
