"""The sidecar's output where it cannot be written."""

from __future__ import annotations

import errno
import io

import pytest
from rich.console import Console

from tuner.sidecar.progress import LinePrinter


class FullDisk(io.StringIO):
    refused = 0

    def write(self, _text: str) -> int:
        self.refused += 1
        raise OSError(errno.ENOSPC, "No space left on device")


def test_a_log_on_a_full_disk_loses_lines_and_does_not_end_the_campaign(monkeypatch: pytest.MonkeyPatch) -> None:
    disk = FullDisk()
    printer = LinePrinter()
    monkeypatch.setattr(printer, "_out", Console(file=disk))
    printer.say("generation 1 accepted")
    assert disk.refused
