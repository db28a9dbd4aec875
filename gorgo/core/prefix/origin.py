"""Where knowledge of a replica's cache comes from."""

from __future__ import annotations

from enum import IntEnum


class Origin(IntEnum):
    """A source, the more trusted the greater."""

    #: Another router.
    REMOTE = 0
    #: A report of an engine.
    PUSH = 1
    #: An answer through this router.
    LOCAL = 2
