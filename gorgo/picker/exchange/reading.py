"""A body as a request for the Router: at once where it is quick to read, else in another process.

Owns what has to be waited for: a long body, exact tokens, and a model that no replica is known to serve.
"""

from __future__ import annotations

from collections.abc import Callable

from gorgo.core.messages.request import RouteRequest
from gorgo.live.parsing.fields import BodyFields, read_quick_fields
from gorgo.live.request.parse import ParsedRequest, count_tokens
from gorgo.live.request_options import RequestOptions
from gorgo.picker.state import PickerState

#: Parses a body with its fields. Raises `HttpError`.
Parse = Callable[[bytes, BodyFields], ParsedRequest]


def read_now(
    state: PickerState, route: str, body: bytes, parse: Parse
) -> tuple[ParsedRequest | None, BodyFields | None]:
    """Return the request if nothing has to be waited for, and the fields if they are read. Raises `HttpError`."""
    fields = read_quick_fields(route, body, state.routing.fingerprinter)
    if fields is None:
        return None, None
    if state.routing.prompt_tokens.models or fields.token_ids is not None:
        return None, fields
    request = parse(body, fields)
    return (None if _is_missing(state, request) else request), fields


async def read_later(
    state: PickerState, route: str, body: bytes, fields: BodyFields | None, parse: Parse
) -> ParsedRequest:
    """Return the request after all that it waits for. Raises `HttpError`."""
    if fields is None:
        fields = await state.routing.body_workers.read(route, body)
    fields.exact = await count_tokens(state.routing, route, fields)
    fields.prompt = None  # as large as the body, and needed no more
    request = parse(body, fields)
    model = request.route.model
    if (
        model is None
        or state.routing.router.view.lists(model)
        or not await state.routing.models.find_missing(model, now=state.routing.clock())
    ):
        return request
    return parse(body, fields)


def request_without_prompt(
    request_id: str, route: str, options: RequestOptions, *, client: str | None, received_s: float
) -> RouteRequest:
    """Return a request that any replica may answer: it counts as load, and has no prompt."""
    return RouteRequest(
        request_id,
        received_s,
        prompt_tokens=1,
        blocks=b"",
        block_tokens=1.0,
        prefix_hash=0,
        streamed=False,
        client=client,
        regions=options.regions,
        priority=options.priority,
        idempotent=False,
        route=route,
    )


def _is_missing(state: PickerState, request: ParsedRequest) -> bool:
    """Return whether fresh lists of models could have the request's, which no replica is known to serve."""
    model = request.route.model
    return model is not None and not state.routing.router.view.lists(model) and state.routing.models.may_find(model)
