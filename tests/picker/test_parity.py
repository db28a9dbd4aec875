"""Proxy and picker keep the same books: one request through both gives the same decision, refusal, lines and counts.

Compared are the decisions, the answer of the front end's own, the lines of the access log, the samples, the rows of
the request log, and every metric that is not of the process. What differs by nature is left out of the cases: Envoy
does not retry what a replica has answered, hedges nothing and withholds nothing. A picker bounds the time in its queue
by Envoy's message timeout, and Envoy answers for a replica that broke off before its headers.
"""

from __future__ import annotations

import asyncio
import gzip
import json
import logging
import re
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, fields, replace
from hashlib import sha256
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, cast

import pytest

from gorgo.config.fleet import ReplicaConfig
from gorgo.config.model import ClientRuleConfig, ClientsConfig, Config, LimitsConfig, OverloadConfig, RegionConfig
from gorgo.live.logs import Finished, LineLog
from gorgo.live.state import LiveState
from tests.picker.virtual import BUFFERED, DUPLEX, NONE, Call, VirtualPicker, body_message, headers_message
from tests.picker.virtual import in_virtual_time as picker_in_virtual_time
from tests.proxy.conftest import QUIET
from tests.proxy.fakes import DONE, ROLE, USAGE, chat, delta
from tests.proxy.virtual import CHAT, JSON, Script, VirtualProxy
from tests.proxy.virtual import in_virtual_time as proxy_in_virtual_time

ID = "parity-1"
SPOKEN = Script([ROLE, 0.3, delta("a"), 0.1, delta("b"), 0.2, delta("c"), USAGE, 0.1, DONE], head_s=0.2)
WHOLE = b'{"choices": [{"message": {"content": "a b c"}}], "usage": {"prompt_tokens": 12, "completion_tokens": 3}}'
REFUSED = b'{"error": {"message": "no such tool", "code": 400}}'
#: Time that the processor takes, what is measured from the start of the process, and streams: Envoy carries those.
UNCOMPARED = re.compile(
    r"gorgo_(decision_seconds|process_|\w+_created|probe_age|config_last_reload|streams_not_continued)"
)
#: Headers of the server's own.
FRAMING = {"content-length", "date"}
KEY = ("authorization", "Bearer team-a")


@dataclass(frozen=True)
class Case:
    """One request, and what its replica answers."""

    #: That the client gets of the front end, or of the replica; 499 if it leaves.
    status: int
    body: bytes = field(default=chat(stream=True))
    script: Script = field(default_factory=lambda: SPOKEN)
    media_type: str = "application/json"
    headers: tuple[tuple[str, str], ...] = ()
    route: str = CHAT
    method: str = "POST"
    config: dict[str, Any] = field(default_factory=dict)
    #: Makes the process refuse it.
    prepare: Callable[[LiveState], object] = lambda _: None
    #: The client leaves after so many seconds.
    leaves_s: float | None = None
    #: Needs a replica: no refusal of the front end's own.
    dispatched: bool = False
    #: The proxy tells the client by an error of its own in the stream; a picker cannot, and its line has no such code.
    ends_with_own_error: bool = False


def _stop(state: LiveState) -> None:
    state.stopping = True


def _fill(state: LiveState) -> None:
    state.limits = replace(state.limits, max_in_flight=0)


def _drain(state: LiveState) -> None:
    for name in state.replicas.targets:
        state.routing.router.replicas.drain(name, now=state.routing.clock())


def _use_up(state: LiveState) -> None:
    while state.routing.router.quotas.count("team-a", now=state.routing.clock()) is None:
        pass


def _break(state: LiveState) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise RuntimeError("a fault")

    state.routing.fingerprinter = cast(Any, type("Broken", (), {"sketch": refuse, "hash_sketch": refuse}))()


ZSTD = next((f"{name}.zstd" for name in ("compression", "backports") if find_spec(name)), None)
#: Without a library for zstd the same by gzip.
CODEX_CODING = "gzip" if ZSTD is None else "zstd"
#: What Codex CLI sends: no chat, and compressed.
CODEX = {
    "model": "m",
    "instructions": "You are a coding agent.",
    "input": [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": "fix the test " * 100}]}],
    "tools": [{"type": "function", "name": "shell", "parameters": {"type": "object"}, "strict": False}],
    "tool_choice": "auto",
    "reasoning": {"summary": "auto"},
    "store": False,
    "stream": True,
    "include": ["reasoning.encrypted_content"],
    "prompt_cache_key": "c",
}
#: What Claude Code sends: blocks with marks for the cache, a beta of its own, a query, and compressed where it is long.
CLAUDE = {
    "model": "m",
    "max_tokens": 32_000,
    "system": [{"type": "text", "text": "You are a CLI.", "cache_control": {"type": "ephemeral"}}],
    "messages": [{"role": "user", "content": [{"type": "text", "text": "fix the test " * 100}]}],
    "tools": [{"name": "Bash", "input_schema": {"type": "object"}}],
    "metadata": {"user_id": "u"},
    "stream": True,
}
CLAUDE_HEADERS = (("anthropic-version", "2023-06-01"), ("anthropic-beta", "claude-code-20250219"), ("x-app", "cli"))


def named(kind: str, **fields: object) -> bytes:
    """An event of `/v1/responses` or `/v1/messages`."""
    return f"event: {kind}\ndata: {json.dumps({'type': kind, **fields})}\n\n".encode()


def packed(body: object, coding: str) -> bytes:
    data = json.dumps(body).encode()
    return gzip.compress(data) if coding == "gzip" else bytes(import_module(str(ZSTD)).compress(data))


RESPONDED = Script(
    [
        named("response.created", response={"id": "resp_1"}),
        0.3,
        *(named("response.output_text.delta", delta=text) for text in ("a", "b", "c")),
        named("response.completed", response={"id": "resp_1", "usage": {"input_tokens": 400, "output_tokens": 3}}),
    ],
    head_s=0.2,
)
MESSAGED = Script(
    [
        named("message_start", message={"id": "msg_1", "usage": {"input_tokens": 400, "output_tokens": 1}}),
        0.3,
        named("content_block_start", index=0, content_block={"type": "text", "text": ""}),
        *(named("content_block_delta", index=0, delta={"type": "text_delta", "text": text}) for text in "abc"),
        named("content_block_stop", index=0),
        named("message_delta", delta={"stop_reason": "end_turn"}, usage={"output_tokens": 3}),
        named("message_stop"),
    ],
    head_s=0.2,
)

CASES = {
    "Codex CLI": Case(
        200,
        packed(CODEX, CODEX_CODING),
        RESPONDED,
        headers=(("content-encoding", CODEX_CODING), ("accept-encoding", "zstd, gzip"), ("originator", "codex_cli_rs")),
        route="/v1/responses",
        dispatched=True,
    ),
    "Claude Code": Case(
        200,
        packed(CLAUDE, "gzip"),
        MESSAGED,
        headers=(("content-encoding", "gzip"), *CLAUDE_HEADERS),
        route="/v1/messages?beta=true",
        dispatched=True,
    ),
    "Claude Code's count of tokens": Case(
        200,
        json.dumps({name: CLAUDE[name] for name in ("model", "system", "messages", "tools")}).encode(),
        Script([0.1, b'{"input_tokens": 400}'], headers=JSON),
        headers=CLAUDE_HEADERS,
        route="/v1/messages/count_tokens?beta=true",
        dispatched=True,
    ),
    "a stream": Case(200, dispatched=True),
    "a whole answer": Case(200, chat(), Script([0.4, WHOLE], headers=JSON), dispatched=True),
    "a replica's own 4xx": Case(404, script=Script([REFUSED], status=404, headers=JSON), dispatched=True),
    "an error before any content": Case(
        200, script=Script([b'data: {"error": {"message": "no", "code": 400}}\n\n', DONE]), dispatched=True
    ),
    "an error after content": Case(
        200, script=Script([delta("a"), 0.1, b'data: {"error": {"message": "no"}}\n\n', DONE]), dispatched=True
    ),
    "a stream without an end": Case(
        502, script=Script([delta("a"), 0.1, delta("b")]), dispatched=True, ends_with_own_error=True
    ),
    "a client that leaves a stream": Case(499, leaves_s=0.55, dispatched=True),
    "a client that leaves before the first token": Case(499, leaves_s=0.3, dispatched=True),
    "a client that leaves the queue": Case(499, prepare=_drain, leaves_s=0.1),
    "no JSON": Case(400, b"{nope"),
    "no body": Case(400, b""),
    "no message": Case(400, b'{"model": "m", "messages": []}'),
    "a header that cannot be read": Case(400, headers=(("x-slo-ttft-ms", "soon"),)),
    "no key": Case(401, config={"keys": True}),
    "an unknown model": Case(404, chat(stream=True, model="zzz")),
    "an unknown previous response": Case(
        404, b'{"model": "m", "input": "x", "previous_response_id": "r"}', route="/v1/responses"
    ),
    "another method": Case(405, method="GET"),
    "a body that is too large": Case(413, config={"limits": LimitsConfig(max_body_bytes=20)}),
    "another media type": Case(415, media_type="text/plain"),
    "too many requests in flight": Case(429, prepare=_fill),
    "too many requests of a client": Case(429, headers=(KEY,), config={"keys": True}, prepare=_use_up),
    "a fault of its own": Case(500, prepare=_break),
    "no replica in time": Case(503, prepare=_drain),
}


#: What a front end answers itself without a line: no replica is asked, and no prompt is read.
OWN = {
    "a process that is alive": Case(200, route="/health", method="GET"),
    "a process that is ready": Case(200, route="/ready", method="GET"),
    "no readiness while it stops": Case(503, route="/readyz", method="GET", prepare=_stop),
    "the models": Case(200, route="/v1/models", method="GET"),
    "one model": Case(200, route="/v1/models/m", method="GET"),
    "one model by its encoded name": Case(200, route="/v1/models/%6D", method="GET"),
    "a model behind an encoded slash": Case(404, route="/v1/models/org%2Fzzz", method="GET"),
    "no such model": Case(404, route="/v1/models/zzz", method="GET"),
    "too many lists of a client": Case(
        429, route="/v1/models", method="GET", headers=(KEY,), config={"keys": True}, prepare=_use_up
    ),
    "a method that lists have not": Case(405, route="/v1/models", method="PUT"),
}


@dataclass
class Books:
    """What the operator knows of the request afterwards, and what the client was answered."""

    refusal: tuple[int, Any, dict[str, str]] | None
    lines: list[dict[str, Any]]
    decisions: list[dict[str, Any]]
    samples: list[dict[str, Any]]
    request_log: list[dict[str, Any]]
    metrics: dict[str, float]


class _Rows:
    """The part of a `LineLog` that a record uses."""

    def __init__(self) -> None:
        self.rows: list[Finished] = []

    def add(self, row: Finished) -> None:
        self.rows.append(row)


class _Ledger:
    """Collects the books of one front end."""

    def __init__(self, state: LiveState, case: Case, caplog: pytest.LogCaptureFixture) -> None:
        self._state = state
        self._caplog = caplog
        self._rows = _Rows()
        self.books: Books | None = None
        state.telemetry.request_log = cast(LineLog, self._rows)
        caplog.clear()
        caplog.set_level(logging.INFO, "gorgo")
        router, now = state.routing.router, state.routing.clock()
        if "r1" in state.replicas.targets:
            router.replicas.on_probe("r1", 0.05, now=now)  # the other one is nearer
        case.prepare(state)

    def close(self, refusal: tuple[int, bytes, dict[str, str]] | None) -> None:
        router = self._state.routing.router
        found = [record for record in self._caplog.records if record.getMessage() in ("request", "request_refused")]
        exposed = self._state.telemetry.metrics.exposition().decode().splitlines()
        counts = (line.rsplit(" ", 1) for line in exposed if line.startswith("gorgo_"))
        self.books = Books(
            refusal=None if refusal is None else _compared(*refusal),
            lines=[dict(record.fields) for record in found],  # type: ignore[attr-defined]
            decisions=[each.as_dict() for each in router.view.newest_decisions(10)],
            samples=router.samples.after(0, 10)["samples"],
            request_log=[{part.name: getattr(row, part.name) for part in fields(Finished)} for row in self._rows.rows],
            metrics={name: float(value) for name, value in counts if not UNCOMPARED.match(name)},
        )
        self._state.telemetry.request_log = None


def _compared(status: int, body: bytes, headers: dict[str, str]) -> tuple[int, Any, dict[str, str]]:
    """An answer with the proxy's name, without the headers of its server."""
    shown = {name: value for name, value in headers.items() if name not in FRAMING}
    return status, json.loads(body.replace(b"picker", b"proxy")), shown


def _config(case: Case, folder: Path) -> Config:
    """Two replicas; one for what the proxy would have tried on the other."""
    rows = (
        ReplicaConfig(name="r0", region="here", url="http://10.0.0.1:8000", models=("m",)),
        ReplicaConfig(name="r1", region="there", url="http://10.0.0.2:8000", models=("m",)),
    )
    parts: dict[str, Any] = {
        "proxy": replace(QUIET, policy="gorgo"),
        "regions": (RegionConfig(name="here"), RegionConfig(name="there")),
        "replicas": rows[:1] if case.script is not SPOKEN else rows,
        "overload": OverloadConfig(no_replica_wait_s=0.5),
        **case.config,
    }
    if parts.pop("keys", False):
        path = folder / "clients.keys"
        path.write_text(f"team-a:{sha256(b'team-a').hexdigest()}\n")
        rule = ClientRuleConfig(name="team-a", requests_per_minute=2.0)
        parts["clients"] = ClientsConfig(keys_file=str(path), rules=(rule,))
    return Config(**parts)


def through_proxy(case: Case, config: Config, caplog: pytest.LogCaptureFixture) -> Books:
    ledgers: list[_Ledger] = []

    async def test(proxy: VirtualProxy) -> None:
        ledger = _Ledger(proxy.state, case, caplog)
        ledgers.append(ledger)
        answered = await proxy.ask(
            case.body,
            route=case.route,
            headers=[(name.encode(), value.encode()) for name, value in (("x-request-id", ID), *case.headers)],
            leaves_s=case.leaves_s,
            method=case.method,
            extends=True,
            media_type=case.media_type.encode(),
        )
        own = not case.dispatched and answered.status != 0
        ledger.close((answered.status, answered.body, answered.headers) if own else None)

    proxy_in_virtual_time(test, config, {row.name: [case.script] for row in config.replicas})
    assert ledgers[0].books is not None
    return ledgers[0].books


def through_picker(case: Case, config: Config, caplog: pytest.LogCaptureFixture) -> Books:
    ledgers: list[_Ledger] = []

    async def test(picker: VirtualPicker) -> None:
        ledger = _Ledger(picker.state.live, case, caplog)
        ledgers.append(ledger)
        call = picker.call()
        serving = asyncio.create_task(_serve(call, case))
        await asyncio.wait((serving,), timeout=case.leaves_s)
        serving.cancel()
        await asyncio.wait((serving,))
        if not serving.cancelled():
            serving.result()
        call.close()
        ledger.close(_refusal(call) if call.output.ends else None)

    picker_in_virtual_time(test, config)
    assert ledgers[0].books is not None
    return ledgers[0].books


async def _serve(call: Call, case: Case) -> None:
    """Envoy's part: a gateway sends both bodies, and an own Envoy what the picker answers before any body."""
    bodiless = case.method != "POST"
    call.feed(
        headers_message(
            "request_headers",
            *(("x-request-id", ID), ("content-type", case.media_type), *case.headers),
            mode=BUFFERED if bodiless else DUPLEX,
            response_mode=NONE if bodiless else DUPLEX,
            end=bodiless,
            path=case.route,
            method=case.method,
        )
    )
    if not call.output.ends:
        call.feed(body_message("request_body", case.body))
    while not call.output.sent:
        call.output.changed.clear()
        await call.output.changed.wait()
    if call.output.ends:
        return
    script = case.script
    await asyncio.sleep(script.head_s)
    headers = [(name.decode(), value.decode()) for name, value in script.headers]
    call.feed(headers_message("response_headers", (":status", str(script.status)), *headers))
    for step in script.steps:
        if isinstance(step, bytes):
            call.feed(body_message("response_body", step, end=False))
        else:
            assert isinstance(step, float), "an answer that breaks off is not compared"
            await asyncio.sleep(step)
    call.feed(body_message("response_body", b"", end=True))


def _refusal(call: Call) -> tuple[int, bytes, dict[str, str]]:
    found = call.last.immediate_response
    headers = {each.header.key: each.header.raw_value.decode() for each in found.headers.set_headers}
    return found.status.code, found.body, headers


@pytest.mark.parametrize("name", CASES)
def test_proxy_and_picker_keep_the_same_books_of(name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    case = CASES[name]
    config = _config(case, tmp_path)
    proxy, picker = through_proxy(case, config, caplog), through_picker(case, config, caplog)
    if case.ends_with_own_error:
        assert proxy.lines[0].pop("code") == "upstream_failed"
        assert picker.lines[0].pop("code") is None
    if not case.dispatched and case.leaves_s is None:
        assert proxy.refusal is not None
        assert proxy.refusal[0] == case.status
    assert [line["status"] for line in proxy.lines] == [case.status]
    for part in fields(Books):
        assert getattr(picker, part.name) == getattr(proxy, part.name), part.name
    assert asdict(picker) == asdict(proxy)


@pytest.mark.parametrize("name", OWN)
def test_proxy_and_picker_answer_the_same_without_a_replica(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    case = OWN[name]
    config = _config(case, tmp_path)
    proxy, picker = through_proxy(case, config, caplog), through_picker(case, config, caplog)
    assert proxy.refusal is not None
    assert (proxy.refusal[0], proxy.lines) == (case.status, [])
    for part in fields(Books):
        assert getattr(picker, part.name) == getattr(proxy, part.name), part.name
