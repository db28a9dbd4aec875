"""The oracle's choice on engines that are written down by hand."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest

from gorgo.core.messages.request import RouteRequest
from gorgo.core.policy.interface import Choice, Policy
from gorgo.core.prefix.residency import SharedRuns
from gorgo.lab.sim.engine.engines import Engine as AnyEngine
from gorgo.lab.sim.engine.model import EngineModel
from gorgo.lab.sim.engine.request import EngineRequest
from gorgo.lab.sim.engine.vllm.model import VllmModel
from gorgo.lab.sim.oracle import DEAD_MS, Oracle, make_oracle
from tests.lab.sim.profiles import round_profile
from tests.policies.table import choose, table

NAMES = ("near", "far")


@dataclass(slots=True)
class Engine:
    """What the oracle sees of one; nothing moves."""

    rtt_s: float
    model: AnyEngine[EngineRequest] = field(default_factory=lambda: EngineModel(round_profile(), item_bytes=1))
    in_transit: list[tuple[float, EngineRequest]] = field(default_factory=list)
    alive: bool = True

    def serve(self, prompt: bytes, output_tokens: int = 1) -> None:
        """From 0 on; the step under way is the last word."""
        self.model.submit(a_request(prompt, output_tokens), now=0.0)
        if self.model.step is None:
            self.model.start_step(now=0.0)


def a_request(prompt: bytes, output_tokens: int = 1) -> EngineRequest:
    return EngineRequest(prompt, prompt_tokens=len(prompt), output_tokens=output_tokens)


def ask(prompt: bytes) -> RouteRequest:
    return RouteRequest("r", 0.0, prompt_tokens=len(prompt), blocks=prompt, block_tokens=1.0, prefix_hash=0)


def looking(near: Engine, far: Engine) -> Oracle:
    oracle = make_oracle()
    oracle.observe({"near": near, "far": far})
    return oracle


def test_it_is_a_policy_with_the_preferences_of_gorgo_ms() -> None:
    oracle = make_oracle()
    assert isinstance(oracle, Policy)
    assert [(spec.name, spec.default) for spec in oracle.weight_specs] == [
        ("lambda", 0.15),
        ("delta", 25.0),
        ("eta", 800.0),
    ]


def test_terms_are_as_computed_by_hand() -> None:
    near, far = Engine(0.010), Engine(0.100)
    near.serve(b"x" * 80, 5)  # its prefill ends at 90 ms
    near.in_transit.append((0.004, a_request(b"y" * 40)))  # 50 ms from then on, together with the newcomer
    chosen = choose(looking(near, far), table(2, names=NAMES), asked=ask(b"z" * 50))
    terms = {name: column.round(6).tolist() for name, column in chosen.terms.items()}
    # Near: at 90 ms a step of 10 + 40 + 50 ms; the newcomer is there at 5 ms and alone would take 60.
    assert terms == {
        "rtt": [10.0, 100.0],
        "queue": [190.0 - 5.0 - 60.0, 0.0],
        "prefill": [60.0, 60.0],
        "externality": [(0.15 * 60.0 + 25.0) * 2, 0.0],
        "room": [0.0, 0.0],
        "shared": [0.0, 0.0],
    }
    assert chosen.row == 1
    assert chosen.predicted_ttft_s == pytest.approx(0.160)


def test_a_replica_that_was_sent_many_prefills_is_priced_as_by_gorgo_ms() -> None:
    shares: dict[str, Any] = {"prefill_share": [0.5, 0.25], "prefill_share_s": [0.0, 0.0]}
    chosen = choose(looking(Engine(0.010), Engine(0.100)), table(2, names=NAMES, **shares), asked=ask(b"z" * 50))
    assert chosen.terms["externality"].round(6).tolist() == [400.0, 200.0]


def test_it_knows_how_full_a_pool_is_and_who_lacks_a_shared_run() -> None:
    """The near pool has a prompt of 100 tokens, of which the index knows nothing; half of all tokens are found."""
    near, far = Engine(0.010), Engine(0.100)
    near.serve(b"s" * 80 + b"x" * 20)
    capacity = near.model.cache.capacity_tokens
    rows = replace(table(2, names=NAMES), shared=SharedRuns([80.0, 0.0], [0.0, 40.0]), found_share=0.5)
    terms = choose(looking(near, far), rows, asked=ask(b"s" * 80 + b"y" * 20)).terms
    full = 1.0 - near.model.cache.free_tokens / capacity
    assert full == pytest.approx(101 / capacity, abs=2 / capacity)
    assert terms["prefill"].round(6).tolist() == [30.0, 110.0]
    assert terms["room"] == pytest.approx([30.0 * full * 0.5, 0.0])
    assert terms["shared"] == pytest.approx([0.0, -110.0 * 40 / 100], rel=1e-6)


def test_an_engine_of_vllm_decodes_beside_the_newcomers_prompt() -> None:
    """Its prompt of 80 ends at 90 ms; then a step has 50 tokens and one more, and a millisecond for who decodes."""
    profile = replace(round_profile(), scheduler="vllm")
    near, far = Engine(0.010, VllmModel(profile, item_bytes=1)), Engine(0.100, VllmModel(profile, item_bytes=1))
    near.serve(b"x" * 80, 5)
    chosen = choose(looking(near, far), table(2, names=NAMES), asked=ask(b"z" * 50))
    assert chosen.terms["queue"].round(6).tolist() == [90.0 - 5.0 + 62.0 - 60.0, 0.0]
    assert chosen.terms["prefill"].round(6).tolist() == [60.0, 60.0]


def test_it_knows_what_is_cached_and_what_will_be() -> None:
    near, far = Engine(0.010), Engine(0.100)
    far.in_transit.append((0.001, a_request(b"s" * 95)))
    chosen = choose(looking(near, far), table(2, names=NAMES), asked=ask(b"s" * 95 + b"t" * 5))
    assert chosen.terms["prefill"].round(6).tolist() == [110.0, 15.0]


def test_a_slow_engine_is_as_slow_as_it_is() -> None:
    near, far = Engine(0.010), Engine(0.010)
    near.model.slowdown = 3.0
    chosen = choose(looking(near, far), table(2, names=NAMES), asked=ask(b"z" * 50))
    assert chosen.terms["prefill"].round(6).tolist() == [180.0, 60.0]
    assert chosen.row == 1


def test_a_dead_engine_is_the_last_resort() -> None:
    near, far = Engine(0.010), Engine(0.100)
    near.alive = False
    oracle = looking(near, far)
    chosen = choose(oracle, table(2, names=NAMES), asked=ask(b"z" * 50))
    assert chosen.row == 1
    assert chosen.cost is not None
    assert chosen.cost[0] >= DEAD_MS
    assert choose(oracle, table(1, names=("near",)), asked=ask(b"z")).row == 0


def test_a_body_that_does_not_fit_the_window_counts_its_round_trips() -> None:
    near, far = Engine(0.010), Engine(0.100)
    windows: dict[str, Any] = {"cwnd_bytes": [14_600.0] * 2, "rwnd_bytes": [65_535.0] * 2, "sent_s": [0.0] * 2}
    large = replace(ask(b"z" * 50), body_bytes=40_000)
    chosen = choose(looking(near, far), table(2, names=NAMES, **windows), asked=large)
    assert chosen.terms["rtt"].round(6).tolist() == [20.0, 200.0]


def test_an_idle_window_has_shrunk_by_the_time_of_the_decision() -> None:
    """A hundred seconds after it last sent something a connection is as a new one, but for its handshake."""
    near, far = Engine(0.010), Engine(0.100)
    windows: dict[str, Any] = {
        "cwnd_bytes": [200_000.0, 0.0],
        "rwnd_bytes": [200_000.0, 65_535.0],
        "connect_round_trips": [1.0, 2.0],
    }
    large = replace(ask(b"z" * 50), body_bytes=40_000)
    for sent_s, trips in ((99.9, 1), (0.0, 2)):
        rows = replace(table(2, names=NAMES, sent_s=[sent_s, np.inf], **windows), now=100.0)
        chosen = choose(looking(near, far), rows, asked=large)
        assert chosen.terms["rtt"].round(6).tolist() == [10.0 * trips, 100.0 * (2 + 2)]


def test_a_prediction_counts_from_the_receipt() -> None:
    """0.3 s at the proxy, a round trip of 10 ms, and 60 ms of prefill."""
    chosen = choose(
        looking(Engine(0.010), Engine(0.100)),
        replace(table(2, names=NAMES), now=5.3),
        asked=replace(ask(b"z" * 50), received_s=5.0),
    )
    assert chosen.predicted_ttft_s == pytest.approx(0.370)


def test_waiting_running_and_travelling_requests_are_all_in_flight() -> None:
    near, far = Engine(0.010), Engine(0.100)
    for _ in range(3):  # one runs, two wait for the end of its step
        near.serve(b"x" * 20)
    near.in_transit.append((9.0, a_request(b"y")))
    weights: dict[str, Any] = {"lambda": 0.1, "delta": 10.0}
    chosen = choose(looking(near, far), table(2, names=NAMES), asked=ask(b"z" * 50), **weights)
    assert chosen.terms["externality"].round(6).tolist() == [(0.1 * 60.0 + 10.0) * 4, 0.0]


def test_a_prefill_stalls_the_running_batch_at_most() -> None:
    near, far = Engine(0.010), Engine(0.100)
    for _ in range(near.model.profile.max_running_requests + 3):
        near.serve(b"x" * 20)
    weights: dict[str, Any] = {"lambda": 0.1, "delta": 10.0}
    chosen = choose(looking(near, far), table(2, names=NAMES), asked=ask(b"z" * 50), **weights)
    assert chosen.terms["externality"].round(6).tolist() == [(0.1 * 60.0 + 10.0) * 8, 0.0]


def test_weights_price_those_who_are_stalled() -> None:
    near, far = Engine(0.010), Engine(0.100)
    near.serve(b"x" * 20, 50)

    def priced(share: float, delta: float = 0.0) -> Choice:
        weights: dict[str, Any] = {"lambda": share, "delta": delta}
        return choose(looking(near, far), table(2, names=NAMES), asked=ask(b"z" * 50), **weights)

    assert priced(1.0).terms["externality"][0] == pytest.approx(60.0)
    assert (priced(0.1).row, priced(1.0).row, priced(1.0, delta=50.0).row) == (0, 0, 1)
