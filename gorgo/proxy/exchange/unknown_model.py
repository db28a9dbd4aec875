"""The 404 of a model that no replica serves: it lists the models that the client may use."""

from __future__ import annotations

from collections.abc import Iterable

from gorgo.errors import closest
from gorgo.proxy.http.errors import HttpError
from gorgo.proxy.state import RunningProxy

#: Models listed in one answer, and characters of the name that the client sent.
MODELS_SHOWN = 10
NAME_SHOWN = 80


def unknown_model(state: RunningProxy, *, name: str, client: str | None, listed: Iterable[object] = ()) -> HttpError:
    """Return the error for `name`. `listed` are models of a list, where the Router knows none."""
    shown = repr(name if len(name) <= NAME_SHOWN else f"{name[:NAME_SHOWN]}...")
    may_use, governing = state.client_policies.may_use, state.models.governing
    usable = sorted(
        known
        for model, regions in state.router.models().items()
        if may_use(client=client, model=governing(model, state.client_policies.models) or model, regions=regions)
        for known in state.models.names(model)
    ) or [model for model in listed if isinstance(model, str)]
    return HttpError(
        404, "model_not_found", f"no replica serves the model {shown}{closest(name, usable)}; {_listed(usable)}"
    )


def _listed(models: list[str]) -> str:
    if not models:
        return "this client may use no model"
    more = f" and {len(models) - MODELS_SHOWN} more" if len(models) > MODELS_SHOWN else ""
    return f"there are: {', '.join(models[:MODELS_SHOWN])}{more}"
