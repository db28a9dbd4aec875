"""List and watch of one collection of the Kubernetes API, without input or output.

Theory of operation: the whole collection is listed in pages, then followed by a watch from the version of the list.
Events and bookmarks move that version, so that a watch that ends, or breaks, goes on where it was. A version that the
server does not have any longer (410) needs a new list. Until that list is complete the objects stay as they are: a
server that is down takes nothing away.

A shell takes `next_step`, does it, and reports what came of it by `on_page`, `on_line` or another of these methods.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

import msgspec

from gorgo.core.backoff import backoff_s
from gorgo.fleet_sources.kubernetes import Document, ObjectError, mapping, mappings, number, object_name, text

#: Objects of a page: a pod has about 10 kB, and the event loop reads a megabyte in milliseconds.
PAGE_OBJECTS = 100
#: Objects of a collection: the pods of a fleet of 10,000 replicas, and as many that end.
MAX_OBJECTS = 20_000
#: Length of a watch. A connection that broke silently delays changes by no more.
WATCH_S = 120
#: Pauses after failures: from the first, doubling, to the longest.
FIRST_PAUSE_S = 0.5
LONGEST_PAUSE_S = 30.0
#: A watch of this length was not cut by an error.
SOUND_WATCH_S = 5.0
#: The version in question is not stored any longer.
EXPIRED = 410

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class ListPage:
    """Request a page of the collection; an empty token is the first."""

    continue_token: str


@dataclass(frozen=True, slots=True)
class OpenWatch:
    """Open a watch from a version."""

    version: str


@dataclass(frozen=True, slots=True)
class Pause:
    """Wait."""

    seconds: float


Step = ListPage | OpenWatch | Pause


class ListWatch(Generic[T]):
    """One collection.

    Parameters
    ----------
    read:
        Returns the parts of an object that matter. Raises `ObjectError`.
    max_objects:
        Bound of the collection; more are an error, and the objects stay as they are.
    """

    def __init__(self, read: Callable[[Document], T], *, max_objects: int = MAX_OBJECTS) -> None:
        self._read = read
        self._max_objects = max_objects
        #: By name. Objects that cannot be read are in `rejected` alone.
        self.objects: dict[str, T] = {}
        self.rejected: dict[str, str] = {}
        #: Whether a list was complete once.
        self.synced = False
        #: Why the server's answers could not be used; `None` while they can.
        self.error: str | None = None
        #: Moves with each change of `objects` or `rejected`.
        self.revision = 0
        self._version: str | None = None
        self._token = ""
        self._page_objects: dict[str, T] = {}
        self._page_rejected: dict[str, str] = {}
        self._failures = 0
        self._pause_due = False

    def next_step(self, draw: float) -> Step:
        """Return what to do now. `draw` from [0, 1) spreads the pauses of many proxies."""
        if self._pause_due:
            self._pause_due = False
            return Pause(backoff_s(self._failures, first_s=FIRST_PAUSE_S, longest_s=LONGEST_PAUSE_S, chance=draw))
        return ListPage(self._token) if self._version is None else OpenWatch(self._version)

    # -- a list

    def on_page(self, body: bytes) -> None:
        """Take a page of the list; the last one replaces all objects."""
        document = _decoded(body)
        if not isinstance(document.get("items"), list):
            self.on_failure("the answer is no list of objects")
            return
        for item in mappings(document, "items"):
            self._put(item, self._page_objects, self._page_rejected)
        if len(self._page_objects) + len(self._page_rejected) > self._max_objects:
            self.on_failure(f"more than {self._max_objects} objects; expected a narrower selector", relist=True)
            return
        metadata = mapping(document, "metadata")
        self._token = text(metadata, "continue")
        if self._token:
            return
        version = text(metadata, "resourceVersion")
        if not version:
            self.on_failure("the list has no resourceVersion", relist=True)
            return
        if not self.synced or (self.objects, self.rejected) != (self._page_objects, self._page_rejected):
            self.revision += 1
        self.objects, self.rejected = self._page_objects, self._page_rejected
        self._start_list()
        self._version, self.synced, self.error = version, True, None

    # -- a watch

    def on_watch_open(self) -> None:
        """Record that the server follows the collection."""
        self.error = None

    def on_line(self, line: bytes) -> bool:
        """Take a line of the watch. Return false if the watch is of no more use."""
        event = _decoded(line)
        kind, item = text(event, "type"), mapping(event, "object")
        if kind == "ERROR":
            code, message = number(item, "code"), text(item, "message") or text(item, "reason")
            self.on_status(code or 0, message)
            return False
        version = text(mapping(item, "metadata"), "resourceVersion")
        if kind not in ("ADDED", "MODIFIED", "DELETED", "BOOKMARK") or not version:
            self.on_failure("an event that the watch API does not have", relist=True)
            return False
        self._version, self._failures = version, 0
        if kind == "BOOKMARK":
            return True
        if kind == "DELETED":
            self._remove(item)
        elif not self._follow(item):
            return False
        return True

    def on_end(self, lasted_s: float) -> None:
        """Record the regular end of a watch. One that ends at once counts as a failure, or it would be a fast loop."""
        if lasted_s >= SOUND_WATCH_S:
            self._failures = 0
        else:
            self._failures += 1
            self._pause_due = True

    # -- failures

    def on_status(self, status: int, message: str) -> None:
        """Record an error of the server: of a list, of the start of a watch, or within one."""
        if status == EXPIRED:
            # Of an old version, or of the token of a page: no fault of the server.
            self._failures += 1
            self._pause_due = True
            self._start_list()
        else:
            self.on_failure(f"status {status}: {message}" if message else f"status {status}")

    def on_failure(self, reason: str, *, relist: bool = False) -> None:
        """Record a request without a usable answer. The next one comes after a pause."""
        self.error = reason
        self._failures += 1
        self._pause_due = True
        if relist or self._version is None:
            self._start_list()

    # -- objects

    def _start_list(self) -> None:
        self._version, self._token = None, ""
        self._page_objects, self._page_rejected = {}, {}

    def _put(self, item: Document, objects: dict[str, T], rejected: dict[str, str]) -> None:
        try:
            name = object_name(item)
        except ObjectError as error:
            rejected["-"] = str(error)
            return
        try:
            objects[name] = self._read(item)
            rejected.pop(name, None)
        except ObjectError as error:
            objects.pop(name, None)
            rejected[name] = str(error)

    def _follow(self, item: Document) -> bool:
        name = text(mapping(item, "metadata"), "name")
        before = self.objects.get(name), self.rejected.get(name)
        self._put(item, self.objects, self.rejected)
        if len(self.objects) > self._max_objects:
            del self.objects[name]
            self.on_failure(f"more than {self._max_objects} objects; expected a narrower selector", relist=True)
            return False
        if (self.objects.get(name), self.rejected.get(name)) != before:
            self.revision += 1
        return True

    def _remove(self, item: Document) -> None:
        name = text(mapping(item, "metadata"), "name")
        was_listed = self.objects.pop(name, None) is not None
        if self.rejected.pop(name, None) is not None or was_listed:
            self.revision += 1


def _decoded(body: bytes) -> Document:
    """Return the document, an empty one for text that is none."""
    try:
        document = msgspec.json.decode(body)
    except (msgspec.DecodeError, ValueError, RecursionError):
        return {}
    return document if isinstance(document, dict) else {}
