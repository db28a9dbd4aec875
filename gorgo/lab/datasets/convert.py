"""Published traces in other forms, as lines of this project's: `gorgo datasets convert`.

Owns the readers of Azure's LLM inference traces and BurstGPT (CSV: times and lengths), of a CSV of one's own (which may
say how much of a prompt its session had before), of ShareGPT and LMSYS-Chat (JSON: texts without times), and of
Bailian's (JSON lines in blocks of 16 tokens). Leaves the form of a line to
`gorgo.lab.traces.rows`.

Where a trace has neither texts nor shared lengths, no block of a prompt is shared. Where it has texts, an id is a hash
of the text up to the end of its block, four bytes a token, and no text is written. Where it has no times, conversations
begin at random, and a turn follows the one before it after a think time, which a closed loop counts from the end of the
answer.
"""

from __future__ import annotations

import csv
import gzip
import json
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from hashlib import blake2b
from itertools import count, islice
from math import isfinite
from pathlib import Path
from typing import Any, TextIO, cast

from gorgo.config.atomic import PUBLIC, write_atomically
from gorgo.errors import TraceError
from gorgo.lab.traces import BLOCK_TOKENS
from gorgo.lab.traces.rows import MAX_TOKENS
from gorgo.lab.traces.text import BYTES_PER_TOKEN

#: Of Bailian's ids, and of those that are made of texts: vLLM's blocks.
SMALL_BLOCK_TOKENS = 16
#: Of a CSV of one's own: shared lengths are rounded down to them.
CSV_BLOCK_TOKENS = 64
#: Largest file that is read whole: the JSON of ShareGPT is 0.7 GB and takes some five times that in memory.
WHOLE_BYTES_MAX = 2 * 1024**3
#: Roles of answers, in the words of the releases.
_ANSWER_ROLES = frozenset({"gpt", "assistant", "chatgpt", "bing", "bard"})

Row = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """Times for conversations that have none: Poisson starts, and exponential think times; means."""

    starts_per_s: float = 1.0
    think_s: float = 30.0
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Conversion:
    """What became of a file: rows written, and rows that no replay can send (failed, empty, out of form)."""

    written: int
    left_out: int


def convert(source: Path, out: Path, *, form: str, timing: Timing | None = None) -> Conversion:
    """Write `source`, which has that form, as a trace; compressed where the name ends in .gz.

    Raises `TraceError` for an unknown form, and for a file that has another one.
    """
    reader = FORMS.get(form)
    if reader is None:
        raise TraceError(f"no form {form!r}; there are: {', '.join(FORMS)}")
    left_out = [0]
    try:
        rows = list(reader(source, timing or Timing(), left_out))
    except OSError as error:
        raise TraceError(f"{source}: {error.strerror or error}") from None
    except UnicodeDecodeError as error:
        raise TraceError(f"{source}: not UTF-8 ({error.reason} at byte {error.start})") from None
    if not rows:
        raise TraceError(f"{source}: no row of the form {form} that a replay can send")
    rows.sort(key=lambda row: row["timestamp"])
    text = b"".join(json.dumps(row).encode() + b"\n" for row in rows)
    write_atomically(out, gzip.compress(text, mtime=0) if out.suffix == ".gz" else text, mode=PUBLIC)
    return Conversion(len(rows), left_out[0])


def _azure(source: Path, _: Timing, left_out: list[int]) -> Iterator[Row]:
    """Azure LLM inference traces of 2023 and 2024."""
    yield from _lengths(source, ("TIMESTAMP", "ContextTokens", "GeneratedTokens"), _date_s, None, left_out)


def _own_csv(source: Path, _: Timing, left_out: list[int]) -> Iterator[Row]:
    """Times in seconds or as dates, lengths, and where the table has them sessions and shared lengths."""
    names = ("time", "input_tokens", "output_tokens")
    yield from _lengths(source, names, _seconds_or_date, "session_id", left_out, shared="shared_tokens")


def _burstgpt(source: Path, _: Timing, left_out: list[int]) -> Iterator[Row]:
    """BurstGPT; the second release has sessions. An answer without a token is a failure there."""
    names = ("Timestamp", "Request tokens", "Response tokens")
    yield from _lengths(source, names, float, "Session ID", left_out)


def _lengths(
    source: Path,
    names: Sequence[str],
    seconds: Callable[[str], float],
    session: str | None,
    left_out: list[int],
    *,
    shared: str | None = None,
) -> Iterator[Row]:
    """Yield rows of times and lengths.

    Their blocks have ids of their own, as nothing is known to be shared but what a column says: how many tokens of a
    prompt begin the prompt before it of its session.
    """
    begin_s: float | None = None
    block_tokens = BLOCK_TOKENS if shared is None else CSV_BLOCK_TOKENS
    ids, before = count(), dict[str, list[int]]()
    with _opened(source) as file:
        table = csv.DictReader(file)
        if missing := [name for name in names if name not in (table.fieldnames or ())]:
            found = ", ".join(table.fieldnames or ()) or "nothing"
            raise TraceError(f"{source}, line 1: no column {missing[0]!r} among {found[:200]}")
        for line, fields in enumerate(table, start=2):
            try:
                at_s = seconds(fields[names[0]] or "")
                tokens, answer = (int(float(fields[name] or "")) for name in names[1:])
                common = 0 if shared is None else int(float(fields.get(shared) or 0))
            except (OverflowError, ValueError):
                given = (*names, shared) if shared in (table.fieldnames or ()) else names
                shown = ", ".join(f"{name} {fields[name]!r}" for name in given if name is not None)
                raise TraceError(f"{source}, line {line}: {shown[:200]}; expected a time and numbers") from None
            if not (1 <= tokens <= MAX_TOKENS and 1 <= answer <= MAX_TOKENS):
                left_out[0] += 1
                continue
            begin_s = at_s if begin_s is None else begin_s
            if at_s < begin_s:
                raise TraceError(f"{source}, line {line}: {begin_s - at_s:,.0f} s before the first request")
            name = fields.get(session) if session is not None else None
            prompt = before.get(name, [])[: max(0, min(common, tokens)) // block_tokens] if name else []
            prompt += islice(ids, -(-tokens // block_tokens) - len(prompt))
            row = _row(at_s - begin_s, tokens, answer, prompt)
            if name:
                row["session_id"], before[name] = name, prompt[: tokens // block_tokens]
            yield row if shared is None else row | {"block_tokens": block_tokens}


def _bailian(source: Path, _: Timing, left_out: list[int]) -> Iterator[Row]:
    """Bailian's traces: blocks of 16 tokens, and chats of which each turn names the one before it."""
    chats: dict[object, object] = {}
    with _opened(source) as file:
        for line, text in enumerate(file, start=1):
            if not text.strip():
                continue
            fields = _object(text, source, line)
            try:
                at_s, tokens = float(fields["timestamp"]), int(fields["input_length"])
                answer, ids, chat = int(fields["output_length"]), list(fields["hash_ids"]), fields["chat_id"]
            except (KeyError, TypeError, ValueError) as error:
                expected = "timestamp, input_length, output_length, hash_ids and chat_id"
                raise TraceError(f"{source}, line {line}: {error}; expected {expected}") from None
            parent = fields.get("parent_chat_id", -1)
            chats[chat] = chats.get(parent, chat)
            blocks = -(-tokens // SMALL_BLOCK_TOKENS)
            if not (1 <= tokens <= MAX_TOKENS and 1 <= answer <= MAX_TOKENS) or len(ids) < tokens // SMALL_BLOCK_TOKENS:
                left_out[0] += 1
                continue
            row = _row(at_s, tokens, answer, ids[:blocks])
            yield row | {"session_id": f"{chats[chat]}", "block_tokens": SMALL_BLOCK_TOKENS}


def _conversations(source: Path, timing: Timing, left_out: list[int]) -> Iterator[Row]:
    """ShareGPT and LMSYS-Chat-1M, each as one list or as lines of JSON."""
    chance = random.Random(timing.seed)
    begin_s = 0.0
    for number, one in enumerate(_items(source)):
        messages = one.get("conversations", one.get("conversation"))
        name = one.get("id", one.get("conversation_id", number))
        if not isinstance(messages, list):
            raise TraceError(f"{source}, conversation {number + 1}: no list `conversations` or `conversation`")
        begin_s += chance.expovariate(timing.starts_per_s)
        at_s, digest, size, ends = begin_s, _TextBlocks(SMALL_BLOCK_TOKENS), 0, list[int]()
        turn = 0
        for role, text in map(_message, messages):
            data = text.encode(errors="surrogatepass")
            tokens, answer = -(-size // BYTES_PER_TOKEN), -(-len(data) // BYTES_PER_TOKEN)
            if role in _ANSWER_ROLES and tokens and answer:
                turn += 1
                think_s = chance.expovariate(1 / timing.think_s) if turn > 1 and timing.think_s else 0.0
                at_s += think_s
                row = _row(at_s, tokens, answer, digest.ids(tokens))
                row |= {"session_id": f"{name}", "turn": turn, "block_tokens": SMALL_BLOCK_TOKENS}
                yield (
                    row | {"boundaries": sorted(set(ends))} | ({"think_ms": round(think_s * 1000)} if turn > 1 else {})
                )
            elif role in _ANSWER_ROLES:
                left_out[0] += 1
            digest.add(role.encode() + b"\n" + data + b"\n")
            size = digest.size
            ends.append(-(-size // BYTES_PER_TOKEN))


class _TextBlocks:
    """Ids of a growing text: each a hash of all up to the end of its block."""

    def __init__(self, block_tokens: int) -> None:
        self._block_bytes = block_tokens * BYTES_PER_TOKEN
        self._chain = blake2b(digest_size=8)
        self._full: list[int] = []
        self._rest = b""
        self.size = 0

    def add(self, data: bytes) -> None:
        self.size += len(data)
        self._rest += data
        while len(self._rest) >= self._block_bytes:
            self._chain.update(self._rest[: self._block_bytes])
            self._full.append(int.from_bytes(self._chain.digest(), "little"))
            self._rest = self._rest[self._block_bytes :]

    def ids(self, tokens: int) -> list[int]:
        """Return an id per block of a prompt that ends here, the last of which may not be full."""
        blocks = -(-tokens * BYTES_PER_TOKEN // self._block_bytes)
        chain = self._chain.copy()
        chain.update(self._rest + b"end")
        return [*self._full, int.from_bytes(chain.digest(), "little")][:blocks]


def _message(message: object) -> tuple[str, str]:
    """Return role and text; of anything else neither."""
    if not isinstance(message, Mapping):
        return "", ""
    role, text = message.get("from", message.get("role")), message.get("value", message.get("content"))
    return f"{role}".lower(), text if isinstance(text, str) else ""


def _items(source: Path) -> Iterator[Mapping[str, Any]]:
    """Yield the objects of a list, or of lines."""
    with _opened(source) as file:
        first = file.read(1)
        while first.isspace():
            first = file.read(1)
        if first != "[":
            for line, text in enumerate(file, start=1):
                whole = first + text if line == 1 else text
                if whole.strip():
                    yield _object(whole, source, line)
            return
        text = first + file.read(WHOLE_BYTES_MAX)
    if len(text) > WHOLE_BYTES_MAX:
        raise TraceError(f"{source}: larger than {WHOLE_BYTES_MAX:,} characters; expected lines of JSON")
    try:
        items = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise TraceError(f"{source}: {error}; expected a list of conversations") from None
    for number, item in enumerate(items, start=1):
        if not isinstance(item, dict):
            raise TraceError(f"{source}, conversation {number}: expected an object")
        yield item


def _object(text: str, source: Path, line: int) -> Mapping[str, Any]:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise TraceError(f"{source}, line {line}: {error}; expected an object") from None
    if not isinstance(found, dict):
        raise TraceError(f"{source}, line {line}: expected a JSON object")
    return found


def _row(at_s: float, tokens: int, answer: int, ids: list[Any]) -> Row:
    return {"timestamp": round(at_s * 1000), "input_length": tokens, "output_length": answer, "hash_ids": ids}


def _seconds_or_date(text: str) -> float:
    try:
        found = float(text)
    except ValueError:
        return _date_s(text)
    if not isfinite(found):
        raise ValueError(text)
    return found


def _date_s(text: str) -> float:
    found = datetime.fromisoformat(text.strip())
    return (found if found.tzinfo else found.replace(tzinfo=UTC)).timestamp()


def _opened(source: Path) -> TextIO:
    """Open a plain or gzip file as text, without a byte order mark."""
    if source.suffix == ".gz":
        return cast(TextIO, gzip.open(source, "rt", encoding="utf-8-sig", newline=""))
    return source.open(encoding="utf-8-sig", newline="")


Reader = Callable[[Path, Timing, list[int]], Iterator[Row]]
#: Readers by the name of their form, in the order of the documentation.
FORMS: Mapping[str, Reader] = {
    "azure": _azure,
    "burstgpt": _burstgpt,
    "csv": _own_csv,
    "bailian": _bailian,
    "sharegpt": _conversations,
    "lmsys": _conversations,
}
