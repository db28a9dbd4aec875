"""Names in the store: one stream of reports per run of a router, and the group's members with their last time.

A member is `ROUTER/RUN`: a router that starts anew is another member, so that its reports are numbered from one again.
"""

from __future__ import annotations

from dataclasses import dataclass

from gorgo.core.peers.records import MAX_NAME_BYTES

#: Digits of the run that are enough to tell runs of one router apart.
_RUN_DIGITS = 8
#: The field of an entry.
FIELD = b"report"
#: After so long without a report a router is no member, and its stream is gone, s: a router that takes its place has
#: its history until then.
RETAIN_S = 600.0
#: Between two looks at the members, s.
MEMBERS_S = 1.0


@dataclass(frozen=True, slots=True)
class StoreNames:
    """Keys of one group.

    >>> StoreNames("qwen").stream("eu-1/0123abcd")
    'gorgo:qwen:reports:eu-1/0123abcd'
    """

    group: str

    @property
    def members(self) -> str:
        """Return the sorted set of members, by the time of the store at which each last said that it is there."""
        return f"gorgo:{self.group}:members"

    def stream(self, member: str) -> str:
        """Return the stream of a member, which it alone writes."""
        return f"gorgo:{self.group}:reports:{member}"


def member_name(router: str, boot_id: str) -> str:
    """Return the member of a run of a router."""
    return f"{router}/{boot_id[:_RUN_DIGITS]}"


def read_member(name: bytes) -> str | None:
    """Return a member as the store names it; `None` for what no router has written."""
    text = name.decode("utf-8", "replace")
    return text if text.isprintable() and 0 < len(name) <= MAX_NAME_BYTES else None
