"""One line of a trace: Mooncake's form, and ART-Chat's, which adds the `request` body.

Owns the reading of a line and its errors. Strict about what a replay needs, lenient about the rest: unknown keys are
left alone, `hash_ids` may be strings, time stamps may be integers or fractions of a millisecond, and who asked
(`user_id`, or ART-Chat's `token_hash`), in which session (`session_id`) and at which `turn` is taken where it is told.

An id stands for the whole prefix up to and with its 512-token block, or one of `block_tokens`. The ids of a row without
a body must number ceil(input_length / 512), as in Mooncake's release. A row that hashes only its full blocks (floor) is
taken too: nothing is known of its rest, so that rest is shared with nobody. A row with a body needs no ids: its text is
its own.
ART-Chat's blocks are said to have 256 tokens; where the ids of a row with a body number so many, two and all before
them become one of 512, and ids of such a row that fit neither size are left out.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NoReturn

from gorgo.errors import TraceError

BLOCK_TOKENS = 512
#: Of ART-Chat's ids.
HALF_BLOCK_TOKENS = 256
#: Longest decimal string that is read as a number; longer ones, and other strings, are hashed to 64 bits.
MAX_DECIMAL_DIGITS = 20
#: Keys of the session in a row; the first present one counts.
SESSION_KEYS = ("session_id", "conversation_id")
#: Keys of the user in a row; the first present one counts.
USER_KEYS = ("user_id", "token_hash", "user_hash", "user")
#: Larger numbers are no lengths or times; floats hold whole numbers exactly up to here.
MAX_NUMBER = 2**53
#: Ten times the longest context of any model; a replay holds such a prompt's text, four bytes a token, in memory.
MAX_TOKENS = 10_000_000
#: First keys of other files of GORGO, with what they are and what reads them.
OTHER_FILES = {
    "gorgo_request_log": "the header of a compressed request log; expected the file unpacked",
    "gorgo_outcome_log": "the header of an outcome log; expected a trace (`gorgo learn` reads outcomes)",
}
#: Largest block of ids, tokens: that of any engine is smaller.
MAX_BLOCK_TOKENS = 65_536
#: Values of a line, by its commas and brackets; prose of the longest prompt has fewer. Each takes some 40 bytes.
MAX_VALUES = 1_000_000


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request of a trace.

    Parameters
    ----------
    index:
        Position in the file, from 0; filters do not change it, so it names the request.
    timestamp_s:
        As in the file; the filters rebase it to the first remaining request.
    input_tokens, output_tokens:
        Lengths; one token is four bytes of text in a replay.
    hash_ids:
        One per block of `block_tokens`, each standing for the whole prefix that its block ends.
    body:
        The chat completion body, where the trace has it.
    user:
        User by the name in the trace; None if unknown.
    boundaries:
        Tokens at the end of each message, ascending; empty: unknown, or those of the body.
    turns:
        Questions in the prompt, the new one included: 1 is a first question, more are a conversation. None: unknown.
    session:
        Session by its name in the trace; None if unknown.
    think_s:
        From the last token of the session's answer before it to this request; None if unknown.
    """

    index: int
    timestamp_s: float
    input_tokens: int
    output_tokens: int
    hash_ids: tuple[int, ...] = ()
    body: Mapping[str, Any] | None = None
    user: str | None = None
    turns: int | None = None
    boundaries: tuple[int, ...] = ()
    session: str | None = None
    think_s: float | None = None
    block_tokens: int = BLOCK_TOKENS


@dataclass(frozen=True, slots=True)
class _Line:
    """Where a value stands, for the errors."""

    file: str
    number: int
    row: Mapping[str, Any]

    def fail(self, field: str, expected: str) -> NoReturn:
        value = _short(self.row[field]) if field in self.row else "missing"
        raise TraceError(f"{self.file}, line {self.number}: {field} is {value}; expected {expected}")

    def number_of(self, field: str, *, expected: str) -> float:
        value = self.row.get(field)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= MAX_NUMBER:
            self.fail(field, expected)
        return float(value)

    def tokens(self, field: str) -> int:
        expected = f"a whole number of tokens, at least 1 and at most {MAX_TOKENS:,}"
        value = self.number_of(field, expected=expected)
        if value != int(value) or not 1 <= value <= MAX_TOKENS:
            self.fail(field, expected)
        return int(value)


def read_row(text: str, *, file: str, line_number: int, index: int, block_tokens: int | None = None) -> TraceRequest:
    """The request on one line, with ids of `block_tokens` tokens; None: those that the row names, or 512.

    Raises `TraceError` naming file, line, field, value and expectation.
    """
    line = _Line(file, line_number, _object(text, file, line_number))
    if (other := next((what for key, what in OTHER_FILES.items() if key in line.row), None)) is not None:
        raise TraceError(f"{file}, line {line_number}: {other}")
    block_tokens = _block_tokens(line, block_tokens)
    body = line.row.get("request")
    if body is not None and not (isinstance(body, dict) and isinstance(body.get("messages"), list)):
        line.fail("request", "a chat completion body with a list of messages")
    if body is not None and block_tokens != BLOCK_TOKENS:
        line.fail("request", f"no body in a trace whose ids are of {block_tokens} tokens")
    input_tokens = line.tokens("input_length")
    return TraceRequest(
        index=index,
        timestamp_s=line.number_of("timestamp", expected="milliseconds, at least 0") / 1000,
        input_tokens=input_tokens,
        output_tokens=line.tokens("output_length"),
        hash_ids=_hash_ids(line, input_tokens, needed=body is None, block_tokens=block_tokens),
        body=body,
        user=_name(line.row, USER_KEYS),
        turns=_turns(line.row.get("turn"), body),
        boundaries=_boundaries(line.row.get("boundaries"), input_tokens),
        session=_name(line.row, SESSION_KEYS),
        think_s=_think_s(line.row.get("think_ms")),
        block_tokens=block_tokens,
    )


def _block_tokens(line: _Line, wanted: int | None) -> int:
    """Return the size of a block: a row that names another than the file's first, or the option, is an error."""
    if "block_tokens" not in line.row:
        return BLOCK_TOKENS if wanted is None else wanted
    expected = f"a whole number of tokens from 1 to {MAX_BLOCK_TOKENS:,}"
    value = line.tokens("block_tokens")
    if value > MAX_BLOCK_TOKENS:
        line.fail("block_tokens", expected)
    if wanted is not None and value != wanted:
        line.fail("block_tokens", f"{wanted}, as in the lines before or by --block-tokens")
    return value


def _think_s(value: object) -> float | None:
    """Return a think time; an invalid one is unknown."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= MAX_NUMBER:
        return None
    return float(value) / 1000


def _boundaries(value: object, input_tokens: int) -> tuple[int, ...]:
    """Return the ends of messages; ends that do not ascend within the prompt are unknown."""
    if not isinstance(value, list):
        return ()
    ends = tuple(end for end in value if isinstance(end, int) and not isinstance(end, bool))
    ascend = len(ends) == len(value) and all(one < other for one, other in pairwise((0, *ends)))
    return ends if ascend and ends and ends[-1] <= input_tokens else ()


def _name(row: Mapping[str, Any], keys: Sequence[str]) -> str | None:
    """Return a user or session; an invalid one is unknown, not an error: a replay needs neither."""
    found = next((row[key] for key in keys if row.get(key) is not None), None)
    is_name = isinstance(found, str | int) and not isinstance(found, bool) and found != ""
    return str(found) if is_name else None


def _turns(value: object, body: Mapping[str, Any] | None) -> int | None:
    """Return the turns of the row, else those counted in the body."""
    if isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= MAX_NUMBER:
        return value
    if body is None:
        return None
    questions = sum(isinstance(message, dict) and message.get("role") == "user" for message in body["messages"])
    return questions or None


def _object(text: str, file: str, line_number: int) -> dict[str, Any]:
    values = text.count(",") + text.count("[") + text.count("{")
    if values > MAX_VALUES:
        raise TraceError(f"{file}, line {line_number}: some {values:,} values; expected {MAX_VALUES:,} at most")
    try:
        row = json.loads(text)
    except (ValueError, RecursionError) as error:  # the second for absurd nesting
        shown = _short(text.strip())
        raise TraceError(f"{file}, line {line_number}: {shown} is not JSON ({error}); expected an object") from None
    if not isinstance(row, dict):
        raise TraceError(f"{file}, line {line_number}: {_short(text)}; expected a JSON object")
    return row


def _hash_ids(line: _Line, input_tokens: int, *, needed: bool, block_tokens: int) -> tuple[int, ...]:
    ids = line.row.get("hash_ids")
    if ids is None and not needed:
        return ()
    if not isinstance(ids, list):
        line.fail("hash_ids", f"a list of ids, one per {block_tokens}-token block")
    full, blocks = input_tokens // block_tokens, math.ceil(input_tokens / block_tokens)
    if needed and len(ids) not in (full, blocks):
        expected = f"{blocks} ids for input_length {input_tokens} (one per {block_tokens} tokens)"
        line.fail("hash_ids", f"{expected}, not {len(ids)}; --block-tokens names another size")
    numbers = tuple(_hash_id(line, value) for value in ids)
    return numbers if needed else _of_a_body(numbers, input_tokens)


def _of_a_body(ids: tuple[int, ...], input_tokens: int) -> tuple[int, ...]:
    """Ids of blocks of 512 tokens, from blocks of 256 where their number says so; none if they are of neither size."""
    if _fits(len(ids), input_tokens, HALF_BLOCK_TOKENS):
        return _paired(ids)
    return ids if _fits(len(ids), input_tokens, BLOCK_TOKENS) else ()


def _fits(count: int, input_tokens: int, block_tokens: int) -> bool:
    """So many blocks are all of them, or all the full ones."""
    return count in (input_tokens // block_tokens, math.ceil(input_tokens / block_tokens))


def _paired(ids: tuple[int, ...]) -> tuple[int, ...]:
    """One id for two, which stands for them and all before, whether or not theirs did."""
    chain, paired = hashlib.blake2b(digest_size=8), list[int]()
    for place in range(0, len(ids), 2):
        chain.update(repr(ids[place : place + 2]).encode())
        paired.append(int.from_bytes(chain.digest(), "little"))
    return tuple(paired)


def _hash_id(line: _Line, value: object) -> int:
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    if not isinstance(value, str):
        line.fail("hash_ids", f"integers or strings, not {_short(value)}")
    if value.isascii() and value.isdecimal() and len(value) <= MAX_DECIMAL_DIGITS:
        return int(value)
    return int.from_bytes(hashlib.blake2b(value.encode(errors="surrogatepass"), digest_size=8).digest(), "little")


def _short(value: object) -> str:
    text = value if isinstance(value, str) else json.dumps(value, default=str)
    text = repr(text) if isinstance(value, str) else text
    return text if len(text) <= 60 else text[:57] + "..."
