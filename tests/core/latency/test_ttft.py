"""The parts of a time to first token: the network with its flights, what is expected, and how a measured time is
shared out.
"""

from __future__ import annotations

from dataclasses import astuple

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from gorgo.core.latency.prefill import PrefillQueue
from gorgo.core.latency.ttft import (
    INITIAL_WINDOW_BYTES,
    LARGEST_WINDOW_BYTES,
    PARTS,
    SEGMENT_BYTES,
    Pacing,
    TcpWindows,
    TtftEstimate,
    connect_round_trips,
    cwnd_after_idle,
    cwnd_after_idle_array,
    exchange_round_trips,
    expected_queue_s,
    is_one_burst,
    is_one_round_trip,
    paced_round_trips,
    paced_round_trips_after_idle,
    paced_round_trips_array,
    round_trips,
    round_trips_array,
)
from gorgo.core.limits import HedgeLimits, OverloadLimits, RouterLimits
from gorgo.core.messages.actions import Hedge
from gorgo.policies.registry import POLICIES
from tests.core.routers import (
    COMPLETED,
    FAILED,
    a_request,
    blocks_of,
    dispatched,
    finished,
    make_router,
    specs,
    submitted,
    timed,
)

# --- The parts of a TTFT: what is expected at dispatch, and how a measured time is shared out.


SECONDS = st.floats(0, 100)
NO_HOLD = RouterLimits(overload=OverloadLimits(queue_enabled=False))


@given(SECONDS, SECONDS, st.none() | SECONDS, SECONDS, SECONDS, SECONDS)
def test_parts_are_never_negative_and_add_up_to_what_was_measured(
    router_s: float,
    previous_attempts_s: float,
    network_s: float | None,
    queue_s: float,
    prefill_s: float,
    behind_s: float,
) -> None:
    outlook = TtftEstimate(router_s, previous_attempts_s, network_s, queue_s, prefill_s)
    parts = outlook.attribute(router_s + previous_attempts_s + behind_s)
    assert min(parts) >= 0.0
    assert sum(parts) == pytest.approx(router_s + previous_attempts_s + behind_s)
    assert parts.network_s <= (network_s or 0.0)
    assert (parts.queue_s, parts.prefill_s) <= (queue_s, prefill_s)
    assert list(parts.as_ms()) == list(PARTS)


def test_what_is_sooner_than_expected_leaves_nothing_unexplained() -> None:
    parts = TtftEstimate(0.0, 0.0, 0.1, 5.0, 0.5).attribute(0.3)
    assert list(parts) == pytest.approx([0.0, 0.0, 0.1, 0.0, 0.2, 0.0])


def test_outlook_is_what_gorgo_ms_predicts() -> None:
    router = make_router(policy="gorgo-ms", replicas=[timed("a"), timed("b")], limits=NO_HOLD)
    for number in range(8):
        decision = dispatched(
            submitted(router, a_request(f"r{number}", prompt_tokens=300, received_s=0.9), now=1.0)
        ).decision
        outlook = decision.estimate
        assert outlook.router_s == pytest.approx(0.1)
        assert outlook.network_s is not None
        total_s = (
            outlook.router_s + outlook.previous_attempts_s + outlook.network_s + outlook.queue_s + outlook.prefill_s
        )
        assert decision.predicted_ttft_s == pytest.approx(total_s)
    assert decision.estimate.queue_s > 0.5


def test_outlook_of_a_stuck_engine_is_what_gorgo_ms_predicts() -> None:
    router = make_router(policy="gorgo-ms", replicas=[timed("a")], limits=NO_HOLD)
    router.submit(a_request("stuck", prompt_tokens=300), now=0.0)
    decision = dispatched(submitted(router, a_request("r", prompt_tokens=300, received_s=5.0), now=5.0)).decision
    assert decision.estimate.queue_s > 4.0
    assert decision.predicted_ttft_s == pytest.approx(sum(part or 0.0 for part in astuple(decision.estimate)))


@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy_has_an_outlook_whether_it_predicts_or_not(policy: str) -> None:
    router = make_router(policy=policy, replicas=[timed("a")])
    router.submit(a_request("before", prompt_tokens=500), now=0.0)
    decision = dispatched(submitted(router, a_request("r", prompt_tokens=100), now=0.0)).decision
    # 10 ms there and back; 500 tokens are before it, at 1,000 a second.
    assert list(astuple(decision.estimate)) == pytest.approx([0.0, 0.0, 0.01, 0.5, 0.1])


def test_network_is_unknown_without_a_round_trip_and_then_unexplained() -> None:
    router = make_router(replicas=[timed("a")])
    router.replicas.on_probe("a", None, now=1000.0)
    router.handle_timer(now=1000.0)
    dispatch = dispatched(submitted(router, a_request("r", prompt_tokens=100, received_s=1000.0), now=1000.0))
    assert dispatch.decision.estimate.network_s is None
    assert dispatch.decision.as_dict()["predicted_parts_ms"]["network"] is None
    assert dispatch.decision.estimate.attribute(0.35).residual_s == pytest.approx(0.25)


def test_time_on_an_attempt_that_failed_is_a_part_of_its_own() -> None:
    router = make_router(replicas=[timed("a"), timed("b")])
    first = dispatched(submitted(router, a_request("r", prompt_tokens=100, received_s=9.5), now=10.0))
    second = dispatched(finished(router, first.attempt_id, FAILED, now=11.0))
    router.on_first_token(second.attempt_id, now=12.0)
    router.on_finish(second.attempt_id, COMPLETED, now=13.0)
    (row,) = router.samples.after(0)["samples"]
    assert row["ttft_parts_ms"] == {
        "router": pytest.approx(500.0),
        "previous_attempts": pytest.approx(1000.0),
        "network": pytest.approx(20.0),
        "queue": 0.0,
        "prefill": pytest.approx(100.0),
        "residual": pytest.approx(880.0),
    }
    assert sum(row["ttft_parts_ms"].values()) == pytest.approx(row["ttft_ms"])


def test_time_on_a_late_attempt_that_was_hedged_is_earlier_too() -> None:
    limits = RouterLimits(hedging=HedgeLimits(budget_ratio=1.0, window_s=1000.0))
    router = make_router(policy="gorgo-ms", replicas=[timed("a"), timed("b")], limits=limits)
    router.submit(a_request("r", prompt_tokens=100), now=0.0)
    due_s = router.next_timer()
    assert due_s is not None
    (hedge,) = router.handle_timer(now=due_s)
    assert isinstance(hedge, Hedge)
    assert hedge.dispatch.decision.estimate.previous_attempts_s == pytest.approx(due_s)


def test_request_without_a_first_token_has_no_parts() -> None:
    router = make_router("a")
    dispatch = dispatched(submitted(router, a_request("r"), now=0.0))
    router.on_finish(dispatch.attempt_id, COMPLETED, now=1.0)
    (row,) = router.samples.after(0)["samples"]
    assert row["ttft_parts_ms"] is None


@pytest.mark.parametrize(("drained", "best"), [("b", 256), ("c", 192)])
def test_best_cached_is_of_the_candidates_alone(drained: str, best: int) -> None:
    router = make_router(policy="nearest", replicas=specs("a", "b", "c"))
    blocks = blocks_of(1, 2, 3, 4)
    router.index.confirm(blocks[:24], 1)
    router.index.confirm(blocks, 2)
    router.replicas.drain(drained, now=0.0)
    decision = dispatched(submitted(router, a_request("r", prompt_tokens=256, blocks=blocks), now=0.0)).decision
    assert (decision.replica, decision.estimated_cached_tokens, decision.best_cached_tokens) == ("a", 0, best)


@pytest.mark.parametrize(
    ("now", "queue_s"),
    [
        # Its first token is due at 0.305, is seen 5 ms later, and may be 0.3 s late: stuck after 0.61.
        (0.60, 0.0),
        (0.62, 0.31),
        (0.71, 0.4),
        (1.11, 0.8),
        (1.60, 1.29),
        (1.71, 1.4),
    ],
)
def test_all_that_waits_and_its_lateness_count_as_soon_as_an_engine_is_stuck(now: float, queue_s: float) -> None:
    clock = PrefillQueue()
    clock.add("head", arrives_s=0.005, prior_s=0.3, streamed=True)
    found = expected_queue_s(clock, arrives_s=now + 0.005, one_way_s=0.005, now=now)
    assert found == pytest.approx(queue_s, abs=1e-9)


#: Round trips measured over 90 ms (Linux 6.18, Reno and Cubic) for a body sent on a new connection, on the same one
#: twice more at once, and after 2.5 s; without the handshake. Not measured so: the second of 400 kB took one, because
#: a receiver opens further than by doubling once it has seen that much.
MEASURED = {500: (1, 1, 1, 1), 14_000: (1, 1, 1, 1), 40_000: (2, 1, 1, 2), 100_000: (3, 2, 1, 3), 400_000: (6, 2, 1, 5)}


@pytest.mark.parametrize("body_bytes", MEASURED)
def test_counts_are_those_of_a_real_kernel(body_bytes: int) -> None:
    windows, trips = TcpWindows(), []
    for idle_s in (0.0, 0.0, 0.0, 2.5):
        windows = windows._replace(cwnd=cwnd_after_idle(windows.cwnd, idle_s, 0.09))
        took, windows = round_trips(body_bytes, windows)
        trips.append(took)
    assert tuple(trips) == MEASURED[body_bytes]


def test_pings_do_not_open_a_window() -> None:
    assert round_trips(200, TcpWindows()) == (1, TcpWindows())


def test_no_window_grows_for_ever() -> None:
    _, windows = round_trips(1e9, TcpWindows())
    assert windows == (LARGEST_WINDOW_BYTES, LARGEST_WINDOW_BYTES)


def test_an_idle_window_halves_per_time_out_down_to_the_first() -> None:
    idle_s = [-np.inf, -1.0, 0.29, 0.31, 0.61, 60.0]
    left = [114_600, 114_600, 114_600, 57_300, 28_650, INITIAL_WINDOW_BYTES]
    assert [cwnd_after_idle(114_600.0, one, 0.1) for one in idle_s] == left
    assert cwnd_after_idle_array(np.full(6, 114_600.0), np.array(idle_s), np.full(6, 0.1)).tolist() == left


def test_a_new_connection_costs_a_handshake_and_tls_one_more() -> None:
    assert (connect_round_trips(tls=False), connect_round_trips(tls=True)) == (1, 2)


def trips(body_bytes: float, congestion: list[float], *, idle_s: float = 0.0, connect: int = 1) -> list[float]:
    columns = {name: np.full(len(congestion), value) for name, value in (("idle_s", idle_s), ("rtt_s", 0.1))}
    windows = np.array(congestion)
    receive = np.where(np.isnan(windows), np.nan, np.where(windows == 0.0, 65_535.0, 1e6))
    found = exchange_round_trips(
        body_bytes, congestion=windows, receive=receive, connect=np.full(len(windows), connect), **columns
    )
    return [float(one) for one in found]


def test_a_small_body_takes_one_round_trip_and_a_handshake_where_no_connection_is_open() -> None:
    assert trips(500, [0.0, INITIAL_WINDOW_BYTES, np.nan]) == [2, 1, 1]
    assert trips(500, [0.0], connect=2) == [3]


def test_a_large_body_is_priced_by_the_window_that_is_left() -> None:
    assert trips(100_000, [0.0, 114_600.0, np.nan]) == [4, 1, 1]
    assert trips(100_000, [0.0, 114_600.0, np.nan], idle_s=60.0) == [4, 3, 1]


@given(body=st.floats(1, 1e8), congestion=st.floats(1460, 3e6), receive=st.floats(65_535, 3e6))
def test_a_column_answers_as_single_connections_do(body: float, congestion: float, receive: float) -> None:
    """Below the largest windows, and where a body does not end within a byte of a flight: logarithms round."""
    exact, after = round_trips(body, TcpWindows(congestion, receive))
    assume(max(after) < LARGEST_WINDOW_BYTES)
    assume(
        round_trips(body - 1, TcpWindows(congestion, receive))[0]
        == exact
        == round_trips(body + 1, TcpWindows(congestion, receive))[0]
    )
    assert round_trips_array(body, np.array([congestion]), np.array([receive])).tolist() == [exact]


#: Round trips measured over 90 ms under BBR (Linux 6.18): medians of three, without the handshake. Past of the
#: connection (None: none; else what it had carried), what the kernel told of it in segments of 1,448 bytes (windows of
#: congestion and receiver, pace per round trip), and the body.
PACED = [
    (None, 14_000, 1.01),
    (None, 20_000, 2.05),
    (None, 40_000, 2.54),
    (None, 100_000, 4.12),
    (None, 400_000, 6.52),
    ((20, 69, 28.2), 14_000, 1.29),
    ((20, 69, 28.2), 60_000, 2.67),
    ((38, 69, 33.3), 100_000, 2.93),
    ((52, 69, 44.5), 40_000, 1.57),
    ((80, 69, 95.1), 60_000, 1.42),
    ((80, 69, 95.1), 200_000, 3.01),
    ((127, 160, 194.5), 2_000, 1.00),
    ((127, 160, 194.5), 100_000, 1.35),
    ((127, 160, 194.5), 400_000, 2.76),
    ((631, 1893, 598.9), 400_000, 1.46),
]


@pytest.mark.parametrize(("told", "body_bytes", "measured"), PACED)
def test_trips_of_a_sender_that_paces_are_those_of_a_real_kernel(
    told: tuple[float, float, float] | None, body_bytes: int, measured: float
) -> None:
    windows, pacing = TcpWindows(), Pacing()
    if told is not None:
        congestion, receive, pace = (segments * 1_448.0 for segments in told)
        windows, pacing = TcpWindows(congestion, receive), Pacing(pace, 1_448.0)
    assert paced_round_trips(body_bytes, windows, pacing) == pytest.approx(measured, rel=0.15)


@given(
    body=st.floats(1, 1e8),
    congestion=st.floats(1460, 3e6),
    receive=st.floats(1460, 3e6),
    per_trip=st.floats(1460, 1e7) | st.just(np.inf),
    burst=st.floats(0, 15_000),
)
def test_a_column_of_paced_senders_answers_as_single_connections_do(
    body: float, congestion: float, receive: float, per_trip: float, burst: float
) -> None:
    exact = paced_round_trips(body, TcpWindows(congestion, receive), Pacing(per_trip, burst))
    # The second row is done in one flight or in many, whatever the first takes; the third is not known.
    columns = [congestion, 1e6, np.nan], [receive, 1e6, 1e6], [per_trip, np.inf, np.inf], [burst, np.inf, np.inf]
    found = paced_round_trips_array(body, *(np.array(column) for column in columns))
    assert found == pytest.approx([exact, paced_round_trips(body, TcpWindows(1e6, 1e6), Pacing(np.inf, 0.0)), 1.0])


@given(body=st.floats(1, 1e6), congestion=st.floats(14_600, 3e6))
def test_an_infinite_pace_is_no_pace(body: float, congestion: float) -> None:
    windows = TcpWindows(congestion, congestion)
    assert paced_round_trips(body, windows, Pacing(np.inf, 0.0)) == round_trips(body, windows)[0]


def test_a_fleet_may_have_senders_of_both_kinds() -> None:
    columns = {"idle_s": np.full(3, -np.inf), "rtt_s": np.full(3, 0.1), "connect": np.ones(3)}
    congestion, receive = np.array([0.0, 60_000.0, 60_000.0]), np.full(3, 65_535.0)
    pace, burst = np.array([Pacing().bytes_per_round_trip, 80_000.0, np.inf]), np.array([Pacing().burst, 0.0, np.inf])
    found = exchange_round_trips(40_000, congestion=congestion, receive=receive, pace=pace, burst=burst, **columns)
    assert found.tolist() == [1.0 + paced_round_trips(40_000, TcpWindows(), Pacing()), 1.5, 1.0]


def test_windows_and_a_pace_of_nothing_are_those_of_a_segment() -> None:
    """1,460 bytes at first, then twice as much each trip; at 1,460 a trip each of them is spread over one."""
    single = paced_round_trips(4_000, TcpWindows(14_600.0, 0.0), Pacing(0.0, 0.0))
    columns = (np.array([14_600.0]), np.array([0.0]), np.array([0.0]), np.array([0.0]))
    assert paced_round_trips_array(4_000, *columns).tolist() == [single]
    # The first leaves over a trip and shows a pace of 2.8611 x 1,460 / 2; the rest less a segment follows at that.
    assert single == pytest.approx(1.0 + 1.0 + (2_540 - 1_460) / (2.89 * 0.99 * 1_460 / 2))


@pytest.mark.parametrize(
    ("body_bytes", "congestion", "pace", "plainly"),
    [
        (14_600, [60_000.0, 14_600.0], [np.inf, np.inf], True),
        (14_601, [60_000.0, 60_000.0], [np.inf, np.inf], False),
        (500, [60_000.0, 0.0], [np.inf, np.inf], False),
        (500, [np.nan, 0.0], [np.inf, np.inf], False),
        (500, [np.nan, 60_000.0], [np.inf, np.inf], True),
        (1e6, [np.nan, np.nan], [np.inf, np.inf], True),
        (1e6, [np.nan, 60_000.0], [np.inf, np.inf], False),
        (1_460, [60_000.0, 60_000.0], [30_000.0, np.inf], True),
        (1_461, [60_000.0, 60_000.0], [30_000.0, np.inf], False),
        (1_461, [np.nan, np.nan], [np.inf, 1e9], False),
    ],
)
def test_small_bodies_on_open_connections_are_one_trip_everywhere(
    body_bytes: float, congestion: list[float], pace: list[float], plainly: bool
) -> None:
    assert is_one_round_trip(body_bytes, np.array(congestion), np.array(pace)) is plainly


def test_it_is_one_trip_everywhere_only_where_nobody_paces_what_is_more_than_a_segment() -> None:
    congestion = np.full(2, 60_000.0)
    paced, plain = np.array([30_000.0, np.inf]), np.full(2, np.inf)
    assert [is_one_round_trip(size, congestion, plain) for size in (500, 14_000, 40_000)] == [True, True, False]
    assert [is_one_round_trip(size, congestion, paced) for size in (500, 14_000, 40_000)] == [True, False, False]


WINDOW = st.floats(0.0, 1e7) | st.just(np.nan)
IDLE = st.floats(-1e3, 1e3) | st.just(np.nan)


@given(st.floats(0.0, SEGMENT_BYTES), WINDOW, WINDOW, IDLE, WINDOW | st.just(np.inf), WINDOW)
def test_a_body_within_the_least_burst_takes_one_round_trip(
    body: float, congestion: float, receive: float, idle_s: float, pace: float, burst: float
) -> None:
    if is_one_burst(body, burst):
        assert paced_round_trips_after_idle(body, congestion, receive, idle_s, 0.1, pace, burst) == 1.0
