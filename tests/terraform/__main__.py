"""`make terraform-check`: every check of terraform/ on one line, whether it ran here, and if not why.

The tests are pytest's; this module only reads their reports. Exit code 1 if one failed.
"""

from __future__ import annotations

import sys

import pytest

_HERE = "tests/terraform"


class Table:
    """Collects one line per check."""

    def __init__(self) -> None:
        self.lines: dict[str, str] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        name = report.nodeid.rpartition("::")[2].removeprefix("test_").replace("_", " ")
        if report.skipped:
            reason = str(report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr)
            self.lines[name] = f"NOT RUN: {reason.removeprefix('Skipped: ')}"
        elif report.failed:
            self.lines[name] = f"FAILED ({report.when})"
        elif report.when == "call":
            self.lines[name] = f"ran, {report.duration:.1f} s"

    def text(self) -> str:
        width = max(map(len, self.lines), default=5)
        return "".join(
            f"{name:<{width}} | {said}\n" for name, said in {"check": "ran, or not and why", **self.lines}.items()
        )


def main() -> int:
    table = Table()
    # Both kinds: what `make test` has, and what needs the provider's plugin or an install.
    code = pytest.main(["-q", "-m", "system or not system", "-p", "no:cacheprovider", _HERE], plugins=[table])
    sys.stdout.write(f"\n{table.text()}")
    return int(code)


if __name__ == "__main__":
    sys.exit(main())
