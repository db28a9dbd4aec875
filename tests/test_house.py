"""Three counts that a reader of the code feels: modules with one reader, a start's modules, a request's modules.

`tests.cli.test_loaded_modules` holds the second. A module with one importer is read with it, so it has a place of its
own only where it is large or one of a table's. The third is how many files a reader opens to follow one request.
"""

from __future__ import annotations

import ast
import asyncio
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import FrameType

from gorgo.cli.app import _COMMANDS
from gorgo.policies.registry import _BUILT_IN
from gorgo.proxy.server import data_app
from tests.bench import relay_alone
from tests.bench.relay.scenarios import SMALL

ROOT = Path(__file__).parents[1]
FOLDERS = ("gorgo", "tuner", "experiments")
#: Modules that one other imports.
MOST_WITH_ONE_IMPORTER = 60
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
        for node in ast.walk(ast.parse(source)):
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
