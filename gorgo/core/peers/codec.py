"""Wire form of a report: JSON arrays in the order of the records' fields, hashes in base64.

Owns the order of fields and the bounds of each value. Leaves the meaning of a report to `exchange`. Whatever a store or
a stranger has written, `decode_report` returns a report within all bounds or raises `BadReport`: counts and times are
finite and not negative, so that a report can only add load.
"""

from __future__ import annotations

import json
from base64 import b64decode, b64encode
from binascii import Error as Base64Error
from collections.abc import Callable
from itertools import pairwise
from typing import Any, TypeVar

from gorgo.core.numeric import parse_json
from gorgo.core.peers.records import (
    FORMAT,
    MARK_KINDS,
    MAX_ANSWERS,
    MAX_CACHE_REPORTS,
    MAX_COUNT,
    MAX_MARKS,
    MAX_NAME_BYTES,
    MAX_PREFILL_S,
    MAX_PREFIXES,
    MAX_REPLICAS,
    MAX_SECONDS,
    LearnedSpeed,
    PeerReport,
    PeerStatus,
    PrefixMarks,
    ReplicaLoad,
    SharedAnswer,
    SharedCacheReport,
    StartedPrefill,
)
from gorgo.errors import BadReport, OtherFormat

# Values of a report's fields as they come in JSON: each is within its bounds, or `BadReport` says where it is not.


#: Of one hash of a prefix.
HASH_BYTES = 8
_Record = TypeVar("_Record")


def read_records(value: Any, most: int, path: str, decode: Callable[[Any, str], _Record]) -> tuple[_Record, ...]:
    if not isinstance(value, list) or len(value) > most:
        raise BadReport(f"{path} is no array of at most {most} entries")
    return tuple([decode(each, f"{path}[{number}]") for number, each in enumerate(value)])


def read_array(value: Any, length: int, path: str) -> list[Any]:
    if not isinstance(value, list) or len(value) != length:
        raise BadReport(f"{path} is no array of {length} values")
    return value


def read_hashes(value: Any, path: str) -> bytes:
    try:
        return b64decode(_text(value, path), validate=True)
    except (Base64Error, ValueError):
        raise BadReport(f"{path} has hashes that are no base64") from None


def read_count(value: Any, path: str) -> int:
    if type(value) is not int or not 0 <= value <= MAX_COUNT:
        raise BadReport(f"{path} has {shown(value)}; expected a whole number from 0 to {MAX_COUNT}")
    return value


def read_number(value: Any, most: float, path: str) -> float:
    # No comparison with NaN is true.
    if type(value) not in (int, float) or not 0.0 <= value <= most:
        raise BadReport(f"{path} has {shown(value)}; expected a number from 0 to {most:g}")
    return float(value)


def read_flag(value: Any, path: str) -> bool:
    if type(value) is not bool:
        raise BadReport(f"{path} has {shown(value)}; expected true or false")
    return value


def _text(value: Any, path: str) -> str:
    if type(value) is not str:
        raise BadReport(f"{path} has {shown(value)}; expected a text")
    return value


def read_name(value: Any, path: str) -> str:
    text = _text(value, path)
    if len(text.encode("utf-8", "surrogatepass")) > MAX_NAME_BYTES:
        raise BadReport(f"{path} has a name longer than {MAX_NAME_BYTES} bytes")
    return text


def read_optional_name(value: Any, path: str) -> str | None:
    return None if value is None else read_name(value, path)


def shown(value: Any) -> str:
    """Return a value for an error; of an array or an object its kind alone."""
    return f"{value!r:.20}" if isinstance(value, int | float | str) else type(value).__name__


#: Longest text that is parsed: a report at every bound at once is not written by a router.
MAX_BYTES = 4 * 2**20


def encode_report(report: PeerReport) -> bytes:
    """Return the wire form.

    >>> encode_report(PeerReport("eu/1", 7, loads=(ReplicaLoad("a", requests=2),)))
    b'[2,"eu/1",7,"",[["a",2,0,0,0,0,0.0,0.0]],[],[],[],[],[],["",0,false,null,[],[]]]'
    """
    status = report.status
    fields = [
        FORMAT,
        report.router,
        report.seq,
        report.key_id,
        [
            [
                load.replica,
                load.requests,
                load.prompt_tokens,
                load.waiting_requests,
                load.waiting_tokens,
                load.uncached_tokens,
                round(load.prefill_s, 6),
                round(load.decoded_s, 3),
            ]
            for load in report.loads
        ],
        [
            [
                marks.replica,
                marks.model,
                list(marks.blocks),
                b64encode(marks.hashes).decode(),
                MARK_KINDS.index(marks.kind),
            ]
            for marks in report.prefixes
        ],
        [[each.replica, each.model, each.confirmed_tokens, each.found_tokens] for each in report.cache_reports],
        [
            [each.replica, b64encode(each.prompt).decode(), each.prompt_tokens, each.output_tokens]
            for each in report.answers
        ],
        [[each.replica, round(each.prefill_s, 6)] for each in report.prefills],
        [[each.replica, round(each.spent_s, 6), round(each.prior_s, 6)] for each in report.speeds],
        [
            status.policy,
            status.weights_version,
            status.frozen,
            status.model,
            list(status.draining),
            list(status.ejected),
        ],
    ]
    return json.dumps(fields, separators=(",", ":")).encode()


def decode_report(text: bytes) -> PeerReport:
    """Return the report of a wire form. Raises `BadReport` with the place of what is wrong."""
    if len(text) > MAX_BYTES:
        raise BadReport(f"a report has {len(text)} bytes; expected at most {MAX_BYTES}")
    try:
        fields = parse_json(text)
    except (ValueError, RecursionError):
        raise BadReport("a report is no JSON text") from None
    if isinstance(fields, list) and fields and fields[0] != FORMAT:
        raise OtherFormat(f"a report has format {shown(fields[0])}; expected {FORMAT}")
    _, router, seq, key_id, loads, prefixes, cache_reports, *learned = read_array(fields, 11, "report")
    answers, prefills, speeds, status = learned
    return PeerReport(
        router=read_name(router, "router"),
        seq=read_count(seq, "seq"),
        key_id=read_name(key_id, "key_id"),
        loads=read_records(loads, MAX_REPLICAS, "loads", _load),
        prefixes=read_records(prefixes, MAX_PREFIXES, "prefixes", _marks),
        cache_reports=read_records(cache_reports, MAX_CACHE_REPORTS, "cache_reports", _cache_report),
        answers=read_records(answers, MAX_ANSWERS, "answers", _answer),
        prefills=read_records(prefills, MAX_REPLICAS, "prefills", _prefill),
        speeds=read_records(speeds, MAX_REPLICAS, "speeds", _speed),
        status=_status(status),
    )


def _load(value: Any, path: str) -> ReplicaLoad:
    replica, *counts, prefill_s, decoded_s = read_array(value, 8, path)
    requests, prompt_tokens, waiting_requests, waiting_tokens, uncached_tokens = (
        read_count(each, path) for each in counts
    )
    if waiting_requests > requests or waiting_tokens > prompt_tokens or uncached_tokens > waiting_tokens:
        raise BadReport(f"{path} has more requests or tokens before a first token than in flight")
    return ReplicaLoad(
        read_name(replica, path),
        requests,
        prompt_tokens,
        waiting_requests,
        waiting_tokens,
        uncached_tokens,
        read_number(prefill_s, MAX_SECONDS, path),
        read_number(decoded_s, float(MAX_COUNT), path),
    )


def _marks(value: Any, path: str) -> PrefixMarks:
    replica, model, blocks, text, number = read_array(value, 5, path)
    depths = tuple(read_records(blocks, MAX_MARKS, path, read_count))
    hashes = read_hashes(text, path)
    if read_count(number, path) >= len(MARK_KINDS):
        raise BadReport(f"{path} has kind {number}; expected at most {len(MARK_KINDS) - 1}")
    kind = MARK_KINDS[number]
    if kind in ("withdrawn", "evicted"):
        if depths or len(hashes) % HASH_BYTES or len(hashes) > HASH_BYTES * MAX_MARKS:
            raise BadReport(f"{path} is {kind}; expected no depths and at most {MAX_MARKS} hashes of 8 bytes")
    elif len(hashes) != HASH_BYTES * len(depths):
        raise BadReport(f"{path} has {len(hashes)} bytes of hashes for {len(depths)} depths; expected 8 for each")
    if any(lower >= deeper for lower, deeper in pairwise(depths)) or 0 in depths:
        raise BadReport(f"{path} has depths that do not ascend from 1")
    return PrefixMarks(read_name(replica, path), read_optional_name(model, path), depths, hashes, kind)


def _cache_report(value: Any, path: str) -> SharedCacheReport:
    replica, model, confirmed, cached = read_array(value, 4, path)
    confirmed_tokens = read_number(confirmed, float(MAX_COUNT), path)
    if confirmed_tokens <= 0.0:
        raise BadReport(f"{path} has no confirmed tokens")
    found_tokens = read_number(cached, float(MAX_COUNT), path)
    return SharedCacheReport(read_name(replica, path), read_optional_name(model, path), confirmed_tokens, found_tokens)


def _answer(value: Any, path: str) -> SharedAnswer:
    replica, text, prompt_tokens, output_tokens = read_array(value, 4, path)
    prompt = read_hashes(text, path)
    if len(prompt) != HASH_BYTES:
        raise BadReport(f"{path} has {len(prompt)} bytes of a prompt's hash; expected 8")
    return SharedAnswer(
        read_name(replica, path), prompt, read_count(prompt_tokens, path), read_count(output_tokens, path)
    )


def _prefill(value: Any, path: str) -> StartedPrefill:
    replica, prefill_s = read_array(value, 2, path)
    return StartedPrefill(read_name(replica, path), read_number(prefill_s, MAX_PREFILL_S, path))


def _speed(value: Any, path: str) -> LearnedSpeed:
    replica, spent_s, prior_s = read_array(value, 3, path)
    return LearnedSpeed(
        read_name(replica, path), read_number(spent_s, MAX_SECONDS, path), read_number(prior_s, MAX_SECONDS, path)
    )


def _status(value: Any) -> PeerStatus:
    policy, version, frozen, model, draining, ejected = read_array(value, 6, "status")
    return PeerStatus(
        read_name(policy, "status"),
        read_count(version, "status"),
        read_flag(frozen, "status"),
        read_optional_name(model, "status"),
        read_records(draining, MAX_REPLICAS, "draining", read_name),
        read_records(ejected, MAX_REPLICAS, "ejected", read_name),
    )
