"""Fetching a published data set: streamed to a temporary file, checked, then renamed.

Owns the list of data sets that others publish (where they are, under which licence, and how to know that one arrived
whole) and their download. A file under the final name is always complete and, where its sha256 is known, correct. An
existing file is never overwritten: a correct one is used, another one is an error.
"""

from __future__ import annotations

import hashlib
import os
import shlex
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import httpx

from gorgo.config.atomic import create_file
from gorgo.errors import FetchError, TraceError

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
    found = {one.name: one for one in remote_datasets()}
    if name not in found:
        raise TraceError(f"no data set {name!r} can be fetched; there are: {', '.join(found)}")
    return found[name]


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
