"""The line at the end of a run that says what was skipped, and which command runs it."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable

_COMMAND = re.compile(r"`(make [a-z-]+)`")


def left_out(reasons: Iterable[str]) -> str | None:
    """One line on all skipped tests; None if there are none.

    >>> left_out(["system test: run by `make test-system`", "PROMETHEUS SKIPPED: no promtool"])
    'SKIPPED 2: 1 run by `make test-system`; 1 need what this machine lacks, see the reasons above'
    """
    found = [_COMMAND.search(reason) for reason in reasons]
    if not found:
        return None
    commands = Counter(command[1] for command in found if command)
    parts = [f"{count} run by `{command}`" for command, count in commands.most_common()]
    lacking = len(found) - commands.total()
    if lacking:
        parts.append(f"{lacking} need what this machine lacks, see the reasons above")
    return f"SKIPPED {len(found)}: {'; '.join(parts)}"
