"""Where engines say that they publish KV events."""

from __future__ import annotations

from typing import Any

import pytest

from gorgo.engines.kv_sources import MAX_RANKS, KvEventSource, read_sglang, read_vllm

HOST = "10.0.0.5"
SGLANG: dict[str, Any] = {
    "publisher": "zmq",
    "endpoint_host": "*",
    "endpoint_port_base": 5557,
    "topic": "kv",
    "dp_size": 2,
}
VLLM: dict[str, Any] = {
    "publisher": "zmq",
    "endpoint": "tcp://*:5557",
    "replay_endpoint": "tcp://*:5558",
    "topic": "kv",
}


def test_each_rank_of_sglang_has_the_next_ports() -> None:
    answer = {"kv_events": SGLANG | {"replay_endpoint_port_base": 5657, "block_size": 16}}
    assert read_sglang(answer, host=HOST) == (
        KvEventSource("tcp://10.0.0.5:5557", "tcp://10.0.0.5:5657", "kv", rank=0, block_tokens=16),
        KvEventSource("tcp://10.0.0.5:5558", "tcp://10.0.0.5:5658", "kv", rank=1, block_tokens=16),
    )


def test_each_rank_of_vllm_has_its_entry() -> None:
    answer = {"1": VLLM | {"endpoint": "tcp://*:5567", "replay_endpoint": None}, "0": VLLM}
    assert read_vllm(answer, host=HOST) == (
        KvEventSource("tcp://10.0.0.5:5557", "tcp://10.0.0.5:5558", "kv", rank=0),
        KvEventSource("tcp://10.0.0.5:5567", None, "kv", rank=1),
    )


def test_the_host_is_the_replicas_whatever_the_engine_answers() -> None:
    (source,) = read_vllm({"0": VLLM | {"endpoint": "tcp://169.254.169.254:80"}}, host="::1") or ()
    assert source.endpoint == "tcp://[::1]:80"
    (first, _) = read_sglang({"kv_events": SGLANG | {"endpoint_host": "evil"}}, host=HOST) or ()
    assert first.endpoint == "tcp://10.0.0.5:5557"


@pytest.mark.parametrize(
    "events",
    [
        None,
        {},
        [],
        "zmq",
        SGLANG | {"publisher": "null"},
        SGLANG | {"endpoint_port_base": 0},
        SGLANG | {"endpoint_port_base": True},
        SGLANG | {"endpoint_port_base": "5557"},
    ],
)
def test_sglang_without_events_has_no_source(events: object) -> None:
    assert read_sglang({"kv_events": events}, host=HOST) == ()


@pytest.mark.parametrize(
    "config",
    [
        None,
        {},
        VLLM | {"publisher": "null"},
        VLLM | {"endpoint": None},
        VLLM | {"endpoint": "ipc:///tmp/x"},
        VLLM | {"endpoint": "tcp://*:99999"},
        VLLM | {"endpoint": "tcp://*:" + "9" * 5000},
        VLLM | {"endpoint": "tcp://*:٣"},
    ],
)
def test_vllm_without_events_has_no_source(config: object) -> None:
    assert read_vllm({"0": config}, host=HOST) == ()


@pytest.mark.parametrize("answer", [None, [], "x", 3])
def test_another_answer_is_none(answer: object) -> None:
    assert read_sglang(answer, host=HOST) is None
    assert read_vllm(answer, host=HOST) is None


def test_ranks_ports_and_topics_are_bounded() -> None:
    assert len(read_sglang({"kv_events": SGLANG | {"dp_size": 10**9}}, host=HOST) or ()) == MAX_RANKS
    last = read_sglang({"kv_events": SGLANG | {"endpoint_port_base": 65535, "topic": "x" * 300}}, host=HOST)
    assert last == (KvEventSource("tcp://10.0.0.5:65535", rank=0),)
    ranks = {str(rank): VLLM for rank in range(200)} | {"-1": VLLM, "9" * 5000: VLLM, "x": VLLM}
    assert len(read_vllm(ranks, host=HOST) or ()) == MAX_RANKS
