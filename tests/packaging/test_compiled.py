"""packaging/compiled.py: which modules it compiles, and that they simulate as the sources do."""

from __future__ import annotations

import ast
import json
import os
import re
import runpy
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.packaging.conftest import ROOT

COMPILED = runpy.run_path(str(ROOT / "packaging/compiled.py"))
PATTERNS = COMPILED["COMPILED"] + COMPILED["LIVE"]
ALL_MODULES = sorted({*COMPILED["modules"](), *COMPILED["modules"](live=True)})
#: Policies with every part of the cost, with a plain one, and one that draws.
RUN = [
    "simulate",
    "chat-small",
    "--policy",
    "gorgo-ms",
    "--policy",
    "random",
    "--seeds",
    "2",
    "--limit",
    "150",
    "--json",
]


def test_every_pattern_names_modules_and_every_exclusion_is_of_one() -> None:
    for pattern in PATTERNS:
        assert list(ROOT.glob(pattern)), pattern
    matched = {str(path.relative_to(ROOT)) for pattern in PATTERNS for path in ROOT.glob(pattern)}
    assert COMPILED["EXCLUDED"].keys() <= matched


def test_no_compiled_module_has_what_mypyc_refuses() -> None:
    """A protocol for isinstance, structs that msgspec reads by their annotations, tuples in a class body."""
    for path in ALL_MODULES:
        source = (ROOT / path).read_text()
        assert "@runtime_checkable" not in source, path
        assert re.search(r"^class .*\bStruct\b", source, re.MULTILINE) is None, path
        for node in ast.walk(ast.parse(source)):
            statements = node.body if isinstance(node, ast.ClassDef) else []
            targets = [target for line in statements if isinstance(line, ast.Assign) for target in line.targets]
            assert all(isinstance(target, ast.Name) for target in targets), f"{path}: tuple in a class body"


@pytest.mark.system
def test_mypyc_accepts_every_module(tmp_path: Path) -> None:
    """It refuses more than mypy does: a variable that is an int here and a float there."""
    program = "import sys; from mypyc.build import mypycify; mypycify(sys.argv[2:], target_dir=sys.argv[1])"
    config = ["--config-file", str(ROOT / "packaging/compiled.ini")]
    command = [sys.executable, "-c", program, str(tmp_path), *config, *ALL_MODULES]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, [line for line in done.stdout.splitlines() if "error:" in line]


def test_no_compiled_coroutine_waits_where_an_exception_is_handled() -> None:
    """mypyc 2.4 raises another coroutine's exception there, or none: the request then waits for ever."""
    found = [
        f"{path}:{line}" for path in ALL_MODULES for line in _waits_in_handlers(ast.parse((ROOT / path).read_text()))
    ]
    assert found == []
    handler = ast.parse((ROOT / "gorgo/proxy/server.py").read_text())
    assert [*_waits_in_handlers(handler)], "the search finds those of a module that is excluded for them"


def _waits_in_handlers(node: ast.AST, *, handles: bool = False) -> Iterator[int]:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
        handles = False
    if isinstance(node, ast.AsyncWith) or (handles and isinstance(node, ast.Await | ast.Yield | ast.AsyncFor)):
        yield node.lineno
    handlers = [*node.handlers, *node.finalbody] if isinstance(node, ast.Try) else []
    for child in ast.iter_child_nodes(node):
        yield from _waits_in_handlers(child, handles=handles or child in handlers)


def test_no_interpreted_class_inherits_from_a_compiled_one() -> None:
    """mypyc's classes refuse such a subclass when it is made, which is in the middle of a run."""
    compiled = {path.removesuffix(".py").replace("/", ".") for path in ALL_MODULES}
    interpreted = {str(path.relative_to(ROOT)) for path in (ROOT / "gorgo").rglob("*.py")} - {*ALL_MODULES}
    # The simulated engine as a server is no part of a run, and has classes of the model's.
    interpreted = {path for path in interpreted if not path.startswith("gorgo/lab/engine_server/")}
    found = []
    for path in sorted(interpreted):
        tree = ast.parse((ROOT / path).read_text())
        origins = {
            alias.asname or alias.name: node.module
            for node in ast.walk(tree)
            if isinstance(node, ast.ImportFrom)
            for alias in node.names
        }
        classes = [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
        for base in (base for node in classes for base in node.bases):
            name = base.value if isinstance(base, ast.Subscript) else base
            if isinstance(name, ast.Name) and origins.get(name.id) in compiled:
                found.append(f"{path}: {name.id}")
    assert found == []


def test_no_compiled_module_narrows_a_value_to_one_of_the_protocols_for_isinstance() -> None:
    """mypyc takes a value of two protocols at once for None: `gorgo-residual` could not adopt a model."""
    declared = re.compile(r"@runtime_checkable\nclass (\w+)")
    protocols = {name for path in (ROOT / "gorgo/core").rglob("*.py") for name in declared.findall(path.read_text())}
    assert "HasBase" in protocols
    narrows = re.compile(r"isinstance\(\w+, (\w+)\)\s+else")
    found = {path: narrows.findall((ROOT / path).read_text()) for path in ALL_MODULES}
    assert {path: names for path, names in found.items() if protocols.intersection(names)} == {}


@pytest.mark.system
@pytest.mark.timeout(1800)
def test_compiled_modules_simulate_the_same_rows_to_the_last_digit(tmp_path: Path) -> None:
    if shutil.which("cc") is None:
        pytest.skip("COMPILED MODULES SKIPPED: no C compiler (Debian: apt install gcc)")
    tree = tmp_path / "compiled"
    subprocess.run([sys.executable, str(ROOT / "packaging/compiled.py"), str(tree)], cwd=ROOT, check=True)
    assert list((tree / "gorgo/core").glob("router.*.so"))
    vllm, routers = ["--fleet", "vllm"], ["--routers", "2", "--sharing", "store"]
    learns = ["--policy", "gorgo-residual", "--limit", "400"]  # its first model has 200 samples
    for words in (["--jobs", "1"], learns, vllm, routers, ["--scenario", "slow-replica"]):
        assert _rows(tree, *words) == _rows(ROOT, *words), words
    assert _rows(tree, "--jobs", "2") == _rows(ROOT, "--jobs", "1"), "two processes"


def _rows(sources: Path, *words: str) -> object:
    environ = os.environ | {"PYTHONPATH": str(sources), "PYTHONSAFEPATH": "1"}
    command = [sys.executable, "-m", "gorgo", *RUN, *words]
    done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, check=True)
    return [{key: row[key] for key in row if key != "cpu_s"} for row in json.loads(done.stdout)]
