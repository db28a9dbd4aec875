"""What of a configuration protects, and that a file with less of it is refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from gorgo.config.model import ClientRuleConfig, ClientsConfig, Config, ModelConfig
from gorgo.errors import ConfigError
from gorgo.live.reload.reloader import refuse_loss
from tests.live.reload.test_reloader import OLD

RULE = ClientRuleConfig(
    name="team", max_in_flight=2, requests_per_minute=60.0, tokens_per_minute=600.0, allowed_regions=("here",)
)
PROTECTED = replace(
    OLD,
    clients=ClientsConfig(
        keys_file="KEYS", max_in_flight=8, requests_per_minute=600.0, tokens_per_minute=6000.0, rules=(RULE,)
    ),
    models=(ModelConfig(name="m", allowed_regions=("here",)), ModelConfig(name="free")),
)


def without(**clients: Any) -> Config:
    return replace(PROTECTED, clients=replace(PROTECTED.clients, **clients))


LOSSES = {
    "clients.keys_file": without(keys_file=None),
    "clients.max_in_flight": without(max_in_flight=None),
    "clients.requests_per_minute": without(requests_per_minute=None),
    "clients.tokens_per_minute": without(tokens_per_minute=None),
    "the rule of client 'team'": without(rules=()),
    "max_in_flight of client 'team'": without(rules=(replace(RULE, max_in_flight=None),)),
    "requests_per_minute of client 'team'": without(rules=(replace(RULE, requests_per_minute=None),)),
    "tokens_per_minute of client 'team'": without(rules=(replace(RULE, tokens_per_minute=None),)),
    "allowed_regions of client 'team'": without(rules=(replace(RULE, allowed_regions=()),)),
    "allowed_regions of model 'm'": replace(PROTECTED, models=(ModelConfig(name="m"),)),
}


@pytest.mark.parametrize("lost", LOSSES)
def test_a_file_that_protects_less_is_refused_with_what_it_lacks(lost: str) -> None:
    with pytest.raises(ConfigError) as raised:
        refuse_loss(PROTECTED, LOSSES[lost])
    assert f": without {lost}; if that is intended, add `open: true` to `clients`" in str(raised.value)
    intended = replace(LOSSES[lost], clients=replace(LOSSES[lost].clients, open=True))
    refuse_loss(PROTECTED, intended)


def test_everything_that_a_cut_file_lacks_is_listed_at_once() -> None:
    with pytest.raises(ConfigError) as raised:
        refuse_loss(PROTECTED, OLD)
    for lost in ("clients.keys_file", "the rule of client 'team'", "allowed_regions of model 'm'"):
        assert lost in str(raised.value)


def test_a_file_with_as_much_or_more_protection_is_taken() -> None:
    refuse_loss(PROTECTED, PROTECTED)
    refuse_loss(OLD, PROTECTED)
    refuse_loss(PROTECTED, without(keys_file="OTHER", max_in_flight=100))
    refuse_loss(PROTECTED, replace(PROTECTED, models=PROTECTED.models[:1]))
