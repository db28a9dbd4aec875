"""The documentation as a site in build/site: `make docs`, with the mkdocs-material of requirements.lock beside this.

    python packaging/site/build.py

Copies the pages of the repository, in the same folders, with the files that they link to, then runs mkdocs over them;
a broken link or anchor ends it with exit code 1. Links to folders are of use in the repository alone: in the copy they
become code. Diagrams are drawn in the reader's browser by mermaid, which npm brings if there is one; without it the
page asks a public server for the script when it is read.
"""

from __future__ import annotations

import base64
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
HERE = Path(__file__).parent
PAGES = ROOT / "build/site-pages"
#: Pages outside docs/.
OTHERS = (
    "README.md",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "DESIGN.md",
    "SECURITY.md",
    "datasets/README.md",
    "examples/README.md",
    "packaging/README.md",
    "terraform/README.md",
)
#: The script for diagrams, and the SHA-512 of its package as npm's registry states it.
MERMAID = "mermaid@11.6.0"
MERMAID_SHA512 = "PE8hGUy1LDlWIHWBP05SFdqUHGmRcCcK4IzpOKPE35eOw+G9zZgcnMpyunJVUEOgb//KBORPjysKndw8bFLuRg=="
#: Its download is 14 MB.
NPM_TIMEOUT_S = 120

_LINK = re.compile(r"(?P<text>\[[^\]]*\])\((?P<target>[^)\s#]+)(?P<anchor>#[^)\s]*)?\)")


def pages() -> list[Path]:
    """Return the paths of all pages of the site, relative to the root of the repository."""
    inside = sorted(path.relative_to(ROOT) for path in (ROOT / "docs").rglob("*.md"))
    return [*map(Path, OTHERS), *inside]


def linked_files(page: Path, text: str) -> Iterator[Path]:
    """Yield the files other than pages to which a page links, relative to the root of the repository."""
    for link in _LINK.finditer(text):
        target = _target(page, link["target"])
        if target is not None and target.is_file() and target.suffix != ".md":
            yield target.relative_to(ROOT)


def for_site(page: Path, text: str) -> str:
    """Return a page as the site has it: without links to folders."""

    def replaced(link: re.Match[str]) -> str:
        target = _target(page, link["target"])
        return link["text"][1:-1] if target is not None and target.is_dir() else link[0]

    return _LINK.sub(replaced, text)


def _target(page: Path, link: str) -> Path | None:
    """Return where a link leads; None if that is outside the repository."""
    if ":" in link:
        return None
    target = (ROOT / page.parent / link).resolve()
    return target if target.is_relative_to(ROOT) else None


def copy_pages(folder: Path) -> None:
    """Write all pages and the files that they link to into a new folder."""
    shutil.rmtree(folder, ignore_errors=True)
    for page in pages():
        text = (ROOT / page).read_text()
        _write(folder / page, for_site(page, text).encode())
        for file in linked_files(page, text):
            _write(folder / file, (ROOT / file).read_bytes())
    _write(folder / "site.css", (HERE / "site.css").read_bytes())


def _write(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)


def mermaid() -> bytes | None:
    """Return the script for diagrams; None, with a line on stderr, if npm cannot bring it.

    Raises `SystemExit` if npm brings another file than expected.
    """
    with tempfile.TemporaryDirectory() as folder:
        try:
            npm = ["npm", "pack", "--silent", "--pack-destination", folder, MERMAID]
            subprocess.run(npm, check=True, timeout=NPM_TIMEOUT_S, stdout=subprocess.DEVNULL)
        except (OSError, subprocess.SubprocessError) as error:
            sys.stderr.write(f"docs: diagrams will need the network when they are read: {error}\n")
            return None
        (package,) = Path(folder).iterdir()
        digest = base64.b64encode(hashlib.sha512(package.read_bytes()).digest()).decode()
        if digest != MERMAID_SHA512:
            raise SystemExit(f"docs: {MERMAID} has another digest than expected: {digest}")
        with tarfile.open(package) as archive:
            script = archive.extractfile("package/dist/mermaid.min.js")
            assert script is not None
            return script.read()


def config(with_mermaid: bool) -> str:
    text = (HERE / "mkdocs.yml").read_text()
    return text + "\nextra_javascript: [mermaid.min.js]\n" if with_mermaid else text


def main() -> None:
    copy_pages(PAGES)
    script = mermaid()
    if script is not None:
        _write(PAGES / "mermaid.min.js", script)
    # Paths in the file are relative to its folder, so the copy lies as deep.
    made = ROOT / "build/site-config/mkdocs.yml"
    _write(made, config(script is not None).encode())
    mkdocs = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--config-file", str(made)]
    quiet = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    sys.exit(subprocess.run(mkdocs, check=False, cwd=ROOT, env=quiet).returncode)


if __name__ == "__main__":
    main()
