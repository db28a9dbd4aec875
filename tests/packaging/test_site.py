"""packaging/site: which pages the site has, that all their links lead somewhere, and what it is built with."""

from __future__ import annotations

import re
import runpy
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest

from tests.packaging.conftest import ROOT

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
