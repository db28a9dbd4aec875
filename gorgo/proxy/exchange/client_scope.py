"""What of a request is outside its client's scope: fields that steer the engine, and models without a known name.

Only where a protection is configured: without client keys every client is trusted with the engine's own fields, and
without a restricted model any name may be sent.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gorgo.proxy.http.errors import HttpError
from gorgo.proxy.parsing.fields import ENGINE_FIELDS
from gorgo.proxy.state import RunningProxy


def refuse_engine_fields(state: RunningProxy, client: str | None, parsed: Mapping[str, Any]) -> None:
    """Raise `HttpError` (400) for a field that steers the engine, unless the client's rule grants it."""
    if client is None:
        return
    found = ENGINE_FIELDS.intersection(parsed)
    if not found:
        return
    rule = state.client_policies.clients.get(client)
    for name in sorted(found.difference(() if rule is None else rule.engine_fields)):
        if parsed[name] is not None:
            message = f"{name}: this field steers the engine, and the rule of this client does not grant it"
            raise HttpError(400, "field_not_allowed", message)


def require_known_model(state: RunningProxy, model: str | None) -> None:
    """Raise `HttpError` (400, 404) for a request without a known model while some model is restricted.

    Replicas without a list of models would serve another spelling of the restricted model, or none, anywhere.
    """
    if not state.client_policies.models:
        return
    if model is None:
        raise HttpError(400, "invalid_request", "model: expected the name of a model; some are restricted to regions")
    if model not in state.client_policies.known_models and model not in state.router.models():
        message = f"the model {model[:80]!r} is not known to this proxy, and some are restricted to regions"
        raise HttpError(404, "model_not_found", message)
