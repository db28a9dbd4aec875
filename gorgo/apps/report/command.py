"""From a folder to a page: what is read, what is drawn, where it goes.

Owns the order of things and the check that the extra `report` is there; imports matplotlib and jinja2 only after it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import import_module
from io import BytesIO
from pathlib import Path
from typing import Any

from gorgo.apps.report.find import find_results
from gorgo.config.atomic import PUBLIC, write_atomically
from gorgo.errors import MissingExtra, ReportError

#: By the end of the file's name.
PLOTS = (".svg", ".png", ".pdf")
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
    # Names of folders are shown in it, and need not be text.
    write_atomically(target, page(found).encode(errors="backslashreplace"), mode=PUBLIC)
    return target


def write_tuning_plot(path: Path, generations: Sequence[Mapping[str, Any]]) -> None:
    """Plots rows of `history.json`. Raises `MissingExtra`, `ReportError` for an unknown format, `OSError`."""
    require_extra()
    if path.suffix not in PLOTS or not generations:
        what = f"expected a name with {', '.join(PLOTS)}" if generations else "there is no generation to plot yet"
        raise ReportError(f"{path}: {what}")
    import matplotlib as mpl

    from gorgo.apps.report.runs import ReportGeneration
    from gorgo.apps.report.style import RC
    from gorgo.apps.report.tuning import tuning_plot

    names = ReportGeneration.__dataclass_fields__
    drawn = BytesIO()
    with mpl.rc_context(RC):
        plot = tuning_plot([ReportGeneration(**{name: row[name] for name in names}) for row in generations])
        plot.savefig(drawn, format=path.suffix.removeprefix("."))
    write_atomically(path, drawn.getvalue(), mode=PUBLIC)
