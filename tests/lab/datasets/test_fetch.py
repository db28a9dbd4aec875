"""Fetching from a server on loopback, in everything that can go wrong."""

from __future__ import annotations

import hashlib
import os
import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import httpx
import pytest
from typer.testing import CliRunner

from gorgo.cli import app
from gorgo.errors import FetchError, TraceError
from gorgo.lab.datasets import fetch as registry
from gorgo.lab.datasets import remote_dataset, remote_datasets, shapes
from gorgo.lab.datasets.fetch import FETCH_MAX_S, REDIRECTS_MAX, Fetched, RemoteDataset, _refuse_downgrade, fetch
from gorgo.lab.traces import load_trace

CONTENT = b'{"timestamp":0,"input_length":5,"output_length":1,"hash_ids":[1]}\n' * 20_000
SHA256 = hashlib.sha256(CONTENT).hexdigest()


class _Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        getattr(self, "answer_" + self.path.strip("/").split("/")[0])()

    def answer_good(self) -> None:
        self._begin(200, len(CONTENT))
        self.wfile.write(CONTENT)

    def answer_truncated(self) -> None:
        self._begin(200, len(CONTENT))
        self.wfile.write(CONTENT[: len(CONTENT) // 2])

    def answer_empty(self) -> None:
        self._begin(200, 0)

    def answer_missing(self) -> None:
        self._begin(404, 0)

    def answer_untold(self) -> None:
        """As much as the client takes, without a length."""
        self.send_response(200)
        self.end_headers()
        self.wfile.write(CONTENT)

    def answer_redirect(self) -> None:
        left = int(self.path.rsplit("/", 1)[1])
        self.send_response(302)
        self.send_header("location", f"/redirect/{left - 1}" if left > 1 else "/good")
        self.end_headers()

    def _begin(self, status: int, length: int) -> None:
        self.send_response(status)
        self.send_header("content-length", str(length))
        self.end_headers()

    def log_message(self, *_: Any) -> None:
        """Nothing on stderr."""


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), _Handler) as httpd:
        thread = Thread(target=httpd.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield f"http://127.0.0.1:{httpd.server_address[1]}"
        httpd.shutdown()
        thread.join()


@pytest.fixture(autouse=True)
def _no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")


@pytest.fixture
def dataset(server: str) -> RemoteDataset:
    return RemoteDataset(
        name="some",
        about="",
        licence="CC0-1.0",
        url=f"{server}/good",
        file="some.jsonl",
        bytes_max=10_000_000,
        sha256=SHA256,
    )


def left_in(folder: Path) -> list[str]:
    return sorted(os.listdir(folder))


def test_the_right_file_is_checked_and_named(dataset: RemoteDataset, tmp_path: Path) -> None:
    progress: list[tuple[int, int | None]] = []
    fetched = fetch(dataset, tmp_path / "new", on_progress=lambda done, total: progress.append((done, total)))
    assert fetched == Fetched(tmp_path / "new" / "some.jsonl", SHA256, checked=True, fresh=True)
    assert fetched.path.read_bytes() == CONTENT
    assert left_in(tmp_path / "new") == ["some.jsonl"]
    assert progress[-1] == (len(CONTENT), len(CONTENT))
    assert len(load_trace(fetched.path)) == 20_000


def test_a_file_of_unknown_sum_says_so(dataset: RemoteDataset, tmp_path: Path) -> None:
    fetched = fetch(replace(dataset, sha256=None), tmp_path)
    assert (fetched.sha256, fetched.checked) == (SHA256, False)


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("missing", "HTTP status 404"),
        ("truncated", "without sending complete message body"),
        ("empty", "the answer is empty"),
        (f"redirect/{REDIRECTS_MAX + 1}", "Exceeded maximum allowed redirects"),
    ],
)
def test_what_goes_wrong_is_told_with_what_to_do_and_leaves_nothing(
    dataset: RemoteDataset, server: str, tmp_path: Path, path: str, said: str
) -> None:
    with pytest.raises(FetchError) as raised:
        fetch(dataset, tmp_path, url=f"{server}/{path}")
    assert str(raised.value).startswith(f"{server}/{path}: ")
    assert said in str(raised.value)
    assert f"by hand: curl -fL -o {tmp_path}/some.jsonl {server}/{path}" in str(raised.value)
    assert left_in(tmp_path) == []


def test_a_few_redirects_are_followed(dataset: RemoteDataset, server: str, tmp_path: Path) -> None:
    assert fetch(dataset, tmp_path, url=f"{server}/redirect/{REDIRECTS_MAX - 1}").checked


def test_a_redirect_from_https_to_http_is_refused() -> None:
    request = httpx.Request("GET", "https://data.example/a")
    _refuse_downgrade(httpx.Response(302, headers={"location": "/b"}, request=request))
    _refuse_downgrade(httpx.Response(302, headers={"location": "https://mirror.example/b"}, request=request))
    with pytest.raises(FetchError, match=r"redirected from https to http://mirror\.example/b"):
        _refuse_downgrade(httpx.Response(302, headers={"location": "http://mirror.example/b"}, request=request))


def test_a_link_planted_under_the_temporary_name_is_not_written_through(dataset: RemoteDataset, tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_bytes(b"old")
    (tmp_path / f".some.jsonl.{os.getpid()}.part").symlink_to(victim)
    fetch(dataset, tmp_path)
    assert victim.read_bytes() == b"old"
    assert (tmp_path / "some.jsonl").read_bytes() == CONTENT


def test_another_file_under_the_address_is_not_kept(dataset: RemoteDataset, tmp_path: Path) -> None:
    with pytest.raises(FetchError, match=f"its sha256 is {SHA256}, expected 000"):
        fetch(replace(dataset, sha256="0" * 64), tmp_path)
    assert left_in(tmp_path) == []


@pytest.mark.parametrize("path", ["good", "untold"])
def test_more_than_the_data_set_can_have_is_not_written(
    dataset: RemoteDataset, server: str, tmp_path: Path, path: str
) -> None:
    with pytest.raises(FetchError, match="larger than 1,000 bytes"):
        fetch(replace(dataset, bytes_max=1000), tmp_path, url=f"{server}/{path}")
    assert left_in(tmp_path) == []


def test_a_server_that_drips_is_given_up(dataset: RemoteDataset, tmp_path: Path) -> None:
    times = iter([0.0, FETCH_MAX_S + 1])
    with pytest.raises(FetchError, match="not done after 6 hours"):
        fetch(dataset, tmp_path, clock=lambda: next(times))
    assert left_in(tmp_path) == []


def test_nobody_listening_reads_as_perhaps_offline(dataset: RemoteDataset, tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound and not listening: connections are refused
        with pytest.raises(FetchError, match=r"no connection .* is this machine offline"):
            fetch(dataset, tmp_path, url=f"http://127.0.0.1:{taken.getsockname()[1]}/x")
    assert left_in(tmp_path) == []


@pytest.mark.parametrize("url", ["ftp://127.0.0.1/x", "no address", "http://"])
def test_an_address_that_is_none_is_told(dataset: RemoteDataset, tmp_path: Path, url: str) -> None:
    with pytest.raises(FetchError, match="nothing was written"):
        fetch(dataset, tmp_path, url=url)


def test_the_right_file_that_is_there_is_kept_without_asking(dataset: RemoteDataset, tmp_path: Path) -> None:
    (tmp_path / "some.jsonl").write_bytes(CONTENT)
    assert not fetch(dataset, tmp_path, url="http://127.0.0.1:1/never").fresh


def test_another_file_that_is_there_is_never_overwritten(dataset: RemoteDataset, tmp_path: Path) -> None:
    (tmp_path / "some.jsonl").write_text("mine")
    with pytest.raises(FetchError, match=r"some.jsonl is there already and is not some: .* move it away first"):
        fetch(dataset, tmp_path)
    assert (tmp_path / "some.jsonl").read_text() == "mine"


def test_a_file_of_unknown_sum_that_is_there_is_kept_too(dataset: RemoteDataset, tmp_path: Path) -> None:
    (tmp_path / "some.jsonl").write_text("mine")
    fetched = fetch(replace(dataset, sha256=None), tmp_path)
    assert (fetched.fresh, fetched.checked) == (False, False)


# -- the registry and the command


def test_names_are_their_own_and_every_one_has_a_licence_and_a_safe_address() -> None:
    found = remote_datasets()
    names = [one.name for one in found]
    assert names == sorted(set(names))
    assert set(names).isdisjoint(shapes())
    assert all(one.url.startswith("https://") and one.licence and one.bytes_max for one in found)
    assert {one.file for one in found} >= {
        "conversation_trace.jsonl",
        "toolagent_trace.jsonl",
        "synthetic_trace.jsonl",
        "artchat_week_20260405.jsonl",
    }


def test_an_unknown_name_lists_those_there_are() -> None:
    with pytest.raises(TraceError, match="no data set 'x' can be fetched; there are: art-chat-week-20260401, "):
        remote_dataset("x")


def test_the_command_says_where_the_file_is_and_what_is_known_of_it(
    dataset: RemoteDataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry, "remote_datasets", lambda: [dataset])
    words = ["datasets", "fetch", "some", "--out", str(tmp_path)]
    first, again = (CliRunner().invoke(app, words) for _ in range(2))
    assert first.exit_code == again.exit_code == 0
    assert first.stdout == f"{tmp_path}/some.jsonl\n"
    assert f"some: CC0-1.0; sha256 {SHA256} (verified)" in first.stderr
    assert "the file existed already" in again.stderr


def test_sigterm_leaves_no_half_of_a_file(
    dataset: RemoteDataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ended(done: int, _total: int | None) -> None:
        os.kill(os.getpid(), signal.SIGTERM)

    @contextmanager
    def progress(_file: str) -> Iterator[Any]:
        yield ended

    monkeypatch.setattr(registry, "remote_datasets", lambda: [dataset])
    monkeypatch.setattr("gorgo.cli.measure.datasets._progress", progress)
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)  # else it would end this process where nothing minds it
    try:
        result = CliRunner().invoke(app, ["datasets", "fetch", "some", "--out", str(tmp_path)])
    finally:
        signal.signal(signal.SIGTERM, before)
    assert result.exit_code != 0
    assert list(tmp_path.iterdir()) == []


def test_the_command_fails_with_the_reason(server: str, tmp_path: Path) -> None:
    words = ["datasets", "fetch", "mooncake-conversation", "--out", str(tmp_path), "--url"]
    wrong, missing = (CliRunner().invoke(app, [*words, f"{server}/{path}"]) for path in ("good", "missing"))
    assert (wrong.exit_code, missing.exit_code) == (1, 1)
    assert "not the file that is meant" in wrong.stderr
    assert "HTTP status 404" in missing.stderr
    assert left_in(tmp_path) == []
