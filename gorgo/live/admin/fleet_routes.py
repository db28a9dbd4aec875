"""The admin routes that change the fleet: register, remove and drain replicas, reload the file."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from gorgo.errors import GorgoError, NoConfigFile
from gorgo.live.admin.bodies import Check, is_flag, json_response, parse_body, read_body
from gorgo.live.control.fleet_changes import FleetChanges
from gorgo.live.http.errors import HttpError
from gorgo.live.state import LiveState

_DRAIN: dict[str, tuple[Check, str]] = {"drain": (is_flag, 'true or false, as in {"drain": false}')}


class FleetRoutes:
    """The handlers of one running proxy."""

    def __init__(self, state: LiveState, changes: FleetChanges) -> None:
        self._state = state
        self._changes = changes

    async def register(self, request: Request) -> Response:
        body = await read_body(request)
        if self._state.stopping:
            raise HttpError(503, "stopping", "the proxy is stopping")
        done = await self._changes.register(body)
        durable = self._state.routing.control.durable
        answer = {"replica": done.replica, "change": done.change, "warnings": done.warnings, "durable": durable}
        return json_response(answer, 201 if done.change == "added" else 200)

    async def remove(self, request: Request) -> Response:
        parse_body(await read_body(request), {})
        name = request.path_params["name"]
        in_flight = await self._changes.remove(name)
        return json_response(
            {"replica": name, "in_flight": in_flight, "durable": self._state.routing.control.durable}, 202
        )

    async def drain(self, request: Request) -> Response:
        name = request.path_params["name"]
        body = await read_body(request)
        parse_body(body, _DRAIN)
        draining = body.get("drain") is not False
        await self._state.routing.control.drain(name, draining)
        views = self._state.routing.router.view.snapshots(now=self._state.routing.clock())
        view = next((row for row in views if row.name == name), None)
        in_flight = 0 if view is None else view.in_flight_requests
        durable = self._state.routing.control.durable
        return json_response({"replica": name, "drain": draining, "in_flight": in_flight, "durable": durable})

    async def reload(self, request: Request) -> Response:
        parse_body(await read_body(request), {})
        try:
            applied = await self._changes.reload()
        except NoConfigFile as error:
            raise HttpError(409, "no_file", str(error)) from error
        except GorgoError as refusal:
            raise HttpError(400, "config_refused", f"{refusal}\nnothing changed") from refusal
        except TimeoutError:
            message = "regions.yaml is not read yet; the log will have config_reloaded or config_refused"
            raise HttpError(504, "reload_timeout", message) from None
        return json_response(applied.as_dict())
