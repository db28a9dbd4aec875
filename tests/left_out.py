"""The line at the end of a run that says what was skipped, and which command runs it.

A test that ran without a part of it warns with what begins with `NOT RUN`, and the line counts those too.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence

_COMMAND = re.compile(r"`(make [a-z-]+)`")


#: How the warning of a test begins that left out a part of itself.
NOT_RUN = "NOT RUN"


def left_out(reasons: Iterable[str], warnings: Iterable[str] = ()) -> str | None:
    """One line on all skipped tests, and on parts of others; None if nothing was left out.

    >>> left_out(["system test: run by `make test-system`", "PROMETHEUS SKIPPED: no promtool"])
    'SKIPPED 2: 1 run by `make test-system`; 1 need what this machine lacks, see the reasons above'
    """
    said = [_skipped([_COMMAND.search(reason) for reason in reasons])]
    parts = sum(NOT_RUN in warning for warning in warnings)
    if parts:
        said.append(f"{NOT_RUN} in part: {parts}, see the warnings above")
    return "; ".join(filter(None, said)) or None


def _skipped(found: Sequence[re.Match[str] | None]) -> str | None:
    if not found:
        return None
    commands = Counter(command[1] for command in found if command)
    parts = [f"{count} run by `{command}`" for command, count in commands.most_common()]
    lacking = len(found) - commands.total()
    if lacking:
        parts.append(f"{lacking} need what this machine lacks, see the reasons above")
    return f"SKIPPED {len(found)}: {'; '.join(parts)}"
