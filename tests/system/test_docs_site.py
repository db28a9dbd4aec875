"""`make docs`: the site builds without a broken link, has every page and finds words in them."""

from __future__ import annotations

import json
import subprocess

from tests.documents import ROOT

#: Packages of the lock, the script for diagrams, and forty pages.
TIMEOUT_S = 600


def test_make_docs_builds_a_site_with_search() -> None:
    done = subprocess.run(["make", "docs"], cwd=ROOT, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    site = ROOT / "build/site"
    for page in (
        "index.html",
        "docs/index.html",
        "docs/migrating/index.html",
        "DESIGN/index.html",
        "datasets/index.html",
    ):
        assert (site / page).is_file(), page
    found = json.loads((site / "search/search_index.json").read_text())["docs"]
    assert any("round robin" in section["text"] and section["location"].startswith("#") for section in found)
    assert any(section["location"].startswith("docs/policies/gorgo-ms/") for section in found)
