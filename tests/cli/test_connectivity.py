"""Keys that no header can hold, before anything is asked."""

from __future__ import annotations

import pytest

from gorgo.cli.connectivity import reach_all
from gorgo.config.model import ReplicaConfig


@pytest.mark.parametrize("key", ["CAN\r\nARY", "CAN\x00ARY", "CANAR\u00dd", "CAN\u20ac", " "])
def test_key_that_no_header_can_hold_is_named_by_its_variable_and_not_shown(key: str) -> None:
    replica = ReplicaConfig(name="r", region="a", url="http://127.0.0.1:9", api_key_env="K")
    (found,) = reach_all([replica], environ={"K": key}, timeout_s=1.0)
    assert found.error is not None
    assert "the environment variable K must hold its API key" in found.error
    assert "CAN" not in found.error


def test_name_that_cannot_be_looked_up_is_a_replica_that_is_not_reached() -> None:
    (found,) = reach_all([ReplicaConfig(name="r", region="a", url="http://xn--:9")], environ={}, timeout_s=1.0)
    assert found.error is not None
