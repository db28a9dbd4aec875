"""The admin routes that change routing, each one call of `ControlService`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from gorgo.errors import GorgoError, StateError, VersionConflict, WeightsFrozen
from gorgo.live.admin.bodies import Check, is_count, is_flag, is_text, is_weights, json_response, parse_body, read_body
from gorgo.live.control.transactions import ChangeRequest
from gorgo.live.http.errors import HttpError
from gorgo.live.state import Routing

_TEXT: tuple[Check, str] = (is_text, "text of at most 1,000 characters")
_CHANGE_FIELDS: dict[str, tuple[Check, str]] = {
    "expected_version": (is_count, "the version last read, a whole number"),
    "reason": _TEXT,
    "by": _TEXT,
}
_WEIGHTS: dict[str, tuple[Check, str]] = {
    "weights": (is_weights, '{"weights": {NAME: NUMBER}}'),
    "allow_out_of_range": (is_flag, "true, to accept weights outside the policy's range, or false"),
}
_POLICY: dict[str, tuple[Check, str]] = {"policy": (is_text, "the name of a policy")}


class ControlRoutes:
    """The handlers of one running proxy."""

    def __init__(self, routing: Routing) -> None:
        self._routing = routing

    async def weights(self, request: Request) -> Response:  # noqa: ARG002 - a handler's signature
        return json_response(self._weights() | {"history": [row.as_dict() for row in self._routing.control.history]})

    async def set_weights(self, request: Request) -> Response:
        body = await read_body(request)
        parse_body(body, _WEIGHTS | _CHANGE_FIELDS)
        if body.get("weights") is None:
            raise HttpError(400, "invalid_request", 'expected {"weights": {NAME: NUMBER}}')
        await self._routing.control.set_weights(_values(body), _change_request(body))
        return json_response(self._weights())

    async def policy(self, request: Request) -> Response:  # noqa: ARG002 - a handler's signature
        return json_response(self._policy())

    async def set_policy(self, request: Request) -> Response:
        body = await read_body(request)
        parse_body(body, _POLICY | _WEIGHTS | _CHANGE_FIELDS)
        if not isinstance(body.get("policy"), str):
            raise HttpError(400, "invalid_request", 'expected {"policy": NAME, "weights": {NAME: NUMBER}?}')
        await self._routing.control.set_policy(body["policy"], _values(body), _change_request(body))
        return json_response(self._policy())

    async def freeze(self, request: Request) -> Response:
        body = await read_body(request)
        parse_body(body, _POLICY | _WEIGHTS | _CHANGE_FIELDS)
        values = None if body.get("weights") is None else _values(body)
        await self._routing.control.freeze(values, _change_request(body), policy=body.get("policy"))
        return json_response(self._weights())

    async def unfreeze(self, request: Request) -> Response:
        body = await read_body(request)
        parse_body(body, _CHANGE_FIELDS)
        await self._routing.control.unfreeze(_change_request(body))
        return json_response(self._weights())

    def in_force(self) -> dict[str, Any]:
        """Return policy, version, weights and freeze in force."""
        router, control = self._routing.router, self._routing.control
        return {
            "policy": router.settings.policy.name,
            "version": router.settings.weights.version,
            "weights": dict(router.settings.weights),
            "frozen": None if control.frozen is None else control.frozen.as_dict(),
        }

    def refusal(self, error: GorgoError) -> HttpError:
        """Return the error of a refused change."""
        if isinstance(error, WeightsFrozen):
            return HttpError(409, "frozen", str(error), details={"frozen": self.in_force()["frozen"]})
        if isinstance(error, VersionConflict):
            return HttpError(
                409,
                "version_conflict",
                str(error),
                details={"version": self._routing.router.settings.weights.version},
            )
        assert isinstance(error, StateError)
        return HttpError(507, "state_not_written", f"{error}; nothing changed, and routing continues")

    def _weights(self) -> dict[str, Any]:
        router = self._routing.router
        specs = router.settings.policy.weight_specs
        return self.in_force() | {
            "bounds": {spec.name: [spec.low, spec.high] for spec in specs},
            "out_of_range": list(router.settings.weights.out_of_range(specs)),
            "durable": self._routing.control.durable,
        }

    def _policy(self) -> dict[str, Any]:
        policy, shadow = self._routing.router.settings.policy, self._routing.router.settings.shadow
        return self.in_force() | {
            "summary": policy.summary,
            "unit": policy.unit,
            "index": policy.index,
            "shadow": None if shadow is None else shadow.name,
        }


def _values(body: Mapping[str, Any]) -> dict[str, float]:
    return {name: float(value) for name, value in (body.get("weights") or {}).items()}


def _change_request(body: Mapping[str, Any]) -> ChangeRequest:
    return ChangeRequest(
        expected_version=body.get("expected_version"),
        allow_out_of_range=body.get("allow_out_of_range") or False,
        reason=body.get("reason"),
        by=body.get("by"),
    )
