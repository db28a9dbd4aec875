"""The programs of packaging/: compiled modules, lock files, the site, and the health check."""

from __future__ import annotations

import ast
import builtins
import http.server
import json
import os
import re
import runpy
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import grpc
import pytest
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from tests.packaging.conftest import ROOT
from tests.proxy.authority import Authority, needs_openssl
from tests.sources import syntax_tree

# --- packaging/compiled.py: which modules it compiles, and that they simulate as the sources do.


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
    """A protocol for isinstance, structs read by their annotations, tuples in a class body, halves of characters."""
    for path in ALL_MODULES:
        source = (ROOT / path).read_text()
        assert "@runtime_checkable" not in source, path
        assert re.search(r"^class .*\bStruct\b", source, re.MULTILINE) is None, path
        for node in ast.walk(syntax_tree(ROOT / path)):
            statements = node.body if isinstance(node, ast.ClassDef) else []
            targets = [target for line in statements if isinstance(line, ast.Assign) for target in line.targets]
            assert all(isinstance(target, ast.Name) for target in targets), f"{path}: tuple in a class body"
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                assert not re.search("[\ud800-\udfff]", node.value), f"{path}:{node.lineno}: half a character in a text"


@pytest.mark.system
def test_mypyc_accepts_every_module(tmp_path: Path) -> None:
    """It refuses more than mypy does: a variable that is an int here and a float there."""
    program = "import sys; from mypyc.build import mypycify; mypycify(sys.argv[2:], target_dir=sys.argv[1])"
    config = ["--config-file", str(ROOT / "packaging/compiled.ini")]
    command = [sys.executable, "-c", program, str(tmp_path), *config, *ALL_MODULES]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, [line for line in done.stdout.splitlines() if "error:" in line]


def test_no_compiled_class_adds_fields_to_an_ordered_dict() -> None:
    """Mypyc 2.4 lays its fields where those of `OrderedDict` are, and the first entry ends the process."""
    found = [
        f"{path}: {node.name}"
        for path in ALL_MODULES
        for node in ast.walk(syntax_tree(ROOT / path))
        if isinstance(node, ast.ClassDef)
        for base in node.bases
        if ast.unparse(base).partition("[")[0].rpartition(".")[2] == "OrderedDict"
    ]
    assert found == []


def test_no_compiled_class_annotates_a_field_with_a_type_that_mypyc_cannot_load() -> None:
    """mypyc 2.4 looks other built-in types up in the module, and no compiled module could be imported: a KeyError."""
    loaded = {"bool", "bytearray", "bytes", "dict", "float", "frozenset", "int", "list", "range", "set"}
    loaded |= {"str", "tuple", "type"}
    found = [
        f"{path}:{field.lineno}: {name}"
        for path in ALL_MODULES
        for node in ast.walk(syntax_tree(ROOT / path))
        if isinstance(node, ast.ClassDef)
        for field in node.body
        if isinstance(field, ast.AnnAssign)
        and hasattr(builtins, name := ast.unparse(field.annotation).partition("[")[0])
        and name not in loaded
    ]
    assert found == []


def test_no_compiled_coroutine_waits_where_an_exception_is_handled() -> None:
    """mypyc 2.4 raises another coroutine's exception there, or none: the request then waits for ever."""
    found = [f"{path}:{line}" for path in ALL_MODULES for line in _waits_in_handlers(syntax_tree(ROOT / path))]
    assert found == []
    handler = syntax_tree(ROOT / "gorgo/proxy/server.py")
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
        tree = syntax_tree(ROOT / path)
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


# --- packaging/locked.py: which lines of a lock file some requirements need.


LOCKED = runpy.run_path(str(ROOT / "packaging/locked.py"))
LOCK = """\
alpha==1.0 \\
    --hash=sha256:aa \\
    --hash=sha256:ab
    # via
    #   beta
Beta_Two==2.0 ; sys_platform == 'linux' \\
    --hash=sha256:ba
    # via gorgo-router (pyproject.toml)
"""


def planned(*names: str, direct: bool = False) -> list[dict[str, Any]]:
    return [{"metadata": {"name": name}, "is_direct": direct} for name in names]


def test_what_pip_would_install_is_copied_with_its_hashes() -> None:
    assert LOCKED["picked"](LOCK, planned("alpha")) == (
        "alpha==1.0 \\\n    --hash=sha256:aa \\\n    --hash=sha256:ab\n"
    )


def test_names_are_the_same_however_they_are_spelt() -> None:
    assert LOCKED["picked"](LOCK, planned("beta-two")).startswith("Beta_Two==2.0 ; sys_platform == 'linux' \\\n")


def test_a_file_that_was_named_is_in_no_lock() -> None:
    assert LOCKED["picked"](LOCK, planned("gorgo-router", direct=True)) == ""


def test_what_the_lock_lacks_is_named() -> None:
    with pytest.raises(SystemExit, match=r"requirements\.lock lacks delta, gamma"):
        LOCKED["picked"](LOCK, planned("gamma", "alpha", "delta"))


def test_constraints_are_versions_without_hashes() -> None:
    assert LOCKED["constraints"](LOCK) == "alpha==1.0\nBeta_Two==2.0 ; sys_platform == 'linux'\n"


def test_every_package_of_the_lock_is_read() -> None:
    lock = (ROOT / "requirements.lock").read_text()
    assert len(LOCKED["constraints"](lock).splitlines()) == sum("==" in line[:60] for line in lock.splitlines())


def test_every_installation_from_the_lock_resolves_nothing_so_that_a_new_release_elsewhere_breaks_none() -> None:
    installs = [line for line in (ROOT / "Makefile").read_text().splitlines() if "--require-hashes" in line]
    assert len(installs) == 3, "the environment, the one that tests the wheel, and the one of the documentation"
    assert all("--no-deps" in line for line in installs)


# --- packaging/site: which pages the site has, that all their links lead somewhere, and what it is built with.


SITE = ROOT / "packaging/site"
BUILD = runpy.run_path(str(SITE / "build.py"))
CONFIG = (SITE / "mkdocs.yml").read_text()
_LINK = re.compile(r"\]\(([^)\s]+)\)")
_FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)


@pytest.fixture(scope="module")
def copied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The pages as the site has them."""
    folder = tmp_path_factory.mktemp("site") / "pages"
    BUILD["copy_pages"](folder)
    return folder


def in_navigation() -> list[str]:
    return re.findall(r"^      - (?:[^:\n]+: )?(\S+\.md)$", CONFIG, re.MULTILINE)


def test_every_page_has_one_place_in_the_navigation() -> None:
    assert sorted(in_navigation()) == sorted(str(page) for page in BUILD["pages"]())


def test_every_link_of_the_site_leads_to_a_file_or_a_heading(copied: Path) -> None:
    wrong = [f"{page.relative_to(copied)}: {link}" for page in copied.rglob("*.md") for link in broken_links(page)]
    assert wrong == []


def broken_links(page: Path) -> Iterator[str]:
    for link in _LINK.findall(_FENCE.sub("", page.read_text())):
        path, _, anchor = unquote(link).partition("#")
        target = page.parent / path if path else page
        if ":" in link.split("/")[0]:
            continue
        if not target.is_file() or (anchor and anchor not in anchors(target)):
            yield link


def anchors(page: Path) -> set[str]:
    """Ids of headings as the site makes them: a repeated one gets a number."""
    found: set[str] = set()
    for heading in re.findall(r"^#+ (.*)$", _FENCE.sub("", page.read_text()), re.MULTILINE):
        bare = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)
        slug = re.sub(r"[^\w -]", "", bare.lower()).replace(" ", "-")
        number = 0
        while (one := f"{slug}_{number}" if number else slug) in found:
            number += 1
        found.add(one)
    return found


def test_a_broken_link_and_a_broken_anchor_are_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "# One `two`\n\n[a](#one-two) [b](gone.md) [c](#gone) [d](https://example.org)\n```\n[e](gone.md)\n```\n"
    )
    assert list(broken_links(page)) == ["gone.md", "#gone"]


@pytest.mark.parametrize(
    ("written", "shown"),
    [
        ("[figures](figures/) and [one](figures/demo.json)", "figures and [one](figures/demo.json)"),
        ("[up](../regions.yaml), [out](https://example.org/a)", "[up](../regions.yaml), [out](https://example.org/a)"),
        ("[`kubernetes`](../packaging/kubernetes)", "`kubernetes`"),
    ],
)
def test_links_to_folders_become_text(written: str, shown: str) -> None:
    assert BUILD["for_site"](Path("docs/README.md"), written) == shown


def test_no_line_of_a_sequence_diagram_has_a_semicolon_which_would_end_it() -> None:
    """mermaid then draws nothing of the whole diagram."""
    texts = {page: (ROOT / page).read_text() for page in BUILD["pages"]()}
    diagrams = [
        (page, line)
        for page, text in texts.items()
        for diagram in re.findall(r"^```mermaid\nsequenceDiagram\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
        for line in diagram.splitlines()
    ]
    assert [(page, line) for page, line in diagrams if ";" in line] == []


def test_files_that_pages_link_to_are_copied_with_them(copied: Path) -> None:
    assert (copied / "docs/comparison.svg").read_bytes() == (ROOT / "docs/comparison.svg").read_bytes()
    assert (copied / "regions.yaml").exists()
    assert not (copied / "gorgo").exists()


def test_the_site_is_built_with_locked_packages_and_loads_nothing_from_elsewhere() -> None:
    lock = (SITE / "requirements.lock").read_text()
    pinned = re.findall(r"^([\w.-]+)==", lock, re.MULTILINE)
    assert "mkdocs-material" in pinned
    assert len(re.findall(r"^[\w.-]+==\S+ \\\n    --hash=sha256:", lock, re.MULTILINE)) == len(pinned)
    assert "://" not in lock + CONFIG
    assert re.search(r"^  font: false$", CONFIG, re.MULTILINE)


def test_npm_that_is_missing_or_fails_leaves_the_diagrams_to_the_reader_s_network(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def no_npm(*_: Any, **__: Any) -> None:
        raise FileNotFoundError("npm")

    monkeypatch.setattr(BUILD["subprocess"], "run", no_npm)
    assert BUILD["mermaid"]() is None
    assert capsys.readouterr().err == "docs: diagrams will need the network when they are read: npm\n"
    assert "extra_javascript" not in BUILD["config"](False)
    assert BUILD["config"](True).endswith("\nextra_javascript: [mermaid.min.js]\n")


# --- packaging/healthcheck.py as a container engine runs it: by its exit code.


class _Answers(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200 if self.path == "/ready" else 503)
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        """Nothing: the test's output is its own."""


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with http.server.HTTPServer(("127.0.0.1", 0), _Answers) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def checked(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-I", str(ROOT / "packaging/healthcheck.py"), *words]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_who_answers_well_is_healthy(url: str) -> None:
    done = checked(f"{url}/ready")
    assert (done.returncode, done.stderr) == (0, "")


def test_who_answers_badly_is_not_and_says_why(url: str) -> None:
    done = checked(f"{url}/stopping")
    assert done.returncode == 1
    assert "503" in done.stderr
    assert "Traceback" not in done.stderr


def test_who_does_not_answer_is_not(url: str) -> None:
    done = checked("http://127.0.0.1:1/ready")
    assert done.returncode == 1
    assert "refused" in done.stderr


@pytest.mark.parametrize("words", [[], ["file:///etc/passwd"], ["http://a", "http://b"]])
def test_anything_else_than_an_address_is_refused(words: list[str]) -> None:
    done = checked(*words)
    assert done.returncode == 1
    assert "usage" in done.stderr


# -- gRPC
@pytest.fixture(scope="module", params=["grpc", pytest.param("grpcs", marks=needs_openssl)])
def picker(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A gRPC server with the health service: one name serves, one does not."""
    server = grpc.server(ThreadPoolExecutor(1))
    servicer = health.HealthServicer()
    servicer.set("liveness", health_pb2.HealthCheckResponse.SERVING)
    servicer.set("readiness", health_pb2.HealthCheckResponse.NOT_SERVING)
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    if request.param == "grpc":
        port = server.add_insecure_port("127.0.0.1:0")
    else:
        chain, key = (Path(path).read_bytes() for path in Authority(tmp_path_factory.mktemp("tls")).pair("picker"))
        credentials = grpc.ssl_server_credentials([(key, chain)])
        port = server.add_secure_port("127.0.0.1:0", credentials)
    server.start()
    yield f"{request.param}://127.0.0.1:{port}"
    server.stop(None).wait()


def test_picker_that_serves_is_healthy(picker: str) -> None:
    done = checked(f"{picker}/liveness")
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("service", ["readiness", "no-such"])
def test_picker_that_does_not_serve_is_not_and_says_so(picker: str, service: str) -> None:
    done = checked(f"{picker}/{service}")
    assert (done.returncode, done.stderr) == (1, f"{picker}/{service}: not serving, or no such service\n")


def test_listener_of_http_1_is_no_picker(url: str) -> None:
    done = checked(url.replace("http:", "grpc:") + "/liveness")
    assert done.returncode == 1
    assert "Traceback" not in done.stderr


def test_picker_that_is_not_there_is_not_healthy() -> None:
    assert "refused" in checked("grpc://127.0.0.1:1/liveness").stderr
