"""Silent faults seeded one at a time in real processes, and healthy fleets: what `gorgo diagnose` says first."""

from __future__ import annotations

import hashlib
import re
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.cli.diagnose.lab import VLLM, WORDS, Engines, Lab, chat, chats, engines, lab, unlike, usual_traffic
from tests.ports import free_port
from tests.proxy.authority import Authority, needs_openssl

pytestmark = [pytest.mark.system, needs_openssl, pytest.mark.timeout(600)]
Seed = Callable[[Lab], None]


@pytest.fixture(scope="module")
def sglang(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engines]:
    with engines(tmp_path_factory.mktemp("sglang")) as found:
        yield found


@pytest.fixture(scope="module")
def vllm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engines]:
    with engines(tmp_path_factory.mktemp("vllm"), profile=VLLM) as found:
        yield found


# -- faults of caches and their reports


def events_off(fleet: Lab) -> None:
    fleet.events()
    fleet.meddle("near-1", no_kv_events=True)
    fleet.replica("near-1")["kv_events"] = "auto"


def events_at_another_port(fleet: Lab) -> None:
    fleet.events()
    fleet.replica("near-1")["kv_events"] = {"endpoint": f"tcp://127.0.0.1:{free_port()}"}


def events_of_another_publisher(fleet: Lab) -> None:
    fleet.events(near_1=None)


def events_of_some(fleet: Lab) -> None:
    fleet.events()
    del fleet.replica("far-0")["kv_events"]


def hash_seeds(fleet: Lab) -> None:
    fleet.events(near_0="seeded", near_1="another seed", far_0="seeded")


def block_sizes(fleet: Lab) -> None:
    fleet.events(near_1="blocks")


def salts(fleet: Lab) -> None:
    fleet.events(near_1="salt")


def no_tokenizer(fleet: Lab) -> None:
    fleet.events()
    del fleet.file["models"]


def tokenizer(fleet: Lab) -> None:
    fleet.meddle("near-0", more_tokens=40)


def template(fleet: Lab) -> None:
    fleet.meddle("near-0", more_tokens=7, chat_alone=True)


def no_cached_tokens(fleet: Lab) -> None:
    fleet.meddle("near-0", no_cached=True)


def caching_off(fleet: Lab) -> None:
    fleet.meddle("near-0", zero_cached=True)


def no_usage(fleet: Lab) -> None:
    for row in fleet.file["replicas"]:
        row["request_usage"] = False
    fleet.after.append(usual_traffic)


# -- faults of the traffic


def early_ids(fleet: Lab) -> None:
    def send(client: httpx.Client, _: httpx.Client) -> None:
        ids = [hashlib.sha256(f"{number}".encode()).hexdigest() for number in range(12)]
        assert set(chats(client, [f"Request {name[:24]}. {WORDS}" for name in ids], at_once=1)) == {200}

    fleet.after.append(send)


def herd(fleet: Lab) -> None:
    fleet.file["proxy"]["policy"] = "simple-session-affinity"

    def send(client: httpx.Client, _: httpx.Client) -> None:
        texts = [unlike(number, 2000) for number in range(60)]
        chats(client, texts, at_once=30, headers={"x-session-id": "one"})

    fleet.after.append(send)


def retries(fleet: Lab) -> None:
    for name in ("near-0", "near-1", "far-0"):
        fleet.meddle(name, poison="refund number 17")
    log = fleet.folder / "requests.jsonl"
    fleet.serve += ["--request-log", str(log)]
    fleet.words += ["--request-log", str(log)]

    def send(client: httpx.Client, admin: httpx.Client) -> None:
        usual_traffic(client, admin)
        for _ in range(14):
            assert chat(client, f"{WORDS} refund number 17") >= 500
        time.sleep(1.0)  # the log is written in batches

    fleet.after.append(send)


def quota(fleet: Lab) -> None:
    key = "key-of-the-client-batch"
    keys = fleet.folder / "clients.keys"
    keys.write_text(f"batch:{hashlib.sha256(key.encode()).hexdigest()}\n")
    fleet.file["clients"] = {"keys_file": str(keys), "requests_per_minute": 6}

    def send(client: httpx.Client, _: httpx.Client) -> None:
        statuses = chats(client, [WORDS] * 12, headers={"authorization": f"Bearer {key}"})
        assert 429 in statuses

    fleet.after.append(send)


def idle_connections(fleet: Lab) -> None:
    fleet.meddle("far-0", idle_s=1.0)
    fleet.file["proxy"]["policy"] = "round-robin"
    fleet.file["replicas"] = [fleet.replica("far-0")]

    def send(client: httpx.Client, _: httpx.Client) -> None:
        for number in range(5):
            assert chat(client, unlike(number, 200)) == 200
            time.sleep(2.5)

    fleet.after.append(send)


def wrong_prior(fleet: Lab) -> None:
    for row in fleet.file["replicas"]:
        row["capacity"] = {"prefill_tokens_per_s": 100_000}
    fleet.file["proxy"]["policy"] = "round-robin"

    def send(client: httpx.Client, _: httpx.Client) -> None:
        # Prompts that no other fleet of these engines had: what is in a cache takes no prefill.
        assert set(chats(client, [unlike(1000 + number, 3000) for number in range(75)], at_once=3)) == {200}

    fleet.after.append(send)


# -- faults of replicas and of what is between


def buffered(fleet: Lab) -> None:
    fleet.meddle("near-1", buffered=True)


def clock(fleet: Lab) -> None:
    fleet.meddle("near-1", clock_s=-90.0)


def two_addresses(fleet: Lab) -> None:
    fleet.meddle("near-0")
    fleet.replica("near-1")["url"] = fleet.replica("near-0")["url"].replace("127.0.0.1", "localhost")


def version(fleet: Lab) -> None:
    fleet.meddle("near-1", version="0.4.1")


def contexts(fleet: Lab) -> None:
    for name in ("near-0", "near-1", "far-0"):
        fleet.meddle(name, context=4096 if name == "near-1" else 32_768)


def another_model(fleet: Lab) -> None:
    fleet.meddle("near-1", model="gorgo-sim-v2")


def another_kind(fleet: Lab) -> None:
    fleet.replica("near-1")["engine"] = "vllm"


def metrics_off(fleet: Lab) -> None:
    fleet.meddle("near-1", statuses={"/metrics": 404})


def key_refused(fleet: Lab) -> None:
    fleet.meddle("near-1", key="another")


def closed(fleet: Lab) -> None:
    fleet.replica("near-1")["url"] = f"http://127.0.0.1:{free_port()}"


def path_of_the_api(fleet: Lab) -> None:
    fleet.replica("near-1")["url"] += "/v1"


def far_away(fleet: Lab) -> None:
    fleet.meddle("near-1", delay_s=0.15)


def expiring(fleet: Lab) -> None:
    authority = Authority(fleet.folder)
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(*authority.pair("engine"))
    fleet.meddle("near-1", tls=context)
    fleet.replica("near-1")["ca_file"] = authority.ca


# -- faults of the router


def slow_scrapes(fleet: Lab) -> None:
    fleet.file["proxy"] |= {"policy": "predicted-latency", "scrape_interval_s": 30.0}


def few_files(fleet: Lab) -> None:
    fleet.most_files = 512


def full_disk(fleet: Lab) -> None:
    fleet.serve += ["--request-log", str(fleet.folder / "requests.jsonl")]
    fleet.most_file_bytes = 600

    def send(client: httpx.Client, admin: httpx.Client) -> None:
        usual_traffic(client, admin)
        time.sleep(1.0)  # the log is written in batches

    fleet.after.append(send)


def refused_edit(fleet: Lab) -> None:
    def edit(_: httpx.Client, __: httpx.Client) -> None:
        file = fleet.folder / "regions.yaml"
        file.write_text(file.read_text().replace("policy: gorgo-ms", "polcy: gorgo-ms"))

    fleet.after.append(edit)


def waiting_edit(fleet: Lab) -> None:
    def edit(_: httpx.Client, admin: httpx.Client) -> None:
        assert admin.post("/admin/freeze", json={}).status_code == 200
        file = fleet.folder / "regions.yaml"
        file.write_text(file.read_text().replace("policy: gorgo-ms", "policy: least-load"))
        assert admin.post("/admin/reload", json={}).status_code == 200

    fleet.after.append(edit)


class _TunerMetrics(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b'gorgo_tuner_polls_total{result="ok"} 3\ngorgo_tuner_polls_total{result="failed"} 40\n')

    def log_message(self, *_: Any) -> None:
        pass


def blind_tuner(fleet: Lab) -> None:
    server = HTTPServer(("127.0.0.1", 0), _TunerMetrics)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    fleet.stack.callback(server.server_close)
    fleet.stack.callback(server.shutdown)
    fleet.words += ["--tuner-url", f"http://127.0.0.1:{server.server_port}"]


#: Each fault with what is named, where, and a word of the remedy.
SEEDED: tuple[tuple[Seed, str, str, str], ...] = (
    (events_off, "kv-events-off", "near-1", "--kv-events-config"),
    (events_at_another_port, "kv-events-unreachable", "near-1", "endpoint"),
    (events_of_another_publisher, "kv-events-silent", "near-1", "topic"),
    (events_of_some, "kv-events-off", "far-0", "kv_events: auto"),
    (hash_seeds, "hash-seeds-differ", "near-1", "PYTHONHASHSEED"),
    (block_sizes, "block-sizes-differ", "near-1", "--block-size"),
    (salts, "salts-differ", "near-1", "cache_salt"),
    (no_tokenizer, "reports-unused", ", ".join(f"replicas[{at}].kv_events" for at in range(3)), "models[].tokenizer"),
    (tokenizer, "tokenizer-differs", "near-0", "models[].tokenizer"),
    (template, "template-differs", "near-0", "chat_template"),
    (no_cached_tokens, "cached-tokens-not-reported", "near-0", "--enable-cache-report"),
    (caching_off, "prefix-caching-off", "near-0", "prefix caching"),
    (no_usage, "usage-not-requested", "fleet", "request_usage"),
    (early_ids, "prompts-part-early", "gorgo-sim", "behind the constant text"),
    (herd, "herd", "", "weighs the cache against the queue"),
    (retries, "client-retries", "gorgo-sim", "wait longer"),
    (quota, "quota-sheds", "batch", "clients.requests_per_minute"),
    (idle_connections, "keep-alive-short", "far-0", "keep-alive"),
    (wrong_prior, "prior-wrong", "", "prefill_tokens_per_s"),
    (buffered, "stream-buffered", "near-1", "proxy_buffering off"),
    (clock, "clock-off", "near-1", "chrony"),
    (two_addresses, "one-engine-twice", "near-0, near-1", "remove one"),
    (version, "versions-differ", "near-1", "one version"),
    (contexts, "contexts-differ", "near-1", "--max-model-len"),
    (another_model, "model-not-served", "near-1", "--served-model-name"),
    (another_kind, "wrong-engine-kind", "near-1", "engine: sglang"),
    (metrics_off, "metrics-off", "near-1", "--enable-metrics"),
    (key_refused, "key-refused", "near-1", "api_key_env"),
    (closed, "replica-unreachable", "near-1", "start it"),
    (path_of_the_api, "url-wrong", "near-1", "without /v1"),
    (far_away, "region-wrong", "near-1", "replicas[].region"),
    (expiring, "certificate-expires", "near-1", "renew"),
    (slow_scrapes, "scrapes-slow", "proxy.scrape_interval_s", "remove the key"),
    (few_files, "file-limit-low", "router", "LimitNOFILE"),
    (full_disk, "request-log-lost", "router", "free the disk"),
    (refused_edit, "config-refused", "regions.yaml", "correct the place"),
    (waiting_edit, "edit-waits", "regions.yaml", "gorgo unfreeze"),
    (blind_tuner, "tuner-blind", "tuner", "GORGO_ADMIN_TOKEN"),
)


@pytest.mark.parametrize(("seed", "fault", "place", "remedy"), SEEDED, ids=lambda value: getattr(value, "__name__", ""))
def test_a_seeded_fault_is_named_first_with_its_remedy(
    seed: Seed, fault: str, place: str, remedy: str, sglang: Engines, tmp_path: Path
) -> None:
    with lab(tmp_path, sglang) as fleet:
        seed(fleet)
        findings, code, answer = fleet.diagnose()
    assert findings, answer
    first = findings[0]
    assert first["fault"] == fault, findings
    assert first["place"] == place or not place
    assert remedy in first["remedy"]
    assert code == (0 if all(row["severity"] == "note" for row in findings) else 1)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (caching_off, buffered),
        (clock, caching_off),
        (closed, tokenizer),
        (version, early_ids),
        (events_of_some, quota),
        (two_addresses, few_files),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_two_faults_at_once_are_both_found(first: Seed, second: Seed, sglang: Engines, tmp_path: Path) -> None:
    names = {seed: fault for seed, fault, *_ in SEEDED}
    with lab(tmp_path, sglang) as fleet:
        first(fleet)
        second(fleet)
        findings, code, answer = fleet.diagnose()
    assert {names[first], names[second]} <= {row["fault"] for row in findings}, answer
    assert code == 1


# -- healthy fleets


def with_events(fleet: Lab) -> None:
    fleet.events()


def events_as_announced(fleet: Lab) -> None:
    for row in fleet.file["replicas"]:
        row["kv_events"] = "auto"


def with_traffic(fleet: Lab) -> None:
    log = fleet.folder / "requests.jsonl"
    fleet.serve += ["--request-log", str(log)]
    fleet.words += ["--request-log", str(log)]
    fleet.after.append(usual_traffic)


def with_events_and_traffic(fleet: Lab) -> None:
    with_events(fleet)
    with_traffic(fleet)


def one_replica(fleet: Lab) -> None:
    fleet.file["replicas"] = [fleet.replica("near-0")]
    with_traffic(fleet)


def without_a_tokenizer(fleet: Lab) -> None:
    del fleet.file["models"]
    with_traffic(fleet)


def by_policy(name: str) -> Seed:
    def seed(fleet: Lab) -> None:
        fleet.file["proxy"]["policy"] = name
        with_traffic(fleet)

    seed.__name__ = name
    return seed


def with_equal_seeds(fleet: Lab) -> None:
    fleet.events(near_0="seeded", near_1="seeded", far_0="seeded")


def nothing(_: Lab) -> None:
    pass


HEALTHY: tuple[Seed, ...] = (
    nothing,
    with_events,
    with_equal_seeds,
    events_as_announced,
    with_traffic,
    with_events_and_traffic,
    one_replica,
    without_a_tokenizer,
    by_policy("gorgo"),
    by_policy("least-load"),
    by_policy("prefix-cache"),
)


@pytest.mark.parametrize("dialect", ["sglang", "vllm"])
@pytest.mark.parametrize("seed", HEALTHY, ids=lambda seed: seed.__name__)
def test_a_healthy_fleet_has_no_finding(
    seed: Seed, dialect: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    with lab(tmp_path, request.getfixturevalue(dialect)) as fleet:
        seed(fleet)
        findings, code, answer = fleet.diagnose()
    assert (findings, code) == ([], 0), answer
    assert not [line for line in answer["unknown"] if re.search("router|cache|events", line)], answer
