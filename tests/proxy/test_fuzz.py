"""Bodies, answers, files, requests and streams of any shape: read, passed or refused; nothing hangs, and memory is
bounded.
"""

from __future__ import annotations

import asyncio
import gzip
import json
import logging
import os
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from random import Random
from tempfile import NamedTemporaryFile
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gorgo.config.fleet import ReplicaConfig
from gorgo.config.load import parse_config
from gorgo.config.model import ClientsConfig, Config, LimitsConfig, RegionConfig
from gorgo.config.values import BLOCK_BYTES
from gorgo.config.weights_file import parse_weights_file
from gorgo.core.messages.request import AttemptResult
from gorgo.core.prompt.fingerprint import BytesPerToken, Fingerprinter, PromptHeads
from gorgo.core.stream import (
    FirstTokenDetector,
    StreamEnd,
    StreamState,
    UsageEventFilter,
    UsageReader,
    end_of_stream,
    read_usage,
)
from gorgo.errors import GorgoError, TraceError
from gorgo.lab.traces import load_trace, read_row
from gorgo.live.control.state_file import parse_state
from gorgo.live.http.body import ResettableTimeout
from gorgo.live.http.errors import HttpError
from gorgo.live.http.headers import Header
from gorgo.live.parsing.json_body import check_media_type, read_fields
from gorgo.live.request.parse import INFERENCE_ROUTES, ParsedRequest, parse_request
from gorgo.live.request_options import ClientPolicies, read_client_keys
from gorgo.live.served_models import ServedModels
from gorgo.live.state import Routing
from gorgo.live.stored_responses import StoredResponses
from gorgo.live.upstream.client import UpstreamError
from gorgo.proxy.exchange.relay import relay
from gorgo.proxy.exchange.response import ResponseWriter
from tests.proxy.conftest import QUIET, Start, config_for
from tests.proxy.fakes import DONE, ROLE, USAGE, answer, chat, delta
from tests.proxy.integrity.engines import lying, says
from tests.proxy.passages import IteratedSource, passage_to
from tests.proxy.raw import connected

# --- Seeded mutations of bytes and JSON, and how many of them: a few seconds' worth, more by `GORGO_FUZZ_EXAMPLES`.


EXAMPLES = int(os.environ.get("GORGO_FUZZ_EXAMPLES", "60"))
#: What parsers stumble over.
SPLINTERS = (
    b"\0", b"\r", b"\n", b"\r\n\r\n", b"\xff\xfe", b"\xef\xbb\xbf", b"\xed\xa0\x80", b"\xf0\x9f\x98", b"NaN",
    b"Infinity", b"1e999999", b"-0", b"9" * 400, b"[" * 3000, b'{"a":' * 3000, b'"\\ud800"', b"null", b"true", b"{}",
    b"[]", b'""', b",", b":", b"&a *a", b"!!python/object:os.system", b"<<: *a", b"\t", b" " * 300, b"%n%s",
    b"../" * 20, b"\x1b[2J",
)  # fmt: skip


def mutated(chance: Random, text: bytes) -> bytes:
    """`text` with one to four faults."""
    for _ in range(chance.randint(1, 4)):
        at, to = sorted(chance.randrange(len(text) + 1) for _ in range(2))
        match chance.randrange(5):
            case 0:
                text = text[:at] + chance.choice(SPLINTERS) + text[at:]
            case 1:
                text = text[:at] + text[min(to, at + 20) :]
            case 2:
                text = text[:to] + text[at:to] + text[to:]
            case 3:
                text = text[:at] + bytes([chance.randrange(256)]) + text[at + 1 :]
            case _:
                text = text[:at]
    return text


def odd_value(chance: Random, depth: int = 0) -> Any:
    """Anything that JSON can say."""
    kinds = 11 if depth < 3 else 9
    match chance.randrange(kinds):
        case 0:
            return None
        case 1:
            return chance.choice([True, False])
        case 2:
            return chance.choice([0, -1, 2**63, -(2**70), 10**300])
        case 3:
            return chance.choice([0.0, -0.0, 1e308, 5e-324])
        case 4:
            return ""
        case 5:
            return chance.choice(["a", "user", "\ud800", "\0", "é" * 300, "text", "<|im_end|>"])
        case 6 | 7 | 8:
            return chance.choice(["http://169.254.169.254/", "x" * 2000, "-1", "true"])
        case 9:
            return [odd_value(chance, depth + 1) for _ in range(chance.randrange(4))]
        case _:
            return {chance.choice(KEYS): odd_value(chance, depth + 1) for _ in range(chance.randrange(5))}


KEYS = (
    "model", "messages", "content", "role", "prompt", "text", "input", "input_ids", "stream", "stream_options", "tools",
    "tool_calls", "image_url", "url", "previous_response_id", "store", "usage", "system", "sampling_params", "type", "",
)  # fmt: skip


def odd_body(chance: Random) -> bytes:
    """A body that may be an object with the keys of one."""
    body = {key: odd_value(chance) for key in chance.sample(KEYS, chance.randrange(1, 6))}
    text = json.dumps(body if chance.random() < 0.9 else odd_value(chance)).encode()
    return mutated(chance, text) if chance.random() < 0.3 else text


# --- Bodies and headers of any shape, made small by hypothesis: read as they came, or refused as the client's fault.


ROUTING = cast(
    Routing,
    SimpleNamespace(
        client_policies=ClientPolicies.for_client(config_for([])),
        router=SimpleNamespace(token_ratios=BytesPerToken()),
        fingerprinter=Fingerprinter(key=7, block_bytes=BLOCK_BYTES),
        models=ServedModels(config_for([])),
        prompt_heads=PromptHeads(),
        scaling=SimpleNamespace(hot_prompts=None),
    ),
)
bounded = settings(max_examples=EXAMPLES, derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow])

words = st.sampled_from(["user", "text", "m", ""]) | st.text(max_size=8)
scalars = st.none() | st.booleans() | st.integers() | st.floats() | words
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(KEYS), inner, max_size=3),
    max_leaves=6,
)
bodies = st.dictionaries(st.sampled_from((*KEYS, "n")), values, max_size=5)
#: What h11 lets through: visible bytes and blanks between them.
header_values = st.binary(max_size=40).map(lambda raw: bytes(byte for byte in raw if byte > 31 and byte != 127).strip())
names = st.sampled_from(
    [b"x-gorgo-priority", b"x-slo-ttft-ms", b"x-llm-d-slo-ttft-ms", b"x-session-id", b"content-type", b"x-request-id"]
)


def ask(route: str, body: bytes, headers: list[tuple[bytes, bytes]]) -> ParsedRequest | None:
    """What is read of it; nothing if it is refused, which it may be as the client's fault alone."""
    try:
        check_media_type(headers)
        fields = read_fields(route, body, ROUTING.fingerprinter)
        return parse_request(ROUTING, StoredResponses(), route, headers, body, fields, request_id="r", received_s=0.0)
    except HttpError as refusal:
        refused = refusal
    assert refused.status in (400, 404, 415)
    assert refused.message.isprintable()
    return None


@bounded
@given(st.sampled_from(INFERENCE_ROUTES), bodies)
def test_body_of_any_shape_is_read_as_it_came_or_refused(route: str, body: dict[str, Any]) -> None:
    raw = json.dumps(body).encode()
    found = ask(route, raw, [])
    if found is not None:
        assert found.body == raw
        assert found.route.prompt_tokens >= 0
        assert not found.adds_usage or json.loads(found.body_for(None, with_usage=True))["stream_options"] == {
            "include_usage": True
        }


@bounded
@given(st.sampled_from(INFERENCE_ROUTES), st.binary(max_size=200) | st.text().map(lambda text: text.encode("utf-16")))
def test_bytes_that_are_no_body_are_refused(route: str, raw: bytes) -> None:
    assert ask(route, raw, []) is None


@bounded
@given(st.lists(st.tuples(names, header_values), max_size=4))
def test_headers_of_any_value_are_followed_or_refused(headers: list[tuple[bytes, bytes]]) -> None:
    found = ask("/v1/completions", b'{"prompt": "a"}', headers)
    if found is not None:
        assert -100 <= found.route.priority <= 100
        assert found.route.slo_ttft_s is None or found.route.slo_ttft_s > 0


# --- Answers of engines, mutated and split anywhere: passed whole, replaced, or ended so that it shows. Nothing hangs.


CHAT = "/v1/chat/completions"
STREAM = ROLE + b": ping\n\n" + delta("Hé") + delta("b") + USAGE + DONE
WHOLE = b'{"choices": [], "usage": {"prompt_tokens": 3}}'


def chunked(*parts: bytes) -> bytes:
    return b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in parts) + b"0\r\n\r\n"


ANSWERS = (
    b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(WHOLE) + WHOLE,
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
    + chunked(ROLE, delta("a"), delta("b"), USAGE, DONE),
    b"HTTP/1.1 429 Busy\r\nretry-after: 1\r\ncontent-length: 2\r\n\r\n{}",
)


async def test_answer_with_faults_ends_for_the_client_and_leaves_nothing(
    start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    chance = Random("answers")
    async with AsyncExitStack() as stack:
        liar = await stack.enter_async_context(lying(says()))
        config = Config(
            proxy=QUIET,
            regions=(RegionConfig(name="here"),),
            replicas=(ReplicaConfig(name="liar", region="here", url=liar.url, engine="openai"),),
            limits=LimitsConfig(first_token_timeout_s=0.05, response_timeout_s=0.05, stream_idle_timeout_s=0.05),
        )
        fleet = await start.proxy(config, [])
        for _ in range(EXAMPLES):
            said = mutated(chance, chance.choice(ANSWERS))
            liar.speak = says(said, close=chance.random() < 0.5)
            async with connected(fleet.addresses.data) as client:
                await client.post(CHAT, chat(stream=True), "connection: close")
                got = await client.rest()
            assert 200 <= int(got.split()[1]) <= 504, said
            assert b"internal_error" not in got, said
        await fleet.idle()
    assert [record for record in caplog.records if record.levelno >= logging.ERROR] == []


class Pieces(IteratedSource):
    """An answer in pieces, which may break off."""

    status = 200

    def __init__(self, parts: Sequence[bytes], *, breaks: bool) -> None:
        self.headers: Sequence[Header] = [(b"Content-Type", b"text/event-stream")]
        self._parts = parts
        self._breaks = breaks

    async def each(self) -> AsyncIterator[bytes]:
        for part in self._parts:
            yield part
        if self._breaks:
            raise UpstreamError("disconnected")


async def relayed(
    parts: Sequence[bytes], *, strip: bool = False, breaks: bool = False
) -> tuple[bytes, AttemptResult | str]:
    """What its client was sent, and how it ended."""
    sent: list[bytes] = []

    async def send(message: Any) -> None:
        sent.append(message.get("body", b""))

    with ResettableTimeout(1000.0) as dog:
        try:
            passage = passage_to(ResponseWriter(send), dog, strip_usage=strip)
            outcome = await relay(passage, Pieces(parts, breaks=breaks))
        except UpstreamError as failure:
            return b"".join(sent), failure.reason
    return b"".join(sent), outcome.result


async def test_stream_passes_whole_wherever_it_is_split() -> None:
    for at in range(len(STREAM) + 1):
        parts = [STREAM[:at], STREAM[at:]]
        assert await relayed(parts) == (STREAM, AttemptResult.COMPLETED)
        assert await relayed(parts, strip=True) == (STREAM.replace(USAGE, b""), AttemptResult.COMPLETED)
    assert await relayed([STREAM[n : n + 1] for n in range(len(STREAM))]) == (STREAM, AttemptResult.COMPLETED)


async def test_stream_that_breaks_off_anywhere_is_kept_back_or_passed_so_far() -> None:
    first = delta("Hé")
    content = STREAM.index(first) + len(first)
    for at in range(len(STREAM)):
        got, ended = await relayed([STREAM[:at]], breaks=True)
        is_proven = end_of_stream("/v1/chat/completions", STREAM[:at]) is StreamEnd.COMPLETE
        assert ended == (AttemptResult.COMPLETED if at >= content and is_proven else "disconnected"), at
        assert got == (STREAM[:at] if at >= content else b"")


async def test_mutated_stream_passes_as_it_is_or_not_at_all() -> None:
    chance = Random("relay")
    for _ in range(EXAMPLES * 4):
        stream = mutated(chance, STREAM)
        cuts = sorted(chance.randrange(len(stream) + 1) for _ in range(chance.randrange(8)))
        parts = [stream[a:b] for a, b in zip([0, *cuts], [*cuts, len(stream)], strict=True)]
        got, ended = await relayed([part for part in parts if part])
        if ended == "truncated":
            assert stream.startswith(got)
        else:
            assert got == (stream if isinstance(ended, AttemptResult) and got else b""), ended


def test_trace_file_with_faults_is_read_or_refused_by_an_error_of_ours(tmp_path: Path) -> None:
    row = {"timestamp": 1, "input_length": 10, "output_length": 1, "hash_ids": [1]}
    good = b"".join(json.dumps(row | {"timestamp": number}).encode() + b"\n" for number in range(5))
    chance, path = Random("traces"), tmp_path / "trace.jsonl"
    refused = 0
    for number in range(EXAMPLES * 2):
        path.write_bytes(mutated(chance, gzip.compress(good, mtime=0) if number % 3 == 0 else good))
        try:
            load_trace(path)
        except TraceError:
            refused += 1
    assert 0 < refused < EXAMPLES * 2


# --- Files of operators, mutated: read, or refused by an error of ours; never anything else.


ROOT = Path(__file__).parents[2]
REGIONS = (ROOT / "regions.yaml").read_bytes()
WEIGHTS = b'{"policy": "gorgo-ms", "weights": {"w_rtt": 1.0, "lambda": 0.2}, "note": "x"}'
STATE = json.dumps(
    {
        "gorgo_state": 1,
        "policy": "gorgo-ms",
        "weights": {"w_rtt": 1.0},
        "version": 3,
        "frozen": None,
        "draining": [],
        "configured": {"policy": "gorgo-ms", "weights": {}, "draining": []},
    }
).encode()
ROW = b'{"timestamp": 27482, "input_length": 1955, "output_length": 52, "hash_ids": [46, 47, 48, 49]}'


def read_trace_row(text: bytes) -> object:
    return read_row(text.decode("utf-8", "surrogateescape"), file="t", line_number=1, index=0)


def read_keys(text: bytes) -> object:
    with NamedTemporaryFile() as file:
        file.write(text)
        file.flush()
        return read_client_keys(ClientsConfig(keys_file=file.name))


READERS: dict[str, tuple[bytes, Callable[[bytes], object]]] = {
    "regions.yaml": (REGIONS, parse_config),
    "weights": (WEIGHTS, lambda text: parse_weights_file(text, source="w")),
    "state": (STATE, lambda text: parse_state(text, source="s")),
    "trace": (ROW, read_trace_row),
    "client keys": (
        b"# team a and team b, since May; rotated in autumn\na:" + b"0" * 64 + b"\nb:" + b"1" * 64,
        read_keys,
    ),
}


@pytest.mark.parametrize("kind", READERS)
def test_file_with_faults_is_read_or_refused_by_an_error_of_ours(kind: str) -> None:
    good, read = READERS[kind]
    chance = Random(f"file {kind}")
    assert read(good), "what is read before it has faults"
    count = EXAMPLES // 4 if kind == "regions.yaml" else EXAMPLES * 4
    assert_some_are_read(read, [mutated(chance, good) for _ in range(count)])


@pytest.mark.parametrize("kind", ["weights", "state", "trace"])
def test_file_with_odd_values_is_read_or_refused_by_an_error_of_ours(kind: str) -> None:
    good, read = READERS[kind]
    chance = Random(f"values {kind}")
    texts = []
    for _ in range(EXAMPLES * 4):
        fields: dict[str, Any] = json.loads(good)
        for key in chance.sample(list(fields), chance.randint(1, len(fields))):
            fields[key] = odd_value(chance)
        texts.append(json.dumps(fields).encode())
    assert_some_are_read(read, texts)


def assert_some_are_read(read: Callable[[bytes], object], texts: Sequence[bytes]) -> None:
    """Faults that are all refused, or none, would show nothing of the other half."""
    refused = 0
    for text in texts:
        try:
            read(text)
        except GorgoError:
            refused += 1
    assert 0 < refused < len(texts)


# --- Requests of any kind over a socket: an answer below 500 or the replica's own, and a proxy that goes on.


ADMIN = (
    ("PUT", "/admin/weights"),
    ("PUT", "/admin/policy"),
    ("POST", "/admin/freeze"),
    ("POST", "/admin/unfreeze"),
    ("POST", "/admin/flush"),
    ("POST", "/admin/replicas/r0/drain"),
    ("GET", "/admin/samples"),
)
ADMIN_KEYS = (
    "weights",
    "policy",
    "version",
    "expected_version",
    "allow_out_of_range",
    "reason",
    "by",
    "replica",
    "drain",
    "",
)


def no_fault(caplog: pytest.LogCaptureFixture) -> None:
    ours = [record for record in caplog.records if record.name.startswith(("gorgo", "asyncio"))]
    assert [record for record in ours if record.levelno >= logging.ERROR] == []


async def test_body_of_any_kind_is_passed_on_or_refused(start: Start, caplog: pytest.LogCaptureFixture) -> None:
    fleet = await start.fleet([answer(200)])
    chance = Random("bodies")
    for _ in range(EXAMPLES * 2):
        route, body = chance.choice(INFERENCE_ROUTES), odd_body(chance)
        response = await fleet.client.post(route, content=body)
        assert response.status_code in (200, 400, 404), body
        if response.status_code == 200:
            assert fleet.replicas[0].seen[-1].body == body
        else:
            assert response.json()["error"]["code"]
    await fleet.idle()
    no_fault(caplog)


async def test_bytes_of_any_kind_are_answered_or_cut(start: Start, caplog: pytest.LogCaptureFixture) -> None:
    fleet = await start.fleet([answer(200)], header_timeout_s=0.05, body_timeout_s=0.05)
    chance = Random("bytes")
    body = chat()
    good = b"POST /v1/chat/completions HTTP/1.1\r\nhost: g\r\nx-request-id: a\r\ncontent-type: application/json\r\n"
    good += b"content-length: %d\r\nconnection: close\r\n\r\n%b" % (len(body), body)
    for _ in range(EXAMPLES):
        request = mutated(chance, good)
        async with connected(fleet.addresses.data) as client:
            client.writer.write(request)
            try:
                said = await client.head() if request else b""
            except (asyncio.IncompleteReadError, ConnectionError):
                said = b""  # cut
        assert not said or 200 <= int(said.split()[1]) < 505, request
    assert (await fleet.client.post("/v1/chat/completions", content=body)).status_code == 200
    await fleet.idle()
    no_fault(caplog)


async def test_header_of_any_kind_is_no_fault(start: Start, caplog: pytest.LogCaptureFixture) -> None:
    fleet = await start.fleet([answer(200)])
    chance = Random("headers")
    names = [b"x-request-id", b"content-type", b"x-session-id", b"authorization", b"expect", b"te", b"connection"]
    names += [b"accept-encoding", b"x-gorgo-priority", b"x-slo-ttft-ms", b"x-llm-d-slo-ttft-ms", b"cookie"]
    names += [b"x-gorgo-prefix-len"]
    values = [splinter for splinter in SPLINTERS if not {0, 10, 13} & set(splinter)][:20]
    for _ in range(EXAMPLES):
        lines = b"".join(b"%b: %b\r\n" % (chance.choice(names), chance.choice(values).strip()) for _ in range(3))
        size = len(chat())
        async with connected(fleet.addresses.data) as client:
            client.writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nhost: g\r\n%b" % lines)
            client.writer.write(b"connection: close\r\ncontent-length: %d\r\n\r\n%b" % (size, chat()))
            said = await client.rest()
        status = int(said.split()[1])
        assert 200 <= status < 500, (lines, said)
    await fleet.idle()
    no_fault(caplog)


async def test_admin_body_of_any_kind_is_taken_or_refused(start: Start, caplog: pytest.LogCaptureFixture) -> None:
    fleet = await start.fleet([answer(200)])
    chance = Random("admin")
    for _ in range(EXAMPLES * 2):
        method, path = chance.choice(ADMIN)
        fields = {key: odd_value(chance) for key in chance.sample(ADMIN_KEYS, chance.randrange(4))}
        text = json.dumps(fields).encode()
        body = mutated(chance, text) if chance.random() < 0.3 else text
        response = await fleet.admin.request(method, path, content=body)
        assert response.status_code in (200, 400, 404, 405, 409, 413, 415), (path, body, response.text)
    await asyncio.sleep(0)
    assert (await fleet.client.get("/health")).status_code == 200
    no_fault(caplog)


# --- Streams split anywhere and mutated anyhow: what reads them on the way changes no byte, and holds a bounded part.


ROUTES = ("/v1/chat/completions", "/v1/completions", "/generate", "/v1/responses", "/v1/messages")
GOOD = ROLE + b": ping\n\n" + delta("Hé\n\ud7ff") + delta('"usage"') + b"event: x\r\ndata: {}\r\n\r\n" + DONE
#: The filter's and the tail's own bounds are 64 KiB or less; none may hold more than a few of them.
HELD_BYTES = 1 << 18


def pieces(chance: Random, text: bytes) -> list[bytes]:
    cuts = sorted(chance.randrange(len(text) + 1) for _ in range(chance.randrange(12)))
    return [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]


def filtered(parts: list[bytes]) -> bytes:
    usage_filter = UsageEventFilter()
    return b"".join(map(usage_filter.feed, parts)) + usage_filter.flush()


def test_filter_takes_out_the_usage_event_alone_wherever_the_stream_is_split() -> None:
    stream = GOOD.removesuffix(DONE) + USAGE + DONE
    for at in range(len(stream) + 1):
        assert filtered([stream[:at], stream[at:]]) == GOOD


def test_filter_changes_nothing_in_a_stream_without_a_usage_event() -> None:
    chance = Random("filter")
    for _ in range(EXAMPLES * 4):
        stream = mutated(chance, GOOD)
        assert filtered(pieces(chance, stream)) == stream


def test_filter_takes_out_nothing_but_whole_events_of_a_mutated_stream() -> None:
    chance = Random("taken")
    for _ in range(EXAMPLES * 4):
        stream = mutated(chance, GOOD + USAGE + DONE)
        whole = filtered([stream])
        assert filtered(pieces(chance, stream)) == whole
        assert len(stream) - len(whole) in range(len(stream) + 1)
        rest = iter(stream)
        assert all(byte in rest for byte in whole), "the order changed, or something was put in"


def test_scanner_and_tail_see_the_same_however_a_mutated_stream_is_split() -> None:
    chance = Random("scan")
    for _ in range(EXAMPLES * 4):
        route, stream = chance.choice(ROUTES), b"\n" + mutated(chance, GOOD + USAGE + DONE)
        seen = []
        for parts in ([stream], pieces(chance, stream), [stream[n : n + 1] for n in range(len(stream))]):
            scanner, tail = FirstTokenDetector(route), UsageReader()
            scans: list[StreamState] = []
            for part in parts:
                tail.feed(part)
                if not scans or scans[-1] is StreamState.WAITING:
                    scans.append(scanner.feed(part))
            seen.append((scans[-1], scanner.error_status, tail.usage()))
        assert seen[0] == seen[1] == seen[2]


def test_body_of_anything_has_usage_or_none() -> None:
    chance = Random("usage")
    for _ in range(EXAMPLES * 8):
        usage = read_usage(mutated(chance, USAGE.removeprefix(b"data: ")))
        counts = () if usage is None else (usage.prompt_tokens, usage.cached_tokens, usage.output_tokens)
        assert all(count is None or count >= 0 for count in counts)


def test_line_without_an_end_is_held_in_part_only() -> None:
    usage_filter, scanner, tail = UsageEventFilter(), FirstTokenDetector(ROUTES[0]), UsageReader()
    fed = passed = 0
    for _ in range(400):
        chunk = b"x" * 16_384
        fed += len(chunk)
        passed += len(usage_filter.feed(chunk))
        scanner.feed(chunk)
        tail.feed(chunk)
        assert fed - passed < HELD_BYTES
    for reader in (usage_filter, scanner, tail, scanner._reader):
        names = getattr(reader, "__slots__", ()) or vars(reader)
        held = [value for name in names if isinstance(value := getattr(reader, name), (bytes, bytearray))]
        assert sum(map(len, held)) < HELD_BYTES
