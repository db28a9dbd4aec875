"""Which compressed bodies are read, and that none grows beyond its bounds."""

from __future__ import annotations

import asyncio
import gzip
import random
import sys
import zlib
from collections.abc import Callable
from contextlib import suppress
from importlib import import_module
from typing import Any

import pytest

from gorgo.core.prompt.fingerprint import Fingerprinter
from gorgo.live.http.errors import HttpError
from gorgo.live.parsing import unpacking
from gorgo.live.parsing.unpacking import (
    FREE_BYTES,
    MAX_MEMBERS,
    MAX_RATIO,
    PIECE_BYTES,
    coding_of,
    unpack,
    unpack_quick,
)
from gorgo.live.parsing.workers import BodyWorkers

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


def status_of(coding: str, body: bytes, *, limit: int = LIMIT) -> int:
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
        assert status_of(coding, broken) == 400, broken[:20]


@pytest.mark.parametrize(("coding", "pack"), KINDS)
def test_bound_of_the_body_holds_for_the_unpacked_one_and_no_more_is_unpacked(coding: str, pack: Pack) -> None:
    body = pack(text_of(1_000_000))
    assert status_of(coding, body, limit=1_000_000) == 200
    assert status_of(coding, body, limit=999_999) == 413
    assert 0 < unpacked_of(coding, body, limit=300_000) <= 300_000


@pytest.mark.parametrize(("coding", "pack"), KINDS)
def test_bomb_is_refused_by_its_growth_before_the_bound_of_the_body(coding: str, pack: Pack) -> None:
    bomb = pack(b"a" * (64 << 20))
    assert status_of(coding, pack(b"a" * FREE_BYTES)) == 200
    assert status_of(coding, bomb, limit=64 << 20) == 413
    assert unpacked_of(coding, bomb, limit=64 << 20) <= max(FREE_BYTES, MAX_RATIO * len(bomb))


@pytest.mark.parametrize(
    ("coding", "pack"), [kind for kind in KINDS if kind.id in ("gzip", "zstd")], ids=["gzip", "zstd"]
)
def test_members_one_after_the_other_are_one_body_and_are_counted(coding: str, pack: Pack) -> None:
    assert b"".join(unpack(coding, pack(b"ab") + pack(b"c"), limit=LIMIT)) == b"abc"
    assert status_of(coding, pack(b"") * MAX_MEMBERS) == 200
    assert status_of(coding, pack(b"") * (MAX_MEMBERS + 1)) == 400


@pytest.mark.skipif(ZSTD is None, reason="library")
def test_zstd_body_may_not_ask_for_more_memory_than_http_admits() -> None:
    body = text_of(12 << 20)
    for window, status in ((23, 200), (24, 400)):
        packed = ZSTD.compress(body, options={ZSTD.CompressionParameter.window_log: window})
        assert status_of("zstd", packed) == status


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
    unpacking._readers.cache_clear()
    try:
        for coding in (b"zstd", b"br"):
            with pytest.raises(HttpError, match=r"one of: gzip, deflate$"):
                coding_of([(b"content-encoding", coding)])
        assert coding_of([(b"content-encoding", b"gzip")]) == "gzip"
        assert status_of("gzip", gzip.compress(b"{}")) == 200
    finally:
        unpacking._readers.cache_clear()


def test_library_that_cannot_bound_its_output_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    class Old:
        class Decompressor:
            def process(self, data: bytes) -> bytes:
                return data

    monkeypatch.setitem(sys.modules, "brotli", Old)
    unpacking._readers.cache_clear()
    try:
        with pytest.raises(HttpError, match="one of: gzip, deflate"):
            coding_of([(b"content-encoding", b"br")])
    finally:
        unpacking._readers.cache_clear()


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
