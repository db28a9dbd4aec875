"""Which policy and which weights win."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from gorgo.cli.policies import compose_policy
from gorgo.config.load import load_config
from gorgo.config.values import BUILT_IN
from gorgo.engines.registry import DIALECTS
from gorgo.errors import ConfigError

SOURCE = Path(__file__).parents[2] / "regions.yaml"
SHIPPED = load_config(SOURCE)
#: The published policy: its weights have a box in which nothing is a preference.
CONFIG = replace(SHIPPED, proxy=replace(SHIPPED.proxy, policy="gorgo"))


def weights_file(folder: Path, text: str) -> Path:
    (folder / "weights.json").write_text(text)
    return folder / "weights.json"


def test_configuration_alone_gives_its_policy_and_weights() -> None:
    config = replace(CONFIG, proxy=replace(CONFIG.proxy, weights={"w_rtt": 0.7}))
    policy, weights = compose_policy(config, source=SOURCE)
    assert (policy.name, weights["w_rtt"], weights["w_queue"], weights.version) == ("gorgo", 0.7, 0.1, 1)


def test_other_policy_does_not_inherit_the_weights_of_the_configured_one() -> None:
    policy, weights = compose_policy(CONFIG, source=SOURCE, policy="random")
    assert (policy.name, dict(weights)) == ("random", {})


def test_weights_file_brings_its_policy(tmp_path: Path) -> None:
    file = weights_file(tmp_path, '{"policy": "gorgo", "weights": {"w_queue": 0.2}}')
    policy, weights = compose_policy(CONFIG, source=SOURCE, weights_file=file)
    assert (policy.name, dict(weights)) == ("gorgo", {"w_rtt": 0.5, "w_queue": 0.2})


def test_weights_file_for_another_policy_is_an_error_not_ignored(tmp_path: Path) -> None:
    file = weights_file(tmp_path, '{"policy": "gorgo", "weights": {}}')
    with pytest.raises(ConfigError, match="for the policy 'gorgo', not for 'random'"):
        compose_policy(CONFIG, source=SOURCE, policy="random", weights_file=file)


@pytest.mark.parametrize(
    ("weights", "expected"),
    [({"w_rtt": 900.0}, r"'w_rtt' is 900.0; expected a number in \[0.05, 200\]"), ({"rtt": 1.0}, "'rtt' is unknown")],
)
def test_weights_outside_their_box_name_the_file(weights: dict[str, float], expected: str) -> None:
    config = replace(CONFIG, proxy=replace(CONFIG.proxy, weights=weights))
    with pytest.raises(ConfigError, match=r"regions\.yaml: proxy.policy and proxy.weights: .*" + expected):
        compose_policy(config, source=SOURCE)


def test_weights_file_outside_the_box_is_an_error_unless_it_says_that_it_means_it(tmp_path: Path) -> None:
    file = weights_file(tmp_path, '{"policy": "gorgo", "weights": {"w_rtt": 900}}')
    with pytest.raises(
        ConfigError, match=r"weights\.json: weight 'w_rtt' is 900.0; expected a number in \[0.05, 200\]"
    ):
        compose_policy(CONFIG, source=SOURCE, weights_file=file)
    file = weights_file(tmp_path, '{"policy": "gorgo", "weights": {"w_rtt": 900}, "widened": true}')
    _, weights = compose_policy(CONFIG, source=SOURCE, weights_file=file)
    assert weights["w_rtt"] == 900.0


def test_weights_that_are_not_finite_are_refused(tmp_path: Path) -> None:
    file = weights_file(tmp_path, '{"policy": "gorgo", "weights": {"w_rtt": NaN}}')
    with pytest.raises(ConfigError, match="'w_rtt' is NaN, no number"):
        compose_policy(CONFIG, source=SOURCE, weights_file=file)


def test_every_engine_of_this_package_that_the_configuration_allows_has_a_dialect_and_the_other_way_round() -> None:
    assert set(BUILT_IN) == set(DIALECTS)


@pytest.mark.parametrize(
    ("shadow", "expected"),
    [
        ("nobody", "no policy named 'nobody'"),
        ("random", "'random' has no cost"),
        ("gorgo-ms", "different prefix indexes .*'gorgo' the published one, 'gorgo-ms' the events one"),
    ],
)
def test_a_shadow_that_cannot_go_with_the_policy_names_the_file(shadow: str, expected: str) -> None:
    config = replace(CONFIG, proxy=replace(CONFIG.proxy, shadow_policy=shadow))
    with pytest.raises(ConfigError, match=r"regions\.yaml: proxy.shadow_policy: .*" + expected):
        compose_policy(config, source=SOURCE)


def test_a_shadow_goes_with_another_policy_of_the_command_line() -> None:
    config = replace(CONFIG, proxy=replace(CONFIG.proxy, shadow_policy="gorgo-ms"))
    assert compose_policy(config, source=SOURCE, policy="random")[0].name == "random"
