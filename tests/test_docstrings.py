"""Docstrings, comments and pages: names in back-ticks exist, and each example is collected as a test."""

from __future__ import annotations

import ast
import builtins
import doctest
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from keyword import iskeyword
from pathlib import Path

import pytest

from tests.documents import ROOT
from tests.sources import parsed

# --- Every module, class and function that a docstring or a comment names in back-ticks exists.
#
# A name in back-ticks is one of: a module of the project, by the end of its dotted name or of its path; a class,
# function, field, parameter or constant, with or without its class or module; a key of the configuration; a file; a
# name of the standard library or of a dependency. Local variables count in their own module. What belongs to other
# programs is in `OTHERS`.


FOLDERS = ("gorgo", "tuner", "experiments")
_TICKS = re.compile(r"(?<!`)`([^`\n]+)`(?!`)")
_COMMENT = re.compile(r"^\s*#.*|(?<=  )# .*", re.MULTILINE)
_DOTTED = re.compile(r"[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*")
_PATH = re.compile(r"[\w./-]+\.(?:py|md|ya?ml|jsonl?|js|html|jinja|proto|binpb)")
_WORD = re.compile(r"[A-Za-z_]\w*")
#: Strings of this length at most are keys, headers or labels, not prose.
_LONGEST_KEY = 80
#: Names of other programs, by whose they are.
OTHERS = {
    "Linux": {"net.ipv4.tcp_slow_start_after_idle"},
    "OpenAI's API": {"chat.completion.chunk", "stream_options.include_usage"},
    "Envoy": {"envoy.filters.http.ext_proc", "envoy.filters.http.lua", "HeaderMap", "HttpHeaders",
              "HeaderValueOption.HeaderAppendAction", "ProcessingMode.BodySendMode", "sse_to_metadata",
              "opentelemetry.proto"},
    "OpenTelemetry": {"OTEL_EXPORTER_OTLP_HEADERS"},
    "PyTorch": {"clip_grad_norm_", "ExponentialLR"},
    "Hugging Face": {"transformers", "bos_token", "eos_token", "tokenizer.json", "tokenizer_config.json",
                     "chat_template.jinja"},
    "vLLM": {"max_num_batched_tokens", "scheduler_reserve_full_isl", "prefix_cache_hits"},
    "llm-d": {"num_groups", "num_prompts_per_group"},
    "NVIDIA Dynamo": {"aisimulate"},
    "SGLang": {"cuda_graph_max_bs"},
    "ASGI": {"http.response.start"},
    "the code of the GORGO papers": {"GaussianESTuner", "route_least_load", "route_least_request",
                                     "route_prefix_cache"},
}  # fmt: skip


@dataclass(slots=True)
class Module:
    """The names of one module, and the texts that name others."""

    path: str
    texts: list[str] = field(default_factory=list)
    #: Each identifier of its code, and each word of its short strings.
    words: set[str] = field(default_factory=set)
    #: What other modules may name: definitions, parameters, fields, constants and keys.
    public: set[str] = field(default_factory=set)
    members: dict[str, set[str]] = field(default_factory=dict)
    bases: dict[str, set[str]] = field(default_factory=dict)
    #: Module or object behind each imported name.
    imported: dict[str, str] = field(default_factory=dict)


@dataclass(slots=True)
class Project:
    modules: dict[str, Module] = field(default_factory=dict)
    #: Modules by each end of their dotted name.
    ends: dict[str, list[Module]] = field(default_factory=lambda: defaultdict(list))
    public: set[str] = field(default_factory=set)
    members: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))
    bases: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))
    config_keys: set[str] = field(default_factory=set)


def read(path: str, source: str) -> Module:
    """Return what a module defines and says."""
    module = Module(path, texts=_COMMENT.findall(source))
    docstrings: set[ast.Constant] = set()
    tree = parsed(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and node.body:
            first = node.body[0]
            if (
                isinstance(first, ast.Expr)
                and isinstance(first.value, ast.Constant)
                and isinstance(first.value.value, str)
            ):
                docstrings.add(first.value)
                module.texts.append(first.value.value)
        match node:
            case ast.ClassDef():
                module.public.add(node.name)
                module.members[node.name] = set(_members(node))
                module.bases[node.name] = {base.id for base in node.bases if isinstance(base, ast.Name)}
                module.public |= module.members[node.name]
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                module.public.add(node.name)
            case ast.arg():
                module.public.add(node.arg)
            case ast.keyword(arg=str(name)):
                module.public.add(name)
            case ast.Import(names=names):
                module.imported |= {(one.asname or one.name).partition(".")[0]: one.name for one in names}
            case ast.ImportFrom(module=str(origin), names=names):
                module.imported |= {one.asname or one.name: f"{origin}.{one.name}" for one in names}
            case ast.Name(id=name):
                module.words.add(name)
            case ast.Attribute(attr=name):
                module.words.add(name)
            case ast.Constant(value=str(text)) if node not in docstrings and len(text) <= _LONGEST_KEY:
                module.public.update(_WORD.findall(text))
                module.public.update(part for part in text.split() if "." in part)
            case ast.Constant(value=bytes(data)) if len(data) <= _LONGEST_KEY:
                module.public.update(_WORD.findall(data.decode("latin-1")))
    for statement in tree.body:
        targets = statement.targets if isinstance(statement, ast.Assign) else [getattr(statement, "target", None)]
        for target in targets:
            module.public |= {node.id for node in ast.walk(target) if isinstance(node, ast.Name)} if target else set()
    module.words |= module.public | module.imported.keys()
    return module


def _members(cls: ast.ClassDef) -> Iterator[str]:
    for node in ast.walk(cls):
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                yield name
            case ast.AnnAssign(target=ast.Name(id=name)):
                yield name
            case ast.Assign(targets=targets):
                yield from (target.id for target in targets if isinstance(target, ast.Name))
            case ast.Attribute(value=ast.Name(id="self"), attr=name):
                yield name


def gather(sources: dict[str, str]) -> Project:
    """Return the names of all modules, by path."""
    project = Project()
    for path, source in sources.items():
        module = read(path, source)
        parts = [part for part in path.removesuffix(".py").split("/") if part != "__init__"]
        project.modules[".".join(parts)] = module
        for start in range(len(parts)):
            project.ends[".".join(parts[start:])].append(module)
        project.public |= module.public | module.imported.keys()
        for name, members in module.members.items():
            project.members[name] |= members
            project.bases[name] |= module.bases[name]
            if path.startswith("gorgo/config/"):
                project.config_keys |= members
    return project


def resolves(name: str, module: Module, project: Project) -> bool:
    """Return whether a text in back-ticks names something, or is no name at all."""
    name = name.removesuffix("()")
    if any(name in names for names in OTHERS.values()) or name in module.public:
        return True
    if _PATH.fullmatch(name):
        return _is_file(name) or name in project.public
    if not _DOTTED.fullmatch(name):
        return True
    first, *rest = name.split(".")
    if not rest:
        known = first in module.words or first in project.public or first in project.ends
        return known or hasattr(builtins, first) or iskeyword(first) or _is_importable(first)
    return (
        _in_own_module(name, project)
        or _in_class(first, rest, project)
        or (first in module.imported and _exists(module.imported[first], rest, project))
        or _exists(first, rest, project)
        or all(part in project.config_keys for part in (first, *rest))
        or (first in module.words and first not in project.ends and all(part in project.public for part in rest))
    )


def _in_own_module(name: str, project: Project) -> bool:
    parts = name.split(".")
    for end in range(len(parts), 0, -1):
        for module in project.ends.get(".".join(parts[:end]), ()):
            rest = parts[end:]
            if not rest or (rest[0] in module.public and (len(rest) == 1 or _in_class(rest[0], rest[1:], project))):
                return True
    return False


def _in_class(name: str, rest: list[str], project: Project) -> bool:
    """Return whether a class or one of its bases has the member."""
    if name not in project.members or len(rest) != 1:
        return False
    return rest[0] in project.members[name] or any(_in_class(base, rest, project) for base in project.bases[name])


def _exists(origin: str, rest: list[str], project: Project) -> bool:
    """Return whether an object of the project, of Python or of a dependency has such an attribute."""
    if origin.partition(".")[0] in FOLDERS:
        return _in_own_module(".".join([origin, *rest]), project)
    found: object = getattr(builtins, origin, None)
    if found is None:
        if not _is_importable(origin.partition(".")[0]):
            return False
        root, *rest = [*origin.split("."), *rest]
        try:
            found = import_module(root)
        except ModuleNotFoundError:
            return True  # of an extra that is not installed
    for part in rest:
        if not hasattr(found, part):
            try:
                found = import_module(f"{getattr(found, '__name__', '')}.{part}")
            except ImportError:
                return False
        else:
            found = getattr(found, part)
    return True


def _is_importable(name: str) -> bool:
    return name in sys.stdlib_module_names or name in _dependencies()


@cache
def _dependencies() -> frozenset[str]:
    """Return the top-level modules of others that the project imports."""
    project = _project()
    return frozenset(
        origin.partition(".")[0]
        for module in project.modules.values()
        for origin in module.imported.values()
        if origin.partition(".")[0] not in FOLDERS
    )


@cache
def _files() -> frozenset[str]:
    folders = (*FOLDERS, "tests", "docs", "datasets", "packaging", "examples", "terraform")
    found = [path for folder in folders for path in (ROOT / folder).rglob("*.*")]
    return frozenset(path.relative_to(ROOT).as_posix() for path in [*found, *ROOT.glob("*.*")])


def _is_file(name: str) -> bool:
    return any(path == name or path.endswith(f"/{name}") for path in _files())


@cache
def _project() -> Project:
    paths = [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))]
    return gather({path.relative_to(ROOT).as_posix(): path.read_text() for path in paths})


def unresolved(project: Project) -> list[str]:
    """Return the names that nothing has, with the module that names them."""
    return [
        f"{module.path}: `{name}`"
        for module in project.modules.values()
        for text in module.texts
        for name in _TICKS.findall(text)
        if not resolves(name, module, project)
    ]


def test_every_name_in_back_ticks_exists() -> None:
    assert unresolved(_project()) == []


_STALE = "gone.py core/gone.py core.gone pool.gone Pool.gone Gone gone_function() asyncio.gone gone"
_POOL = """import asyncio

class Pool:
    def take(self, size: int) -> None:
        self.free = size
"""


@pytest.mark.parametrize("stale", _STALE.split())
def test_a_name_that_nothing_has_is_found(stale: str) -> None:
    naming = f'"""See `{stale}`, `core/router.py`, `core.pool`, `pool.Pool`, `Pool.take`, `Pool.free` and `size`."""'
    project = gather({"gorgo/core/pool.py": _POOL, "gorgo/core/naming.py": naming})
    assert unresolved(project) == [f"gorgo/core/naming.py: `{stale}`"]


def _packages() -> list[str]:
    return sorted(path.parent.name for path in (ROOT / "gorgo").glob("*/__init__.py"))


#: Pages that name modules. The changes are history, which names what is gone.
PAGES = [
    *(ROOT / name for name in ("README.md", "DESIGN.md", "CONTRIBUTING.md", "SECURITY.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
    *(path for folder in ("datasets", "examples", "packaging", "terraform") for path in (ROOT / folder).rglob("*.md")),
]
#: A module or an object in one, by its dotted name; the first word is a folder of the code.
_OF_OURS = re.compile(rf"(?:{'|'.join(['gorgo', 'tuner', 'experiments', *_packages()])})(?:\.[A-Za-z_]\w*)+")
#: Values of the Helm chart, whose first word is that of a folder too.
_OF_THE_CHART = {"tuner.args", "tuner.history.secret"}


def unresolved_on_page(text: str, project: Project) -> list[str]:
    """Return the files of Python and the dotted names of a page that nothing has."""
    return [name for name in _TICKS.findall(text) if not _exists_for_a_page(name.removesuffix("()"), project)]


def _exists_for_a_page(name: str, project: Project) -> bool:
    if _PATH.fullmatch(name) and name.endswith(".py"):
        return _is_file(name)
    if not _OF_OURS.fullmatch(name) or name in _OF_THE_CHART:
        return True
    is_key = all(part in project.config_keys for part in name.split("."))
    return is_key or name in project.public or _is_file(name) or _in_own_module(name, project)


def test_every_module_that_a_page_names_exists() -> None:
    project = _project()
    found = [(path, name) for path in PAGES for name in unresolved_on_page(path.read_text(), project)]
    assert [f"{path.relative_to(ROOT)}: `{name}`" for path, name in found] == []


def test_a_module_of_a_page_that_is_gone_is_found() -> None:
    text = (
        "`gone.py`, `core.latency.gone`, `gorgo.gone()` beside `core/router.py`, `core.latency.ttft` and `proxy.policy`"
    )
    assert unresolved_on_page(text, _project()) == ["gone.py", "core.latency.gone", "gorgo.gone()"]


#: A file of tests as prose names it, with or without back-ticks; not a pattern.
_TEST_FILE = re.compile(r"(?<![\w*])(?:[\w/]+/)?test_\w+\.py\b")


def test_every_file_of_tests_that_a_comment_names_exists() -> None:
    folders = (*FOLDERS, "tests", "packaging")
    paths = [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]
    assert [
        f"{path.relative_to(ROOT)}: {name}"
        for path in paths
        for comment in _COMMENT.findall(path.read_text())
        for name in _TEST_FILE.findall(comment)
        if not _is_file(name)
    ] == []


def test_every_name_of_another_program_is_in_use() -> None:
    texts = "\n".join(text for module in _project().modules.values() for text in module.texts)
    assert [name for names in OTHERS.values() for name in names if f"`{name}`" not in texts] == []


# --- Examples in docstrings are tests: pytest collects each of them, from all that is shipped.


#: Lines of examples that the packages have at least; a release with fewer has lost some.
EXAMPLE_LINES = 200


def _lines() -> Counter[str]:
    """Lines that begin an example, by module of the shipped packages."""
    files = [path for package in ("gorgo", "tuner") for path in (ROOT / package).rglob("*.py")]
    counts = {path: path.read_text().count(">>> ") for path in files}
    return Counter({_module(path): count for path, count in counts.items() if count})


def _module(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def test_a_bare_run_of_pytest_collects_the_examples_of_both_packages(pytestconfig: pytest.Config) -> None:
    assert pytestconfig.getoption("doctestmodules")
    assert {"tests", "gorgo", "tuner"} <= set(pytestconfig.getini("testpaths"))


def test_every_example_is_where_it_is_collected_and_none_is_left_out() -> None:
    written = _lines()
    tests = [test for name in written for test in doctest.DocTestFinder().find(import_module(name), name)]
    runs = [
        (test.globs["__name__"], example)
        for test in tests
        for example in test.examples
        if doctest.SKIP not in example.options
    ]
    assert Counter(module for module, _ in runs) == written
    assert len(runs) >= EXAMPLE_LINES
