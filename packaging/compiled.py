"""Compile the modules that decide and simulate with mypyc, for simulations in half the time.

    python packaging/compiled.py build/compiled  # the tracked files, with the modules beside their sources

Needs the developers' environment and a C compiler. Rows of results are the same (tests/packaging/test_programs.py).
Compiled functions check types that Python does not, and no class outside may inherit from theirs.

With `--live` before the folder also what a proxy or picker runs per request: to measure, not to serve. A large part of
`tests/proxy` passes on it, not all. gcc sees a run of `relay_alone` first: a request goes once through each of hundreds
of functions, and what seldom runs in them would fill the instruction cache. mypyc 2.4 mixes up exceptions that several
coroutines handle at once, so a module with an `await` inside an `except`, a `finally` or an `async with` stays Python;
and it fails at `data[start:end]` of bytes where `end` is the lower one.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from hashlib import sha256
from importlib.metadata import version as distribution_version
from multiprocessing.pool import ThreadPool
from pathlib import Path
from tempfile import TemporaryDirectory

ROOT = Path(__file__).parents[1]

#: Patterns of modules to compile. Packages' own `__init__` are never among them.
COMPILED = (
    "gorgo/core/**/*.py",
    "gorgo/policies/**/*.py",
    "gorgo/lab/sim/*.py",
    "gorgo/lab/sim/engine/**/*.py",
)

#: With `--live` these too: what runs once per request or event.
LIVE = (
    "gorgo/engines/kv_events.py",
    "gorgo/engines/kv_sources.py",
    "gorgo/live/event_loop.py",
    "gorgo/live/http/*.py",
    "gorgo/live/kv_events/*.py",
    "gorgo/live/kv_feed_stats.py",
    "gorgo/live/listener/connection/*.py",
    "gorgo/live/listener/heads.py",
    "gorgo/live/request/*.py",
    "gorgo/live/request_options.py",
    "gorgo/live/state.py",
    "gorgo/live/stored_responses.py",
    "gorgo/live/telemetry/counters.py",
    "gorgo/live/telemetry/metrics.py",
    "gorgo/live/telemetry/outcome_log.py",
    "gorgo/live/logs.py",
    "gorgo/live/upstream/*.py",
    "gorgo/picker/call.py",
    "gorgo/picker/lifetime.py",
    "gorgo/picker/pending.py",
    "gorgo/picker/state.py",
    "gorgo/picker/protocol/*.py",
    "gorgo/picker/transport/*.py",
    "gorgo/proxy/exchange/*.py",
    "gorgo/live/http/body.py",
)

_AWAITS = "a coroutine waits where an exception is handled"
_GENERATOR = "an asynchronous generator"
_RARE = "runs at the start, at a failure or in another process"

#: Modules of these patterns that stay Python, and why.
EXCLUDED = {
    "gorgo/core/lru.py": "an OrderedDict with fields: mypyc 2.4 lays them over those of OrderedDict itself",
    "gorgo/core/record.py": "a decorator of classes reads what a compiled function does not have",
    "gorgo/core/messages/request.py": "an Enum whose members have attributes",
    "gorgo/core/policy/weights.py": "a dataclass that is a Mapping",
    "gorgo/core/policy/interface.py": "a protocol for isinstance",
    "gorgo/core/peers/exchange.py": "a protocol for isinstance",
    "gorgo/core/fleet/replica.py": "columns are attributes by name",
    "gorgo/core/limits.py": "frozen dataclasses that go to other processes",
    "gorgo/lab/sim/engine/profiles.py": "frozen dataclasses that go to other processes",
    "gorgo/lab/sim/records.py": "the record of a live replay, which stays Python, inherits from one of them",
    "gorgo/lab/sim/faults.py": "a protocol for isinstance",
    "gorgo/lab/sim/routers.py": "frozen dataclasses that go to other processes",
    "gorgo/lab/sim/scenarios.py": "reads files, once per run",
    "gorgo/lab/sim/fleet.py": "frozen dataclasses that go to other processes",
    "gorgo/lab/sim/pinned.py": "a protocol for isinstance",
    "gorgo/lab/sim/network.py": "frozen dataclasses that go to other processes",
    "gorgo/core/fleet/peer_loads.py": "columns are attributes by name",
    "gorgo/core/latency/prefill.py": "one function for floats and arrays",
    "gorgo/core/latency/ttft.py": "named tuples with defaults between fields: mypyc 2.4 refuses the signature",
    "gorgo/core/training/learning.py": "a protocol for isinstance",
    "gorgo/core/metric_spec.py": "read at import alone",
    "gorgo/live/http/headers.py": "a list with a field of its own",
    "gorgo/live/http/tls.py": _RARE,
    "gorgo/live/http/errors.py": _RARE,
    "gorgo/live/kv_events/subscriber.py": _AWAITS,
    "gorgo/live/kv_events/subscription.py": _GENERATOR,
    "gorgo/live/kv_events/sockets.py": _RARE,
    "gorgo/live/kv_events/worker.py": _RARE,
    "gorgo/live/upstream/address.py": _RARE,
    "gorgo/live/upstream/client.py": _GENERATOR,
    "gorgo/picker/transport/server.py": _AWAITS,
    "gorgo/live/upstream/transport.py": _AWAITS,
    "gorgo/proxy/exchange/exchange.py": _AWAITS,
    "gorgo/proxy/exchange/relay.py": _AWAITS,
    "gorgo/proxy/exchange/response.py": _AWAITS,
    "gorgo/live/logs.py": _AWAITS,
    "gorgo/live/http/body.py": _GENERATOR,
    "gorgo/engines/kv_events.py": "structs that msgspec reads by their annotations",
}


#: gcc's words of the two builds with `--live`, between which a load runs.
PROFILE = (["-fprofile-generate"], ["-fprofile-use", "-fprofile-correction", "-Wno-missing-profile"])

#: Of the core, modules that stay Python with `--live`: helper processes of a proxy are sent their objects.
SENT = ("gorgo/core/messages/kv_events.py", "gorgo/core/prompt/fingerprint.py")


def modules(root: Path = ROOT, *, live: bool = False) -> list[str]:
    """Return the paths to compile, relative to `root`, in order."""
    found = {str(path.relative_to(root)) for pattern in COMPILED + LIVE * live for path in root.glob(pattern)}
    found -= EXCLUDED.keys() | set(SENT * live)
    return sorted(path for path in found if not path.endswith("/__init__.py"))


def compile_into(target: Path, *, live: bool = False) -> None:
    """Write the extension modules below `target`, laid out as the sources. Takes minutes.

    Raises `subprocess.CalledProcessError` if a module cannot be compiled; the compiler's output is on stderr.
    """
    words = ["--profiled"] if live else []
    command = [sys.executable, str(Path(__file__).resolve()), "--extensions", *words, str(target), *modules(live=live)]
    subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)


def digest(root: Path = ROOT) -> str:
    """Return a hash of all that the extension modules are made of: sources, Python, mypyc, this file."""
    found = sha256(f"{sys.version} {distribution_version('mypy')}".encode())
    for path in (Path(__file__), Path(__file__).with_suffix(".ini"), *sorted((root / "gorgo").rglob("*.py"))):
        found.update(b"%s\0%s\0" % (str(path.relative_to(root)).encode(), path.read_bytes()))
    return found.hexdigest()[:16]


def copy_tree(target: Path, *, live: bool = False) -> None:
    """Replace `target` by the tracked files of the tree and the extension modules, made anew where sources changed."""
    kind = "live-extensions" if live else "extensions"
    extensions = target.with_name(f"{kind}-{digest()}")
    if not extensions.exists():
        for older in target.parent.glob(f"{kind}-*"):
            shutil.rmtree(older)
        unfinished = target.with_name(f"{kind}.unfinished")
        shutil.rmtree(unfinished, ignore_errors=True)
        compile_into(unfinished, live=live)
        unfinished.rename(extensions)
    shutil.rmtree(target, ignore_errors=True)
    _copy(extensions, target)


def _copy(extensions: Path, target: Path) -> None:
    tracked = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    for name in filter(None, tracked.split("\0")):
        if (ROOT / name).exists():  # deleted, not committed
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target / name)
    shutil.copytree(extensions, target, dirs_exist_ok=True)


def _extensions(target: str, paths: Iterator[str], *, profiled: bool) -> None:
    from mypyc.build import mypycify
    from setuptools import Distribution
    from setuptools.command.build_ext import build_ext

    class ParallelBuild(build_ext):  # type: ignore[misc]
        """Nearly all is one extension, so its sources are compiled side by side."""

        def build_extensions(self) -> None:
            compile_all = self.compiler.compile

            def compile_each(sources: list[str], **options: object) -> list[str]:
                with ThreadPool(os.cpu_count()) as pool:
                    made = pool.map(lambda source: compile_all([source], **options), sources, chunksize=1)
                return [name for names in made for name in names]

            self.compiler.compile = compile_each
            super().build_extensions()

    config = ["--config-file", str(Path(__file__).with_suffix(".ini"))]
    with TemporaryDirectory() as work:
        found = mypycify(
            [*config, *paths], opt_level="2", debug_level="0", group_name="gorgo", target_dir=work, multi_file=True
        )
        given = [extension.extra_compile_args for extension in found]
        for flags in PROFILE if profiled else ([],):
            for extension, before in zip(found, given, strict=True):
                extension.extra_compile_args, extension.extra_link_args = [*before, *flags], flags
            command = ParallelBuild(Distribution({"name": "gorgo", "ext_modules": found}))
            command.build_lib, command.build_temp, command.force = target, os.path.join(work, "objects"), True
            command.ensure_finalized()
            command.run()
            if flags == PROFILE[0]:
                _train(Path(target))


def _train(extensions: Path) -> None:
    """Run requests on `extensions`, which write what they did beside their objects."""
    with TemporaryDirectory() as folder:
        _copy(extensions, Path(folder))
        command = [sys.executable, "-m", "tests.bench", "relay_alone"]
        subprocess.run(command, cwd=folder, env=os.environ | {"PYTHONPATH": folder}, check=True)


def main() -> None:
    """The last argument is the folder of the copy."""
    if sys.argv[1:2] == ["--extensions"]:
        profiled = sys.argv[2] == "--profiled"
        _extensions(sys.argv[2 + profiled], iter(sys.argv[3 + profiled :]), profiled=profiled)
    elif len(sys.argv) == 2:
        copy_tree(Path(sys.argv[1]).resolve())
    elif sys.argv[1:2] == ["--live"] and len(sys.argv) == 3:
        copy_tree(Path(sys.argv[2]).resolve(), live=True)
    else:
        raise SystemExit("usage: compiled.py [--live] FOLDER")


if __name__ == "__main__":
    main()
