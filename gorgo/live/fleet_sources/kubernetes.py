"""Sources in a Kubernetes cluster: pods by label, EndpointSlices of a Service, an InferencePool.

Owns the requests that follow a collection of the API (`Collection`), and the source made of them (`KubernetesSource`).
Leaves the replicas of objects to `gorgo.fleet_sources.kubernetes`. A result is published when every collection that it
needs was listed once, and after each change of one.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Mapping, Sequence
from time import monotonic
from typing import Generic, TypeVar
from urllib.parse import quote

from gorgo.config.fleet import FleetSourceConfig
from gorgo.fleet_sources.documents import Document
from gorgo.fleet_sources.entries import Found
from gorgo.fleet_sources.kubernetes import (
    SERVICE_LABEL,
    EndpointSlice,
    InferencePool,
    Pod,
    found_pods,
    found_slices,
    read_node,
    read_pod,
    read_pool,
    read_slice,
    selector_text,
)
from gorgo.fleet_sources.list_watch import PAGE_OBJECTS, WATCH_S, ListPage, ListWatch, OpenWatch, Pause
from gorgo.live.fleet_sources.api_client import ApiClient, ApiError, api_url, own_namespace
from gorgo.live.fleet_sources.reports import Reports

# One collection of the API followed until cancelled: the steps of `ListWatch`, done over HTTP.


T = TypeVar("T")

#: Of a collection without a selector.
NO_SELECTOR: Mapping[str, str] = {}


class Collection(Generic[T]):
    """One collection.

    Parameters
    ----------
    read:
        Returns the parts of an object that matter.
    path, selector:
        Of the collection; `selector` has `labelSelector` or `fieldSelector`.
    on_progress:
        Called after each step and each line.
    """

    def __init__(
        self,
        client: ApiClient,
        read: Callable[[Document], T],
        path: str,
        on_progress: Callable[[], None],
        selector: Mapping[str, str] = NO_SELECTOR,
        *,
        spread: Callable[[], float] = random.random,
    ) -> None:
        self.state = ListWatch(read)
        self._client = client
        self._path = path
        self._selector = selector
        self._on_progress = on_progress
        self._spread = spread

    async def run(self) -> None:
        """Follow the collection until cancelled."""
        while True:
            step = self.state.next_step(self._spread())
            try:
                if isinstance(step, Pause):
                    await asyncio.sleep(step.seconds)
                    continue
                await (self._list(step) if isinstance(step, ListPage) else self._watch(step))
            except ApiError as error:
                if error.status:
                    self.state.on_status(error.status, str(error))
                else:
                    self.state.on_failure(str(error))
            self._on_progress()

    async def _list(self, step: ListPage) -> None:
        params = {**self._selector, "limit": str(PAGE_OBJECTS)}
        if step.continue_token:
            params["continue"] = step.continue_token
        self.state.on_page(await self._client.page(self._path, params))

    async def _watch(self, step: OpenWatch) -> None:
        started_s = monotonic()
        params = {**self._selector, "watch": "true", "allowWatchBookmarks": "true"}
        params |= {"resourceVersion": step.version, "timeoutSeconds": str(WATCH_S)}
        async with self._client.lines(self._path, params) as lines:
            self.state.on_watch_open()
            self._on_progress()
            try:
                async for line in lines:
                    if not self.state.on_line(line):
                        return
                    self._on_progress()
            except ApiError as error:
                if not error.broken:
                    raise
        # One that broke is not a server that is down: the next request shows that.
        self.state.on_end(monotonic() - started_s)


_AnyCollection = Collection[Pod] | Collection[str] | Collection[EndpointSlice] | Collection[InferencePool]


class KubernetesSource:
    """One source.

    Parameters
    ----------
    reports:
        Get results and failures.
    environ:
        Has the address of the API server in a cluster. Without one, and without `api.url`, `ConfigError` is raised.
    """

    def __init__(self, config: FleetSourceConfig, reports: Reports, environ: Mapping[str, str]) -> None:
        self._config = config
        self._reports = reports
        self._client = ApiClient(api_url(config.api, environ), config.api)
        self._namespace = quote(config.namespace or own_namespace(environ), safe="")
        self._nodes: Collection[str] | None = None
        if config.node_regions:
            self._nodes = Collection(self._client, read_node, "/api/v1/nodes", self._progress)
        self._slices: Collection[EndpointSlice] | None = None
        self._pool: Collection[InferencePool] | None = None
        self._pods: Collection[Pod] | None = None
        self._pods_task: asyncio.Task[None] | None = None
        self._pods_selector: Sequence[tuple[str, str]] = ()
        #: How many collections of pods there were.
        self._selections = 0
        self._published: tuple[int, ...] = ()
        self._tasks: asyncio.TaskGroup | None = None

    async def run(self) -> None:
        """Follow the source until cancelled."""
        config = self._config
        try:
            async with asyncio.TaskGroup() as self._tasks:
                if self._nodes is not None:
                    self._tasks.create_task(self._nodes.run())
                if config.kind == "endpoint-slices":
                    path = f"/apis/discovery.k8s.io/v1/namespaces/{self._namespace}/endpointslices"
                    selector = {"labelSelector": f"{SERVICE_LABEL}={config.service}"}
                    self._slices = Collection(self._client, read_slice, path, self._progress, selector)
                    self._tasks.create_task(self._slices.run())
                elif config.kind == "pods":
                    self._follow_pods(tuple(sorted(config.selector.items())))
                else:
                    path = f"/apis/inference.networking.k8s.io/v1/namespaces/{self._namespace}/inferencepools"
                    selector = {"fieldSelector": f"metadata.name={config.pool}"}
                    self._pool = Collection(self._client, read_pool, path, self._progress, selector)
                    self._tasks.create_task(self._pool.run())
        finally:
            await self._client.aclose()

    def _follow_pods(self, selector: tuple[tuple[str, str], ...]) -> None:
        """Follow the pods of a selector instead of those of the one before."""
        assert self._tasks is not None, "called by its own tasks"
        if self._pods_task is not None:
            self._pods_task.cancel()
        path = f"/api/v1/namespaces/{self._namespace}/pods"
        chosen = {"labelSelector": selector_text(selector)}
        self._pods = Collection(self._client, read_pod, path, self._progress, chosen)
        self._pods_selector = selector
        self._selections += 1
        self._pods_task = self._tasks.create_task(self._pods.run())

    def _progress(self) -> None:
        """Report the state after a step of any collection."""
        pool = self._current_pool()
        if pool is not None and pool.selector != self._pods_selector:
            self._follow_pods(pool.selector)
        used = self._used(pool)
        errors = [each.state.error for each in used if each.state.error is not None]
        if errors:
            self._reports.fail(errors[0])
        elif any(each.state.synced for each in used):
            self._reports.succeed()
        if not all(each.state.synced for each in used):
            return
        revisions = (self._selections, *(each.state.revision for each in used))
        if revisions != self._published:
            self._published = revisions
            self._reports.report_result(self._found(pool))

    def _current_pool(self) -> InferencePool | None:
        return None if self._pool is None else next(iter(self._pool.state.objects.values()), None)

    def _used(self, pool: InferencePool | None) -> list[_AnyCollection]:
        """Return the collections that a result needs now."""
        if self._pool is not None and pool is None:
            return [self._pool]
        return [each for each in (self._nodes, self._slices, self._pool, self._pods) if each is not None]

    def _found(self, pool: InferencePool | None) -> Found:
        config = self._config
        regions = None if self._nodes is None else self._nodes.state.objects
        if self._slices is not None:
            found = found_slices(self._slices.state.objects.values(), config, regions)
            return Found(found.replicas, {**found.rejected, **self._slices.state.rejected})
        if self._pool is not None and pool is None:
            missing = {str(config.pool): f"inferencepool {self._namespace}/{config.pool} is missing"}
            return Found((), self._pool.state.rejected or missing)
        assert self._pods is not None, "followed since the selector is known"
        ports: tuple[int | str, ...] = (config.port or config.port_name or 0,) if pool is None else pool.ports
        found = found_pods(self._pods.state.objects.values(), ports, config.replica, regions)
        return Found(found.replicas, {**found.rejected, **self._pods.state.rejected})
