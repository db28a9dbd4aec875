"""The admin routes that change something or read decisions, in groups by what they are about.

Owns the reading of requests and the form of answers. Leaves changes to `ControlService`, and what engines push to
`cache_push`.

- `ControlRoutes` changes routing, each route by one call of `ControlService`.
- `DecisionRoutes` has the last decisions, and all of one request.
- `FleetRoutes` registers, removes and drains replicas, and reloads the file.
- `PushRoutes` takes what engines push of their caches.
"""

from __future__ import annotations

import hmac
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import asdict, replace
from itertools import islice
from math import ceil
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from gorgo.errors import GorgoError, NoConfigFile, StateError, VersionConflict, WeightsFrozen, closest
from gorgo.live.admin.calls import (
    CHALLENGE,
    Check,
    TokenCheck,
    bearer,
    count_of,
    is_count,
    is_flag,
    is_text,
    is_weights,
    json_response,
    parse_body,
    read_body,
)
from gorgo.live.admin.page.snapshot import DecisionStatus, decision_rows
from gorgo.live.cache_push import (
    HASH_BYTES,
    HASHES_PER_S,
    LEAST_HASHES,
    MAX_PACKED_BYTES,
    PACKED,
    CachePush,
    PushSource,
    from_json,
    from_query,
    unpacked,
)
from gorgo.live.control.transactions import ChangeRequest, FleetChanges
from gorgo.live.http.errors import HttpError
from gorgo.live.state import LiveState, Replicas, Routing

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
        return json_response(
            self._weights() | {"history": [change.as_dict() for change in self._routing.control.history]}
        )

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


#: Rows of a list without `limit`.
DEFAULT_ROWS = 100


class DecisionRoutes:
    """The handlers of one running proxy."""

    def __init__(self, routing: Routing) -> None:
        self._routing = routing

    async def newest(self, request: Request) -> Response:
        """Return the last decisions, newest or slowest first, without the terms of their candidates.

        The slowest has the longest time to its first token, or to its end where no first token was seen; what has not
        ended, or was retried, is not among them. Raises `HttpError` for another order.
        """
        order, client = request.query_params.get("order", "newest"), request.query_params.get("client")
        if order not in ("newest", "slowest"):
            raise HttpError(400, "invalid_request", "order: expected newest or slowest")
        limit = count_of(request, "limit", DEFAULT_ROWS)
        replica, policy = request.query_params.get("replica"), request.query_params.get("policy")
        router, now = self._routing.router, self._routing.clock()
        stored = router.view.newest_decisions(router.settings.limits.max_decisions)
        rows = decision_rows(stored, router.samples.newest(len(router.samples)), router.view.snapshots(now=now))
        chosen = [
            row
            for row in rows
            if replica in (None, row.decision.replica)
            and policy in (None, row.decision.policy)
            and client in (None, row.decision.client)
        ]
        if order == "slowest":
            chosen = sorted((row for row in chosen if row.sample is not None), key=_waited_s, reverse=True)
        return json_response({"now_s": now, "decisions": [_summary(row) for row in islice(chosen, limit)]})

    async def of_request(self, request: Request) -> Response:
        """Return every decision of a request, with the terms of each candidate, and its sample once it has ended."""
        request_id = request.path_params["request_id"]
        decisions = self._routing.router.view.decisions(request_id)
        if not decisions:
            most = self._routing.router.settings.limits.max_decisions
            message = f"no stored decision has this request id; the last {most:,} decisions are stored"
            raise HttpError(404, "decision_not_found", message)
        sample = self._routing.router.samples.for_request(request_id)
        return json_response(
            {
                "request_id": request_id,
                "decisions": [decision.as_dict() for decision in decisions],
                "sample": None if sample is None else asdict(sample),
            }
        )


def _waited_s(row: DecisionStatus) -> float:
    sample = row.sample
    if sample is None:
        return 0.0
    return sample.e2e_s if sample.ttft_ms is None else sample.ttft_ms / 1e3


def _summary(row: DecisionStatus) -> dict[str, Any]:
    decision, sample = row.decision, row.sample
    return {
        "request_id": decision.request_id,
        "attempt": decision.attempt,
        "client": decision.client,
        "model": decision.model,
        "decided_s": decision.decided_s,
        "policy": decision.policy,
        "weights_version": decision.weights_version,
        "replica": decision.replica,
        "region": row.region,
        "candidates": len(decision.candidates),
        "fallback": decision.fallback,
        "prompt_tokens": decision.prompt_tokens,
        "estimated_cached_tokens": decision.estimated_cached_tokens,
        "cache_source": decision.cache_source,
        "predicted_ttft_ms": None if decision.predicted_ttft_s is None else decision.predicted_ttft_s * 1e3,
        "ttft_ms": None if sample is None else sample.ttft_ms,
        "status": None if sample is None else sample.status,
        "followed": row.followed,
    }


_DRAIN: dict[str, tuple[Check, str]] = {
    "drain": (is_flag, 'true or false, as in {"drain": false}'),
    "move": (is_flag, 'true or false, as in {"move": true}'),
}


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
        durable = await self._state.routing.control.drain(name, draining)
        views = self._state.routing.router.view.snapshots(now=self._state.routing.clock())
        view = next((replica for replica in views if replica.name == name), None)
        in_flight = 0 if view is None else view.in_flight_requests
        moves = draining and body.get("move") is True
        if moves:
            self._changes.move_streams(name)
        answer = {"replica": name, "drain": draining, "move": moves, "in_flight": in_flight, "durable": durable}
        return json_response(answer)

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


# The routes by which engines push what they cache: evictions each 100 ms, and the whole cache each few seconds.
#
# Each replica has a token of its own, so that an engine can speak for its replica alone. No push token is good for an
# admin route, and the admin token for no push.


#: Packed bodies that are being read, in sum: eight of the largest.
MAX_READ_BYTES = 8 * MAX_PACKED_BYTES

_Apply = Callable[[PushSource, CachePush], Awaitable[None]]


class PushRoutes:
    """The handlers of one running proxy.

    Parameters
    ----------
    wrong:
        Delays and counts wrong tokens.
    """

    def __init__(self, routing: Routing, replicas: Replicas, wrong: TokenCheck) -> None:
        self._routing = routing
        self._replicas = replicas
        self._wrong = wrong
        self._reading = 0

    async def sync(self, request: Request) -> Response:
        return await self._answer(request, self._replicas.pushes.sync)

    async def eviction(self, request: Request) -> Response:
        return await self._answer(request, self._replicas.pushes.evict)

    async def _answer(self, request: Request, apply: _Apply) -> Response:
        allowed = await self._replicas_of(request)
        packed = request.headers.get("content-type", "").partition(";")[0].strip().lower() == PACKED
        if packed:
            push = from_query(request.query_params.multi_items())
            source, size = self._source(push, allowed), _announced(request)
            self._admit(source, size // HASH_BYTES)
            push = replace(push, hashes=unpacked(await self._read(request, size)))
        else:
            push = from_json(await read_body(request))
            source = self._source(push, allowed)
            self._admit(source, len(push.hashes))
        await apply(source, replace(push, model=self._routing.models.canonical(push.model)))
        return json_response({"worker_id": push.replica, "sync_needed": source.needs_snapshot})

    async def _replicas_of(self, request: Request) -> frozenset[str]:
        """Return the replicas that the token speaks for. Raises `HttpError` (401)."""
        tokens = {name: target.secrets.push_token for name, target in self._replicas.targets.items()}
        if not any(tokens.values()):
            message = "pushes are off: no replica has a push_token_env"
            raise HttpError(401, "push_off", message, headers=CHALLENGE)
        given = bearer(request.headers)
        if given is not None:
            # Every token is compared, so that the time shows none of them.
            right = [name for name, token in tokens.items() if token and hmac.compare_digest(given, token.encode())]
            if right:
                return frozenset(right)
            await self._wrong.refuse()
        message = "expected Authorization: Bearer and the token in the replica's push_token_env"
        raise HttpError(401, "unauthorized", message, headers=CHALLENGE)

    def _source(self, push: CachePush, allowed: frozenset[str]) -> PushSource:
        """Return what the replica of a push has pushed. Raises `HttpError` for another one than the token's."""
        targets = self._replicas.targets
        if push.replica not in targets:
            hint = closest(push.replica, allowed)
            message = f"worker_id: no replica is named {push.replica[:60]!r}{hint}"
            raise HttpError(404, "replica_not_found", message)
        if push.replica not in allowed:
            raise HttpError(403, "other_replica", "worker_id: the token is that of another replica")
        listed = self._routing.models.listed(push.replica)
        if push.model is not None and listed and self._routing.models.canonical(push.model) not in listed:
            raise HttpError(404, "model_not_found", f"model: the replica serves {', '.join(listed)}")
        return targets[push.replica].pushes

    def _admit(self, source: PushSource, hashes: int) -> None:
        """Charge a push. Raises `HttpError` (429) for one beyond the rate."""
        wait_s = source.charge(hashes, now=self._routing.clock())
        if wait_s:
            bound = f"at most {HASHES_PER_S} hashes per second, where a push counts as {LEAST_HASHES} at least"
            headers = ((b"retry-after", b"%d" % ceil(wait_s)),)
            raise HttpError(429, "push_rate", f"the replica pushes too much: {bound}", headers=headers)

    async def _read(self, request: Request, size: int) -> bytearray:
        """Return a packed body. Raises `HttpError` (503) while too many bytes are being read."""
        if self._reading + size > MAX_READ_BYTES:
            message = "the proxy reads as many pushes as it may"
            raise HttpError(503, "buffers_full", message, headers=((b"retry-after", b"1"),))
        self._reading += size
        try:
            body = bytearray()
            async for chunk in request.stream():
                body += chunk
            return body
        finally:
            self._reading -= size


def _announced(request: Request) -> int:
    """Return the length of a packed body: memory and rate are bounded before it is read. Raises `HttpError`."""
    announced = request.headers.get("content-length", "")
    if not (announced.isascii() and announced.isdigit()):
        raise HttpError(411, "length_required", f"expected a content-length for a body of {PACKED}")
    size = int(announced[:19])
    if size > MAX_PACKED_BYTES:
        raise HttpError(413, "request_too_large", f"the body is larger than {MAX_PACKED_BYTES} bytes")
    return size
