"""Gives TCP ports on loopback the round trip of a long path, on kernels without netem.

iptables parks every packet from or to the ports in an NFQUEUE; this process lets each go half a round trip later. So
the handshake, slow start and every acknowledgement pay the path, which a relay that sleeps cannot imitate. Segments are
held to an Ethernet path's size, because with loopback's 64 kB slow start would be over before it begins. Rules live in
chains of their own with `--queue-bypass`: were this process killed, traffic would flow undelayed.

Needs root and iptables; standard library only. Prints `delaying` when the path is in place; SIGTERM takes it away.

    python tests/system/rtt_nfqueue.py --rtt-ms 90 --port 8001 --port 8002
"""

from __future__ import annotations

import argparse
import select
import signal
import socket
import struct
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

_QUEUE = 4242
#: TCP payload of an Ethernet frame, with timestamps.
_SEGMENT_BYTES = 1448
#: Packets that wait at once; the kernel lets more through undelayed. 64 MB in flight at loopback's 64 kB segments.
_WAITING_MAX = 65_536

# linux/netfilter/nfnetlink_queue.h
_NETLINK_NETFILTER, _SUBSYSTEM = 12, 3
_PACKET, _VERDICT, _CONFIG = 0, 1, 2
_CONFIG_COMMAND, _CONFIG_COPY, _CONFIG_LENGTH, _CONFIG_MASK, _CONFIG_FLAGS = 1, 2, 3, 4, 5
_BIND, _COPY_METADATA, _FAIL_OPEN, _GSO = 1, 1, 1, 4
_PACKET_HEADER, _VERDICT_HEADER, _ACCEPT = 1, 2, 1
_NLM_REQUEST = 1
_SO_RECVBUFFORCE, _SOL_NETLINK, _NETLINK_NO_ENOBUFS = 33, 270, 5


class DelayLine:
    """The NFQUEUE: packets in order, each with the moment at which it may go.

    Parameters
    ----------
    delay_s:
        How long each packet waits, one way.
    """

    def __init__(self, *, delay_s: float) -> None:
        self._delay_s = delay_s
        self._waiting: deque[tuple[float, bytes]] = deque()
        self.socket = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _NETLINK_NETFILTER)
        self.socket.setsockopt(socket.SOL_SOCKET, _SO_RECVBUFFORCE, 8 << 20)
        self.socket.setsockopt(_SOL_NETLINK, _NETLINK_NO_ENOBUFS, 1)
        self.socket.bind((0, 0))
        for attributes in _configuration():
            self.socket.send(_message(_CONFIG, attributes))
        self.socket.setblocking(False)

    def wait_s(self, now: float) -> float:
        """Until the next packet may go; a second when none waits."""
        return max(0.0, self._waiting[0][0] - now) if self._waiting else 1.0

    def take(self, now: float) -> None:
        """Notes every packet that the kernel has parked since."""
        while True:
            try:
                datagram = self.socket.recv(1 << 17)
            except BlockingIOError:
                return
            self._waiting.extend((now + self._delay_s, packet) for packet in _packets(datagram))

    def release(self, now: float) -> None:
        """Lets go what is due."""
        while self._waiting and self._waiting[0][0] <= now:
            _, packet = self._waiting.popleft()
            self.socket.send(_message(_VERDICT, _attribute(_VERDICT_HEADER, struct.pack(">I", _ACCEPT) + packet)))


def _configuration() -> Iterator[bytes]:
    yield _attribute(_CONFIG_COMMAND, struct.pack(">BxH", _BIND, socket.AF_INET))
    yield _attribute(_CONFIG_COPY, struct.pack(">IB", 0, _COPY_METADATA))
    yield _attribute(_CONFIG_LENGTH, struct.pack(">I", _WAITING_MAX))
    flags = struct.pack(">I", _FAIL_OPEN | _GSO)
    yield _attribute(_CONFIG_FLAGS, flags) + _attribute(_CONFIG_MASK, flags)


def _attribute(kind: int, value: bytes) -> bytes:
    return struct.pack("=HH", 4 + len(value), kind) + value + bytes(-len(value) % 4)


def _message(kind: int, attributes: bytes) -> bytes:
    body = struct.pack(">BBH", socket.AF_UNSPEC, 0, _QUEUE) + attributes
    return struct.pack("=IHHII", 16 + len(body), _SUBSYSTEM << 8 | kind, _NLM_REQUEST, 0, 0) + body


def _packets(datagram: bytes) -> Iterator[bytes]:
    """The four-byte id of each packet in a datagram of netlink messages."""
    start = 0
    while start + 16 <= len(datagram):
        size, kind = struct.unpack_from("=IH", datagram, start)
        if kind == _SUBSYSTEM << 8 | _PACKET:
            yield _packet_id(datagram[start + 20 : start + size])
        start += size + -size % 4


def _packet_id(attributes: bytes) -> bytes:
    start = 0
    while start + 4 <= len(attributes):
        size, kind = struct.unpack_from("=HH", attributes, start)
        if kind & 0x7FFF == _PACKET_HEADER:
            return attributes[start + 4 : start + 8]
        start += size + -size % 4
    raise ValueError("an NFQUEUE message without a packet header")


@contextmanager
def delayed(ports: Sequence[int]) -> Iterator[None]:
    """The rules that send the ports' packets through the queue; also clears what a killed run left."""
    _remove_rules()
    try:
        for chain, hook, interface in _CHAINS:
            _iptables("-N", chain)
            _iptables("-I", hook, interface, "lo", "-p", "tcp", "-j", chain)
        for port in ports:
            for side in ("--sport", "--dport"):
                _iptables("-A", _OUT, "-p", "tcp", side, str(port), "--tcp-flags", "SYN,RST", "SYN", *_CLAMP)
                _iptables("-A", _IN, "-p", "tcp", side, str(port), *_PARK)
        yield
    finally:
        _remove_rules()


_IN, _OUT = "GORGO_TEST_RTT_IN", "GORGO_TEST_RTT_OUT"
_CHAINS = ((_IN, "INPUT", "-i"), (_OUT, "OUTPUT", "-o"))
_CLAMP = ("-j", "TCPMSS", "--set-mss", str(_SEGMENT_BYTES))
_PARK = ("-j", "NFQUEUE", "--queue-num", str(_QUEUE), "--queue-bypass")


def _remove_rules() -> None:
    for chain, hook, interface in _CHAINS:
        while _iptables("-D", hook, interface, "lo", "-p", "tcp", "-j", chain, check=False):
            pass
        _iptables("-F", chain, check=False)
        _iptables("-X", chain, check=False)


def _iptables(*arguments: str, check: bool = True) -> bool:
    command = ["iptables", "-w", "-t", "mangle", *arguments]
    return subprocess.run(command, check=check, capture_output=True).returncode == 0


def _run(line: DelayLine) -> None:
    while True:
        # select, because poll and epoll round up to a millisecond, which every packet would pay.
        select.select([line.socket], [], [], line.wait_s(time.monotonic()))
        line.take(time.monotonic())
        line.release(time.monotonic())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rtt-ms", type=float, required=True)
    parser.add_argument("--port", type=int, action="append", required=True)
    asked = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    line = DelayLine(delay_s=asked.rtt_ms / 2000)
    with delayed(asked.port):
        sys.stdout.write("delaying\n")
        sys.stdout.flush()
        _run(line)


if __name__ == "__main__":
    main()
