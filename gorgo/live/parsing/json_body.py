"""A request's body as JSON: unpacked, parsed once, and edited without a change to any other byte.

Owns the statuses 400, 413 and 415, the fields that routing reads (`BodyFields`), and which content codings are read
(`unpack`). The replica gets the bytes as they came; the parsed form only serves to route. There are two exceptions:
`request_usage` adds an option, and `with_model` replaces a name. Leaves to `workers` where a large body is read, and to
the shells that the replica gets a compressed body without its coding.

gzip and deflate are always read; zstd and br where a library for them is installed (the extra `compression`; zstd is
part of Python 3.14). Each decompressor is asked for a piece at a time, so that no body is larger here than its bound by
more than a piece.
"""

from __future__ import annotations

import json
import re
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache, partial
from importlib import import_module
from itertools import islice
from typing import Any, TypeVar

from gorgo.core.numeric import TINY_BYTES, count_values, is_quick, parse_json, try_parse_json
from gorgo.core.prompt.fingerprint import ExactPrompt, Fingerprinter, PromptSketch
from gorgo.core.prompt.parse import Prompt, read_prompt, read_texts
from gorgo.core.record import mutable_record
from gorgo.errors import BadRequest
from gorgo.live.http.errors import HttpError
from gorgo.live.http.headers import Header, RequestHeaders, find, is_encoded

#: Lists and objects of one body, and brackets in its texts: megabytes of source code have fewer.
MAX_BRACKETS = 1 << 20
#: Values of one body, and commas in its texts. Two million tokens are longer than any context. 32 MiB can be sixteen
#: million numbers, which take seconds and a gigabyte.
MAX_VALUES = 1 << 21
#: Digits of one whole number, the least that Python can be set to. The time of a number grows with their square.
MAX_DIGITS = 640
_DECODER = json.JSONDecoder()

_Text = TypeVar("_Text", str, memoryview)

#: Where the values of `model` are in a body: from byte, to byte.
Spans = Sequence[tuple[int, int]]


def limit_digits() -> None:
    """Set the bound on digits for this process."""
    sys.set_int_max_str_digits(MAX_DIGITS)


def check_media_type(headers: Sequence[Header]) -> str | None:
    """Return the coding of a body of JSON, `None` for a plain one. Raises `HttpError` (415) for any other body.

    Without a content type it is read as JSON.
    """
    findings = headers.findings if isinstance(headers, RequestHeaders) else None
    if findings is not None and findings.is_json:
        return findings.coding
    coding = coding_of(headers) if is_encoded(headers) else None
    kind = find(headers, b"content-type")
    if kind is not None and not _is_json(kind):
        raise HttpError(415, "unsupported_media_type", "expected the content type application/json")
    if findings is not None:
        findings.is_json, findings.coding = True, coding
    return coding


def parse_body(body: bytes) -> dict[str, Any]:
    """Return the body as an object. Raises `HttpError` (400). Callers have counted the values of a large one."""
    try:
        parsed = parse_json(body)
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise not_json(body, error) from None
    except ValueError:
        raise HttpError(400, "invalid_json", f"expected whole numbers of at most {MAX_DIGITS} digits") from None
    except RecursionError:
        raise HttpError(400, "invalid_json", "the body is nested too deeply") from None
    if not isinstance(parsed, dict):
        raise HttpError(400, "invalid_json", "expected a JSON object as the body")
    return parsed


def not_json(body: bytes, error: json.JSONDecodeError | UnicodeDecodeError) -> HttpError:
    """Return the refusal of a body that is no JSON: where, and what the parser expected there.

    >>> not_json(b" ", json.JSONDecodeError("Expecting value", " ", 1)).message
    'the body is empty; expected a JSON object'
    """
    if not body.strip():
        return HttpError(400, "invalid_json", "the body is empty; expected a JSON object")
    if isinstance(error, UnicodeDecodeError):
        return HttpError(400, "invalid_json", f"the body is not JSON: byte {error.start} is not {error.encoding}")
    position = f"line {error.lineno}, column {error.colno}"
    return HttpError(400, "invalid_json", f"the body is not JSON: {position}: {error.msg}")


def check_counts(body: bytes) -> None:
    """Raise `HttpError` (400) for a body of more lists, objects or values than a request has."""
    if body.count(b"[") + body.count(b"{") > MAX_BRACKETS:
        raise HttpError(400, "invalid_json", f"expected at most {MAX_BRACKETS} lists and objects in the body")
    if count_values(body) > MAX_VALUES:
        raise too_many_values()


def too_many_values() -> HttpError:
    """Return the refusal of a body of more than `MAX_VALUES` values."""
    return HttpError(400, "invalid_json", f"expected at most {MAX_VALUES} values in the body")


def request_usage(body: bytes) -> bytes:
    """Return the same object with `stream_options` as its last key.

    >>> request_usage(b'{"stream": true }')
    b'{"stream": true ,"stream_options":{"include_usage":true}}'
    """
    end, whole = body.rindex(b"}"), memoryview(body)
    return b"".join((whole[:end], b',"stream_options":{"include_usage":true}', whole[end:]))


def with_model(body: bytes, name: str, spans: Spans | None = None) -> bytes:
    """Return the same object with another value of `model`; every other byte stays. Raises `HttpError` as `parse_body`.

    >>> with_model(b'{"model": "gpt-4", "messages": [{"model": 1.50}]}', "llama")
    b'{"model": "llama", "messages": [{"model": 1.50}]}'
    """
    value = json.dumps(name)
    if spans is not None:
        # Views: a slice would copy most of a large body once more.
        return b"".join(_spliced(memoryview(body), memoryview(value.encode()), spans))
    encoding = json.detect_encoding(body)
    text = body.decode(encoding, "surrogatepass")
    try:
        return "".join(_spliced(text, value, _model_places(text))).encode(encoding, "surrogatepass")
    except RecursionError:
        # Parsed once already, by a caller with a few frames less.
        raise HttpError(400, "invalid_json", "the body is nested too deeply") from None


def model_spans(body: bytes) -> Spans:
    """Return where the values of `model` are in a body of UTF-8. Takes as long as parsing the body.

    >>> model_spans(b'{"model": "gpt-4"}')
    [(10, 17)]
    """
    spans: list[tuple[int, int]] = []
    text = body.decode("utf-8", "surrogatepass")
    try:
        places = list(_model_places(text))
    except RecursionError:
        raise HttpError(400, "invalid_json", "the body is nested too deeply") from None
    for start, end in places:
        before = len(text[:start].encode("utf-8", "surrogatepass"))
        spans.append((before, before + len(text[start:end].encode("utf-8", "surrogatepass"))))
    return spans


def _spliced(whole: _Text, value: _Text, places: Iterable[tuple[int, int]]) -> Iterator[_Text]:
    done = 0
    for start, end in places:
        yield whole[done:start]
        yield value
        done = end
    yield whole[done:]


def _model_places(text: str) -> Iterable[tuple[int, int]]:
    """Yield the places of the values of `model` at the top of an object."""
    index = _past_blanks(text, text.index("{") + 1)
    while text[index] != "}":
        key, index = _DECODER.raw_decode(text, index)
        start = _past_blanks(text, _past_blanks(text, index) + 1)
        _, end = _DECODER.raw_decode(text, start)
        if key == "model":
            yield start, end
        index = _past_blanks(text, end)
        if text[index] == ",":
            index = _past_blanks(text, index + 1)


def _past_blanks(text: str, index: int) -> int:
    blanks = _BLANKS.match(text, index)
    assert blanks is not None, "the pattern matches nothing too"
    return blanks.end()


_BLANKS = re.compile(r"[ \t\r\n]*")


def _is_json(content_type: bytes) -> bool:
    kind = content_type.split(b";", 1)[0].strip().lower()
    return kind == b"application/json" or (kind.startswith(b"application/") and kind.endswith(b"+json"))


# What routing needs of a request's body: some of its top-level fields, and a sketch of its prompt. It is parsed once:
# here, or in the process of `worker`.


#: Fields by which engines and gateways pick a worker, a host or a priority, or name a request of another client; and by
#: which an engine runs code (SGLang unpickles `custom_logit_processor`), reads files or fetches as a client says.
ENGINE_FIELDS = frozenset(
    {
        *("bootstrap_host", "bootstrap_port", "bootstrap_room", "data_parallel_rank", "data_parallel_rank_decode"),
        *("custom_logit_processor", "custom_params", "disagg_prefill_dp_rank", "dp_rank", "ec_transfer_params"),
        *("extra_args", "kv_transfer_params", "lora_path", "media_io_kwargs", "mm_processor_kwargs", "nvext"),
        *("prefill_instance_id", "decode_instance_id", "priority", "request_id", "rid", "routed_dp_rank"),
        *("session_params", "vllm_xargs"),
    }
)
#: Fields that are read after the parse.
READ_FIELDS = ENGINE_FIELDS | {
    *("model", "lora_path", "stream", "store", "previous_response_id", "stream_options", "sampling_params"),
    *("max_completion_tokens", "max_tokens", "max_output_tokens", "max_new_tokens"),
    *("cache_salt", "n", "best_of"),
}
#: Characters of a field's text in a body that another process reads: names and ids are shorter.
MAX_TEXT = 4096
#: Members of a field's object in such a body; the rest is left out.
MAX_MEMBERS = 64
#: A body up to here is parsed before its values are counted: of nested lists, the worst, msgspec makes values within
#: 20 ms. What takes longer is to read them, and of texts there is little to read.
UNCOUNTED_BYTES = 192 * 1024
#: Bytes of token ids that another process sends with such a body: 262,144 ids.
MAX_ID_BYTES = 1 << 20


@mutable_record
class BodyFields:
    """One body, read.

    Parameters
    ----------
    values:
        By name; all that are in `READ_FIELDS`, perhaps more.
    sketch:
        Of the prompt.
    tokens:
        Exact length of the prompt, where the client sent token ids.
    spans:
        Places of the model's name; `None` if they are not known.
    prompt:
        Its text; of a body that another process has read, only one prompt of token ids.
    exact:
        Its exact tokens, where they are counted after the parse.
    """

    values: Mapping[str, Any]
    sketch: PromptSketch
    tokens: int | None
    spans: Spans | None = None
    prompt: Prompt | None = None
    exact: ExactPrompt | None = None

    @property
    def token_ids(self) -> bytes | None:
        """Return the packed ids of a prompt that the client sent as ids."""
        prompt = self.prompt
        return prompt.text if prompt is not None and prompt.tokens is not None and prompt.is_single else None


def read_quick_fields(route: str, body: bytes, fingerprinter: Fingerprinter) -> BodyFields | None:
    """Read a body here; `None` if another process should. Raises `HttpError` (400)."""
    parsed = None
    if TINY_BYTES < len(body) <= UNCOUNTED_BYTES and type(parsed := try_parse_json(body)) is dict:
        # Counting takes nearly as long as the parse, and decides nothing where all that is read is text.
        prompt = read_texts(route, parsed)
        if prompt is not None:
            return BodyFields(parsed, fingerprinter.sketch(prompt), None, prompt=prompt)
    if not is_quick(body):
        return None
    return _fields_of(route, parsed, fingerprinter) if type(parsed) is dict else read_fields(route, body, fingerprinter)


def read_fields(route: str, body: bytes, fingerprinter: Fingerprinter) -> BodyFields:
    """Read a body that is quick, or whose values have been counted. Raises `HttpError` (400)."""
    return _fields_of(route, parse_body(body), fingerprinter)


def _fields_of(route: str, parsed: Mapping[str, Any], fingerprinter: Fingerprinter) -> BodyFields:
    try:
        prompt = read_prompt(route, parsed)
    except BadRequest as error:
        raise HttpError(400, "invalid_request", str(error)) from None
    return BodyFields(parsed, fingerprinter.sketch(prompt), prompt.tokens, prompt=prompt)


def read_large_body(route: str, body: bytes, fingerprinter: Fingerprinter) -> BodyFields:
    """Read a body of any size, for another process: only what is small is in the result."""
    if b"\0" in body:
        # UTF-16 and UTF-32 are full of them; JSON on the wire is UTF-8 (RFC 8259).
        raise HttpError(400, "invalid_json", "expected a large body in UTF-8")
    check_counts(body)
    fields = read_fields(route, body, fingerprinter)
    values = {name: _small(name, fields.values[name]) for name in READ_FIELDS & fields.values.keys()}
    ids = fields.token_ids
    sent = fields.prompt if ids is not None and len(ids) <= MAX_ID_BYTES else None
    return BodyFields(values, fields.sketch, fields.tokens, model_spans(body), sent)


def _small(name: str, value: object) -> object:
    """Return a value without lists, and without the containers in an object."""
    if isinstance(value, str) and len(value) > MAX_TEXT:
        raise HttpError(400, "invalid_request", f"{name}: expected at most {MAX_TEXT} characters")
    if isinstance(value, dict):
        members = islice(value.items(), MAX_MEMBERS)
        return {key: member for key, member in members if isinstance(member, int | float | None)}
    return [] if isinstance(value, list) else value


#: Unpacked at once, and at most what is unpacked in the event loop: half a millisecond of gzip.
PIECE_BYTES = 192 * 1024
#: Growth of a body beyond `FREE_BYTES`. Prompts of many repetitions grow by a hundred, a bomb of gzip by a thousand.
MAX_RATIO = 256
#: A body up to here may grow without bound, since it is small.
FREE_BYTES = 1024 * 1024
#: Members of a gzip body, or frames of a zstd body: clients send one, and an empty one costs as much as a request.
MAX_PARTS = 64
#: Memory that a zstd body may ask for, as a power of two: 8 MiB, the most that RFC 9659 lets a sender of HTTP ask for.
ZSTD_WINDOW_LOG = 23
#: Read at once of the compressed body: a decompressor copies what it has not used yet.
_READ_BYTES = 64 * 1024
_ALIASES = {"x-gzip": "gzip"}


def coding_of(headers: Iterable[Header]) -> str | None:
    """Return the content coding of a request's body, `None` for a plain one. Raises `HttpError` (415).

    >>> coding_of([(b"content-encoding", b"GZIP")])
    'gzip'
    """
    said = b",".join(value for name, value in headers if name == b"content-encoding").decode("latin-1").lower()
    codings = [coding for part in said.split(",") if (coding := part.strip()) not in ("", "identity")]
    if not codings:
        return None
    coding = _ALIASES.get(codings[0], codings[0])
    if len(codings) == 1 and coding in _readers():
        return coding
    names = ", ".join(_readers())
    message = f"expected a body without content-encoding, or with one of: {names}"
    raise HttpError(415, "unsupported_media_type", message, headers=((b"accept-encoding", names.encode()),))


def unpack_quick(coding: str, body: bytes, *, limit: int) -> bytes | None:
    """Return the unpacked body; `None` for one of more than `PIECE_BYTES`, which another process should unpack.

    Raises `HttpError` as `unpack`.
    """
    if len(body) > PIECE_BYTES:
        return None
    parts: list[bytes] = []
    size = 0
    for piece in unpack(coding, body, limit=limit):
        parts.append(piece)
        size += len(piece)
        if size > PIECE_BYTES:
            return None
    return b"".join(parts)


def unpack(coding: str, body: bytes, *, limit: int) -> Iterator[bytes]:
    """Yield the body unpacked, in pieces of about `PIECE_BYTES` and `limit` bytes in all.

    Raises `HttpError`: 400 for bytes that are not of this coding or end too early, 413 for more than the bounds admit.
    """
    grown = max(FREE_BYTES, MAX_RATIO * len(body))
    size = 0
    try:
        for piece in _readers()[coding](body):
            size += len(piece)
            if size > limit:
                raise HttpError(413, "request_too_large", f"the unpacked body is larger than {limit} bytes")
            if size > grown:
                message = f"the unpacked body is more than {MAX_RATIO} times as large as the one that was sent"
                raise HttpError(413, "request_too_large", message)
            if piece:
                yield piece
    except HttpError:
        raise
    except Exception:  # noqa: BLE001 - each library has an error of its own, and all mean the same
        message = f"the body is not whole {coding}, which its content-encoding says"
        raise HttpError(400, "invalid_request", message) from None


_Reader = Callable[[bytes], Iterator[bytes]]


@lru_cache(1)
def _readers() -> dict[str, _Reader]:
    """Return what yields the pieces of a body, by coding. Libraries are imported with the first compressed body."""
    readers: dict[str, _Reader] = {"gzip": _gzip, "deflate": _deflate}
    for coding, find_library in (("zstd", _find_zstd), ("br", _find_brotli)):
        reader = find_library()
        if reader is not None:
            readers[coding] = reader
    return readers


def _find_zstd() -> _Reader | None:
    for name in ("compression.zstd", "backports.zstd"):
        try:
            library = import_module(name)
        except ImportError:
            continue
        options = {library.DecompressionParameter.window_log_max: ZSTD_WINDOW_LOG}
        return partial(_zstd, new=partial(library.ZstdDecompressor, options=options))
    return None


def _find_brotli() -> _Reader | None:
    """Return the reader of br, where the library can be told how much to unpack at once: brotli 1.2 and newer."""
    try:
        library = import_module("brotli")
        library.Decompressor().process(b"", output_buffer_limit=1)
    except (ImportError, AttributeError, TypeError):
        return None
    return lambda body: _brotli(body, library.Decompressor())


def _reads(body: bytes) -> Iterator[bytes]:
    for start in range(0, len(body), _READ_BYTES):
        yield body[start : start + _READ_BYTES]


def _gzip(body: bytes) -> Iterator[bytes]:
    return _zlib(body, 16 + zlib.MAX_WBITS)


def _deflate(body: bytes) -> Iterator[bytes]:
    """Read deflate within zlib's frame, as RFC 9110 has it, or without, as some clients send it."""
    framed = len(body) > 1 and body[0] & 15 == 8 and (body[0] << 8 | body[1]) % 31 == 0
    return _zlib(body, zlib.MAX_WBITS if framed else -zlib.MAX_WBITS)


def _zlib(body: bytes, wbits: int) -> Iterator[bytes]:
    reader = zlib.decompressobj(wbits)
    members = 1
    for data in _reads(body):
        while data:
            if reader.eof:
                members = _next_member(members)
                reader = zlib.decompressobj(wbits)
            yield reader.decompress(data, PIECE_BYTES)
            data = reader.unused_data if reader.eof else reader.unconsumed_tail
    while not reader.eof:
        # All has been read, and a piece was full.
        piece = reader.decompress(b"", PIECE_BYTES)
        if not piece:
            raise EOFError
        yield piece


def _zstd(body: bytes, new: Callable[[], Any]) -> Iterator[bytes]:
    reader = new()
    members = 1
    for data in _reads(body):
        while data or not (reader.eof or reader.needs_input):
            if reader.eof:
                members = _next_member(members)
                reader = new()
            yield reader.decompress(data, PIECE_BYTES)
            data = reader.unused_data if reader.eof else b""
    if not reader.eof:
        raise EOFError


def _brotli(body: bytes, reader: Any) -> Iterator[bytes]:
    for data in _reads(body):
        piece = reader.process(data, output_buffer_limit=PIECE_BYTES)
        # What it retains it gives without more input, whatever `can_accept_more_data` says.
        while piece or not (reader.is_finished() or reader.can_accept_more_data()):
            yield piece
            piece = reader.process(b"", output_buffer_limit=PIECE_BYTES)
    if not reader.is_finished():
        raise EOFError


def _next_member(members: int) -> int:
    if members >= MAX_PARTS:
        raise ValueError(f"more than {MAX_PARTS} members")
    return members + 1
