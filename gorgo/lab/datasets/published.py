"""Data sets that others publish: their download, and the conversion of other forms to this project's.

Owns the list of data sets that others publish (where they are, under which licence, and how to know that one arrived
whole) and their download. A file under the final name is always complete and, where its sha256 is known, correct. An
existing file is never overwritten: a correct one is used, another one is an error.

`gorgo datasets convert` has readers of Azure's LLM inference traces and BurstGPT (CSV: times and lengths), of a CSV of
one's own (which may say how much of a prompt its session had before), of ShareGPT and LMSYS-Chat (JSON: texts without
times), and of Bailian's (JSON lines in blocks of 16 tokens). The form of a line is left to `gorgo.lab.traces`.

Where a trace has neither texts nor shared lengths, no block of a prompt is shared. Where it has texts, an id is a hash
of the text up to the end of its block, four bytes a token, and no text is written. Where it has no times, conversations
begin at random, and a turn follows the one before it after a think time, which a closed loop counts from the end of the
answer.
"""

from __future__ import annotations

import csv
import gzip
import hashlib
import json
import os
import random
import shlex
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from hashlib import blake2b
from itertools import count, islice
from math import isfinite
from pathlib import Path
from typing import IO, Any, TextIO, cast

import httpx

from gorgo.config.atomic import PUBLIC, create_file, write_atomically
from gorgo.errors import FetchError, TraceError
from gorgo.lab.prompt_text import BYTES_PER_TOKEN
from gorgo.lab.traces import BLOCK_TOKENS, MAX_TOKENS

MOONCAKE_URL = "https://raw.githubusercontent.com/kvcache-ai/Mooncake/main/FAST25-release/traces/"
ART_CHAT_URL = "https://huggingface.co/datasets/alessiotoniolo/ART-Chat-2.5M/resolve/main/jsonl/"
MIB = 1024 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteDataset:
    """A data set that is fetched, not shipped.

    Parameters
    ----------
    name, about, licence:
        For display.
    url, file:
        Source, and the name of the file here.
    bytes_max:
        Longest file; a longer one is not this data set.
    sha256:
        Of the file; None if not published.
    """

    name: str
    about: str
    licence: str
    url: str
    file: str
    bytes_max: int
    sha256: str | None = None


def remote_datasets() -> list[RemoteDataset]:
    """All that can be fetched, by name."""
    return sorted([*_mooncake(), *_art_chat()], key=lambda one: one.name)


def remote_dataset(name: str) -> RemoteDataset:
    """The one of that name; raises `TraceError` listing the names."""
    by_name = {one.name: one for one in remote_datasets()}
    if name not in by_name:
        raise TraceError(f"no data set {name!r} can be fetched; there are: {', '.join(by_name)}")
    return by_name[name]


def _mooncake() -> Iterator[RemoteDataset]:
    """The traces of Mooncake's FAST'25 release. The conversation trace has 3 MB; the others are of its kind."""
    traces = {
        "conversation": ("conversation", "b8cbb061a85206d729d91cdc2981f43c9e0d99209dce588d3af5f7934408b9df"),
        "toolagent": ("tool & agent", None),
        "synthetic": ("synthetic", None),
    }
    for name, (about, sha256) in traces.items():
        file = f"{name}_trace.jsonl"
        yield RemoteDataset(
            name=f"mooncake-{name}",
            about=f"Mooncake FAST'25, {about}",
            licence="Apache-2.0",
            url=MOONCAKE_URL + file,
            file=file,
            bytes_max=256 * MIB,
            sha256=sha256,
        )


def _art_chat() -> Iterator[RemoteDataset]:
    """ART-Chat-2.5M, a file per day. The week has about 150 GB by its page; this project has not fetched it."""
    for day in range(20260401, 20260408):
        file = f"artchat_week_{day}.jsonl"
        yield RemoteDataset(
            name=f"art-chat-week-{day}",
            about=f"ART-Chat-2.5M, April {day % 100}, 2026; about 20 GB",
            licence="see the data set's page",
            url=ART_CHAT_URL + file,
            file=file,
            bytes_max=128 * 1024 * MIB,
        )


CONNECT_TIMEOUT_S = 10.0
#: Longest time between two pieces of a body.
READ_TIMEOUT_S = 60.0
#: A day of ART-Chat at 2 MB/s; a server that drips is given up.
FETCH_MAX_S = 6 * 3600.0
#: Hugging Face needs two; more is a loop.
REDIRECTS_MAX = 5
CHUNK_BYTES = 1 << 20

#: Called with the bytes so far and, if known, the bytes in total.
OnProgress = Callable[[int, int | None], None]


@dataclass(frozen=True, slots=True)
class Fetched:
    """A file that is there now. `checked`: its sha256 is the known one; `fresh`: it was not there before."""

    path: Path
    sha256: str
    checked: bool
    fresh: bool


def fetch(
    dataset: RemoteDataset,
    folder: Path,
    *,
    url: str | None = None,
    on_progress: OnProgress | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> Fetched:
    """Write the file of the data set into `folder`, which is created if needed; `url` is a mirror.

    Raises `FetchError` with the URL, the failure and the steps to fetch the file by hand.
    """
    target = folder / dataset.file
    if target.exists():
        return _already_there(dataset, target)
    source = url or dataset.url
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with _temporary(target) as part:
            with create_file(part) as file:
                sha256 = _download(source, file, dataset.bytes_max, on_progress, clock)
            if dataset.sha256 not in (None, sha256):
                raise FetchError(f"its sha256 is {sha256}, expected {dataset.sha256}: not the file that is meant")
            part.replace(target)
    except (FetchError, httpx.HTTPError, httpx.InvalidURL) as error:
        raise FetchError(_explained(source, target, error)) from None
    return Fetched(target, sha256, checked=dataset.sha256 is not None, fresh=True)


def _already_there(dataset: RemoteDataset, target: Path) -> Fetched:
    with target.open("rb") as file:
        sha256 = hashlib.file_digest(file, "sha256").hexdigest()
    if dataset.sha256 not in (None, sha256):
        raise FetchError(
            f"{target} is there already and is not {dataset.name}: its sha256 is {sha256}, expected {dataset.sha256}; "
            "nothing was fetched, move it away first"
        )
    return Fetched(target, sha256, checked=dataset.sha256 is not None, fresh=False)


@contextmanager
def _temporary(target: Path) -> Iterator[Path]:
    """Return a temporary path beside the target; the file there is removed afterwards."""
    part = target.with_name(f".{target.name}.{os.getpid()}.part")
    try:
        yield part
    finally:
        part.unlink(missing_ok=True)


def _download(
    url: str, file: IO[bytes], bytes_max: int, on_progress: OnProgress | None, clock: Callable[[], float]
) -> str:
    """Writes the answer's bytes to `file` and returns their sha256."""
    digest, done, deadline = hashlib.sha256(), 0, clock() + FETCH_MAX_S
    with _client() as client, client.stream("GET", url) as response:
        if response.status_code != httpx.codes.OK:
            raise FetchError(f"HTTP status {response.status_code} {response.reason_phrase}".rstrip())
        total = _content_length(response)
        for chunk in response.iter_raw(CHUNK_BYTES):
            done += len(chunk)
            if max(done, total or 0) > bytes_max:
                raise FetchError(f"larger than {bytes_max:,} bytes: not the file that is meant")
            if clock() > deadline:
                raise FetchError(f"not done after {FETCH_MAX_S / 3600:.0f} hours, at {done:,} bytes")
            digest.update(chunk)
            file.write(chunk)
            if on_progress is not None:
                on_progress(done, total)
    if not done:
        raise FetchError("the answer is empty")
    return digest.hexdigest()


def _client() -> httpx.Client:
    return httpx.Client(
        follow_redirects=True,
        max_redirects=REDIRECTS_MAX,
        timeout=httpx.Timeout(READ_TIMEOUT_S, connect=CONNECT_TIMEOUT_S),
        headers={"accept-encoding": "identity"},  # the checksum is of the written bytes
        event_hooks={"response": [_refuse_downgrade]},
    )


def _refuse_downgrade(response: httpx.Response) -> None:
    """Raise `FetchError` for a redirect from https to another scheme: the rest would travel unprotected."""
    if response.has_redirect_location and response.url.scheme == "https":
        location = response.url.join(response.headers["location"])
        if location.scheme != "https":
            raise FetchError(f"redirected from https to {location}")


def _content_length(response: httpx.Response) -> int | None:
    value = response.headers.get("content-length", "")
    return int(value) if value.isdecimal() else None


def _explained(url: str, target: Path, error: Exception) -> str:
    reason = str(error) or type(error).__name__
    if isinstance(error, httpx.ConnectError | httpx.ConnectTimeout):
        reason = f"no connection ({reason}); is this machine offline, or behind a proxy that HTTPS_PROXY should name?"
    return f"{url}: {reason}\nnothing was written; by hand: {shlex.join(['curl', '-fL', '-o', str(target), url])}"


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
            columns = ", ".join(table.fieldnames or ()) or "nothing"
            raise TraceError(f"{source}, line 1: no column {missing[0]!r} among {columns[:200]}")
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
        parsed = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise TraceError(f"{source}, line {line}: {error}; expected an object") from None
    if not isinstance(parsed, dict):
        raise TraceError(f"{source}, line {line}: expected a JSON object")
    return parsed


def _row(at_s: float, tokens: int, answer: int, ids: list[Any]) -> Row:
    return {"timestamp": round(at_s * 1000), "input_length": tokens, "output_length": answer, "hash_ids": ids}


def _seconds_or_date(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        return _date_s(text)
    if not isfinite(seconds):
        raise ValueError(text)
    return seconds


def _date_s(text: str) -> float:
    date = datetime.fromisoformat(text.strip())
    return (date if date.tzinfo else date.replace(tzinfo=UTC)).timestamp()


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
