"""What of a request is outside its client's scope: fields that steer the engine, and models that it cannot have.

The 404 of a model that no replica serves lists the models that the client may use. The other checks are made only where
a protection is configured: without client keys every client is trusted with the engine's own fields, and without a
restricted model any name may be sent.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from gorgo.errors import closest
from gorgo.live.http.errors import HttpError
from gorgo.live.parsing.fields import ENGINE_FIELDS
from gorgo.live.request_options import ClientPolicies
from gorgo.live.state import Routing

#: Models listed in one answer, and characters of the name that the client sent.
MODELS_SHOWN = 10
NAME_SHOWN = 80


def refuse_engine_fields(policies: ClientPolicies, client: str | None, parsed: Mapping[str, Any]) -> None:
    """Raise `HttpError` (400) for a field that steers the engine, unless the client's rule grants it."""
    if client is None:
        return
    found = ENGINE_FIELDS.intersection(parsed)
    if not found:
        return
    rule = policies.clients.get(client)
    for name in sorted(found.difference(() if rule is None else rule.engine_fields)):
        if parsed[name] is not None:
            message = f"{name}: this field steers the engine, and the rule of this client does not grant it"
            raise HttpError(400, "field_not_allowed", message)


def require_known_model(routing: Routing, model: str | None) -> None:
    """Raise `HttpError` (400, 404) for a request without a known model while some model is restricted.

    Replicas without a list of models would serve another spelling of the restricted model, or none, anywhere.
    """
    if not routing.client_policies.models:
        return
    if model is None:
        raise HttpError(400, "invalid_request", "model: expected the name of a model; some are restricted to regions")
    if model not in routing.client_policies.known_models and model not in routing.router.view.models():
        message = f"the model {model[:80]!r} is not known to this proxy, and some are restricted to regions"
        raise HttpError(404, "model_not_found", message)


def unknown_model(routing: Routing, *, name: str, client: str | None, listed: Iterable[object] = ()) -> HttpError:
    """Return the error for `name`. `listed` are models of a list, where the Router knows none."""
    shown = repr(name if len(name) <= NAME_SHOWN else f"{name[:NAME_SHOWN]}...")
    may_use, governing = routing.client_policies.may_use, routing.models.governing
    usable = sorted(
        known
        for model, regions in routing.router.view.models().items()
        if may_use(client=client, model=governing(model, routing.client_policies.models) or model, regions=regions)
        for known in routing.models.names(model)
    ) or [model for model in listed if isinstance(model, str)]
    return HttpError(
        404, "model_not_found", f"no replica serves the model {shown}{closest(name, usable)}; {_listed(usable)}"
    )


def _listed(models: list[str]) -> str:
    if not models:
        return "this client may use no model"
    more = f" and {len(models) - MODELS_SHOWN} more" if len(models) > MODELS_SHOWN else ""
    return f"there are: {', '.join(models[:MODELS_SHOWN])}{more}"
