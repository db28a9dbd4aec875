"""Routes beside generation: passed to engines that have them, without a trace in what is estimated of caches."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.proxy.conftest import Start
from tests.proxy.fakes import answer, chat

MESSAGES = [{"role": "user", "content": "word " * 400}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/messages/count_tokens": {"model": "m", "messages": MESSAGES},
    "/tokenize": {"model": "m", "messages": MESSAGES},
    "/v1/rerank": {"model": "m", "query": "a", "documents": ["b " * 400, {"text": "c"}]},
    "/v1/score": {"model": "m", "text_1": "a", "text_2": ["b " * 400, "c"]},
}
#: Those that an engine answers without a prefill.
COUNTING = ("/v1/messages/count_tokens", "/tokenize")
ANSWER = b'{"input_tokens": 401, "tokens": [1, 2]}'


@pytest.mark.parametrize("path", BODIES)
async def test_body_and_answer_pass_unchanged(start: Start, path: str) -> None:
    fleet = await start.fleet([answer(200, ANSWER)])
    body = json.dumps(BODIES[path]).encode()
    for _ in range(5):  # as often as short answers of a chat would be suspected
        given = await fleet.client.post(path, content=body)
        assert (given.status_code, given.content) == (200, ANSWER)
    assert [(seen.path, seen.body) for seen in fleet.replicas[0].seen] == [(path, body)] * 5
    await fleet.idle()
    fleet.check()
    tokens = [sample.prompt_tokens for sample in fleet.state.routing.router.view.newest_decisions(9)]
    assert len(tokens) == 5
    assert all(count == 0 for count in tokens) == (path in COUNTING), "what is counted is not prefilled"


@pytest.mark.parametrize("path", COUNTING)
async def test_a_count_leaves_no_prefix_behind(start: Start, path: str) -> None:
    fleet = await start.fleet([answer(200, ANSWER)])
    await fleet.client.post(path, json=BODIES[path])
    given = await fleet.client.post("/v1/chat/completions", content=chat(messages=MESSAGES))
    assert given.headers["x-gorgo-estimated-cached-tokens"] == "0"


@pytest.mark.parametrize("path", BODIES)
async def test_an_engine_without_the_route_says_so_itself_and_goes_on_with_chats(start: Start, path: str) -> None:
    fleet = await start.fleet([answer(404, b'{"detail": "Not Found"}')] * 4 + [answer(200)])
    given = await fleet.client.post(path, json=BODIES[path])
    assert (given.status_code, given.content) == (404, b'{"detail": "Not Found"}')
    (view,) = fleet.state.routing.router.view.snapshots(now=fleet.state.routing.clock())
    assert view.eligible


@pytest.mark.parametrize("body", [{}, {"query": [], "documents": None}])
async def test_pairs_without_a_text_are_refused_with_their_names(start: Start, body: dict[str, Any]) -> None:
    fleet = await start.fleet([answer(200)])
    for path in ("/v1/rerank", "/v1/score"):
        refused = await fleet.client.post(path, json=body)
        assert refused.status_code == 400
        assert "expected texts in one of query, queries, text_1" in refused.text
    assert fleet.replicas[0].seen == []
