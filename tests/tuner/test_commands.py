from __future__ import annotations

import errno
import io

from rich.console import Console

from tuner.commands import _print


class FullDisk(io.StringIO):
    refused = 0

    def write(self, _text: str) -> int:
        self.refused += 1
        raise OSError(errno.ENOSPC, "No space left on device")


def test_a_log_on_a_full_disk_loses_lines_and_does_not_end_the_campaign() -> None:
    disk = FullDisk()
    _print(Console(file=disk), "generation 1 accepted")
    assert disk.refused
