"""What a failed command says about the store, in one of a few words."""

from __future__ import annotations

from gorgo.live.telemetry.peer_table import StoreFault


def fault_of(error: Exception) -> StoreFault:
    """Return the kind of a failure."""
    from redis import exceptions

    # Before `ConnectionError`, of which some of them are.
    if isinstance(error, exceptions.OutOfMemoryError) or str(error).startswith("MISCONF"):
        return "full"
    refusals = exceptions.AuthenticationError, exceptions.AuthorizationError, exceptions.NoPermissionError
    if isinstance(error, (*refusals, exceptions.AuthenticationWrongNumberOfArgsError)):
        return "refused"
    if isinstance(error, exceptions.BusyLoadingError | exceptions.ReadOnlyError | exceptions.ClusterDownError):
        return "not_ready"
    if isinstance(error, exceptions.TimeoutError | TimeoutError):
        return "slow"
    if isinstance(error, exceptions.ConnectionError | OSError):
        return "unreachable"
    return "error"
