"""Where an engine publishes its KV cache events, from its own answer: one source per data-parallel rank.

Owns the reading of SGLang's `/server_info` and vLLM's `/kv_event_sources`, and the flags that turn events on.

Theory of operation. An answer names a port to listen on, often with a wildcard for the host. The events are taken from
the host of the replica's URL alone: an engine's answer sends the proxy to no other machine, and makes it listen on none
of its own ports.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

SGLANG_PATHS = ("/server_info", "/get_server_info")
VLLM_PATH = "/kv_event_sources"
#: Ranks of one replica that are subscribed to.
MAX_RANKS = 64
_MAX_TOPIC = 256
_MAX_PORT = 65_535

SGLANG_FLAG = (
    '--kv-events-config \'{"publisher": "zmq", "endpoint": "tcp://*:5557", "replay_endpoint": "tcp://*:5558"}\''
)
VLLM_FLAG = (
    '--kv-events-config \'{"enable_kv_cache_events": true, "publisher": "zmq", "endpoint": "tcp://*:5557", '
    '"replay_endpoint": "tcp://*:5558"}\''
)


@dataclass(frozen=True, slots=True)
class KvEventSource:
    """One publisher.

    Parameters
    ----------
    endpoint, replay:
        Addresses of ZeroMQ for events and replays; `replay` is `None` without replays.
    topic:
        Prefix of the topics to receive.
    mode:
        Whether the proxy connects to the endpoint or binds it.
    rank:
        Data-parallel rank; `None` if the messages alone tell.
    block_tokens:
        Tokens per block, if known.
    """

    endpoint: str
    replay: str | None = None
    topic: str = ""
    mode: Literal["connect", "bind"] = "connect"
    rank: int | None = None
    block_tokens: int | None = None


def read_sglang(answer: object, *, host: str) -> tuple[KvEventSource, ...] | None:
    """Return the sources of an answer to `/server_info`, none if events are off; `None` if it is no such answer.

    >>> events = {"publisher": "zmq", "endpoint_port_base": 5557, "dp_size": 2, "replay_endpoint_port_base": 5657}
    >>> [source.replay for source in read_sglang({"kv_events": events}, host="10.0.0.5")]
    ['tcp://10.0.0.5:5657', 'tcp://10.0.0.5:5658']
    """
    if not isinstance(answer, dict):
        return None
    events = answer.get("kv_events")
    base = _port(events.get("endpoint_port_base")) if isinstance(events, dict) else None
    if not isinstance(events, dict) or events.get("publisher") != "zmq" or base is None:
        return ()
    replay = _port(events.get("replay_endpoint_port_base"))
    ranks = min(_count(events.get("dp_size")) or 1, MAX_RANKS, _MAX_PORT - max(base, replay or 0) + 1)
    return tuple(
        KvEventSource(
            _address(host, base + rank),
            None if replay is None else _address(host, replay + rank),
            topic=_topic(events.get("topic")),
            rank=rank,
            block_tokens=_count(events.get("block_size")),
        )
        for rank in range(ranks)
    )


def read_vllm(answer: object, *, host: str) -> tuple[KvEventSource, ...] | None:
    """Return the sources of an answer to `/kv_event_sources`, none if events are off; `None` if it is no such answer.

    >>> config = {"publisher": "zmq", "endpoint": "tcp://*:5557", "replay_endpoint": None, "topic": "kv"}
    >>> read_vllm({"0": config}, host="::1")[0].endpoint
    'tcp://[::1]:5557'
    """
    if not isinstance(answer, dict):
        return None
    found = []
    for key, config in sorted(answer.items(), key=lambda item: (len(item[0]), item[0])):
        if not (key.isdecimal() and key.isascii() and int(key[:6]) < MAX_RANKS and isinstance(config, dict)):
            continue
        port = _port_of(config.get("endpoint"))
        if config.get("publisher") != "zmq" or port is None:
            continue
        replay = _port_of(config.get("replay_endpoint"))
        found.append(
            KvEventSource(
                _address(host, port),
                None if replay is None else _address(host, replay),
                topic=_topic(config.get("topic")),
                rank=int(key),
            )
        )
    return tuple(found)


def _address(host: str, port: int) -> str:
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"


def _port_of(endpoint: object) -> int | None:
    if not isinstance(endpoint, str) or not endpoint.startswith("tcp://"):
        return None
    text = endpoint.rpartition(":")[2]
    return _port(int(text)) if text.isascii() and text.isdecimal() and len(text) <= 5 else None


def _port(value: object) -> int | None:
    return value if type(value) is int and 0 < value <= _MAX_PORT else None


def _count(value: object) -> int | None:
    return value if type(value) is int and value > 0 else None


def _topic(value: object) -> str:
    return value if isinstance(value, str) and len(value) <= _MAX_TOPIC else ""


#: What turns events on, by kind of engine.
FLAGS: Mapping[str, str] = {"sglang": SGLANG_FLAG, "vllm": VLLM_FLAG}
