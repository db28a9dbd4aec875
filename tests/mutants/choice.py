"""Which mutants are tried, and which tests try them."""

from __future__ import annotations

import ast
import hashlib
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import count
from pathlib import Path, PurePosixPath

from tests.mutants.faults import Equivalents, Fault, fault_of
from tests.mutants.mutations import Mutant
from tests.mutants.reach import TracedTest, function_lines, statement_at

PACKAGES = ("gorgo/core", "gorgo/policies", "gorgo/sim", "tuner", "gorgo/live", "gorgo/proxy")
#: Seconds of tests, as traced, in the first round and in the second. Most faults die in the first.
FIRST_S, SECOND_S = 8.0, 45.0


def sources(root: Path, only: Iterable[str] = ()) -> list[str]:
    """Files that are mutated; `only` has names of packages, as `core`."""
    names, wanted = [], set(only)
    for package in PACKAGES:
        if not wanted or PurePosixPath(package).name in wanted:
            names += [path.relative_to(root).as_posix() for path in (root / package).rglob("*.py")]
    return sorted(name for name in names if not name.endswith("__main__.py"))


def drawn(mutants: Iterable[Mutant], texts: Mapping[str, str], seed: int) -> Iterator[Mutant]:
    """At most one mutant per line, in the order of the draw: a line, one of its operators, one of its places.

    A draw hangs on the text of the line alone: changes elsewhere leave it as it is. Operators that have many places, as
    arguments of a call, so weigh no more than a comparison.
    """
    of_line: dict[tuple[str, int], list[Mutant]] = defaultdict(list)
    for mutant in mutants:
        of_line[mutant.path, mutant.line].append(mutant)
    same: Counter[tuple[str, str]] = Counter()
    draws = []
    for (path, line), found in sorted(of_line.items()):
        text = texts[path].splitlines()[line - 1].strip()
        base = f"{seed} {path} {text} {same[path, text]}"
        same[path, text] += 1
        chosen = min(found, key=lambda one: (_draw(base, one.operator), _draw(base, one.operator, one.place)))
        draws.append((_draw(base), chosen))
    return (mutant for _, mutant in sorted(draws, key=lambda one: one[0]))


def sample(drawn: Iterable[Mutant], texts: Mapping[str, str], size: int, without: Equivalents) -> Iterator[Fault]:
    """The first `size` that change the program and are not known to make no difference."""
    left = count(1)
    for mutant in drawn:
        fault = fault_of(mutant, texts[mutant.path])
        if fault is not None and fault not in without:
            yield fault
            if next(left) >= size:
                return


def rounds(fault: Fault, tests: Sequence[TracedTest], texts: Mapping[str, str]) -> list[list[TracedTest]]:
    """Tests that run the line, those of the mirrored files first; in the second round more, and the mirrored files.

    A line outside functions runs on import: tests that run a function of its file, or of one that imports it, try it.
    A line that no traced test runs may run in a process: the mirrored folder tries it.
    """
    lines, local = statement_at(texts[fault.path], fault.line)
    lines = lines if local else function_lines(texts[fault.path])
    reaching = [test for test in tests if test.runs(fault.path, lines)]
    if not reaching and not local:
        users = [path for path, text in texts.items() if _module(fault.path) in _imported(text)]
        bodies = {path: function_lines(texts[path]) for path in users}
        reaching = [test for test in tests if any(test.runs(path, lines) for path, lines in bodies.items())]
    mirrored = [test for test in tests if is_mirror(test.file, fault.path)]
    if not reaching:
        mirrored += [test for test in tests if _in_mirrored_folder(test.file, fault.path)]
    near = set(reaching) & set(mirrored)
    first = affordable(near or reaching, FIRST_S)
    more = affordable(set(reaching) - set(first), SECOND_S)
    process = affordable(set(mirrored) - set(reaching), FIRST_S if reaching else SECOND_S)
    return [one for one in (first, [*more, *process]) if one]


def affordable(tests: Iterable[TracedTest], seconds: float) -> list[TracedTest]:
    """As many as take so long: the fastest of each file, then the second of each; file by file, the shortest first."""
    by_file = defaultdict(list)
    for test in sorted(tests, key=lambda test: (test.seconds, test.id)):
        by_file[test.file].append(test)
    turns = sorted((turn, test.seconds, test.id) for found in by_file.values() for turn, test in enumerate(found))
    chosen: set[str] = set()
    spent = 0.0
    for _, cost, name in turns:
        if spent + cost <= seconds or not chosen:
            chosen.add(name)
            spent += cost
    files = [[test for test in found if test.id in chosen] for found in by_file.values()]
    return [test for found in sorted(files, key=lambda found: sum(test.seconds for test in found)) for test in found]


def is_mirror(test_file: str, path: str) -> bool:
    """Return whether a test file mirrors a source: `tests/core/test_stream.py` for `gorgo/core/stream.py`."""
    folder, stem = _mirrored(path)
    test = PurePosixPath(test_file)
    return test.parent == folder / stem or (test.parent == folder and f"{test.stem}_".startswith(f"test_{stem}_"))


def _in_mirrored_folder(test_file: str, path: str) -> bool:
    return _mirrored(path)[0] in PurePosixPath(test_file).parents


def _mirrored(path: str) -> tuple[PurePosixPath, str]:
    source = PurePosixPath(path)
    inner = source.relative_to("gorgo") if path.startswith("gorgo/") else source
    return "tests" / inner.parent, source.stem


def _module(path: str) -> str:
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def _imported(source: str) -> set[str]:
    found = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ImportFrom)]
    return {node.module or "" for node in found}


def _draw(*parts: object) -> bytes:
    return hashlib.sha256("\0".join(map(str, parts)).encode()).digest()
