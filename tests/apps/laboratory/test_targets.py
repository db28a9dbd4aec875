from __future__ import annotations

from gorgo.apps.laboratory import all_targets, groups
from gorgo.apps.laboratory.show import TITLES
from gorgo.apps.laboratory.target import FIGURES, Target
from gorgo.apps.laboratory.targets import BASELINES
from gorgo.apps.simulate.run import policy_of
from gorgo.sim.scenario import find_scenario


def limits(targets: list[Target], group: str, figure: str) -> list[float]:
    return [target.at_most for target in targets if (target.group, target.figure) == (group, figure)]


def test_every_target_names_what_there_is() -> None:
    for target in all_targets("conversation.jsonl"):
        assert target.figure in FIGURES
        for setting, policy in target.runs():
            assert policy_of(policy).name == policy
            assert find_scenario(setting.scenario).name == setting.scenario


def test_every_group_has_a_title() -> None:
    assert list(TITLES) == groups()


def test_the_baselines_are_the_paper_s_four() -> None:
    assert BASELINES == ("least-load", "least-request", "prefix-cache", "simple-session-affinity")


def test_more_is_asked_at_high_load() -> None:
    targets = all_targets(None)
    assert limits(targets, "baselines", "p95 TTFT") == [0.90, 0.90, 0.80, 0.80]
    assert limits(targets, "baselines", "p95 E2E") == [1.0, 1.0, 0.90, 0.90]


def test_the_conversation_trace_adds_its_rows_and_widens_the_means() -> None:
    without, with_it = all_targets(None), all_targets("conversation.jsonl")
    assert len(with_it) == len(without) + 3 * 3 + 2 * 3
    for targets, count in ((without, 4), (with_it, 7)):
        means = [target for target in targets if len(target.settings) > 1]
        assert [len(target.settings) for target in means] == [count] * 3
        assert [target.at_most for target in means] == [0.90, 0.85, 1.03]
