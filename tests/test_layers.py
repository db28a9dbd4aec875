"""The layers of DESIGN.md hold, and a package that nobody placed in them is noticed."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]


def lint(root: Path) -> subprocess.CompletedProcess[str]:
    """Runs import-linter on the tree at `root`, whose packages go before the installed ones."""
    program = str(Path(sys.executable).with_name("lint-imports"))
    command = [program, "--config", str(root / "pyproject.toml"), "--no-cache"]
    environ = os.environ | {"PYTHONPATH": str(root), "PYTHONDONTWRITEBYTECODE": "1"}
    return subprocess.run(command, cwd=root, env=environ, capture_output=True, text=True, timeout=50, check=False)


def layers() -> Iterator[str]:
    """Directory of each part that a contract on layers names."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    for contract in contracts:
        for container in contract.get("containers", ()):
            for layer in contract["layers"]:
                yield from (f"{container.replace('.', '/')}/{part.strip(' ()')}" for part in layer.split("|"))


def twin(root: Path, *, extra: str, text: str = '"""New."""\n') -> Path:
    """A tree of the layers, empty, with one module more."""
    (root / "pyproject.toml").write_bytes((ROOT / "pyproject.toml").read_bytes())
    for path in sorted({"gorgo/lab/simulate", *layers()}):
        (root / path).mkdir(parents=True, exist_ok=True)
        for package in (root / path, *(root / path).parents):
            if package.is_relative_to(root) and package != root:
                (package / "__init__.py").touch()
    (root / extra).parent.mkdir(exist_ok=True)
    (root / extra).write_text(text)
    return root


def test_imports_point_down_only() -> None:
    result = lint(ROOT)
    assert result.returncode == 0, result.stdout + result.stderr


def test_the_shape_alone_passes(tmp_path: Path) -> None:
    result = lint(twin(tmp_path, extra="gorgo/core/fleet/new.py"))
    assert result.returncode == 0, result.stdout + result.stderr


def test_new_package_without_a_place_in_the_layers_fails(tmp_path: Path) -> None:
    result = lint(twin(tmp_path, extra="gorgo/helpers/__init__.py"))
    assert result.returncode != 0
    assert "helpers" in result.stdout


#: Importer and what it may not import.
WRONG = (
    ("gorgo.core.fleet.first", "gorgo.config"),
    ("gorgo.core.fleet.second", "asyncio"),
    ("gorgo.core.fleet.third", "gorgo.core.dispatch"),
    ("gorgo.core.limits.new", "gorgo.core.fleet"),
    ("gorgo.policies.new", "gorgo.engines"),
    ("gorgo.lab.sim.new", "gorgo.proxy"),
    ("gorgo.lab.simulate.new", "gorgo.proxy"),
    ("gorgo.engines.new", "time"),
    ("gorgo.live.openapi.new", "tuner"),
    ("gorgo.proxy.http.new", "gorgo.proxy.server"),
    ("gorgo.live.listener.new", "gorgo.live.process"),
    ("gorgo.live.monitor.new", "gorgo.proxy.exchange"),
    ("gorgo.live.http.new", "gorgo.live.state"),
)


def test_imports_that_point_up_or_outside_fail(tmp_path: Path) -> None:
    root = twin(tmp_path, extra="gorgo/core/fleet/new.py")
    for importer, imported in WRONG:
        (root / f"{importer.replace('.', '/')}.py").write_text(f"import {imported}\n")
    result = lint(root)
    assert result.returncode != 0
    reported = set(re.findall(r"([\w.]+) -> ([\w.]+) \(l", result.stdout))
    assert reported == set(WRONG)


#: What tunes in virtual time drives the simulator, and composes programs as the command line does.
VIRTUAL_TIME = {"offline", "experiments", "commands.py"}


def test_tuner_beside_a_proxy_knows_of_gorgo_only_policies_weights_metrics_errors_and_plain_helpers() -> None:
    imported = set()
    for path in (ROOT / "tuner").rglob("*.py"):
        if path.relative_to(ROOT / "tuner").parts[0] in VIRTUAL_TIME:
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("gorgo"):
                imported.add(node.module)
            elif isinstance(node, ast.Import):
                imported |= {name.name for name in node.names if name.name.startswith("gorgo")}
    helpers = {"gorgo.core.backoff", "gorgo.core.lru", "gorgo.core.numeric"}
    known = {"gorgo.core.metric_spec", "gorgo.core.policy.weights", "gorgo.policies.registry", "gorgo.errors"}
    assert imported <= known | helpers
