"""Records: what is written of a request when, and a record as a line of `requests.jsonl`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import numpy as np
import pytest

from gorgo.core.latency.ttft import TtftEstimate
from gorgo.core.messages.actions import Dispatch, Reject
from gorgo.core.messages.decision import Decision, ShadowScore
from gorgo.core.messages.request import AttemptResult, Outcome
from gorgo.lab.sim.open_requests import OpenRequests
from gorgo.lab.sim.records import SimRecord
from gorgo.lab.sim.remote_replica import RemoteReplica
from gorgo.lab.sim.workload import SimRequest
from gorgo.policies.registry import make_policy
from tests.lab.sim.fleets import three_regions
from tests.lab.sim.test_scenarios import conversations, run

# --- A record as a line of `requests.jsonl`.


def record() -> SimRecord:
    return SimRecord(
        id="7",
        scheduled_s=1.23456789,
        sent_s=2.3456789,
        input_tokens=100,
        replica="a",
        region="here",
        cached_tokens=64,
        output_tokens=9,
        ttft_ms=123.45678,
        e2e_s=1.23456789,
        status=200,
        error="why",
        weights_version=3,
        predicted_ttft_ms=120.06,
        estimated_cached_tokens=60,
        attempts=3,
    )


def test_a_line_has_the_keys_of_the_live_replay_in_milliseconds_and_microseconds() -> None:
    assert record().as_json() == {
        "id": "7",
        "scheduled_s": 1.234568,
        "sent_s": 2.345679,
        "replica": "a",
        "region": "here",
        "input_tokens": 100,
        "cached_tokens": 64,
        "output_tokens": 9,
        "ttft_ms": 123.457,
        "e2e_s": 1.234568,
        "status": 200,
        "error": "why",
        "weights_version": 3,
        "predicted_ttft_ms": 120.1,
        "estimated_cached_tokens": 60,
    }


def test_missing_values_are_null() -> None:
    line = SimRecord(id="7", scheduled_s=1.0, sent_s=1.0, input_tokens=100).as_json()
    known = {name for name, value in line.items() if value is not None}
    assert known == {"id", "scheduled_s", "sent_s", "input_tokens"}


def test_a_line_under_a_shadow_policy_has_its_rank_and_the_attempts_before() -> None:
    shadowed = record()
    shadowed.shadow = ShadowScore("gorgo-ms", 2, 30.0, 0.1)
    line = shadowed.as_json()
    assert (line["shadow_policy"], line["shadow_rank"], line["retries"]) == ("gorgo-ms", 2, 2)
    shadowed.attempts = 0
    assert shadowed.as_json()["retries"] == 0


# Simulated engines that find part of each prefix: what the Router expects of them is what they find.
FEED = conversations(600)


def errors(records: Sequence[SimRecord]) -> float:
    """Differences of estimated and found cached tokens, of all found tokens."""
    pairs = [(record.estimated_cached_tokens or 0, record.cached_tokens or 0) for record in records]
    return sum(abs(estimated - found) for estimated, found in pairs) / sum(found for _, found in pairs)


@pytest.mark.parametrize(
    ("scenario", "at_most"), [("partial-hits-30", 0.2), ("partial-hits-60", 0.1), ("checkpoints-1024", 0.05)]
)
def test_what_is_expected_of_an_engine_that_finds_part_of_a_prefix_is_what_it_finds(
    scenario: str, at_most: float
) -> None:
    """Items of 512 tokens are found whole, so that a share of 30 % is no share of each prefix."""
    assert errors(run(scenario, make_policy("gorgo-ms"), FEED).records) < at_most


def test_engines_that_find_everything_are_expected_to() -> None:
    assert errors(run("steady", make_policy("gorgo-ms"), FEED).records) < 0.01


# --- What is written of a request when, in the order of its events.


REQUEST = SimRequest(
    index=7,
    arrival_s=3.0,
    prompt_tokens=1000,
    output_tokens=5,
    blocks=b"eight by",
    prefix_hash=9,
    session_id="s",
    body_bytes=4000,
)


class Named:
    """As much of a site as a record has."""

    def __init__(self, number: int) -> None:
        self.replica = three_regions().replicas[number]
        self.name = self.replica.name


def dispatch(attempt: int, replica: str, *, predicted_s: float | None = 0.25) -> Dispatch:
    decision = Decision(
        request_id="7",
        attempt=attempt,
        decided_s=0.0,
        policy="p",
        unit="ms",
        weights_version=attempt + 10,
        weights={},
        candidates=(replica,),
        row=0,
        terms={},
        cost=np.array([0.0]),
        prompt_tokens=1000,
        estimated_cached_tokens=100 * attempt,
        best_cached_tokens=0,
        predicted_ttft_s=predicted_s,
        estimate=TtftEstimate(0.0, 0.0, None, 0.0, 0.0),
        fallback=None,
        excluded={},
        shadow=ShadowScore("other", attempt, None, None),
    )
    return Dispatch("7", f"7/{attempt}", attempt, replica, f"region of {replica}", decision)


def test_a_routed_request_has_every_field_of_the_feed() -> None:
    served = OpenRequests(block_tokens=512.0, slo_ttft_s=2.0)
    asked = served.received(REQUEST, now=3.5)
    assert (asked.request_id, asked.received_s, asked.prompt_tokens, asked.blocks) == ("7", 3.5, 1000, b"eight by")
    assert (asked.block_tokens, asked.prefix_hash, asked.session_id, asked.body_bytes) == (512.0, 9, "s", 4000)
    assert asked.slo_ttft_s == 2.0
    assert served
    (record,) = served.records
    assert (record.id, record.scheduled_s, record.sent_s, record.input_tokens) == ("7", 3.5, 3.5, 1000)


def test_a_record_tells_of_the_last_dispatch_and_of_the_wait_before_the_first() -> None:
    served = OpenRequests(block_tokens=512.0, slo_ttft_s=None)
    served.received(REQUEST, now=3.0)
    (record,) = served.records
    assert served.dispatched(dispatch(1, "a"), now=3.5) is REQUEST
    assert (record.replica, record.region, record.queued_s, record.attempts) == ("a", "region of a", 0.5, 1)
    served.dispatched(dispatch(2, "b", predicted_s=None), now=9.0)
    assert (record.replica, record.region, record.queued_s, record.attempts) == ("b", "region of b", 0.5, 2)
    assert (record.weights_version, record.estimated_cached_tokens, record.predicted_ttft_ms) == (12, 200, None)
    assert record.shadow == ShadowScore("other", 2, None, None)
    served.dispatched(dispatch(3, "c"), now=9.5)
    assert record.predicted_ttft_ms == 250.0
    assert not record.hedged
    served.hedged("7")
    assert record.hedged


def test_the_answering_replica_is_recorded_and_latencies_count_from_the_arrival() -> None:
    served = OpenRequests(block_tokens=512.0, slo_ttft_s=None)
    served.received(REQUEST, now=3.0)
    served.dispatched(dispatch(1, "a"), now=3.5)
    served.first_token("7", cast(RemoteReplica, Named(1)), now=4.25)
    (record,) = served.records
    assert (record.replica, record.region, record.ttft_ms) == ("eu-frankfurt-0", "eu-frankfurt", 1250.0)
    end = Outcome(AttemptResult.COMPLETED, 200, cached_tokens=512, output_tokens=5, error="none")
    served.on_result("7", end, now=5.0)
    assert (record.e2e_s, record.status, record.cached_tokens, record.output_tokens) == (2.0, 200, 512, 5)
    assert record.error == "none"
    assert not served


def test_a_rejected_request_has_a_status_and_no_first_token() -> None:
    served = OpenRequests(block_tokens=512.0, slo_ttft_s=None)
    served.received(REQUEST, now=3.0)
    served.rejected(Reject("7", 429, "queue_full", "why"), now=3.25)
    (record,) = served.records
    assert (record.status, record.error, record.e2e_s, record.ttft_ms) == (429, "queue_full", 0.25, None)
    assert not served
