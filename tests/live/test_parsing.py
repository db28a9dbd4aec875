"""Bodies: what they may be, compressed ones too, how they are edited, and large ones in a process of their own."""

from __future__ import annotations

import asyncio
import gzip
import json
import os
import random
import re
import signal
import sys
import zlib
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gorgo.core.numeric import QUICK_VALUES, TINY_BYTES
from gorgo.core.prompt.fingerprint import MAX_BLOCKS, Fingerprinter
from gorgo.live.http.errors import HttpError
from gorgo.live.http.headers import Header, RequestHeaders
from gorgo.live.parsing import json_body
from gorgo.live.parsing import workers as workers_module
from gorgo.live.parsing.json_body import (
    FREE_BYTES,
    MAX_BRACKETS,
    MAX_DIGITS,
    MAX_PARTS,
    MAX_RATIO,
    MAX_TEXT,
    MAX_VALUES,
    PIECE_BYTES,
    UNCOUNTED_BYTES,
    BodyFields,
    check_counts,
    check_media_type,
    coding_of,
    limit_digits,
    model_spans,
    parse_body,
    read_fields,
    read_quick_fields,
    request_usage,
    unpack,
    unpack_quick,
    with_model,
)
from gorgo.live.parsing.worker import MAX_MEMORY_BYTES, reader
from gorgo.live.parsing.workers import JOB_TIMEOUT_S, BodyWorkers, Turns
from gorgo.live.request.parse import output_limits, wants_more_than_one
from tests.proxy.conftest import Start
from tests.proxy.fakes import answer

# --- What a body may be, and how it is edited.


JSON = (b"content-type", b"application/json")


def status_of(body: bytes, *headers: Header) -> int:
    """200 for a body that is taken."""
    try:
        check_media_type(headers)
        parse_body(body)
    except HttpError as error:
        return error.status
    return 200


@pytest.mark.parametrize(
    ("kind", "status"),
    [
        (None, 200),
        (b"application/json", 200),
        (b"Application/JSON ; charset=utf-8", 200),
        (b"application/problem+json", 200),
        (b"application/jsonx", 415),
        (b"application/+jsonx", 415),
        (b"text/x+json", 415),
        (b"text/plain; application/json", 415),
        (b"", 415),
    ],
)
def test_content_type_is_json_or_not_said(kind: bytes | None, status: int) -> None:
    assert status_of(b"{}", *([] if kind is None else [(b"content-type", kind)])) == status


@pytest.mark.parametrize(
    ("body", "code"),
    [
        (b"", "invalid_json"),
        (b"{", "invalid_json"),
        (b"[]", "invalid_json"),
        (b"null", "invalid_json"),
        (b'"text"', "invalid_json"),
        (b"[" * 100_000, "invalid_json"),
    ],
)
def test_what_is_no_object_is_refused(body: bytes, code: str) -> None:
    with pytest.raises(HttpError) as caught:
        parse_body(body)
    assert (caught.value.status, caught.value.code) == (400, code)


def test_coding_of_a_body_is_found_once_for_headers_that_are_repeated() -> None:
    assert status_of(b"{}", JSON, (b"content-encoding", b"compress")) == 415
    assert status_of(b"{}", JSON, (b"content-encoding", b"identity")) == 200
    for value, coding in ((b"gzip", "gzip"), (b"identity", None)):
        headers = RequestHeaders([JSON, (b"content-encoding", value)])
        assert check_media_type(headers) == coding
        assert check_media_type(RequestHeaders(headers, headers.findings)) == coding


@pytest.mark.parametrize(
    ("text", "status"),
    [
        (b'{"a":[' + b"[]," * (MAX_BRACKETS - 3) + b"[]]}", 200),
        (b'{"a":[' + b"[]," * (MAX_BRACKETS - 2) + b"[]]}", 400),
        (b'{"[":[' + b"[]," * (MAX_BRACKETS - 3) + b"[]]}", 400),
        (b'{"a":[' + b"0," * (MAX_VALUES - 2) + b"0]}", 200),
        (b'{"a":[' + b"0," * (MAX_VALUES - 1) + b"0]}", 400),
        (b'{"a":"' + b"," * (MAX_VALUES + 1) + b'"}', 400),
    ],
    ids=["lists", "too many lists", "a bracket in a text", "values", "too many values", "commas in a text"],
)
def test_lists_objects_and_values_of_a_body_are_counted_before_its_parse(text: bytes, status: int) -> None:
    found = 200
    try:
        check_counts(text)
    except HttpError as error:
        found = error.status
    assert found == status


def test_number_of_more_digits_than_any_field_has_is_refused() -> None:
    before = sys.get_int_max_str_digits()
    limit_digits()
    try:
        assert parse_body(b'{"a":' + b"9" * MAX_DIGITS + b"}")
        with pytest.raises(HttpError, match="at most 640 digits"):
            parse_body(b'{"a":9' + b"9" * MAX_DIGITS + b"}")
    finally:
        sys.set_int_max_str_digits(before)


@pytest.mark.parametrize(
    ("body", "wanted"),
    [
        (b'{"a":1}', b'{"a":1,"stream_options":{"include_usage":true}}'),
        (b'{"a":{}} \n', b'{"a":{},"stream_options":{"include_usage":true}} \n'),
    ],
)
def test_usage_is_asked_for_as_the_last_key(body: bytes, wanted: bytes) -> None:
    assert request_usage(body) == wanted


@pytest.mark.parametrize(
    "body", [b'{"model":"a", "x":[1], "model" : "\xc3\xa9"}', b'{"\xc3\xa9":"\xed\xa0\x80","model":7}', b"{}"]
)
def test_name_of_a_model_is_replaced_at_known_places_as_after_a_parse(body: bytes) -> None:
    assert with_model(body, "new", model_spans(body)) == with_model(body, "new")


FINGERPRINTER = Fingerprinter(key=7)
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
#: More values than another process is spared for, in a text that is long enough to be counted.
NUMBERS = [0] * (2 * QUICK_VALUES)


def chat(*texts: str, **more: Any) -> bytes:
    messages = [{"role": "user", "content": text} for text in texts]
    return json.dumps({"model": "m", "messages": messages, **more}).encode()


@pytest.mark.parametrize(
    ("route", "body"),
    [
        (CHAT, chat("a, b [c] {d}" * 4000)),
        (CHAT, chat(*["é, " * 100] * 60)),
        (CHAT, chat("a" * TINY_BYTES, logit_bias=NUMBERS)),
        (COMPLETIONS, json.dumps({"model": "m", "prompt": "a, " * 20_000, "stream": True}).encode()),
    ],
)
def test_texts_are_read_here_and_as_ever_whatever_they_and_other_fields_have(route: str, body: bytes) -> None:
    assert TINY_BYTES < len(body) <= UNCOUNTED_BYTES
    found, known = read_quick_fields(route, body, FINGERPRINTER), read_fields(route, body, FINGERPRINTER)
    assert found is not None
    assert found.values == known.values
    assert found.prompt == known.prompt
    assert found.tokens is known.tokens is None
    assert np.array_equal(found.sketch.sums, known.sketch.sums)
    assert found.sketch.message_ends == known.sketch.message_ends


@pytest.mark.parametrize(
    ("route", "body"),
    [
        (CHAT, chat("a", tools=NUMBERS)),
        (CHAT, chat("a", functions=NUMBERS)),
        (CHAT, chat("a" * UNCOUNTED_BYTES, tools=NUMBERS)),
        (CHAT, json.dumps({"messages": [{"role": "user", "content": [{"text": ""}] * 6000}]}).encode()),
        (CHAT, json.dumps({"messages": NUMBERS}).encode()),
        (COMPLETIONS, json.dumps({"prompt": NUMBERS}).encode()),
        (CHAT, b"[" + b"NaN," * (QUICK_VALUES + 1)),
    ],
)
def test_many_values_that_would_be_read_are_left_to_another_process(route: str, body: bytes) -> None:
    assert read_quick_fields(route, body, FINGERPRINTER) is None


@pytest.mark.parametrize("body", [chat("a" * TINY_BYTES)[:-1], b"[" + b" " * TINY_BYTES + b"]", b'{"messages":[]}'])
def test_what_is_no_request_is_refused_in_the_same_words(body: bytes) -> None:
    with pytest.raises(HttpError) as known:
        read_fields(CHAT, body, FINGERPRINTER)
    with pytest.raises(HttpError) as found:
        read_quick_fields(CHAT, body, FINGERPRINTER)
    assert (found.value.status, found.value.message) == (known.value.status, known.value.message)


# --- Which compressed bodies are read, and that none grows beyond its bounds.


LIMIT = 32 << 20
Pack = Callable[[bytes], bytes]


def _raw(body: bytes) -> bytes:
    packer = zlib.compressobj(wbits=-zlib.MAX_WBITS)
    return packer.compress(body) + packer.flush()


def _library(*names: str) -> Any:
    for name in names:
        try:
            return import_module(name)
        except ImportError:
            continue
    return None


ZSTD, BROTLI = _library("compression.zstd", "backports.zstd"), _library("brotli")
PACKERS: dict[str, tuple[str, Pack]] = {
    "gzip": ("gzip", gzip.compress),
    "deflate": ("deflate", zlib.compress),
    "deflate without a frame": ("deflate", _raw),
    "zstd": ("zstd", lambda body: ZSTD.compress(body)),
    "br": ("br", lambda body: BROTLI.compress(body, quality=5)),
}
needs = {"zstd": ZSTD, "br": BROTLI}
KINDS = [
    pytest.param(*pack, id=name, marks=pytest.mark.skipif(needs.get(name, 1) is None, reason="library"))
    for name, pack in PACKERS.items()
]


def text_of(size: int) -> bytes:
    """Text that grows about fourfold."""
    words = [b"%x" % number for number in range(4096)]
    return b" ".join(random.Random(1).choices(words, k=size // 2))[:size]


def status_of_unpacking(coding: str, body: bytes, *, limit: int = LIMIT) -> int:
    try:
        for _ in unpack(coding, body, limit=limit):
            pass
    except HttpError as error:
        return error.status
    return 200


def unpacked_of(coding: str, body: bytes, *, limit: int) -> int:
    """Bytes that are unpacked before the body is refused."""
    size = 0
    with suppress(HttpError):
        for piece in unpack(coding, body, limit=limit):
            size += len(piece)
    return size


@pytest.mark.parametrize(("coding", "pack"), KINDS)
@pytest.mark.parametrize("size", [0, 1, 1000, PIECE_BYTES, PIECE_BYTES + 1, 3 << 20])
def test_body_is_unpacked_as_it_was(coding: str, pack: Pack, size: int) -> None:
    body = text_of(size)
    assert b"".join(unpack(coding, pack(body), limit=LIMIT)) == body


@pytest.mark.parametrize(("coding", "pack"), KINDS)
def test_body_that_is_cut_off_or_another_is_a_400(coding: str, pack: Pack) -> None:
    body = pack(text_of(300_000))
    for broken in (b"", body[:1], body[: len(body) // 2], body[:-1], b"\xff" * 100, b'{"model": "m"}', body + b"\xfe}"):
        assert status_of_unpacking(coding, broken) == 400, broken[:20]


@pytest.mark.parametrize(("coding", "pack"), KINDS)
def test_bound_of_the_body_holds_for_the_unpacked_one_and_no_more_is_unpacked(coding: str, pack: Pack) -> None:
    body = pack(text_of(1_000_000))
    assert status_of_unpacking(coding, body, limit=1_000_000) == 200
    assert status_of_unpacking(coding, body, limit=999_999) == 413
    assert 0 < unpacked_of(coding, body, limit=300_000) <= 300_000


@pytest.mark.parametrize(("coding", "pack"), KINDS)
def test_bomb_is_refused_by_its_growth_before_the_bound_of_the_body(coding: str, pack: Pack) -> None:
    bomb = pack(b"a" * (64 << 20))
    assert status_of_unpacking(coding, pack(b"a" * FREE_BYTES)) == 200
    assert status_of_unpacking(coding, bomb, limit=64 << 20) == 413
    assert unpacked_of(coding, bomb, limit=64 << 20) <= max(FREE_BYTES, MAX_RATIO * len(bomb))


@pytest.mark.parametrize(
    ("coding", "pack"), [kind for kind in KINDS if kind.id in ("gzip", "zstd")], ids=["gzip", "zstd"]
)
def test_members_one_after_the_other_are_one_body_and_are_counted(coding: str, pack: Pack) -> None:
    assert b"".join(unpack(coding, pack(b"ab") + pack(b"c"), limit=LIMIT)) == b"abc"
    assert status_of_unpacking(coding, pack(b"") * MAX_PARTS) == 200
    assert status_of_unpacking(coding, pack(b"") * (MAX_PARTS + 1)) == 400


@pytest.mark.skipif(ZSTD is None, reason="library")
def test_zstd_body_may_not_ask_for_more_memory_than_http_admits() -> None:
    body = text_of(12 << 20)
    for window, status in ((23, 200), (24, 400)):
        packed = ZSTD.compress(body, options={ZSTD.CompressionParameter.window_log: window})
        assert status_of_unpacking("zstd", packed) == status


def test_small_body_is_unpacked_here_and_a_larger_one_is_not() -> None:
    for size in (0, 1000, PIECE_BYTES):
        assert unpack_quick("gzip", gzip.compress(text_of(size)), limit=LIMIT) == text_of(size)
    assert unpack_quick("gzip", gzip.compress(text_of(PIECE_BYTES + 1)), limit=LIMIT) is None
    assert unpack_quick("gzip", random.Random(1).randbytes(PIECE_BYTES + 1), limit=LIMIT) is None


@pytest.mark.parametrize(
    ("said", "found"),
    [
        ([], None),
        ([b""], None),
        ([b"identity"], None),
        ([b"identity, Identity", b""], None),
        ([b"gzip"], "gzip"),
        ([b" X-GZip "], "gzip"),
        ([b"identity", b"Deflate"], "deflate"),
    ],
)
def test_coding_of_a_body_is_found(said: list[bytes], found: str | None) -> None:
    assert coding_of([(b"content-encoding", value) for value in said]) == found


@pytest.mark.parametrize("said", [[b"compress"], [b"gzip, gzip"], [b"gzip", b"deflate"], [b"\xff"], [b"gzip;q=1"]])
def test_coding_that_cannot_be_read_is_a_415_that_names_those_that_can(said: list[bytes]) -> None:
    with pytest.raises(HttpError, match="one of: gzip, deflate") as caught:
        coding_of([(b"content-encoding", value) for value in said])
    assert (caught.value.status, caught.value.headers[0][0]) == (415, b"accept-encoding")


def test_without_a_library_zstd_and_br_are_a_415_and_gzip_works(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("compression.zstd", "backports.zstd", "brotli"):
        monkeypatch.setitem(sys.modules, name, None)
    json_body._readers.cache_clear()
    try:
        for coding in (b"zstd", b"br"):
            with pytest.raises(HttpError, match=r"one of: gzip, deflate$"):
                coding_of([(b"content-encoding", coding)])
        assert coding_of([(b"content-encoding", b"gzip")]) == "gzip"
        assert status_of_unpacking("gzip", gzip.compress(b"{}")) == 200
    finally:
        json_body._readers.cache_clear()


def test_library_that_cannot_bound_its_output_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    class Old:
        class Decompressor:
            def process(self, data: bytes) -> bytes:
                return data

    monkeypatch.setitem(sys.modules, "brotli", Old)
    json_body._readers.cache_clear()
    try:
        with pytest.raises(HttpError, match="one of: gzip, deflate"):
            coding_of([(b"content-encoding", b"br")])
    finally:
        json_body._readers.cache_clear()


async def test_large_body_is_unpacked_by_the_helper_process_within_the_same_bounds() -> None:
    workers = BodyWorkers(Fingerprinter(key=1))
    body = text_of(3 << 20)
    try:
        async with asyncio.timeout(30):
            assert await workers.unpack("gzip", gzip.compress(body), limit=LIMIT) == body
            pid = workers._texts._helper.pid
            for packed, limit, status in (
                (gzip.compress(body), 1 << 20, 413),
                (gzip.compress(b"a" * (64 << 20)), 64 << 20, 413),
                (gzip.compress(body)[:-1], LIMIT, 400),
            ):
                with pytest.raises(HttpError) as caught:
                    await workers.unpack("gzip", packed, limit=limit)
                assert caught.value.status == status
            assert await workers.unpack("gzip", gzip.compress(b"{}"), limit=LIMIT) == b"{}"
            assert workers._texts._helper.pid == pid, "a refusal costs no process"
    finally:
        await workers.aclose()


# --- Large bodies, read by a process of their own: the same result, and none of it is waited for by the event loop.


CHAT_WORKERS = "/v1/chat/completions"


def chat_workers(text: str, **fields: Any) -> bytes:
    body = {"model": "m", "messages": [{"role": "user", "content": text}], **fields}
    return json.dumps(body, ensure_ascii=False).encode()


@asynccontextmanager
async def workers() -> AsyncIterator[BodyWorkers]:
    found = BodyWorkers(FINGERPRINTER)
    try:
        yield found
    finally:
        await found.aclose()


def pid_of(found: BodyWorkers) -> int:
    pid = found._texts._helper.pid
    assert pid is not None
    return pid


@pytest.mark.parametrize(
    "body",
    [
        chat_workers(
            "héllo " * 2_000_000, stream=True, lora_path="a", sampling_params={"max_new_tokens": 1, "stop": ["a"]}
        ),
        chat_workers("a", tools=list(range(300_000))),
    ],
)
async def test_another_process_reads_what_this_one_would(body: bytes) -> None:
    async with workers() as found:
        there = await found.read(CHAT_WORKERS, body)
    here = read_fields(CHAT_WORKERS, body, FINGERPRINTER)
    for name in ("stream", "lora_path", "model", "priority"):
        assert there.values.get(name) == here.values.get(name)
    assert wants_more_than_one(output_limits(there.values)) is wants_more_than_one(output_limits(here.values))
    assert FINGERPRINTER.hash_sketch(there.sketch, adapter="b") == FINGERPRINTER.hash_sketch(here.sketch, adapter="b")
    assert len(there.sketch.sums) <= MAX_BLOCKS
    assert [body[start:end] for start, end in there.spans or ()] == [b'"m"']


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"{" * 100, "not JSON"),
        (b'{"messages":7}', "messages: expected a list"),
        (b"[" + b"0," * MAX_VALUES + b"0]", "values in the body"),
        (json.dumps({"a": 1}).encode("utf-16"), "large body in UTF-8"),
        (chat_workers("a", model="m" * (MAX_TEXT + 1)), "model: expected at most"),
        (chat_workers("a", n=0).replace(b": 0}", b": " + b"9" * 641 + b"}"), "640 digits"),
    ],
)
async def test_what_cannot_be_read_is_the_clients_fault(body: bytes, message: str) -> None:
    async with workers() as found:
        with pytest.raises(HttpError, match=message) as caught:
            await found.read(CHAT_WORKERS, body)
    assert (caught.value.status, caught.value.code) in [(400, "invalid_json"), (400, "invalid_request")]


async def test_bodies_are_read_whatever_kills_the_process() -> None:
    async with workers() as found:
        await found.read(CHAT_WORKERS, chat_workers("a"))
        first = pid_of(found)
        os.kill(first, signal.SIGKILL)
        assert isinstance(await found.read(CHAT_WORKERS, chat_workers("a")), BodyFields)
        assert pid_of(found) != first
        jobs = asyncio.gather(*(found.read(CHAT_WORKERS, chat_workers("a" * 20_000_000)) for _ in range(3)))
        await asyncio.sleep(0.01)
        os.kill(pid_of(found), signal.SIGKILL)
        assert all(isinstance(fields, BodyFields) for fields in await jobs)


@pytest.mark.system
async def test_a_body_is_read_when_the_process_has_been_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gorgo.live.helper_process.CHECK_S", 0.4)
    async with workers() as found, asyncio.timeout(JOB_TIMEOUT_S):
        await found.read(CHAT_WORKERS, chat_workers("a"))
        os.kill(pid_of(found), signal.SIGSTOP)
        assert isinstance(await found.read(CHAT_WORKERS, chat_workers("a")), BodyFields)


async def test_cancelled_job_leaves_no_half_read_result_to_the_next() -> None:
    async with workers() as found:
        job = asyncio.create_task(found.read(CHAT_WORKERS, chat_workers("a" * 20_000_000)))
        while found._texts._helper.pid is None:
            await asyncio.sleep(0)
        job.cancel()
        await asyncio.gather(job, return_exceptions=True)
        assert (await found.read(CHAT_WORKERS, chat_workers("b", stream=True))).values["stream"] is True


async def test_lane_takes_a_bounded_number_of_jobs_and_ends_with_its_owner(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers_module, "MAX_WAITING", 2)
    async with workers() as found:
        jobs = [found.read(CHAT_WORKERS, chat_workers("a")) for _ in range(3)]
        results = await asyncio.gather(*jobs, return_exceptions=True)
        assert [getattr(result, "status", 200) for result in results] == [200, 200, 429]
        pid = pid_of(found)
    assert not Path(f"/proc/{pid}").exists()


async def test_bodies_of_clients_take_turns_however_many_one_has_sent() -> None:
    turns, order = Turns(32), []

    async def read(client: str) -> None:
        await turns.wait(client)
        order.append(client)
        await asyncio.sleep(0)
        turns.release()

    async with asyncio.TaskGroup() as tasks:
        for client in ("alice",) * 20 + ("bob",) * 2 + ("carol",):
            tasks.create_task(read(client))
    assert order[:6] == ["alice", "alice", "bob", "carol", "alice", "bob"]
    assert order[6:] == ["alice"] * 17


async def test_a_client_that_has_filled_a_lane_makes_room_for_another_and_for_none_of_its_own() -> None:
    turns = Turns(8)
    await turns.wait("alice")
    alice = [asyncio.create_task(turns.wait("alice")) for _ in range(7)]
    await asyncio.sleep(0)
    with pytest.raises(HttpError) as refused:
        await turns.wait("alice")
    assert refused.value.status == 429
    bob = [asyncio.create_task(turns.wait("bob")) for _ in range(3)]
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert [task.done() for task in alice] == [False] * 4 + [True] * 3
    assert [getattr(task.exception(), "status", None) for task in alice[4:]] == [429] * 3
    alice[0].cancel()  # leaves
    turns.release()
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert alice[1].done()
    assert not bob[0].done()
    turns.release()
    bob[0].cancel()  # at the moment of its turn, which goes on to the next
    for _ in range(3):
        await asyncio.sleep(0)
    assert bob[0].cancelled()
    assert alice[2].done()
    for task in (*alice, *bob):
        task.cancel()
    await asyncio.gather(*alice, *bob, return_exceptions=True)


async def test_job_that_takes_too_long_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers_module, "JOB_TIMEOUT_S", 0.0)  # of the start too
    async with workers() as found:
        with pytest.raises(HttpError) as caught:
            await found.read(CHAT_WORKERS, chat_workers("a"))
        assert caught.value.status == 500
        assert found._texts._helper.pid is None


async def test_large_body_reaches_the_replica_as_it_came(start: Start) -> None:
    fleet = await start.fleet([answer(200)])
    for body in (chat_workers("x" * 6_000_000), chat_workers("a", tools=list(range(30_000)))):
        response = await fleet.client.post(CHAT_WORKERS, content=body)
        assert response.status_code == 200
        assert fleet.replicas[0].seen[-1].body == body
    refused = await fleet.client.post(CHAT_WORKERS, content=chat_workers("a", tools=[0] * (MAX_VALUES + 1)))
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "invalid_json")
    await fleet.idle()


async def test_memory_of_the_process_is_bounded() -> None:
    async with workers() as found:
        await found.read(CHAT_WORKERS, chat_workers("a"))
        limits = Path(f"/proc/{pid_of(found)}/limits").read_text()
    assert re.search(rf"Max data size +{MAX_MEMORY_BYTES} +{MAX_MEMORY_BYTES} ", limits)


def test_a_body_beyond_the_memory_of_the_process_is_too_large(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr("gorgo.live.parsing.worker.read_large_body", fail)
    assert [answer[:2] for answer in reader(FINGERPRINTER)(CHAT_WORKERS.encode(), b"{}")] == [
        (413, "request_too_large")
    ]
