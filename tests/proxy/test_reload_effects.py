"""Each key that is in force at once after a reload, shown by what the proxy does with it, and many reloads under
load.
"""

from __future__ import annotations

import asyncio
import gc
import itertools
import json
import os
import re
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, fields
from functools import partial
from pathlib import Path

import pytest
from aiohttp import web

from gorgo.config.model import LearningConfig, SharedConfig
from gorgo.core.fleet.snapshot import ReplicaSnapshot
from tests.documents import DOCS, code, rows_of, section
from tests.live.tokens.files import model_folder, needs_tokenizers
from tests.proxy.authority import Authority, engine, needs_openssl
from tests.proxy.conftest import Start, until
from tests.proxy.exchange.test_continuation import text_of as words_of
from tests.proxy.fakes import DONE, REPLICA, FakeReplica, chat, delta
from tests.proxy.followed import Followed, follow, regions
from tests.proxy.looks import (
    ENVIRON,
    KEY,
    LONG_S,
    OTHER_KEY,
    SHORT_S,
    Edits,
    Ground,
    Look,
    Rig,
    allowed_origin,
    asked,
    asked_of_one_that_breaks_off,
    asked_of_one_that_fails,
    beside,
    beside_one_that_waits,
    both_keys,
    bounds_of_routes,
    common_name,
    compared,
    connection_beside_another,
    counts_tokens,
    cut_off_by_failures_a_minute_apart,
    events_from,
    first_load_of_a_newcomer,
    half_a_body,
    half_a_head,
    header,
    heads,
    late_request,
    metrics_for_clients,
    models,
    more_failures_than_the_least_of_retries,
    most_of_a_repeated_prompt_is_estimated,
    next_after_a_long_prefill,
    next_one,
    order_of_two_who_wait,
    predicted_to_take_minutes,
    probed,
    probed_by,
    prompt_tokens,
    pushed,
    raw,
    ready,
    region_of_the_proxy,
    replicas,
    scored_beside,
    scraped,
    scripted,
    second,
    sent,
    served_by,
    share_that_explores,
    stopping,
    tenant_at_the_replica,
    term,
    text_of,
    two_requests,
)
from tests.proxy.raw import silent_port

# --- Each key that is in force at once after a reload, shown by what the proxy does with it.
#
# A row of `EFFECTS` changes one key in the file of a running proxy and looks at one behaviour before and after. A key
# of the reference that has no row here fails, and so does a row whose key is not in the reference.


#: A look that would wait for something that does not happen.
NOT_TAKEN = None


@dataclass(frozen=True)
class Effect:
    """What a change of some keys changes.

    Parameters
    ----------
    keys:
        As in the reference; those that make sense only together.
    new:
        Of the new file.
    look:
        Is taken before and after the reload.
    was, now:
        Answers of `look`.
    old:
        Of both files.
    """

    keys: str
    new: Edits
    look: Look
    was: object
    now: object
    old: Edits = field(default_factory=dict)


def one(key: str, value: object, look: Look, was: object, now: object, old: Edits | None = None) -> Effect:
    return Effect(key, {key: value}, look, was, now, old or {})


#: The text of the look has two tokens.
FIVE_TOKENS = "<s>{{ messages[0].content }}</s><s>"


def template_file(ground: Ground, source: str) -> str:
    path = ground.folder / "given.jinja"
    path.write_text(source)
    return str(path)


async def wanted_replicas(rig: Rig) -> int | None:
    """The number that is said of the first group."""
    scaling = rig.followed.state.routing.scaling
    scaling.decide()
    return next((one.wanted for one in scaling.wanted()), None)


PREDICTS: Edits = {"proxy.policy": "gorgo-ms"}
#: A stream that is open leaves no place for another one.
FULL: Edits = PREDICTS | {"overload.max_concurrency_per_replica": 1}
KEYED: Edits = {"clients.keys_file": lambda ground: ground.keys_file(team=KEY, other=OTHER_KEY)}
DEAF: Edits = {"replicas[].url": lambda ground: f"http://127.0.0.1:{ground.deaf}"}
TEAM: Edits = KEYED | {"clients.rules[].name": "team"}
TIMEOUTS = ("connect", "first_token", "response", "stream_idle", "request")
PATIENT: Edits = {f"limits.{phase}_timeout_s": LONG_S for phase in TIMEOUTS}
LATE: Edits = PREDICTS | {
    "overload.queue_enabled": False,
    "overload.hedge_budget_ratio": 0.5,
}


def timeouts() -> list[Effect]:
    """Of all regions, and the one that a region may set."""
    looks: dict[str, tuple[Look, str, Edits]] = {
        "connect": (asked(), "504 upstream_timeout", DEAF),
        "first_token": (asked("mute"), "504 upstream_timeout", {}),
        "response": (asked("mute", stream=False), "504 upstream_timeout", {}),
        "stream_idle": (asked("open"), "200 upstream_failed", {}),
        "request": (asked("open"), "200 total_timeout", {}),
    }
    # None may be longer than the whole. That begins before any of the others does, so it is the one that ends first.
    whole = {f"limits.{phase}_timeout_s": SHORT_S for phase in TIMEOUTS}
    return [
        Effect(
            f"{place}.{phase}_timeout_s",
            whole if (place, phase) == ("limits", "request") else {f"{place}.{phase}_timeout_s": SHORT_S},
            look,
            NOT_TAKEN,
            now,
            PATIENT | old,
        )
        for place, phases in (("regions[].limits", ["first_token"]), ("limits", TIMEOUTS))
        for phase in phases
        for look, now, old in [looks[phase]]
    ]


ROUTES: Edits = {"proxy.policy": "multi-depth"}
EFFECTS = [
    one("proxy.region", "there", region_of_the_proxy, "here", "there"),
    one(
        "proxy.policy",
        "simple-session-affinity",
        served_by(4, headers={"x-session-id": "s"}),
        {"a", "b"},
        {"a"},
        second(),
    ),
    one(
        "proxy.weights",
        {"w_rtt": 2.0},
        term("rtt"),
        50.0,
        200.0,
        {"proxy.policy": "gorgo"},
    ),
    one("proxy.explore", 20, share_that_explores, 0.0, 0.02),
    one("proxy.shadow_policy", "nearest", scored_beside, False, True, second()),
    one("proxy.probe_interval_s", 0.01, probed, NOT_TAKEN, True),
    one("proxy.probe_interval_s", 30.0, cut_off_by_failures_a_minute_apart, True, False, second()),
    one("proxy.scrape_interval_s", 0.1, scraped, NOT_TAKEN, True),
    one("proxy.pass_headers", ["x-tenant-id"], tenant_at_the_replica, [], ["t"]),
    one("proxy.cors.allow_origins", ["https://a.test"], allowed_origin, None, "https://a.test"),
    one("proxy.metrics_listener", "admin", metrics_for_clients, 200, 404),
    one("proxy.min_ready_replicas", 2, ready, "200", "503 too_few_replicas", second(draining=True)),
    Effect(
        "regions[].name replicas[].region",
        {"regions[].name": "home", "replicas[].region": "home", "proxy.region": "home"},
        header("x-gorgo-region"),
        "here",
        "home",
    ),
    one("replicas[].name", "c", header("x-gorgo-replica"), "a", "c"),
    one("replicas[].url", lambda ground: ground.b.url, models, ["of-a"], ["of-b"]),
    one("replicas[].engine", "openai", probed_by, "/ping", "/v1/models"),
    one("replicas[].models", ["x"], asked(), "200", "404 model_not_found"),
    one(
        "replicas[].api_key_env",
        "REPLICA_KEY",
        sent(lambda request: request.header("authorization")),
        [],
        ["Bearer sk-replica"],
    ),
    one("replicas[].push_token_env", "PUSH_TOKEN", pushed, "401 push_off", "400 invalid_json"),
    one(
        "replicas[].request_usage",
        True,
        sent(lambda request: "stream_options" in json.loads(request.body)),
        False,
        True,
    ),
    one("replicas[].kv_events", {"endpoint": "tcp://127.0.0.1:9"}, events_from, NOT_TAKEN, "tcp://127.0.0.1:9"),
    one("replicas[].draining", True, served_by(4), {"a", "b"}, {"b"}, second()),
    one("replicas[].capacity.kv_tokens", 64, most_of_a_repeated_prompt_is_estimated, True, False, PREDICTS),
    one("replicas[].capacity.max_running_requests", 1, beside(next_one()), "goes", "waits", PREDICTS),
    one("replicas[].capacity.prefill_tokens_per_s", 1.0, predicted_to_take_minutes, False, True, PREDICTS),
    one(
        "clients.keys_file",
        lambda ground: ground.keys_file(team=OTHER_KEY),
        both_keys,
        ["200", "401 invalid_api_key"],
        ["401 invalid_api_key", "200"],
        {"clients.keys_file": lambda ground: ground.keys_file(team=KEY)},
    ),
    Effect(
        "clients.open",
        {"clients.open": True, "clients.keys_file": None},
        asked(),
        "401 invalid_api_key",
        "200",
        KEYED,
    ),
    one("clients.max_in_flight", 1, beside(next_one(key=KEY), key=KEY), "goes", "429 client_concurrency", KEYED),
    one("clients.requests_per_minute", 6.0, two_requests, ["200", "200"], ["200", "429 client_rate"], KEYED),
    one("clients.tokens_per_minute", 0.6, two_requests, ["200", "200"], ["200", "429 client_tokens"], KEYED),
    one(
        "clients.rules[].name",
        "team",
        both_keys,
        ["200", "403 region_not_allowed"],
        ["403 region_not_allowed", "200"],
        KEYED | {"clients.open": True, "clients.rules[].name": "other", "clients.rules[].allowed_regions": ["there"]},
    ),
    one("clients.rules[].max_in_flight", 1, beside(next_one(key=KEY), key=KEY), "goes", "429 client_concurrency", TEAM),
    one("clients.rules[].requests_per_minute", 6.0, two_requests, ["200", "200"], ["200", "429 client_rate"], TEAM),
    one("clients.rules[].tokens_per_minute", 0.6, two_requests, ["200", "200"], ["200", "429 client_tokens"], TEAM),
    one("clients.rules[].estimates", True, header("x-gorgo-estimated-cached-tokens", key=KEY), None, "0", TEAM),
    one(
        "clients.rules[].engine_fields",
        ["data_parallel_rank"],
        asked(key=KEY, data_parallel_rank=1),
        "400 field_not_allowed",
        "200",
        TEAM,
    ),
    one("clients.rules[].priority", -1, order_of_two_who_wait, ["team", "other"], ["other", "team"], TEAM | FULL),
    one(
        "clients.rules[].allowed_regions", ["there"], both_keys, ["200", "200"], ["403 region_not_allowed", "200"], TEAM
    ),
    one(
        "models[].name",
        "m",
        asked(),
        "404 model_not_found",
        "403 region_not_allowed",
        {"clients.open": True, "models[].name": "x", "models[].allowed_regions": ["there"]},
    ),
    one(
        "models[].aliases",
        ["m"],
        sent(lambda request: json.loads(request.body)["model"]),
        "m",
        "x",
        {"models[].name": "x"},
    ),
    one(
        "models[].allowed_regions", ["there"], served_by(4), {"a", "b"}, {"b"}, second("there") | {"models[].name": "m"}
    ),
    one("models[].tokenizer", "simulated", counts_tokens, False, True, {"models[].name": "m"}),
    one("limits.max_connections", 1, connection_beside_another, "200", ""),
    one("limits.max_header_bytes", 1024, raw(heads("x: " + "y" * 2000)), "200", "431"),
    one("limits.header_timeout_s", SHORT_S, raw(half_a_head), NOT_TAKEN, "408", {"limits.header_timeout_s": LONG_S}),
    one("limits.max_body_bytes", 1000, asked("x" * 1000), "200", "413 request_too_large"),
    one("limits.body_timeout_s", SHORT_S, raw(half_a_body), NOT_TAKEN, "408", {"limits.body_timeout_s": LONG_S}),
    one("limits.max_buffered_bytes", 4000, asked("x" * 1000), "200", "413 request_too_large"),
    one("limits.max_attempts", 1, asked_of_one_that_fails, "200", "502 upstream_failed", second()),
    one("limits.continuations", 0, asked_of_one_that_breaks_off, "200", "200 upstream_failed", second()),
    one("proxy.multi_depth.max_routes", 7, bounds_of_routes, (100_000, 3600.0), (7, 3600.0), ROUTES),
    one("proxy.multi_depth.ttl_s", 9.0, bounds_of_routes, (100_000, 3600.0), (100_000, 9.0), ROUTES),
    one("limits.max_in_flight", 1, beside(next_one()), "goes", "429 too_many_in_flight"),
    one("limits.sampled_replicas", 1, compared, 17, 1, PREDICTS | replicas(17)),
    one("limits.connections_per_replica", 1, beside(next_one()), "goes", "503 replicas_busy"),
    *timeouts(),
    one("limits.prefix_index_blocks", 1, most_of_a_repeated_prompt_is_estimated, True, False),
    one("limits.shutdown_grace_s", 0.0, stopping, NOT_TAKEN, "cut", {"limits.shutdown_grace_s": LONG_S}),
    one("overload.queue_enabled", False, beside(next_one()), "waits", "goes", FULL),
    one("overload.queue_max_requests", 1, beside(beside_one_that_waits(next_one())), "waits", "429 queue_full", FULL),
    one("overload.max_backlog_ms", 1e6, next_after_a_long_prefill, "waits", "goes", PREDICTS),
    one("overload.max_concurrency_per_replica", 1, beside(next_one()), "goes", "waits", PREDICTS),
    one("overload.slo_ttft_ms", 150.0, beside(asked()), NOT_TAKEN, "429 deadline_unreachable", FULL),
    one("overload.slo_e2e_ms", 0.001, beside(next_one(), 2), "goes", "waits", PREDICTS),
    one(
        "overload.no_replica_wait_s",
        0.0,
        next_one(),
        "waits",
        "503 no_replica",
        {"replicas[].draining": True, "overload.no_replica_wait_s": LONG_S},
    ),
    one(
        "overload.hedge_budget_ratio",
        0.5,
        late_request,
        "once",
        "twice",
        second() | LATE | {"overload.hedge_budget_ratio": 0.0},
    ),
    one(
        "overload.retry_budget_ratio",
        0.0,
        more_failures_than_the_least_of_retries,
        True,
        False,
        second() | {"overload.retry_budget_ratio": 1.0},
    ),
    one("overload.slow_start_s", 1e6, first_load_of_a_newcomer, 4, 2, {"overload.slow_start_s": 0.0}),
    one("scaling.ttft_ms", 2000.0, wanted_replicas, None, 1),
    one("scaling.min_replicas", 5, wanted_replicas, 1, 5, {"scaling.ttft_ms": 2000.0}),
]

SHOWS: Edits = {"replicas[].url": lambda ground: ground.shows_url, "replicas[].engine": "openai"}
ASKS: Edits = SHOWS | {"replicas[].url": lambda ground: ground.asks_url, "replicas[].ca_file": lambda ground: ground.ca}
EFFECTS_OF_CERTIFICATES = [
    Effect(
        "proxy.tls.cert proxy.tls.key",
        {"proxy.tls": lambda ground: dict(zip(("cert", "key"), ground.pair("second"), strict=True))},
        common_name,
        "first",
        "second",
        {"proxy.tls": lambda ground: dict(zip(("cert", "key"), ground.pair("first"), strict=True))},
    ),
    one("replicas[].ca_file", lambda ground: ground.ca, asked(stream=False), "503 no_replica", "200", SHOWS),
    Effect(
        "replicas[].client_cert replicas[].client_key",
        {
            "replicas[].client_cert": lambda ground: ground.pair("ours")[0],
            "replicas[].client_key": lambda ground: str(Path(ground.ca).with_name("ours.key")),
        },
        asked(stream=False),
        "502 upstream_failed",
        "200",
        ASKS,
    ),
]
EFFECTS_OF_TOKENIZERS = [
    one(
        "models[].chat_template",
        lambda ground: template_file(ground, "<s>{{ messages[0].content }}</s>"),
        prompt_tokens,
        5,
        4,
        {
            "models[].name": "m",
            "models[].tokenizer": lambda ground: str(model_folder(ground.folder / "model", template=FIVE_TOKENS)),
        },
    ),
]
#: What the proxy has no use for.
OF_OTHER_COMMANDS = {
    "replicas[].accelerator",
    "simulation.rtt_ms",
    "simulation.profile",
    "simulation.profiles",
    "simulation.seed",
}
#: Their effects are shown in tests/core/test_scaling.py and tests/live/test_scaling.py: they need traffic or a start.
OF_SCALING = {f"scaling.{key}" for key in ("share", "startup_s", "max_replicas", "warm_prompts")}
#: Its effect is shown in tests/core/test_deadline.py: it needs a policy that takes objectives.
OF_OBJECTIVES = {"overload.shed_on_objective"}
#: Their effects are shown in tests/live/training.
OF_A_TRAINING = {f"proxy.learning.{key.name}" for key in fields(LearningConfig)}
#: Their effects are shown in tests of fleet sources: tests/live/fleet_sources and tests/fleet_sources.
OF_FLEET_SOURCES = {
    f"fleet_sources[].{key}"
    for key in (
        *("name", "kind", "host", "port", "port_name", "interval_s"),
        *("namespace", "service", "selector", "pool", "node_regions", "local_addresses"),
        *(f"api.{key}" for key in ("url", "token_file", "ca_file")),
        *(f"replica.{key}" for key in ("region", "scheme", "engine", "models", "accelerator", "api_key_env")),
        *(
            f"replica.{key}"
            for key in ("push_token_env", "request_usage", "ca_file", "client_cert", "client_key", "kv_events")
        ),
        *(f"replica.capacity.{key}" for key in ("kv_tokens", "max_running_requests", "prefill_tokens_per_s")),
    )
}
NEED_A_NEW_START = {
    *("proxy.processes", "proxy.bind", "proxy.admin_bind", "proxy.tracing.endpoint", "proxy.tracing.sample_ratio"),
    *(f"shared.{key.name}" for key in fields(SharedConfig)),
    *("picker.bind", "picker.hold_s", "picker.tls.cert", "picker.tls.key"),
    *("picker.tls.client_ca", "picker.tls.client_cert", "picker.tls.client_key"),
}
REFERENCE = (DOCS / "reference.md").read_text()


def test_each_key_has_an_effect_shown_here_or_a_reason_to_have_none() -> None:
    keys = re.findall(r"^- `([^`]+)` \(", section(REFERENCE, "## regions.yaml"), re.MULTILINE)
    shown = {
        key for effect in (*EFFECTS, *EFFECTS_OF_CERTIFICATES, *EFFECTS_OF_TOKENIZERS) for key in effect.keys.split()
    }
    assert sorted(
        [*shown, *OF_OTHER_COMMANDS, *OF_OBJECTIVES, *OF_SCALING, *OF_A_TRAINING, *OF_FLEET_SOURCES, *NEED_A_NEW_START]
    ) == sorted(keys)


def test_the_reference_says_of_each_key_what_a_reload_does_with_it() -> None:
    changing = section(REFERENCE, "### Changing it while the proxy runs")
    says = dict(rows_of(changing, "in the file", "what happens"))
    (restart,) = (cell for cell, happens in says.items() if happens.startswith("need a restart"))
    assert set(code(restart)) == {
        *("proxy.processes", "proxy.bind", "proxy.admin_bind", "proxy.tracing", "proxy.tls", "shared", "picker")
    }
    words = {word for cell in says for word in code(cell)}
    keys = [key for effect in EFFECTS for key in effect.keys.split() if not key.startswith("replicas[]")]
    assert [key for key in keys if not {key, key.split(".")[0].removesuffix("[]")} & words] == []


async def check(effect: Effect, start: Start, ground: Ground) -> None:
    replicas = [ground.a, ground.b]
    followed = await follow(start, ground.folder, text_of(ground, effect.old), replicas, environ=ENVIRON)
    rig = Rig(ground, followed, effect.old)
    if effect.was is not NOT_TAKEN:
        assert await effect.look(rig) == effect.was
    await rig.apply({**effect.old, **effect.new})
    async with asyncio.timeout(10):
        assert await effect.look(rig) == effect.now


@pytest.mark.parametrize("effect", EFFECTS, ids=lambda effect: effect.keys)
async def test_changed_key_is_in_force_after_a_reload(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, effect: Effect
) -> None:
    told: dict[str, str] = {}
    a, b = await start.replica(scripted("a", told)), await start.replica(scripted("b", told))
    with silent_port(accepts=False) as deaf:
        if DEAF.items() <= effect.old.items():
            monkeypatch.setattr("gorgo.live.monitor.replica_monitor.FIRST_PROBE_TIMEOUT_S", SHORT_S)
        await check(effect, start, Ground(tmp_path, a, b, deaf))


@needs_tokenizers
@pytest.mark.parametrize("effect", EFFECTS_OF_TOKENIZERS, ids=lambda effect: effect.keys)
async def test_changed_files_of_a_model_are_in_force_after_a_reload(
    start: Start, tmp_path: Path, effect: Effect
) -> None:
    a, b = await start.replica(scripted("a", {})), await start.replica(scripted("b", {}))
    await check(effect, start, Ground(tmp_path, a, b, 0))


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("authority"))


@needs_openssl
@pytest.mark.parametrize("effect", EFFECTS_OF_CERTIFICATES, ids=lambda effect: effect.keys)
async def test_changed_certificates_are_in_force_after_a_reload(
    start: Start, tmp_path: Path, authority: Authority, effect: Effect
) -> None:
    a, b = await start.replica(scripted("a", {})), await start.replica(scripted("b", {}))
    pair = authority.pair("engine")
    async with engine(pair, None) as shows_url, engine(pair, authority.ca) as asks_url:
        await check(effect, start, Ground(tmp_path, a, b, 0, authority, shows_url, asks_url))


# --- Many reloads under load: no request fails, and nothing is left of any of them.


CHAT = "/v1/chat/completions"
CLIENTS = 4
RAMP_S = 0.01
#: Of the last requests and versions, up to a bound that is not reached here; series of replicas in the fleet, which
#: depend on who got traffic last; and heads of responses, made once for each replica, policy and version of weights.
BOUNDED = {"Sample", "Decision", "TtftEstimate", "WeightsChange", "Counter", "Histogram"}
BOUNDED |= {"EncodedHeaders", "ResponseTraits"}
WORDS = ["one", "two", "three"]


async def in_pieces(request: web.Request, body: bytes) -> web.StreamResponse:
    """A stream that spans several turns of the loop, so that reloads fall into it.

    A replica that leaves has its streams moved: the one that goes on is asked for what the client lacks.
    """
    asked = json.loads(body)
    before = asked["messages"][-1]["content"] if asked.get("continue_final_message") else ""
    response = web.StreamResponse(headers={"content-type": "text/event-stream"})
    await response.prepare(request)
    rest = [word for at, word in enumerate(WORDS) if len("".join(WORDS[: at + 1])) > len(before)]
    for event in (*map(delta, rest), DONE):
        await response.write(event)
        await asyncio.sleep(0.001)
    request.app[REPLICA].seen.clear()  # the test's own memory must not grow either
    return response


@dataclass
class Replay:
    """Clients that ask one after another until told to stop."""

    followed: Followed
    served: int = 0
    wrong: list[str] = field(default_factory=list)
    stop: bool = False

    async def client(self, number: int) -> None:
        for turn in itertools.count():
            if self.stop:
                return
            # Long prompts of a few sessions: the index has something to keep and something to lose.
            text = f"session {number} {turn % 7} " * 100
            body = chat(stream=True, messages=[{"role": "user", "content": text}])
            response = await self.followed.fleet.client.post(CHAT, content=body)
            told = words_of(response.content), response.content.count(DONE), response.content.endswith(DONE)
            if response.status_code != 200 or told != ("".join(WORDS), 1, True):
                self.wrong.append(f"{response.status_code} {response.text}")
            self.served += 1

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        async with asyncio.TaskGroup() as clients:
            for number in range(CLIENTS):
                clients.create_task(self.client(number))
            try:
                yield
            finally:
                self.stop = True


def texts(fakes: list[FakeReplica]) -> list[bytes]:
    """One round of edits: come, go, move, drain, other words, other settings, a broken file."""
    a, b, c, d = fakes
    # The Router knows who joined until its ramp is over; ramps end here before anything is counted.
    made = partial(regions, overload={"slow_start_s": RAMP_S})
    return [
        made({"a": a, "b": b}),
        made({"a": a, "b": b, "c": c}),
        made({"a": a, "b": b, "c": d}),
        made({"a": a, "b": {"url": b.url, "draining": True}, "c": d}),
        b"proxy: [",
        made({"a": a, "c": {"url": d.url, "models": ["m"]}}),
        made({"a": a, "c": {"url": d.url, "models": ["m"]}}, limits={"max_attempts": 2}),
        made({"d": d}, proxy={"policy": "gorgo", "weights": {"w_rtt": 0.7}}),
        made({"d": d, "a": b}, proxy={"policy": "gorgo", "probe_interval_s": 1000.0}),
        made({"a": c, "b": d}, proxy={"policy": "least-load"}),
    ]


@dataclass(frozen=True)
class Kept:
    """What a leak would show in, once nothing runs."""

    tasks: int
    descriptors: int
    #: Of replicas that are gone.
    old_series: int
    #: By class, those of this project.
    objects: Counter[str]
    rss_kib: int


def kept(followed: Followed) -> Kept:
    gc.collect()
    return Kept(
        tasks=len(asyncio.all_tasks()),
        descriptors=len(os.listdir("/proc/self/fd")),
        old_series=len(replicas_with_series(followed) - followed.state.replicas.targets.keys()),
        objects=Counter(
            type(found).__qualname__ for found in gc.get_objects() if f"{type(found).__module__}".startswith("gorgo.")
        ),
        rss_kib=int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE") // 1024,
    )


def replicas_with_series(followed: Followed) -> set[str]:
    families = followed.state.telemetry.metrics.registry.collect()
    return {sample.labels["replica"] for family in families for sample in family.samples if "replica" in sample.labels}


async def quiet(followed: Followed, first: bytes) -> Kept:
    """As it was at the start, with nothing open and no connection but those of the replicas in the fleet."""
    await followed.rewrite(first)
    await followed.fleet.idle()
    await until(lambda: not followed.state.replicas.draining_targets)
    await until(lambda: all(view.slow_start_for_s is None for view in views(followed)))
    response = await followed.fleet.client.post(CHAT, content=chat(stream=True))  # at which ramps are forgotten
    assert response.status_code == 200
    await followed.fleet.idle()
    return kept(followed)


def views(followed: Followed) -> list[ReplicaSnapshot]:
    return followed.state.routing.router.view.snapshots(now=followed.state.routing.clock())


async def reload_often(start: Start, folder: Path, *, warm_up: int, reloads: int) -> tuple[Kept, Kept]:
    """Reload under load, in two parts. Answers what was there after each."""
    fakes = [await start.replica(in_pieces) for _ in range(4)]
    for fake in fakes:
        fake.metrics, fake.loads = "sglang:num_running_reqs 0.0\n", {"loads": []}
    edits = texts(fakes)
    followed = await follow(start, folder, edits[0], fakes)
    served = 0
    seen: list[Kept] = []
    for count in (warm_up, reloads - warm_up):
        replay = Replay(followed)
        async with replay.running():
            for text in itertools.islice(itertools.cycle(edits), count):
                await followed.rewrite(text)
        assert replay.wrong == []
        served += replay.served
        seen.append(await quiet(followed, edits[0]))
    assert (followed.count("applied") + followed.count("refused")) == reloads + 2
    assert followed.count("refused") == reloads / len(edits)
    assert served > reloads, "the load was there"
    followed.state.routing.router.index.check()
    warm, end = seen
    return warm, end


def check_nothing_is_left(warm: Kept, end: Kept, *, rounds: int) -> None:
    assert end.tasks <= warm.tasks + 2
    # The clients' and the replicas' ends of idle connections are counted too, and come and go.
    assert end.descriptors <= warm.descriptors + 4 * CLIENTS
    assert end.old_series == warm.old_series == 0
    assert warm.objects["UpstreamClient"] >= 2, "objects are counted"
    # One request that has just ended has its own, and its replica's.
    grown = {
        name: (warm.objects[name], count) for name, count in end.objects.items() if count >= warm.objects[name] + rounds
    }
    assert grown.keys() <= BOUNDED, grown


@pytest.mark.system
async def test_a_hundred_reloads_during_a_replay_lose_nothing_and_leave_nothing(start: Start, tmp_path: Path) -> None:
    warm, end = await reload_often(start, tmp_path, warm_up=20, reloads=100)
    check_nothing_is_left(warm, end, rounds=8)


@pytest.mark.system
@pytest.mark.timeout(900)  # 40 s on two idle cores, which those of a whole run are not
async def test_a_thousand_reloads_during_a_replay_do_not_grow_the_process(start: Start, tmp_path: Path) -> None:
    # By the end of the warm-up caches, rings and the allocator have what they keep.
    warm, end = await reload_often(start, tmp_path, warm_up=300, reloads=1000)
    check_nothing_is_left(warm, end, rounds=70)
    # A leak of one upstream or one stream's buffers per reload would be 50 % and more.
    assert end.rss_kib < warm.rss_kib * 1.10
