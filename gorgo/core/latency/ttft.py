"""The parts of a time to first token, as far as they are visible from outside of the engine.

Owns the parts, and the attribution of a measured time to them. Two parts are measured: the time at the router (body,
decision, queue), and earlier attempts without an answer. The time after the dispatch is visible as one span only. Its
parts are estimates from the Router's state of each replica: network from round trip and connection, the prefill queue,
and the prefill by prior and learned speed. Under `gorgo-ms` they are the terms of its prediction.

Theory of operation. The parts of a measured time add up to it. Each expected part is taken as expected while the
measured span has room for it, surest first: network, prefill, queue. The rest is `residual`; a span shorter than
expected cuts the queue first. So no part is negative, and `residual` is unexpected time: an engine slower than
learned, others' requests in its queue, a cache without the estimated prefix, a stalled path.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import inf
from typing import NamedTuple

import numpy as np

from gorgo.core.latency.prefill import STUCK_AFTER_S, PrefillQueue
from gorgo.core.numeric import FEW, Floats
from gorgo.core.record import record

#: In the order of a request; the last is the residual.
PARTS = ("router", "previous_attempts", "network", "queue", "prefill", "residual")


class TtftParts(NamedTuple):
    """A measured TTFT by parts, s. Their sum is the TTFT.

    Unlike a `TtftEstimate` it has a residual, and no part of it is unknown.
    """

    router_s: float
    previous_attempts_s: float
    network_s: float
    queue_s: float
    prefill_s: float
    residual_s: float

    def as_ms(self) -> dict[str, float]:
        return {
            "router": self.router_s * 1e3,
            "previous_attempts": self.previous_attempts_s * 1e3,
            "network": self.network_s * 1e3,
            "queue": self.queue_s * 1e3,
            "prefill": self.prefill_s * 1e3,
            "residual": self.residual_s * 1e3,
        }


@record
class TtftEstimate:
    """Parts of a request's TTFT at its dispatch, s: `router_s` and `previous_attempts_s` have passed, the rest is
    expected. `network_s` is `None` while the replica's round trip is unknown.

    Example
    -------
    >>> estimate = TtftEstimate(router_s=0.01, previous_attempts_s=0.0, network_s=0.1, queue_s=0.2, prefill_s=0.5)
    >>> [round(seconds, 3) for seconds in estimate.attribute(1.0)]
    [0.01, 0.0, 0.1, 0.2, 0.5, 0.19]
    >>> [round(seconds, 3) for seconds in estimate.attribute(0.71)]  # sooner than expected: the queue is cut
    [0.01, 0.0, 0.1, 0.1, 0.5, 0.0]
    """

    router_s: float
    previous_attempts_s: float
    network_s: float | None
    queue_s: float
    prefill_s: float

    @property
    def expected_s(self) -> float:
        """The time after the dispatch; without the network's while it is unknown."""
        return (self.network_s or 0.0) + self.queue_s + self.prefill_s

    def attribute(self, ttft_s: float) -> TtftParts:
        """Share out what was measured."""
        # Without `min` and `max`, which take four times as long.
        left_s = ttft_s - self.router_s - self.previous_attempts_s
        if not left_s > 0.0:
            left_s = 0.0
        network_s = self.network_s or 0.0
        if left_s < network_s:
            network_s = left_s
        left_s -= network_s
        prefill_s = left_s if left_s < self.prefill_s else self.prefill_s
        left_s -= prefill_s
        queue_s = left_s if left_s < self.queue_s else self.queue_s
        return TtftParts(self.router_s, self.previous_attempts_s, network_s, queue_s, prefill_s, left_s - queue_s)

    def as_ms(self) -> Mapping[str, float | None]:
        """For `/admin/decisions/{id}`."""
        return {
            "router": self.router_s * 1e3,
            "previous_attempts": self.previous_attempts_s * 1e3,
            "network": None if self.network_s is None else self.network_s * 1e3,
            "queue": self.queue_s * 1e3,
            "prefill": self.prefill_s * 1e3,
        }


def expected_queue_s(
    clock: PrefillQueue,
    others_s: float = 0.0,
    *,
    arrives_s: float,
    one_way_s: float,
    now: float,
    kv_wait_s: float = 0.0,
) -> float:
    """Work left before a request that is dispatched now and arrives then; on a stuck engine all that waits there and
    how late it is, as in the cost of `gorgo-ms`. `others_s` of it is for other routers. One that waits `kv_wait_s` for
    KV memory does so beside it.
    """
    if kv_wait_s > 0.0:
        return max(0.0, max(clock.own_drained_at_s(engine_s=now), now) + kv_wait_s - arrives_s) + others_s
    late_s = now - STUCK_AFTER_S - clock.head_due_s - one_way_s - others_s
    if late_s > 0.0:
        return clock.backlog_s + others_s + late_s
    left_s = clock.own_drained_at_s(engine_s=now) - arrives_s
    return (left_s if left_s > 0.0 else 0.0) + others_s


# Round trips of a request to the first byte of its answer, by its size and its connection.
#
# Owns TCP's start as far as a cost needs it, the same for the policy, the simulator and the simulated engine. Pure
# arithmetic; the shell reports connections.
#
# Theory of operation. A body leaves in flights, a round trip apart; the first byte of the answer comes a round trip
# after the last flight's departure. Both windows bound a flight. The sender's window starts at ten segments (RFC 6928)
# and grows by what is acknowledged, so it doubles; while it is idle, the kernel halves it per retransmission time-out
# down to where it began (RFC 2861), unless `net.ipv4.tcp_slow_start_after_idle` is off. The receiver's starts at 64 kB
# and doubles whenever a flight has filled it; idling leaves it alone. A new connection has a handshake of one round
# trip before, two with TLS. Of twenty counts measured on Linux 6.18 (90 ms, Reno and Cubic, 0.5 to 400 kB, new, used
# and idle) nineteen are these.
#
# A sender that paces (BBR) spreads each flight instead: after a burst it sends so much per round trip. So the last
# byte of the last flight leaves a part of a round trip late, and an earlier flight may take more than one. While BBR
# searches the path's rate it paces at 2.89 times the fastest arrival, less a hundredth; n bytes spread over x round
# trips have arrived at n / (1 + x) per round trip. It does not shrink while idle. No figure in this is fitted. Of 627
# combinations measured at 30, 90 and 180 ms (2 to 400 kB on connections that are new or have one of nine pasts, at
# once or after 1.5 s, windows and pace as the kernel reports them) 625 are within 15 %. Loss is not modelled.


#: Ten segments of an Ethernet path.
INITIAL_WINDOW_BYTES = 14_600.0
#: First window of a Linux receiver.
RECEIVE_WINDOW_BYTES = 65_535.0
#: Receivers' buffers end at 6 MB by default (Linux), a part of which is overhead.
LARGEST_WINDOW_BYTES = 4e6
#: Round trips of TCP's handshake, and of TLS 1.3 on top.
TCP_CONNECT_ROUND_TRIPS, TLS_CONNECT_ROUND_TRIPS = 1, 1
#: The kernel's retransmission time-out is a round trip and its deviation, the latter at least so much (Linux), s.
RTO_SLACK_S = 0.2
#: One segment of an Ethernet path.
SEGMENT_BYTES = 1_460.0
#: BBR's pacing while it searches the path's rate, as a multiple of the fastest arrival.
PACING_GAIN = 2.89 * 0.99


#: As arrays: numpy makes one of a Python number at each use, which takes as long as the arithmetic.
_NONE, _ONE, _FIRST = np.array(0.0), np.array(1.0), np.array(INITIAL_WINDOW_BYTES)


class TcpWindows(NamedTuple):
    """Congestion and receive window of one connection, bytes."""

    cwnd: float = INITIAL_WINDOW_BYTES
    rwnd: float = RECEIVE_WINDOW_BYTES


class Pacing(NamedTuple):
    """How a sender that paces spreads a flight, bytes: so much per round trip, after what leaves at once."""

    bytes_per_round_trip: float = PACING_GAIN * INITIAL_WINDOW_BYTES
    #: The first ten segments of a connection are not paced.
    burst: float = INITIAL_WINDOW_BYTES


def connect_round_trips(*, tls: bool) -> int:
    """Round trips before the first request on a new connection can leave."""
    return TCP_CONNECT_ROUND_TRIPS + TLS_CONNECT_ROUND_TRIPS * tls


def round_trips(body_bytes: float, windows: TcpWindows) -> tuple[int, TcpWindows]:
    """Round trips from the first byte sent to the first byte of the answer, and the windows afterwards.

    Example
    -------
    >>> round_trips(500, TcpWindows())[0], round_trips(100_000, TcpWindows())
    (1, (3, TcpWindows(cwnd=114600.0, rwnd=65535.0)))
    """
    trips, *after = _transfer(body_bytes, *windows)
    left = TcpWindows(*after)
    return trips, windows if left == windows else left


def _transfer(body_bytes: float, congestion: float, receive: float) -> tuple[int, float, float]:
    """Return round trips and both windows afterwards."""
    # By comparisons: calls of min would take as long as all the rest.
    left, trips = body_bytes, 0
    while True:
        sent = congestion if congestion < receive else receive
        if left < sent:
            sent = left
        left -= sent
        trips += 1
        # A window that is hardly used does not grow: a ping opens nothing.
        if 2 * sent >= congestion:
            congestion += sent
            if congestion > LARGEST_WINDOW_BYTES:
                congestion = LARGEST_WINDOW_BYTES
        if sent >= receive:
            receive *= 2
            if receive > LARGEST_WINDOW_BYTES:
                receive = LARGEST_WINDOW_BYTES
        if left <= 0:
            return trips, congestion, receive


def round_trips_array(body_bytes: float, congestion: Floats, receive: Floats) -> Floats:
    """`round_trips` for columns of windows, without a loop; 1 where they are unknown (NaN)."""
    # The sender's window doubles with each flight for as long as the receiver's is the larger one, which doubles then.
    trips: Floats = np.ceil(np.log2(body_bytes / congestion + _ONE))
    if not _least(receive) >= body_bytes:
        started = np.maximum(np.ceil(np.log2(receive / congestion)), _NONE)
        left = body_bytes - congestion * (np.exp2(started) - _ONE)
        if _most(left) > 0.0:
            trips = np.where(left > _NONE, started + np.ceil(np.log2(np.maximum(left, _NONE) / receive + _ONE)), trips)
    at_least_one: Floats = np.fmax(trips, _ONE)
    return at_least_one


def paced_round_trips(body_bytes: float, windows: TcpWindows, pacing: Pacing) -> float:
    """`round_trips` of a sender that paces: those to the first byte of the answer, not whole ones.

    Example
    -------
    >>> [round(paced_round_trips(size, TcpWindows(), Pacing()), 2) for size in (500, 40_000, 100_000)]
    [1.0, 2.57, 4.09]
    """
    return _paced_trips(body_bytes, *windows, *pacing)


def _paced_trips(body_bytes: float, congestion: float, receive: float, per_trip: float, burst: float) -> float:
    # By comparisons: calls of min and max would take four times as long as all the rest.
    # A window or a pace of nothing would never end.
    if receive < SEGMENT_BYTES:
        receive = SEGMENT_BYTES
    if per_trip < SEGMENT_BYTES:
        per_trip = SEGMENT_BYTES
    left, trips = body_bytes, 0.0
    while True:
        sent = congestion
        if receive < sent:
            sent = receive
        if left < sent:
            sent = left
        spread = (sent - burst) / per_trip if sent > burst else 0.0
        left -= sent
        if left <= 0:
            return trips + (spread + 1.0)
        trips += spread if spread > 1.0 else 1.0
        congestion += sent
        if congestion > LARGEST_WINDOW_BYTES:
            congestion = LARGEST_WINDOW_BYTES
        if sent >= receive:
            receive *= 2
            if receive > LARGEST_WINDOW_BYTES:
                receive = LARGEST_WINDOW_BYTES
        paced = PACING_GAIN * sent / (1.0 + spread)
        if paced > per_trip:
            per_trip = paced
        burst = SEGMENT_BYTES


def is_one_burst(body_bytes: float, burst: float) -> bool:
    """Return whether any open sender sends a body at once, in the least window after the least first burst.

    One round trip then, whether the sender paces or not, and without a look at its windows.
    """
    return body_bytes <= SEGMENT_BYTES and body_bytes <= burst


def round_trips_of_one(body_bytes: float, windows: TcpWindows, pacing: Pacing | None) -> float:
    """Round trips to the first byte of the answer on one connection, whether its sender paces or not."""
    return _transfer(body_bytes, *windows)[0] if pacing is None else _paced_trips(body_bytes, *windows, *pacing)


def paced_round_trips_array(
    body_bytes: float, congestion: Floats, receive: Floats, per_trip: Floats, burst: Floats
) -> Floats:
    """Return `paced_round_trips` per column: unpaced where the pace is infinite, 1 where windows are NaN."""
    receive, per_trip = np.maximum(receive, SEGMENT_BYTES), np.maximum(per_trip, SEGMENT_BYTES)
    left, trips = np.full(len(congestion), float(body_bytes)), np.zeros(len(congestion))
    going = left > _NONE
    while True:
        sent = np.minimum(np.minimum(congestion, receive), left)
        spread = np.maximum(sent - burst, _NONE) / per_trip
        left = left - sent
        more = left > _NONE
        trips += np.where(more, np.maximum(spread, _ONE), (spread + _ONE) * going)
        if not more.any():
            at_least_one: Floats = np.fmax(trips, _ONE)
            return at_least_one
        going = more
        congestion = np.minimum(congestion + sent, LARGEST_WINDOW_BYTES)
        receive = np.where(sent >= receive, np.minimum(2 * receive, LARGEST_WINDOW_BYTES), receive)
        per_trip, burst = np.maximum(per_trip, PACING_GAIN * sent / (spread + _ONE)), np.array(SEGMENT_BYTES)


def cwnd_after_idle(congestion: float, idle_s: float, rtt_s: float) -> float:
    """Return the congestion window after `idle_s` without a byte sent."""
    if congestion <= INITIAL_WINDOW_BYTES:
        return INITIAL_WINDOW_BYTES
    if idle_s < RTO_SLACK_S:
        return congestion
    halvings = int(idle_s / (rtt_s + RTO_SLACK_S))
    return max(congestion * 0.5 ** min(halvings, 64), INITIAL_WINDOW_BYTES)


def windows_after_request(windows: TcpWindows, body_bytes: float, *, idle_s: float, rtt_s: float) -> TcpWindows:
    """Return the windows of a connection that sends one more body after `idle_s` without a byte sent."""
    return exchange(windows, body_bytes, idle_s=idle_s, rtt_s=rtt_s)[1]


def exchange(windows: TcpWindows, body_bytes: float, *, idle_s: float, rtt_s: float) -> tuple[int, TcpWindows]:
    """Return the round trips of one more body on a connection after `idle_s` without a byte sent, and the windows
    afterwards. A ping (no body) takes one, and opens no window.
    """
    cwnd, rwnd = windows
    usable = cwnd_after_idle(cwnd, idle_s, rtt_s) if idle_s > 0.0 else cwnd
    if usable != cwnd:
        windows = TcpWindows(usable, rwnd)
    return round_trips(body_bytes, windows) if body_bytes else (1, windows)


def cwnd_after_idle_array(congestion: Floats, idle_s: Floats, rtt_s: Floats) -> Floats:
    """`cwnd_after_idle` for columns."""
    if not idle_s[idle_s.argmax()] < RTO_SLACK_S:
        halvings = np.floor(np.maximum(idle_s, _NONE) / (rtt_s + RTO_SLACK_S))
        congestion = congestion * np.exp2(-halvings)
    left: Floats = np.maximum(congestion, _FIRST)
    return left


def _least(column: Floats) -> float:
    """Return the least known cell; NaN if none is known."""
    least = column.item(column.argmin())  # a fourth of the time of a reduction
    return least if least == least else float(np.fmin.reduce(column))  # NaN is the least where there is one


def _most(column: Floats) -> float:
    """Return the largest known cell; NaN if none is known."""
    most = column.item(column.argmax())
    return most if most == most else float(np.fmax.reduce(column))


def is_paced(pace: Floats) -> bool:
    """Whether some sender paces."""
    return bool(pace[pace.argmin()] < inf)


def is_one_round_trip(body_bytes: float, congestion: Floats, pace: Floats | None) -> bool:
    """Return whether `round_trips` is 1 everywhere: no report, or a small body and open connections.

    Without `pace` no sender paces.
    """
    if body_bytes > SEGMENT_BYTES and pace is not None and is_paced(pace):
        return False
    least = _least(congestion)
    return least != least or (least > 0.0 and body_bytes <= INITIAL_WINDOW_BYTES)


def exchange_round_trips(
    body_bytes: float,
    *,
    congestion: Floats,
    receive: Floats,
    idle_s: Floats,
    rtt_s: Floats,
    connect: Floats,
    pace: Floats | None = None,
    burst: Floats | None = None,
) -> Floats:
    """Expected round trips to the first byte, per replica.

    Parameters
    ----------
    congestion, receive:
        Windows of the connection that the next request takes; `congestion` is 0 where none is open and NaN where
        unknown, which counts as one round trip. A connection that is yet to be opened has the first `receive`.
    idle_s:
        Since it last sent something; not above 0 where idling costs nothing.
    connect:
        Round trips to open a new one.
    pace, burst:
        `Pacing` of that connection; `pace` is infinite where its sender does not pace. Without them no sender does.
    """
    opening: Floats = connect * (congestion == _NONE)
    # A connection yet to be opened has the first window, which is what is left of none.
    if pace is not None and burst is not None and is_paced(pace):
        usable = cwnd_after_idle_array(congestion, idle_s, rtt_s)
        return opening + paced_round_trips_array(body_bytes, usable, receive, pace, burst)
    if body_bytes <= INITIAL_WINDOW_BYTES:
        return opening + 1.0
    if len(congestion) <= FEW:
        connections = zip(congestion.tolist(), receive.tolist(), idle_s.tolist(), rtt_s.tolist(), strict=True)
        trips: Floats = opening + np.array([round_trips_after_idle(body_bytes, *each) for each in connections])
        return trips
    usable = cwnd_after_idle_array(congestion, idle_s, rtt_s)
    return opening + round_trips_array(body_bytes, usable, receive)


def round_trips_after_idle(body_bytes: float, congestion: float, receive: float, idle_s: float, rtt_s: float) -> int:
    """Return the round trips on a connection after `idle_s` without a byte sent; 1 where it is unknown (NaN)."""
    if congestion != congestion:
        return 1
    usable = cwnd_after_idle(congestion, idle_s, rtt_s)
    if body_bytes <= usable and body_bytes <= receive:
        return 1
    return _transfer(body_bytes, usable, receive if receive > SEGMENT_BYTES else SEGMENT_BYTES)[0]


def paced_round_trips_after_idle(
    body_bytes: float,
    congestion: float,
    receive: float,
    idle_s: float,
    rtt_s: float,
    per_trip: float,
    burst: float,
) -> float:
    """Return what `exchange_round_trips` says of one open connection where some sender paces."""
    if congestion != congestion or receive != receive or idle_s != idle_s or per_trip != per_trip or burst != burst:
        return 1.0  # one is NaN
    usable = cwnd_after_idle(congestion, idle_s, rtt_s)
    trips = _paced_trips(body_bytes, usable, receive, per_trip, burst)
    return 1.0 if trips < 1.0 else trips
