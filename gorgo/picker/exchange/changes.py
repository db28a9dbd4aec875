"""What of a request is changed for its replica: destination, headers, key, and the model's name in the body.

The rules are the proxy's: a replica gets the headers that `live.http.headers` forwards, and Envoy's own.
"""

from __future__ import annotations

from collections.abc import Sequence

from gorgo.core.messages.actions import Dispatch
from gorgo.live.http.headers import Header, RequestHeaders, find, upstream_headers
from gorgo.live.upstream.target import Target
from gorgo.picker.exchange.lifetime import PickerExchange
from gorgo.picker.exchange.pending import PendingRequest
from gorgo.picker.protocol.answers import EndpointChoice, Labels
from gorgo.picker.state import PickerState

#: Headers that Envoy frames the request by, or sets itself.
_FRAMING = frozenset({b"host", b"content-length", b"transfer-encoding", b"te", b"connection", b"upgrade", b"via"})
_ENVOYS = (b"x-envoy-", b"x-forwarded-")


def choose(state: PickerState, pending: PendingRequest, exchange: PickerExchange) -> EndpointChoice:
    """Return the choice for a dispatched request."""
    target, dispatch, request = exchange.target, exchange.dispatch, pending.request
    model = None if request is None else request.route.model
    name = None if model is None else state.routing.models.engine_name(dispatch.replica, model)
    same = (each for each in dispatch.fallbacks if _gets_the_same(state, target, each, name, model))
    destination = ",".join(filter(None, map(state.endpoints.address, (dispatch.replica, *same))))
    set_headers, removed = _headers(state, pending, exchange)
    body, adds_usage = None, False
    if request is not None:
        adds_usage = target.request_usage and request.adds_usage
        sent = request.body_for(name, with_usage=target.request_usage)
        body = None if sent is request.body else sent
    labels = labels_of(dispatch)
    return EndpointChoice(destination, exchange.exchange_id, set_headers, removed, body, adds_usage, labels)


def labels_of(dispatch: Dispatch) -> Labels:
    """Return what clients see of a decision, as the proxy shows it."""
    decision = dispatch.decision
    version = str(decision.weights_version)
    return (
        *(("replica", dispatch.replica), ("region", dispatch.region)),
        *(("policy", decision.policy), ("weights-version", version)),
    )


def _gets_the_same(state: PickerState, target: Target, replica: str, name: str | None, model: str | None) -> bool:
    """Return whether Envoy may send to `replica` what it sends to `target`: one body, and one key."""
    other = state.replicas.targets.get(replica)
    return (
        other is not None
        and other.secrets.api_key == target.secrets.api_key
        and other.request_usage == target.request_usage
        and (model is None or state.routing.models.engine_name(replica, model) == name)
    )


def _headers(
    state: PickerState, pending: PendingRequest, exchange: PickerExchange
) -> tuple[list[Header], tuple[bytes, ...]]:
    """Return the headers to set, and the names of those to remove."""
    headers, api_key = pending.head.headers, exchange.target.api_key
    removed = _withheld(headers, state.live.passed_headers, has_key=api_key is not None)
    changed: list[Header] = []
    identity = (b"x-request-id", pending.request_id.encode("ascii"))
    if identity not in pending.head.varying:
        changed.append(identity)
    if api_key is not None:
        changed.append((b"authorization", b"Bearer " + api_key.encode("latin-1")))
    trace = pending.record.trace
    if trace is not None:
        changed = trace.carry(changed, exchange.dispatch.attempt_id)
        # What is set anew is replaced without that.
        names = {name for name, _ in headers}.difference(name for name, _ in changed)
        removed = (*removed, *(name for name in trace.dropped if name in names))
    return changed, (*removed, *pending.head.removed)


def _withheld(headers: Sequence[Header], passed: frozenset[bytes], *, has_key: bool) -> tuple[bytes, ...]:
    """Return `_removed`, found once for headers that are repeated: none of those that differ is withheld."""
    if not isinstance(headers, RequestHeaders):
        return _removed(headers, passed, has_key)
    known = headers.findings.withheld
    if known is None or known[0] is not passed or known[1] is not has_key:
        known = passed, has_key, _removed(headers, passed, has_key)
        if find(headers, b"connection") is None:  # it names others, also those that differ
            headers.findings.withheld = known
    return known[2]


def _removed(headers: Sequence[Header], passed: frozenset[bytes], has_key: bool) -> tuple[bytes, ...]:
    """Return the names of headers that the replica does not get, as the proxy does not forward them."""
    forwarded = upstream_headers(headers, request_id="", api_key="" if has_key else None, passed=passed)
    retained = {name for name, _ in forwarded}
    names = dict.fromkeys(name for name, _ in headers)
    return tuple(
        name for name in names if name not in retained and name not in _FRAMING and not name.startswith(_ENVOYS)
    )
