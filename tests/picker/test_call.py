"""Calls of an own Envoy: BUFFERED bodies, and all that ends a call."""

from __future__ import annotations

import asyncio
import gzip
import json
import socket
import zlib
from dataclasses import replace
from typing import Any, cast

import pytest

from gorgo.config.fleet import FleetSourceConfig
from gorgo.config.model import Config, LimitsConfig, ModelConfig, OverloadConfig
from gorgo.core.prompt.fingerprint import Fingerprinter
from gorgo.live.parsing.json_body import BodyFields, read_large_body, unpack
from gorgo.live.parsing.workers import BodyWorkers
from gorgo.picker.call import MAX_HEADERS
from gorgo.picker.envoy import envoy_config
from gorgo.picker.protocol.messages import ProtocolError
from gorgo.picker.server import GrpcFrontEnd
from gorgo.picker.state import Endpoints
from gorgo.picker.transport.services import DECIDING
from tests.picker.virtual import (
    BODY,
    CHAT,
    DUPLEX,
    STREAMED,
    Picked,
    VirtualPicker,
    body_message,
    config_of,
    error_of,
    headers_message,
    in_virtual_time,
)
from tests.proxy.conftest import QUIET, with_replica

GORGO_MS = replace(QUIET, policy="gorgo-ms")
ONE = config_of("10.0.0.1:8000")
FOUND = config_of("10.0.0.1:8000", fleet_sources=(FleetSourceConfig(name="pods", kind="dns", host="r.internal"),))


def test_a_buffered_request_gets_a_replica_in_header_and_metadata_and_the_call_s_end_releases_it() -> None:
    async def test(picker: VirtualPicker) -> None:
        call = picker.call()
        (head,) = call.feed(headers_message("request_headers"))
        assert head.WhichOneof("response") == "request_headers"
        assert not head.request_headers.HasField("response")
        call.feed(body_message("request_body", BODY))
        picked = Picked(call.last)
        assert picked.message.WhichOneof("response") == "request_body"
        assert picked.addresses[0] == "10.0.0.1:8000"
        assert not picked.common.HasField("body_mutation")
        assert picker.state.routing.router.in_flight == 1
        call.close()
        assert picker.state.routing.router.in_flight == 0

    in_virtual_time(test)


def test_the_next_best_stand_behind_the_choice() -> None:
    async def test(picker: VirtualPicker) -> None:
        call, picked = picker.request()
        assert picked.addresses == ["10.0.0.1:8000", "10.0.0.2:8000", "10.0.0.3:8000"]
        call.close()

    in_virtual_time(test, config_of(*(f"10.0.0.{n}:8000" for n in range(1, 6))))


def test_a_client_s_own_choice_is_overwritten_and_headers_that_steer_an_engine_are_removed() -> None:
    async def test(picker: VirtualPicker) -> None:
        own = (("x-gateway-destination-endpoint", "10.9.9.9:1"), ("x-data-parallel-rank", "3"), ("accept", "*/*"))
        call, picked = picker.request(BODY, *own)
        assert picked.addresses[0] == "10.0.0.1:8000"
        assert sorted(picked.common.header_mutation.remove_headers) == [
            "x-data-parallel-rank",
            "x-gateway-destination-endpoint",
        ]
        call.close()

    in_virtual_time(test)


def test_engine_is_asked_for_no_compression_where_its_answer_is_read() -> None:
    async def test(picker: VirtualPicker) -> None:
        for own in ((("accept-encoding", "gzip, br"),), ()):
            call, picked = picker.request(BODY, *own)
            changes = picked.common.header_mutation.set_headers
            found = {each.header.key: each.header.raw_value or each.header.value for each in changes}
            assert found["accept-encoding"] in (b"identity", "identity")
            assert "accept-encoding" not in picked.common.header_mutation.remove_headers
            call.close()

    in_virtual_time(test)


def test_what_connection_names_is_removed_of_this_request_alone() -> None:
    async def test(picker: VirtualPicker) -> None:
        trace = ("traceparent", "00-4b7ffb612a0c4b9e8f7c0d8f5dd0c111-0d8f5dd0c1110d8f-01")
        for named, removed in (("traceparent", ["traceparent"]), ("close", []), ("traceparent", ["traceparent"])):
            for _ in range(2):
                call, picked = picker.request(BODY, trace, ("connection", named), ("accept", "*/*"))
                assert list(picked.common.header_mutation.remove_headers) == removed
                call.close()
            call, picked = picker.request(BODY, ("accept", "*/*"), trace)
            assert not picked.common.header_mutation.remove_headers
            call.close()

    in_virtual_time(test)


def test_a_replica_that_knows_the_model_by_another_name_gets_another_body_with_its_length() -> None:
    config = config_of("10.0.0.1:8000", models=(ModelConfig(name="llama", aliases=("m",)),))
    config = with_replica(config, 0, models=("llama",), request_usage=True)

    async def test(picker: VirtualPicker) -> None:
        call, picked = picker.request()
        body = picked.common.body_mutation.body
        assert json.loads(body) == {**json.loads(BODY), "model": "llama", "stream_options": {"include_usage": True}}
        assert picked.headers["content-length"] == str(len(body))
        call.close()

    in_virtual_time(test, config)


def test_a_compressed_body_is_sent_on_unpacked_without_its_coding() -> None:
    async def test(picker: VirtualPicker) -> None:
        for coding, packed in (("gzip", gzip.compress(BODY)), ("deflate", zlib.compress(BODY))):
            call, picked = picker.request(packed, ("content-encoding", coding))
            assert picked.common.body_mutation.body == BODY
            assert picked.headers["content-length"] == str(len(BODY))
            assert list(picked.common.header_mutation.remove_headers) == ["content-encoding"]
            call.close()
        call, _ = picker.request(BODY, ("content-encoding", "identity"))
        assert not Picked(call.last).common.HasField("body_mutation")
        call.close()

    in_virtual_time(test)


def test_a_compressed_body_is_refused_where_it_is_broken_or_too_large_or_unknown() -> None:
    async def test(picker: VirtualPicker) -> None:
        for coding, packed, status in (
            ("compress", BODY, 415),
            ("gzip", BODY, 400),
            ("gzip", gzip.compress(BODY + b" " * 2000), 413),
        ):
            call, _ = picker.request(packed, ("content-encoding", coding))
            assert error_of(call.last)[0] == status
            call.close()

    in_virtual_time(test, replace(ONE, limits=LimitsConfig(max_body_bytes=1000)))


class _Workers:
    """Helper processes whose work is done here, later: virtual time waits for no process."""

    def __init__(self) -> None:
        self.bodies: list[int] = []

    async def unpack(self, coding: str, body: bytes, *, limit: int, client: str = "") -> bytes:
        await asyncio.sleep(0.1)
        return b"".join(unpack(coding, body, limit=limit))

    async def read(self, route: str, body: bytes, *, client: str = "") -> BodyFields:
        await asyncio.sleep(0.1)
        self.bodies.append(len(body))
        return read_large_body(route, body, Fingerprinter(key=1))


def test_a_large_compressed_body_is_unpacked_beside_the_event_loop() -> None:
    async def test(picker: VirtualPicker) -> None:
        body = BODY.replace(b"hello", b"a long story " * 50_000)
        workers = _Workers()
        picker.state.routing.body_workers = cast(BodyWorkers, workers)
        call = picker.call()
        call.feed(headers_message("request_headers", ("content-encoding", "gzip")))
        call.feed(body_message("request_body", gzip.compress(body)))
        assert picker.state.live.buffers.used_bytes
        while len(call.output.sent) < 2:
            call.output.changed.clear()
            await call.output.changed.wait()
        assert Picked(call.last).common.body_mutation.body == body
        assert workers.bodies == [len(body)]
        call.close()

    in_virtual_time(test)


def test_a_large_body_waits_to_be_read_and_in_the_queue_for_no_longer_than_the_setting() -> None:
    """Behind others it would outlast the message timeout of Envoy, which has no rule of the client."""

    class Slow(_Workers):
        async def read(self, route: str, body: bytes, *, client: str = "") -> BodyFields:
            await asyncio.sleep(self.delay_s)
            return await super().read(route, body)

        delay_s = 60.0

    async def test(picker: VirtualPicker) -> None:
        large = BODY.replace(b"hello", b"a long story " * 400_000)
        workers = Slow()
        picker.state.routing.body_workers = cast(BodyWorkers, workers)
        waiting, _ = picker.request(large)
        await asyncio.sleep(4.9)
        assert len(waiting.output.sent) == 1
        await asyncio.sleep(0.2)
        status, code, headers = error_of(waiting.last)
        assert (status, code, headers["retry-after"]) == (503, "too_many_in_flight", "1")
        assert (workers.bodies, picker.state.live.buffers.used_bytes) == ([], 0)
        workers.delay_s = 3.0
        picker.state.routing.router.replicas.drain("r0", now=picker.state.routing.clock())
        queued, _ = picker.request(large)
        await asyncio.sleep(4.9)
        assert (len(queued.output.sent), picker.state.routing.router.queued) == (1, 1)
        await asyncio.sleep(0.2)
        assert error_of(queued.last)[:2] == (503, "no_replica")
        picker.state.routing.router.replicas.drain("r0", draining=False, now=picker.state.routing.clock())
        workers.delay_s = 0.0
        read, _ = picker.request(large)
        await asyncio.sleep(5.2)
        assert read.last.WhichOneof("response") == "request_body"
        for call in (waiting, queued, read):
            call.close()

    in_virtual_time(test, replace(ONE, overload=OverloadConfig(no_replica_wait_s=30.0)), hold_s=5.0)


def test_a_body_without_a_prompt_passes_with_its_coding() -> None:
    async def test(picker: VirtualPicker) -> None:
        call = picker.call()
        coded = ("content-encoding", "br")
        call.feed(headers_message("request_headers", coded, mode=DUPLEX, response_mode=STREAMED, path="/v1/files"))
        call.feed(body_message("request_body", b"\x0b"))
        assert Picked(call.output.sent[0]).addresses
        assert "content-encoding" not in Picked(call.output.sent[0]).common.header_mutation.remove_headers
        call.close()

    in_virtual_time(test)


def test_more_headers_than_envoy_has_room_for_are_refused_and_as_many_as_at_the_proxy_pass() -> None:
    async def test(picker: VirtualPicker) -> None:
        def headers(count: int) -> list[tuple[str, str]]:
            return [(f"openai-x{n}", "1") for n in range(count)]

        call, picked = picker.request(BODY, *headers(MAX_HEADERS - 1), (":scheme", "http"))
        added = len(picked.common.header_mutation.set_headers)
        (manager,) = envoy_config(ONE)["static_resources"]["listeners"][0]["filter_chains"][0]["filters"]
        # The pseudo headers count at Envoy, and what it adds itself: its address, id, protocol, trace.
        assert (
            MAX_HEADERS + 4 + 10 + added <= manager["typed_config"]["common_http_protocol_options"]["max_headers_count"]
        )
        call.close()
        refused = picker.call()
        refused.feed(headers_message("request_headers", *headers(MAX_HEADERS + 1)))
        assert error_of(refused.last)[:2] == (431, "headers_too_large")

    in_virtual_time(test, ONE)


def test_a_body_that_is_no_json_is_refused_as_the_proxy_refuses_it() -> None:
    async def test(picker: VirtualPicker) -> None:
        call, _ = picker.request(b"{")
        status, code, headers = error_of(call.last)
        assert (status, code, headers["content-type"]) == (400, "invalid_json", "application/json")
        assert call.output.ends == 1
        call.close()

    in_virtual_time(test)


def test_without_a_replica_the_answer_is_503_with_retry_after() -> None:
    async def test(picker: VirtualPicker) -> None:
        picker.state.routing.router.replicas.drain("r0", now=picker.state.routing.clock())
        call, _ = picker.request()
        status, code, headers = error_of(call.last)
        assert (status, code, headers["retry-after"]) == (503, "no_replica", "1")
        assert headers["x-gorgo-policy"] == "round-robin"
        call.close()

    in_virtual_time(test, replace(ONE, overload=OverloadConfig(no_replica_wait_s=0.0)))


def test_an_unknown_model_is_404() -> None:
    async def test(picker: VirtualPicker) -> None:
        call, _ = picker.request()
        assert error_of(call.last)[:2] == (404, "model_not_found")
        call.close()

    in_virtual_time(test, with_replica(ONE, 0, models=("llama",)))


def test_a_request_that_is_queued_is_answered_once_a_replica_can_take_it() -> None:
    async def test(picker: VirtualPicker) -> None:
        picker.state.routing.router.replicas.drain("r0", now=picker.state.routing.clock())
        call, _ = picker.request()
        assert len(call.output.sent) == 1, "nothing but the answer to the head"
        assert picker.state.routing.router.queued == 1
        picker.state.routing.router.replicas.drain("r0", draining=False, now=picker.state.routing.clock())
        await asyncio.sleep(0.5)
        picker.state.routing.gateway.run_timer()
        assert call.last.WhichOneof("response") == "request_body"
        assert picker.total("gorgo_queue_seconds_count") == 1
        call.close()

    in_virtual_time(test, replace(ONE, overload=OverloadConfig(no_replica_wait_s=30.0)))


def test_a_request_is_queued_for_no_longer_than_the_setting() -> None:
    async def test(picker: VirtualPicker) -> None:
        picker.state.routing.router.replicas.drain("r0", now=picker.state.routing.clock())
        call, _ = picker.request()
        await asyncio.sleep(4.9)
        assert len(call.output.sent) == 1
        await asyncio.sleep(0.2)
        status, code, headers = error_of(call.last)
        assert (status, code, headers["retry-after"]) == (503, "no_replica", "1")
        assert picker.state.routing.router.queued == 0
        call.close()

    in_virtual_time(test, replace(ONE, overload=OverloadConfig(no_replica_wait_s=30.0)), hold_s=5.0)


def test_a_body_is_reserved_where_it_waits_and_refused_where_there_is_no_room() -> None:
    async def test(picker: VirtualPicker) -> None:
        state = picker.state
        state.live.buffers.limit_bytes = 5 * len(BODY)
        at_once, _ = picker.request()
        assert (state.routing.router.in_flight, state.live.buffers.used_bytes) == (1, 0)
        state.routing.router.replicas.drain("r0", now=state.routing.clock())
        queued, _ = picker.request()
        assert (state.routing.router.queued, state.live.buffers.used_bytes) == (1, 2 * len(BODY))
        refused, _ = picker.request()
        assert error_of(refused.last)[:2] == (503, "buffers_full")
        assert (state.routing.router.queued, state.live.buffers.used_bytes) == (1, 2 * len(BODY))
        for call in (at_once, queued, refused):
            call.close()

    in_virtual_time(test, replace(ONE, overload=OverloadConfig(no_replica_wait_s=30.0)))


def test_a_client_that_leaves_while_it_is_queued_leaves_the_queue() -> None:
    async def test(picker: VirtualPicker) -> None:
        picker.state.routing.router.replicas.drain("r0", now=picker.state.routing.clock())
        call, _ = picker.request()
        call.close()
        assert picker.state.routing.router.queued == 0
        assert picker.total("gorgo_client_aborts_total") == 1

    in_virtual_time(test, replace(ONE, overload=OverloadConfig(no_replica_wait_s=30.0)))


def test_a_body_above_the_limit_is_413() -> None:
    async def test(picker: VirtualPicker) -> None:
        call, _ = picker.request(b" " * 2000)
        assert error_of(call.last)[:2] == (413, "request_too_large")
        call.close()

    in_virtual_time(test, replace(ONE, limits=LimitsConfig(max_body_bytes=1999)))


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [("GET", "/v1/chat/completions", 405, "method_not_allowed"), ("POST", "/flush_cache", 404, "not_found")],
)
def test_an_order_to_an_engine_is_no_route_of_an_own_envoy(method: str, path: str, status: int, code: str) -> None:
    async def test(picker: VirtualPicker) -> None:
        call = picker.call()
        call.feed(headers_message("request_headers", method=method, path=path, end=method == "GET"))
        assert error_of(call.last)[:2] == (status, code)
        call.close()

    in_virtual_time(test)


def test_health_and_known_models_are_answered_without_a_replica() -> None:
    async def test(picker: VirtualPicker) -> None:
        for path, expected in (("/health", {"status": "ok"}), ("/ready", {"status": "ready"})):
            call = picker.call()
            call.feed(headers_message("request_headers", method="GET", path=path, end=True))
            assert json.loads(call.last.immediate_response.body) == expected
            call.close()
        call = picker.call()
        call.feed(headers_message("request_headers", method="GET", path="/v1/models?x=1", end=True))
        (row,) = json.loads(call.last.immediate_response.body)["data"]
        assert row["id"] == "llama"
        call.close()

    in_virtual_time(test, with_replica(ONE, 0, models=("llama",)))


def test_the_list_of_models_of_a_fleet_that_names_none_is_any_replica_s() -> None:
    async def test(picker: VirtualPicker) -> None:
        call = picker.call()
        call.feed(headers_message("request_headers", method="GET", path="/v1/models", end=True))
        assert call.last.WhichOneof("response") == "request_headers"
        assert picker.state.routing.router.in_flight == 1
        call.close()

    in_virtual_time(test)


def test_what_breaks_the_protocol_says_what_was_expected_and_releases_what_was_reserved() -> None:
    async def test(picker: VirtualPicker) -> None:
        for message, expected in (
            (b"\xff", "serialized ProcessingRequest"),
            (b"", "a phase of an exchange"),
            (body_message("request_body", b"").SerializeToString(), "expected request_headers"),
            (headers_message("request_headers", mode=2, path="").SerializeToString(), ":path"),
            (headers_message("request_headers", mode=1).SerializeToString(), "BUFFERED or FULL_DUPLEX_STREAMED"),
        ):
            with pytest.raises(ProtocolError, match=expected):
                picker.call().call.feed(message)
        call, _ = picker.request()
        with pytest.raises(ProtocolError, match="expected one message with request_headers"):
            call.feed(headers_message("request_headers"))
        assert picker.state.routing.router.in_flight == 0

    in_virtual_time(test)


def test_a_refusal_is_booked_once_though_its_call_ends_in_the_same_step() -> None:
    async def test(picker: VirtualPicker) -> None:
        call = picker.call()
        call.feed(headers_message("request_headers"))
        call.feed(body_message("request_body", b"{no JSON"))
        assert error_of(call.last)[:2] == (400, "invalid_json")
        books = {"route": CHAT, "policy": "round-robin"}
        assert picker.total("gorgo_requests_total", status="4xx", **books) == 1
        assert picker.total("gorgo_requests_total", status="499", **books) == 0
        assert picker.total("gorgo_client_aborts_total") == 0

    in_virtual_time(test)


def test_a_picker_that_stops_decides_until_its_calls_are_ended() -> None:
    """Its own 503 would reach a client whose request Envoy could have served without it."""

    async def test(picker: VirtualPicker) -> None:
        picker.state.live.stopping = True
        call, picked = picker.request()
        assert picked.addresses[0] == "10.0.0.1:8000"
        call.close()

    in_virtual_time(test)


@pytest.mark.parametrize(("config", "leaves"), [(ONE, True), (FOUND, False)], ids=["listed", "found"])
def test_an_envoy_leaves_a_picker_that_stops_only_if_it_has_a_list_of_replicas(config: Config, leaves: bool) -> None:
    """Without a list it can serve nothing but what the picker decides."""

    async def test(picker: VirtualPicker) -> None:
        front_end = GrpcFrontEnd(picker.state)
        before = front_end.health.answer(DECIDING)
        picker.state.live.stopping = True
        assert (front_end.health.answer(DECIDING) != before) is leaves

    in_virtual_time(test, config)


def test_a_reload_changes_the_addresses_that_are_chosen_and_the_headers_that_pass() -> None:
    async def test(picker: VirtualPicker) -> None:
        live = picker.state.live
        assert picker.state.endpoints.address("r0") == "10.0.0.1:8000"
        (row,) = live.config.replicas
        moved = replace(
            live.config,
            replicas=(replace(row, url="http://10.0.0.9:8000"),),
            proxy=replace(live.config.proxy, pass_headers=("x-tenant",)),
        )
        live.apply_config(moved)
        call, picked = picker.request(BODY, ("x-tenant", "t"), ("x-other", "o"))
        assert picked.addresses == ["10.0.0.9:8000"]
        assert list(picked.common.header_mutation.remove_headers) == ["x-other"]
        call.close()

    in_virtual_time(test, ONE)


def test_a_replica_that_hangs_is_overdue_and_once_probes_eject_it_the_next_requests_go_elsewhere() -> None:
    """The request that hangs stays: Envoy has it, and tries another replica after its own `per_try_idle_timeout`."""

    async def test(picker: VirtualPicker) -> None:
        router, clock = picker.state.routing.router, picker.state.routing.clock
        hung, picked = picker.request()
        assert picked.addresses == ["10.0.0.1:8000", "10.0.0.2:8000"]
        said = len(hung.output.sent)
        await asyncio.sleep(30.0)
        assert router.view.overdue_replicas(now=clock()) == ["r0"], "it is probed each second"
        for _ in range(3):
            router.replicas.on_probe("r0", None, now=clock())
        assert router.view.health_states() == {"r0": "ejected", "r1": "healthy"}
        for _ in range(3):
            call, other = picker.request()
            assert other.addresses[0] == "10.0.0.2:8000"
            call.close()
        assert (len(hung.output.sent), router.in_flight) == (said, 1), "nothing can be said to Envoy any more"
        hung.close()

    in_virtual_time(test, config_of("10.0.0.1:8000", "10.0.0.2:8000", proxy=GORGO_MS))


@pytest.mark.parametrize(
    ("config", "path", "body", "allowed"),
    [
        (ONE, CHAT, {}, "5xx,reset"),
        (ONE, CHAT, {"store": True}, None),
        (ONE, "/v1/responses", {"input": "hello"}, None),
        (ONE, "/v1/responses", {"input": "hello", "store": False}, "5xx,reset"),
        (FOUND, CHAT, {}, None),
    ],
)
def test_envoy_may_send_twice_what_no_engine_stores(
    config: Config, path: str, body: dict[str, object], allowed: str | None
) -> None:
    async def test(picker: VirtualPicker) -> None:
        call, picked = picker.request(json.dumps(json.loads(BODY) | body).encode(), path=path)
        assert picked.headers.get("x-envoy-retry-on") == allowed
        call.close()

    in_virtual_time(test, config)


# --- Addresses of replicas as Envoy knows them: none that the name of a replica must not stand for.


async def test_a_name_that_stands_for_a_refused_address_has_none_for_envoy(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = ["169.254.169.254", "10.0.0.5"]

    async def resolve(_: str, port: int, **__: Any) -> Any:
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (each, port)) for each in answers]

    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", resolve, raising=False)
    urls, check = {"a": "http://engine.example:8000"}, {"169.254.169.254": "it is link-local"}.get
    endpoints = Endpoints(urls, {"a": check})
    await endpoints.resolve()
    assert endpoints.address("a") == "10.0.0.5:8000"
    answers[:] = ["169.254.169.254"]
    await endpoints.resolve()
    assert endpoints.address("a") == "10.0.0.5:8000"  # as without an answer
    # Another configuration allows less.
    endpoints.configure(urls, {"a": {"10.0.0.5": "it is link-local"}.get})
    assert endpoints.address("a") is None
