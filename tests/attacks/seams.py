"""Attacks from the other sides: clients of the picker, publishers of KV events, writers of the store, fleet sources.

Owns the hostile peers and what each does. Leaves the measurement to `tests.attacks`.
"""

from __future__ import annotations

import json
import os
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic, sleep, time
from typing import Any

from gorgo.live.peer_store.connection import StoreNames, seal_key
from gorgo.picker.transport import frames
from gorgo.picker.transport.services import CHECK, PROCESS, WATCH
from tests.attacks.attacks import Attack, Run
from tests.attacks.bodies import MIB
from tests.attacks.engine import HostileEngine
from tests.attacks.target import CONFIG, Probe, Target, serving
from tests.live.peer_store.server import ENVIRON, KEY_VARIABLE, RedisServer, running
from tests.picker.transport.peer import block, data, headers, message

PEER = "peer/00000001"
#: Of one attack.
ATTACKED_S = 8.0
MORE = """
fleet_sources:
  - name: pods
    kind: pods
    namespace: n
    selector: {{app: engine}}
    port: 8000
    api: {{url: "http://127.0.0.1:{api}"}}
    replica: {{region: here}}
shared: {{url: "{store}", group: g, key_env: {key}, router: own}}
"""
PICKER = """
picker: {{bind: "127.0.0.1:0"}}
"""


class HostilePeer:
    """A server whose connections each run `speak` in a thread of their own, while `is_hostile`."""

    def __init__(self, speak: Callable[[HostilePeer, socket.socket], None]) -> None:
        self.is_hostile = threading.Event()
        #: What a hostile one sends.
        self.flood = b""
        self.first = b""
        self.closed = threading.Event()
        self._speak = speak
        self._socket = socket.create_server(("127.0.0.1", 0), backlog=128)
        self.port: int = self._socket.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self.closed.set()
        self._socket.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while not self.closed.is_set():
                connection, _ = self._socket.accept()
                threading.Thread(target=self._run, args=(connection,), daemon=True).start()

    def _run(self, connection: socket.socket) -> None:
        with suppress(OSError, EOFError), connection:
            self._speak(self, connection)


# KV events: a publisher that speaks ZMTP 3.0 by itself.


def zmtp_frame(body: bytes, *, more: bool) -> bytes:
    flags = (1 if more else 0) | (2 if len(body) > 255 else 0)
    return bytes([flags]) + len(body).to_bytes(8 if flags & 2 else 1, "big") + body


def publish(peer: HostilePeer, connection: socket.socket) -> None:
    """Greet as a publisher; send what the peer has while it is hostile, and nothing otherwise."""
    connection.sendall(b"\xff" + bytes(8) + b"\x7f\x03\x00NULL" + bytes(16) + bytes(32))
    ready = b"\x05READY\x0bSocket-Type\x00\x00\x00\x03PUB"
    connection.sendall(bytes([4, len(ready)]) + ready)
    connection.recv(64, socket.MSG_WAITALL)
    while not peer.closed.is_set():
        if peer.is_hostile.wait(0.1):
            connection.sendall(peer.first)
            while peer.is_hostile.is_set():
                connection.sendall(peer.flood)


def events_of(size: int) -> bytes:
    """A message of nothing but empty events, as MessagePack."""
    body = b"\x92\xcb" + bytes(8) + b"\xdd" + (size // 2).to_bytes(4, "big") + b"\x90\x90" * (size // 2)
    return zmtp_frame(b"kv", more=True) + zmtp_frame(bytes(8), more=True) + zmtp_frame(body, more=False)


KV_FLOODS = {
    "one message without an end": (zmtp_frame(b"kv", more=True), zmtp_frame(b"x" * 60_000, more=True) * 16),
    "frames of one byte without an end": (zmtp_frame(b"kv", more=True), zmtp_frame(b"x", more=True) * 100_000),
    "messages of 8 MiB of events": (b"", events_of(8 * MIB)),
    "short messages at full speed": (b"", events_of(40) * 1000),
}


# A source: an API server of Kubernetes.


def pod(number: int) -> dict[str, Any]:
    address = f"10.{number >> 16 & 255}.{number >> 8 & 255}.{number & 255}"
    status = {"podIP": address, "conditions": [{"type": "Ready", "status": "True"}]}
    return {"metadata": {"name": f"p{number}", "uid": str(number), "labels": {"app": "engine"}}, "status": status}


def list_pods(peer: HostilePeer, connection: socket.socket) -> None:
    """Answer each list: with no pod, or with what the peer has."""
    empty = json.dumps({"metadata": {"resourceVersion": "1"}, "items": []}).encode()
    with connection.makefile("rb") as lines:
        while lines.readline():
            while lines.readline() not in (b"\r\n", b""):
                pass
            body = peer.flood if peer.is_hostile.is_set() else empty
            head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
            connection.sendall(head % len(body) + body)


def pages() -> dict[str, bytes]:
    pods = [pod(number) for number in range(100)]
    next_page = {"resourceVersion": "1", "continue": "more"}
    labelled = pod(1) | {"metadata": {"name": "p", "labels": {f"gorgo/{at}": "x" for at in range(1_600_000)}}}
    return {
        "pages of pods without an end": json.dumps({"metadata": next_page, "items": pods}).encode(),
        "a page of 32 MiB of numbers": b'{"metadata":{"resourceVersion":"1"},"items":[' + b"1," * (16 * MIB) + b"1]}",
        "a page of one pod with 32 MiB of labels": json.dumps(
            {"metadata": {"resourceVersion": "1"}, "items": [labelled]}
        ).encode(),
    }


# The store: a writer without the group's key.


def store_command(connection: socket.socket, *words: bytes) -> None:
    connection.sendall(b"*%d\r\n" % len(words) + b"".join(b"$%d\r\n%b\r\n" % (len(each), each) for each in words))


def write_store(server: RedisServer, work: Callable[[socket.socket, int], None]) -> Run:
    def run(target: Target, engine: HostileEngine) -> str:
        # Beside a real peer, whose stream is read.
        names = StoreNames("g", seal_key(server.shared(), ENVIRON))
        server.command("ZADD", names.members, str(int(time() * 1000)), names.listed(PEER))
        with socket.create_connection(("127.0.0.1", server.port), timeout=10) as connection:
            threading.Thread(target=_discard, args=(connection,), daemon=True).start()
            end, number = monotonic() + ATTACKED_S, 0
            while monotonic() < end:
                work(connection, number)
                number += 1
                sleep(0.05)
        server.command("FLUSHALL")
        return ""

    return run


def _discard(connection: socket.socket) -> None:
    with suppress(OSError):
        while connection.recv(65536):
            pass


def forged_members(connection: socket.socket, number: int) -> None:
    now_ms = b"%d" % (1000 * int(monotonic()) + 10**14)
    members = [word for at in range(200) for word in (now_ms, b"eu-%d/%d#%032x" % (at, number, at))]
    store_command(connection, b"ZADD", b"gorgo:g:members", *members)


def entries_of_own_stream(size: int) -> Callable[[socket.socket, int], None]:
    text = b"[" + b"1," * (size // 2) + b"1]"

    def write(connection: socket.socket, number: int) -> None:
        # To the stream of each member that is listed: the router's own peer.
        store_command(connection, b"XADD", f"gorgo:g:reports:{PEER}".encode(), b"MAXLEN", b"64", b"*", b"report", text)

    return write


# The picker: clients of its port, by HTTP/2.


def picker_client(target: Target, window: int) -> socket.socket:
    connection = socket.create_connection(target.address, timeout=30)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.sendall(frames.PREFACE + frames.settings({frames.INITIAL_WINDOW_SIZE: window}))
    return connection


def flood_picker(first: bytes, flood: bytes, *, window: int = 65_535, clients: int = 1, reads: bool = True) -> Run:
    """Connections that send `first`, then `flood` over and over; a new one takes the place of one that is closed."""

    def speak(target: Target, end_s: float) -> None:
        while monotonic() < end_s:
            with suppress(OSError), picker_client(target, window) as connection:
                if reads:
                    threading.Thread(target=_discard, args=(connection,), daemon=True).start()
                connection.sendall(first)
                while monotonic() < end_s:
                    if flood:
                        connection.sendall(flood)
                    sleep(0.01)

    def run(target: Target, engine: HostileEngine) -> str:
        end_s = monotonic() + ATTACKED_S
        speakers = [threading.Thread(target=speak, args=(target, end_s), daemon=True) for _ in range(clients)]
        for speaker in speakers:
            speaker.start()
        for speaker in speakers:
            speaker.join(60)
        return ""

    return run


def calls(path: str, count: int, *more: bytes) -> bytes:
    """Open `count` calls of a method, each with these DATA frames' contents."""
    head = block(path)
    return b"".join(
        headers(2 * at + 1, head) + b"".join(data(2 * at + 1, each) for each in more) for at in range(count)
    )


def partial_message(size: int) -> bytes:
    """A message of 31 MiB that stops after `size` bytes."""
    content = b"\0" + (31 * MIB).to_bytes(4, "big") + bytes(size)
    return b"".join(data(1, content[at : at + frames.FRAME_BYTES]) for at in range(0, size, frames.FRAME_BYTES))


def heads_of_huffman_code() -> bytes:
    blocks = (block("/x", "POST", *((f"a{at}", "a" * 2000) for at in range(6))) for _ in range(50))
    return b"".join(headers(2 * at + 1, fragment) for at, fragment in enumerate(blocks))


def _attack(kind: str, name: str, run: Run) -> Attack:
    return Attack(kind, name, 0, lambda: run)


def picker_attacks() -> Iterator[Attack]:
    window = frames.window_update(0, 1)
    settings = b"".join(frames.settings({frames.INITIAL_WINDOW_SIZE: size % 2}) for size in range(50))
    open_calls = calls(PROCESS, 4000)
    runs = {
        "nothing": flood_picker(b"", b""),
        "windows over 4,000 open calls": flood_picker(open_calls, window * 500, window=0),
        "settings over 4,000 open calls": flood_picker(open_calls, settings, window=0),
        "calls of Watch": flood_picker(calls(WATCH, 4000, message(b"")), b"", window=0),
        "answers that nobody reads": flood_picker(calls(CHECK, 4000, message(b"")), b"", clients=8, reads=False),
        "incomplete messages of 31 MiB": flood_picker(
            headers(1) + partial_message(900_000), b"", clients=64, reads=False
        ),
        "connections that say nothing": flood_picker(b"", b"", clients=200, reads=False),
        "header blocks of Huffman code": flood_picker(heads_of_huffman_code(), b""),
        "pings": flood_picker(b"", frames.frame(frames.PING, 0, 0, bytes(8)) * 200),
        "rapid resets": flood_picker(
            b"", b"".join(headers(2 * at + 1) + frames.reset(2 * at + 1, frames.Code.CANCEL) for at in range(500))
        ),
    }
    return (_attack("picker", name, run) for name, run in runs.items())


class PickerProbe(Probe):
    """`Health/Check` of the picker in the place of `/health`."""

    def _connect(self) -> socket.socket:
        connection = picker_client(self.target, 65_535)
        self._buffer = b""
        self._next_id = 1
        return connection

    def _ask(self, connection: socket.socket) -> None:
        stream_id, self._next_id = self._next_id, self._next_id + 2
        connection.sendall(headers(stream_id, block(CHECK)) + data(stream_id, message(b""), end=True))
        while True:
            while len(self._buffer) >= frames.HEAD_BYTES:
                size_and_kind, flags, found_id = frames.read_head(self._buffer, 0)
                size = size_and_kind >> 8
                if len(self._buffer) < frames.HEAD_BYTES + size:
                    break
                payload = self._buffer[frames.HEAD_BYTES : frames.HEAD_BYTES + size]
                self._buffer = self._buffer[frames.HEAD_BYTES + size :]
                if size_and_kind & 0xFF == frames.DATA and size:
                    connection.sendall(frames.window_update(0, size))
                if size_and_kind & 0xFF == frames.PING and not flags & frames.ACK:
                    connection.sendall(frames.frame(frames.PING, frames.ACK, 0, payload))
                if found_id == stream_id and flags & frames.END_STREAM:
                    return
            found = connection.recv(65536)
            if not found:
                raise ConnectionError("the probe's connection was closed")
            self._buffer += found


@dataclass(slots=True)
class Seams:
    """A proxy with a publisher of KV events, a store and a source that are hostile."""

    target: Target
    attacks: list[Attack] = field(default_factory=list)


def _while_hostile(peer: HostilePeer, flood: bytes, first: bytes = b"") -> Run:
    def run(target: Target, engine: HostileEngine) -> str:
        peer.first, peer.flood = first, flood
        peer.is_hostile.set()
        sleep(ATTACKED_S)
        peer.is_hostile.clear()
        return ""

    return run


@contextmanager
def seams(folder: Path, engine: HostileEngine, code: Path) -> Iterator[Seams]:
    """Run `gorgo serve` among hostile peers."""
    publisher, api = HostilePeer(publish), HostilePeer(list_pods)
    (folder / "redis").mkdir(parents=True)
    try:
        with running(folder / "redis") as store:
            config = CONFIG.format(port=engine.port).replace(
                "request_usage: true",
                f'request_usage: true, kv_events: {{endpoint: "tcp://127.0.0.1:{publisher.port}"}}',
            ) + MORE.format(api=api.port, store=store.url, key=KEY_VARIABLE)
            with serving(folder / "proxy", config, code, environ=ENVIRON) as target:
                floods = {name: _while_hostile(publisher, flood, first) for name, (first, flood) in KV_FLOODS.items()}
                writers = {
                    "forged members": write_store(store, forged_members),
                    "entries of 1 MiB of numbers": write_store(store, entries_of_own_stream(MIB)),
                }
                lists = {name: _while_hostile(api, page) for name, page in pages().items()}
                found = Seams(target)
                kinds: dict[str, dict[str, Run]] = {
                    "proxy": {"nothing": _idle},
                    "KV events": floods,
                    "store": writers,
                    "source": lists,
                }
                for kind, runs in kinds.items():
                    found.attacks += [_attack(kind, name, run) for name, run in runs.items()]
                yield found
    finally:
        publisher.close()
        api.close()


def _idle(target: Target, engine: HostileEngine) -> str:
    sleep(ATTACKED_S)
    return ""


@contextmanager
def attacked_picker(folder: Path, engine: HostileEngine, code: Path) -> Iterator[Target]:
    """Run `gorgo picker`; its target's address is that of gRPC."""
    config = CONFIG.format(port=engine.port) + PICKER.format()
    with serving(folder / "picker", config, code, verb="picker", environ=dict(os.environ)) as target:
        yield target
