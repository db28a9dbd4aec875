"""`${NAME}` in values of regions.yaml: the value of an environment variable.

Theory of operation. A value is expanded before its type is read, so that `${PORT}` without quotes can be a number, and
never again afterwards. Keys are not expanded. `${NAME:-text}` is `text` where the variable is unset or empty; `$$` is a
dollar sign; any other dollar sign stands for itself. The expanded value may be secret: no message shows it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

#: A file has few; the bound is on what a small file with a long variable can grow to.
MAX_EXPANDED = 1024 * 1024
EXPECTED = "${NAME}, ${NAME:-default}, or $$ for a dollar sign"

_REFERENCE = re.compile(r"\$(?:\$|\{(?P<name>[A-Za-z_][A-Za-z0-9_]{0,127})(?::-(?P<default>[^}]*))?\}|(?P<open>\{))")


class VariableError(ValueError):
    """A reference that cannot be expanded; `expected` says what can."""

    def __init__(self, found: str, expected: str) -> None:
        super().__init__(found)
        self.found = found
        self.expected = expected


class UnsetVariableError(VariableError):
    """A variable that is not set, without a default."""


class Variables:
    """The environment as one file uses it.

    Parameters
    ----------
    environ:
        The variables.

    Example
    -------
    >>> variables = Variables({"US": "10.0.0.5"})
    >>> variables.expand("http://${US}:${PORT:-30000}"), sorted(variables.used)
    ('http://10.0.0.5:30000', ['PORT', 'US'])
    """

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._environ = environ
        self._left = MAX_EXPANDED
        #: Names in the file, with a value or a default.
        self.used: set[str] = set()

    def expand(self, text: str) -> str:
        """Return `text` with its references replaced. Raises `VariableError`."""
        expanded = _REFERENCE.sub(self._value, text)
        self._left -= len(expanded)
        if self._left < 0:
            raise VariableError("values of variables that are too long", f"at most {MAX_EXPANDED:,} characters in all")
        return expanded

    def _value(self, match: re.Match[str]) -> str:
        if match["open"]:
            raise VariableError("'${' without the name of a variable and '}'", EXPECTED)
        name = match["name"]
        if name is None:
            return "$"
        self.used.add(name)
        value, default = self._environ.get(name), match["default"]
        if default is not None:
            return value or default
        if value is None:
            raise UnsetVariableError(
                f"the environment variable {name} is not set", f"it to be set, or ${{{name}:-default}}"
            )
        return value


def has_reference(text: str) -> bool:
    """Return whether `text` may change when it is expanded."""
    return "${" in text or "$$" in text
