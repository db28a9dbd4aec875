"""Documents to replicas: names, urls, regions, labels, states, and errors that name the object."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace
from random import Random
from typing import Any
from urllib.parse import urlsplit

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gorgo.config.fleet import CapacityConfig, FleetSourceConfig, ReplicaConfig, SourceReplicaConfig
from gorgo.config.model import Config, ProxyConfig, RegionConfig
from gorgo.fleet_sources.entries import (
    KEYS,
    Found,
    FoundReplica,
    HostPort,
    ReplicaState,
    found_addresses,
    merge,
    next_entries,
    refused_address,
    replica_name,
    without_refused,
)
from gorgo.fleet_sources.kubernetes import (
    InferencePool,
    ObjectError,
    found_pods,
    found_slices,
    read_node,
    read_pod,
    read_pool,
    read_slice,
)
from tests import fuzz
from tests.fleet_sources.documents import endpoint, endpoint_slice, node, pod, pool

HERE = SourceReplicaConfig(region="here")


def of_pods(*documents: dict[str, Any], ports: tuple[int | str, ...] = (30000,), **changes: Any) -> Found:
    return found_pods([read_pod(each) for each in documents], ports, replace(HERE, **changes))


def only(found: Found) -> ReplicaConfig:
    assert not found.rejected, found.rejected
    (replica,) = found.replicas
    return replica.entry


def reason(found: Found) -> str:
    assert not found.replicas
    (why,) = found.rejected.values()
    return why


def test_pod_is_a_replica_with_the_keys_of_its_source() -> None:
    shared: dict[str, Any] = {
        "models": ("qwen",),
        "engine": "vllm",
        "api_key_env": "KEY",
        "push_token_env": "PUSH",
        "capacity": CapacityConfig(kv_tokens=7),
    }
    entry = only(of_pods(pod("qwen-0", "10.0.0.5"), **shared))
    assert entry == ReplicaConfig(
        name="qwen-0",
        region="here",
        url="http://10.0.0.5:30000",
        engine="vllm",
        models=("qwen",),
        api_key_env="KEY",
        push_token_env="PUSH",
        capacity=CapacityConfig(kv_tokens=7),
    )


def test_labels_and_annotations_describe_a_replica_and_annotations_go_first() -> None:
    labels = {"gorgo-router/accelerator": "L40S", "gorgo-router/engine": "sglang", "gorgo-router/kv-tokens": "1000"}
    annotations = {
        "gorgo-router/models": "Qwen/Qwen3-8B, qwen",
        "gorgo-router/engine": "vllm",
        "gorgo-router/max-running-requests": "64",
        "gorgo-router/prefill-tokens-per-s": "11500.5",
        "gorgo-router/request-usage": "true",
        "gorgo-router/draining": "true",
        "gorgo-router/region": "there",
    }
    entry = only(of_pods(pod("a", labels=labels, annotations=annotations)))
    assert entry == ReplicaConfig(
        name="a",
        region="there",
        url="http://10.0.0.5:30000",
        engine="vllm",
        models=("Qwen/Qwen3-8B", "qwen"),
        accelerator="L40S",
        request_usage=True,
        draining=True,
        capacity=CapacityConfig(kv_tokens=1000, max_running_requests=64, prefill_tokens_per_s=11500.5),
    )


@pytest.mark.parametrize(
    ("key", "value", "why"),
    [
        ("kv-tokens", "lots", "pod llm/a: gorgo-router/kv-tokens: 'lots'; expected a whole number"),
        ("kv-tokens", "0", "pod llm/a: gorgo-router/kv-tokens: 0; expected a number of at least 1"),
        ("max-running-requests", "-1", "expected a whole number"),
        ("prefill-tokens-per-s", "inf", "gorgo-router/prefill-tokens-per-s: 'inf'; expected a number"),
        ("engine", "slang", "pod llm/a: gorgo-router/engine: 'slang'; expected 'sglang', 'vllm'"),
        ("region", "no such/place", "gorgo-router/region: 'no such/place'; expected letters, digits"),
        ("draining", "yes", "gorgo-router/draining: 'yes'; expected true or false"),
        ("modles", "m", "gorgo-router/modles: unknown key (did you mean 'models'?); expected one of models, engine"),
    ],
)
def test_error_in_an_annotation_names_object_and_key(key: str, value: str, why: str) -> None:
    found = reason(of_pods(pod("a", annotations={f"gorgo-router/{key}": value})))
    assert why.replace("'", '"') in found.replace("'", '"'), found


def test_region_is_the_pods_then_the_nodes_then_the_sources() -> None:
    regions = {"node-a": read_node(node("node-a", "eu-west-1")), "node-b": read_node(node("node-b", None))}

    def region(**changes: Any) -> str:
        return only(found_pods([read_pod(pod("a", **changes))], (1,), HERE, regions)).region

    assert region(labels={"topology.kubernetes.io/region": "us-east-1"}) == "us-east-1"
    assert region() == "eu-west-1"
    assert region(node="node-b") == region(node="unknown") == "here"
    assert region(annotations={"gorgo-router/region": "x"}, labels={"topology.kubernetes.io/region": "y"}) == "x"


def test_pod_without_any_region_is_rejected_with_the_remedy() -> None:
    why = reason(found_pods([read_pod(pod("a"))], (1,), SourceReplicaConfig()))
    labels = "the label topology.kubernetes.io/region, gorgo-router/region, or replica.region of the source"
    assert why == f"pod llm/a: no region; expected {labels}"


def test_several_ports_are_several_replicas_and_names_of_ports_are_the_pods() -> None:
    found = of_pods(pod("a", ports={"http": 8000, "admin": 9000}), ports=("http", 31000))
    assert [row.entry.url for row in found.replicas] == ["http://10.0.0.5:8000", "http://10.0.0.5:31000"]
    assert [row.entry.name for row in found.replicas] == ["a-http", "a-31000"]
    why = reason(of_pods(pod("a", ports={"http": 8000}), ports=("grpc",)))
    assert why == "pod llm/a: no port named 'grpc'; its named ports: http"


def test_address_of_version_six_has_brackets() -> None:
    assert only(of_pods(pod("a", "fd00::5"), scheme="https")).url == "https://[fd00::5]:30000"


@pytest.mark.parametrize(
    ("changes", "state"),
    [
        ({}, ReplicaState.READY),
        ({"ready": False}, ReplicaState.NOT_READY),
        ({"terminating": True}, ReplicaState.STOPPING),
    ],
)
def test_pod_is_ready_by_its_condition_until_it_terminates(changes: dict[str, Any], state: ReplicaState) -> None:
    (replica,) = of_pods(pod("a", **changes)).replicas
    assert replica.state is state


def test_pod_without_an_address_is_none_yet() -> None:
    assert of_pods(pod("a", "")) == Found()


@pytest.mark.parametrize("document", [{}, {"metadata": {"name": "a"}}, {"metadata": {"name": 3}, "spec": {"x": 1}}])
def test_document_that_is_no_pod_is_an_error(document: dict[str, Any]) -> None:
    with pytest.raises(ObjectError):
        read_pod(document)


def test_status_of_a_pod_that_changes_nothing_is_no_other_pod() -> None:
    changed = pod("a", version="2", annotations={"kubernetes.io/psp": "x"})
    changed["status"]["startTime"] = "2026-11-23T05:00:00Z"
    assert read_pod(changed) == read_pod(pod("a"))


# -- endpoint slices


def of_slices(*documents: dict[str, Any], **changes: Any) -> Found:
    source = FleetSourceConfig(name="svc", kind="endpoint-slices", service="qwen", replica=HERE, **changes)
    return found_slices([read_slice(each) for each in documents], source)


def test_endpoints_are_replicas_by_the_name_of_their_pod_or_address() -> None:
    found = of_slices(endpoint_slice("qwen-x", [endpoint("10.0.0.5", "qwen-0"), endpoint("10.0.0.6")]))
    assert [(row.entry.name, row.entry.url) for row in found.replicas] == [
        ("qwen-0", "http://10.0.0.5:30000"),
        ("svc-10.0.0.6", "http://10.0.0.6:30000"),
    ]


def test_unknown_readiness_is_ready_and_a_terminating_endpoint_is_not() -> None:
    rows = [
        endpoint("10.0.0.1", "a"),
        endpoint("10.0.0.2", "b", ready=True, serving=True, terminating=False),
        endpoint("10.0.0.3", "c", ready=False),
        endpoint("10.0.0.4", "d", ready=False, serving=True, terminating=True),
        endpoint("10.0.0.5", "e", ready=None),
    ]
    states = {row.entry.name: row.state is ReplicaState.READY for row in of_slices(endpoint_slice("s", rows)).replicas}
    assert states == {"a": True, "b": True, "c": False, "d": False, "e": True}


def test_endpoint_that_moves_between_slices_is_one_replica_and_ready_if_one_says_so() -> None:
    old = endpoint_slice("s1", [endpoint("10.0.0.1", "a", ready=False)])
    new = endpoint_slice("s2", [endpoint("10.0.0.1", "a", ready=True)])
    for order in ((old, new), (new, old)):
        (replica,) = of_slices(*order).replicas
        assert replica.state is ReplicaState.READY


def test_port_of_a_slice_is_the_only_one_or_named_or_given() -> None:
    two = endpoint_slice("s", [endpoint("10.0.0.1", "a")], ports={"http": 8000, "grpc": 9000})
    assert only(of_slices(two, port_name="grpc")).url == "http://10.0.0.1:9000"
    assert only(of_slices(two, port=7000)).url == "http://10.0.0.1:7000"
    why = "endpointslice llm/s: expected one port, or port_name in the source; its ports: http (8000), grpc (9000)"
    assert reason(of_slices(two)) == why
    assert "no port named 'web'; its ports: http (8000), grpc (9000)" in reason(of_slices(two, port_name="web"))


def test_annotations_of_a_service_describe_its_replicas() -> None:
    described = endpoint_slice("s", [endpoint("10.0.0.1", "a")], annotations={"gorgo-router/models": "m"})
    assert only(of_slices(described)).models == ("m",)
    wrong = endpoint_slice("s", [endpoint("10.0.0.1", "a")], annotations={"gorgo-router/kv-tokens": "x"})
    assert reason(of_slices(wrong)).startswith("endpointslice llm/s: gorgo-router/kv-tokens: ")


def test_slice_of_names_is_an_error() -> None:
    with pytest.raises(ObjectError, match="expected addressType IPv4 or IPv6"):
        read_slice({**endpoint_slice("s", []), "addressType": "FQDN"})


# -- pools


def test_pool_has_selector_and_ports() -> None:
    found = read_pool(pool({"app": "qwen", "a": "b"}, [8000, 8001]))
    assert found == InferencePool("qwen", (("a", "b"), ("app", "qwen")), (8000, 8001))


@pytest.mark.parametrize(
    ("document", "why"), [(pool({}, [1]), "no selector"), (pool({"a": "b"}, []), "no targetPorts")]
)
def test_pool_that_selects_nothing_is_an_error(document: dict[str, Any], why: str) -> None:
    with pytest.raises(ObjectError, match=why):
        read_pool(document)


# -- names


def test_dns_addresses_are_replicas_by_source_and_address() -> None:
    source = FleetSourceConfig(name="engines", kind="dns", host="engines.llm", port=30000, replica=HERE)
    found = found_addresses(
        [HostPort("10.0.0.6", 30000), HostPort("10.0.0.5", 30000), HostPort("10.0.0.5", 30000)], source
    )
    assert [row.entry.name for row in found.replicas] == ["engines-10.0.0.5-30000", "engines-10.0.0.6-30000"]
    assert only(found_addresses([HostPort("fd00::5", 1)], source)).name == "engines-fd00-5-1"
    assert "engines.llm: no region" in reason(
        found_addresses([HostPort("10.0.0.5", 1)], replace(source, replica=SourceReplicaConfig()))
    )


@given(st.text(max_size=300))
def test_every_name_is_one_of_a_replica(text: str) -> None:
    name = replica_name(text)
    assert only(of_pods(pod("a"))).name == "a"
    assert 0 < len(name) <= 63
    assert all(sign.isascii() and (sign.isalnum() or sign in "._-") for sign in name)
    assert name[0].isalnum()


def test_long_names_that_begin_alike_stay_apart() -> None:
    first, second = replica_name("a" * 80 + "-0"), replica_name("a" * 80 + "-1")
    assert first != second
    assert len(first) == 63


# -- the fleet after a change

A = ReplicaConfig(name="a", region="here", url="http://10.0.0.1:1")
B = ReplicaConfig(name="b", region="here", url="http://10.0.0.2:1")


def test_replica_that_is_not_ready_drains_if_it_was_in_use_and_is_left_out_otherwise() -> None:
    found = Found((FoundReplica(A, ReplicaState.NOT_READY), FoundReplica(B, ReplicaState.NOT_READY)))
    assert next_entries({"a": A}, found) == {"a": replace(A, draining=True)}
    back = Found((FoundReplica(A), FoundReplica(B)))
    assert next_entries({"a": replace(A, draining=True)}, back) == {"a": A, "b": B}


def test_pod_of_the_same_name_at_another_address_is_not_in_use_until_it_is_ready() -> None:
    moved = replace(A, url="http://10.0.0.9:1")
    assert next_entries({"a": A}, Found((FoundReplica(moved, ReplicaState.NOT_READY),))) == {}


def test_replica_whose_object_became_invalid_stays_as_it_was() -> None:
    assert next_entries({"a": A}, Found((), {"a": "pod llm/a: bad", "b": "pod llm/b: bad"})) == {"a": A}


def config(*replicas: ReplicaConfig) -> Config:
    return Config(proxy=ProxyConfig(region="here"), regions=(RegionConfig(name="here"),), replicas=replicas)


def test_file_goes_first_then_the_sources_in_their_order() -> None:
    other = replace(B, name="b2")
    merged = merge(config(A), {"one": [replace(A, url="http://x:1"), B], "two": [other]})
    assert merged.config.replicas == (A, B)
    assert merged.joined == {("one", "b"): B}
    assert merged.refused == {
        ("one", "a"): "another replica has its name",
        ("two", "b2"): "http://10.0.0.2:1 is the url of b",
    }


def test_replica_in_an_unknown_region_is_refused() -> None:
    merged = merge(config(A), {"one": [replace(B, region="mars")]})
    assert merged.config.replicas == (A,)
    assert merged.refused == {("one", "b"): "its region 'mars' is not one of `regions`"}


def test_every_key_is_a_place_in_an_entry() -> None:
    fields = set(ReplicaConfig.__dataclass_fields__)
    nested = set(CapacityConfig.__dataclass_fields__)
    for place, _ in KEYS.values():
        assert place[0] in fields
        assert place[0] != "capacity" or place[1] in nested


#: What somebody may write in the place of a value of a document.
ODD: list[Any] = [
    None,
    True,
    0,
    -1,
    2**70,
    1e300,
    "",
    "\\x00",
    "a" * 300,
    [],
    {},
    [[[]]],
    "169.254.169.254",
    "::1",
    "10.0.0.9",
]


def test_what_the_name_of_an_srv_record_stands_for_is_checked_at_each_look_up() -> None:
    for local, refused in ((False, {"127.0.0.1", "169.254.169.254", "0.0.0.0", "fe80::1"}), (True, {"0.0.0.0"})):
        source = FleetSourceConfig(name="s", kind="dns", host="_x._tcp.e", local_addresses=local, replica=HERE)
        found = found_addresses([HostPort("engine.example", 8000), HostPort("10.0.0.5", 8000)], source)
        named, literal = sorted(
            (each.entry for each in without_refused(found, source).replicas), key=lambda entry: entry.url, reverse=True
        )
        assert literal.refuses is None
        assert named.refuses is not None
        asked = ("127.0.0.1", "169.254.169.254", "0.0.0.0", "fe80::1", "10.0.0.5")
        assert {address for address in asked if named.refuses(address) is not None} == refused
        # What it is is retained on its way into the fleet.
        config = Config(proxy=ProxyConfig(region="here"), regions=(RegionConfig(name="here"),))
        entries = next_entries({}, without_refused(found, source)).values()
        assert sum(each.refuses is not None for each in merge(config, {"s": entries}).config.replicas) == 1
        assert replace(named, draining=True).refuses is not None


def changed(chance: Random, document: dict[str, Any]) -> dict[str, Any]:
    """A document with some values replaced, taken away or doubled."""
    found = deepcopy(document)
    for _ in range(chance.randrange(1, 4)):
        inner: Any = found
        while True:
            keys = list(inner) if isinstance(inner, dict) else list(range(len(inner)))
            if not keys:
                break
            key = chance.choice(keys)
            if isinstance(inner[key], dict | list) and chance.random() < 0.8:
                inner = inner[key]
                continue
            if chance.random() < 0.15:
                del inner[key]
            elif isinstance(inner, list) and chance.random() < 0.3:
                inner.extend([inner[key]] * chance.randrange(1, 50))
            else:
                inner[key] = chance.choice(ODD)
            break
    return found


def test_cases_of_chance_of_documents_delay_nothing_and_give_sound_replicas_or_a_reason() -> None:
    chance = Random(5)
    source = FleetSourceConfig(name="s", kind="pods", selector={"a": "b"}, port=30000, replica=HERE)
    slices = FleetSourceConfig(name="e", kind="endpoint-slices", service="x", replica=HERE)
    config = Config(proxy=ProxyConfig(region="here"), regions=(RegionConfig(name="here"),), fleet_sources=(source,))
    sound = refused = 0

    def case() -> None:
        nonlocal sound, refused
        try:
            if chance.random() < 0.5:
                found = found_pods(
                    [read_pod(changed(chance, pod("p", annotations={"gorgo/models": "m"})))], (30000,), HERE
                )
            else:
                document = endpoint_slice("e", [endpoint("10.0.0.5", "p", ready=True)], ports={"http": 30000})
                found = found_slices([read_slice(changed(chance, document))], slices)
            found = without_refused(found, source)
            merged = merge(config, {"s": next_entries({}, found).values()})
        except ObjectError:
            refused += 1
            return
        for replica in found.replicas:
            host = urlsplit(replica.entry.url).hostname or ""
            assert refused_address(host, local=False, is_name_allowed=False) is None
            sound += 1
        assert merged

    for _ in range(fuzz.CASES):
        fuzz.timed(case)
    assert sound > fuzz.CASES // 10
    assert refused > 0
