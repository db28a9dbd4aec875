"""Routers and requests as tests write them, and the moves of a request's life in short."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from gorgo.core.fleet.replica import ReplicaSpec
from gorgo.core.limits import RouterLimits
from gorgo.core.messages.actions import Action, Dispatch, Reject
from gorgo.core.messages.request import AttemptResult, Outcome, RouteRequest
from gorgo.core.policy.weights import Weights
from gorgo.core.router import Router
from gorgo.policies.registry import make_policy


def specs(*names: str) -> list[ReplicaSpec]:
    return [ReplicaSpec(name, region=f"region-of-{name}") for name in names]


def timed(name: str, region: str | None = None, *, max_running_requests: int | None = None) -> ReplicaSpec:
    """A replica that prefills 1,000 tokens a second, and nothing else."""
    return ReplicaSpec(
        name,
        region or f"region-of-{name}",
        max_running_requests=max_running_requests,
        prefill_base_s=0.0,
        prefill_tokens_per_s=1000.0,
        prefill_kappa_s=0.0,
    )


def make_router(
    *names: str,
    policy: str = "nearest",
    replicas: Sequence[ReplicaSpec] | None = None,
    limits: RouterLimits | None = None,
) -> Router:
    """A router whose replicas are the nearer the earlier they are named: `nearest` takes the first that may serve."""
    router = Router(
        replicas or specs(*names),
        make_policy(policy),
        rng=np.random.default_rng(0),
        boot_id="boot",
        limits=limits or RouterLimits(),
    )
    for rank, spec in enumerate(replicas or specs(*names)):
        router.replicas.on_probe(spec.name, 0.01 * (rank + 1), now=0.0)
    return router


def blocks_of(*words: int) -> bytes:
    """A fingerprint: block k of two prompts is equal when all words up to k are."""
    return b"".join(hash(words[: end + 1]).to_bytes(8, "little", signed=True) for end in range(len(words)))


def a_request(
    request_id: str = "r",
    *,
    prompt_tokens: int = 256,
    blocks: bytes = b"",
    received_s: float = 0.0,
    model: str | None = None,
    pinned_replica: str | None = None,
    streamed: bool = True,
    body_bytes: int = 0,
    client: str | None = None,
) -> RouteRequest:
    return RouteRequest(
        request_id,
        received_s,
        prompt_tokens,
        blocks,
        64.0,
        1,
        model=model,
        pinned_replica=pinned_replica,
        streamed=streamed,
        body_bytes=body_bytes,
        client=client,
    )


def submitted(router: Router, request: RouteRequest, *, now: float) -> list[Action]:
    """All actions of `submit`, the request's own last."""
    own, others = router.submit(request, now=now)
    return [*others, own]


def finished(router: Router, attempt_id: str, outcome: Outcome, *, now: float) -> list[Action]:
    """All actions of `on_finish`, the request's own first."""
    own, others = router.on_finish(attempt_id, outcome, now=now)
    return others if own is None else [own, *others]


def dispatched(actions: Sequence[Action]) -> Dispatch:
    (action,) = actions
    assert isinstance(action, Dispatch), action
    return action


def rejected(actions: Sequence[Action]) -> Reject:
    (action,) = actions
    assert isinstance(action, Reject), action
    return action


COMPLETED = Outcome(AttemptResult.COMPLETED, status=200)
FAILED = Outcome(AttemptResult.FAILED_BEFORE_CONTENT, status=500)
BUSY = Outcome(AttemptResult.BUSY, status=503)
GONE = Outcome(AttemptResult.CLIENT_DISCONNECTED)
BROKEN = Outcome(AttemptResult.FAILED_AFTER_CONTENT, status=200)
REFUSED = Outcome(AttemptResult.UPSTREAM_4XX, status=400)


PROMPT = blocks_of(1, 2, 3, 4)


def load_of(router: Router, name: str) -> tuple[int, int, int]:
    (row,) = [row for row in router.view.snapshots(now=0.0) if row.name == name]
    return row.in_flight_requests, row.in_flight_tokens, row.queued_prefill_tokens


def believed(router: Router, blocks: bytes = PROMPT) -> list[float]:
    return list(router.index.match(blocks, 3))


def fail_on(router: Router, outcome: Outcome, times: int, *, now: float = 1.0) -> None:
    for index in range(times):
        attempt = dispatched(submitted(router, a_request(f"f{index}", pinned_replica="a"), now=now)).attempt_id
        router.on_finish(attempt, outcome, now=now)


def set_weights(router: Router, values: Mapping[str, float], *, now: float = 0.0) -> Weights:
    """Replace the values named, as the next version."""
    weights = router.settings.weights.changed(router.settings.policy.weight_specs, values)
    router.settings.set_weights(weights, now=now)
    return weights


def set_policy(router: Router, name: str, values: Mapping[str, float] | None = None, *, now: float = 0.0) -> Weights:
    """Route by another policy, by its defaults and `values`, as the next version."""
    policy = make_policy(name)
    weights = Weights.of(policy.weight_specs, values, version=router.settings.weights.version + 1)
    router.settings.set_policy(policy, weights, now=now)
    return weights
