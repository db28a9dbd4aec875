"""The part of requirements.lock that some requirements need, with its hashes, on stdout.

    python packaging/locked.py REQUIREMENT... > picked.lock
    python -m pip install --no-deps --require-hashes --requirement picked.lock

The lock file has the developers' tools too. pip itself says what a requirement needs (a dry run of an install that may
choose no other versions than the lock's); what it names is copied, line by line. A requirement that is a file, as
`./gorgo_router-0.2.0-py3-none-any.whl[otel]`, is left out of what is printed: no lock can have its hash.

Needs nothing but the Python that runs it, whose version and platform decide what is needed.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

LOCK = Path(__file__).parents[1] / "requirements.lock"
#: A name, its version and marker, and the lines of hashes that belong to it.
_PINNED = re.compile(r"^([A-Za-z0-9._-]+)(==[^\n]*?) \\\n((?: +--hash=[^\n]*\n)+)", re.MULTILINE)


def plain(name: str) -> str:
    """A distribution's name in its one normal form."""
    return re.sub("[-_.]+", "-", name).lower()


def constraints(lock: str) -> str:
    """The versions alone: constraints may have no hashes."""
    return "".join(f"{name}{version}\n" for name, version, _ in _PINNED.findall(lock))


def picked(lock: str, plan: list[dict[str, Any]]) -> str:
    """The lines of `lock` for what pip would install; raises `SystemExit` naming what the lock lacks."""
    wanted = {plain(one["metadata"]["name"]) for one in plan if not one["is_direct"]}
    found = {plain(name): f"{name}{version} \\\n{hashes}" for name, version, hashes in _PINNED.findall(lock)}
    missing = sorted(wanted - found.keys())
    if missing:
        raise SystemExit(f"requirements.lock lacks {', '.join(missing)}")
    return "".join(found[name] for name in sorted(wanted))


def plan_of(requirements: list[str], lock: str) -> list[dict[str, Any]]:
    """What pip would install for them into an empty environment."""
    with tempfile.TemporaryDirectory() as folder:
        versions, report = Path(folder, "versions.txt"), Path(folder, "report.json")
        versions.write_text(constraints(lock))
        pip = [sys.executable, "-m", "pip", "install", "-qq", "--disable-pip-version-check"]
        chosen = ["--dry-run", "--ignore-installed", "--constraint", str(versions), "--report", str(report)]
        subprocess.run([*pip, *chosen, *requirements], check=True, stdout=sys.stderr)
        return list(json.loads(report.read_text())["install"])


def main() -> None:
    """The requirements are the arguments."""
    if not sys.argv[1:]:
        raise SystemExit("usage: locked.py REQUIREMENT...")
    lock = LOCK.read_text()
    sys.stdout.write(picked(lock, plan_of(sys.argv[1:], lock)))


if __name__ == "__main__":
    main()
