"""Compile the modules that decide and simulate with mypyc, for simulations in half the time.

    python packaging/compiled.py build/compiled  # the tracked files, with the modules beside their sources

Needs the developers' environment and a C compiler. Rows of results are the same (tests/packaging/test_compiled.py).
Not for a proxy: compiled functions check types that Python does not, and no class outside may inherit from theirs.
The live shell stays Python: compiled parsers of heads and KV events gained nothing measurable.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from hashlib import sha256
from importlib.metadata import version as distribution_version
from pathlib import Path
from tempfile import TemporaryDirectory

ROOT = Path(__file__).parents[1]

#: Patterns of modules to compile. Packages' own `__init__` are never among them.
COMPILED = (
    "gorgo/core/**/*.py",
    "gorgo/policies/**/*.py",
    "gorgo/sim/*.py",
    "gorgo/sim/engine/**/*.py",
    "gorgo/sim/kv_events/*.py",
    "gorgo/sim/network/*.py",
)

#: Modules of these patterns that stay Python, and why.
EXCLUDED = {
    "gorgo/core/record.py": "a decorator of classes reads what a compiled function does not have",
    "gorgo/core/messages/request.py": "an Enum whose members have attributes",
    "gorgo/core/policy/weights.py": "a dataclass that is a Mapping",
    "gorgo/core/policy/interface.py": "a protocol for isinstance",
    "gorgo/core/peers/exchange.py": "a protocol for isinstance",
    "gorgo/core/peers/routes.py": "a protocol for isinstance",
    "gorgo/core/policy/candidates.py": "columns are properties by name",
    "gorgo/core/fleet/columns.py": "columns are attributes by name",
    "gorgo/core/fleet/spec.py": "frozen dataclasses that go to other processes",
    "gorgo/core/limits.py": "frozen dataclasses that go to other processes",
    "gorgo/sim/engine/profiles.py": "frozen dataclasses that go to other processes",
    "gorgo/sim/fleet.py": "frozen dataclasses that go to other processes",
    "gorgo/sim/network/links.py": "frozen dataclasses that go to other processes",
    "gorgo/core/fleet/peer_loads.py": "columns are attributes by name",
    "gorgo/core/latency/prefill.py": "one function for floats and arrays",
    "gorgo/core/latency/ttft.py": "named tuples with defaults between fields: mypyc 2.4 refuses the signature",
    "gorgo/core/training/learner.py": "a protocol for isinstance",
    "gorgo/core/metric_spec.py": "read at import alone",
}


def modules(root: Path = ROOT) -> list[str]:
    """Return the paths to compile, relative to `root`, in order."""
    found = {str(path.relative_to(root)) for pattern in COMPILED for path in root.glob(pattern)}
    return sorted(path for path in found - EXCLUDED.keys() if not path.endswith("/__init__.py"))


def compile_into(target: Path) -> None:
    """Write the extension modules below `target`, laid out as the sources. Takes minutes.

    Raises `subprocess.CalledProcessError` if a module cannot be compiled; the compiler's output is on stderr.
    """
    command = [sys.executable, str(Path(__file__).resolve()), "--extensions", str(target), *modules()]
    subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)


def digest(root: Path = ROOT) -> str:
    """Return a hash of all that the extension modules are made of: sources, Python, mypyc, this file."""
    found = sha256(f"{sys.version} {distribution_version('mypy')}".encode())
    for path in (Path(__file__), *sorted((root / "gorgo").rglob("*.py"))):
        found.update(b"%s\0%s\0" % (str(path.relative_to(root)).encode(), path.read_bytes()))
    return found.hexdigest()[:16]


def copy_tree(target: Path) -> None:
    """Replace `target` by the tracked files of the tree and the extension modules, made anew where sources changed."""
    extensions = target.with_name(f"extensions-{digest()}")
    if not extensions.exists():
        for older in target.parent.glob("extensions-*"):
            shutil.rmtree(older)
        unfinished = target.with_name("extensions.unfinished")
        shutil.rmtree(unfinished, ignore_errors=True)
        compile_into(unfinished)
        unfinished.rename(extensions)
    shutil.rmtree(target, ignore_errors=True)
    tracked = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    for name in filter(None, tracked.split("\0")):
        if (ROOT / name).exists():  # deleted, not committed
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target / name)
    shutil.copytree(extensions, target, dirs_exist_ok=True)


def _extensions(target: str, paths: Iterator[str]) -> None:
    from mypyc.build import mypycify
    from setuptools import Distribution
    from setuptools.command.build_ext import build_ext

    with TemporaryDirectory() as work:
        found = mypycify(list(paths), opt_level="2", debug_level="0", group_name="gorgo", target_dir=work)
        command = build_ext(Distribution({"name": "gorgo", "ext_modules": found}))
        command.build_lib, command.build_temp = target, os.path.join(work, "objects")
        command.ensure_finalized()
        command.run()


def main() -> None:
    """The argument is the folder of the copy."""
    if sys.argv[1:2] == ["--extensions"]:
        _extensions(sys.argv[2], iter(sys.argv[3:]))
    elif len(sys.argv) == 2:
        copy_tree(Path(sys.argv[1]).resolve())
    else:
        raise SystemExit("usage: compiled.py FOLDER")


if __name__ == "__main__":
    main()
