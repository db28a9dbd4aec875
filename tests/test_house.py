"""The form of the code: counts that a reader feels, layers of DESIGN.md, and files that docs/architecture.md names."""

from __future__ import annotations

import ast
import asyncio
import os
import re
import subprocess
import sys
import tomllib
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import FrameType

import pytest

from gorgo.cli.app import _COMMANDS
from gorgo.policies.registry import _BUILT_IN
from gorgo.proxy.server import data_app
from tests.bench import relay_alone
from tests.bench.relay.scenarios import SMALL
from tests.documents import DOCS, ROOT, code, rows_of
from tests.sources import parsed, syntax_tree

# --- Three counts that a reader of the code feels: modules with one reader, a start's modules, a request's modules.
#
# `tests.cli.test_extras` holds the second. A module with one importer is read with it, so it has a place of
# its own only where it is large or one of a table's. The third is how many files a reader opens to follow one request.


FOLDERS = ("gorgo", "tuner", "experiments")
#: Modules that one other imports.
MOST_WITH_ONE_IMPORTER = 52
#: Modules whose functions a small chat request calls, from its bytes to the answer's.
MOST_ENTERED = 50
#: Modules that import each row of a table, by the package of the rows.
TABLES = {
    "gorgo.engines.registry": "gorgo.engines",
    "tuner.optimizers.registry": "tuner.optimizers",
    "experiments.command": "experiments.systems",
}


def named_in_tables() -> set[str]:
    """Return the modules of the tables that import a row when it is asked for."""
    commands = {f"gorgo.cli.{path.partition(':')[0]}" for path in _COMMANDS.values()}
    return commands | {f"gorgo.policies.{path.partition(':')[0]}" for path in _BUILT_IN.values()}


def importers(sources: Mapping[str, str]) -> dict[str, set[str]]:
    """Return by module which others import it, at their top or in a function."""
    found: dict[str, set[str]] = defaultdict(set)
    for name, source in sources.items():
        for node in ast.walk(parsed(source)):
            for imported in _imported(node, sources):
                if imported != name:
                    found[imported].add(name)
    return found


def _imported(node: ast.AST, sources: Mapping[str, str]) -> Iterable[str]:
    if isinstance(node, ast.Import):
        yield from (one.name for one in node.names if one.name in sources)
    elif isinstance(node, ast.ImportFrom) and node.module is not None:
        for one in node.names:
            below = f"{node.module}.{one.name}"
            if below in sources or node.module in sources:
                yield below if below in sources else node.module


def with_one_importer(sources: Mapping[str, str], packages: set[str], tables: set[str]) -> list[str]:
    """Return the modules that one other imports, without packages, workers and rows of tables."""
    found = []
    for name, readers in importers(sources).items():
        row = name in tables or any(name.startswith(f"{TABLES.get(reader)}.") for reader in readers)
        if len(readers) == 1 and not row and name not in packages and not name.endswith("__main__"):
            found.append(name)
    return sorted(found)


def test_few_modules_have_one_importer() -> None:
    sources, packages = {}, set()
    for path in (path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")):
        name = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        sources[name] = path.read_text()
        if path.name == "__init__.py":
            packages.add(name)
    found = with_one_importer(sources, packages, named_in_tables())
    assert len(found) <= MOST_WITH_ONE_IMPORTER, found


def test_a_module_counts_if_one_other_imports_it_and_no_table_names_it() -> None:
    sources = {
        "a": "",
        "a.once": "from a.once import itself",
        "a.twice": "",
        "a.row": "",
        "a.late": "",
        "a.reader": "import a.once\nfrom a import twice\nfrom a.row import Row\ndef read(): from a.late import Late",
        "a.other": "from a.twice import Twice",
        "experiments.systems.one": "",
        "experiments.command": "from experiments.systems import one",
    }
    assert with_one_importer(sources, {"a"}, {"a.row"}) == ["a.late", "a.once"]


async def _entered(folder: Path) -> set[str]:
    """Return the own modules whose functions are called from a request's bytes to those of its answer."""
    state = relay_alone.make_proxy(folder)
    replicas = list(relay_alone.connect_replicas(state))
    assert replicas
    clients = relay_alone.Clients(data_app(state), connections=1)
    clients.use(SMALL, stream=False)
    await clients.send(8)  # what is loaded and made at the first requests is no part of the way
    code: set[str] = set()

    def seen(frame: FrameType, event: str, _: object) -> None:
        if event == "call":
            code.add(frame.f_code.co_filename)

    sys.setprofile(seen)
    try:
        await clients.send(1)
    finally:
        sys.setprofile(None)
    await state.aclose()
    own = (Path(path) for path in code)
    return {path.relative_to(ROOT).as_posix() for path in own if path.is_relative_to(ROOT / "gorgo")}


def test_a_request_enters_few_modules(tmp_path: Path) -> None:
    found = asyncio.run(_entered(tmp_path))
    assert "gorgo/core/router.py" in found
    assert len(found) <= MOST_ENTERED, sorted(found)


# --- The layers of DESIGN.md hold, and a package that nobody placed in them is noticed.


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
    for path in sorted({"gorgo/lab/sim", "gorgo/lab/simulate", *layers()}):
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
    ("gorgo.proxy.exchange.new", "gorgo.proxy.server"),
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
VIRTUAL_TIME = {"offline", "commands.py"}


def test_tuner_beside_a_proxy_knows_of_gorgo_only_policies_weights_metrics_errors_and_plain_helpers() -> None:
    imported = set()
    for path in (ROOT / "tuner").rglob("*.py"):
        if path.relative_to(ROOT / "tuner").parts[0] in VIRTUAL_TIME:
            continue
        for node in ast.walk(syntax_tree(path)):
            if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("gorgo"):
                imported.add(node.module)
            elif isinstance(node, ast.Import):
                imported |= {name.name for name in node.names if name.name.startswith("gorgo")}
    helpers = {"gorgo.core.backoff", "gorgo.core.lru", "gorgo.core.numeric"}
    known = {"gorgo.core.metric_spec", "gorgo.core.policy.weights", "gorgo.policies.registry", "gorgo.errors"}
    assert imported <= known | helpers


# --- docs/architecture.md against the code: each file that it names exists and has the symbol.


PAGE = (DOCS / "architecture.md").read_text()
CHANGES = [(code(row[1])[0], code(row[2])[0]) for row in rows_of(PAGE, "change", "file", "symbol")]


def symbols(path: Path) -> Iterator[str]:
    """Names of a module: functions, classes, and methods, fields and attributes of classes as `Class.name`."""
    for node in syntax_tree(path).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        if isinstance(node, ast.ClassDef):
            for inner in ast.walk(node):
                if isinstance(inner, ast.FunctionDef | ast.AsyncFunctionDef):
                    yield f"{node.name}.{inner.name}"
                elif isinstance(inner, ast.Attribute) and isinstance(inner.ctx, ast.Store):
                    yield f"{node.name}.{inner.attr}"


@pytest.mark.parametrize(("file", "symbol"), CHANGES)
def test_every_place_to_change_exists(file: str, symbol: str) -> None:
    assert symbol in set(symbols(ROOT / file))


def test_five_questions_of_a_reader_are_answered() -> None:
    assert len(CHANGES) >= 5


def test_every_file_in_the_diagrams_exists() -> None:
    named = {
        name
        for block in re.findall(r"```mermaid\n(.*?)```", PAGE, re.DOTALL)
        for name in re.findall(r"[\w/]+\.py", block)
    }
    assert len(named) >= 20
    tops = (ROOT, ROOT / "gorgo", ROOT / "gorgo/proxy", ROOT / "gorgo/live", ROOT / "gorgo/core")
    assert {name for name in named if not any((top / name).is_file() for top in tops)} == set()
