"""What belongs to one client is none of another's: stored responses, hints of prompts, workers, regions of models."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from gorgo.config.model import ClientRuleConfig, ClientsConfig, ModelConfig, RegionConfig
from gorgo.live.parsing.json_body import ENGINE_FIELDS
from tests.proxy.conftest import Running, Start, config_for
from tests.proxy.fakes import answer, chat
from tests.proxy.intruders.test_client_keys import CHAT, KEY, OTHER, entry

#: Also on the HTTP of `gorgo serve --plain`.
IN_BOTH_FORMS = True

RESPONSES = "/v1/responses"


async def two_clients(start: Start, folder: Path, *rules: ClientRuleConfig, body: bytes = b"{}") -> Running:
    replica = await start.replica(answer(200, body))
    path = folder / "clients.keys"
    path.write_text(f"{entry('alice', KEY)}\n{entry('bob', OTHER)}\n")
    config = replace(config_for([replica]), clients=ClientsConfig(keys_file=str(path), rules=rules))
    return await start.proxy(config, [replica])


async def post(
    fleet: Running, key: str | None, fields: Mapping[str, Any] | None = None, *, route: str = CHAT, **more: Any
) -> httpx.Response:
    fields = {**(fields or {}), **more}
    headers = {} if key is None else {"authorization": f"Bearer {key}"}
    if route == CHAT:
        return await fleet.client.post(route, content=chat(**fields), headers=headers)
    return await fleet.client.post(route, json={"model": "m", "input": "hello", **fields}, headers=headers)


async def test_a_client_continues_no_stored_response_of_another(start: Start, tmp_path: Path) -> None:
    fleet = await two_clients(start, tmp_path, body=b'{"id": "resp_1", "object": "response"}')
    assert (await post(fleet, KEY, route=RESPONSES)).status_code == 200
    stolen = await post(fleet, OTHER, route=RESPONSES, previous_response_id="resp_1")
    unknown = await post(fleet, OTHER, route=RESPONSES, previous_response_id="resp_2")
    assert (stolen.status_code, stolen.content) == (404, unknown.content)
    assert (await post(fleet, KEY, route=RESPONSES, previous_response_id="resp_1")).status_code == 200


ESTIMATES = {"x-gorgo-estimated-cached-tokens", "x-gorgo-predicted-ttft-ms", "x-gorgo-replica", "x-gorgo-region"}


async def test_hints_of_prompts_of_others_need_a_rule(start: Start, tmp_path: Path) -> None:
    fleet = await two_clients(start, tmp_path, ClientRuleConfig(name="bob", estimates=True))
    assert not ESTIMATES & set((await post(fleet, KEY)).headers)
    shown = {"x-gorgo-estimated-cached-tokens", "x-gorgo-replica", "x-gorgo-region"}
    assert shown <= set((await post(fleet, OTHER)).headers)


async def test_hints_need_no_rule_without_keys(start: Start) -> None:
    fleet = await start.fleet([answer(200)])
    assert "x-gorgo-estimated-cached-tokens" in (await post(fleet, None)).headers


@pytest.mark.parametrize("field", sorted(ENGINE_FIELDS))
async def test_a_field_that_steers_the_engine_needs_a_rule(start: Start, tmp_path: Path, field: str) -> None:
    fleet = await two_clients(start, tmp_path, ClientRuleConfig(name="bob", engine_fields=(field,)))
    refused = await post(fleet, KEY, {field: 1})
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "field_not_allowed")
    assert field in refused.json()["error"]["message"]
    assert (await post(fleet, KEY, {field: None})).status_code == 200
    assert (await post(fleet, OTHER, {field: 1})).status_code == 200


async def test_a_field_that_steers_the_engine_passes_without_keys(start: Start) -> None:
    fleet = await start.fleet([answer(200)])
    assert (await post(fleet, None, data_parallel_rank=1)).status_code == 200


@pytest.mark.parametrize("name", ["EU-ONLY", "eu-only ", " eu-only", "eu_only", "", None, "\u0435u-only"])
async def test_a_restricted_model_has_one_spelling_and_no_default_leads_round_it(
    start: Start, name: str | None
) -> None:
    near, far = await start.replica(answer(200)), await start.replica(answer(200))
    config = config_for([near, far])
    rows = (config.replicas[0], replace(config.replicas[1], region="there"))
    model = ModelConfig(name="eu-only", allowed_regions=("there",))
    config = replace(
        config,
        regions=(*config.regions, RegionConfig(name="there")),
        replicas=rows,
        models=(model, ModelConfig(name="m")),
    )
    fleet = await start.proxy(config, [near, far])
    refused = await post(fleet, None, model=name)
    assert refused.status_code == (400 if not name else 404)
    assert near.seen == far.seen == []
    for _ in range(3):
        assert (await post(fleet, None, model="eu-only")).headers["x-gorgo-region"] == "there"
    assert (await post(fleet, None, model="m")).status_code == 200
