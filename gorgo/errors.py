"""Every error that GORGO raises on purpose, with the fact its reader needs.

Owns the exception types; leaves their rendering (HTTP status, exit code, text) to the shells.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class GorgoError(Exception):
    """Base of all errors raised on purpose."""


class InputError(GorgoError):
    """Base of errors that another command line or file avoids; commands end with exit code 2."""


class ConfigError(InputError):
    """A file that configures GORGO is not as expected. The message lists each place, line, value and expectation."""


class InvalidValueError(ConfigError):
    """One value is not as expected: a file or a variable that it names, or the value itself."""

    def __init__(self, place: str, found: str, expected: str) -> None:
        super().__init__(f"{place}: {found}; expected {expected}")
        self.found = found
        self.expected = expected


class ModelFileError(InvalidValueError):
    """A file of a trained model is damaged, foreign, or of another kind or features than those wanted."""


class TraceError(InputError):
    """A trace file has a line that cannot be replayed. The message names the file and the line."""


class FetchError(GorgoError):
    """A data set could not be fetched. The message says from where, why, and how to get it by hand."""


class ReplayError(GorgoError):
    """A replay cannot begin: the router does not answer or names no model."""


class CalibrationError(GorgoError):
    """An engine or a log does not give enough times for a profile. The message names what is missing."""


class FleetError(GorgoError):
    """A process of the demo's fleet did not start or did not stay up. The message ends with what it last said."""


class BadRequest(GorgoError):  # noqa: N818 - the field's own word for a 400
    """A client's body cannot be read. The message says what was expected and is safe to send back."""


class BadReport(GorgoError):  # noqa: N818 - as BadRequest
    """A report of another router cannot be read. The message names the place and what was expected."""


class OtherFormat(BadReport):
    """A report of another router has records of another version."""


class UnknownReplica(InputError, LookupError):  # noqa: N818 - reads as the fact
    """No replica of that name is in the fleet."""


class TooManyReplicas(GorgoError):  # noqa: N818
    """As many replicas are registered as may be."""


class NoConfigFile(GorgoError):  # noqa: N818
    """The proxy follows no configuration file."""


class ReplicaInFile(GorgoError):  # noqa: N818
    """The configuration file names the replica, so the admin API neither registers nor removes it."""


class UnknownPolicy(InputError, LookupError):  # noqa: N818
    """No policy of that name is registered."""


class UnknownProfile(InputError, LookupError):  # noqa: N818
    """No engine profile of that name is in the table."""


class UnknownFleet(InputError, LookupError):  # noqa: N818
    """No fleet of that name is in the table."""


class UnknownScenario(InputError, LookupError):  # noqa: N818
    """No scenario of that name is in the table."""


class ScenarioError(InputError):
    """A scenario or a fault does not fit the fleet. The message says what it needs and what there is."""


class WeightsError(InputError, ValueError):
    """Weights that the policy does not have, or outside their box."""


class TunerError(GorgoError, ValueError):
    """An optimizer, a campaign or their saved state was given what cannot be. The message names it."""


class WeightsFrozen(GorgoError):  # noqa: N818 - reads as the fact
    """Somebody has pinned the weights, and they are not changed until they are unfrozen. Says who, when and why."""


class VersionConflict(GorgoError):  # noqa: N818
    """The weights are no longer those that the caller has seen. Says which version is in force."""


class StateError(GorgoError):
    """The proxy's state file cannot be written, so what was to be kept there is not done. Says file and reason."""


class HistoryError(GorgoError):
    """The tuner's history cannot be opened, read or written. The message names the database and what to do."""


class LeadershipLost(GorgoError):  # noqa: N818 - reads as the fact
    """This process may not change weights any more: another tuner may lead. The message says how that was found."""


class ReportError(InputError):
    """A folder has no results to report, or a file in it is damaged. The message names the file and the line."""


class MissingExtra(InputError):  # noqa: N818 - reads as the fact
    """A package of an optional extra is not installed. The message says how to install it."""


class ProxyUnreachable(GorgoError):  # noqa: N818 - reads as the fact
    """A running proxy was to be asked and does not answer."""


class ProxyRefused(GorgoError):  # noqa: N818
    """A running proxy answered with an error; `status` is the HTTP status, None where the answer made no sense."""

    def __init__(self, message: str, *, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status


def closest(word: str, choices: Iterable[str]) -> str:
    """Return a hint at the known word most similar to `word`, or nothing.

    >>> closest("m_rt", ["m_rtt", "m_queue"])
    " (did you mean 'm_rtt'?)"
    """
    near = difflib.get_close_matches(word[:100], list(choices), n=1)
    return f" (did you mean {near[0]!r}?)" if near else ""
