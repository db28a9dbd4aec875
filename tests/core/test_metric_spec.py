from __future__ import annotations

import pytest

from gorgo.core.metric_spec import LabelSpec, label_of

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
