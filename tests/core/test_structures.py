"""Small structures of the core: back-off, bounded mapping, metrics as data, values made for each request."""

from __future__ import annotations

import ast
import pickle
import re
from dataclasses import asdict, field, fields, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gorgo.core.backoff import backoff_s
from gorgo.core.dispatch import dispatcher, in_flight
from gorgo.core.lru import Lru
from gorgo.core.messages.decision import Decision
from gorgo.core.messages.request import AttemptResult, Outcome, RouteRequest, Sample
from gorgo.core.metric_spec import LabelSpec, label_of
from gorgo.core.record import record
from gorgo.live.logs import Finished
from gorgo.live.request import parse
from gorgo.live.request import record as record_of_exchange

# --- The wait doubles, is bounded, and is never less than half of itself.


FIRSTS = st.floats(0.01, 10.0)


@given(st.integers(1, 10_000), FIRSTS, st.floats(1.0, 1e6))
def test_the_wait_equals_repeated_doubling_to_the_last_digit(failures: int, first_s: float, factor: float) -> None:
    longest_s, wait_s = first_s * factor, first_s
    for _ in range(failures - 1):
        wait_s = min(2.0 * wait_s, longest_s)
    assert backoff_s(failures, first_s=first_s, longest_s=longest_s) == wait_s


@given(st.integers(1, 100), FIRSTS, st.floats(0.0, 1.0, exclude_max=True))
def test_chance_draws_from_the_upper_half_of_the_wait(failures: int, first_s: float, chance: float) -> None:
    whole_s = backoff_s(failures, first_s=first_s, longest_s=60.0)
    assert whole_s / 2.0 <= backoff_s(failures, first_s=first_s, longest_s=60.0, chance=chance) <= whole_s


def test_a_first_wait_above_the_bound_is_cut() -> None:
    assert backoff_s(1, first_s=5.0, longest_s=2.0) == 2.0


# --- The bounded mapping does what a list in the order of use does.


KEYS = st.integers(0, 5)
STEPS = st.lists(st.tuples(st.sampled_from(["put", "use", "get"]), KEYS, st.integers(0, 7)), max_size=60)


@given(STEPS, st.integers(0, 4))
def test_the_longest_unused_entry_is_evicted(steps: list[tuple[str, int, int]], limit: int) -> None:
    entries, twin = Lru[int, int](limit), list[tuple[int, int]]()
    for verb, key, value in steps:
        known = dict(twin).get(key)
        if verb == "put":
            twin = [*(pair for pair in twin if pair[0] != key), (key, value)]
            gone, twin = twin[: max(0, len(twin) - limit)], twin[max(0, len(twin) - limit) :]
            assert entries.put(key, value) == tuple(key for key, _ in gone)
        elif verb == "use":
            assert entries.use(key) == known
            twin.sort(key=lambda pair: pair[0] == key)
        else:
            assert entries.get(key) == known
        assert list(entries.items()) == twin
        entries.check()


@given(STEPS, st.integers(0, 9))
def test_a_bound_on_weight_evicts_until_the_new_entry_fits(steps: list[tuple[str, int, int]], limit: int) -> None:
    entries, twin = Lru[int, int](limit, weigh=abs), list[tuple[int, int]]()
    for _, key, value in steps:
        twin = [*(pair for pair in twin if pair[0] != key), (key, value)]
        gone = []
        while sum(value for _, value in twin) > limit:
            gone.append(twin.pop(0)[0])
        assert entries.put(key, value) == tuple(gone)
        assert list(entries.items()) == twin
        entries.check()


def test_an_entry_heavier_than_the_limit_leaves_the_mapping_empty() -> None:
    entries = Lru[str, bytes](10, weigh=len)
    entries.put("a", b"small")
    assert entries.put("b", b"more than ten") == ("a", "b")
    assert not entries


LABELS = (
    LabelSpec("replica", (), "of any metric", bound="of the fleet"),
    LabelSpec("state", ("up", "down"), "of two metrics", values=("on", "off")),
    LabelSpec("state", ("other",), "of another", values=("a", "b", "c")),
)


@pytest.mark.parametrize(
    ("name", "label", "meaning"),
    [
        ("up", "replica", "of any metric"),
        ("other", "replica", "of any metric"),
        ("down", "state", "of two metrics"),
        ("other", "state", "of another"),
    ],
)
def test_a_label_is_that_of_its_metric_or_of_all(name: str, label: str, meaning: str) -> None:
    assert label_of(name, label, LABELS).meaning == meaning


def test_a_label_has_as_many_values_as_are_known_unless_its_bound_is_another() -> None:
    assert [spec.at_most for spec in LABELS] == ["of the fleet", "2", "3"]


# --- Values that are made for each request.


@record
class Pair:
    left: int
    right: list[int] = field(default_factory=list)


def test_a_record_is_a_dataclass_with_slots() -> None:
    assert Pair(1) == Pair(1, [])
    assert asdict(replace(Pair(1), left=2)) == {"left": 2, "right": []}
    assert not hasattr(Pair(1), "__dict__")


def test_a_field_without_a_hash_is_compared_all_the_same() -> None:
    @record
    class Labelled:
        name: str
        labels: dict[str, str] = field(default_factory=dict, hash=False)

    assert hash(Labelled("a")) == hash(Labelled("a", {"b": "c"}))
    assert Labelled("a") != Labelled("a", {"b": "c"})
    assert repr(Labelled("a")) == "Labelled(name='a', labels={})"


@pytest.mark.parametrize("hidden", [{"repr": False}, {"compare": False}])
def test_what_a_struct_cannot_leave_out_is_refused(hidden: dict[str, Any]) -> None:
    class Hiding:
        name: str = field(default="", **hidden)

    with pytest.raises(TypeError, match="field 'name' of a record: expected one that is compared and shown"):
        record(Hiding)


def test_equal_records_have_one_hash() -> None:
    assert hash(Outcome(AttemptResult.BUSY, status=503)) == hash(Outcome(AttemptResult.BUSY, status=503))


def test_a_record_reaches_another_process() -> None:
    outcome = Outcome(AttemptResult.COMPLETED, status=200, cached_tokens=7)
    assert pickle.loads(pickle.dumps(outcome)) == outcome


def test_type_checkers_take_a_record_for_frozen() -> None:
    declared = record.__dataclass_transform__  # type: ignore[attr-defined]
    assert {**declared, **declared["kwargs"]}["frozen_default"]  # Python 3.11 has it among the others


# --- Values with many fields are made by position, and each line names its field: by its last word, or in a comment.


MADE = [
    (Decision, dispatcher),
    (Sample, in_flight),
    (RouteRequest, parse),
    (Finished, record_of_exchange),
]


@pytest.mark.parametrize(("kind", "module"), MADE)
def test_arguments_by_position_are_in_the_order_of_the_fields(kind: Any, module: Any) -> None:
    source = Path(module.__file__).read_text()
    calls = [each for each in ast.walk(ast.parse(source)) if isinstance(each, ast.Call)]
    (call,) = [each for each in calls if isinstance(each.func, ast.Name) and each.func.id == kind.__name__]
    lines = [source.splitlines()[each.end_lineno - 1] for each in call.args if each.end_lineno is not None]
    assert [_named(line) for line in lines] == [each.name for each in fields(kind)]
    assert not call.keywords


def _named(line: str) -> str:
    found = re.search(r"(?:# |\.|^ *)(\w+),?$", line)
    assert found is not None, line
    return found[1].lstrip("_")
