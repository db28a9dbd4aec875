"""The methods that the picker serves on one port, by their full names."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from gorgo.picker.transport.health import Health
from gorgo.picker.transport.streams import CallHandlers, Opener, Output, ServedCall, nothing_open

PROCESS = "/envoy.service.ext_proc.v3.ExternalProcessor/Process"
ACCESS_LOGS = "/envoy.service.accesslog.v3.AccessLogService/StreamAccessLogs"
CHECK = "/grpc.health.v1.Health/Check"
WATCH = "/grpc.health.v1.Health/Watch"


class Services:
    """Opens calls by the name of their method, and ends the open ones before a stop."""

    def __init__(self, openers: Mapping[str, Opener]) -> None:
        self._openers = openers
        self._open: set[ServedCall] = set()

    def open_call(self, method: str, output: Output) -> ServedCall | None:
        """Return a new call; `None` for an unknown method."""
        opener = self._openers.get(method)
        if opener is None:
            return None
        call = ServedCall(method, opener, output)
        self._open.add(call)
        return call

    def close(self, call: ServedCall) -> None:
        """End a call of `open`: its input is over, or its connection lost."""
        self._open.discard(call)
        call.close()

    def release_all(self) -> None:
        """End every open call with OK."""
        for call in tuple(self._open):
            call.release()

    def __len__(self) -> int:
        return len(self._open)


def services(process: Opener, take_access_log: Callable[[bytes], None], health: Health) -> Services:
    """Return the services of a picker.

    `process` opens a call of ext_proc, `take_access_log` takes a message of the access log.
    """
    return Services(
        {
            PROCESS: process,
            # Entries have no answer but the end.
            ACCESS_LOGS: lambda _: CallHandlers(take_access_log, nothing_open),
            CHECK: health.check,
            WATCH: health.watch,
        }
    )
