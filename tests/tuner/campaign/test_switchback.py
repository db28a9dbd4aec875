"""The calendar of blocks: whose turn it is, in which order, what belongs to a block, and when a pair is scored."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from gorgo.errors import TunerError
from tuner.campaign.comparison import Abandon, Arm, Outcome, Verdict
from tuner.campaign.options import CampaignOptions
from tuner.campaign.switchback import MAX_BLOCK_SAMPLES, Block, Switchback
from tuner.objective import TunerSample, WindowStats

#: Blocks of ten seconds of which three are discarded, one pair after the other, and no verdict for a while.
SHORT: dict[str, Any] = {"block_s": 10.0, "discard_s": 3.0, "rest_blocks": 0.0, "min_block_samples": 2}
USUAL = WindowStats(128, 400.0, 4.0, 12.0, 0, 0.4)


def other(arm: Arm) -> Arm:
    return "incumbent" if arm == "offspring" else "offspring"


class Fleet:
    """A switchback whose weights are in force as soon as it wants them, each time under the next version.

    A block's requests arrive every second from its beginning on; their TTFT is the arm's, plus the arrival's second.
    """

    def __init__(
        self, *, seed: int = 0, audit: bool = False, reference: WindowStats | None = USUAL, **options: Any
    ) -> None:
        self.options = CampaignOptions(**SHORT | options)
        rng = np.random.default_rng(seed)
        self.trial = Switchback(self.options, rng, reference, **({"audit": True} if audit else {}))
        self.ttft_ms: dict[Arm, float] = {"incumbent": 400.0, "offspring": 400.0}
        self.now = 100.0
        self.blocks: list[tuple[Arm, int, float]] = []
        self.apply()

    def apply(self) -> None:
        """The weights that the trial wants come into force."""
        version = len(self.blocks) + 7
        self.blocks.append((self.trial.arm, version, self.now))
        self.trial.on_applied(version, now=self.now)

    @property
    def arms(self) -> list[Arm]:
        return [arm for arm, _, _ in self.blocks]

    def sample(self, *, block: int = -1, at_s: float = 0.0, e2e_s: float = 2.0, **changes: Any) -> TunerSample:
        """A request that arrived `at_s` after the beginning of a block."""
        arm, version, began_s = self.blocks[block]
        usual = TunerSample(1, began_s + at_s, "a", version, self.ttft_ms[arm] + at_s, e2e_s, 10.0, 200)
        return replace(usual, **changes)

    def feed(self, samples: Sequence[TunerSample]) -> Outcome:
        turn = self.trial.turn
        outcome = self.trial.on_samples(samples, now=self.now)
        if self.trial.turn != turn and outcome is None:
            self.apply()
        return outcome

    def pass_time(self, seconds: float) -> Outcome:
        self.now += seconds
        return self.feed([])

    def block(self, count: int = 10) -> Outcome:
        """A whole block with a request a second, the last `count` of them."""
        samples = [self.sample(at_s=float(second)) for second in range(10 - count, 10)]
        return self.feed(samples) or self.pass_time(10.0)

    def pair(self, count: int = 10) -> Outcome:
        """Two blocks, and until they are scored in the midst of the next."""
        return self.block(count) or self.block(count) or self.pass_time(3.0)


def test_a_fair_coin_says_which_arm_goes_first() -> None:
    first = [Fleet(seed=seed, pairs=1).trial.arm for seed in range(400)]
    assert 160 <= first.count("offspring") <= 240  # four standard deviations
    assert set(first) == {"offspring", "incumbent"}


def test_every_trial_s_test_has_sign_patterns_of_its_own() -> None:
    rng = np.random.default_rng(0)
    trials = [Switchback(CampaignOptions(pairs=1), rng, None) for _ in range(100)]
    assert len({trial.state()["seed"] for trial in trials}) == 100


def test_the_coin_is_tossed_for_every_pair_anew() -> None:
    fleet = Fleet(max_voids=1000)
    for _ in range(300):
        assert fleet.block(0) is None
    pairs = list(zip(fleet.arms[::2], fleet.arms[1::2], strict=False))
    assert all(set(pair) == {"offspring", "incumbent"} for pair in pairs)
    assert 45 <= sum(pair[0] == "offspring" for pair in pairs) <= 105


def test_one_seed_gives_one_order() -> None:
    assert [Fleet(seed=3).trial.state() for _ in range(2)] == [Fleet(seed=3).trial.state()] * 2
    assert Fleet(seed=3).trial.state() != Fleet(seed=4).trial.state()


def test_a_block_ends_when_its_time_is_over_and_each_is_put_once() -> None:
    fleet = Fleet()
    assert (fleet.trial.turn, fleet.trial.next_time()) == (1, 110.0)
    fleet.pass_time(9.99)
    assert fleet.trial.turn == 1
    fleet.pass_time(0.01)
    assert (fleet.trial.turn, fleet.trial.next_time()) == (2, 120.0)
    assert fleet.arms == [fleet.arms[0], other(fleet.arms[0])]


def test_a_block_s_time_runs_from_when_its_weights_are_in_force() -> None:
    fleet = Fleet()
    fleet.now = 110.0
    assert fleet.trial.on_time(now=110.0) is None
    turn = fleet.trial.turn
    assert fleet.trial.next_time() is None, "an answer is awaited"
    assert fleet.trial.on_time(now=500.0) is None
    assert fleet.trial.turn == turn
    fleet.now = 130.0
    fleet.apply()
    assert fleet.trial.next_time() == 140.0


@pytest.mark.parametrize(("rest_blocks", "rest_s"), [(2.0, 20.0), (0.5, 5.0)])
def test_the_incumbent_rests_before_each_pair_and_nothing_of_it_counts(rest_blocks: float, rest_s: float) -> None:
    fleet = Fleet(rest_blocks=rest_blocks)
    assert (fleet.arms, fleet.trial.next_time()) == (["incumbent"], 100.0 + rest_s)
    fleet.feed([fleet.sample(at_s=4.0, ttft_ms=9e9) for _ in range(9)])
    fleet.pass_time(rest_s - 0.1)
    assert fleet.trial.turn == 1
    fleet.pass_time(0.1)
    assert fleet.trial.turn == 2
    assert fleet.trial.next_time() == 100.0 + rest_s + 10.0, "a pair's blocks are not stretched"
    fleet.pair()
    assert fleet.arms[3] == "incumbent"
    assert set(fleet.arms[1:3]) == {"incumbent", "offspring"}
    (pair,) = fleet.trial.pairs
    assert (pair.incumbent.n, pair.offspring.n) == (7, 7)
    assert pair.incumbent.ttft_ms_p95 == pytest.approx(408.7)


def test_in_an_audit_there_is_no_rest() -> None:
    fleet = Fleet(audit=True, rest_blocks=2.0)
    fleet.block()
    assert set(fleet.arms) == {"incumbent", "offspring"}


def test_what_arrives_while_the_queues_of_the_block_before_drain_is_left_out() -> None:
    fleet = Fleet(min_block_samples=1)
    for _ in range(2):
        early = [fleet.sample(at_s=at_s, ttft_ms=9e9) for at_s in (1.0, 2.5, 3.99)]
        fleet.feed([*early, fleet.sample(at_s=4.0, ttft_ms=300.0), fleet.sample(at_s=9.0, ttft_ms=300.0)])
        fleet.pass_time(10.0)
    fleet.pass_time(3.0)
    # Three seconds from the first arrival, 1.0 s after the put; the one at 4.0 s is the first that counts.
    assert [(pair.incumbent.n, pair.offspring.n) for pair in fleet.trial.pairs] == [(2, 2)]
    assert fleet.trial.pairs[0].offspring.ttft_ms_p95 == pytest.approx(300.0)


def test_a_block_begins_with_its_earliest_arrival_whichever_is_seen_first() -> None:
    fleet = Fleet(min_block_samples=1)
    for _ in range(2):
        fleet.feed([fleet.sample(at_s=at_s) for at_s in (5.0, 2.0, 4.9, 9.0)])
        fleet.pass_time(10.0)
    fleet.pass_time(3.0)
    assert fleet.trial.pairs[0].offspring.n == 2  # at 5.0 and 9.0


def test_a_block_may_begin_at_the_clock_s_zero() -> None:
    block = Block("offspring")
    for arrived_s in (0.0, 2.9, 3.0):
        block.add(TunerSample(1, arrived_s, "a", 7, 400.0, 2.0, 10.0, 200))
    assert block.stats(3.0).n == 1
    assert Block("offspring").stats(3.0).n == 0


def test_slow_answers_count_until_the_pair_is_scored_and_no_longer() -> None:
    fleet = Fleet(min_block_samples=1)
    fleet.feed([fleet.sample(at_s=0.0), fleet.sample(at_s=5.0)])
    fleet.pass_time(10.0)
    fleet.feed([fleet.sample(at_s=0.0), fleet.sample(at_s=5.0)])
    fleet.pass_time(10.0)
    assert fleet.trial.next_time() == 123.0
    fleet.pass_time(2.9)
    assert fleet.trial.pairs == []
    late = [fleet.sample(block=-2, at_s=9.0), fleet.sample(block=-2, at_s=9.5), fleet.sample(block=-3, at_s=9.0)]
    fleet.feed(late)
    fleet.pass_time(0.1)
    counts = [(pair.incumbent.n, pair.offspring.n) for pair in fleet.trial.pairs]
    second = fleet.arms[1]
    assert counts == [(3, 2) if second == "incumbent" else (2, 3)]
    assert fleet.trial.next_time() == 130.0
    fleet.feed(late)
    assert [(pair.incumbent.n, pair.offspring.n) for pair in fleet.trial.pairs] == counts


def test_a_slow_answer_that_comes_with_the_time_of_scoring_still_counts() -> None:
    fleet = Fleet(rest_blocks=1.0, min_block_samples=1)
    fleet.pass_time(10.0)
    for _ in range(2):
        fleet.feed([fleet.sample(at_s=0.0), fleet.sample(at_s=5.0)])
        fleet.pass_time(10.0)
    fleet.now += 3.0
    fleet.feed([fleet.sample(block=-2, at_s=9.0, ttft_ms=7000.0)])
    slowest = max(stats.ttft_ms_p95 or 0.0 for pair in fleet.trial.pairs for stats in (pair.incumbent, pair.offspring))
    assert slowest > 6000.0


def test_samples_of_other_weights_belong_to_no_block() -> None:
    fleet = Fleet()
    fleet.feed([fleet.sample(at_s=5.0, weights_version=3, ttft_ms=9e9)] * 9)
    fleet.pair()
    assert fleet.trial.pairs[0].offspring.n == fleet.trial.pairs[0].incumbent.n == 7


def test_each_arm_is_scored_on_its_own_blocks_whichever_came_first() -> None:
    for seed in range(8):
        fleet = Fleet(seed=seed)
        fleet.ttft_ms = {"incumbent": 400.0, "offspring": 200.0}
        fleet.pair()
        (pair,) = fleet.trial.pairs
        assert (pair.incumbent.ttft_ms_p95, pair.offspring.ttft_ms_p95) == pytest.approx((408.7, 208.7))


def test_the_version_that_is_recorded_is_the_offspring_s() -> None:
    fleet = Fleet(pairs=60)
    assert (fleet.trial.offspring_version is None) == (fleet.trial.arm == "incumbent")
    for _ in range(9):
        fleet.block()
    assert fleet.trial.offspring_version == max(version for arm, version, _ in fleet.blocks if arm == "offspring")


def until_decided(fleet: Fleet, at_most: int = 50) -> Outcome:
    for _ in range(at_most):
        if outcome := fleet.block():
            return outcome
    raise AssertionError(f"no verdict after {at_most} blocks")


def test_the_pairs_decide() -> None:
    fleet = Fleet()
    fleet.ttft_ms["offspring"] = 200.0
    verdict = until_decided(fleet)
    assert isinstance(verdict, Verdict)
    assert verdict.accepted
    assert len(fleet.trial.pairs) in (6, 7, 8)
    fleet = Fleet()
    fleet.ttft_ms["offspring"] = 800.0
    verdict = until_decided(fleet)
    assert isinstance(verdict, Verdict)
    assert not verdict.accepted
    assert len(fleet.trial.pairs) == 2


def test_an_audit_s_pairs_are_judged_as_an_audit() -> None:
    verdict = until_decided(Fleet(audit=True))
    assert isinstance(verdict, Verdict)
    assert verdict.accepted
    assert verdict.reason == "the start is not behind the defaults in 8 pairs of blocks"


def test_a_verdict_begins_no_other_block() -> None:
    fleet = Fleet(discard_s=9.0, min_block_samples=1, futility_pairs=1)
    fleet.block()
    fleet.block()
    turn = fleet.trial.turn
    fleet.now += 10.0  # the pair's scoring and the end of the block after it, in one look
    assert isinstance(fleet.trial.on_time(now=fleet.now), Verdict)
    assert fleet.trial.turn == turn


# -- pairs that do not count


@pytest.mark.parametrize(("count", "counts"), [(4, False), (5, True), (6, True)])
def test_a_pair_counts_if_the_shorter_block_has_enough_samples(count: int, counts: bool) -> None:
    fleet = Fleet(min_block_samples=2)  # of `count` a second apart, the first three are discarded
    fleet.block(10)
    fleet.block(count)
    fleet.pass_time(3.0)
    assert len(fleet.trial.pairs) == counts


def test_a_block_without_a_first_token_voids_its_pair() -> None:
    fleet = Fleet()
    fleet.block()
    fleet.feed([fleet.sample(at_s=float(second), ttft_ms=None) for second in range(10)])
    fleet.pass_time(10.0)
    fleet.pass_time(3.0)
    assert fleet.trial.pairs == []


def test_too_many_void_pairs_in_a_row_end_in_waiting() -> None:
    fleet = Fleet(max_voids=3, min_block_samples=3)
    assert [fleet.block(5) for _ in range(6)] == [None] * 6
    assert fleet.pass_time(2.9) is None
    assert fleet.pass_time(0.1) == Abandon("2 samples in a block, 3 are needed")


def test_a_pair_that_counts_ends_a_row_of_void_ones() -> None:
    fleet = Fleet(max_voids=2, pairs=60, alpha=1e-6, futility_pairs=59)
    for count in (3, 10, 3, 10, 3, 10):
        assert [fleet.block(count) for _ in range(2)] == [None, None]
    assert fleet.pass_time(3.0) is None
    assert len(fleet.trial.pairs) == 3
    for _ in range(4):
        outcome = fleet.block(3)
    assert isinstance(outcome or fleet.pass_time(3.0), Abandon)


def test_lost_samples_void_the_pair_under_way_and_the_one_that_waits_for_its_score() -> None:
    fleet = Fleet(rest_blocks=1.0)
    for _ in range(6):  # twice a rest and a pair
        fleet.block()
    turn = fleet.trial.turn
    fleet.trial.void()
    assert fleet.trial.turn == turn + 1
    assert fleet.trial.arm == "incumbent", "a rest comes first again"
    fleet.apply()
    fleet.pass_time(5.0)
    assert len(fleet.trial.pairs) == 1, "pairs that were scored stay"


def test_a_void_in_the_midst_of_a_pair_draws_the_pair_anew() -> None:
    fleet = Fleet()
    fleet.block()
    fleet.trial.void()
    fleet.apply()
    fleet.blocks = fleet.blocks[-1:]
    fleet.block()
    fleet.block()
    assert set(fleet.arms[:2]) == {"incumbent", "offspring"}
    fleet.pass_time(3.0)
    assert len(fleet.trial.pairs) == 1


# -- harm


def until_offspring(fleet: Fleet) -> Fleet:
    while fleet.trial.arm != "offspring":
        assert fleet.block() is None
    return fleet


def slow(fleet: Fleet, count: int, *, e2e_s: float = 13.0, **where: Any) -> Outcome:
    """From the block's first seconds on: harm is harm."""
    return fleet.feed([fleet.sample(at_s=i / 100, e2e_s=e2e_s, **where) for i in range(count)])


def test_harm_ends_the_trial_at_once_and_its_samples_are_the_verdict_s_figures() -> None:
    fleet = until_offspring(Fleet())
    assert slow(fleet, 63) is None
    verdict = slow(fleet, 1)
    assert isinstance(verdict, Verdict)
    assert (verdict.accepted, verdict.refused, verdict.breach) == (False, True, True)
    assert verdict.reason == "running p95 E2E is 13.00 s, 3.2 times the usual 4.00 s"
    assert verdict.stats is not None
    assert verdict.stats.n == 64
    assert verdict.objective_ms == verdict.stats.ttft_ms_p95 == pytest.approx(400.6, abs=0.05)


def test_the_incumbent_s_slowness_is_nobody_s_fault() -> None:
    fleet = Fleet()
    while fleet.trial.arm != "incumbent":
        fleet.block()
    assert slow(fleet, 200) is None


def test_without_the_guard_nothing_is_harm() -> None:
    assert slow(until_offspring(Fleet(guard=False)), 200) is None


def test_a_slow_answer_of_an_offspring_whose_block_is_over_is_harm_too() -> None:
    fleet = Fleet(rest_blocks=2.0)
    while fleet.arms[-2:] != ["offspring", "incumbent"]:
        fleet.block()
    verdict = slow(fleet, 64, block=-2)
    assert isinstance(verdict, Verdict)
    assert verdict.breach


def test_the_usual_is_what_the_incumbent_s_blocks_have_shown() -> None:
    fleet = Fleet(reference=None, audit=True, pairs=60, alpha=1e-6, futility_pairs=59)
    assert slow(until_offspring(fleet), 128, e2e_s=30.0) is None, "there is no usual yet"
    fleet = Fleet(reference=None, audit=True, pairs=60, alpha=1e-6, futility_pairs=59)
    fleet.pair()  # 2 s each
    assert slow(until_offspring(fleet), 128, e2e_s=5.9) is None
    verdict = slow(fleet, 64, e2e_s=6.1)
    assert isinstance(verdict, Verdict)
    assert "times the usual 2.00 s" in verdict.reason


def test_what_was_seen_before_a_void_is_no_harm_after_it() -> None:
    fleet = until_offspring(Fleet())
    slow(fleet, 63)
    fleet.trial.void()
    fleet.apply()
    until_offspring(fleet)
    assert slow(fleet, 63) is None


# -- what outlives the process


def test_pairs_and_seed_outlive_the_process_and_the_block_under_way_does_not() -> None:
    fleet = Fleet(seed=5, pairs=60, alpha=1e-6, futility_pairs=59)
    for _ in range(7):
        fleet.block()
    saved = json.loads(json.dumps(fleet.trial.state()))
    again = Fleet(seed=6, pairs=60, alpha=1e-6, futility_pairs=59)
    again.trial.load(saved)
    assert again.trial.pairs == fleet.trial.pairs
    assert again.trial.state() == saved
    assert len(saved["pairs"]) == 3


def test_a_loaded_switchback_judges_by_the_saved_seed() -> None:
    def pairs_needed(seed: int) -> int:
        loaded = Fleet(seed=1)
        loaded.ttft_ms["offspring"] = 200.0
        loaded.trial.load({"seed": seed, "pairs": []})
        until_decided(loaded)
        return len(loaded.trial.pairs)

    assert (pairs_needed(14), pairs_needed(1)) == (6, 7)  # as of `test_judge`


@pytest.mark.parametrize("state", [{}, {"seed": 1}, {"seed": "x", "pairs": []}, {"seed": 1, "pairs": [{}]}])
def test_a_state_that_is_none_is_refused(state: dict[str, Any]) -> None:
    with pytest.raises(TunerError, match=r"saved switchback.* expected"):
        Fleet().trial.load(state)


def test_a_block_keeps_no_more_samples_than_its_bound() -> None:
    fleet = Fleet(guard=False, discard_s=0.0)
    for _ in range(2):
        fleet.feed([fleet.sample(at_s=1.0)] * (MAX_BLOCK_SAMPLES + 5))
        fleet.pass_time(10.0)
    fleet.pass_time(0.0)
    assert [(pair.incumbent.n, pair.offspring.n) for pair in fleet.trial.pairs] == [(20_000, 20_000)]
