"""The quick start of the README, typed: its engines and its proxy, its replay, and what that prints.

Owns nothing but the order: the lines are the README's, on free ports (the replay gets the proxy's), with a wait until
the proxy is ready where a person would look. Prints what the replay printed on standard output.
"""

from __future__ import annotations

import os
import re
import sys
import tempfile
from pathlib import Path

from tests.documents import ROOT, blocks, section
from tests.packaging.guide import Done, Step, run

HEADING = "## Quick start by hand"
READY = "until curl -sf http://127.0.0.1:8080/ready > /dev/null; do sleep 0.2; done\n"
TIMEOUT_S = 300.0


def main() -> int:
    """The exit code: 1 if a line failed or took too long."""
    with tempfile.TemporaryDirectory(prefix="gorgo-quick-start-") as folder:
        clone, records = Path(folder, "clone"), Path(folder, "records")
        clone.mkdir()
        records.mkdir()
        (clone / "regions.yaml").write_bytes((ROOT / "regions.yaml").read_bytes())
        done = run(steps(), clone=clone, records=records, environ=dict(os.environ), timeout_s=TIMEOUT_S)
    sys.stdout.write(done[-1].printed)
    return int(any(map(failed, done)))


def steps() -> list[Step]:
    """All before the replay, the wait, and the replay itself; installing is not typed."""
    (script,) = blocks(section((ROOT / "README.md").read_text(), HEADING), "sh")[:1]
    lines = [line for line in script.splitlines(keepends=True) if re.match("gorgo|export", line)]
    (replay,) = [number for number, line in enumerate(lines) if line.startswith("gorgo replay")]
    command = lines[replay].partition("#")[0].rstrip()
    typed = ["".join(lines[:replay]), READY, f"{command} --url http://127.0.0.1:8080 2> /dev/null\n"]
    return [Step(text, None, (), 0) for text in typed]


def failed(done: Done) -> bool:
    return done.code != 0


if __name__ == "__main__":
    sys.exit(main())
