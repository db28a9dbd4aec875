"""Rounds of training, and the buffers that they draw from."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, get_args

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gorgo.core.training.learning import Model, ModelKind, ReplayRule, TrainingSpec
from gorgo.core.training.outcomes import TrainingRows
from gorgo.errors import ConfigError
from gorgo.learning import model_file, trainer
from gorgo.learning.trainer import (
    RING_ROWS,
    STRATA,
    TEST_ROWS,
    FifoReplay,
    RowRing,
    StratifiedStore,
    Trainer,
    errors,
    fit,
    is_tested,
    k_centre,
    strata,
)
from tests.learning.outcomes import NAMES, numbered, numbers, rows_of, training_rows

# --- Rounds of training.


def trained(subject: Trainer) -> Model:
    """The model of a round that is adopted."""
    model = subject.train()
    assert model is not None
    return model


def a_trainer(kind: str = "linear", **fields: object) -> Trainer:
    spec = TrainingSpec(kind, NAMES, first_samples=300, round_samples=100)  # type: ignore[arg-type]
    return Trainer(replace(spec, **fields), seed=7)  # type: ignore[arg-type]


def test_first_round_is_due_when_its_model_has_enough_samples_and_later_ones_after_new_rows() -> None:
    subject = a_trainer()
    tested = is_tested(training_rows(400))
    enough = int(np.flatnonzero(np.cumsum(~tested) == 300)[0]) + 1
    subject.add(training_rows(enough - 1))
    assert not subject.due()
    subject.add(training_rows(1, first_seq=enough - 1))
    assert subject.due()
    assert trained(subject).samples == 300
    assert not subject.due()
    subject.add(training_rows(99, first_seq=enough))
    assert not subject.due()
    subject.add(training_rows(1, first_seq=enough + 99))
    assert subject.due()
    assert trained(subject).version == 2


def test_a_round_waits_for_a_share_of_the_stored_samples_too() -> None:
    subject = a_trainer(store="stratified", round_growth=0.5)
    subject.add(training_rows(1000))
    stored = trained(subject).samples
    new = int(0.5 * stored)
    subject.add(training_rows(new - 1, first_seq=1000))
    assert new > 2 * subject.spec.round_samples
    assert not subject.due(), "half of what is stored now has to be new"
    subject.add(training_rows(stored, first_seq=1000 + new - 1))
    assert subject.due()


def test_rounds_go_on_from_the_last_version() -> None:
    spec = TrainingSpec("linear", NAMES)
    subject = Trainer(spec, seed=7, incumbent=replace(fit(training_rows(50), spec, 0, 1), version=12))  # type: ignore[type-var]
    subject.add(training_rows(60))
    assert trained(subject).version == 13


@pytest.mark.parametrize("store", ["fifo", "stratified"])
def test_a_tenth_of_the_rows_is_tested_by_and_no_round_trains_on_them(store: str) -> None:
    subject = a_trainer(store=store)
    subject.add(training_rows(2000))
    subject.train()
    report = subject.report()
    assert report.samples + report.tested == 2000
    assert report.tested == pytest.approx(200, rel=0.2)


def test_row_is_tested_by_or_trained_on_whatever_it_comes_with() -> None:
    whole = is_tested(numbered(1000))
    assert (is_tested(numbered(600, first=400)) == whole[400:]).all()
    assert whole.mean() == pytest.approx(0.1, rel=0.2)


def test_rows_to_test_by_are_bounded() -> None:
    subject = a_trainer(store="stratified")
    subject.add(training_rows(20_000))
    subject.train()
    assert subject.report().tested == TEST_ROWS


def test_report_has_the_errors_of_unseen_rows() -> None:
    subject = a_trainer("rls")
    subject.add(training_rows(3000, noise=0.1))
    model = trained(subject)
    report = subject.report()
    assert (report.version, report.kind, report.added) == (1, "rls", 3000)
    assert report.ttft_mape is not None
    assert 0.05 < report.ttft_mape < 0.12
    assert report.tpot_mape is not None
    assert report.tpot_mape < 0.01
    unseen = training_rows(500, seed=9)
    ttft = float(np.mean(np.abs(model.ttft_s(unseen.features) - unseen.ttft_s) / unseen.ttft_s))
    assert errors(model, unseen)[0] == pytest.approx(ttft)


def test_error_counts_no_censored_row_and_no_unknown_time() -> None:
    subject = a_trainer("rls")
    subject.add(training_rows(500))
    model = trained(subject)
    rows = training_rows(10, seed=2)
    none = replace(rows, censored=np.ones(10, dtype=np.bool_), tpot_s=np.full(10, np.nan))
    assert errors(model, none) == (None, None)
    one = replace(rows, censored=np.arange(10) > 0)
    assert errors(model, one)[0] == pytest.approx(errors(model, rows.select(slice(0, 1)))[0])


def test_row_with_a_number_that_is_not_finite_is_counted_and_left_out() -> None:
    subject = a_trainer()
    rows = training_rows(100)
    rows.features[3, 0] = np.nan
    rows.ttft_s[5] = np.inf
    subject.add(rows)
    model = trained(subject)
    report = subject.report()
    assert (report.added, report.rejected, report.samples + report.tested) == (100, 2, 98)
    assert np.isfinite(model.ttft_s(training_rows(5).features)).all()


def test_report_before_a_round_counts_rows() -> None:
    subject = a_trainer()
    subject.add(training_rows(10))
    assert subject.report().as_dict() == {
        **{"version": 0, "kind": None, "added": 10, "rejected": 0, "samples": 0, "censored": 0, "tested": 0},
        **{"whole_answers": 0, "ttft_mape": None, "tpot_mape": None, "e2e_mape": None, "refused": 0, "verdict": None},
    }


def test_censored_rows_are_trained_on() -> None:
    subject = a_trainer()
    rows = training_rows(300)
    subject.add(replace(rows, censored=np.ones(300, dtype=np.bool_)))
    subject.train()
    report = subject.report()
    assert report.censored == report.samples > 0


def test_round_without_a_row_is_refused() -> None:
    with pytest.raises(ConfigError, match="no rows"):
        a_trainer().train()


@pytest.mark.parametrize("rule", ["coreset", "random"])
def test_same_rows_and_seed_make_the_same_models_however_they_are_cut(rule: str) -> None:
    def last(batch: int) -> bytes:
        subject = a_trainer("mlp", epochs=1, fifo=200, replay=200, replay_rule=rule, judged=False)
        rows = training_rows(1000, noise=0.1)
        for first in range(0, 1000, batch):
            subject.add(rows.select(slice(first, first + batch)))
            if (first + batch) % 100 == 0 and subject.due():
                model = trained(subject)
        return model_file.dumps(model)

    assert last(100) == last(100)
    assert last(50) == last(100)


KINDS = get_args(ModelKind)


def fitted(kind: ModelKind, seed: int = 1, rows: int = 300) -> Model:
    return fit(training_rows(rows, noise=0.05), TrainingSpec(kind, NAMES, epochs=3), seed=seed, version=4)


@pytest.mark.parametrize("kind", KINDS)
def test_model_has_its_facts_and_predicts_a_finite_time_per_row(kind: ModelKind) -> None:
    model, table = fitted(kind), training_rows(20, seed=2).features
    assert (model.version, model.names, model.samples) == (4, NAMES, 300)
    assert model.low.shape == model.high.shape == (len(NAMES),)
    assert (model.low <= model.high).all()
    times = model.ttft_s(table)
    assert times.shape == (20,)
    assert times.dtype == np.float64
    assert np.isfinite(times).all()
    tpot = model.tpot_s(table)
    assert (tpot is not None) is (kind in ("trees", "rls"))
    assert tpot is None or tpot.shape == (20,)


@pytest.mark.parametrize("kind", KINDS)
def test_same_rows_settings_and_seed_make_the_same_model(kind: ModelKind) -> None:
    assert model_file.dumps(fitted(kind)) == model_file.dumps(fitted(kind))


@pytest.mark.parametrize("kind", KINDS)
def test_one_row_makes_a_model(kind: ModelKind) -> None:
    model = fitted(kind, rows=1)
    assert np.isfinite(model.ttft_s(training_rows(5).features)).all()


def test_rounds_have_chances_of_their_own() -> None:
    spec, rows = TrainingSpec("mlp", NAMES, epochs=1), training_rows(300)
    first, second = (fit(rows, spec, seed=1, version=version).ttft_s(rows.features) for version in (1, 2))
    assert not (first == second).all()


def test_rows_of_other_features_are_refused() -> None:
    spec = TrainingSpec("mlp", ("kv_usage",))
    with pytest.raises(ConfigError, match=r"rows of features uncached_tokens, .*; expected kv_usage"):
        fit(training_rows(10), spec, seed=0, version=1)


def test_no_rows_are_refused() -> None:
    with pytest.raises(ConfigError, match="no rows; expected at least one"):
        fit(training_rows(0), TrainingSpec("mlp", NAMES), seed=0, version=1)


def knowing(rows: int, *, seed: int = 3) -> Model:
    """A model in use that was trained on so many rows of the same traffic."""
    return fit(training_rows(rows, seed=seed, noise=0.3), TrainingSpec("rls", NAMES), seed=1, version=9)


def test_a_model_of_few_outcomes_does_not_replace_one_of_thousands() -> None:
    """A restart: the process has the outcomes since, some hundred of them."""
    incumbent = knowing(5000)
    subject = Trainer(TrainingSpec("rls", NAMES, first_samples=100), seed=7, incumbent=incumbent)
    subject.add(training_rows(120, noise=0.3))
    assert subject.due()
    assert subject.train() is None
    report = subject.report()
    assert (report.refused, report.version) == (1, 10)
    assert report.verdict is not None
    assert report.verdict.endswith("samples, and version 9 has 5,000")


def test_no_model_is_adopted_that_predicts_the_same_held_out_rows_worse() -> None:
    """A bad hour: the times of these outcomes follow nothing, and so does a model of them alone."""
    subject = a_trainer("rls", first_samples=50)
    subject.add(training_rows(2000, noise=0.05))
    first = trained(subject)
    shuffled = training_rows(400, seed=5, first_seq=2000)
    order = np.random.default_rng(0).permutation(400)
    narrow = Trainer(replace(subject.spec, fifo=300, replay_rule="none"), seed=7, incumbent=first)
    narrow.add(replace(shuffled, ttft_s=9.0 * shuffled.ttft_s[order], tpot_s=shuffled.tpot_s[order]))
    narrow._test.append(training_rows(300, seed=8, first_seq=2400))
    assert narrow.train() is None
    verdict = narrow.report().verdict
    assert verdict is not None
    assert verdict.startswith("error ")
    assert "held-out rows, where version 1 has" in verdict


def test_a_better_model_is_adopted_and_rounds_after_a_refused_one_go_on() -> None:
    subject = Trainer(TrainingSpec("rls", NAMES, first_samples=100), seed=7, incumbent=knowing(40))
    subject.add(training_rows(3000, noise=0.05))
    assert trained(subject).version == 10
    assert subject.report().verdict is None
    subject.add(training_rows(1000, seed=2, first_seq=3000, noise=0.05))
    assert subject.due()
    subject.train()
    assert subject.report().version == 11


def test_a_change_of_the_traffic_is_learned_though_older_rows_are_held_out_too() -> None:
    """Engines that are three times slower: the newest held-out rows tell."""
    subject = a_trainer("rls", fifo=2000, replay_rule="none")
    subject.add(training_rows(8000))
    trained(subject)
    slower = training_rows(2500, seed=4, first_seq=8000)
    subject.add(replace(slower, ttft_s=3.0 * slower.ttft_s))
    model = trained(subject)
    assert errors(model, replace(slower, ttft_s=3.0 * slower.ttft_s))[0] == pytest.approx(0.0, abs=0.1)


def test_a_training_that_is_not_judged_adopts_every_model() -> None:
    subject = Trainer(TrainingSpec("rls", NAMES, judged=False), seed=7, incumbent=knowing(5000))
    subject.add(training_rows(120, noise=0.3))
    assert trained(subject).version == 10


def test_answers_in_one_piece_have_an_error_of_their_own() -> None:
    subject = a_trainer("rls")
    rows = training_rows(1000)
    subject.add(replace(rows, unstreamed=np.arange(1000) % 2 == 0))
    model = trained(subject)
    report = subject.report()
    assert report.ttft_mape is not None
    assert report.e2e_mape is not None
    assert report.whole_answers == pytest.approx(450, rel=0.1)
    one = replace(rows.select(slice(0, 1)), unstreamed=np.ones(1, dtype=np.bool_))
    assert errors(model, one)[0] is None


# --- Greedy k-centre against its definition.


def plain(points: np.ndarray, count: int) -> list[int]:
    """Every distance anew for every pick."""
    picked = [int(np.argmax((points**2).sum(axis=1)))]
    while len(picked) < min(count, len(points)):
        nearest = [
            -1.0 if row in picked else min(((points[row] - points[other]) ** 2).sum() for other in picked)
            for row in range(len(points))
        ]
        picked.append(int(np.argmax(nearest)))
    return picked


@given(st.integers(0, 10_000), st.integers(1, 12), st.integers(1, 12))
def test_picks_are_those_of_the_definition(seed: int, rows: int, count: int) -> None:
    # Small whole numbers: sums are exact, and ties are frequent.
    points = np.random.default_rng(seed).integers(-3, 4, (rows, 3)).astype(np.float32)
    assert k_centre(points, count).tolist() == plain(points, count)


def test_no_row_is_picked_twice_where_all_are_alike() -> None:
    assert sorted(k_centre(np.ones((6, 2), dtype=np.float32), 6).tolist()) == list(range(6))


def test_nothing_is_picked_out_of_nothing() -> None:
    assert k_centre(np.empty((0, 3), dtype=np.float32), 3).tolist() == []
    assert k_centre(np.ones((3, 3), dtype=np.float32), 0).tolist() == []


def test_rows_that_a_model_predicts_well_count_as_one() -> None:
    rng = np.random.default_rng(0)
    well = rng.normal(size=(90, 8)) * 1e-4
    badly = rng.normal(size=(10, 8))
    picked = k_centre(np.concatenate([well, badly]).astype(np.float32), 11)
    assert len(set(picked.tolist()) & set(range(90, 100))) == 10


def test_errors_of_both_signs_are_far_apart() -> None:
    points = np.array([[2.0, 1.0], [1.9, 1.0], [-1.9, -1.0]], dtype=np.float32)
    assert k_centre(points, 2).tolist() == [0, 2]


class ByNumber:
    """A model by which rows are as far apart as their numbers."""

    def __init__(self, factor: float = 1.0) -> None:
        self.factor = factor
        self.calls: list[int] = []

    def gradients(self, rows: TrainingRows, cap_s: float) -> np.ndarray:
        self.calls.append(len(rows))
        return rows.features * np.float32(self.factor)


def store(rule: ReplayRule, fifo: int = 10, size: int = 10, seed: int = 0) -> FifoReplay:
    spec = TrainingSpec("mlp", ("prompt_tokens",), fifo=fifo, replay=size, replay_rule=rule)
    return FifoReplay(spec, np.random.default_rng(seed))


def after(rule: ReplayRule, rows: int, model: object = None, batch: int = 5, **sizes: Any) -> list[int]:
    subject = store(rule, **sizes)
    for first in range(0, rows, batch):
        subject.add(numbered(min(batch, rows - first), first))
        subject.fill_replay(model)
    return numbers(subject.stored())


@pytest.mark.parametrize("rule", get_args(ReplayRule))
def test_newest_rows_are_always_there_and_no_row_twice(rule: ReplayRule) -> None:
    found = after(rule, 57, ByNumber())
    assert found[-10:] == list(range(47, 57))
    assert len(set(found)) == len(found)


@pytest.mark.parametrize("rule", get_args(ReplayRule))
def test_same_seed_has_the_same_rows(rule: ReplayRule) -> None:
    assert after(rule, 200) == after(rule, 200)


def test_rule_none_has_the_fifo_alone() -> None:
    assert after("none", 57) == list(range(47, 57))


def test_rule_all_has_every_row_up_to_its_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trainer, "ALL_ROWS", 30)
    assert after("all", 35) == list(range(35))
    assert after("all", 100) == list(range(60, 100))


def test_replay_buffer_starts_to_fill_when_the_fifo_is_full() -> None:
    assert after("coreset", 10, ByNumber()) == list(range(10))
    assert after("coreset", 18, ByNumber()) == list(range(18))


@given(st.lists(st.integers(0, 30), max_size=20), st.sampled_from(get_args(ReplayRule)), st.booleans())
def test_buffers_never_exceed_their_bounds(batches: list[int], rule: ReplayRule, admits: bool) -> None:
    subject, first = store(rule), 0
    for count in batches:
        subject.add(numbered(count, first))
        first += count
        if admits:
            subject.fill_replay(ByNumber())
        assert len(subject.stored()) == len(subject) <= (first if rule == "all" else 20)


def test_coreset_has_the_rows_that_are_farthest_apart() -> None:
    # One far row among rows that are alike: it stays, however old it is.
    subject = store("coreset", fifo=2, size=3)
    subject.add(numbered(1, 1000))
    for first in range(0, 50, 5):
        subject.add(numbered(5, first))
        subject.fill_replay(ByNumber())
    assert 1000 in numbers(subject.stored())


def test_model_without_gradients_leaves_the_choice_to_chance() -> None:
    first, second = after("coreset", 300, None), after("coreset", 300, None, seed=1)
    assert first != second


def test_pool_of_a_round_is_bounded_and_so_are_the_rows_that_wait() -> None:
    subject, model = store("coreset", fifo=100, size=5000), ByNumber()
    subject.add(numbered(5100))
    subject.fill_replay(model)
    subject.add(numbered(5100, 5100))
    subject.fill_replay(model)
    subject.add(numbered(20_000, 20_000))
    subject.fill_replay(model)
    assert model.calls
    assert max(model.calls) <= trainer.POOL
    assert len(subject) <= 5100


def test_random_rule_gives_every_row_that_left_the_same_chance() -> None:
    counts = np.zeros(60)
    for seed in range(400):
        found = after("random", 60, fifo=10, size=10, seed=seed)
        counts[found[:-10]] += 1
    expected = 400 * 10 / 50
    assert np.abs(counts[:50] - expected).max() < 5 * expected**0.5
    assert counts[50:].sum() == 0


@given(st.integers(1, 100), st.lists(st.integers(0, 150), max_size=12))
def test_ring_is_the_end_of_a_list(capacity: int, batches: list[int]) -> None:
    ring, twin, first = RowRing(("prompt_tokens",), capacity), list[int](), 0
    for count in batches:
        left = ring.append(numbered(count, first))
        twin += range(first, first + count)
        assert numbers(left) == twin[: max(0, len(twin) - capacity)]
        twin, first = twin[-capacity:], first + count
        assert numbers(ring.stored()) == twin
        assert len(ring) == len(twin)
        assert ring.allocated <= capacity


def test_memory_grows_with_the_rows() -> None:
    ring = RowRing(("prompt_tokens",), 5000)
    ring.append(numbered(10))
    assert ring.allocated <= 64
    ring.append(numbered(10_000))
    assert ring.allocated == 5000


def test_rows_returned_are_copies() -> None:
    ring = RowRing(("prompt_tokens",), 5)
    ring.append(numbered(3))
    ring.stored().features[:] = 9.0
    assert numbers(ring.stored()) == [0, 1, 2]


NAMES_BUFFERS = ("queued_requests", "kv_usage", "hit_share")


def loads(queued: list[float], kv: list[float], hits: list[float], first: int = 0):  # type: ignore[no-untyped-def]
    table = np.column_stack([queued, kv, hits]).astype(np.float32).reshape(-1, 3)
    return rows_of(NAMES_BUFFERS, table, np.arange(first, first + len(queued), dtype=np.float64), first_seq=first)


def plain_class(queued: float, kv: float, hit: float) -> tuple[int, int, int]:
    queue = 0 if queued == 0 else 1 if queued <= 2 else 2 if queued <= 5 else 3 if queued <= 10 else 4
    return queue, min(19, int(kv * 20)), min(3, int(hit * 4))


def test_there_are_400_classes() -> None:
    assert STRATA == 400
    queued, kv, hits = np.meshgrid([0, 1, 3, 6, 11], (np.arange(20) + 0.5) / 20, (np.arange(4) + 0.5) / 4)
    rows = loads(queued.ravel().tolist(), kv.ravel().tolist(), hits.ravel().tolist())
    assert sorted(strata(rows).tolist()) == list(range(400))


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 64), st.integers(0, 64)), min_size=1, max_size=50))
def test_rows_of_a_class_agree_in_queue_kv_and_prefix(cells: list[tuple[int, int, int]]) -> None:
    queued, kv, hits = ([float(cell[at]) for cell in cells] for at in range(3))
    found = strata(loads(queued, [each / 64 for each in kv], [each / 64 for each in hits])).tolist()
    expected = [plain_class(q, k / 64, h / 64) for q, k, h in zip(queued, kv, hits, strict=True)]
    assert all((found[i] == found[j]) == (expected[i] == expected[j]) for i in range(len(found)) for j in range(i))


@pytest.mark.parametrize(("queued", "same"), [((1, 2), True), ((2, 3), False), ((5, 6), False), ((10, 11), False)])
def test_borders_of_the_queue(queued: tuple[int, int], same: bool) -> None:
    first, second = strata(loads(list(queued), [0.5, 0.5], [0.5, 0.5])).tolist()
    assert (first == second) is same


def test_share_outside_0_to_1_belongs_to_the_nearest_class() -> None:
    assert strata(loads([0, 0], [-0.1, 0.0], [1.7, 1.0])).tolist() == [3, 3]


def test_rare_state_outlives_any_number_of_common_ones() -> None:
    store = StratifiedStore(NAMES_BUFFERS)
    store.add(loads([12.0], [0.97], [0.1]))
    for first in range(1, 5001, 1000):
        store.add(loads([0.0] * 1000, [0.1] * 1000, [0.1] * 1000, first))
    rows = store.stored()
    assert rows.ttft_s.tolist() == [0.0, *range(5001 - RING_ROWS, 5001)]
    assert len(store) == 1 + RING_ROWS


def test_store_is_bounded_and_its_memory_follows_its_rows() -> None:
    store = StratifiedStore(NAMES_BUFFERS)
    rng = np.random.default_rng(0)
    for first in range(0, 50_000, 5000):
        queued, kv, hits = rng.integers(0, 15, 5000), rng.random(5000), rng.random(5000)
        store.add(loads(queued.tolist(), kv.tolist(), hits.tolist(), first))
    assert len(store) <= STRATA * RING_ROWS
    assert len(store) <= store.allocated <= 2 * len(store) + 64 * STRATA


def test_features_without_a_class_are_one_class() -> None:
    table = np.arange(6, dtype=np.float32)[:, None]
    assert strata(rows_of(("prompt_tokens",), table, np.arange(6.0))).tolist() == [0] * 6
