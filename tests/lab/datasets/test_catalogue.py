"""The catalogue of data sets, and fetching from a server on loopback, in everything that can go wrong."""

from __future__ import annotations

import errno
import gzip
import hashlib
import os
import re
import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from math import isnan
from pathlib import Path
from threading import Thread
from typing import Any

import httpx
import pytest
from typer.testing import CliRunner

from gorgo.cli import app
from gorgo.errors import FetchError, TraceError
from gorgo.lab.datasets import (
    DEMO_TRACE,
    AgentsShape,
    HerdShape,
    SharingShape,
    WorkloadShape,
    datasets,
    describe_trace,
    generate_requests,
    generate_trace,
    load_requests,
    own_block_tokens,
    read_shape,
    remote_dataset,
    remote_datasets,
    shapes,
    shipped_path,
    write_trace,
)
from gorgo.lab.datasets import published as registry
from gorgo.lab.datasets.published import FETCH_MAX_S, REDIRECTS_MAX, Fetched, RemoteDataset, _refuse_downgrade, fetch
from gorgo.lab.simulate import SimJob, run_once
from gorgo.lab.traces import TraceFilters, TraceRequest, load_trace
from tests.lab.sim.fleets import three_regions


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.system) if name == "agents" else name for name in sorted(shapes())]
)
def test_a_shape_read_from_its_file_gives_the_same_requests(name: str, tmp_path: Path) -> None:
    shape = read_shape(shapes()[name])
    if not isinstance(shape, SharingShape | HerdShape | AgentsShape):
        shape = replace(shape, duration_s=60.0)
    file = tmp_path / "t.jsonl.gz"
    write_trace(shape, file)
    assert own_block_tokens(file) == shape.block_tokens
    filters = TraceFilters(limit=400)
    assert filters.apply(generate_requests(shape, block_tokens=shape.block_tokens)) == load_trace(file, filters)


def test_a_run_of_a_shape_s_file_has_the_rows_of_the_shape(tmp_path: Path) -> None:
    """Of blocks of 16 tokens, in messages: what an id stands for, and where messages end, come with the file."""
    shape = read_shape(shapes()["short-chat"])
    write_trace(shape, tmp_path / "t.jsonl")
    made = SimJob(trace="short-chat", policy="gorgo-ms", fleet=three_regions(), filters=TraceFilters(limit=60))
    run, again = (run_once(job).row for job in (made, replace(made, trace=str(tmp_path / "t.jsonl"))))
    assert (again.ttft_ms, again.e2e_s, again.cache_hit, again.share) == (
        run.ttft_ms,
        run.e2e_s,
        run.cache_hit,
        run.share,
    )
    assert run.cache_hit


def test_a_shape_s_name_is_a_trace_of_which_the_seed_picks_the_window() -> None:
    own, zero, one = (load_requests("art-chat-sample", TraceFilters(limit=9), seed=seed) for seed in (None, 0, 1))
    assert own == zero
    shape = load_requests(shapes()["art-chat-sample"], TraceFilters(limit=9), seed=1)
    assert shape == load_requests(str(shapes()["art-chat-sample"]), TraceFilters(limit=9), seed=1)
    assert one == zero  # the sample is a file: there is nothing to draw
    assert shape != zero


def test_a_shipped_trace_is_found_by_name_and_a_file_by_its_path() -> None:
    assert (
        load_requests("chat-small")
        == load_requests(shipped_path("chat-small"))
        == load_trace(shipped_path("chat-small"))
    )


def test_a_file_goes_before_a_shape_of_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "wildchat-like").write_text('{"timestamp":0,"input_length":5,"output_length":1,"hash_ids":[1]}\n')
    monkeypatch.chdir(tmp_path)
    assert len(load_requests("wildchat-like")) == 1


def test_filters_act_on_generated_windows_as_on_files() -> None:
    requests = load_requests("art-chat-apr5", TraceFilters(start_s=600, end_s=660, max_output=128), seed=1)
    assert requests[0].timestamp_s == 0
    assert 100 < len(requests) < 500
    assert max(request.output_tokens for request in requests) == 128


def test_a_name_that_nothing_has_lists_those_there_are() -> None:
    with pytest.raises(TraceError, match=r"nothing: No such file.*there are: agents, art-chat-apr5, .*wildchat-like"):
        load_requests("nothing")


def test_filters_that_leave_nothing_of_a_shape_are_an_error() -> None:
    with pytest.raises(TraceError, match="no request is left"):
        load_requests("wildchat-like", TraceFilters(max_input=1, limit=1, start_s=1799.9))


def test_a_shape_is_drawn_in_blocks_of_any_size_and_is_otherwise_the_same() -> None:
    coarse = load_requests("wildchat-like", TraceFilters(limit=200))
    fine = load_requests("wildchat-like", TraceFilters(limit=200), block_tokens=16)
    assert [replace(one, hash_ids=(), block_tokens=16) for one in coarse] == [replace(one, hash_ids=()) for one in fine]
    assert [len(one.hash_ids) for one in fine] == [-(-one.input_tokens // 16) for one in fine]
    # Whoever shares a block of 512 shares its 32 of 16.
    first: dict[int, int] = {}
    for wide, narrow in zip(coarse, fine, strict=True):
        for place in range(wide.input_tokens // 512):
            assert (
                first.setdefault(wide.hash_ids[place], narrow.hash_ids[32 * place + 31])
                == narrow.hash_ids[32 * place + 31]
            )


def test_a_file_has_the_blocks_that_it_was_written_in() -> None:
    with pytest.raises(TraceError, match=r"chat-small.* line 1: hash_ids is .*one per 16 tokens.*--block-tokens names"):
        load_requests("chat-small", block_tokens=16)
    assert own_block_tokens("chat-small") == own_block_tokens(shipped_path("chat-small")) == 512


def test_a_shape_may_state_its_blocks_and_they_are_no_less_than_a_token(tmp_path: Path) -> None:
    path = tmp_path / "shape.toml"
    text = shapes()["wildchat-like"].read_text()
    path.write_text(f"{text}\nblock_tokens = 16\n")
    assert (own_block_tokens(path), own_block_tokens("wildchat-like")) == (16, 512)
    path.write_text(f"{text}\nblock_tokens = 0\n")
    with pytest.raises(TraceError, match="block_tokens is 0; expected at least 1"):
        read_shape(path)


def request(index: int, ids: tuple[int, ...], user: str | None = "a", turns: int | None = 1) -> TraceRequest:
    return TraceRequest(index, float(index), 512 * max(1, len(ids)), 10, ids, None, user, turns)


def test_lengths_and_the_rate_are_over_all_requests() -> None:
    """Prompts of 100 to 500 and of 10,000 tokens in four seconds: their p95 is three quarters of the last step."""
    lengths = (100, 200, 300, 400, 500, 10_000)
    times_s = (3.0, 4.0, 4.5, 5.0, 6.0, 7.0)
    figures = describe_trace([TraceRequest(n, times_s[n], tokens, 10 * n, ()) for n, tokens in enumerate(lengths)])
    assert (figures.requests, figures.duration_s, figures.requests_per_s) == (6, 4.0, 1.5)
    assert (figures.input_p50, figures.input_mean, figures.output_mean) == (350.0, 11_500 / 6, 25.0)
    assert figures.input_p95 == 500 + 0.75 * 9500


def test_reuse_of_a_user_counts_only_what_the_same_user_had() -> None:
    figures = describe_trace([request(0, (1, 2)), request(1, (1, 3), user="b"), request(2, (1, 2))])
    assert figures.block_reuse == 3 / 6
    assert figures.user_block_reuse == 2 / 6
    assert (figures.users, figures.requests_per_user) == (2, 1.5)


def test_mean_turns_are_those_of_multi_turn_requests() -> None:
    figures = describe_trace([request(0, (1,)), request(1, (1, 2), turns=4), request(2, (1, 2, 3), turns=6)])
    assert figures.turns_mean == 5
    assert figures.multi_turn_share == 2 / 3


def test_without_conversations_there_is_a_share_but_no_mean() -> None:
    figures = describe_trace([request(0, (1,)), request(1, (2,))])
    assert (figures.turns_mean, figures.multi_turn_share) == (None, 0.0)


def test_what_one_request_does_not_tell_is_unknown_of_all() -> None:
    figures = describe_trace([request(0, (1,)), request(1, (1,), user=None, turns=None)])
    assert figures.users is None
    assert figures.requests_per_user is None
    assert figures.turns_mean is None
    assert figures.multi_turn_share is None
    assert figures.user_block_reuse is None
    assert figures.block_reuse == 0.5


def test_a_trace_of_texts_without_ids_has_no_known_reuse() -> None:
    figures = describe_trace([request(0, ()), request(1, ())])
    assert figures.block_reuse is None
    assert figures.user_block_reuse is None


def test_a_single_request_has_no_rate() -> None:
    assert isnan(describe_trace([request(0, (1,))]).requests_per_s)


# generate
@pytest.fixture
def shape() -> WorkloadShape:
    found = read_shape(next(dataset.shape for dataset in datasets() if dataset.name == DEMO_TRACE))
    assert isinstance(found, WorkloadShape)
    return found


@pytest.mark.parametrize("name", [dataset.name for dataset in datasets()])
def test_each_shipped_trace_is_what_its_parameters_give(name: str) -> None:
    dataset = next(dataset for dataset in datasets() if dataset.name == name)
    assert gzip.decompress(dataset.path.read_bytes()) == generate_trace(read_shape(dataset.shape))


def test_the_demo_trace_has_long_prompts_many_turns_and_high_reuse() -> None:
    path = shipped_path(DEMO_TRACE)
    figures = describe_trace(load_trace(path))
    assert 200 <= figures.requests <= 320
    assert 20 <= figures.duration_s <= 30
    assert 5_000 <= figures.input_p50 <= 7_000
    assert 85 <= figures.output_mean <= 110
    assert figures.block_reuse == pytest.approx(0.785, abs=0.065)
    assert path.stat().st_size < 300_000


def test_another_seed_is_another_trace_of_the_same_shape(shape: WorkloadShape, tmp_path: Path) -> None:
    write_trace(replace(shape, seed=shape.seed + 1), tmp_path / "other.jsonl")
    assert (tmp_path / "other.jsonl").read_bytes() != generate_trace(shape)
    assert describe_trace(load_trace(tmp_path / "other.jsonl")).block_reuse == pytest.approx(0.78, abs=0.12)


def test_no_prompt_is_longer_than_allowed_and_no_output_either(shape: WorkloadShape, tmp_path: Path) -> None:
    write_trace(replace(shape, input_max=4_000, output_max=90), tmp_path / "t.jsonl")
    requests = load_trace(tmp_path / "t.jsonl")
    assert max(request.input_tokens for request in requests) == 4_000
    assert max(request.output_tokens for request in requests) == 90


def test_an_id_stands_for_its_whole_prefix(shape: WorkloadShape, tmp_path: Path) -> None:
    write_trace(shape, tmp_path / "t.jsonl.gz")
    before: dict[int, int | None] = {}
    for request in load_trace(tmp_path / "t.jsonl.gz"):
        for previous, hash_id in zip((None, *request.hash_ids), request.hash_ids, strict=False):
            assert before.setdefault(hash_id, previous) == previous


def test_an_unknown_data_set_lists_those_there_are() -> None:
    with pytest.raises(TraceError, match=f"there are: .*{DEMO_TRACE}"):
        shipped_path("nothing")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (("seed = ", "sed = "), "sed is unknown; the keys are seed"),
        (("seed = ", "seed = 2.5 # "), "seed is 2.5; expected a whole number"),
        (("turns_mean = ", "turns_mean = -"), "expected a number, at least 0"),
        (("seed = ", "seed = = "), "Invalid"),
        (("seed = ", 'kind = "chat"\nseed = '), "kind is 'chat'; expected one of conversations, users, poisson"),
        (("seed = ", 'kind = "users"\nseed = '), "answer_share is missing; the keys are seed, duration_s, users"),
    ],
)
def test_wrong_parameters_are_named(tmp_path: Path, change: tuple[str, str], said: str) -> None:
    good = next(dataset.shape for dataset in datasets() if dataset.name == DEMO_TRACE)
    path = tmp_path / "shape.toml"
    path.write_text(good.read_text().replace(*change))
    with pytest.raises(TraceError, match=said):
        read_shape(path)


@pytest.mark.parametrize(
    ("value", "right"), [("0.0", True), ("999999999999.0", True), ("1e12", False), ("true", False)]
)
def test_a_parameter_is_from_0_to_below_the_largest(tmp_path: Path, value: str, right: bool) -> None:
    good = next(dataset.shape for dataset in datasets() if dataset.name == DEMO_TRACE)
    path = tmp_path / "shape.toml"
    path.write_text(re.sub(r"ramp_s = .*", f"ramp_s = {value}", good.read_text()))
    if right:
        found = read_shape(path)
        assert isinstance(found, WorkloadShape)
        assert found.ramp_s == float(value)
    else:
        with pytest.raises(TraceError, match=r"ramp_s is .*; expected a number, at least 0"):
            read_shape(path)


@pytest.mark.parametrize(
    "points",
    [
        "7",
        "[[0, 1]]",
        "[[0, 5], [0.5, 4], [1, 9]]",
        "[[0, 1], [0.5, 2]]",
        "[[0, 1], [1, true]]",
        "[[0, 1], [0, 2], [1, 3]]",
    ],
)
def test_quantiles_that_do_not_rise_from_0_to_1_are_named(tmp_path: Path, points: str) -> None:
    text = shapes()["art-chat-apr5"].read_text()
    path = tmp_path / "shape.toml"
    path.write_text(re.sub(r"input_quantiles = .*", f"input_quantiles = {points}", text))
    with pytest.raises(TraceError, match=r"shape.toml: input_quantiles is .*; expected points \[share, tokens\]"):
        read_shape(path)


def test_trace_that_cannot_be_written_leaves_the_one_that_was_there(
    shape: WorkloadShape, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    (tmp_path / "t.jsonl").write_text("an earlier one")
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        write_trace(shape, tmp_path / "t.jsonl")
    assert (tmp_path / "t.jsonl").read_text() == "an earlier one"
    assert [path.name for path in tmp_path.iterdir()] == ["t.jsonl"]


def test_a_file_without_end_is_no_shape() -> None:
    with pytest.raises(TraceError, match="/dev/zero: larger than 8,192 bytes; expected a shape"):
        read_shape(Path("/dev/zero"))


# --- Fetching from a server on loopback, in everything that can go wrong.


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


@pytest.fixture
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


@pytest.mark.usefixtures("_no_proxy")
def test_the_right_file_is_checked_and_named(dataset: RemoteDataset, tmp_path: Path) -> None:
    progress: list[tuple[int, int | None]] = []
    fetched = fetch(dataset, tmp_path / "new", on_progress=lambda done, total: progress.append((done, total)))
    assert fetched == Fetched(tmp_path / "new" / "some.jsonl", SHA256, checked=True, fresh=True)
    assert fetched.path.read_bytes() == CONTENT
    assert left_in(tmp_path / "new") == ["some.jsonl"]
    assert progress[-1] == (len(CONTENT), len(CONTENT))
    assert len(load_trace(fetched.path)) == 20_000


@pytest.mark.usefixtures("_no_proxy")
def test_a_file_of_unknown_sum_says_so(dataset: RemoteDataset, tmp_path: Path) -> None:
    fetched = fetch(replace(dataset, sha256=None), tmp_path)
    assert (fetched.sha256, fetched.checked) == (SHA256, False)


@pytest.mark.usefixtures("_no_proxy")
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


@pytest.mark.usefixtures("_no_proxy")
def test_a_few_redirects_are_followed(dataset: RemoteDataset, server: str, tmp_path: Path) -> None:
    assert fetch(dataset, tmp_path, url=f"{server}/redirect/{REDIRECTS_MAX - 1}").checked


@pytest.mark.usefixtures("_no_proxy")
def test_a_redirect_from_https_to_http_is_refused() -> None:
    request = httpx.Request("GET", "https://data.example/a")
    _refuse_downgrade(httpx.Response(302, headers={"location": "/b"}, request=request))
    _refuse_downgrade(httpx.Response(302, headers={"location": "https://mirror.example/b"}, request=request))
    with pytest.raises(FetchError, match=r"redirected from https to http://mirror\.example/b"):
        _refuse_downgrade(httpx.Response(302, headers={"location": "http://mirror.example/b"}, request=request))


@pytest.mark.usefixtures("_no_proxy")
def test_a_link_planted_under_the_temporary_name_is_not_written_through(dataset: RemoteDataset, tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_bytes(b"old")
    (tmp_path / f".some.jsonl.{os.getpid()}.part").symlink_to(victim)
    fetch(dataset, tmp_path)
    assert victim.read_bytes() == b"old"
    assert (tmp_path / "some.jsonl").read_bytes() == CONTENT


@pytest.mark.usefixtures("_no_proxy")
def test_another_file_under_the_address_is_not_kept(dataset: RemoteDataset, tmp_path: Path) -> None:
    with pytest.raises(FetchError, match=f"its sha256 is {SHA256}, expected 000"):
        fetch(replace(dataset, sha256="0" * 64), tmp_path)
    assert left_in(tmp_path) == []


@pytest.mark.usefixtures("_no_proxy")
@pytest.mark.parametrize("path", ["good", "untold"])
def test_more_than_the_data_set_can_have_is_not_written(
    dataset: RemoteDataset, server: str, tmp_path: Path, path: str
) -> None:
    with pytest.raises(FetchError, match="larger than 1,000 bytes"):
        fetch(replace(dataset, bytes_max=1000), tmp_path, url=f"{server}/{path}")
    assert left_in(tmp_path) == []


@pytest.mark.usefixtures("_no_proxy")
def test_a_server_that_drips_is_given_up(dataset: RemoteDataset, tmp_path: Path) -> None:
    times = iter([0.0, FETCH_MAX_S + 1])
    with pytest.raises(FetchError, match="not done after 6 hours"):
        fetch(dataset, tmp_path, clock=lambda: next(times))
    assert left_in(tmp_path) == []


@pytest.mark.usefixtures("_no_proxy")
def test_nobody_listening_reads_as_perhaps_offline(dataset: RemoteDataset, tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound and not listening: connections are refused
        with pytest.raises(FetchError, match=r"no connection .* is this machine offline"):
            fetch(dataset, tmp_path, url=f"http://127.0.0.1:{taken.getsockname()[1]}/x")
    assert left_in(tmp_path) == []


@pytest.mark.usefixtures("_no_proxy")
@pytest.mark.parametrize("url", ["ftp://127.0.0.1/x", "no address", "http://"])
def test_an_address_that_is_none_is_told(dataset: RemoteDataset, tmp_path: Path, url: str) -> None:
    with pytest.raises(FetchError, match="nothing was written"):
        fetch(dataset, tmp_path, url=url)


@pytest.mark.usefixtures("_no_proxy")
def test_the_right_file_that_is_there_is_kept_without_asking(dataset: RemoteDataset, tmp_path: Path) -> None:
    (tmp_path / "some.jsonl").write_bytes(CONTENT)
    assert not fetch(dataset, tmp_path, url="http://127.0.0.1:1/never").fresh


@pytest.mark.usefixtures("_no_proxy")
def test_another_file_that_is_there_is_never_overwritten(dataset: RemoteDataset, tmp_path: Path) -> None:
    (tmp_path / "some.jsonl").write_text("mine")
    with pytest.raises(FetchError, match=r"some.jsonl is there already and is not some: .* move it away first"):
        fetch(dataset, tmp_path)
    assert (tmp_path / "some.jsonl").read_text() == "mine"


@pytest.mark.usefixtures("_no_proxy")
def test_a_file_of_unknown_sum_that_is_there_is_kept_too(dataset: RemoteDataset, tmp_path: Path) -> None:
    (tmp_path / "some.jsonl").write_text("mine")
    fetched = fetch(replace(dataset, sha256=None), tmp_path)
    assert (fetched.fresh, fetched.checked) == (False, False)


# -- the registry and the command
@pytest.mark.usefixtures("_no_proxy")
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


@pytest.mark.usefixtures("_no_proxy")
def test_an_unknown_name_lists_those_there_are() -> None:
    with pytest.raises(TraceError, match="no data set 'x' can be fetched; there are: art-chat-week-20260401, "):
        remote_dataset("x")


@pytest.mark.usefixtures("_no_proxy")
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


@pytest.mark.usefixtures("_no_proxy")
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


@pytest.mark.usefixtures("_no_proxy")
def test_the_command_fails_with_the_reason(server: str, tmp_path: Path) -> None:
    words = ["datasets", "fetch", "mooncake-conversation", "--out", str(tmp_path), "--url"]
    wrong, missing = (CliRunner().invoke(app, [*words, f"{server}/{path}"]) for path in ("good", "missing"))
    assert (wrong.exit_code, missing.exit_code) == (1, 1)
    assert "not the file that is meant" in wrong.stderr
    assert "HTTP status 404" in missing.stderr
    assert left_in(tmp_path) == []
