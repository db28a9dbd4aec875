"""What a verdict says of which nothing was measured."""

from __future__ import annotations

from tuner.campaign.trial import Verdict


def test_a_verdict_without_measurements_has_none_and_is_no_refusal() -> None:
    assert Verdict(False, "no proxy") == Verdict(False, "no proxy", None, None, None, None, False, False)
