"""From a folder to a page: what is read, what is drawn, where it goes.

Owns the order of things and the check that the extra `report` is there; imports matplotlib and jinja2 only after it.
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

from gorgo.apps.report.find import find_results
from gorgo.errors import MissingExtra

EXTRA = ("matplotlib", "jinja2")


def require_extra() -> None:
    """Raises `MissingExtra`, which says what to install, if plots or page cannot be made."""
    for package in EXTRA:
        try:
            import_module(package)
        except ModuleNotFoundError as error:
            raise MissingExtra(
                f"a report needs {package}, which is not installed: pip install 'gorgo[report]'"
            ) from error


def write_report(folder: Path, *, out: Path | None = None, show_progress: bool = True) -> Path:
    """Reads everything below `folder` and writes the page; returns where it is (`report.html` there by default).

    Raises `MissingExtra` without the extra `report`, and `ReportError` for a folder without results or a damaged file.
    """
    require_extra()
    from gorgo.apps.report.page import page

    found = find_results(folder, show_progress=show_progress)
    target = out or folder / "report.html"
    target.write_text(page(found), encoding="utf-8")
    return target
